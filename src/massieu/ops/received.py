"""The attention that each key receives, by attention of keys over queries.

Σ_i p_in = w_n·Σ_i exp(s_in − log Z_i): the partition function of key n over the queries, each of log-weight −log Z_i. So two
passes of any backend of `attention` give it, with all their derivatives, and no score is kept.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise, starmap
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.foundation.transforms import in_autocast_dtype, may_be_differentiated, some, values_are_readable
from massieu.ops import reference
from massieu.ops import sink as with_sink
from massieu.ops.attention import AttentionBackend, of_problem
from massieu.ops.differentiable import recomputed
from massieu.ops.documents import Documents
from massieu.ops.shapes import AttentionProblem, Band, Scale, Sink, Window, check_problem, hidden_by_position, slices
from massieu.ops.tiles import may_look


class AttentionReceivedResult(NamedTuple):
    """What `attention_received` returns: a number for each key and query head, float32 (float64 for float64)."""

    total: Float[Tensor, "*heads N"]
    """Σ_i p_in, the attention that all queries together give to key n: between 0 and the number of queries."""
    share: Float[Tensor, "*heads N"]
    """total/Σ_n total: sums to 1 over the keys of a head, and of a document; 0 where no query sees a key."""


def attention_received(
    query: Float[Tensor, "*query D"],
    key: Float[Tensor, "*batch Hk N D"],
    *,
    log_weight: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
    scale: Scale = None,
    is_causal: bool = False,
    window: Window = None,
    query_offset: int = 0,
    documents: Documents | None = None,
    softcap: float | None = None,
    sink: Sink = None,
    backend: AttentionBackend = "auto",
) -> AttentionReceivedResult:
    """The attention that each key receives from all queries, Σ_i p_in, in memory linear in queries and keys.

    It is ∂Σ_i log Z_i/∂ log w_n, differentiable itself, any number of times, in query, key, log_weight, scale and sink. It
    takes two passes of attention without an output: log Z, and then keys over queries in exchanged roles.

    Args:
        query: (*batch, H, L, D), for results (*batch, H, N): each query head's own. Or (*batch, Hk, G, L, D), for results
            (*batch, Hk, G, N).
        key, log_weight, scale, is_causal, window, query_offset, documents, softcap, sink: as in `massieu.ops.attention`. What
            a sink takes is no key's: it receives L − Σ_n total from L queries. Shares are those in a document, of which each
            takes a pass of its own.
        backend: as in `massieu.ops.attention`, for both passes.

    A query that sees no key gives nothing, whatever it holds. A query of NaN makes NaN of the keys that it sees, and a key of
    NaN of all that its queries see. Relative errors are a few units of float32's rounding times the size of the scores, in
    half precision too.

    Raises:
        TypeError, ValueError: as `massieu.ops.attention`.

    Example:
        >>> import torch
        >>> from massieu import ops
        >>> found = ops.attention_received(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), is_causal=True)
        >>> [round(number, 3) for number in found.total.flatten().tolist()]  # 1 + 1/2, and 1/2
        [1.5, 0.5]
    """
    query, key = in_autocast_dtype(query, key)
    problem = check_problem(
        query, key, None, log_weight, scale, is_causal, window, softcap, sink, None, query_offset, documents
    )
    if isinstance(problem.scale, Tensor) or problem.scale <= 0:
        # Rounded once, for both passes alike.
        problem = replace(problem, query=problem.scaled_query(), key=problem.key.to(problem.dtype), scale=1.0)
    (log_z,) = of_problem(problem, backend)
    if problem.sink is not None:
        log_z = with_sink.shares(log_z, problem)[0]
    totals = _by_documents(problem, log_z, backend)
    wholes = [total.sum(-1, keepdim=True) for total in totals]
    shares = [total / whole.masked_fill(whole == 0, 1.0) for total, whole in zip(totals, wholes, strict=True)]
    total, share = (one[0] if len(one) == 1 else torch.cat(one, dim=3) for one in (totals, shares))
    shape = (*problem.lead[:-1], problem.key.shape[2])
    return AttentionReceivedResult(total.reshape(shape), share.reshape(shape))


def _by_documents(problem: AttentionProblem, log_z: Tensor, backend: AttentionBackend) -> list[Tensor]:
    """What each key receives from queries of these log-partitions, ``(B, Hk, G, N)`` for each document."""
    documents, totals = problem.documents, []
    if documents is None:
        return [_received(problem, log_z, backend)]
    both = documents.query_boundaries, documents.key_boundaries
    for rows, keys in zip(*(starmap(slice, pairwise(boundaries)) for boundaries in both), strict=True):
        part = replace(problem.narrow(rows, keys), documents=None)
        none = log_z.new_zeros(*part.query.shape[:3], part.key.shape[2])
        totals.append(_received(part.with_least_band(), log_z[..., rows], backend) if part.pairs else none)
    return totals


def _received(problem: AttentionProblem, log_z: Tensor, backend: AttentionBackend) -> Float[Tensor, "B Hk G N"]:
    length, keys = problem.query.shape[3], problem.key.shape[2]
    if keys == 0:
        return log_z[..., :0]
    seen = min(keys, length + problem.offset) if problem.is_causal else keys
    if seen < keys:
        # No query sees what comes after the last of them.
        early = _received(problem.narrow(slice(length), slice(seen)), log_z, backend)
        return F.pad(early, (0, keys - seen))
    weight, query, level, lost = problem.log_weight, problem.query, -log_z, None
    # With a sink a query that sees no key has a log Z all the same.
    silent, shut = ~log_z.isfinite(), problem.idle()
    silent = silent if shut is None else silent | shut
    if not may_look(silent.device) or not values_are_readable(silent) or some(silent):
        # Such queries give nothing here; a log Z that is no number is shown to the keys in the end.
        lost = log_z.isnan() | (log_z == torch.inf)
        lost = lost if shut is None else lost & ~shut
        level = level.masked_fill(silent, -torch.inf)
        query = query.masked_fill(silent.unsqueeze(-1), 0.0)
    if weight is not None and weight.shape[4] == 1 != weight.shape[3]:
        # Booleans of queries have said all that they say: which are shut.
        if weight.is_floating_point():
            level = (level + weight.squeeze(4)).masked_fill(silent, -torch.inf)
        weight = None
    problem = replace(problem, query=query, log_weight=weight)
    if weight is not None and weight.shape[3] != 1:
        return _by_pairs(problem, level, lost, weight, backend)
    (log_sum,) = of_problem(_exchanged(problem, level), backend)
    log_sum = log_sum.flip(3) if problem.is_causal else log_sum
    log_sum, kept = log_sum.view(*query.shape[:3], keys), None
    if weight is not None:
        weight = weight.squeeze(3)
        kept = weight if weight.dtype == torch.bool else weight != -torch.inf
        log_sum = log_sum.masked_fill(~kept, -torch.inf) if weight is kept else log_sum + weight
    touched = None if lost is None else _touched(lost, problem.band, keys)
    return _total(log_sum, touched if touched is None or kept is None else touched & kept)


def _exchanged(problem: AttentionProblem, level: Tensor) -> AttentionProblem:
    """Keys over queries of log-weight `level`, for each query head; where causal, both in reverse."""
    key = problem.key.unsqueeze(2).expand(*problem.query.shape[:3], -1, -1).flatten(1, 2)
    query, level, window = problem.query.flatten(1, 2), level.flatten(1, 2), problem.window
    if problem.is_causal:
        key, query, level = key.flip(2), query.flip(2), level.flip(2)
    return replace(
        problem,
        query=key.unsqueeze(2),
        key=query,
        log_weight=level[:, :, None, None],
        offset=problem.offset + query.shape[2] - key.shape[2] if problem.is_causal else 0,
        window=None if window is None else (-window[1], -window[0]),
        sink=None,
    )


def _by_pairs(
    problem: AttentionProblem, level: Tensor, lost: Tensor | None, weight: Tensor, backend: AttentionBackend
) -> Float[Tensor, "B Hk G N"]:
    """The same where each query and key has its log-weight: some keys at a time, so that no sum of two is kept."""
    band, (length, keys) = problem.band, weight.shape[3:]
    exchanged = _exchanged(replace(problem, is_causal=False, window=None), level)
    # From (#B, #Hk, #G, L, N) to (#B, #Hk·G, 1, N, L).
    heads = (1, 1) if weight.shape[1] == weight.shape[2] == 1 else problem.query.shape[1:3]
    weight = weight.mT.expand(-1, *heads, -1, -1).flatten(1, 2).unsqueeze(2)
    if band is not None:
        band = -band[1], length if band[0] is None else -band[0]
    lost = None if lost is None else lost.flatten(1, 2)[:, :, None, None]
    rows = max(1, reference.BLOCK_PAIRS * keys // max(problem.pairs, 1))
    totals = []
    for part in slices(keys, rows):
        own = exchanged.narrow(part, slice(length))
        block = partial(_of_some_keys, replace(own, log_weight=None), band, part.start, backend)
        totals += recomputed(block, own.query, own.key, own.log_weight, weight[:, :, :, part], lost)
    return torch.cat(totals, dim=3).view(*problem.query.shape[:3], keys)


def _of_some_keys(
    problem: AttentionProblem,
    band: Band,
    first: int,
    backend: AttentionBackend,
    query: Tensor,
    key: Tensor,
    level: Tensor,
    weight: Tensor,
    lost: Tensor | None,
) -> tuple[Tensor]:
    kept = weight if weight.dtype == torch.bool else weight.detach() != -torch.inf
    hidden = hidden_by_position(band, first, query.shape[3], key.shape[2], query.device)
    kept = kept if hidden is None else kept & ~hidden
    level = level if weight.dtype == torch.bool else level + weight
    level = level.masked_fill(~kept | (level == -torch.inf), -torch.inf)
    # Whatever computed the sums, their derivatives here are the reference's: no other has one for a log-weight per pair.
    backend = "reference" if may_be_differentiated(query, key, level) else backend
    (log_sum,) = of_problem(replace(problem, query=query, key=key, log_weight=level), backend)
    return (_total(log_sum, None if lost is None else (kept & lost).any(-1)),)


def _total(log_sum: Tensor, touched: Tensor | None) -> Tensor:
    """exp(log_sum), and NaN, with a gradient of NaN, where a query gives no number."""
    total = log_sum.exp()
    return total if touched is None else total * torch.where(touched, torch.nan, 1.0).to(total.dtype)


def _touched(lost: Bool[Tensor, "B Hk G L"], band: Band, keys: int) -> Bool[Tensor, "B Hk G #N"]:
    """Which keys any of these queries sees by position."""
    if band is None:
        return lost.any(-1, keepdim=True)
    (low, high), length = band, lost.shape[-1]
    before, key = F.pad(lost.cumsum(-1), (1, 0)), torch.arange(keys, device=lost.device)
    last = before[..., -1:] if low is None else before[..., (key - low + 1).clamp(0, length)]
    return last > before[..., (key - high).clamp(0, length)]
