"""The first route to a model's attention calls: transformers' attention interface.

An attention function and a mask function are registered with ``transformers`` under a name of ours. While a `Capture`
is active the model dispatches to them: the output comes from the model's own implementation (its ``sdpa`` or eager
function, with its own mask function), and an `AttentionCall` with the exact (query, key, value, mask, scale) is handed
to the observer.

Two traps this file exists for: an attention function registered without a mask function makes transformers pass no
mask at all, and a model outside the interface ignores the request with no more than a log line. So both functions are
registered, calls are counted, and every site is checked against the model's own output (`check.self_check_error`).
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from massieu.errors import InputError, require_extra
from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.capture import LOCK, Capture, StopAfterQuery, own_capture

FUSED = "massieu_fused"  # delegates to the model's sdpa function, with sdpa's mask function
EAGER = "massieu_eager"  # delegates to the eager function of the model's own file, with the eager mask function


class _StandsFor(str):
    """A registered name of ours that compares as the model's own: some models do other things where it is not theirs.

    DeepSeek-V3.2, for one, hides the keys that its index did not choose only under the names ``eager`` and ``sdpa``.
    """

    __slots__ = ("stock",)
    __hash__ = str.__hash__  # found in the registries under the name of ours

    def __new__(cls, ours: str, stock: str) -> "_StandsFor":
        self = super().__new__(cls, ours)
        self.stock = stock
        return self

    def __getnewargs__(self) -> tuple[str, str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return str(self), self.stock

    def __eq__(self, other: object) -> bool:
        return other == self.stock or str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other


# Keywords that change nothing about (query, key, value, mask, scale), or that `_call_from` reads.
_UNDERSTOOD = (
    {"scaling", "is_causal", "position_bias", "softcap", "s_aux", "sliding_window"}
    | {"dropout", "deterministic", "training", "layer_idx", "num_items_in_batch", "token_type_ids", "return_dict"}
    | {"output_attentions", "output_hidden_states", "output_router_logits"}
    | {"use_cache", "cache_position", "position_ids", "past_key_values"}
)

_EAGER_ENDING = "eager_attention_forward"  # of the names of eager functions; a file may have several of them


def _model_function(module: nn.Module, implementation: str) -> Callable[..., tuple[Tensor, Any]]:
    """The attention function the model would have used: the one that the module's code, or a base class's, speaks of.

    Of code that speaks of none, it is the first in the file that defines it.
    """
    classes = type(module).__mro__
    for names_of in (_named_in_code, _named_in_file):
        for cls in classes:
            namespace, names = names_of(cls)
            if not names:
                continue
            eager = namespace[names[0]]
            if implementation == EAGER:
                return eager
            registry = namespace.get("ALL_ATTENTION_FUNCTIONS")
            if registry is not None:
                return registry.get_interface("sdpa", eager)
    raise InputError(f"{type(module).__name__} has no attention function of its own to delegate to")


def _named_in_code(cls: type) -> tuple[dict[str, Any], list[str]]:
    """The eager functions that a class's own methods speak of, and where these names are looked up."""
    for method in filter(inspect.isfunction, vars(cls).values()):
        function = inspect.unwrap(method)
        namespace = function.__globals__
        names = [name for name in function.__code__.co_names if name.endswith(_EAGER_ENDING) and name in namespace]
        if names:
            return namespace, names
    return {}, []


def _named_in_file(cls: type) -> tuple[dict[str, Any], list[str]]:
    """The eager functions in the file that defines a class."""
    file = sys.modules.get(cls.__module__)
    namespace = {} if file is None else vars(file)
    return namespace, [name for name in namespace if name.endswith(_EAGER_ENDING)]


def _log_weight(mask: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Mask and position bias as log-weights: boolean where that says everything, else float with −inf for hidden keys."""
    if mask is not None and mask.dtype != torch.bool:
        hidden = mask <= torch.finfo(dtype).min / 2  # models write the most negative number for "hidden"
        # What is left of an additive mask is a bias, as of relative positions in BEiT and Swin.
        rest = mask.masked_fill(hidden, 0.0)
        if bool(rest.any()):
            bias = rest if bias is None else bias + rest
        mask = ~hidden
    if bias is None:
        return mask
    if bias.dtype in (torch.float16, torch.bfloat16):
        bias = bias.float()
    return bias if mask is None else bias.masked_fill(~mask, -torch.inf)


@dataclass(frozen=True, eq=False)
class _InterfaceCall:
    """What transformers gave an attention function of ours.

    Attributes:
        implementation: `FUSED` or `EAGER`.
        mask: of the form that the model's own implementation takes.
        keywords: all others.
    """

    implementation: str
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    keywords: dict[str, Any]

    def is_causal(self) -> bool:
        """Whether causality is said by a keyword, or else by the module, in place of a mask: a rule of sdpa's alone."""
        length = self.query.shape[2]
        if self.implementation != FUSED or self.mask is not None or length <= 1:
            return False
        declared = self.keywords.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if declared is None else declared)

    def scale(self) -> float:
        """The scale of the scores; where none is given, the inverse square root of a head's size."""
        scaling = self.keywords.get("scaling")
        return self.query.shape[-1] ** -0.5 if scaling is None else float(scaling)

    def eager_keyword(self, name: str) -> Any:
        """A cap or sinks: a model that runs on sdpa, which knows neither, goes without them, and so do its statistics."""
        return self.keywords.get(name) if self.implementation == EAGER else None


def _call_from(capture: Capture, inputs: _InterfaceCall, output: Tensor) -> AttentionCall:
    """The attention call of what transformers gave, and of what the model's own function made of it."""
    strange = (name for name, value in inputs.keywords.items() if value is not None and name not in _UNDERSTOOD)
    capture.unexplained.update(strange)
    query, key, value = inputs.query, inputs.key, inputs.value
    site, repeated = capture.next_site(inputs.module, query, key)
    if key.shape[1] != value.shape[1]:  # a value for each query head, but a key for several
        heads = query.shape[1]
        key = key.repeat_interleave(heads // key.shape[1], dim=1)
        value = value.repeat_interleave(heads // value.shape[1], dim=1)
    length = query.shape[2]
    is_causal = inputs.is_causal()
    if is_causal and key.shape[2] > length:
        # sdpa counts queries and keys from the first, so that no query sees the keys behind.
        key = key[:, :, :length]
        value = value[:, :, :length]
    mask = inputs.mask
    if inputs.implementation == EAGER and mask is not None:
        mask = mask.to(query.dtype)  # eager functions add it, so that True is a bias of 1 and shuts nothing
    log_weight = _log_weight(mask, inputs.keywords.get("position_bias"), query.dtype)
    if is_causal and log_weight is not None:
        past = torch.ones(length, key.shape[2], dtype=torch.bool, device=query.device).tril()
        log_weight = log_weight.float().masked_fill(~past, -torch.inf)
        is_causal = False
    softcap = inputs.eager_keyword("softcap")
    sink = inputs.eager_keyword("s_aux")
    return AttentionCall(
        site=site,
        module=inputs.module,
        query=query,
        key=key,
        value=value,
        log_weight=log_weight,
        is_causal=is_causal,
        scale=inputs.scale(),
        softcap=None if softcap is None else float(softcap),
        sink=None if sink is None else sink.detach().float().reshape(-1),
        output=output,
        repeated=repeated,
        route="interface",
    )


def _attention_function(implementation: str) -> Callable[..., tuple[Tensor, Any]]:
    """What is registered with transformers: the model's own function, of which a capture is told."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
    ) -> tuple[Tensor, Any]:
        capture = own_capture(module)
        function = _model_function(module, implementation)
        # sdpa leaves out what it does not know; what the model's own function makes of it, the tap follows.
        is_strange = any(
            isinstance(argument, Tensor) and name not in _UNDERSTOOD for name, argument in keywords.items()
        )
        if capture is None or (implementation == EAGER and is_strange):
            return function(module, query, key, value, attention_mask, **keywords)
        if capture.projections is not None:
            capture.projections.append((query, key, value))
            raise StopAfterQuery
        with capture.claiming():
            output, weights = function(module, query, key, value, attention_mask, **keywords)
            inputs = _InterfaceCall(implementation, module, query, key, value, attention_mask, keywords)
            replacement = capture.observe(_call_from(capture, inputs, output))
        return (output if replacement is None else replacement), weights

    return attention


def _register() -> None:
    transformers = require_extra("transformers", "probe")
    masking = require_extra("transformers.masking_utils", "probe")
    if FUSED in masking.AttentionMaskInterface._global_mapping:
        return
    for name, stock in ((FUSED, "sdpa"), (EAGER, "eager")):
        transformers.AttentionInterface.register(name, _attention_function(name))
        masking.AttentionMaskInterface.register(name, masking.ALL_MASK_ATTENTION_FUNCTIONS[stock])


def _configurations(model: nn.Module) -> list[Any]:
    """Every distinct configuration object in the model, nested ones included, of parts that dispatch their attention.

    Other parts may look at the implementation's name to choose their masks, and find one that they do not know.
    """
    holders: list[Any] = [m for m in model.modules() if hasattr(getattr(m, "config", None), "_attn_implementation")]
    not_dispatching = {
        id(module.config) for module in holders if not getattr(module, "_can_set_attn_implementation", lambda: True)()
    }
    # By identity: configurations compare as equal where their settings are.
    configurations: dict[int, Any] = {}
    pending = [module.config for module in holders]
    while pending:
        config = pending.pop()
        if id(config) in configurations:
            continue
        configurations[id(config)] = config
        nested = (getattr(config, key, None) for key in getattr(config, "sub_configs", {}))
        pending.extend(c for c in nested if hasattr(c, "_attn_implementation"))
    return [config for key, config in configurations.items() if key not in not_dispatching]


def stock_implementations(model: nn.Module) -> list[str]:
    """The attention implementations the model was loaded with, such as ``["sdpa"]``."""
    return sorted({str(c._attn_implementation or "eager") for c in _configurations(model)})


@contextmanager
def reading_interface(model: nn.Module, capture: Capture) -> Iterator[None]:
    """Let the model's attention go through our functions while the block runs; afterwards it is as it was.

    Raises:
        InputError: the model runs attention through an implementation other than ``sdpa`` or ``eager``, or is being probed
            already.
    """
    configurations = _configurations(model) if "transformers" in sys.modules else []
    if not configurations:
        yield
        return
    stock_names: list[tuple[Any, str | None]] = []
    our_names: list[tuple[Any, _StandsFor]] = []
    try:
        with LOCK:
            _register()
            stock_names = _implementations(configurations)
            our_names = [(config, _standing_for(name)) for config, name in stock_names]
            for config, name in our_names:
                config._attn_implementation_internal = name
        yield
    finally:
        with LOCK:
            capture.disturbed |= any(config._attn_implementation_internal is not name for config, name in our_names)
            for config, name in stock_names:
                config._attn_implementation_internal = name


def _standing_for(stock: str | None) -> _StandsFor:
    """Our name for a stock implementation; None is eager, as it is to transformers."""
    return _StandsFor(FUSED if stock == "sdpa" else EAGER, stock or "eager")


def _implementations(configurations: list[Any]) -> list[tuple[Any, str | None]]:
    """The attention implementation of each configuration, all of which can be delegated to."""
    implementations = [(config, config._attn_implementation_internal) for config in configurations]
    names = {name for _, name in implementations}
    if names & {FUSED, EAGER}:
        raise InputError(
            "the model, or one that shares its configuration, is being probed already; give each its own copy"
        )
    unreadable = sorted(str(name) for name in names if name not in (None, "sdpa", "eager"))
    if unreadable:
        raise InputError(
            f"the model was loaded with attn_implementation={unreadable[0]!r}; load it with 'sdpa' or 'eager' to probe it"
        )
    return implementations
