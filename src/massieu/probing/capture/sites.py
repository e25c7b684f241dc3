"""Where a model computes attention: each site's block, layer, kind and sizes, found by watching one forward pass.

Nothing is decided by what a module or a class is called. Layers come from the nesting of module lists and from how often a
block was called; the decoder of an encoder–decoder is the stack that attends to another sequence.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from massieu.probing.capture.attention_call import AttentionCall, AttentionSite
from massieu.probing.capture.capture import Capture, replayed
from massieu.probing.capture.layout import tokens_first
from massieu.probing.capture.routes import capturing
from massieu.probing.model.forward import decoder_given, run_first
from massieu.probing.model.watching import hooked, mapped, same_tensor


@dataclass(frozen=True)
class SiteInfo:
    """An attention site and where it sits: its block, the index of that block in its stack, and its sizes.

    Attributes:
        in_decoder: the queries are tokens of the decoder of a model that was given decoder tokens too.
        value_sets: how many sets of values the same attention weights are applied to; differential attention has two.
        route, grade, moving: of its calls, as `AttentionCall` has them.
        tokens_first: its module is given tokens as (L, B, D); None where that cannot be known.
        prefix: keys that stand before those of its own tokens, as prefix tuning puts there.
        apart: its heads have different log-weights, as under ALiBi, so that one cannot stand for another.
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
    route: str = "interface"
    grade: str = "full"
    moving: bool = False
    tokens_first: bool | None = False
    prefix: int = 0
    apart: bool = False

    @property
    def itself(self) -> bool:
        """Whether its keys are those of its queries' tokens, one for one."""
        return self.kind != "cross" and not self.prefix


@dataclass(frozen=True, eq=False)
class SeenCall:
    """What says where a call stands and what it is; its tensors are not kept, of all layers they would be too many.

    Attributes:
        visit: how often its module's forward had been entered by then.
        sequences: how many it was of.
        tokens_first: as `SiteInfo` has it.
        noted: what `look` of `first_pass` made of it.
        heads, key_heads, head_size, value_size, prefix, apart: as `SiteInfo` has them.
        kind: "self", "causal" or "cross", by its lengths and masks alone.
        route, grade, moving, repeated: as `AttentionCall` has them.
    """

    site: AttentionSite
    module: nn.Module
    visit: int
    sequences: int
    tokens_first: bool | None
    noted: Any
    heads: int
    key_heads: int
    head_size: int
    value_size: int
    kind: str
    prefix: int
    apart: bool
    route: str
    grade: str
    moving: bool
    repeated: bool

    @classmethod
    def of(cls, call: AttentionCall, *, visit: int, state: Tensor | None, noted: Any) -> "SeenCall":
        """Look at a call.

        Args:
            state: the tokens that its module was given.
        """
        kind = _kind(call)
        return cls(
            site=call.site,
            module=call.module,
            visit=visit,
            sequences=call.query.shape[0],
            tokens_first=tokens_first(call, state),
            noted=noted,
            heads=call.query.shape[1],
            key_heads=call.key.shape[1],
            head_size=call.query.shape[3],
            value_size=call.value.shape[3],
            kind=kind,
            prefix=call.key.shape[2] - call.query.shape[2] if kind == "causal" else 0,
            apart=_apart(call),
            route=call.route,
            grade=call.grade,
            moving=call.moving,
            repeated=call.repeated,
        )


@dataclass(eq=False)
class FirstPass:
    """What one forward pass showed: its attention calls in order, and which modules attend to another sequence.

    Attributes:
        decoder_tokens: the model was given tokens for a decoder beside those for the encoder.
        output: the model's.
        unexplained: keyword arguments of attention that are not known.
        refused: modules whose attention cannot be read, with the reason.
    """

    decoder_tokens: bool
    calls: list[SeenCall] = field(default_factory=list)
    cross: set[nn.Module] = field(default_factory=set)
    output: Any = None
    unexplained: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def sequences(self) -> list[int]:
        """For each call, how many sequences it was of."""
        return [call.sequences for call in self.calls]

    @property
    def noted(self) -> list[Any]:
        """For each call, what `look` of `first_pass` made of it."""
        return [call.noted for call in self.calls]


def first_pass(
    model: nn.Module,
    prepared: dict[str, Any],
    look: Callable[[AttentionCall], Any] | None = None,
) -> FirstPass:
    """Run a model once and record where it attends.

    Args:
        prepared: what its forward is called with, from `model_inputs`.
        look: is shown each call with its tensors.
    """
    seen = FirstPass(decoder_given(prepared))
    entered = Counter[nn.Module]()
    states: dict[nn.Module, Tensor | None] = {}
    # Modules under way whose attention did not come through the interface, which would say by keywords what they attend to.
    tapped: set[nn.Module] = set()

    def enter(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        entered[module] += 1
        states[module] = hidden_state(arguments, keywords)
        if any(keywords.get(name) is not None for name in ("key_value_states", "encoder_hidden_states")):
            seen.cross.add(module)

    def leave(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], _: Any) -> None:
        if module in tapped and _crosses(capture, module, arguments, keywords):
            seen.cross.add(module)
        tapped.discard(module)
        states.pop(module, None)  # else every activation of the pass would stay until its end

    def attend(call: AttentionCall) -> None:
        module = call.module
        if call.route != "interface":
            tapped.add(module)
        noted = None if look is None else look(call)
        seen.calls.append(SeenCall.of(call, visit=entered[module], state=states.get(module), noted=noted))

    with torch.no_grad(), capturing(model, attend) as capture, hooked(model.modules(), before=enter, after=leave):
        seen.output = run_first(model, prepared)
    seen.unexplained = capture.unexplained
    seen.refused = dict(capture.refused)
    # Of a module of which a part cannot be read, the rest is not what it attends to.
    seen.calls = [call for call in seen.calls if call.site.module_name not in seen.refused]
    return seen


def hidden_state(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor | None:
    """The tokens that a module is given: the first tensor of three dimensions and floating-point numbers."""
    candidates = arguments[:1] or (keywords.get("hidden_states"), *keywords.values())
    return next((value for value in candidates if _has_form_of_tokens(value)), None)


def _has_form_of_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()


def _crosses(capture: Capture, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Whether some tensors of the form of its tokens make a module's keys, and not its queries: another sequence.

    These are the first of them, or the others.
    """
    tokens: list[Tensor] = []

    def collect(value: Tensor) -> Tensor:
        if _has_form_of_tokens(value):
            tokens.append(value)
        return value

    mapped((arguments, keywords), collect)
    # TransformerLens applies one norm for queries, keys and values each: other tensors, and the same numbers.
    if all(same_tensor(value, tokens[0]) or torch.equal(value, tokens[0]) for value in tokens):
        return False

    def query_and_key(change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        changed_keywords = {name: mapped(value, change) for name, value in keywords.items()}
        query, key, _ = replayed(capture, module, mapped(arguments, change), changed_keywords)
        return query, key

    def change(value: Tensor, *, first: bool) -> Tensor:
        """Other numbers for the first of the tensors, or for the others."""
        if _has_form_of_tokens(value) and same_tensor(value, tokens[0]) is first:
            return 2 * value + 1
        return value

    try:
        query, key = query_and_key(lambda value: value)
        for first in (False, True):
            other_query, other_key = query_and_key(partial(change, first=first))
            if torch.equal(query, other_query) and not torch.equal(key, other_key):
                return True
    except Exception:  # of whatever class the module raises, called by itself or with other numbers
        return False
    return False


def find_sites(model: nn.Module, seen: FirstPass) -> list[SiteInfo]:
    """Place every attention site of one forward pass."""
    items = _list_items(model)
    module_names = list(dict.fromkeys(call.site.module_name for call in seen.calls))
    blocks = {name: _block_of(name, items, module_names) for name in module_names}
    value_sets = Counter(call.site for call in seen.calls)
    # The first call of a site says of which kind it is.
    kinds = {call.site: "cross" if call.module in seen.cross else call.kind for call in reversed(seen.calls)}
    decoders = {stack_of(blocks[site.module_name]) for site, kind in kinds.items() if kind == "cross"}
    # By stack: the number of a layer, which is one visit of a block.
    layers: dict[str, dict[tuple[str, int], int]] = {}
    sites: list[SiteInfo] = []
    for call in seen.calls:
        block = blocks[call.site.module_name]
        stack = stack_of(block)
        layers_of_stack = layers.setdefault(stack, {})
        layer = layers_of_stack.setdefault((block, call.visit), len(layers_of_stack))
        if call.repeated:
            continue
        kind = kinds[call.site]
        sites.append(
            SiteInfo(
                index=len(sites),
                site=call.site,
                block=block,
                layer=layer,
                kind=kind,
                heads=call.heads,
                key_heads=call.key_heads,
                head_size=call.head_size,
                value_size=call.value_size,
                in_decoder=seen.decoder_tokens and stack in decoders,
                value_sets=value_sets[call.site],
                route=call.route,
                grade=call.grade,
                moving=call.moving,
                tokens_first=call.tokens_first,
                prefix=call.prefix if kind == "causal" else 0,
                apart=call.apart,
            )
        )
    return sites


def _apart(call: AttentionCall) -> bool:
    """Whether log-weights differ between heads; of weights that are told as they are, what a query can see."""
    weight = call.log_weight if call.seen is None else call.seen
    return weight is not None and weight.shape[1] > 1 and not bool((weight == weight[:, :1]).all())


def _kind(call: AttentionCall) -> str:
    """Whether a call is "self", "causal" or "cross", by its lengths and masks alone."""
    length = call.query.shape[2]
    keys = call.key.shape[2]
    if keys != length:
        return "causal" if _behind_a_prefix(call) else "cross"
    if call.is_causal:  # a mask for it would have as many entries as there are pairs
        return "causal"
    if keys < 2:
        return "self"
    return "self" if bool(call.visible().triu(1).any()) else "causal"


def _behind_a_prefix(call: AttentionCall) -> bool:
    """Whether queries see keys that stand before all of theirs, and of theirs their own and earlier ones."""
    length = call.query.shape[2]
    keys = call.key.shape[2]
    if call.is_causal or length < 2 or keys < length:
        return False
    visible = call.visible()
    own = visible[..., keys - length :]
    # Each query sees its own key, unless that is padding, which nobody sees; all see the prefix, and none a later key.
    own_seen = own.diagonal(dim1=-2, dim2=-1)
    padding = ~own.any(-2)
    sees_any = visible.any(-1)
    sees_no_later_key = not bool(own.triu(1).any())
    sees_its_own_key = bool((own_seen | padding).all()) and bool(own_seen.any())
    return sees_no_later_key and sees_its_own_key and bool(visible[..., : keys - length][sees_any].all())


def _list_items(model: nn.Module) -> list[str]:
    """Names of all modules that are items of a ``ModuleList`` or ``Sequential``, outermost first."""
    return [
        f"{name}.{child}" if name else child
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        for child, _ in module.named_children()
    ]


def inside(name: str, parent: str) -> bool:
    """Whether a module's name is another's, or that of a module within it."""
    return not parent or name == parent or name.startswith(parent + ".")


def _block_of(module_name: str, items: Sequence[str], attention_names: Sequence[str]) -> str:
    """The outermost list item around an attention module in which no two attention modules have the same last name.

    Where there is none, as with self-attention and cross-attention of one name in one block, it is the innermost item.
    """
    items_around = [item for item in items if inside(module_name, item)]
    for item in items_around:
        last_names = [name.rsplit(".", 1)[-1] for name in attention_names if inside(name, item)]
        if len(last_names) == len(set(last_names)):
            return item
    if items_around:
        return items_around[-1]
    parent = module_name.rpartition(".")[0]
    return parent or module_name


def stack_of(block: str) -> str:
    """The name of the list that a block is in: its own, up to the first number."""
    parts = block.split(".")
    for place, part in enumerate(parts):
        if part.isdigit() or re.search(r"_\d+$", part):
            return ".".join(parts[:place])
    return block
