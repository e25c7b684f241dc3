"""FlexAttention: the scores that its functions make, evaluated on the whole grid of queries and keys."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

POINTS = (1.0, -30.0, 1000.0)  # scores near and far: functions that bend, as caps do, are told from straight ones


def scores_of(query: Tensor, key: Tensor, inputs: dict[str, Any]) -> Tensor | str:
    """Log-weights (B, H, L, N) that FlexAttention adds to ``scale · q·k``; or why there are none.

    The function of the score must be the score plus a number, at `POINTS` as at the scores themselves. Others are no
    log-weight beside a score.
    """
    batch, heads, length = query.shape[:3]
    num_keys = key.shape[2]
    indices = [torch.arange(size, device=query.device) for size in (batch, heads, length, num_keys)]
    modify = _on_grid(inputs["score_mod"], inputs["score_mod_other_buffers"], takes_score=True)
    key = key.repeat_interleave(heads // key.shape[1], 1)
    scores = (query.float() @ key.float().mT * inputs["scale"]).nan_to_num()
    # If the function adds a number, that number is what it makes of a score of 0.
    log_weight = modify(torch.zeros_like(scores), *indices).float()
    offset = log_weight.nan_to_num(0.0, 0.0, 0.0).abs()
    for point in (*(torch.full_like(scores, value) for value in POINTS), scores):
        modified = modify(point, *indices).float()
        error = 16 * torch.finfo(torch.float32).eps * (1 + point.abs() + offset)
        is_added = (modified - log_weight - point).abs() <= error
        is_hidden = (modified == log_weight) & log_weight.isinf()
        if not bool((is_added | is_hidden).all()):
            return "the score function of its FlexAttention does more than add a number to the score"
    mask_function = inputs["block_mask"][-1]
    visible = _on_grid(mask_function, inputs["mask_mod_other_buffers"], takes_score=False)(*indices)
    return log_weight.masked_fill(~visible, -torch.inf)


def _on_grid(
    function: Callable[..., Tensor], buffers: tuple[Tensor, ...], *, takes_score: bool
) -> Callable[..., Tensor]:
    """A function of one score and its indices, or of the indices alone, for a whole (B, H, L, N)."""
    score_dims = (0,) if takes_score else ()
    buffer_dims = (None,) * len(buffers)
    # One dimension after the other, the keys innermost: there the key's index varies, and that of the rest stays.
    for varying in (3, 2, 1, 0):
        index_dims = tuple(0 if index == varying else None for index in range(4))
        function = torch.vmap(function, in_dims=(*score_dims, *index_dims, *buffer_dims))
    return lambda *arguments: function(*arguments, *buffers)
