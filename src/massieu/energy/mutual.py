"""Attention of tokens to each other, of none to itself.

The diagonal is left out in memory linear in the tokens: keys before a query and keys after it are two causal problems, the
second in reverse order, and their results merge exactly, where taking the diagonal out of attention over all keys would
cancel. A few tokens are done by explicit matrices, which is faster.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from massieu import ops
from massieu.foundation.listening import Listeners, in_one_call, listeners
from massieu.ops import Partial, reference
from massieu.ops.observed import tell_attention

EXPLICIT = 256
"""Tokens up to which matrices are faster than the fused kernel, forward and backward: 2.7 times at 64, 1.4 times at 197."""


class Mutual(NamedTuple):
    """p_BC = exp(scale·key_B·query_C − log Z_C) for B ≠ C: log Z, and the sums over keys and over queries."""

    log_partition: Float[Tensor, "B H n"]
    """log Z_C; 0 for a query that is padding or the only token."""
    of_keys: Float[Tensor, "B H n Z"]
    """Σ_B p_BC key_B."""
    of_queries: Float[Tensor, "B H n Z"]
    """Σ_C p_BC query_C."""


def mutual_log_partition(
    query: Float[Tensor, "B H n Z"],
    key: Float[Tensor, "B H n Z"],
    scale: Float[Tensor, "H"],
    keep: Bool[Tensor, "B n"] | None,
) -> Float[Tensor, "B H n"]:
    """log Z_C = log Σ_{B≠C} exp(scale·key_B·query_C); 0 for a query that is padding or the only token."""
    if query.shape[-2] <= EXPLICIT:
        return _explicit(query, key, scale, keep)[0]
    return _finite_log_partition(_over_others(query, key, scale, _key_mask(keep)), keep)[0]


def mutual_attention(
    query: Float[Tensor, "B H n Z"],
    key: Float[Tensor, "B H n Z"],
    scale: Float[Tensor, "H"],
    keep: Bool[Tensor, "B n"] | None,
) -> Mutual:
    """log Z and both sums. Listeners of the probe hear of both, and may replace them."""
    observers = listeners()
    mutual = in_one_call(observers, _mutual_attention, query, key, scale, keep)
    if not observers:
        return mutual
    return _observed(observers, mutual, query, key, scale, keep)


def _observed(
    observers: Listeners, mutual: Mutual, query: Tensor, key: Tensor, scale: Tensor, keep: Tensor | None
) -> Mutual:
    """Both sums, or their replacements, told as two attentions: to the other tokens, and the same scores by keys."""
    visible = ~torch.eye(query.shape[-2], dtype=torch.bool, device=query.device)[None, None]
    if keep is not None:
        visible = visible & keep[:, None, None] & keep[:, None, :, None]
    of_keys = tell_attention(observers, mutual.of_keys, query, key, key, scale=scale, log_weight=visible, moving=False)
    # From the side of key B, query C has the weight 1/Z_C, and B receives Σ_C p_BC of all queries: the sum over queries is
    # this total times a mean.
    log_weight = (-mutual.log_partition.unsqueeze(-2)).masked_fill(~visible, -torch.inf)
    scores = (key * scale[:, None, None]) @ query.mT
    received = reference.softmax(scores, log_weight)[2].unsqueeze(-1).exp()
    mean = mutual.of_queries / torch.where(received > 0, received, 1.0)
    replaced = tell_attention(
        observers, mean, key, query, query, scale=scale, log_weight=log_weight, moving=True, exchanged=True
    )
    # Unless it was replaced the sum stays as it is, without the rounding of a division.
    if replaced is mean:
        of_queries = mutual.of_queries
    else:
        of_queries = mutual.of_queries + received * (replaced - mean)
    return Mutual(mutual.log_partition, of_keys, of_queries)


def _mutual_attention(query: Tensor, key: Tensor, scale: Tensor, keep: Tensor | None) -> Mutual:
    if query.shape[-2] <= EXPLICIT:
        log_partition, weights = _explicit(query, key, scale, keep)
        return Mutual(log_partition, weights @ key, weights.mT @ query)
    by_query = _over_others(query, key, scale, _key_mask(keep))
    log_partition, counts = _finite_log_partition(by_query, keep)
    of_keys = torch.where(counts.unsqueeze(-1), by_query.mean, 0.0)
    # Without explicit weights the second sum is attention with the roles exchanged, of queries of weight 1/Z, times its
    # partition: Σ_C e^{s_BC}/Z_C query_C.
    query_log_weight = torch.where(counts, -log_partition, -torch.inf).unsqueeze(-2)
    by_key = _over_others(key, query, scale, query_log_weight)
    of_queries = by_key.log_partition.exp().unsqueeze(-1) * by_key.mean
    if keep is not None:
        of_queries = torch.where(keep[:, None, :, None], of_queries, 0.0)
    return Mutual(log_partition, of_keys, of_queries)


def _explicit(query: Tensor, key: Tensor, scale: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """log Z and p, (B, H, n queries, n keys): all 0 for a query that is padding or the only token."""
    scores = (query * scale[:, None, None]) @ key.mT
    hidden = torch.eye(scores.shape[-1], dtype=torch.bool, device=scores.device)
    if keep is not None:
        hidden = hidden | ~keep[:, None, None] | ~keep[:, None, :, None]
    weights, total, log_partition = reference.softmax(scores.masked_fill(hidden, -torch.inf), None)
    return log_partition.masked_fill(hidden.all(-1), 0.0), weights / total.unsqueeze(-1)


def _key_mask(keep: Tensor | None) -> Tensor | None:
    """The mask of tokens, (B, 1, 1, n), as booleans of the keys."""
    if keep is None:
        return None
    return keep[:, None, None]


def _finite_log_partition(by_query: Partial, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """log Z with 0 for queries that do not count, and which queries count: no padding, and not the only token."""
    counts = by_query.log_partition != -torch.inf
    if keep is not None:
        counts = counts & keep[:, None]
    return torch.where(counts, by_query.log_partition, 0.0), counts


def _over_others(query: Tensor, key: Tensor, scale: Tensor, log_weight: Tensor | None) -> Partial:
    """Each query over all keys but its own: over those before it, merged with those after it."""
    # In reverse order the keys after a query are those before it.
    reversed_weight = None if log_weight is None else log_weight.flip(-1)
    after = _over_those_before(query.flip(-2), key.flip(-2), scale, reversed_weight)
    after = Partial(after.log_partition.flip(-1), after.mean.flip(-2))
    return _over_those_before(query, key, scale, log_weight).merge(after)


def _over_those_before(query: Tensor, key: Tensor, scale: Tensor, log_weight: Tensor | None) -> Partial:
    """Each query over the keys before it; the first over none."""
    # Shifted by one, query number C sees the keys up to number C − 1: plain causal attention without the diagonal.
    query = query[..., 1:, :]
    key = key[..., :-1, :]
    if log_weight is not None:
        log_weight = log_weight[..., :-1]
    part = Partial.of(ops.attention(query, key, key, log_weight=log_weight, scale=scale, is_causal=True))
    # The first query, which sees nothing, is put back.
    log_partition = F.pad(part.log_partition, (1, 0), value=-torch.inf)
    mean = F.pad(part.mean, (0, 0, 1, 0))
    return Partial(log_partition, mean)
