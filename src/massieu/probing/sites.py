"""Where a model computes attention: each site's block, layer, kind and sizes, found by watching one forward pass.

Nothing is decided by what a module or a class is called. Layers come from the nesting of module lists and from how often a
block was called; the decoder of an encoder–decoder is the stack that attends to another sequence.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from massieu.probing.attention_call import AttentionCall, AttentionSite
from massieu.probing.model import decoder_given
from massieu.probing.routes import capturing
from massieu.probing.watching import hooked


@dataclass(frozen=True)
class SiteInfo:
    """An attention site and where it sits: its block, the index of that block in its stack, and its sizes.

    Attributes:
        in_decoder: the queries are tokens of the decoder of a model that was given decoder tokens too.
        value_sets: how many sets of values the same attention weights are applied to; differential attention has two.
    """

    index: int
    site: AttentionSite
    block: str
    layer: int
    kind: str  # "self", "causal" or "cross"
    heads: int
    key_heads: int
    head_size: int
    value_size: int
    in_decoder: bool = False
    value_sets: int = 1


@dataclass(eq=False)
class FirstPass:
    """What one forward pass showed: its attention calls in order, and which modules attend to another sequence.

    Attributes:
        decoder_tokens: the model was given tokens for a decoder beside those for the encoder.
        visits: for each call, how often its module's forward had been entered by then.
        output: the model's.
        unexplained: keyword arguments of attention that are not known.
    """

    decoder_tokens: bool
    calls: list[AttentionCall] = field(default_factory=list)
    visits: list[int] = field(default_factory=list)
    cross: set[nn.Module] = field(default_factory=set)
    output: Any = None
    unexplained: set[str] = field(default_factory=set)


def first_pass(model: nn.Module, prepared: dict[str, Any]) -> FirstPass:
    """Run a model once and record where it attends.

    Args:
        prepared: what its forward is called with, from `model_inputs`.
    """
    found = FirstPass(decoder_given(prepared))
    entered = Counter[nn.Module]()

    def enter(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        entered[module] += 1
        if any(keywords.get(name) is not None for name in ("key_value_states", "encoder_hidden_states")):
            found.cross.add(module)

    def attend(call: AttentionCall) -> None:
        found.calls.append(call)
        found.visits.append(entered[call.module])

    with torch.no_grad(), hooked(model.modules(), before=enter), capturing(model, attend) as capture:
        found.output = model(**prepared)
    found.unexplained = capture.unexplained
    return found


def find_sites(model: nn.Module, seen: FirstPass) -> list[SiteInfo]:
    """Place every attention site of one forward pass."""
    items = _list_items(model)
    names = list(dict.fromkeys(call.site.module_name for call in seen.calls))
    layers: dict[str, dict[tuple[str, int], int]] = {}
    sets = Counter(call.site for call in seen.calls)
    blocks = {name: _block_of(name, items, names) for name in names}
    kinds = {call.site: _kind(call, seen.cross) for call in reversed(seen.calls)}
    decoders = {_stack_of(blocks[site.module_name]) for site, kind in kinds.items() if kind == "cross"}
    found: list[SiteInfo] = []
    for call, visit in zip(seen.calls, seen.visits, strict=True):
        block = blocks[call.site.module_name]
        stack = _stack_of(block)
        known = layers.setdefault(stack, {})
        layer = known.setdefault((block, visit), len(known))
        if call.repeated:
            continue
        sizes = (call.query.shape[1], call.key.shape[1], call.query.shape[3], call.value.shape[3])
        decoder = seen.decoder_tokens and stack in decoders
        found.append(SiteInfo(len(found), call.site, block, layer, kinds[call.site], *sizes, decoder, sets[call.site]))
    return found


def _kind(call: AttentionCall, cross: set[nn.Module]) -> str:
    if call.module in cross or call.key.shape[2] != call.query.shape[2]:
        return "cross"
    if call.key.shape[2] < 2:
        return "causal" if call.is_causal else "self"
    return "self" if bool(call.visible().triu(1).any()) else "causal"


def _list_items(model: nn.Module) -> list[str]:
    """Names of all modules that are items of a ``ModuleList``, outermost first."""
    return [
        f"{name}.{child}" if name else child
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for child, _ in module.named_children()
    ]


def inside(name: str, parent: str) -> bool:
    """Whether a module's name is another's, or that of a module within it."""
    return name == parent or name.startswith(parent + ".")


def _block_of(module_name: str, items: Sequence[str], attention_names: Sequence[str]) -> str:
    """The outermost list item around an attention module in which no two attention modules have the same last name.

    Where there is none, as with self-attention and cross-attention of one name in one block, it is the innermost item.
    """
    around = [item for item in items if inside(module_name, item)]
    for item in around:
        last = [n.rsplit(".", 1)[-1] for n in attention_names if inside(n, item)]
        if len(last) == len(set(last)):
            return item
    return around[-1] if around else module_name.rpartition(".")[0] or module_name


def _stack_of(block: str) -> str:
    parts = block.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0]]) if numbers else block
