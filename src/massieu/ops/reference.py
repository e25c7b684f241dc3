"""Attention and its moments in plain tensor operations: right everywhere, differentiable any number of times.

Everything else in this package is measured against this file. Long inputs are done in blocks of queries that are
computed again in the backward pass, so that memory is linear in the number of queries and of keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from massieu.foundation.transforms import without_autocast
from massieu.ops.differentiable import recomputed
from massieu.ops.shapes import AttentionProblem, Band, hidden_by_position, scores_per_tile, slices

BLOCK_PAIRS = 1 << 21
"""Scores that are held at once on the CPU; elsewhere `scores_per_tile` says how many. The backward pass holds up to ten numbers
for each. A smaller problem is one block, without recomputation."""

Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Reference:
    """The backend that is right everywhere."""

    forward: Callable[..., tuple[Tensor, ...]]
    name = "reference"
    bands = False

    def refuses(self, problem: AttentionProblem, *others: Tensor) -> str | None:
        """None: it takes every problem."""
        return None


def attention(problem: AttentionProblem) -> tuple[Tensor, ...]:
    """Output ``(B, Hk, G, L, E)``, where there are values, and log-partition ``(B, Hk, G, L)``."""
    *output, log_z = in_blocks(problem.zero_queries_without_key(), _attention)
    return *(part.to(problem.query.dtype) for part in output), log_z


def _attention(scores: Tensor, log_weight: Tensor | None, value: Tensor | None) -> tuple[Tensor, ...]:
    """The same for one block of queries."""
    weights, total, log_z = softmax(scores, log_weight)
    if value is None:
        return (log_z,)
    return weighted_sum(weights, value) / total.unsqueeze(-1), log_z


def softmax(scores: Tensor, log_weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Weights that are not yet divided by their total, that total, and log Z.

    Without a visible key: weights 0, total 1, log Z = −inf, and every derivative 0.
    """
    if log_weight is not None:
        scores = scores + log_weight
    if scores.shape[-1] == 0:
        # A sum over no keys is 0, and keeps the results in the graph of derivatives.
        zero = scores.sum(-1)
        return scores, zero + 1, zero - torch.inf
    # The shift cancels from every result, so no derivative needs to go through it.
    shift = scores.detach().amax(-1)
    shift = shift.masked_fill(shift == -torch.inf, 0.0)
    weights = (scores - shift.unsqueeze(-1)).exp()
    total = weights.sum(-1)
    sees_no_key = total == 0
    total = torch.where(sees_no_key, 1.0, total)
    return weights, total, (total.log() + shift).masked_fill(sees_no_key, -torch.inf)


def weighted_sum(weights: Tensor, value: Tensor) -> Tensor:
    """Σ_n weights_n value_n for weights ``(B, Hk, G, L, N)`` and values ``(B, Hk, N, E)``."""
    return (weights.flatten(2, 3) @ value).unflatten(2, weights.shape[2:4])


def _scores(query: Tensor, key: Tensor, softcap: float | None) -> Tensor:
    """Scores ``(B, Hk, G, L, N)`` of a scaled query."""
    scores = (query.flatten(2, 3) @ key.mT).unflatten(2, query.shape[2:4])
    if softcap is None:
        return scores
    return softcap * torch.tanh(scores / softcap)


def _float_weight(log_weight: Tensor | None, hidden: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Float log-weights, −∞ for pairs that a boolean mask or `hidden` (causality and window) hides; None if nothing does."""
    if log_weight is not None and log_weight.dtype == torch.bool:
        log_weight = torch.zeros_like(log_weight, dtype=dtype).masked_fill(~log_weight, -torch.inf)
    elif log_weight is not None:
        log_weight = log_weight.to(dtype)
    if hidden is None:
        return log_weight
    visible = hidden.new_zeros((), dtype=dtype) if log_weight is None else log_weight
    return torch.where(hidden, -torch.inf, visible)


def in_blocks(problem: AttentionProblem, function: Function) -> tuple[Tensor, ...]:
    """Apply ``function(scores, log_weight, value)`` to blocks of queries and join its results along the queries.

    If there are several blocks, each is computed again in the backward pass (`recomputed`).
    """
    query = problem.scaled_query()
    key = problem.key.to(problem.dtype)
    value = None if problem.value is None else problem.value.to(problem.dtype)
    length = query.shape[3]
    block_pairs = scores_per_tile(BLOCK_PAIRS, query.device)
    rows_per_block = max(1, min(length, block_pairs * length // max(problem.pairs, 1)))
    if rows_per_block >= length:
        return _block(function, problem.softcap, problem.band, 0, query, key, problem.log_weight, value)
    results = []
    for rows in slices(length, rows_per_block):
        weight = problem.log_weight
        if weight is not None and weight.shape[3] > 1:
            weight = weight[:, :, :, rows]
        block = partial(_block, function, problem.softcap, problem.band, rows.start)
        results.append(recomputed(block, query[:, :, :, rows], key, weight, value))
    return tuple(torch.cat(parts, dim=3) for parts in zip(*results, strict=True))


def _block(
    function: Function,
    softcap: float | None,
    band: Band,
    first: int,
    query: Tensor,
    key: Tensor,
    log_weight: Tensor | None,
    value: Tensor | None,
) -> tuple[Tensor, ...]:
    """Apply the function to the scores of a block of scaled queries, the first of which is number `first`."""
    with without_autocast(query.device):
        hidden = hidden_by_position(band, first, query.shape[3], key.shape[2], query.device)
        weight = _float_weight(log_weight, hidden, query.dtype)
        return function(_scores(query, key, softcap), weight, value)
