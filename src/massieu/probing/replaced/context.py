"""`replaced`: a context in which a model runs with another attention; all else stays."""

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
from massieu.probing.model.checkpoint import shortened
from massieu.probing.model.forward import uncompiled
from massieu.probing.model.unwrap import unwrapped
from massieu.probing.model.watching import hooked
from massieu.probing.replaced.replacement import Replacement
from massieu.probing.replaced.rules import Rule, Unchanged, rule_of

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
        InputError: before anything runs, the rule or a site is unknown. From the model's call, a site cannot be replaced, or
            the rule's output has the wrong shape. At the end, another thread used the model.

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
    replacing = _Replacing(
        inner,
        rule_of(_rule_for_all(rule) if isinstance(rule, Replacement) else rule),
        _heads_by_site(inner, sites),
    )
    # Modules that look like attention and are not captured: entering one tells that something was missed.
    unread_names = silent_attention(inner, set())
    unread = {inner.get_submodule("" if name == "itself" else name): name for name in unread_names}
    with ExitStack() as stack:
        replacing.capture = stack.enter_context(capturing(inner, replacing.observe))
        stack.enter_context(hooked(unread, before=lambda module, *_: replacing.entered.add(unread[module])))
        stack.enter_context(hooked([inner], before=replacing.begin, after=replacing.end))
        stack.enter_context(uncompiled())
        yield
        replacing.leave()


def _rule_for_all(replacement: Replacement) -> Any:
    """The rule of a replacement of all heads at once.

    Raises:
        InputError: the replacement is for one site or head at a time.
    """
    if replacement.per != "all":
        raise InputError(
            f"replaced puts a rule into all heads, or into those that sites names, at once; got per={replacement.per!r}"
        )
    return replacement.rule


def _heads_by_site(model: nn.Module, sites: Sites | None) -> dict[str, frozenset[int] | None] | None:
    """The heads to replace by the site's name, None for all heads of a site; None for all sites."""
    if sites is None:
        return None
    if isinstance(sites, str):
        raise InputError(f"sites must be a list of names, or a mapping of names to heads, got the text {sites!r}")
    if not isinstance(sites, Iterable):
        raise InputError(f"sites must be a list of names, or a mapping of names to heads, got {type(sites).__name__}")
    names = {name for name, _ in model.named_modules()}
    heads_by_site: dict[str, frozenset[int] | None] = {}
    for name in sites:
        if not isinstance(name, str) or name.partition(" (call ")[0] not in names:
            raise InputError(f"{type(model).__name__} has no module {name!r} to replace the attention of")
        heads = sites[name] if isinstance(sites, Mapping) else None
        if isinstance(heads, str) or not isinstance(heads, Iterable | None):
            raise InputError(f"heads of {name} must be a list of whole numbers from 0, got {heads!r}")
        heads_by_site[name] = None if heads is None else frozenset(heads)
        numbers = heads_by_site[name] or ()
        if not all(isinstance(head, int) and not isinstance(head, bool) and head >= 0 for head in numbers):
            raise InputError(f"heads of {name} must be whole numbers from 0, got {sorted(map(str, numbers))}")
    if not heads_by_site or any(heads is not None and not heads for heads in heads_by_site.values()):
        raise InputError(f"sites must name at least one attention site, got {sites!r}; None means all sites")
    return heads_by_site


@dataclass(eq=False)
class _Replacing:
    """The state of one context.

    Attributes:
        heads_by_site: what is to be replaced, as `_heads_by_site` returns it.
        replaced_names: names of the sites, and of their modules, that were replaced in the current forward pass.
        entered: names of unread attention modules that were called in it.
        ended: whether a forward pass of the whole model has ended.
    """

    model: nn.Module
    rule: Rule
    heads_by_site: dict[str, frozenset[int] | None] | None
    replaced_names: set[str] = field(default_factory=set)
    entered: set[str] = field(default_factory=set)
    capture: Capture = field(init=False)
    ended: bool = False

    def begin(self, *_: Any) -> None:
        """A forward pass of the whole model begins, in which calls are numbered from 0 again."""
        self.capture.fired.clear()
        self.replaced_names.clear()
        self.entered.clear()

    def observe(self, call: AttentionCall) -> Tensor | None:
        """The output in place of the call's own; None to leave it."""
        name = call.site.name
        sites = self.heads_by_site
        if sites is not None and name not in sites and call.site.module_name not in sites:
            return None
        self.replaced_names |= {name, call.site.module_name}
        if isinstance(self.rule, Unchanged):
            return None
        heads = None if sites is None else sites.get(name, sites.get(call.site.module_name))
        output = self._rule_output(call)
        if heads is None:
            return output
        count = call.output.shape[2]
        if max(heads, default=0) >= count:
            raise InputError(f"{name} has heads 0 to {count - 1}, and head {max(heads)} was to be replaced")
        indices = sorted(heads)
        # The other heads keep the model's own output, bit for bit.
        return call.output.index_copy(2, torch.tensor(indices, device=call.output.device), output[:, :, indices])

    def _rule_output(self, call: AttentionCall) -> Tensor:
        output = self.rule(call)
        if not isinstance(output, Tensor) or output.shape != call.output.shape:
            returned = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise InputError(
                f"a rule must return outputs of shape {tuple(call.output.shape)} (batch, queries, heads, size of a value) for "
                f"{call.site.name}, got {returned}"
            )
        return output.to(call.output.dtype)

    def end(self, module: nn.Module, *_: Any) -> None:
        """Check that nothing was missed: the model's own attention in a rule's place would go unnoticed."""
        self.ended = True
        self._check(type(module).__name__)

    def leave(self) -> None:
        """Check at the end of the context, if only parts of the model were called in it."""
        if not self.ended and (self.replaced_names or self.entered or self.capture.refused):
            self._check(type(self.model).__name__)

    def _check(self, model_name: str) -> None:
        """Check that every site that was to be replaced was.

        Raises:
            InputError: one was not.
        """
        self.capture.finish()
        refused = self.capture.refused
        not_seen = "it was not seen attending"
        if self.heads_by_site is None:
            missed = {name or model_name: reason for name, reason in refused.items()}
            # An unread module may hold, or be part of, a module whose attention was captured.
            accounted = self.replaced_names | set(refused)
            unread = [
                name
                for name in self.entered
                if not any(inside(other, name) or inside(name, other) for other in accounted)
            ]
            missed |= dict.fromkeys(unread, not_seen)
            if not self.replaced_names and not missed:
                missed = {model_name: not_seen}
        else:
            not_replaced = [name for name in self.heads_by_site if name not in self.replaced_names]
            missed = {name: refused.get(name.partition(" (call ")[0], not_seen) for name in not_replaced}
        if missed:
            reasons = shortened([f"{name} ({reason})" for name, reason in missed.items()])
            raise InputError(f"attention cannot be replaced: {reasons}")
