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
    """With `is_causal`, query i sees keys up to i + offset, which may be negative. A window includes it."""
    softcap: float | None = None
    sink: Float[Tensor, "#B #Hk #G #L"] | Float[Tensor, ""] | None = None
    sink_value: Float[Tensor, "#B #Hk #G #L E"] | Float[Tensor, "E"] | None = None
    documents: Documents | None = None
    """Documents of a packed row; causality and a window then count positions within a document."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which log-scale results are computed."""
        return working_dtype(self.query)

    @property
    def pairs(self) -> int:
        """How many scores there are."""
        batch, key_heads, group, length, _ = self.query.shape
        return batch * key_heads * group * length * self.key.shape[2]

    def restore(self, result: Tensor) -> Tensor:
        """From ``(B, Hk, G, L, ...)`` to the shape of the caller's query."""
        return result.reshape(self.lead + result.shape[4:])

    def scaled_query(self) -> Tensor:
        """scale·query in `dtype`, so that scores are plain dot products."""
        return (self.query.to(self.dtype) * self.scale).to(self.dtype)

    def narrow(self, rows: slice, keys: slice) -> "AttentionProblem":
        """Some of the queries and some of the keys, numbered anew; the window is left as it is."""
        weight = self.log_weight
        scale = self.scale
        # A dimension of size 1 is broadcast, and stays.
        if weight is not None and weight.shape[3] > 1:
            weight = weight[..., rows, :]
        if weight is not None and weight.shape[4] > 1:
            weight = weight[..., keys]
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

    def least_band(self, length: int, keys: int, query_offset: int) -> dict[str, Any]:
        """The fields of a band that hides the same in its simplest form: none where a window or causality hides nothing.

        Args:
            length, keys: number of queries and of keys.
            query_offset: is added to the position of every query.
        """
        band = self.band
        if band is not None:
            low, high = band
            band = (None if low is None else low + query_offset, high + query_offset)
        return band_fields(band, length, keys)

    @property
    def queries_before_keys(self) -> int:
        """How many of the first queries stand before all keys that their band lets them see, and so see none."""
        if self.band is None:
            return 0
        return min(self.query.shape[3], max(0, -self.band[1]))

    def sees_no_key(self) -> Bool[Tensor, "#B #Hk #G L"] | None:
        """True for queries that see no key; None if every query sees one, which causality without a negative offset ensures."""
        weight = self.log_weight
        band = self.band
        length = self.query.shape[3]
        keys = self.key.shape[2]
        if weight is None and self.window is None and self.offset >= 0:
            return None
        if weight is None:
            visible = torch.ones(1, 1, 1, 1, keys, dtype=torch.bool, device=self.query.device)
        else:
            visible = as_visible(weight.detach())
        if band is None:
            return ~visible.any(-1)
        if visible.shape[3] != 1:
            hidden = hidden_by_position(band, 0, length, keys, visible.device)
            return ~(visible & ~hidden).any(-1)  # pyright: ignore[reportOptionalOperand]
        # One mask of keys for all queries. A query sees no key if as many keys are visible before its band's high end as
        # before its low end: cumulative counts take memory linear in queries and keys.
        count_before = F.pad(visible.expand(*visible.shape[:-1], keys).squeeze(3).cumsum(-1), (1, 0))
        query = torch.arange(length, device=visible.device)
        low, high = band
        below = 0 if low is None else count_before[..., (query + low).clamp(0, keys)]
        return count_before[..., (query + high + 1).clamp(0, keys)] == below

    def zero_queries_without_key(self) -> "AttentionProblem":
        """The same problem with zeros for queries that see no key.

        Such a query has no part in any result or gradient. A NaN in it would: 0·NaN is NaN.
        """
        empty = None if self.pairs == 0 else self.sees_no_key()
        if empty is None:
            return self
        return replace(self, query=self.query.masked_fill(empty.unsqueeze(-1), 0.0))


Band = tuple[int | None, int] | None
"""(low, high): query i sees keys i + low … i + high; a low of None: all from the first; None: all."""


def slices(length: int, size: int) -> Iterator[slice]:
    """0 … length − 1 in pieces of at most `size`."""
    for first in range(0, length, size):
        yield slice(first, min(length, first + size))


def scores_per_tile(pairs: int, device: torch.device) -> int:
    """How many scores to work on at a time: `pairs` on the CPU, at least 2²⁵ elsewhere (128 MiB in float32).

    Smaller pieces would leave an accelerator idle between them.
    """
    return pairs if device.type == "cpu" else max(pairs, 1 << 25)


def as_visible(log_weight: Tensor) -> Bool[Tensor, "..."]:
    """True where a log-weight, boolean or float, shows the key: a float of −∞ hides it."""
    if log_weight.dtype == torch.bool:
        return log_weight
    return log_weight != -torch.inf


def hidden_by_position(
    band: Band, first: int, rows: int, keys: int, device: torch.device
) -> Bool[Tensor, "rows keys"] | None:
    """True for the keys 0 … keys − 1 that a band hides from queries first … first + rows − 1; None without a band."""
    if band is None:
        return None
    low, high = band
    key = torch.arange(keys, device=device)
    query = torch.arange(first, first + rows, device=device).unsqueeze(1)
    if low is None:
        return key > query + high
    return (key < query + low) | (key > query + high)


def working_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of log-scale results: float64 for float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class CallLayout(NamedTuple):
    """The sizes of a call, and how its tensors are brought to the common layout."""

    batch: tuple[int, ...]
    """The caller's batch dimensions, any number of them."""
    key_heads: int
    group: int
    length: int
    keys: int
    grouped: bool
    """Whether queries come as ``(*batch, Hk, G, L, D)``."""

    @staticmethod
    def of(query: Tensor, key: Tensor) -> "CallLayout":
        """The layout of a query and a key whose shapes were checked."""
        *batch, key_heads, keys, _ = key.shape
        *_, heads, length, _ = query.shape
        grouped = query.ndim > key.ndim
        group = heads if grouped else heads // key_heads
        return CallLayout(tuple(batch), key_heads, group, length, keys, grouped)

    def flatten_batch(self, tensor: Tensor, others: int) -> Tensor:
        """From ``(#*batch, ...)`` to ``(#B, ...)``, where ``...`` are `others` dimensions."""
        if len(self.batch) == 1:
            return tensor
        batch = tensor.shape[:-others]
        rest = tensor.shape[-others:]
        if all(size == 1 for size in batch):
            return tensor.reshape(1, *rest)
        return tensor.expand(*self.batch, *rest).flatten(0, len(self.batch) - 1)

    def split_heads(self, tensor: Tensor) -> Tensor:
        """From ``(#*batch, #H, ·, ·)`` or ``(#*batch, #Hk, #G, ·, ·)`` to ``(#B, #Hk, #G, ·, ·)``."""
        if self.grouped:
            return self.flatten_batch(tensor, 4)
        tensor = self.flatten_batch(tensor, 3)
        if tensor.shape[1] == 1 or self.group == 1:
            return tensor.unsqueeze(2)
        return tensor.unflatten(1, (self.key_heads, self.group))


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
        TypeError: an argument is not a tensor, not floating-point or not of the query's dtype, or an option has another
            type.
        ValueError: shapes or devices do not fit, or an option is out of its range; the message names them.
    """
    tensors = {"query": query, "key": key}
    if value is not None:
        tensors["value"] = value
    check_alike(**tensors)
    _check_shapes(query, key, value)
    layout = CallLayout.of(query, key)
    dtype = working_dtype(query)
    band = check_band(is_causal, window, query_offset)
    if documents is not None:
        check_documents(documents, layout.length, layout.keys)
    if softcap is not None:
        softcap = float(number("softcap", softcap, above=0))
        check_fits("softcap", softcap, dtype)
    if documents is not None and documents.query_offsets:
        # What the band hides in a document depends on its offset, so that only there can it be simplified.
        fields = _fields_of_any_band(band)
    else:
        fields = band_fields(band, layout.length, layout.keys)
    if sink_value is not None:
        if sink is None or value is None:
            raise ValueError("sink_value needs a sink and values of the keys: give sink and value too")
        sink_value = _layout_per_query("sink_value", sink_value, query, layout, value.shape[-1]).to(dtype)
    return AttentionProblem(
        query=layout.split_heads(query),
        key=layout.flatten_batch(key, 3),
        value=None if value is None else layout.flatten_batch(value, 3),
        log_weight=None if log_weight is None else layout_log_weight(log_weight, query, layout),
        scale=_layout_scale(scale, query, layout),
        lead=tuple(query.shape[:-1]),
        softcap=softcap,
        sink=_layout_sink(sink, dtype, query, layout),
        sink_value=sink_value,
        documents=None if documents is None else documents.constant(),
        **fields,
    )


def check_band(is_causal: bool, window: Window, query_offset: int) -> "Band":
    """The band of keys that a query sees by its position.

    Raises:
        TypeError: an argument of another type.
        ValueError: a negative window.
    """
    flag("is_causal", is_causal)
    offset = whole_number("query_offset", query_offset)
    if window is None:
        return (None, offset) if is_causal else None
    left, right = window_sides(window)
    return offset - left, offset + (0 if is_causal else right)


def window_sides(window: int | tuple[int, int]) -> tuple[int, int]:
    """How many keys a window has to the left and to the right.

    Raises:
        TypeError: neither a whole number nor a pair of them.
        ValueError: a negative number.
    """
    sides = window if isinstance(window, tuple) else (window, window)
    if len(sides) != 2 or any(isinstance(side, bool) or not isinstance(side, int) for side in sides):
        raise TypeError(f"window must be a whole number or a pair of them, got {described(window)}")
    if min(sides) < 0:
        raise ValueError(f"window must not be negative, got {window}")
    return sides


def band_fields(band: "Band", length: int, keys: int) -> dict[str, Any]:
    """A band as `is_causal`, `offset` and `window` of an `AttentionProblem`, in the simplest form that hides the same keys."""
    if band is not None:
        low, high = band
        # The last query's low end is beyond key 0: some key is hidden before a query.
        if low is not None and length - 1 + low > 0:
            return _fields_of_any_band(band)
        if high < keys - 1:
            return _fields_of_any_band((None, high))
    return _fields_of_any_band(None)


def _fields_of_any_band(band: "Band") -> dict[str, Any]:
    """A band as `is_causal`, `offset` and `window` of an `AttentionProblem`, as it is."""
    if band is not None and band[0] is None:
        return {"is_causal": True, "offset": band[1], "window": None}
    return {"is_causal": False, "offset": 0, "window": band}


def check_alike(mixed: bool = False, /, **tensors: Any) -> None:
    """Check floating-point tensors that are computed together.

    Raises:
        TypeError: not a floating-point tensor, or, unless `mixed`, different dtypes.
        ValueError: different devices.
    """
    (first, like), *_ = tensors.items()
    for name, tensor in tensors.items():
        dtype = floating(name, tensor).dtype
        if dtype != like.dtype and not mixed:
            raise TypeError(f"{first} and {name} must have one dtype, got {like.dtype} and {dtype}")
    # `check_one_device` is slow beside a small call, which takes microseconds.
    device = like.device
    if any(tensor.device != device for tensor in tensors.values()):
        check_one_device(**tensors)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor | None) -> None:
    q = tuple(query.shape)
    k = tuple(key.shape)
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
    """A log-weight in the common layout.

    Raises:
        TypeError: neither floating-point nor boolean.
        ValueError: another device than the query's, or a shape that does not broadcast to (*query.shape[:-1], N).
    """
    floating("log_weight", log_weight, or_boolean=True)
    check_one_device(query=query, log_weight=log_weight)
    full_shape = (*query.shape[:-1], layout.keys)
    shape = tuple(log_weight.shape)
    padded = (1,) * (len(full_shape) - len(shape)) + shape
    fits = len(shape) <= len(full_shape) and all(a in (1, b) for a, b in zip(padded, full_shape, strict=True))
    # A four-dimensional weight would silently align its batch with the key heads of a five-dimensional query.
    is_ambiguous = layout.grouped and 2 < len(shape) < len(full_shape)
    if not fits or is_ambiguous:
        hint = f"; give all {len(full_shape)} dimensions" if is_ambiguous else ""
        raise ValueError(f"log_weight must broadcast to {full_shape} for query {tuple(query.shape)}, got {shape}{hint}")
    return layout.split_heads(log_weight.reshape(padded))


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


def _layout_per_query(name: str, tensor: Tensor, query: Tensor, layout: CallLayout, size: int | None = None) -> Tensor:
    """A number or a vector for the whole call, for each head, or for each query, in the common layout.

    Args:
        size: of a vector, the last dimension in every form; None for a number.

    Returns:
        One for the whole call: of no dimension, or (size,). Else ``(#B, #Hk, #G, #L, 1 or size)``.
    """
    floating(name, tensor)
    check_one_device(query=query, **{name: tensor})
    heads = layout.key_heads * layout.group
    last = () if size is None else (size,)
    shape = tuple(tensor.shape)
    if shape == last or (shape == (1,) and size is None):
        return tensor.reshape(last).to(query.device)
    if shape == (heads, *last):
        return tensor.reshape(1, layout.key_heads, layout.group, 1, *(last or (1,)))
    full_shape = (*query.shape[:-1], size or 1)
    fits = len(shape) == len(full_shape) and all(a in (1, b) for a, b in zip(shape[:-1], full_shape[:-1], strict=True))
    if not fits or shape[-1] != full_shape[-1]:
        if size is None:
            forms = f"one number, {heads} (one a head)"
        else:
            forms = f"of shape {last}, {(heads, size)} (one a head)"
        raise ValueError(
            f"{name} must be {forms} or broadcast to {full_shape} for query {tuple(query.shape)}, got shape {shape}"
        )
    return layout.split_heads(tensor)
