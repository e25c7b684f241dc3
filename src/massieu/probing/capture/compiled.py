"""A route of its own to attention calls: of code that `torch.compile` has compiled, where hooks and the tap see nothing.

Beside each `scaled_dot_product_attention` that is traced, a function mode puts an operator, to which the function's inputs and
output are shown whenever the compiled code runs. The operator computes nothing that the model sees. PyTorch compiles the
model once more, since compiled code holds for one stack of modes only, and keeps both versions.

Which module a call belongs to is not known in compiled code. Calls are told apart by their order in a forward pass, which
one pass that is not compiled has shown (`fused_sites`).
"""

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from massieu.probing.capture.attention_call import AttentionCall, AttentionSite
from massieu.probing.capture.capture import recomputing
from massieu.probing.capture.follow.fused import mask_log_weight
from massieu.probing.capture.routes import capturing
from massieu.probing.model.forward import run
from massieu.probing.model.watching import TensorIdentity

Observer = Callable[[AttentionCall], None]
Listener = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float | None, Tensor], None]

_listener: ContextVar[Listener | None] = ContextVar("massieu_compiled_attention", default=None)
CHECKPOINT = torch.utils.checkpoint.checkpoint
_ORDER = torch.zeros(0)
"""What every call of the operator claims to change: compilers keep them all, in their order."""


@torch.library.custom_op("massieu::show_attention", mutates_args=("order",), tags=(torch.Tag.flexible_layout,))
def _show(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    output: Tensor,
    order: Tensor,
) -> None:
    listener = _listener.get()
    if listener is not None and not recomputing():
        with torch._C.DisableTorchFunction():  # what the listener computes is nobody's to see
            listener(query, key, value, mask, is_causal, scale, output)


@_show.register_fake
def _(*_: Any) -> None:
    return None


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    order: Tensor = _ORDER,
) -> Tensor:
    """The function itself, whose inputs and output are shown."""
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    mask = None if attn_mask is None else attn_mask.detach()
    _show(query.detach(), key.detach(), value.detach(), mask, is_causal, scale, output.detach(), order)
    return output


def _with_shown_attention(function: Any) -> Callable[..., Any]:
    """A function of `torch.nn.functional` that runs its own code with our attention, in place of handing itself to the mode."""
    names = {
        **function.__globals__,
        "has_torch_function": lambda *_: False,
        "scaled_dot_product_attention": lambda *args, **kwargs: _attention(*args, **kwargs, order=_given_order.get()),
    }
    changed = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    changed.__kwdefaults__ = function.__kwdefaults__
    return changed


_multi_head_code = _with_shown_attention(F.multi_head_attention_forward)
_given_order: ContextVar[Tensor] = ContextVar("massieu_order", default=_ORDER)


def _multi_head(order: Tensor, *args: Any, **kwargs: Any) -> Any:
    """As PyTorch's compiler takes the function itself: one step, whose code it looks into only later."""
    token = _given_order.set(order)
    try:
        return _multi_head_code(*args, **kwargs)
    finally:
        _given_order.reset(token)


class _ShownAttention(TorchFunctionMode):
    """Shows attention functions to the operator, in code that is compiled and in code that is not.

    It is traced by PyTorch's compiler, so it is written in what that understands.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return _multi_head(_ORDER, *args, **kwargs)
        if func is CHECKPOINT:
            return func(self._inside(args[0]), *args[1:], **kwargs)
        # Under a mode, PyTorch 2.13 cannot trace the method.
        if func is Tensor.unflatten:
            return torch.unflatten(*args, **kwargs)
        return func(*args, **kwargs)

    def _inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function under the mode, which is off while it hands the function on."""

        def under(*arguments: Any, **keywords: Any) -> Any:
            with self:
                return function(*arguments, **keywords)

        return under


@contextmanager
def _showing() -> Iterator[None]:
    """Inside, what is traced and what runs shows its attention functions."""
    # Importing it takes a second, and whoever has compiled a model has done so.
    from torch._dynamo import allow_in_graph, config

    allow_in_graph(_multi_head)
    # PyTorch takes the mode for a side effect of checkpointed code. What is computed again is not to be shown again.
    with config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True), _ShownAttention():
        yield


@contextmanager
def _listening(listener: Listener) -> Iterator[None]:
    """Inside, each call of an attention function is shown to the listener once."""
    latest_output: TensorIdentity | None = None

    def once(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> None:
        # Where a backend runs what was traced under the mode, as PyTorch's own "eager" does, a call is shown twice.
        nonlocal latest_output
        output = TensorIdentity(others[-1])
        is_shown_again = output == latest_output
        latest_output = output
        if not is_shown_again:
            listener(query, key, value, *others)

    token = _listener.set(once)
    try:
        yield
    finally:
        _listener.reset(token)


def fused_sites(model: nn.Module, inputs: dict[str, Any]) -> list[AttentionSite | None]:
    """For each attention function that a forward pass calls, in order, the site whose queries it is given.

    The pass is read by both routes at once, uncompiled. None stands for a call whose queries no site has.

    Args:
        inputs: what the model's forward is called with, from `model_inputs`.
    """
    shown_queries: list[Tensor] = []
    unmatched: list[tuple[AttentionSite, Tensor]] = []

    def listener(query: Tensor, *_: Any) -> None:
        shown_queries.append(query)

    def observer(call: AttentionCall) -> None:
        if call.grade == "full" and not call.repeated:
            unmatched.append((call.site, call.query))

    with torch.no_grad(), _showing(), _listening(listener), capturing(model, observer):
        run(model, inputs)
    sites: list[AttentionSite | None] = []
    for shown in shown_queries:
        matches = (site for site, query in unmatched if query.shape == shown.shape and torch.equal(query, shown))
        match = next(matches, None)
        unmatched = [(site, query) for site, query in unmatched if site != match]
        sites.append(match)
    return sites


class CompiledPasses:
    """Forward passes of a model that is compiled, as a whole or in parts: their attention calls go to an observer.

    Attributes:
        model: whose names the sites have.
        entry: the module that is called for a forward pass: the compiled one around the model, or the model.
        sites: what `fused_sites` gave.
        elsewhere: a forward pass made another number of calls, so that it is not known which call is which site's.
    """

    def __init__(self, model: nn.Module, entry: nn.Module, sites: Sequence[AttentionSite | None]) -> None:
        self.model = model
        self.entry = entry
        self.sites = sites
        self.elsewhere = False
        self._calls = 0

    @contextmanager
    def reading(self, observer: Observer, before: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
        """Inside, show each attention call of a known site to the observer.

        Args:
            before: is called with a forward pass's arguments and keywords as it begins.
        """

        def listener(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> None:
            place = self._calls
            self._calls += 1
            site = self.sites[place] if place < len(self.sites) else None
            if site is not None:
                observer(self._call(site, query, key, value, *settings))

        def forward(*arguments: Any, **keywords: Any) -> Any:
            if recomputing():
                return model_forward(*arguments, **keywords)
            before(arguments, keywords)
            self._calls = 0
            with _listening(listener):
                output = model_forward(*arguments, **keywords)
            self.elsewhere |= self._calls != len(self.sites)
            return output

        # A hook on a module that is compiled in place would be compiled too.
        name = "forward" if self.entry._compiled_call_impl is None else "_compiled_call_impl"
        model_forward = getattr(self.entry, name)
        set_on_instance = vars(self.entry).get(name)
        self.entry.__dict__[name] = forward
        try:
            with _showing():
                yield
        finally:
            if set_on_instance is None:
                del self.entry.__dict__[name]
            else:
                self.entry.__dict__[name] = set_on_instance

    def _call(
        self,
        site: AttentionSite,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
        output: Tensor,
    ) -> AttentionCall:
        length = query.shape[2]
        keys = key.shape[2]
        if is_causal and length != keys:
            # PyTorch counts queries and keys from the first, whatever their numbers.
            mask = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril()
            is_causal = False
        log_weight = None if mask is None else mask_log_weight(mask)
        if log_weight is not None:
            missing_dims = (1,) * (4 - log_weight.dim())
            log_weight = log_weight.reshape(*missing_dims, *log_weight.shape)
        return AttentionCall(
            site,
            module=self.model.get_submodule(site.module_name),
            query=query,
            key=key,
            value=value,
            log_weight=log_weight,
            is_causal=is_causal,
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            softcap=None,
            sink=None,
            output=output.transpose(1, 2),
        )


def is_compiled(model: nn.Module) -> bool:
    """Whether a module, or one within it, is compiled."""
    return any(_is_wrapper(module) or module._compiled_call_impl is not None for module in model.modules())


def entry_of(given: nn.Module, model: nn.Module) -> nn.Module:
    """The module whose call is a forward pass of the model: the outermost compiled one around it, or the model itself.

    Args:
        given: the model with what is around it.
    """
    for module in given.modules():
        if _is_wrapper(module) and any(part is model for part in module.modules()):
            return module
    return model


def _is_wrapper(module: nn.Module) -> bool:
    """Whether it is what `torch.compile` makes of a module."""
    return "_orig_mod" in module._modules
