"""Log-partitions of linear scores, and their excess over the score of one target, without the matrix of scores.

Row i gives column j the score ``row_i·column_j``. The vocabulary losses (columns are words) and the contrastive losses
(columns are keys) are made of these. Tiles of scores are computed twice, in the forward and in the backward pass. Second
derivatives, forward mode and compiled transforms take plain operations in blocks of rows.
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
from massieu.ops.shapes import scores_per_tile, slices


class Direction(NamedTuple):
    """Results of rows over columns, or of columns over rows: a number for each row, or each column."""

    excess: Tensor
    """log Z minus the score of the target; exactly 0 where the target has all the weight."""
    log_partition: Tensor

    def seen_excess(self) -> Tensor:
        """The excess, and 0 for a row that sees no column: its loss is an empty sum."""
        return self.excess.masked_fill(self.log_partition.detach() == -torch.inf, 0.0)


def index_tensor(name: str, value: Any, shape: tuple[int, ...], **device_of: Tensor) -> Tensor:
    """Check a tensor of integers, and return it with 64 bits.

    Args:
        name: of the argument, for messages.
        shape: that it must have.
        device_of: other arguments by their names, whose device the value must share.

    Raises:
        TypeError: not a tensor of integers.
        ValueError: another shape or device.
    """
    if isinstance(value, Tensor) and value.dtype in (torch.uint16, torch.uint32, torch.uint64):
        # PyTorch can neither compare nor order wide unsigned integers.
        value = value.long()
    index = integers(name, value)
    check_shape(name, index, shape)
    check_one_device(**device_of, **{name: index})
    return index.long()


def check_places(name: str, places: Tensor, count: int, alternative: str = "") -> None:
    """Raise a `ValueError` unless all places are in 0 … count − 1; `alternative` ends the phrase that names the range."""
    wrong = places[(places < 0) | (places >= count)]
    if len(wrong):
        raise ValueError(f"{name} must be in 0 … {count - 1}{alternative}, got {wrong[0].item()}")


def one_number(
    name: str, value: float | Tensor, dtype: torch.dtype, *, above: float | None = None, **device_of: Tensor
) -> float | Tensor:
    """Check a number, or a tensor with one element, and return a float, or a tensor of no dimension in `dtype`.

    Args:
        name: of the argument, for messages.
        above: its strict lower bound.
        device_of: other arguments by their names, whose device the value must share.

    Raises:
        TypeError: the value is neither a number nor a floating-point tensor.
        ValueError: several elements, another device, or out of range.
    """
    if not isinstance(value, Tensor):
        return float(number(name, value, above=above))
    if floating(name, value).numel() != 1:
        raise ValueError(f"{name} must be one number, got shape {tuple(value.shape)}")
    check_one_device(**device_of, **{name: value})
    if values_are_known(value):
        check_range(name, value, above=above)
    return value.reshape(()).to(dtype)


def values_are_known(tensor: Tensor) -> bool:
    """Whether shapes may depend on its values: on the CPU, where reading them does not wait, and outside transforms."""
    return tensor.device.type == "cpu" and not in_functorch() and values_are_readable(tensor)


class RowStatistics(NamedTuple):
    """Results of a `ScorePlan` with `above`, a number for each row; the last three have no derivatives."""

    excess: Tensor
    log_partition: Tensor
    entropy: Tensor
    surplus: Tensor
    """log Z minus the largest score."""
    largest: Tensor
    """The largest score."""
    larger: Tensor
    """How many scores exceed `above`, without the target's."""


def log_partitions(plan: ScorePlan) -> tuple[Direction, ...]:
    """log Σ_j exp(row_i·column_j + bias_j + log_weight_ij) over the columns that row i sees, and its excess over the target's
    score; one `Direction`, or two with `both`."""
    results = compute(plan, plan.log_weight)
    return tuple(Direction(*results[start : start + 2]) for start in range(0, len(results), 2))


def compute(plan: ScorePlan, *others: Tensor | None) -> tuple[Tensor, ...]:
    """The results of `massieu.ops.score_tiles.forward`, with their derivatives.

    Args:
        others: tensors besides rows, columns and bias that may need derivatives, which tiles do not have.
    """
    needs_other_gradient = may_be_differentiated(*(other for other in others if other is not None))
    compiling = torch.compiler.is_compiling()
    function = tiled
    if needs_other_gradient or (compiling and in_functorch()) or in_nested_forward_mode():
        function = by_reference
    elif compiling and plan.column_ids is not None:
        # The compiler refuses a custom function that is given one tensor twice.
        plan = plan._replace(column_ids=plan.column_ids.clone())
    with without_autocast(plan.row.device):
        return function(*plan)


def by_reference(*fields: Any) -> tuple[Tensor, ...]:
    """The results of a `ScorePlan` in plain operations, in blocks of rows: the definition, differentiable at every order."""
    plan = ScorePlan(*fields)
    bias = None if plan.bias is None else plan.bias.to(plan.dtype)
    plan = plan._replace(row=plan.row.to(plan.dtype), column=plan.column.to(plan.dtype), bias=bias)
    results = _reference_rows(plan)
    if plan.both:
        results += _reference_rows(plan.transposed())
    return results


def _reference_rows(plan: ScorePlan) -> tuple[Tensor, ...]:
    """The results of a plan without `both`."""
    length = len(plan.row)
    block = max(1, min(length, scores_per_tile(reference.BLOCK_PAIRS, plan.row.device) // max(1, len(plan.column))))
    blocks = []
    # Without rows one empty block gives results of the right number and dtype.
    for rows in list(slices(length, block)) or [slice(0, 0)]:
        part = plan._replace(
            row=plan.row[rows],
            log_weight=None if plan.log_weight is None else plan.log_weight[rows],
            share=None if plan.share is None else plan.share[rows],
        )
        function = partial(_reference_block, rows, part[TENSORS:])
        tensors = part[:TENSORS]
        blocks.append(function(*tensors) if block >= length else recomputed(function, *tensors))
    return tuple(torch.cat(results) for results in zip(*blocks, strict=True))


def _reference_block(rows: slice, options: tuple[Any, ...], *tensors: Any) -> tuple[Tensor, ...]:
    """The results for some rows.

    Args:
        rows: their numbers.
        options, tensors: a plan whose row, log-weight and share are those of `rows` alone; target and ids are all rows'.
    """
    plan = ScorePlan(*tensors, *options)
    row = plan.row
    column = plan.column
    bias = plan.bias
    target = plan.target[rows]
    with without_autocast(row.device):
        scores = row @ column.mT
        if plan.scale != 1:
            scores = scores * plan.scale
    # Scores and log-weights are kept apart: a log-weight of −∞ in the scores would make their derivatives NaN.
    bias_weight = scores.new_zeros(()) if bias is None else bias
    if plan.bias_in_score and bias is not None:
        # A hidden word's −∞ becomes a constant log-weight; a finite bias is part of the score.
        bias_weight = torch.where(bias == -torch.inf, bias.detach(), 0.0)
        scores = scores + bias.masked_fill(bias == -torch.inf, 0.0)
    uncapped = scores
    if plan.softcap is not None:
        scores = plan.softcap * torch.tanh(scores / plan.softcap)
    weight = bias_weight
    log_weight = plan.log_weight
    if log_weight is not None and log_weight.dtype == torch.bool:
        weight = torch.where(log_weight, weight, -torch.inf)
    elif log_weight is not None:
        weight = weight + log_weight.to(scores.dtype)
    hidden = plan.hidden(rows, slice(0, len(column)))
    if hidden is not None:
        weight = torch.where(hidden, -torch.inf, weight)
    # Where the target is out of range the excess is NaN; index 0 stands in for it until then.
    inside = (target >= 0) & (target < len(column))
    index = torch.where(inside, target, 0)
    target_score = scores.gather(1, index.unsqueeze(1)).squeeze(1) if len(column) else scores.sum(1)
    # A hidden target has an infinite excess, added as a constant.
    infinite = torch.zeros_like(target_score)
    if plan.bias_in_score and bias is not None:
        infinite = infinite.masked_fill(bias_weight[index] == -torch.inf, torch.inf)
    if plan.above is not None:
        larger = ((uncapped + bias_weight).detach() > plan.above[rows].unsqueeze(1)).to(scores.dtype)
        count = larger.sum(1) - torch.where(inside, larger.gather(1, index.unsqueeze(1)).squeeze(1), 0.0)
        excess, *others = _entropy_results(scores + weight, target_score)
        return (excess + infinite).masked_fill(~inside, torch.nan), *others, count
    # log Z of the scores less the target's is the excess itself: no difference of two large numbers is taken.
    excess = reference.softmax(scores - target_score.unsqueeze(1), weight)[2]
    results = (excess + infinite).masked_fill(~inside, torch.nan), excess + target_score
    soft_target = plan.soft_target(slice(0, len(row)), slice(0, len(column)))
    if soft_target is None:
        return results
    soft_target = soft_target.expand_as(scores)
    # log Z − score is ∞ for a hidden column that is a target, and counts as 0 for other hidden columns, as 0·∞ is NaN.
    is_hidden = weight == -torch.inf
    hidden_fall = torch.zeros_like(scores).masked_fill(is_hidden & (soft_target != 0), torch.inf)
    fall = torch.where(is_hidden, hidden_fall, (excess + target_score).unsqueeze(1) - scores)
    return *results, (soft_target * fall).sum(1), soft_target.sum(1)


def _entropy_results(scores: Tensor, target_score: Tensor) -> tuple[Tensor, ...]:
    """Excess over the target's score, log Z, entropy, log Z − the largest score, and the largest score.

    They are formed as in `massieu.ops.score_sums.SplitLogSumExp`, with the largest weight, 1, apart from the others.

    Args:
        scores: (rows, V), log-weights included.
    """
    largest, place = scores.detach().max(1, keepdim=True)
    sees_nothing = largest == -torch.inf
    shift = largest.masked_fill(sees_nothing, 0.0)
    weights = (scores - shift).exp()
    # The largest weight is left out of the sum, whose small numbers it would swallow. Its value less 1 is 0, and brings its
    # derivative back.
    others = weights.scatter(1, place, 0.0).sum(1)
    rest = others + (weights.gather(1, place) - 1).masked_fill(sees_nothing, 0.0).squeeze(1)
    fall = (weights * torch.where(scores == -torch.inf, 0.0, shift - scores)).sum(1)
    shift = shift.squeeze(1)
    surplus = rest.log1p()
    log_z = (surplus + shift).masked_fill(sees_nothing.squeeze(1), -torch.inf)
    excess = surplus + (shift - target_score)
    entropy = surplus + fall / (1 + rest)
    return excess, log_z, entropy, surplus, largest.squeeze(1)


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
tiled = differentiable(_forward, _gradient, by_reference, tensors=TENSORS, options=OPTIONS, vmap=one_by_one)
"""`by_reference` by tiles of scores; derivatives are those in row, column and bias."""
