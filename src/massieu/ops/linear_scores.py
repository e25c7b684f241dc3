"""Log-partitions of linear scores, and by how much they exceed one target's score, without the matrix of scores.

Row i gives column j the score ``row_i·column_j``. Two losses are made of it: a vocabulary's (columns are the words) and
the contrastive ones (columns are the keys). Tiles of scores are computed twice, once in the forward pass and once in the
backward pass; derivatives beyond the first, forward mode and compiled transforms take plain operations in blocks of rows.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from massieu.foundation.arguments import check_one_device, check_range, check_shape, floating, integers, number
from massieu.foundation.transforms import (
    in_functorch,
    in_nested_forward_mode,
    may_be_differentiated,
    values_are_readable,
    without_autocast,
)
from massieu.ops import reference, score_tiles
from massieu.ops.differentiable import differentiable, one_by_one, recomputed
from massieu.ops.score_tiles import OPTIONS, TENSORS, ScorePlan
from massieu.ops.shapes import at_once, slices


class Direction(NamedTuple):
    """Results for one direction, a number for each row (or column)."""

    excess: Tensor
    """log Z minus the score of the target; exactly 0 where the target has all the weight."""
    log_partition: Tensor

    def seen_excess(self) -> Tensor:
        """The excess; 0 for a row that sees nothing, which has nothing to be distinguished from."""
        return self.excess.masked_fill(self.log_partition.detach() == -torch.inf, 0.0)


def index_tensor(name: str, given: Any, shape: tuple[int, ...], **beside: Tensor) -> Tensor:
    """64-bit integers of that shape, on the device of the other tensor; a `TypeError` or `ValueError`."""
    # Wide unsigned integers can be neither compared nor ordered.
    wide = isinstance(given, Tensor) and given.dtype in (torch.uint16, torch.uint32, torch.uint64)
    found = integers(name, given.long() if wide else given)
    check_shape(name, found, shape)
    check_one_device(**beside, **{name: found})
    return found.long()


def check_places(name: str, places: Tensor, count: int, alternative: str = "") -> None:
    """Raise a `ValueError` unless each is in 0 … count − 1."""
    wrong = places[(places < 0) | (places >= count)]
    if len(wrong):
        raise ValueError(f"{name} must be in 0 … {count - 1}{alternative}, got {wrong[0].item()}")


def one_number(
    name: str, given: float | Tensor, dtype: torch.dtype, *, above: float | None = None, **beside: Tensor
) -> float | Tensor:
    """A number, or a tensor of one as one without dimensions of that dtype, on the device of the other; or an error."""
    if not isinstance(given, Tensor):
        return float(number(name, given, above=above))
    if floating(name, given).numel() != 1:
        raise ValueError(f"{name} must be one number, got shape {tuple(given.shape)}")
    check_one_device(**beside, **{name: given})
    if values_are_known(given):
        check_range(name, given, above=above)
    return given.reshape(()).to(dtype)


def values_are_known(tensor: Tensor) -> bool:
    """Whether the shapes that follow may depend on values: on the CPU, where looking is no wait, outside transforms."""
    return tensor.device.type == "cpu" and not in_functorch() and values_are_readable(tensor)


class Statistics(NamedTuple):
    """What is computed for a `ScorePlan` with `above`, a number for each row; the last three without derivatives."""

    excess: Tensor
    log_partition: Tensor
    entropy: Tensor
    surplus: Tensor
    """log Z minus the largest score."""
    largest: Tensor
    """The largest score."""
    larger: Tensor
    """How many scores exceed `above`, that of the target left out."""


def log_partitions(plan: ScorePlan) -> tuple[Direction, ...]:
    """log Σ_j exp(row_i·column_j + bias_j + log_weight_ij) over what row i sees, and its excess over the target's score."""
    found = compute(plan, plan.log_weight)
    return tuple(Direction(*found[start : start + 2]) for start in range(0, len(found), 2))


def compute(plan: ScorePlan, *others: Tensor | None) -> tuple[Tensor, ...]:
    """All that `massieu.ops.score_tiles.forward` returns, with its derivatives.

    Args:
        others: what derivatives may be wanted of beside rows, columns and bias.
    """
    weight_gradient = may_be_differentiated(*(other for other in others if other is not None))
    compiling = torch.compiler.is_compiling()
    function = tiled
    if weight_gradient or (compiling and in_functorch()) or in_nested_forward_mode():
        function = plain
    elif compiling and plan.column_ids is not None:
        # The compiler refuses a custom function that is given one tensor twice.
        plan = plan._replace(column_ids=plan.column_ids.clone())
    with without_autocast(plan.row.device):
        return function(*plan)


def plain(*fields: Any) -> tuple[Tensor, ...]:
    """The definition, in blocks of rows; (excess, log-partition) of a `ScorePlan`, for both directions one after the other."""
    plan = ScorePlan(*fields)
    bias = None if plan.bias is None else plan.bias.to(plan.dtype)
    plan = plan._replace(row=plan.row.to(plan.dtype), column=plan.column.to(plan.dtype), bias=bias)
    return _plain_rows(plan) + (_plain_rows(plan.turned()) if plan.both else ())


def _plain_rows(plan: ScorePlan) -> tuple[Tensor, ...]:
    length = len(plan.row)
    block = max(1, min(length, at_once(reference.BLOCK_PAIRS, plan.row.device) // max(1, len(plan.column))))
    parts = []
    for rows in list(slices(length, block)) or [slice(0, 0)]:
        own = {
            name: part[rows]
            for name, part in (("row", plan.row), ("log_weight", plan.log_weight), ("share", plan.share))
            if part is not None
        }
        part = plan._replace(**own)
        function = partial(_plain_block, rows, part[TENSORS:])
        parts.append(function(*part[:TENSORS]) if block >= length else recomputed(function, *part[:TENSORS]))
    return tuple(torch.cat(results) for results in zip(*parts, strict=True))


def _plain_block(rows: slice, options: tuple[Any, ...], *tensors: Any) -> tuple[Tensor, ...]:
    """Of a plan whose rows, log-weights and shares are those of some rows alone."""
    plan = ScorePlan(*tensors, *options)
    row, column, bias, target, log_weight = plan.row, plan.column, plan.bias, plan.target[rows], plan.log_weight
    with without_autocast(row.device):
        scores = row @ column.mT if plan.scale == 1 else row @ column.mT * plan.scale
    weight = scores.new_zeros(()) if bias is None else bias
    if plan.bias_in_score and bias is not None:
        # A hidden word's score is −inf: as a constant, so that derivatives of what is masked later are numbers.
        weight = torch.where(bias == -torch.inf, bias.detach(), 0.0)
        scores = scores + bias.masked_fill(bias == -torch.inf, 0.0)
    logits, bias = scores, weight
    if plan.softcap is not None:
        scores = plan.softcap * torch.tanh(scores / plan.softcap)
    if log_weight is not None and log_weight.dtype == torch.bool:
        weight = torch.where(log_weight, weight, -torch.inf)
    elif log_weight is not None:
        weight = weight + log_weight.to(scores.dtype)
    hidden = plan.hidden(rows, slice(0, len(column)))
    if hidden is not None:
        weight = torch.where(hidden, -torch.inf, weight)
    inside = (target >= 0) & (target < len(column))
    index = torch.where(inside, target, 0)
    own = scores.gather(1, index.unsqueeze(1)).squeeze(1) if len(column) else scores.sum(1)
    lost = torch.zeros_like(own)
    if plan.bias_in_score and plan.bias is not None:
        lost = lost.masked_fill(bias[index] == -torch.inf, torch.inf)
    if plan.above is not None:
        larger = ((logits + bias).detach() > plan.above[rows].unsqueeze(1)).to(scores.dtype)
        count = larger.sum(1) - torch.where(inside, larger.gather(1, index.unsqueeze(1)).squeeze(1), 0.0)
        excess, *others = _spread(scores + weight, own)
        return (excess + lost).masked_fill(~inside, torch.nan), *others, count
    excess = reference.softmax(scores - own.unsqueeze(1), weight)[2]
    found = (excess + lost).masked_fill(~inside, torch.nan), excess + own
    spread = plan.spread(slice(0, len(row)), slice(0, len(column)))
    if spread is None:
        return found
    spread = spread.expand_as(scores)
    gone = torch.zeros_like(scores).masked_fill((weight == -torch.inf) & (spread != 0), torch.inf)
    fall = torch.where(weight == -torch.inf, gone, (excess + own).unsqueeze(1) - scores)
    return *found, (spread * fall).sum(1), spread.sum(1)


def _spread(tilted: Tensor, own: Tensor) -> tuple[Tensor, ...]:
    """Excess over a score, log Z, entropy, log Z less the largest score, and that, as `score_tiles` forms them."""
    largest, place = tilted.detach().max(1, keepdim=True)
    empty = largest == -torch.inf
    shift = largest.masked_fill(empty, 0.0)
    weights = (tilted - shift).exp()
    # The largest one's weight is 1, which would swallow the others'; its derivative is not.
    rest = weights.scatter(1, place, 0.0).sum(1) + (weights.gather(1, place) - 1).masked_fill(empty, 0.0).squeeze(1)
    fall = (weights * torch.where(tilted == -torch.inf, 0.0, shift - tilted)).sum(1)
    empty, shift, surplus = empty.squeeze(1), shift.squeeze(1), rest.log1p()
    level = (surplus + shift).masked_fill(empty, -torch.inf)
    return surplus + (shift - own), level, surplus + fall / (1 + rest), surplus, largest.squeeze(1)


def _forward(*fields: Any) -> tuple[Tensor, ...]:
    forward = score_tiles.forward_operator if torch.compiler.is_compiling() else score_tiles.forward
    return tuple(forward(*fields))


def _gradient(
    tensors: Sequence[Any],
    results: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    options: Sequence[Any],
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    with without_autocast(tensors[0].device):
        if torch.compiler.is_compiling():
            return tuple(score_tiles.backward_operator(*tensors, results, cotangents, *options, wanted))
        return score_tiles.backward(ScorePlan(*tensors, *options), results, cotangents, wanted)


# Each item of vmap has scores of its own, so nothing is lost by doing one after the other.
tiled = differentiable(_forward, _gradient, plain, tensors=TENSORS, options=OPTIONS, vmap=one_by_one)
"""`plain` by tiles of scores; derivatives are those in row, column and bias."""
