"""The tiles' forward and backward pass as one operator each, which `torch.compile` calls and does not look into.

Traced, a loop over tiles is a program of as many pieces, and the compiler decides which of them live at once: Inductor
lets most of the scores live. As an operator the loop runs as it does without compilation, one tile at a time, for all
shapes alike. An operator has no derivatives: `massieu.ops.linear_scores` gives them.
"""

from typing import Any

import torch
from torch import Tensor

from massieu.ops import score_tiles

_TENSORS = (
    "Tensor row, Tensor column, Tensor? bias, Tensor target, Tensor? row_ids, Tensor? column_ids, Tensor? log_weight"
)
_OPTIONS = "str rule, bool bias_in_score, bool both"


@torch.library.custom_op(
    "massieu::score_tiles_forward", mutates_args=(), schema=f"({_TENSORS}, {_OPTIONS}) -> Tensor[]"
)
def forward(*arguments: Any) -> list[Tensor]:
    """`score_tiles.forward`."""
    return list(score_tiles.forward(*arguments))


@forward.register_fake
def _(row: Tensor, column: Tensor, *rest: Any) -> list[Tensor]:
    rows = [row.new_empty(row.shape[0]) for _ in range(2)]
    both = rest[-1]
    if not both:
        return rows
    count = torch.sym_min(row.shape[0], column.shape[0])
    return rows + [row.new_empty(count) for _ in range(2)]  # pyright: ignore[reportArgumentType, reportCallIssue]


@torch.library.custom_op(
    "massieu::score_tiles_backward",
    mutates_args=(),
    schema=f"({_TENSORS}, Tensor[] results, Tensor?[] cotangents, {_OPTIONS}, bool[] wanted) -> Tensor[]",
)
def backward(*arguments: Any) -> list[Tensor]:
    """`score_tiles.backward`."""
    *tensors, results, cotangents, rule, bias_in_score, both, wanted = arguments
    return list(score_tiles.backward(tensors, results, cotangents, (rule, bias_in_score, both), wanted))


@backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    tensors = zip(arguments[:3], arguments[-1], strict=True)
    return [tensor.new_empty(tensor.shape) for tensor, needed in tensors if needed and tensor is not None]
