"""Attention's weights as explicit matrices in float64, from arguments in every form that the package takes."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tests.support.ops.fuzz.arithmetic import Rounding
from tests.support.ops.fuzz.draws import Draws
from torch import Tensor

from massieu.ops import Documents


@dataclass(frozen=True)
class AttentionShape:
    """The sizes of a call."""

    batch: tuple[int, ...]
    key_heads: int
    group: int
    length: int
    keys: int
    size: int
    value_size: int
    grouped: bool
    """Whether queries are (*batch, Hk, G, L, D)."""

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of a number a query, as the caller has it."""
        heads = (self.key_heads, self.group) if self.grouped else (self.key_heads * self.group,)
        return (*self.batch, *heads, self.length)

    @property
    def heads(self) -> int:
        return self.key_heads * self.group

    def apart(self, numbers: Tensor) -> Tensor:
        """From (*lead, ·) to (*batch, Hk, G, L, ·)."""
        return numbers if self.grouped else numbers.unflatten(-3, (self.key_heads, self.group))


@dataclass(frozen=True)
class Positions:
    """What a query sees by its place."""

    is_causal: bool = False
    window: int | tuple[int, int] | None = None
    query_offset: int = 0
    documents: tuple[list[int], list[int]] | None = None
    """Lengths of queries and keys."""

    def options(self) -> dict:
        documents = None if self.documents is None else Documents.of_lengths(*self.documents)
        return {
            "is_causal": self.is_causal,
            "window": self.window,
            "query_offset": self.query_offset,
            "documents": documents,
        }

    def visible(self, length: int, keys: int) -> Tensor:
        """(L, N)."""
        lengths, key_lengths = self.documents or ([length], [keys])
        blocks = [self._block(*pair) for pair in zip(lengths, key_lengths, strict=True)]
        return torch.block_diag(*[block.int() for block in blocks]).bool().reshape(length, keys)

    def _block(self, length: int, keys: int) -> Tensor:
        ahead = torch.arange(keys) - torch.arange(length).unsqueeze(1) - self.query_offset
        seen = torch.ones(length, keys, dtype=torch.bool)
        if self.is_causal:
            seen = seen & (ahead <= 0)
        if self.window is not None:
            left, right = self.window if isinstance(self.window, tuple) else (self.window, self.window)
            seen = seen & (-left <= ahead) & (ahead <= right)
        return seen


@dataclass(frozen=True)
class Law:
    """Scores, log-weights and probabilities (*batch, Hk, G, L, N + 1): the last key is the sink, hidden if there is none."""

    scores: Tensor
    visible: Tensor
    attention: "Normalised"
    prior: "Normalised"
    """Of the log-weights alone."""

    @property
    def empty(self) -> Tensor:
        return ~self.visible.any(-1)

    def hide(self, level: Tensor) -> Tensor:
        return level.masked_fill(self.empty, -math.inf)


def law(
    shape: AttentionShape,
    positions: Positions,
    softcap: float | None,
    views: dict,
    scale: float | None,
    sink: float | None,
    rounding: Rounding,
) -> Law:
    """From the tensors of a call by name, or numbers for scale and sink."""
    query, key = shape.apart(rounding(views["query"])), rounding(views["key"]).unsqueeze(-3)
    factor = per_query(shape, views["scale"]) if "scale" in views else (shape.size**-0.5 if scale is None else scale)
    scores = rounding(rounding(query @ key.mT) * factor)
    if softcap is not None:
        scores = rounding.bent(scores, softcap)
    visible = positions.visible(shape.length, shape.keys).expand(scores.shape)
    weight = torch.zeros_like(scores)
    if "log_weight" in views:
        given = shape.apart(views["log_weight"].expand(*shape.lead, shape.keys))
        kept = given if given.dtype == torch.bool else given > -math.inf
        visible = visible & kept
        if given.dtype != torch.bool:
            weight = given.where(kept, 0.0)
    level = torch.full(scores.shape[:-1], -math.inf if sink is None else float(sink), dtype=torch.float64)
    if "sink" in views:
        level = per_query(shape, views["sink"]).squeeze(-1).expand(scores.shape[:-1])
    scores, weight = F.pad(scores, (0, 1)), torch.cat([weight, level.where(level > -math.inf, 0.0).unsqueeze(-1)], -1)
    visible = torch.cat([visible, (level > -math.inf).unsqueeze(-1)], -1)
    attention = normalised(rounding(scores + weight), visible, rounding)
    return Law(scores, visible, attention, normalised(weight, visible, rounding))


class Normalised(NamedTuple):
    """Probabilities, their logarithms and log Z; all 0 for what is hidden, and where nothing is visible."""

    probability: Tensor
    log_probability: Tensor
    log_partition: Tensor


def normalised(tilted: Tensor, visible: Tensor, rounding: Rounding) -> Normalised:
    """Of the visible entries in the last dimension.

    All is relative to the largest entry, which is left out of the sum: so small logarithms keep their digits in float64.
    """
    if tilted.shape[-1] == 0:
        return Normalised(tilted, tilted, tilted.sum(-1))
    empty = ~visible.any(-1, keepdim=True)
    place = tilted.detach().masked_fill(~visible, -math.inf).argmax(-1, keepdim=True)
    top = rounding.cotangents(tilted.gather(-1, place))
    relative = rounding(rounding.cotangents(tilted) - top).where(visible, 0.0)
    weights = rounding(relative.exp()).where(visible, 0.0)
    others = torch.ones_like(visible).scatter(-1, place, False)
    rest = rounding(weights.where(others, 0.0).sum(-1, keepdim=True))
    log_total = rounding(torch.log1p(rest))
    log_probability = rounding(relative - log_total).where(visible, 0.0)
    probability = rounding(log_probability.exp()).where(visible, 0.0)
    # A log Z near 0 is as far off as Z is.
    level = rounding(rounding(1 + rest).log() + top).where(~empty, 0.0).squeeze(-1)
    return Normalised(probability, log_probability, level)


def per_query(shape: AttentionShape, given: Tensor, size: int = 1) -> Tensor:
    """What is given once, one a head or one a query, to broadcast with (*batch, Hk, G, L, size)."""
    if given.ndim >= len(shape.lead) + 1:
        return shape.apart(given.expand(*shape.lead, size))
    if size > 1 or given.ndim == 2:
        # Vectors: (E,), or (H, E).
        return given if given.ndim == 1 else given.view(shape.key_heads, shape.group, 1, given.shape[-1])
    if given.numel() == 1:
        return given.reshape(1)
    return given.view(shape.key_heads, shape.group, 1, 1)


@dataclass
class AttentionDraw:
    """The arguments that attention's kernels share."""

    shape: AttentionShape
    positions: Positions = Positions()
    softcap: float | None = None
    scale: float | None = None
    sink: float | None = None

    def options(self, views: dict) -> dict:
        """Of the call, but for query, key and value."""
        tensors = {name: views[name] for name in ("log_weight", "scale", "sink", "sink_value") if name in views}
        numbers = {"softcap": self.softcap, "scale": self.scale, "sink": self.sink}
        return self.positions.options() | {k: v for k, v in numbers.items() if v is not None} | tensors

    def law(self, views: dict, rounding: Rounding) -> Law:
        return law(self.shape, self.positions, self.softcap, views, self.scale, self.sink, rounding)


def draw_attention(
    draws: Draws, dtype: torch.dtype, value: bool = True, four: bool = False, long: bool = True
) -> AttentionDraw:
    """Shapes, query, key and, if wanted, value; everything else as it is by default."""
    batch = (
        draws.choice([(2,), (1,), (3,)]) if four else draws.choice([(), (1,), (2,), (2,), (3,), (2, 1), (1, 2), (2, 2)])
    )
    length, keys = draws.length(), draws.length()
    key_heads, group = draws.choice([1, 1, 2, 3]), draws.choice([1, 1, 2, 3])
    if long and draws.chance(0.08):
        # More than one block or chunk.
        batch, key_heads, group = draws.choice([(1,), (2,)]), 1, draws.choice([1, 2])
        length = draws.whole(100, 300)
        keys = draws.choice([length, draws.whole(100, 300)])
    size, value_size = (draws.choice([1, 2, 3, 4, 8, 16]) for _ in range(2))
    shape = AttentionShape(batch, key_heads, group, length, keys, size, value_size, draws.chance(0.3))
    spread = draws.choice([0.1, 1.0, 1.0, 2.0])
    draws.add_numbers("query", (*shape.lead, size), dtype, spread)
    draws.add_numbers("key", (*batch, key_heads, keys, size), dtype, spread)
    if value:
        draws.add_numbers("value", (*batch, key_heads, keys, value_size), dtype)
    return AttentionDraw(shape)


def draw_positions(draws: Draws, drawn: AttentionDraw, window: bool = True, documents: bool = True) -> None:
    shape = drawn.shape
    drawn.positions = Positions(
        is_causal=draws.chance(0.4),
        window=draws.choice([None, None, 0, 1, 3, (2, 0), (0, 2), (1, 70), (64, 3)]) if window else None,
        query_offset=draws.choice([0, 0, 1, 3, -2, shape.keys - shape.length, shape.keys + 1]),
        documents=_draw_documents(draws, shape) if documents and draws.chance(0.2) else None,
    )
    draws.say(**vars(drawn.positions))


def _draw_documents(draws: Draws, shape: AttentionShape) -> tuple[list[int], list[int]]:
    count = draws.whole(1, 4)
    lengths = draws.parts(shape.length, count)
    return lengths, (lengths if shape.length == shape.keys and draws.chance(0.6) else draws.parts(shape.keys, count))


def draw_log_weight(draws: Draws, drawn: AttentionDraw, dtype: torch.dtype) -> None:
    """Of any shape that broadcasts."""
    full = (*drawn.shape.lead, drawn.shape.keys)
    dims = draws.choice([0, 1, 2, len(full), len(full), len(full)] + ([] if drawn.shape.grouped else [3]))
    draws.add_log_weight("log_weight", draws.broadcasting(full[len(full) - dims :]), dtype)


def draw_per_query(draws: Draws, name: str, shape: AttentionShape, make, size: tuple[int, ...] = ()) -> None:
    """A tensor given once, one a head or one a query."""
    forms = [size, (shape.heads, *size), (*draws.broadcasting(shape.lead), *(size or (1,)))]
    draws.add(name, draws.choice(forms if size else [*forms, (1,)]), make)


def draw_scale(draws: Draws, drawn: AttentionDraw, dtype: torch.dtype) -> None:
    kind, dtype = draws.choice(["default", "number", "tensor"]), draws.choice([dtype, torch.float32])
    if kind == "number":
        drawn.scale = draws.choice([-0.7, 0.0, 0.3, 1, 2.5])
        draws.say(scale=drawn.scale)
    elif kind == "tensor":
        draw_per_query(draws, "scale", drawn.shape, lambda *size: (0.5 + draws.normal(*size)).to(dtype))


def draw_sink(draws: Draws, drawn: AttentionDraw, dtype: torch.dtype, value: bool) -> None:
    kind, dtype = draws.choice(["none", "number", "tensor"]), draws.choice([dtype, torch.float32])
    hidden = draws.choice([0.0, 0.0, 0.4])
    if kind == "none":
        return
    if kind == "number":
        drawn.sink = draws.choice([0.0, 0, -2.5, 4.0, -math.inf])
        draws.say(sink=drawn.sink)
    else:

        def make(*size: int) -> Tensor:
            numbers = 2 * draws.normal(*size)
            return numbers.masked_fill(draws.normal(*size).abs() < hidden, -math.inf).to(dtype)

        draw_per_query(draws, "sink", drawn.shape, make)
    if value and draws.chance(0.4):
        draw_per_query(
            draws, "sink_value", drawn.shape, lambda *size: draws.normal(*size).to(dtype), (drawn.shape.value_size,)
        )
