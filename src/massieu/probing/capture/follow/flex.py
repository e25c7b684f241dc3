"""FlexAttention: the scores that its functions make, evaluated on the whole grid of queries and keys."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

POINTS = (1.0, -30.0, 1000.0)  # scores near and far: functions that bend, as caps do, are told from straight ones


def scores_of(query: Tensor, key: Tensor, given: dict[str, Any]) -> Tensor | str:
    """Log-weights (B, H, L, N) that FlexAttention adds to ``scale · q·k``; or why there are none.

    The function of the score must be the score plus a number, at `POINTS` as at the scores themselves. Others are no
    log-weight beside a score.
    """
    batch, heads, length = query.shape[:3]
    count = key.shape[2]
    places = [torch.arange(size, device=query.device) for size in (batch, heads, length, count)]
    modify = _on_grid(given["score_mod"], given["score_mod_other_buffers"], scored=True)
    key = key.repeat_interleave(heads // key.shape[1], 1)
    scores = (query.float() @ key.float().mT * given["scale"]).nan_to_num()
    weight = modify(torch.zeros_like(scores), *places).float()
    offset = weight.nan_to_num(0.0, 0.0, 0.0).abs()
    for point in (*(torch.full_like(scores, each) for each in POINTS), scores):
        made = modify(point, *places).float()
        error = 16 * torch.finfo(torch.float32).eps * (1 + point.abs() + offset)
        if not bool((((made - weight - point).abs() <= error) | (made == weight) & weight.isinf()).all()):
            return "the score function of its FlexAttention does more than add a number to the score"
    visible = _on_grid(given["block_mask"][-1], given["mask_mod_other_buffers"], scored=False)(*places)
    return weight.masked_fill(~visible, -torch.inf)


def _on_grid(function: Callable[..., Tensor], buffers: tuple[Tensor, ...], scored: bool) -> Callable[..., Tensor]:
    """A function of one score and its place, or of the place alone, for a whole (B, H, L, N)."""
    score = (0,) if scored else ()
    for own in range(3, -1, -1):
        place = tuple(0 if number == own else None for number in range(4))
        function = torch.vmap(function, in_dims=(*score, *place, *(None for _ in buffers)))
    return lambda *given: function(*given, *buffers)
