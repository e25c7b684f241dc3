"""What every function of this package accepts, and the one layout they all work in.

Queries are brought to ``(B, Hk, G, L, D)``: a batch, key heads, the query heads that share a key head, queries and
head size. Log-weights become ``(B or 1, Hk or 1, G or 1, L or 1, N or 1)``.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd import forward_ad

Scale = float | int | Tensor | None
Sink = float | int | Tensor | None
Window = int | tuple[int, int] | None


@dataclass(frozen=True)
class AttentionProblem:
    """Checked arguments of one attention, in the common layout."""

    query: Float[Tensor, "B Hk G L D"]
    key: Float[Tensor, "B Hk N D"]
    value: Float[Tensor, "B Hk N E"] | None
    log_weight: Float[Tensor, "#B #Hk #G #L #N"] | Bool[Tensor, "#B #Hk #G #L #N"] | None
    scale: float | Float[Tensor, "#B #Hk #G #L 1"]
    is_causal: bool
    lead: tuple[int, ...]
    """The caller's shape of a number per query."""
    window: tuple[int, int] | None = None
    """(low, high): query i sees keys i + low … i + high. Then `is_causal` is False: it is a high of 0."""
    softcap: float | None = None
    sink: Float[Tensor, "#B #Hk #G #L"] | Float[Tensor, ""] | None = None
    sink_value: Float[Tensor, "#B #Hk #G #L E"] | Float[Tensor, "E"] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """What log-scale results are computed in: float64 for float64, else float32."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    @property
    def pairs(self) -> int:
        """How many scores there are."""
        batch, key_heads, group, length, _ = self.query.shape
        return batch * key_heads * group * length * self.key.shape[2]

    def restore(self, result: Tensor) -> Tensor:
        """From ``(B, Hk, G, L, ...)`` to the shape of the caller's query."""
        return result.reshape(*self.lead, *result.shape[4:])

    def scaled_query(self) -> Tensor:
        """scale·query in `dtype`, so that scores are plain dot products."""
        return (self.query.to(self.dtype) * self.scale).to(self.dtype)

    @property
    def band(self) -> "Band":
        """The window, or causality as one."""
        return (None, 0) if self.is_causal else self.window


DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64

Band = tuple[int | None, int] | None
"""(low, high): query i sees keys i + low … i + high; a low of None: all from the first; None: all."""


def hidden_by_position(
    band: Band, first: int, rows: int, keys: int, device: torch.device
) -> Bool[Tensor, "rows keys"] | None:
    """Which keys a band hides from queries first … first + rows − 1; None if no key."""
    if band is None:
        return None
    low, high = band
    key = torch.arange(keys, device=device)
    query = torch.arange(first, first + rows, device=device).unsqueeze(1)
    return key > query + high if low is None else (key < query + low) | (key > query + high)


def check_problem(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    log_weight: Tensor | None,
    scale: Scale,
    is_causal: bool,
    window: Window = None,
    softcap: float | None = None,
    sink: Sink = None,
    sink_value: Tensor | None = None,
) -> AttentionProblem:
    """Check every argument and bring it to the common layout.

    Raises:
        TypeError: something is not a tensor, not floating-point, of another dtype than the query, or an option of
            another type.
        ValueError: shapes or devices that do not fit, or an option out of its range; the message names them.
    """
    tensors = {"query": query, "key": key} | ({} if value is None else {"value": value})
    _check_tensors(tensors)
    _check_shapes(query, key, value)
    check_flag("is_causal", is_causal)
    key_heads = key.shape[1]
    heads = query.shape[1:3] if query.ndim == 5 else (key_heads, query.shape[1] // key_heads)
    layout = (query.shape[0], *heads, query.shape[-2], key.shape[2])
    problem = AttentionProblem(
        query=query if query.ndim == 5 else query.unflatten(1, heads),
        key=key,
        value=value,
        log_weight=None if log_weight is None else _layout_log_weight(log_weight, query, key, layout),
        scale=_layout_scale(scale, query, layout),
        is_causal=is_causal,
        lead=tuple(query.shape[:-1]),
    )
    if sink_value is not None:
        if sink is None:
            raise ValueError("sink_value is the value of a sink: give its log-weight as sink, got None")
        if value is None:
            raise ValueError("sink_value goes with the values of the keys, got none")
        sink_value = _layout_per_query("sink_value", sink_value, query, layout, value.shape[-1]).to(problem.dtype)
    if window is None and softcap is None and sink is None:
        return problem
    is_causal, band = _check_window(window, is_causal, layout)
    return replace(
        problem,
        is_causal=is_causal,
        window=band,
        softcap=_check_softcap(softcap, problem.dtype),
        sink=_layout_sink(sink, problem.dtype, query, layout),
        sink_value=sink_value,
    )


def _check_window(window: Window, is_causal: bool, layout: tuple[int, ...]) -> tuple[bool, tuple[int, int] | None]:
    """Causality and the band that are left to apply: not both."""
    if window is None:
        return is_causal, None
    sides = window if isinstance(window, tuple) else (window, window)
    if len(sides) != 2 or any(isinstance(side, bool) or not isinstance(side, int) for side in sides):
        raise TypeError(f"window must be a whole number or a pair of them, got {told(window)}")
    left, right = sides
    if left < 0 or right < 0:
        raise ValueError(f"window must not be negative, got {window}")
    *_, length, keys = layout
    if is_causal:
        right = 0
    if left >= length - 1 and (is_causal or right >= keys - 1):
        return is_causal, None
    return False, (-left, right)


def told(thing: object) -> str:
    """A wrong option for a message: what is short as it is, of anything else the type."""
    short = all(isinstance(part, int | float | str) for part in (thing if isinstance(thing, tuple) else (thing,)))
    return repr(thing) if short else type(thing).__name__


def check_flag(name: str, flag: object) -> None:
    """True or False; a `TypeError`."""
    if not isinstance(flag, bool):
        raise TypeError(f"{name} must be True or False, got {told(flag)}")


def check_choice(name: str, choice: object, *known: str | None) -> None:
    """One of a few words; a `ValueError`."""
    if not (choice is None or isinstance(choice, str)) or choice not in known:
        *some, last = (repr(word) for word in known)
        raise ValueError(f"{name} must be {', '.join(some)} or {last}, got {told(choice)}")


def check_count(name: str, one: str, count: object) -> None:
    """A whole number, at least 1, as large as PyTorch counts; a `TypeError` or `ValueError`."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{name} must be a whole number, got {told(count)}")
    if count < 1:
        raise ValueError(f"at least 1 {one} is needed, got {count}")
    if count >= 1 << 63:
        raise ValueError(f"{name} must be below 2⁶³, got {count}")


def check_fits(name: str, number: float, dtype: torch.dtype) -> None:
    """Finite in a dtype; a `ValueError`. Comparisons, and not functions of `math`: the compiler knows them."""
    if not abs(number) < math.inf:
        raise ValueError(f"{name} must be finite, got {number}")
    if abs(number) > torch.finfo(dtype).max:
        raise ValueError(f"{name} must be finite in {dtype}, got {number}")


def _check_softcap(softcap: float | None, dtype: torch.dtype) -> float | None:
    if softcap is None:
        return None
    if isinstance(softcap, bool) or not isinstance(softcap, float | int):
        raise TypeError(f"softcap must be a number or None, got {type(softcap).__name__}")
    if not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be positive and finite, got {softcap}")
    check_fits("softcap", softcap, dtype)
    return float(softcap)


def _check_tensors(tensors: dict[str, Tensor]) -> None:
    query = tensors["query"]
    for name, tensor in tensors.items():
        check_floating(name, tensor)
        if tensor.dtype != query.dtype:
            raise TypeError(f"query and {name} must have one dtype, got {query.dtype} and {tensor.dtype}")
        if tensor.device != query.device:
            raise ValueError(f"query and {name} must be on one device, got {query.device} and {tensor.device}")


def check_floating(name: str, tensor: Tensor, *, or_boolean: bool = False) -> None:
    """A dense floating-point tensor of the dtypes that are computed in; a `TypeError`."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    check_dense(name, tensor)
    if tensor.dtype not in DTYPES and not (or_boolean and tensor.dtype == torch.bool):
        boolean = "boolean (True keeps) or " if or_boolean else ""
        raise TypeError(f"{name} must be a {boolean}16-, 32- or 64-bit floating-point tensor, got {tensor.dtype}")


def check_dense(name: str, tensor: Tensor) -> None:
    """Not sparse and not nested; a `TypeError`. Compiled backward passes may not ask, and compiled calls are not asked."""
    if torch.compiler.is_compiling():
        return
    if tensor.layout != torch.strided or tensor.is_nested:
        raise TypeError(
            f"{name} must be a dense tensor, got {'a nested tensor' if tensor.is_nested else tensor.layout}"
        )


def _check_shapes(query: Tensor, key: Tensor, value: Tensor | None) -> None:
    q, k = tuple(query.shape), tuple(key.shape)
    if len(k) != 4:
        raise ValueError(f"key must have shape (B, H, N, D), got {k}")
    if len(q) not in (4, 5):
        raise ValueError(f"query must have shape (B, H, L, D) or (B, Hk, G, L, D), got {q} for key {k}")
    if q[-1] != k[-1]:
        raise ValueError(f"query and key must have one head size, got {q[-1]} in {q} and {k[-1]} in {k}")
    if k[-1] == 0 or k[1] == 0:
        raise ValueError(f"key must have at least one head and a head size of at least 1, got {k}")
    if q[0] != k[0]:
        raise ValueError(f"query and key must have one batch size, got {q[0]} in {q} and {k[0]} in {k}")
    if len(q) == 5 and q[1] != k[1]:
        raise ValueError(f"a query (B, Hk, G, L, D) must have the key's {k[1]} heads, got {q} for key {k}")
    if q[1] % k[1]:
        raise ValueError(f"the query's heads must be a multiple of the key's {k[1]}, got {q[1]} in {q} for key {k}")
    if value is not None:
        v = tuple(value.shape)
        if len(v) != 4:
            raise ValueError(f"value must have shape (B, H, N, E), got {v} for key {k}")
        if v[:3] != k[:3]:
            raise ValueError(f"value must have the key's batch, heads and length {k[:3]}, got {v} for key {k}")
        if v[3] == 0:
            raise ValueError(f"value must have a head size of at least 1, got {v}")


def _layout_log_weight(log_weight: Tensor, query: Tensor, key: Tensor, layout: tuple[int, ...]) -> Tensor:
    check_floating("log_weight", log_weight, or_boolean=True)
    if log_weight.device != query.device:
        raise ValueError(f"query and log_weight must be on one device, got {query.device} and {log_weight.device}")
    wanted = (*query.shape[:-1], key.shape[2])
    shape = tuple(log_weight.shape)
    padded = (1,) * (len(wanted) - len(shape)) + shape
    # A four-dimensional weight would silently line its batch up with the key heads of a five-dimensional query.
    too_vague = len(wanted) == 5 and len(shape) in (3, 4)
    if len(shape) > len(wanted) or too_vague or any(a not in (1, b) for a, b in zip(padded, wanted, strict=True)):
        form = "; give all five dimensions" if too_vague else ""
        raise ValueError(f"log_weight must broadcast to {wanted} for query {tuple(query.shape)}, got {shape}{form}")
    log_weight = log_weight.reshape(padded)
    if len(wanted) == 5:
        return log_weight
    return log_weight.unsqueeze(2) if padded[1] == 1 else log_weight.unflatten(1, layout[1:3])


def _layout_scale(scale: Scale, query: Tensor, layout: tuple[int, ...]) -> float | Tensor:
    if scale is None:
        return query.shape[-1] ** -0.5
    if isinstance(scale, Tensor):
        return _layout_per_query("scale", scale, query, layout)
    if isinstance(scale, bool) or not isinstance(scale, float | int):
        raise TypeError(f"scale must be a number, a tensor or None, got {type(scale).__name__}")
    check_fits("scale", scale, torch.float64 if query.dtype == torch.float64 else torch.float32)
    return float(scale)


def _layout_sink(sink: Sink, dtype: torch.dtype, query: Tensor, layout: tuple[int, ...]) -> Tensor | None:
    if sink is None:
        return None
    if isinstance(sink, Tensor):
        sink = _layout_per_query("sink", sink, query, layout).to(dtype)
        return sink.squeeze(-1) if sink.ndim else sink.to(query.device)
    if isinstance(sink, bool) or not isinstance(sink, float | int):
        raise TypeError(f"sink must be a number, a tensor or None, got {type(sink).__name__}")
    if not sink < math.inf:
        raise ValueError(f"sink must be finite or -inf, got {sink}")
    if sink != -math.inf:
        check_fits("sink", sink, dtype)
    return torch.full((), float(sink), dtype=dtype, device=query.device)


def _layout_per_query(
    name: str, given: Tensor, query: Tensor, layout: tuple[int, ...], size: int | None = None
) -> Tensor:
    """What is given once, one a head, or one a query: ``(#B, #Hk, #G, #L, 1)``, or of no dimension, if it is a number.

    Args:
        size: of a vector; then the last dimension, which is there in all forms.
    """
    check_floating(name, given)
    # One number in the processor's memory is as good as a number, wherever the query is.
    if given.device != query.device and (given.ndim > 0 or given.device.type != "cpu"):
        raise ValueError(f"query and {name} must be on one device, got {query.device} and {given.device}")
    heads, last, shape = layout[1] * layout[2], () if size is None else (size,), tuple(given.shape)
    if shape == last or (shape == (1,) and size is None):
        return given.reshape(last)
    if shape == (heads, *last):
        return given.reshape(1, *layout[1:3], 1, *(last or (1,)))
    wanted = (*query.shape[:-1], size or 1)
    fits = len(shape) == len(wanted) and all(a in (1, b) for a, b in zip(shape[:-1], wanted[:-1], strict=True))
    if not fits or shape[-1] != wanted[-1]:
        forms = (
            f"one number, {heads} (one a head)" if size is None else f"of shape {last}, {(heads, size)} (one a head)"
        )
        raise ValueError(
            f"{name} must be {forms} or broadcast to {wanted} for query {tuple(query.shape)}, got shape {shape}"
        )
    if len(wanted) == 5:
        return given
    return given.unsqueeze(2) if shape[1] == 1 else given.unflatten(1, layout[1:3])


def in_autocast_dtype(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Under `torch.autocast`, what it casts an operation's arguments to, as it does for PyTorch's own attention.

    What is not a tensor to be cast is left for the checks to refuse.
    """
    kind = next((tensor.device.type for tensor in tensors if isinstance(tensor, Tensor)), "meta")
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)

    def cast(tensor: Tensor | None) -> Tensor | None:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        return tensor.to(dtype)

    return tuple(map(cast, tensors))


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Where operations keep the dtype they are written in."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def in_functorch() -> bool:
    """Whether this call is inside a `torch.func` transform."""
    return torch._C._functorch.get_dynamic_layer_stack_depth() > 0  # pyright: ignore[reportAttributeAccessIssue]


def in_nested_forward_mode() -> bool:
    """Whether this call is inside forward mode within forward mode, where a custom function's second tangent is lost."""
    stack = torch._C._functorch.get_interpreter_stack() or []  # pyright: ignore[reportAttributeAccessIssue]
    forward = torch._C._functorch.TransformType.Jvp  # pyright: ignore[reportAttributeAccessIssue]
    return sum(interpreter.key() == forward for interpreter in stack) > 1


def may_be_differentiated(tensor: Tensor) -> bool:
    """Whether a derivative for this tensor may be wanted; inside a transform that cannot be known, so yes."""
    if not tensor.is_floating_point():
        return False
    return (tensor.requires_grad and torch.is_grad_enabled()) or in_functorch() or forward_ad._current_level >= 0
