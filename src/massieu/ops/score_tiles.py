"""The numerical work of `massieu.ops.linear_scores`: log-partitions and their gradients from tiles of scores.

A tile holds the scores of some rows and some columns. Apart from the results nothing larger than a tile is allocated.

`torch.compile` calls either pass as one operator and does not trace it. A traced loop would become a program with one piece
for each tile, and Inductor would keep most of the scores alive at once. An operator has no derivatives:
`massieu.ops.linear_scores` adds them.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from massieu.foundation.numerics import exp_
from massieu.ops.score_sums import FAR, LOWEST, LogSumExp, SoftTarget, SplitLogSumExp
from massieu.ops.shapes import slices, working_dtype

TILE_PAIRS = 1 << 20
"""Scores of a tile on the CPU: 4 MiB in float32, so that the passes over them stay in the caches."""
TILE_ROWS = 2048
Rule = Literal["all", "no equals", "no self", "peers"]
"""Which columns row i sees.

"all"; "no equals": its target, and columns with another id; "no self": all but column i; "peers": columns with its id, but
not column i.
"""


class ScoreTile(NamedTuple):
    """The scores of some rows and some columns of a plan."""

    columns: slice
    rows: slice
    column: Tensor
    """The tile's columns, (columns, D), in the dtype of the rows."""
    scores: Tensor
    """scale·row_i·column_j, (rows, columns), without bias and log-weight. Whoever reads the tile may overwrite them."""


class ScorePlan(NamedTuple):
    """Linear scores ``row_i·column_j`` and which results to compute: `TENSORS` tensors and five options, in that order."""

    row: Tensor
    """(T, D), in the dtype of `rows_for_product`."""
    column: Tensor
    """(V, D), of any floating dtype; each tile's part is cast to the row's."""
    bias: Tensor | None
    """(V,): a part of the target's score if `bias_in_score`, else a log-weight."""
    target: Tensor
    """(T,), the number of each row's target column; the excess of a row with a target outside 0 … V − 1 is NaN."""
    row_ids: Tensor | None = None
    column_ids: Tensor | None = None
    log_weight: Tensor | None = None
    """(T, V), float, or bool with True = keep."""
    above: Tensor | None = None
    """(T,): requests entropy, the largest score, and how many scores of the row exceed this one."""
    share: Tensor | None = None
    """(T, V), for `terms`; None stands for 0."""
    terms: Tensor | None = None
    """(2, V): requests Σ_j a_ij·(log Z − score_ij) for the soft target a_ij = share_ij·terms_0j + terms_1j."""
    rule: Rule = "all"
    bias_in_score: bool = False
    both: bool = False
    """Also compute the log-partitions of the first min(T, V) columns over the rows, without the bias. Row i's target must be
    i, or out of range; then column i's excess is NaN too."""
    softcap: float | None = None
    """Scores are softcap·tanh((scale·row_i·column_j + bias_j)/softcap). Needs `bias_in_score`, and excludes `both`."""
    scale: float = 1.0
    """A factor of row_i·column_j. Excludes `both`."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of scores and results."""
        return working_dtype(self.row)

    def empty_result(self) -> Tensor:
        """An empty tensor with the results' dtype and device."""
        return self.row.new_empty(0, dtype=self.dtype)

    def transposed(self) -> "ScorePlan":
        """The plan of the other direction of `both`: columns over rows."""
        first = slice(min(len(self.row), len(self.column)))
        log_weight = self.log_weight
        return ScorePlan(
            row=self.column[first],
            column=self.row,
            bias=None,
            target=self.target[first],
            row_ids=None if self.column_ids is None else self.column_ids[first],
            column_ids=self.row_ids,
            log_weight=None if log_weight is None else log_weight[..., first].mT,
            rule=self.rule,
        )

    def tiles(self) -> Iterator[ScoreTile]:
        """All tiles; for some columns those of all rows, then for the next columns."""
        length = len(self.row)
        count = len(self.column)
        # A device other than the CPU needs more work at a time to be busy.
        pairs = TILE_PAIRS if self.row.device.type == "cpu" else TILE_PAIRS << 5
        height = max(1, min(length, TILE_ROWS))
        for columns in slices(count, max(1, min(count, pairs // height))):
            column = self.column[columns].to(self.row.dtype)
            for rows in slices(length, height):
                scores = product(self.row[rows], column.mT)
                if self.scale != 1:
                    scores.mul_(self.scale)
                yield ScoreTile(columns, rows, column, scores)

    def hidden(self, rows: slice, columns: slice) -> Tensor | None:
        """True for the pairs of a tile that the rule hides; None if it hides none."""
        if self.rule == "all":
            return None
        position = torch.arange(columns.start, columns.stop, device=self.target.device)
        is_self = torch.arange(rows.start, rows.stop, device=self.target.device).unsqueeze(1) == position
        if self.rule == "no self":
            return is_self
        assert self.row_ids is not None and self.column_ids is not None
        same_id = self.row_ids[rows].unsqueeze(1) == self.column_ids[columns]
        if self.rule == "peers":
            return ~same_id | is_self
        return same_id & (self.target[rows].unsqueeze(1) != position)

    def weigh_(self, scores: Tensor, rows: slice, columns: slice) -> None:
        """Add a tile's log-weights to its scores in place; hidden pairs get −inf."""
        weight = None if self.log_weight is None else self.log_weight[rows, columns]
        if weight is not None and weight.dtype == torch.bool:
            scores.masked_fill_(~weight, -torch.inf)
        elif weight is not None:
            scores += weight.to(scores.dtype)
        hidden = self.hidden(rows, columns)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)

    def cap_(self, scores: Tensor, columns: slice) -> None:
        """Apply the soft cap in place to a tile's scores, bias included. A column with a bias of −inf stays hidden."""
        if self.softcap is None:
            return
        scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.bias is not None:
            # The cap makes −softcap of −inf.
            scores.masked_fill_(self.bias[columns] == -torch.inf, -torch.inf)

    def cap_slope(self, scores: Tensor) -> Tensor | None:
        """Derivative of the soft cap, 1 − tanh², from the capped scores; None without a cap. It is 0 where a score is −inf."""
        if self.softcap is None:
            return None
        return (scores / self.softcap).square_().neg_().add_(1).clamp_min_(0)

    def soft_target(self, rows: slice, columns: slice) -> Tensor | None:
        """A tile of the soft target a, (rows, columns), or (1, columns) where it is the same for all rows; None without one."""
        if self.terms is None:
            return None
        factor, floor = self.terms[:, columns].to(self.dtype)
        if self.share is None:
            return floor.unsqueeze(0)
        return torch.addcmul(floor, self.share[rows, columns].to(self.dtype), factor)

    def target_columns(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """The column of a tile in which each row's target lies, and whether it lies in the tile.

        Returns:
            Indices (rows, 1), 0 for rows whose target is elsewhere, and booleans (rows,).
        """
        target = self.target[rows]
        inside = (target >= columns.start) & (target < columns.stop)
        return torch.where(inside, target - columns.start, 0).unsqueeze(1), inside


def rows_for_product(row: Tensor, column: Tensor) -> Tensor:
    """Cast rows to the dtype in which scores are computed.

    bfloat16 rows and columns on CUDA stay as they are: their product is formed in float32. All others get the results' dtype.
    """
    stays = row.is_cuda and row.dtype == column.dtype == torch.bfloat16
    return row if stays else row.to(working_dtype(row))


def product(one: Tensor, other: Tensor) -> Tensor:
    """A matrix product with a result of at least float32."""
    if one.dtype == working_dtype(one):
        return one @ other
    return torch.mm(one, other, out_dtype=torch.float32)


def forward(*fields: Any) -> tuple[Tensor, ...]:
    """(excess, log Z) of the rows of a `ScorePlan`, then if `both` of the first columns over the rows.

    Then, for `above`: entropy, log Z − the largest score, the largest score, and how many exceed `above`, without the
    target. Then, for `terms`: Σ_j a_ij·(log Z − score_ij), and Σ_j a_ij.
    """
    plan = ScorePlan(*fields)
    bias = plan.bias
    length = len(plan.row)
    like = plan.empty_result()
    row_sums = LogSumExp(like, length) if plan.above is None else SplitLogSumExp(like, length)
    column_sums = LogSumExp(like, len(plan.column))
    soft_target_sums = SoftTarget(like, length)
    target_score = like.new_full((length,), torch.nan)
    larger_count = torch.zeros_like(target_score)

    def at_targets(rows: slice, columns: slice, numbers: Tensor, otherwise: Tensor) -> Tensor:
        """A tile's numbers at its rows' targets, and `otherwise` for rows whose target is elsewhere."""
        place, inside = plan.target_columns(rows, columns)
        return torch.where(inside, numbers.gather(1, place).squeeze(1), otherwise)

    for columns, rows, _, scores in plan.tiles():
        # The target's score has the bias in it, or neither bias nor log-weight.
        if not plan.bias_in_score:
            target_score[rows] = at_targets(rows, columns, scores, target_score[rows])
        plan.weigh_(scores, rows, columns)
        if plan.both:
            column_sums.add(columns, scores.clone(), 0)
        if bias is not None:
            scores += bias[columns].to(scores.dtype)
        if plan.above is not None:
            # Comparing into floats and adding those is several times quicker than adding truth values.
            larger = torch.gt(scores, plan.above[rows].unsqueeze(1), out=torch.empty_like(scores))
            larger_count[rows] += larger.sum(1) - at_targets(rows, columns, larger, like.new_zeros(()))
        plan.cap_(scores, columns)
        if plan.bias_in_score:
            target_score[rows] = at_targets(rows, columns, scores, target_score[rows])
        soft_target = plan.soft_target(rows, columns)
        if soft_target is not None:
            soft_target_sums.add(rows, scores, soft_target)
        row_sums.add(rows, scores, 1)  # last, since it overwrites the scores
    results = [row_sums.excess(target_score), row_sums.log_partition()]
    if plan.both:
        count = min(length, len(plan.column))
        results += [column_sums.excess(target_score[:count], count), column_sums.log_partition(count)]
    if isinstance(row_sums, SplitLogSumExp):
        results += [row_sums.entropy(), row_sums.surplus(), row_sums.largest(), larger_count]
    if plan.terms is not None:
        results += [soft_target_sums.excess(row_sums.surplus()), soft_target_sums.mass]
    return tuple(results)


class _ScoreGradient(NamedTuple):
    """What the gradient of a score needs to know of its row and its column.

    With p = exp(score − log Z) the gradient of score_ij is p_ij·(share_i + slope_i·(score_ij − level_i)), the same of the
    other direction, − grad_soft_i·a_ij, and `at_target_i` more at the row's target.
    """

    level: Tensor
    """(T, 1): log Z of each row; with an entropy the largest score, and a factor exp(level − log Z) in `share` and `slope`."""
    share: Tensor
    """(T, 1)."""
    slope: Tensor | None
    """(T, 1), from the cotangent of the entropy."""
    at_target: Tensor
    """(T,)."""
    target_gradient: Tensor | None
    """(T,): with an entropy, the whole gradient of the target's score, instead of `at_target`."""
    grad_soft: Tensor | None
    """(T, 1): cotangent of the soft target's excess."""
    column_level: Tensor | None
    """(V,): log Z of each column over the rows, for `both`."""
    column_share: Tensor | None
    """(V,)."""

    @staticmethod
    def of(plan: ScorePlan, results: Sequence[Tensor], cotangents: Sequence[Tensor | None]) -> "_ScoreGradient":
        length = len(plan.row)
        like = plan.empty_result()
        excess, level = results[:2]
        grad_excess, grad_level = cotangents[:2]
        share = _sum(like, length, grad_excess, grad_level)
        at_target = -_sum(like, length, grad_excess)
        slope = None
        target_gradient = None
        grad_soft = None
        if plan.terms is not None:
            grad_soft = _sum(like, length, cotangents[-2])
            share = torch.addcmul(share, grad_soft, results[-1])
            grad_soft = grad_soft.unsqueeze(1)
        if plan.above is not None:
            # H has the gradient p·(log Z − score − H). Scores less the largest one keep the digits that log Z lost to rounding.
            entropy, surplus, level = results[2:5]
            largest_weight = (-surplus).exp()
            grad_entropy = _sum(like, length, cotangents[2])
            # The target's gradient of its excess is p − 1 = expm1(−excess): no digits are lost where p is nearly 1.
            target_probability = (-excess).exp()
            rest = _sum(like, length, grad_level) - grad_entropy * (entropy - excess)
            # An excess of ∞ makes `rest` infinite, and 0·∞ is NaN.
            target_gradient = torch.where(target_probability == 0, 0.0, target_probability * rest)
            target_gradient = target_gradient - at_target * (-excess).expm1()
            share = largest_weight * (share - grad_entropy * (entropy - surplus))
            slope = -(largest_weight * grad_entropy).unsqueeze(1)
        column_level = None
        column_share = None
        if plan.both:
            grad_column_excess, grad_column_level = cotangents[2:4]
            count = len(results[3])
            # Row i's target is column i, so that the excess of either direction takes from the same score.
            at_target -= _padded(_sum(like, count, grad_column_excess), length, 0.0)
            column_share = _padded(_sum(like, count, grad_column_excess, grad_column_level), len(plan.column), 0.0)
            column_level = _padded(_finite(results[3]), len(plan.column), -LOWEST)
        return _ScoreGradient(
            level=_finite(level).unsqueeze(1),
            share=share.unsqueeze(1),
            slope=slope,
            at_target=at_target,
            target_gradient=target_gradient,
            grad_soft=grad_soft,
            column_level=column_level,
            column_share=column_share,
        )

    def of_rows_(self, scores: Tensor, rows: slice) -> Tensor:
        """p·(share + slope·(score − level)) of a tile, which is overwritten."""
        scores.sub_(self.level[rows])
        if self.slope is None:
            return exp_(scores).mul_(self.share[rows])
        weights = exp_(scores.clamp_min_(FAR).clone())
        return weights.mul_(scores.mul_(self.slope[rows]).add_(self.share[rows]))

    def add_target_(self, gradient: Tensor, plan: ScorePlan, rows: slice, columns: slice) -> None:
        """Add to a tile's gradient what its rows' targets have more, or replace it there."""
        place, inside = plan.target_columns(rows, columns)
        if self.target_gradient is None:
            gradient.scatter_add_(1, place, torch.where(inside, self.at_target[rows], 0.0).unsqueeze(1))
            return
        # A row whose target is elsewhere gets back the number that it has in column 0.
        unchanged = gradient.gather(1, place)
        target_gradient = self.target_gradient[rows].unsqueeze(1)
        gradient.scatter_(1, place, torch.where(inside.unsqueeze(1), target_gradient, unchanged))


def backward(
    plan: ScorePlan, results: Sequence[Tensor], cotangents: Sequence[Tensor | None], wanted: Sequence[bool]
) -> tuple[Tensor, ...]:
    """Gradients of row, column and bias, those that are wanted.

    A score has the gradient (g_excess + g_level + g_soft·Σ_j a_j)·p, less g_excess at the target and g_soft·a;
    p = exp(score − log Z). The entropy H adds g_H·p·(log Z − score − H). The soft cap's slope multiplies all of it.

    Args:
        results, cotangents: What `forward` returned, and the cotangents of that.
    """
    row = plan.row
    column = plan.column
    bias = plan.bias
    score_gradient = _ScoreGradient.of(plan, results, cotangents)
    grad_row = plan.empty_result().new_zeros(row.shape) if wanted[0] else None
    grad_column = torch.zeros_like(column, memory_format=torch.contiguous_format) if wanted[1] else None
    grad_bias = torch.zeros_like(bias, dtype=plan.dtype) if wanted[2] and bias is not None else None
    # The gradient of a tile's columns, added up over the rows in the results' dtype and rounded to the column's once.
    column_sum = None
    for columns, rows, tile_column, scores in plan.tiles():
        plan.weigh_(scores, rows, columns)
        unbiased = scores.clone() if plan.both else None
        if bias is not None:
            scores += bias[columns].to(scores.dtype)
        plan.cap_(scores, columns)
        cap_slope = plan.cap_slope(scores)
        gradient = score_gradient.of_rows_(scores, rows)
        if grad_bias is not None and not plan.bias_in_score:
            # A log-weight is in the rows' log Z alone: neither in a target's score nor in the other direction.
            grad_bias[columns] += gradient.sum(0)
        if unbiased is not None:
            assert score_gradient.column_level is not None and score_gradient.column_share is not None
            gradient.addcmul_(
                exp_(unbiased.sub_(score_gradient.column_level[columns])), score_gradient.column_share[columns]
            )
        soft_target = plan.soft_target(rows, columns)
        if soft_target is not None:
            assert score_gradient.grad_soft is not None
            gradient.addcmul_(soft_target, score_gradient.grad_soft[rows], value=-1)
        score_gradient.add_target_(gradient, plan, rows, columns)
        if cap_slope is not None:
            gradient.mul_(cap_slope)
        if grad_bias is not None and plan.bias_in_score:
            grad_bias[columns] += gradient.sum(0)
        if plan.scale != 1:
            gradient.mul_(plan.scale)
        # From the gradient of the scores to that of their factors, in the factors' dtype.
        gradient = gradient.to(row.dtype)
        if grad_row is not None:
            grad_row[rows] += product(gradient, tile_column)
        if grad_column is not None:
            column_sum = _accumulate(column_sum, gradient, row[rows], first=rows.start == 0)
            if rows.stop == len(row):
                grad_column[columns] = column_sum.to(column.dtype)
    gradients = ((grad_row, row), (grad_column, column), (grad_bias, bias))
    return tuple(
        gradient.to(tensor.dtype) for gradient, tensor in gradients if gradient is not None and tensor is not None
    )


def _accumulate(total: Tensor | None, gradient: Tensor, row: Tensor, first: bool) -> Tensor:
    """Add gradientᵀ·row of some rows to the total of a tile's columns; a new total for the first rows."""
    if first or total is None:
        return product(gradient.mT, row)
    if total.dtype == row.dtype:
        return total.addmm_(gradient.mT, row)
    return total.add_(product(gradient.mT, row))


def _finite(level: Tensor) -> Tensor:
    """A level with 1e30 for −∞: where a row sees no column, every weight exp(score − level) is then 0 and not NaN."""
    return level.masked_fill(level == -torch.inf, -LOWEST)


def _padded(numbers: Tensor, size: int, value: float) -> Tensor:
    return torch.nn.functional.pad(numbers, (0, size - len(numbers)), value=value)


def _sum(like: Tensor, size: int, *parts: Tensor | None) -> Tensor:
    """The sum of cotangents, where None is zero."""
    total = like.new_zeros(size)
    for part in parts:
        if part is not None:
            total = total + part
    return total


_TENSORS = (
    "Tensor row, Tensor column, Tensor? bias, Tensor target, Tensor? row_ids, Tensor? column_ids, Tensor? log_weight, "
    "Tensor? above, Tensor? share, Tensor? terms"
)
_OPTIONS = "str rule, bool bias_in_score, bool both, float? softcap, float scale"
TENSORS = 10
"""How many of a `ScorePlan`'s fields are tensors."""
OPTIONS = len(ScorePlan._fields) - TENSORS


@torch.library.custom_op(
    "massieu::score_tiles_forward", mutates_args=(), schema=f"({_TENSORS}, {_OPTIONS}) -> Tensor[]"
)
def forward_operator(*fields: Any) -> list[Tensor]:
    """`forward` of a plan's fields, as an operator."""
    return list(forward(*fields))


@forward_operator.register_fake
def _(*fields: Any) -> list[Tensor]:
    plan = ScorePlan(*fields)
    length = plan.row.shape[0]
    count = torch.sym_min(length, plan.column.shape[0])
    sizes = [length] * 2 + [count] * 2 * plan.both + [length] * 4 * (plan.above is not None)
    sizes += [length] * 2 * (plan.terms is not None)
    return [plan.row.new_empty(size, dtype=plan.dtype) for size in sizes]  # pyright: ignore[reportArgumentType, reportCallIssue]


@torch.library.custom_op(
    "massieu::score_tiles_backward",
    mutates_args=(),
    schema=f"({_TENSORS}, Tensor[] results, Tensor?[] cotangents, {_OPTIONS}, bool[] wanted) -> Tensor[]",
)
def backward_operator(*arguments: Any) -> list[Tensor]:
    """`backward`, as an operator.

    Args:
        arguments: the plan's tensors, what `forward` returned, the cotangents, the plan's options, and which gradients are
            wanted.
    """
    tensors = arguments[:TENSORS]
    results, cotangents = arguments[TENSORS : TENSORS + 2]
    options = arguments[TENSORS + 2 : -1]
    return list(backward(ScorePlan(*tensors, *options), results, cotangents, arguments[-1]))


@backward_operator.register_fake
def _(*arguments: Any) -> list[Tensor]:
    tensors = zip(arguments[:3], arguments[-1], strict=True)
    return [tensor.new_empty(tensor.shape) for tensor, needed in tensors if needed and tensor is not None]
