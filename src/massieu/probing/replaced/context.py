"""`replaced`: inside it a model runs with another attention, and keeps all else."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from massieu.errors import InputError
from massieu.foundation.doors import MODULE, any_of, input_door
from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.capture import Capture
from massieu.probing.capture.routes import capturing
from massieu.probing.capture.sites import inside
from massieu.probing.checks.check import silent_attention
from massieu.probing.model.checkpoint import some
from massieu.probing.model.forward import uncompiled
from massieu.probing.model.unwrap import unwrapped
from massieu.probing.model.watching import hooked
from massieu.probing.replaced.replacement import Replacement
from massieu.probing.replaced.rules import Rule, Unchanged, made_of

Sites = Iterable[str] | Mapping[str, Iterable[int]]


@input_door(
    model=MODULE,
    rule=any_of(
        "the name of a rule, a function of an AttentionCall or a massieu.Replacement", str, Callable, Replacement
    ),
    sites=any_of("names of sites, or a dictionary of heads by name", Iterable),
)
@contextmanager
def replaced(
    model: nn.Module, rule: str | Callable[[AttentionCall], Tensor] | Replacement, *, sites: Sites | None = None
) -> Iterator[None]:
    """Context manager in which ``model`` runs with another attention in some or all heads; all else stays.

    Heads that are not named keep the model's own output bit for bit; so do all with ``"identity"``. Afterwards the model is
    as it was, whatever happens. Gradients pass through what the rule does. A model is in one such context at a time.

    Args:
        model: any module whose attention `massieu.probe` reads: of `transformers`, or in plain PyTorch.
        rule: one of these, a function of an ``AttentionCall`` that returns outputs (B, L, H, Dv), or a `massieu.Replacement`
            with such a rule.

            - ``"off"``: 0.
            - ``"top_k(8)"``, ``"window(16)"``: fewer keys, the k with the largest weights, or those nearer than w tokens.
            - ``"scale(2)"``, ``"entmax(1.5)"``: another inverse temperature; weights that may be exactly 0.
            - ``"resample(4)"``: the mean of the values of n keys, drawn by the weights (S19).
            - ``"joint"``: one softmax over all heads (S14).
            - ``"steps(3)"``, ``"implicit(0.5)"``: retrieval among the keys before the values, in steps or to its end (B12).
            - ``"conditional_mean(1)"``: ridge regression of values on keys (Z4).
            - ``"received_at_least(0.5)"``: without keys that receive less than a share of what the mean key does.
            - ``"identity"``: the model's own.
        sites: names of attention modules, as `massieu.describe` lists them, or a mapping from names to heads; None is all.

    Raises:
        InputError: an unknown rule or site, before anything runs; from the model's own call, a wanted site that cannot be
            replaced, with its reason, or an output of the wrong shape; at the end, another thread used the model.

    Example:
        >>> import massieu
        >>> import torch
        >>> attention = torch.nn.MultiheadAttention(4, 2, batch_first=True).eval()
        >>> tokens = torch.randn(1, 3, 4)
        >>> with torch.no_grad(), massieu.replaced(attention, "off"):
        ...     output, _ = attention(tokens, tokens, tokens)
        >>> bool((output == attention.out_proj.bias).all())
        True
    """
    inner = unwrapped(model)
    made = made_of(_everywhere(rule) if isinstance(rule, Replacement) else rule)
    chosen = _chosen(inner, sites)
    silent = {inner.get_submodule("" if name == "itself" else name): name for name in silent_attention(inner, set())}
    with ExitStack() as stack:
        at_work = _Replacing(inner, made, chosen)
        at_work.capture = stack.enter_context(capturing(inner, at_work.observe))
        stack.enter_context(hooked(silent, before=lambda module, *_: at_work.entered.add(silent[module])))
        stack.enter_context(hooked([inner], before=at_work.begin, after=at_work.end))
        stack.enter_context(uncompiled())
        yield
        at_work.leave()


def _everywhere(replacement: Replacement) -> Any:
    """Its rule.

    Raises:
        InputError: it is for one site or head at a time.
    """
    if replacement.per != "all":
        raise InputError(
            f"replaced puts a rule into all heads, or into those that sites names, at once; got per={replacement.per!r}"
        )
    return replacement.rule


def _chosen(model: nn.Module, sites: Sites | None) -> dict[str, frozenset[int] | None] | None:
    """Heads by the site's name, None for all of them; None for all sites."""
    if sites is None:
        return None
    if isinstance(sites, str):
        raise InputError(f"sites must be a list of names, or a mapping of names to heads, got the text {sites!r}")
    if not isinstance(sites, Iterable):
        raise InputError(f"sites must be a list of names, or a mapping of names to heads, got {type(sites).__name__}")
    names = {name for name, _ in model.named_modules()}
    chosen: dict[str, frozenset[int] | None] = {}
    for name in sites:
        if not isinstance(name, str) or name.partition(" (call ")[0] not in names:
            raise InputError(f"{type(model).__name__} has no module {name!r} to replace the attention of")
        heads = sites[name] if isinstance(sites, Mapping) else None
        if isinstance(heads, str) or not isinstance(heads, Iterable | None):
            raise InputError(f"heads of {name} must be a list of whole numbers from 0, got {heads!r}")
        chosen[name] = None if heads is None else frozenset(heads)
        if not all(isinstance(head, int) and not isinstance(head, bool) and head >= 0 for head in chosen[name] or ()):
            raise InputError(
                f"heads of {name} must be whole numbers from 0, got {sorted(map(str, chosen[name] or ()))}"
            )
    if not chosen or any(heads is not None and not heads for heads in chosen.values()):
        raise InputError(f"sites must name at least one attention site, got {sites!r}; None means all sites")
    return chosen


@dataclass(eq=False)
class _Replacing:
    """One context: which sites were replaced in the forward pass under way, and which are to be."""

    model: nn.Module
    rule: Rule
    chosen: dict[str, frozenset[int] | None] | None
    done: set[str] = field(default_factory=set)
    entered: set[str] = field(default_factory=set)
    capture: Capture = field(init=False)
    ended: bool = False

    def begin(self, *_: Any) -> None:
        """A forward pass of the whole model numbers its calls anew."""
        self.capture.fired.clear()
        self.done.clear()
        self.entered.clear()

    def observe(self, call: AttentionCall) -> Tensor | None:
        name = call.site.name
        if self.chosen is not None and name not in self.chosen and call.site.module_name not in self.chosen:
            return None
        self.done |= {name, call.site.module_name}
        if isinstance(self.rule, Unchanged):
            return None
        heads = None if self.chosen is None else self.chosen.get(name, self.chosen.get(call.site.module_name))
        found = self._applied(call)
        if heads is None:
            return found
        count = call.output.shape[2]
        if max(heads, default=0) >= count:
            raise InputError(f"{name} has heads 0 to {count - 1}, and head {max(heads)} was to be replaced")
        which = sorted(heads)
        return call.output.index_copy(2, torch.tensor(which, device=call.output.device), found[:, :, which])

    def _applied(self, call: AttentionCall) -> Tensor:
        found = self.rule(call)
        if not isinstance(found, Tensor) or found.shape != call.output.shape:
            given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise InputError(
                f"a rule must return outputs of shape {tuple(call.output.shape)} (batch, queries, heads, size of a value) for "
                f"{call.site.name}, got {given}"
            )
        return found.to(call.output.dtype)

    def end(self, module: nn.Module, *_: Any) -> None:
        """What was to be replaced and was not is named: the model's own attention in its place would go unnoticed."""
        self.ended = True
        self._check(type(module).__name__)

    def leave(self) -> None:
        """Where parts of the model were called alone, what could not be replaced is known now; as `end`."""
        if not self.ended and (self.done or self.entered or self.capture.refused):
            self._check(type(self.model).__name__)

    def _check(self, kind: str) -> None:
        self.capture.finish()
        refused, unseen = self.capture.refused, "it was not seen attending"
        if self.chosen is None:
            missed = {name or kind: reason for name, reason in refused.items()}
            known = self.done | set(refused)
            silent = [name for name in self.entered if not any(inside(k, name) or inside(name, k) for k in known)]
            missed |= dict.fromkeys(silent, unseen)
            if not self.done and not missed:
                missed = {kind: unseen}
        else:
            left = [name for name in self.chosen if name not in self.done]
            missed = {name: refused.get(name.partition(" (call ")[0], unseen) for name in left}
        if missed:
            reasons = some([f"{name} ({reason})" for name, reason in missed.items()])
            raise InputError(f"attention cannot be replaced: {reasons}")
