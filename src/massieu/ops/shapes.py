"""What every function of this package accepts, and the one layout they all work in.

Queries are brought to ``(B, Hk, G, L, D)``: a batch, key heads, the query heads that share a key head, queries and
head size. Log-weights become ``(B or 1, Hk or 1, G or 1, L or 1, N or 1)``.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd import forward_ad

Scale = float | int | Tensor | None


@dataclass(frozen=True)
class Problem:
    """Checked arguments of one attention, in the common layout."""

    query: Float[Tensor, "B Hk G L D"]
    key: Float[Tensor, "B Hk N D"]
    value: Float[Tensor, "B Hk N E"] | None
    log_weight: Float[Tensor, "#B #Hk #G #L #N"] | Bool[Tensor, "#B #Hk #G #L #N"] | None
    scale: float | Float[Tensor, "#B #Hk #G #L 1"]
    is_causal: bool
    lead: tuple[int, ...]
    """The caller's shape of a number per query."""

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
        return self.query.to(self.dtype) * self.scale


def check_problem(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    log_weight: Tensor | None,
    scale: Scale,
    is_causal: bool,
) -> Problem:
    """Check every argument and bring it to the common layout.

    Raises:
        TypeError: something is not a tensor, not floating-point, or of another dtype than the query.
        ValueError: shapes or devices that do not fit; the message names them.
    """
    tensors = {"query": query, "key": key} | ({} if value is None else {"value": value})
    _check_tensors(tensors)
    _check_shapes(query, key, value)
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be True or False, got {is_causal!r}")
    key_heads = key.shape[1]
    heads = query.shape[1:3] if query.ndim == 5 else (key_heads, query.shape[1] // key_heads)
    layout = (query.shape[0], *heads, query.shape[-2], key.shape[2])
    return Problem(
        query=query if query.ndim == 5 else query.unflatten(1, heads),
        key=key,
        value=value,
        log_weight=None if log_weight is None else _layout_log_weight(log_weight, query, key, layout),
        scale=_layout_scale(scale, query, layout),
        is_causal=is_causal,
        lead=tuple(query.shape[:-1]),
    )


def _check_tensors(tensors: dict[str, Tensor]) -> None:
    query = tensors["query"]
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {tensor.dtype}")
        if tensor.dtype != query.dtype:
            raise TypeError(f"query and {name} must have one dtype, got {query.dtype} and {tensor.dtype}")
        if tensor.device != query.device:
            raise ValueError(f"query and {name} must be on one device, got {query.device} and {tensor.device}")


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
    if not isinstance(log_weight, Tensor):
        raise TypeError(f"log_weight must be a tensor, got {type(log_weight).__name__}")
    if log_weight.dtype != torch.bool and not log_weight.is_floating_point():
        raise TypeError(f"log_weight must be boolean (True keeps) or floating-point, got {log_weight.dtype}")
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
    if isinstance(scale, bool) or not isinstance(scale, float | int | Tensor):
        raise TypeError(f"scale must be a number, a tensor or None, got {type(scale).__name__}")
    if not isinstance(scale, Tensor):
        if not math.isfinite(scale):
            raise ValueError(f"scale must be finite, got {scale}")
        return float(scale)
    if not scale.is_floating_point():
        raise TypeError(f"scale must be a floating-point tensor, got {scale.dtype}")
    if scale.device != query.device and scale.ndim > 0:
        raise ValueError(f"query and scale must be on one device, got {query.device} and {scale.device}")
    heads = layout[1] * layout[2]
    if scale.ndim == 0:
        return scale
    if scale.ndim == 1 and scale.shape[0] == heads:
        return scale.reshape(1, *layout[1:3], 1, 1)
    wanted = (*query.shape[:-1], 1)
    shape = tuple(scale.shape)
    if len(shape) != len(wanted) or any(a not in (1, b) for a, b in zip(shape, wanted, strict=True)):
        raise ValueError(
            f"scale must be one number, {heads} (one a head) or broadcast to {wanted} for query "
            f"{tuple(query.shape)}, got shape {shape}"
        )
    if len(wanted) == 5:
        return scale
    return scale.unsqueeze(2) if shape[1] == 1 else scale.unflatten(1, layout[1:3])


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
