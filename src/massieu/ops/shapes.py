"""What every function of this package accepts, and the one layout they all work in.

Queries are brought to ``(B, Hk, G, L, D)``: a batch, key heads, the query heads that share a key head, queries and
head size. Log-weights become ``(B or 1, Hk or 1, G or 1, L or 1, N or 1)``.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.foundation.arguments import (
    check_fits,
    check_one_device,
    described,
    flag,
    floating,
    number,
    whole_number,
)
from massieu.ops.documents import Documents, check_documents

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
    offset: int = 0
    """Of causality: query i sees keys up to i + offset. A window has it in."""
    softcap: float | None = None
    sink: Float[Tensor, "#B #Hk #G #L"] | Float[Tensor, ""] | None = None
    sink_value: Float[Tensor, "#B #Hk #G #L E"] | Float[Tensor, "E"] | None = None
    documents: Documents | None = None
    """Of a packed row; causality and a window then go by positions in a document."""

    @property
    def dtype(self) -> torch.dtype:
        """What log-scale results are computed in."""
        return working_dtype(self.query)

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

    def narrow(self, rows: slice, keys: slice) -> "AttentionProblem":
        """Some of the queries and some of the keys, numbered anew; the window is left as it is."""
        weight, scale = self.log_weight, self.scale
        if weight is not None:
            weight = weight[..., rows, :] if weight.shape[3] > 1 else weight
            weight = weight[..., keys] if weight.shape[4] > 1 else weight
        if isinstance(scale, Tensor) and scale.ndim > 0 and scale.shape[3] > 1:
            scale = scale[..., rows, :]
        return replace(
            self,
            query=self.query[..., rows, :],
            key=self.key[..., keys, :],
            value=None if self.value is None else self.value[..., keys, :],
            log_weight=weight,
            scale=scale,
        )

    @property
    def band(self) -> "Band":
        """The window, or causality as one."""
        return (None, self.offset) if self.is_causal else self.window

    def with_least_band(self) -> "AttentionProblem":
        """The same, its window as causality or as nothing where it hides no more than that."""
        return replace(self, **positions(self.band, self.query.shape[3], self.key.shape[2]))

    def idle(self) -> Bool[Tensor, "#B #Hk #G L"] | None:
        """Which queries see no key; None where that cannot be."""
        weight, band = self.log_weight, self.band
        length, keys = self.query.shape[3], self.key.shape[2]
        if weight is None and self.window is None:
            return None
        if weight is None:
            kept = torch.ones(1, 1, 1, 1, keys, dtype=torch.bool, device=self.query.device)
        else:
            kept = weight.detach() if weight.dtype == torch.bool else weight.detach() != -torch.inf
        if band is None:
            return ~kept.any(-1)
        if kept.shape[3] != 1:
            hidden = hidden_by_position(band, 0, length, keys, kept.device)
            return ~(kept & ~hidden).any(-1)  # pyright: ignore[reportOptionalOperand]
        # One mask of keys for all queries: how many are kept below either end of each query's band.
        before = F.pad(kept.expand(*kept.shape[:-1], keys).squeeze(3).cumsum(-1), (1, 0))
        query = torch.arange(length, device=kept.device)
        low, high = band
        below = 0 if low is None else before[..., (query + low).clamp(0, keys)]
        return before[..., (query + high + 1).clamp(0, keys)] == below

    def without_idle(self) -> "AttentionProblem":
        """Queries that see no key take no part, in no result and no gradient of another: zeros, so that no NaN of theirs
        meets a key or a weight of 0."""
        empty = None if self.pairs == 0 else self.idle()
        return self if empty is None else replace(self, query=self.query.masked_fill(empty.unsqueeze(-1), 0.0))


Band = tuple[int | None, int] | None
"""(low, high): query i sees keys i + low … i + high; a low of None: all from the first; None: all."""


def slices(length: int, size: int) -> Iterator[slice]:
    """0 … length − 1 in pieces of at most `size`."""
    for first in range(0, length, size):
        yield slice(first, min(length, first + size))


def at_once(pairs: int, device: torch.device) -> int:
    """How many scores to work on at a time: so many on the CPU, 2²⁵ (128 MiB in float32) on a device, to keep it busy."""
    return pairs if device.type == "cpu" else max(pairs, 1 << 25)


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


def working_dtype(tensor: Tensor) -> torch.dtype:
    """What log-scale results are computed in: float64 for float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class CallLayout(NamedTuple):
    """The sizes of a call, and how its tensors come to the common layout."""

    batch: tuple[int, ...]
    """The caller's, of any number of dimensions."""
    key_heads: int
    group: int
    length: int
    keys: int
    grouped: bool
    """Whether queries come as ``(*batch, Hk, G, L, D)``."""

    @staticmethod
    def of(query: Tensor, key: Tensor) -> "CallLayout":
        """Of tensors that fit each other."""
        grouped, key_heads = query.ndim > key.ndim, key.shape[-3]
        group = query.shape[-3] if grouped else query.shape[-3] // key_heads
        return CallLayout(tuple(key.shape[:-3]), key_heads, group, query.shape[-2], key.shape[-2], grouped)

    def one_batch(self, tensor: Tensor, others: int) -> Tensor:
        """From ``(#*batch, ...)`` to ``(#B, ...)``, with so many other dimensions."""
        if len(self.batch) == 1:
            return tensor
        batch, rest = tensor.shape[:-others], tensor.shape[-others:]
        if all(size == 1 for size in batch):
            return tensor.reshape(1, *rest)
        return tensor.expand(*self.batch, *rest).flatten(0, len(self.batch) - 1)

    def heads_apart(self, tensor: Tensor) -> Tensor:
        """From ``(#*batch, #H, ·, ·)`` or ``(#*batch, #Hk, #G, ·, ·)`` to ``(#B, #Hk, #G, ·, ·)``."""
        if self.grouped:
            return self.one_batch(tensor, 4)
        tensor = self.one_batch(tensor, 3)
        one = tensor.shape[1] == 1 or self.group == 1
        return tensor.unsqueeze(2) if one else tensor.unflatten(1, (self.key_heads, self.group))


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
    query_offset: int = 0,
    documents: Documents | None = None,
) -> AttentionProblem:
    """Check every argument and bring it to the common layout.

    Raises:
        TypeError: something is not a tensor, not floating-point, of another dtype than the query, or an option of
            another type.
        ValueError: shapes or devices that do not fit, or an option out of its range; the message names them.
    """
    check_alike(query=query, key=key, **({} if value is None else {"value": value}))
    _check_shapes(query, key, value)
    layout, dtype, band = CallLayout.of(query, key), working_dtype(query), check_band(is_causal, window, query_offset)
    if documents is not None:
        check_documents(documents, layout.length, layout.keys)
    if softcap is not None:
        softcap = float(number("softcap", softcap, above=0))
        check_fits("softcap", softcap, dtype)
    if sink_value is not None:
        if sink is None or value is None:
            raise ValueError("sink_value needs a sink, whose value it is, and values of the keys")
        sink_value = _layout_per_query("sink_value", sink_value, query, layout, value.shape[-1]).to(dtype)
    return AttentionProblem(
        query=layout.heads_apart(query),
        key=layout.one_batch(key, 3),
        value=None if value is None else layout.one_batch(value, 3),
        log_weight=None if log_weight is None else layout_log_weight(log_weight, query, layout),
        scale=_layout_scale(scale, query, layout),
        lead=tuple(query.shape[:-1]),
        softcap=softcap,
        sink=_layout_sink(sink, dtype, query, layout),
        sink_value=sink_value,
        documents=None if documents is None else documents.constant(),
        **positions(band, layout.length, layout.keys),
    )


def check_band(is_causal: bool, window: Window, query_offset: int) -> "Band":
    """Which keys a query sees by its position; a `TypeError` or `ValueError` for an argument that cannot be."""
    flag("is_causal", is_causal)
    offset = whole_number("query_offset", query_offset, least=0)
    if window is None:
        return (None, offset) if is_causal else None
    left, right = sides_of(window)
    return offset - left, offset + (0 if is_causal else right)


def sides_of(window: int | tuple[int, int]) -> tuple[int, int]:
    """How many keys a window has to the left and to the right; a `TypeError` or `ValueError` for what is no window."""
    sides = window if isinstance(window, tuple) else (window, window)
    if len(sides) != 2 or any(isinstance(side, bool) or not isinstance(side, int) for side in sides):
        raise TypeError(f"window must be a whole number or a pair of them, got {described(window)}")
    if min(sides) < 0:
        raise ValueError(f"window must not be negative, got {window}")
    return sides


def positions(band: "Band", length: int, keys: int) -> dict[str, Any]:
    """`is_causal`, `offset` and `window` of a problem: of a band whose first query sees a key, what hides one."""
    causal, offset, window = False, 0, None
    if band is not None and band[0] is not None and length - 1 + band[0] > 0:
        window = band
    elif band is not None and band[1] < keys - 1:
        # Nothing is hidden before any query, and something after the first.
        causal, offset = True, band[1]
    return {"is_causal": causal, "offset": offset, "window": window}


def check_alike(mixed: bool = False, /, **tensors: Any) -> None:
    """Floating-point tensors on one device and, unless `mixed`, of one dtype; a `TypeError` or `ValueError`."""
    (first, like), *_ = tensors.items()
    for name, tensor in tensors.items():
        dtype = floating(name, tensor).dtype
        if dtype != like.dtype and not mixed:
            raise TypeError(f"{first} and {name} must have one dtype, got {like.dtype} and {dtype}")
    # Nearly always they are, and small calls take microseconds.
    if any(tensor.device != like.device for tensor in tensors.values()):
        check_one_device(**tensors)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor | None) -> None:
    q, k = tuple(query.shape), tuple(key.shape)
    if len(k) < 3:
        raise ValueError(f"key must have shape (*batch, H, N, D), got {k}")
    grouped = len(q) == len(k) + 1
    if len(q) != len(k) and not grouped:
        raise ValueError(f"query must have shape (*batch, H, L, D) or (*batch, Hk, G, L, D), got {q} for key {k}")
    if q[-1] != k[-1]:
        raise ValueError(f"query and key must have one head size, got {q[-1]} in {q} and {k[-1]} in {k}")
    if k[-1] == 0 or k[-3] == 0:
        raise ValueError(f"key must have at least one head and a head size of at least 1, got {k}")
    if q[: len(k) - 3] != k[:-3]:
        raise ValueError(f"query and key must have one batch, got {q[: len(k) - 3]} in {q} and {k[:-3]} in {k}")
    if grouped and q[-4] != k[-3]:
        raise ValueError(f"a query (*batch, Hk, G, L, D) must have the key's {k[-3]} heads, got {q} for key {k}")
    if q[-3] % k[-3] and not grouped:
        raise ValueError(f"the query's heads must be a multiple of the key's {k[-3]}, got {q[-3]} in {q} for key {k}")
    if value is not None:
        v = tuple(value.shape)
        if v[:-1] != k[:-1]:
            raise ValueError(f"value must have the key's batch, heads and length {k[:-1]}, got {v} for key {k}")
        if v[-1] == 0:
            raise ValueError(f"value must have a head size of at least 1, got {v}")


def layout_log_weight(log_weight: Tensor, query: Tensor, layout: CallLayout) -> Tensor:
    """A log-weight in the common layout; a `TypeError` or `ValueError` where it does not fit."""
    floating("log_weight", log_weight, or_boolean=True)
    check_one_device(query=query, log_weight=log_weight)
    wanted = (*query.shape[:-1], layout.keys)
    shape = tuple(log_weight.shape)
    padded = (1,) * (len(wanted) - len(shape)) + shape
    # A four-dimensional weight would silently line its batch up with the key heads of a five-dimensional query.
    too_vague = layout.grouped and 2 < len(shape) < len(wanted)
    if len(shape) > len(wanted) or too_vague or any(a not in (1, b) for a, b in zip(padded, wanted, strict=True)):
        form = f"; give all dimensions, {len(wanted)}" if too_vague else ""
        raise ValueError(f"log_weight must broadcast to {wanted} for query {tuple(query.shape)}, got {shape}{form}")
    return layout.heads_apart(log_weight.reshape(padded))


def _layout_scale(scale: Scale, query: Tensor, layout: CallLayout) -> float | Tensor:
    if scale is None:
        return query.shape[-1] ** -0.5
    if isinstance(scale, Tensor):
        return _layout_per_query("scale", scale, query, layout)
    check_fits("scale", number("scale", scale), working_dtype(query))
    return float(scale)


def _layout_sink(sink: Sink, dtype: torch.dtype, query: Tensor, layout: CallLayout) -> Tensor | None:
    if sink is None:
        return None
    if isinstance(sink, Tensor):
        sink = _layout_per_query("sink", sink, query, layout).to(dtype)
        return sink.squeeze(-1) if sink.ndim else sink
    if not (isinstance(sink, float) and sink == -math.inf):
        check_fits("sink", number("sink", sink), dtype)
    return torch.full((), float(sink), dtype=dtype, device=query.device)


def _layout_per_query(name: str, given: Tensor, query: Tensor, layout: CallLayout, size: int | None = None) -> Tensor:
    """What is given once, one a head, or one a query: ``(#B, #Hk, #G, #L, 1)``, or of no dimension, if it is a number.

    Args:
        size: of a vector; then the last dimension, which is there in all forms.
    """
    floating(name, given)
    check_one_device(query=query, **{name: given})
    heads, last, shape = layout.key_heads * layout.group, () if size is None else (size,), tuple(given.shape)
    if shape == last or (shape == (1,) and size is None):
        return given.reshape(last).to(query.device)
    if shape == (heads, *last):
        return given.reshape(1, layout.key_heads, layout.group, 1, *(last or (1,)))
    wanted = (*query.shape[:-1], size or 1)
    fits = len(shape) == len(wanted) and all(a in (1, b) for a, b in zip(shape[:-1], wanted[:-1], strict=True))
    if not fits or shape[-1] != wanted[-1]:
        forms = (
            f"one number, {heads} (one a head)" if size is None else f"of shape {last}, {(heads, size)} (one a head)"
        )
        raise ValueError(
            f"{name} must be {forms} or broadcast to {wanted} for query {tuple(query.shape)}, got shape {shape}"
        )
    return layout.heads_apart(given)
