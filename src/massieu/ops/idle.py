"""Queries that see no key: they take no part, in no result and no gradient of another, whatever they hold."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from massieu.ops.shapes import AttentionProblem, hidden_by_position


def zeroed(problem: AttentionProblem) -> AttentionProblem:
    """The problem with zeros for such queries, so that no NaN of theirs meets a key or a weight of 0."""
    empty = None if problem.pairs == 0 else queries(problem)
    if empty is None:
        return problem
    return replace(problem, query=problem.query.masked_fill(empty.unsqueeze(-1), 0.0))


def queries(problem: AttentionProblem) -> Tensor | None:
    """Which queries see no key, broadcasting to ``(B, Hk, G, L)``; None where that cannot be."""
    weight, band = problem.log_weight, problem.band
    length, keys = problem.query.shape[3], problem.key.shape[2]
    if weight is None and problem.window is None:
        return None
    if weight is None:
        kept = torch.ones(1, 1, 1, 1, keys, dtype=torch.bool, device=problem.query.device)
    else:
        kept = weight.detach() if weight.dtype == torch.bool else weight.detach() != -torch.inf
    if band is None:
        return ~kept.any(-1)
    if kept.shape[3] > 1:
        hidden = hidden_by_position(band, 0, length, keys, kept.device)
        return ~(kept & ~hidden).any(-1)  # pyright: ignore[reportOptionalOperand]
    # One mask of keys for all queries: how many are kept below either end of each query's band.
    before = F.pad(kept.expand(*kept.shape[:-1], keys).squeeze(3).cumsum(-1), (1, 0))
    query = torch.arange(length, device=kept.device)
    low, high = band
    below = 0 if low is None else before[..., (query + low).clamp(0, keys)]
    return before[..., (query + high + 1).clamp(0, keys)] == below
