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
"""Up to so many tokens matrices are faster than the fused kernel: forward and backward, 2.7 times at 64, 1.4 times at 197."""


class Mutual(NamedTuple):
    """p_BC = exp(scale·key_B·query_C − log Z_C) for B ≠ C: log Z, and the sums over keys and over queries."""

    log_partition: Float[Tensor, "B H n"]
    """log Z_C, 0 for a query that is hidden or alone."""
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
    """log Z_C = log Σ_{B≠C} exp(scale·key_B·query_C), 0 for a query that is hidden or alone."""
    if query.shape[-2] <= EXPLICIT:
        return _explicit(query, key, scale, keep)[0]
    return _visible(_over_others(query, key, scale, _of_keys(keep)), keep)[0]


def mutual_attention(
    query: Float[Tensor, "B H n Z"],
    key: Float[Tensor, "B H n Z"],
    scale: Float[Tensor, "H"],
    keep: Bool[Tensor, "B n"] | None,
) -> Mutual:
    """log Z and both sums.

    Without explicit weights the second sum is attention with exchanged roles, of queries of weight 1/Z, times its partition.
    """
    told = listeners()
    found = in_one_call(told, _mutual_attention, query, key, scale, keep)
    return _told(told, found, query, key, scale, keep) if told else found


def _told(told: Listeners, found: Mutual, query: Tensor, key: Tensor, scale: Tensor, keep: Tensor | None) -> Mutual:
    """Both sums, or what takes their places: attention to the other tokens, and the same scores read from the keys' side."""
    seen = ~torch.eye(query.shape[-2], dtype=torch.bool, device=query.device)[None, None]
    if keep is not None:
        seen = seen & keep[:, None, None] & keep[:, None, :, None]
    of_keys = tell_attention(told, found.of_keys, query, key, key, scale=scale, log_weight=seen, moving=False)
    # Query C has the weight 1/Z_C among the queries, and Σ_C p_BC is what key B receives of them all.
    level = (-found.log_partition.unsqueeze(-2)).masked_fill(~seen, -torch.inf)
    scores = (key * scale[:, None, None]) @ query.mT
    received = reference.softmax(scores, level)[2].unsqueeze(-1).exp()
    mean = found.of_queries / torch.where(received > 0, received, 1.0)
    after = tell_attention(told, mean, key, query, query, scale=scale, log_weight=level, moving=True, exchanged=True)
    of_queries = found.of_queries if after is mean else found.of_queries + received * (after - mean)
    return Mutual(found.log_partition, of_keys, of_queries)


def _mutual_attention(query: Tensor, key: Tensor, scale: Tensor, keep: Tensor | None) -> Mutual:
    if query.shape[-2] <= EXPLICIT:
        log_partition, weights = _explicit(query, key, scale, keep)
        return Mutual(log_partition, weights @ key, weights.mT @ query)
    part = _over_others(query, key, scale, _of_keys(keep))
    log_partition, seen = _visible(part, keep)
    of_keys = torch.where(seen.unsqueeze(-1), part.mean, 0.0)
    level = torch.where(seen, -log_partition, -torch.inf).unsqueeze(-2)
    back = _over_others(key, query, scale, level)
    of_queries = back.log_partition.exp().unsqueeze(-1) * back.mean
    if keep is not None:
        of_queries = torch.where(keep[:, None, :, None], of_queries, 0.0)
    return Mutual(log_partition, of_keys, of_queries)


def _explicit(query: Tensor, key: Tensor, scale: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """log Z and p, (B, H, C, B): all 0 for a query that is hidden or alone."""
    scores = (query * scale[:, None, None]) @ key.mT
    hidden = torch.eye(scores.shape[-1], dtype=torch.bool, device=scores.device)
    if keep is not None:
        hidden = hidden | ~keep[:, None, None] | ~keep[:, None, :, None]
    weights, total, log_partition = reference.softmax(scores.masked_fill(hidden, -torch.inf), None)
    return log_partition.masked_fill(hidden.all(-1), 0.0), weights / total.unsqueeze(-1)


def _of_keys(keep: Tensor | None) -> Tensor | None:
    return None if keep is None else keep[:, None, None]


def _visible(part: Partial, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """log Z, and which queries count."""
    seen = part.log_partition != -torch.inf
    if keep is not None:
        seen = seen & keep[:, None]
    return torch.where(seen, part.log_partition, 0.0), seen


def _over_others(query: Tensor, key: Tensor, scale: Tensor, log_weight: Tensor | None) -> Partial:
    turned = None if log_weight is None else log_weight.flip(-1)
    after = _over_those_before(query.flip(-2), key.flip(-2), scale, turned)
    after = Partial(after.log_partition.flip(-1), after.mean.flip(-2))
    return _over_those_before(query, key, scale, log_weight).merge(after)


def _over_those_before(query: Tensor, key: Tensor, scale: Tensor, log_weight: Tensor | None) -> Partial:
    """Each query over the keys before it; the first over none."""
    query, key = query[..., 1:, :], key[..., :-1, :]
    weight = None if log_weight is None else log_weight[..., :-1]
    part = Partial.of(ops.attention(query, key, key, log_weight=weight, scale=scale, is_causal=True))
    return Partial(F.pad(part.log_partition, (1, 0), value=-torch.inf), F.pad(part.mean, (0, 0, 1, 0)))
