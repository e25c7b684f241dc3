"""The tiles' forward and backward pass as one operator each, which `torch.compile` calls and does not look into.

Traced, a loop over tiles is a program of as many pieces, and the compiler decides which of them live at once: Inductor
lets most of the scores live. As an operator the loop runs as it does without compilation, one tile at a time, for all
shapes alike. An operator has no derivatives: `massieu.ops.linear_scores` gives them.
"""

import torch
from torch import Tensor

from massieu.ops import score_tiles


@torch.library.custom_op("massieu::score_tiles_forward", mutates_args=())
def forward(
    row: Tensor,
    column: Tensor,
    bias: Tensor | None,
    target: Tensor,
    row_ids: Tensor | None,
    column_ids: Tensor | None,
    log_weight: Tensor | None,
    rule: str,
    bias_in_score: bool,
    both: bool,
) -> list[Tensor]:
    """`score_tiles.forward`."""
    fixed = (target, row_ids, column_ids, log_weight)
    return list(score_tiles.forward(row, column, bias, *fixed, rule, bias_in_score, both))


@forward.register_fake
def _(
    row: Tensor,
    column: Tensor,
    bias: Tensor | None,
    target: Tensor,
    row_ids: Tensor | None,
    column_ids: Tensor | None,
    log_weight: Tensor | None,
    rule: str,
    bias_in_score: bool,
    both: bool,
) -> list[Tensor]:
    rows = [row.new_empty(row.shape[0]) for _ in range(2)]
    if not both:
        return rows
    count = torch.sym_min(row.shape[0], column.shape[0])
    return rows + [row.new_empty(count) for _ in range(2)]  # pyright: ignore[reportArgumentType, reportCallIssue]


@torch.library.custom_op("massieu::score_tiles_backward", mutates_args=())
def backward(
    row: Tensor,
    column: Tensor,
    bias: Tensor | None,
    target: Tensor,
    row_ids: Tensor | None,
    column_ids: Tensor | None,
    log_weight: Tensor | None,
    level: Tensor,
    column_level: Tensor | None,
    grad_excess: Tensor | None,
    grad_level: Tensor | None,
    grad_column_excess: Tensor | None,
    grad_column_level: Tensor | None,
    rule: str,
    bias_in_score: bool,
    both: bool,
    wanted: list[bool],
) -> list[Tensor]:
    """`score_tiles.backward`."""
    tensors = (row, column, bias, target, row_ids, column_ids, log_weight, level, column_level)
    cotangents = (grad_excess, grad_level, grad_column_excess, grad_column_level)
    first, second, third = wanted
    found = score_tiles.backward(*tensors, *cotangents, rule, bias_in_score, both, (first, second, third))
    return list(found)


@backward.register_fake
def _(
    row: Tensor,
    column: Tensor,
    bias: Tensor | None,
    target: Tensor,
    row_ids: Tensor | None,
    column_ids: Tensor | None,
    log_weight: Tensor | None,
    level: Tensor,
    column_level: Tensor | None,
    grad_excess: Tensor | None,
    grad_level: Tensor | None,
    grad_column_excess: Tensor | None,
    grad_column_level: Tensor | None,
    rule: str,
    bias_in_score: bool,
    both: bool,
    wanted: list[bool],
) -> list[Tensor]:
    tensors = zip((row, column, bias), wanted, strict=True)
    return [tensor.new_empty(tensor.shape) for tensor, needed in tensors if needed and tensor is not None]
