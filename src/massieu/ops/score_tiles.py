"""The numerical work of `massieu.ops.linear_scores`: log-partitions and their gradients from tiles of scores.

A tile holds the scores of some rows and some columns; nothing larger than a tile is made beside the results.

`torch.compile` calls either pass as one operator and does not look into it. Traced, a loop over tiles is a program of as
many pieces, and the compiler decides which of them live at once: Inductor lets most of the scores live. An operator has
no derivatives: `massieu.ops.linear_scores` gives them.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from massieu.foundation.numerics import exp_
from massieu.ops.score_sums import FAR, LOWEST, Level, SplitLevel, Target
from massieu.ops.shapes import slices, working_dtype

TILE_PAIRS = 1 << 20
"""Scores of a tile on the CPU: 4 MiB in float32, so that the passes over them stay in the caches."""
TILE_ROWS = 2048
Rule = Literal["all", "no equals", "no self", "peers"]
"""Which columns a row sees: all; those of another id, and its target; all but the one of its own index; those of its id
but the one of its own index."""


class ScorePlan(NamedTuple):
    """Linear scores ``row_i·column_j`` and what is wanted of them: `TENSORS` tensors and five options, in that order."""

    row: Tensor
    """(T, D), as `multiplied` gives it."""
    column: Tensor
    """(V, D), of any floating dtype; promoted to the row's a tile at a time."""
    bias: Tensor | None
    """(V,): a part of the target's score if `bias_in_score`, else a log-weight."""
    target: Tensor
    """(T,), which column is the row's own; outside 0 … V − 1 its excess is NaN."""
    row_ids: Tensor | None = None
    column_ids: Tensor | None = None
    log_weight: Tensor | None = None
    """(T, V), float, or bool with True = keep."""
    above: Tensor | None = None
    """(T,): asks for what `Direction` does not say: entropy, the largest score, and how many scores exceed this one."""
    share: Tensor | None = None
    """(T, V), for `terms`; without it 0."""
    terms: Tensor | None = None
    """(2, V): asks for Σ_j a_ij·(log Z − score_ij), of a target that is spread, a_ij = share_ij·terms_0j + terms_1j."""
    rule: Rule = "all"
    bias_in_score: bool = False
    both: bool = False
    """Also the log-partitions of the first min(T, V) columns over the rows, without the bias. Row i's target must be i, or
    be out of range, where column i's excess is NaN too."""
    softcap: float | None = None
    """Scores are softcap·tanh((scale·row_i·column_j + bias_j)/softcap); goes with `bias_in_score`, not with `both`."""
    scale: float = 1.0
    """A factor of row_i·column_j; not with `both`."""

    @property
    def dtype(self) -> torch.dtype:
        """Of scores and results."""
        return working_dtype(self.row)

    def result(self) -> Tensor:
        """Like the results, empty."""
        return self.row.new_empty(0, dtype=self.dtype)

    def turned(self) -> "ScorePlan":
        """The other direction of `both`."""
        first = slice(min(len(self.row), len(self.column)))
        ids, weight = (None if part is None else part[..., first] for part in (self.column_ids, self.log_weight))
        weight = None if weight is None else weight.mT
        target = self.target[first]
        return ScorePlan(self.column[first], self.row, None, target, ids, self.row_ids, weight, rule=self.rule)

    def tiles(self) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Columns, rows, those columns in the row's dtype, and scores; all rows of some columns one after the other."""
        length, count = len(self.row), len(self.column)
        # A device other than the CPU needs more work at a time to be busy.
        pairs = TILE_PAIRS if self.row.device.type == "cpu" else TILE_PAIRS << 5
        height = max(1, min(length, TILE_ROWS))
        for columns in slices(count, max(1, min(count, pairs // height))):
            keys = self.column[columns].to(self.row.dtype)
            for rows in slices(length, height):
                scores = product(self.row[rows], keys.mT)
                yield columns, rows, keys, scores if self.scale == 1 else scores.mul_(self.scale)

    def hidden(self, rows: slice, columns: slice) -> Tensor | None:
        """Which pairs of a tile do not count by the rule; None if all do."""
        if self.rule == "all":
            return None
        position = torch.arange(columns.start, columns.stop, device=self.target.device)
        own = torch.arange(rows.start, rows.stop, device=self.target.device).unsqueeze(1) == position
        if self.rule == "no self":
            return own
        assert self.row_ids is not None and self.column_ids is not None
        equal = self.row_ids[rows].unsqueeze(1) == self.column_ids[columns]
        if self.rule == "peers":
            return ~equal | own
        return equal & (self.target[rows].unsqueeze(1) != position)

    def weigh_(self, scores: Tensor, rows: slice, columns: slice) -> None:
        """Add a tile's log-weights, −inf for pairs that do not count."""
        weight = None if self.log_weight is None else self.log_weight[rows, columns]
        if weight is not None and weight.dtype == torch.bool:
            scores.masked_fill_(~weight, -torch.inf)
        elif weight is not None:
            scores += weight.to(scores.dtype)
        mask = self.hidden(rows, columns)
        if mask is not None:
            scores.masked_fill_(mask, -torch.inf)

    def cap_(self, scores: Tensor, columns: slice) -> None:
        """Bend a tile's scores, bias included; what its bias of −inf hides stays hidden."""
        if self.softcap is None:
            return
        scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.bias is not None:
            scores.masked_fill_(self.bias[columns] == -torch.inf, -torch.inf)

    def spread(self, rows: slice, columns: slice) -> Tensor | None:
        """A tile of a, or one row that is all rows'."""
        if self.terms is None:
            return None
        factor, floor = self.terms[:, columns].to(self.dtype)
        return (
            floor.unsqueeze(0)
            if self.share is None
            else torch.addcmul(floor, self.share[rows, columns].to(self.dtype), factor)
        )

    def place(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """Where in a tile's columns the rows' targets are, (rows, 1), and whether they are there at all, (rows,)."""
        target = self.target[rows]
        inside = (target >= columns.start) & (target < columns.stop)
        return torch.where(inside, target - columns.start, 0).unsqueeze(1), inside


def multiplied(row: Tensor, column: Tensor) -> Tensor:
    """Rows in the dtype that they are multiplied in: bfloat16 on CUDA, where a product of two such is formed in float32, if
    both are; else the dtype of the results."""
    as_they_are = row.is_cuda and row.dtype == column.dtype == torch.bfloat16
    return row if as_they_are else row.to(working_dtype(row))


def product(one: Tensor, other: Tensor) -> Tensor:
    """A matrix product in at least float32."""
    return one @ other if one.dtype == working_dtype(one) else torch.mm(one, other, out_dtype=torch.float32)


def forward(*fields: Any) -> tuple[Tensor, ...]:
    """(excess, log Z) of the rows of a `ScorePlan`, then if `both` of the first columns over the rows.

    Then, for `above`: entropy, log Z − the largest score, the largest score, and how many exceed `above` beside the target.
    For `terms`: Σ_j a_ij·(log Z − score_ij), and Σ_j a_ij.
    """
    plan = ScorePlan(*fields)
    row, column, bias, *_ = plan
    like = plan.result()
    of_rows = Level(like, len(row)) if plan.above is None else SplitLevel(like, len(row))
    of_columns = Level(like, len(column))
    score = like.new_full((len(row),), torch.nan)
    count, target = torch.zeros_like(score), Target(like, len(row))

    def at_targets(rows: slice, columns: slice, numbers: Tensor, otherwise: Tensor) -> Tensor:
        place, inside = plan.place(rows, columns)
        return torch.where(inside, numbers.gather(1, place).squeeze(1), otherwise)

    for columns, rows, _, scores in plan.tiles():
        if not plan.bias_in_score:
            score[rows] = at_targets(rows, columns, scores, score[rows])
        plan.weigh_(scores, rows, columns)
        if plan.both:
            of_columns.add(columns, scores.clone(), 0)
        if bias is not None:
            scores += bias[columns].to(scores.dtype)
        if plan.above is not None:
            # Comparing into floats and adding those is several times quicker than adding truth values.
            larger = torch.gt(scores, plan.above[rows].unsqueeze(1), out=torch.empty_like(scores))
            count[rows] += larger.sum(1) - at_targets(rows, columns, larger, like.new_zeros(()))
        plan.cap_(scores, columns)
        if plan.bias_in_score:
            score[rows] = at_targets(rows, columns, scores, score[rows])
        if (spread := plan.spread(rows, columns)) is not None:
            target.add(rows, scores, spread)
        of_rows.add(rows, scores, 1)
    found = [of_rows.excess(score), of_rows.log_partition()]
    if plan.both:
        length = min(len(row), len(column))
        found += [of_columns.excess(score[:length], length), of_columns.log_partition(length)]
    if isinstance(of_rows, SplitLevel):
        found += [of_rows.entropy(), of_rows.surplus(), of_rows.largest(), count]
    if plan.terms is not None:
        found += [target.excess(of_rows.surplus()), target.mass]
    return tuple(found)


def backward(
    plan: ScorePlan, results: Sequence[Tensor], cotangents: Sequence[Tensor | None], wanted: Sequence[bool]
) -> tuple[Tensor, ...]:
    """Gradients of row, column and bias, those that are wanted.

    A score has the gradient (g_excess + g_level + g_spread·Σ_j a_j)·p, less g_excess at the target and g_spread·a;
    p = exp(score − log Z). The entropy H adds g_H·p·(log Z − score − H). The soft cap's slope multiplies all of it.

    Args:
        results, cotangents: What `forward` returns, and the cotangents of that.
    """
    row, column, bias, both = plan.row, plan.column, plan.bias, plan.both
    level, column_level = results[1], results[3] if both else None
    grad_excess, grad_level = cotangents[:2]
    grad_column_excess, grad_column_level = cotangents[2:4] if both else (None, None)
    length, like = len(row), plan.result()
    share = _sum(like, length, grad_excess, grad_level)
    # A target's own share leaves with both directions' excess.
    own = -_sum(like, length, grad_excess)
    slope, grad_spread, settled = None, None, None
    if plan.terms is not None:
        grad_spread = _sum(like, length, cotangents[-2])
        share = torch.addcmul(share, grad_spread, results[-1])
        grad_spread = grad_spread.unsqueeze(1)
    if plan.above is not None:
        # Scores less the largest one keep the digits that log Z has lost to rounding.
        entropy, surplus, level = results[2:5]
        weight, grad_entropy = (-surplus).exp(), _sum(like, length, cotangents[2])
        # A target's gradient as a whole: p − 1 is that of its excess, also where p is nearly 1.
        chance = (-results[0]).exp()
        rest = _sum(like, length, grad_level) - grad_entropy * (entropy - results[0])
        settled = torch.where(chance == 0, 0.0, chance * rest) - own * (-results[0]).expm1()
        share = weight * (share - grad_entropy * (entropy - surplus))
        slope = -(weight * grad_entropy).unsqueeze(1)
    share, level = share.unsqueeze(1), _finite(level).unsqueeze(1)
    column_share = share
    if column_level is not None:
        column_share = _sum(like, len(column_level), grad_column_excess, grad_column_level)
        own -= _padded(_sum(like, len(column_level), grad_column_excess), length, 0.0)
        column_share = _padded(column_share, len(column), 0.0)
        column_level = _padded(_finite(column_level), len(column), -LOWEST)
    grad_row = like.new_zeros(row.shape) if wanted[0] else None
    grad_column = torch.zeros_like(column, memory_format=torch.contiguous_format) if wanted[1] else None
    grad_bias = torch.zeros_like(bias, dtype=plan.dtype) if wanted[2] and bias is not None else None
    part = None
    for columns, rows, keys, scores in plan.tiles():
        plan.weigh_(scores, rows, columns)
        other = scores.clone() if both else None
        if bias is not None:
            scores += bias[columns].to(scores.dtype)
        plan.cap_(scores, columns)
        bent = None if plan.softcap is None else (scores / plan.softcap).square_().neg_().add_(1).clamp_min_(0)
        scores.sub_(level[rows])
        if slope is None:
            weights = exp_(scores).mul_(share[rows])
        else:
            weights = exp_(scores.clamp_min_(FAR).clone()).mul_(scores.mul_(slope[rows]).add_(share[rows]))
        if grad_bias is not None and not plan.bias_in_score:
            grad_bias[columns] += weights.sum(0)
        if other is not None:
            assert column_level is not None
            weights.addcmul_(exp_(other.sub_(column_level[columns])), column_share[columns])
        if grad_spread is not None and (spread := plan.spread(rows, columns)) is not None:
            weights.addcmul_(spread, grad_spread[rows], value=-1)
        place, inside = plan.place(rows, columns)
        if settled is None:
            weights.scatter_add_(1, place, torch.where(inside, own[rows], 0.0).unsqueeze(1))
        else:
            before = weights.gather(1, place)
            weights.scatter_(1, place, torch.where(inside.unsqueeze(1), settled[rows].unsqueeze(1), before))
        if bent is not None:
            weights.mul_(bent)
        if grad_bias is not None and plan.bias_in_score:
            grad_bias[columns] += weights.sum(0)
        weights = (weights if plan.scale == 1 else weights.mul_(plan.scale)).to(row.dtype)
        if grad_row is not None:
            grad_row[rows] += product(weights, keys)
        if grad_column is not None:
            part = _accumulate(part, weights, row[rows], first=rows.start == 0)
            if rows.stop == length:
                grad_column[columns] = part.to(column.dtype)
    found = (grad_row, row), (grad_column, column), (grad_bias, bias)
    return tuple(part.to(given.dtype) for part, given in found if part is not None and given is not None)


def _accumulate(part: Tensor | None, weights: Tensor, row: Tensor, first: bool) -> Tensor:
    if first or part is None:
        return product(weights.mT, row)
    return part.addmm_(weights.mT, row) if part.dtype == row.dtype else part.add_(product(weights.mT, row))


def _finite(level: Tensor) -> Tensor:
    """Where nothing is seen, a level that makes every weight 0."""
    return level.masked_fill(level == -torch.inf, -LOWEST)


def _padded(numbers: Tensor, size: int, value: float) -> Tensor:
    return torch.nn.functional.pad(numbers, (0, size - len(numbers)), value=value)


def _sum(like: Tensor, size: int, *parts: Tensor | None) -> Tensor:
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
    """`forward` of a plan's fields."""
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
    """`backward` of a plan's tensors, what `forward` returned, cotangents, the plan's options, and what is wanted."""
    tensors, (results, cotangents), options = (
        arguments[:TENSORS],
        arguments[TENSORS : TENSORS + 2],
        arguments[TENSORS + 2 : -1],
    )
    return list(backward(ScorePlan(*tensors, *options), results, cotangents, arguments[-1]))


@backward_operator.register_fake
def _(*arguments: Any) -> list[Tensor]:
    tensors = zip(arguments[:3], arguments[-1], strict=True)
    return [tensor.new_empty(tensor.shape) for tensor, needed in tensors if needed and tensor is not None]
