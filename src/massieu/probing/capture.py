"""Read every attention call of a Hugging Face model while the model's own code computes the output.

An attention function and a mask function are registered with ``transformers`` under a name of ours. While a `Capture`
is active the model dispatches to them: the output comes from the model's own implementation (its ``sdpa`` or eager
function, with its own mask function), and an `AttentionCall` with the exact (query, key, value, mask, scale) is handed
to the observer. Nothing is kept after the observer returns.

Two traps this file exists for: an attention function registered without a mask function makes transformers pass no
mask at all, and a model outside the interface ignores the request with no more than a log line. So both functions are
registered, calls are counted, and every site is checked against the model's own output (`check.self_check_error`).
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from massieu.errors import InputError, require_extra
from massieu.probing.watching import same_tensor

FUSED = "massieu_fused"  # delegates to the model's sdpa function, with sdpa's mask function
EAGER = "massieu_eager"  # delegates to the eager function of the model's own file, with the eager mask function

# Keywords that change nothing about (query, key, value, mask, scale), or that `_call_from` reads.
_UNDERSTOOD = (
    {"scaling", "is_causal", "position_bias", "softcap", "s_aux", "sliding_window"}
    | {"dropout", "deterministic", "training", "layer_idx", "num_items_in_batch", "token_type_ids", "return_dict"}
    | {"output_attentions", "output_hidden_states", "output_router_logits"}
    | {"use_cache", "cache_position", "position_ids", "past_key_values", "past_key_value"}
)


@dataclass(frozen=True)
class AttentionSite:
    """One place where attention is computed: a module and which of its calls in one forward pass.

    A shared module (ALBERT) is one module and several sites.
    """

    module_name: str
    ordinal: int = 0

    @property
    def name(self) -> str:
        return self.module_name if self.ordinal == 0 else f"{self.module_name} (call {self.ordinal + 1})"


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What one attention function was given, and what the model's own code made of it.

    Attributes:
        query: after rotary embedding and normalisation, as the scores see it.
        key: may have fewer heads than ``query`` (grouped queries).
        log_weight: log-weights of the keys, boolean (True = visible) or float with −inf for hidden keys; carries masks,
            windows and additive position biases; None when every key is visible or ``is_causal`` says it all.
        scale: inverse temperature of the scores.
        softcap: scores are ``softcap · tanh(score / softcap)`` before the log-weight; None where there is no cap.
        sink: one extra logit per head without a value (gpt-oss); None elsewhere.
        output: the model's own result, before the output projection.
        repeated: the same queries and keys as in the call before, of the same module: its weights applied to other values.
    """

    site: AttentionSite
    module: nn.Module
    query: Float[Tensor, "B H L D"]
    key: Float[Tensor, "B Hk N D"]
    value: Float[Tensor, "B Hk N Dv"]
    log_weight: Tensor | None
    is_causal: bool
    scale: float
    softcap: float | None
    sink: Float[Tensor, " H"] | None
    output: Float[Tensor, "B L H Dv"]
    repeated: bool = False

    def visible(self) -> Bool[Tensor, "B_or_1 H_or_1 L N"]:
        """Which keys each query can see."""
        length, keys = self.query.shape[2], self.key.shape[2]
        if self.is_causal:
            return torch.ones(length, keys, dtype=torch.bool, device=self.query.device).tril()[None, None]
        if self.log_weight is None:
            return torch.ones(1, 1, length, keys, dtype=torch.bool, device=self.query.device)
        seen = self.log_weight if self.log_weight.dtype == torch.bool else self.log_weight > -torch.inf
        return seen.expand(*seen.shape[:2], length, keys)

    def rows(self, index: slice | Tensor) -> "AttentionCall":
        """The same call for some items of the batch."""
        weight = self.log_weight
        if weight is not None and weight.shape[0] > 1:
            weight = weight[index]
        parts = {name: getattr(self, name)[index] for name in ("query", "key", "value", "output")}
        return replace(self, log_weight=weight, **parts)

    def at(self, positions: Int[Tensor, " S"]) -> "AttentionCall":
        """The same call for some of the queries, all keys kept; causality becomes a mask."""
        weight = self.log_weight
        if self.is_causal:
            weight = (positions[:, None] >= torch.arange(self.key.shape[2], device=self.key.device))[None, None]
        elif weight is not None and weight.shape[2] > 1:
            weight = weight[:, :, positions]
        query, output = self.query[:, :, positions], self.output[:, positions]
        return replace(self, query=query, output=output, log_weight=weight, is_causal=False)


class StopAfterQuery(Exception):  # noqa: N818 - a signal, not an error
    """Ends a replayed attention module once its query, key and value are known."""


@dataclass
class Capture:
    """An active reading of one model: which sites fired, and who listens.

    Attributes:
        observer: called with each `AttentionCall`, in order.
        fired: how often each module was called; it numbers the calls, so a capture is for one forward pass.
        unexplained: keyword arguments that reached an attention function and that this file does not know.
        thread: the thread whose calls are read.
        disturbed: another thread called the model, or changed its attention implementation, in the meantime.
    """

    names: dict[nn.Module, str]
    observer: Callable[[AttentionCall], None]
    fired: dict[str, int] = field(default_factory=dict)
    unexplained: set[str] = field(default_factory=set)
    projections: list[tuple[Tensor, Tensor, Tensor]] | None = None
    thread: int = field(default_factory=threading.get_ident)
    disturbed: bool = False
    _latest: tuple[nn.Module, Tensor, Tensor, AttentionSite] | None = None

    def place(self, module: nn.Module, query: Tensor, key: Tensor) -> tuple[AttentionSite, bool]:
        """The site of the next call, and whether it repeats the one before with the same queries and keys."""
        name = self.names.get(module)
        if name is None:
            raise InputError(f"an attention module of class {type(module).__name__} is not part of the probed model")
        latest = self._latest
        # The latest queries and keys are held, so that their memory cannot have been given to others.
        if latest is not None and latest[0] is module and same_tensor(latest[1], query) and same_tensor(latest[2], key):
            return latest[3], True
        ordinal = self.fired.get(name, 0)
        self.fired[name] = ordinal + 1
        site = AttentionSite(name, ordinal)
        self._latest = (module, query, key, site)
        return site, False

    def check_undisturbed(self) -> None:
        """Raises:
        InputError: another thread used the model while it was read.
        """
        if self.disturbed:
            raise InputError(
                "another thread used the model while it was probed, so what was read is not one thing; "
                "let the other thread wait, or give each a copy of the model"
            )

    @contextmanager
    def replaying(self) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
        """Inside, an attention call only records (query, key, value) and raises `StopAfterQuery`."""
        self.projections = []
        try:
            yield self.projections
        finally:
            self.projections = None


_ACTIVE: ContextVar[Capture | None] = ContextVar("massieu_capture", default=None)
_CAPTURES: list[Capture] = []  # of all threads
_LOCK = threading.Lock()


def _own_capture(module: nn.Module) -> Capture | None:
    """The capture that this call belongs to; a call from another thread belongs to none, and disturbs."""
    capture = _ACTIVE.get()
    if capture is not None and capture.thread == threading.get_ident():
        return capture
    with _LOCK:
        for other in _CAPTURES:
            if module in other.names:
                other.disturbed = True
    return None


def _own_function(module: nn.Module, implementation: str) -> Callable[..., tuple[Tensor, Any]]:
    """The attention function the model would have used: from the file that defines the module, or a base class of it."""
    for cls in type(module).__mro__:
        file = sys.modules.get(cls.__module__)
        eager = getattr(file, "eager_attention_forward", None)
        if eager is None:
            continue
        if implementation == EAGER:
            return eager
        registry = getattr(file, "ALL_ATTENTION_FUNCTIONS", None)
        if registry is not None:
            return registry.get_interface("sdpa", eager)
    raise InputError(f"{type(module).__name__} has no attention function of its own to delegate to")


def _log_weight(mask: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Mask and position bias as log-weights: boolean where that says everything, else float with −inf for hidden keys."""
    if mask is not None and mask.dtype != torch.bool:
        hidden = mask <= torch.finfo(dtype).min / 2  # models write the most negative number for "hidden"
        visible = ~hidden
        additive = mask.masked_fill(hidden, 0.0)
        if bool(additive.any()):
            bias = additive if bias is None else bias + additive
        mask = visible
    if bias is None:
        return mask
    bias = bias.float() if bias.dtype in (torch.float16, torch.bfloat16) else bias
    return bias if mask is None else bias.masked_fill(~mask, -torch.inf)


def _call_from(
    capture: Capture,
    implementation: str,
    module: nn.Module,
    given: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    keywords: dict[str, Any],
    output: Tensor,
) -> AttentionCall:
    capture.unexplained.update(k for k, v in keywords.items() if v is not None and k not in _UNDERSTOOD)
    query, key, value = given
    site, repeated = capture.place(module, query, key)
    length, keys = query.shape[2], key.shape[2]
    causal = False
    if implementation == FUSED and mask is None and length > 1:
        # sdpa's own rule: without a mask, causality comes from the keyword or else from the module
        declared = keywords.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if declared is None else declared)
    if causal and keys > length:
        key, value = key[:, :, :length], value[:, :, :length]
    weight = _log_weight(mask, keywords.get("position_bias"), query.dtype)
    if causal and weight is not None:
        keep = torch.ones(length, key.shape[2], dtype=torch.bool, device=query.device).tril()
        weight, causal = weight.float().masked_fill(~keep, -torch.inf), False
    # sdpa knows neither caps nor sinks: a model that runs on it goes without them, and so do its statistics
    read = keywords if implementation == EAGER else {}
    scale, softcap, sink = keywords.get("scaling"), read.get("softcap"), read.get("s_aux")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    softcap = None if softcap is None else float(softcap)
    sink = None if sink is None else sink.detach().float().reshape(-1)
    return AttentionCall(site, module, query, key, value, weight, causal, scale, softcap, sink, output, repeated)


def _attention_function(implementation: str) -> Callable[..., tuple[Tensor, Any]]:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
    ) -> tuple[Tensor, Any]:
        capture = _own_capture(module)
        if capture is not None and capture.projections is not None:
            capture.projections.append((query, key, value))
            raise StopAfterQuery
        output, weights = _own_function(module, implementation)(module, query, key, value, attention_mask, **keywords)
        if capture is not None:
            capture.check_undisturbed()
            given = query, key, value
            capture.observer(_call_from(capture, implementation, module, given, attention_mask, keywords, output))
        return output, weights

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
    """Every distinct configuration object in the model, nested ones included."""
    found: dict[int, Any] = {}
    pending: list[Any] = [
        m.config for m in model.modules() if hasattr(getattr(m, "config", None), "_attn_implementation")
    ]
    while pending:
        config = pending.pop()
        if id(config) not in found:
            found[id(config)] = config
            nested = (getattr(config, key, None) for key in getattr(config, "sub_configs", {}))
            pending.extend(c for c in nested if hasattr(c, "_attn_implementation"))
    return list(found.values())


def stock_implementations(model: nn.Module) -> list[str]:
    """The attention implementations the model was loaded with, such as ``["sdpa"]``."""
    return sorted({str(c._attn_implementation or "eager") for c in _configurations(model)})


@contextmanager
def capturing(model: nn.Module, observer: Callable[[AttentionCall], None]) -> Iterator[Capture]:
    """Hand every attention call of ``model`` to ``observer`` while the block runs; the model's results stay its own.

    The model's attention implementation is restored afterwards, whatever happens.

    Raises:
        InputError: the model runs attention through an implementation other than ``sdpa`` or ``eager``, is being probed
            already, or was used by another thread in the meantime.
    """
    capture = Capture({module: name for name, module in model.named_modules()}, observer)
    with _LOCK:
        _register()
        saved = _implementations(model)
        ours = [(config, FUSED if name == "sdpa" else EAGER) for config, name in saved]
        _CAPTURES.append(capture)
        for config, name in ours:
            config._attn_implementation_internal = name
    token = _ACTIVE.set(capture)
    try:
        yield capture
    finally:
        with _LOCK:
            capture.disturbed |= any(config._attn_implementation_internal != name for config, name in ours)
            for config, name in saved:
                config._attn_implementation_internal = name
            _CAPTURES.remove(capture)
        _ACTIVE.reset(token)
        capture._latest = None  # gives its memory back
    capture.check_undisturbed()


def _implementations(model: nn.Module) -> list[tuple[Any, str | None]]:
    """The attention implementation of each configuration in the model, all of which can be delegated to."""
    found = [(config, config._attn_implementation_internal) for config in _configurations(model)]
    names = {name for _, name in found}
    if names & {FUSED, EAGER}:
        raise InputError(
            "the model, or one that shares its configuration, is being probed already; give each its own copy"
        )
    unreadable = sorted(str(name) for name in names if name not in (None, "sdpa", "eager"))
    if unreadable:
        raise InputError(
            f"the model was loaded with attn_implementation={unreadable[0]!r}; load it with 'sdpa' or 'eager' to probe it"
        )
    return found
