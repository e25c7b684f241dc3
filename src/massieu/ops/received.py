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

from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.transforms import any_true, in_autocast_dtype, may_be_differentiated, values_are_readable
from massieu.ops import reference
from massieu.ops import sink as with_sink
from massieu.ops.attention import AttentionBackend, attend_without_sink
from massieu.ops.differentiable import recomputed
from massieu.ops.documents import Documents
from massieu.ops.shapes import (
    AttentionProblem,
    Band,
    Scale,
    Sink,
    Window,
    as_visible,
    check_problem,
    hidden_by_position,
    slices,
)
from massieu.ops.tiles import can_sync


class AttentionReceivedResult(NamedTuple):
    """What `attention_received` returns: a number for each key and query head, float32 (float64 for float64)."""

    total: Float[Tensor, "*heads N"]
    """Σ_i p_in, the attention that all queries together give to key n: between 0 and the number of queries."""
    share: Float[Tensor, "*heads N"]
    """total/Σ_n total: sums to 1 over the keys of a head, and of a document; 0 where no query sees a key."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


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
        # Both passes must see the same scores: a backend could round scale·query in the first and scale·key in the second.
        problem = replace(problem, query=problem.scaled_query(), key=problem.key.to(problem.dtype), scale=1.0)
    (log_z,) = attend_without_sink(problem, backend)  # (B, Hk, G, L)
    if problem.sink is not None:
        log_z = with_sink.shares(log_z, problem)[0]
    totals = _document_totals(problem, log_z, backend)
    shares = []
    for total in totals:
        sum_of_keys = total.sum(-1, keepdim=True)
        # Where no query sees a key all totals are 0, and so must the shares be.
        shares.append(total / sum_of_keys.masked_fill(sum_of_keys == 0, 1.0))
    shape = (*problem.lead[:-1], problem.key.shape[2])
    return AttentionReceivedResult(_along_row(totals).reshape(shape), _along_row(shares).reshape(shape))


def _along_row(parts: list[Tensor]) -> Tensor:
    """Numbers of the documents' keys, one after the other."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim=3)


def _document_totals(problem: AttentionProblem, log_z: Tensor, backend: AttentionBackend) -> list[Tensor]:
    """What each key receives, ``(B, Hk, G, N)`` for each document.

    Args:
        log_z: of each query, ``(B, Hk, G, L)``.
    """
    documents = problem.documents
    if documents is None:
        return [_received(problem, log_z, backend)]
    query_slices = starmap(slice, pairwise(documents.query_boundaries))
    key_slices = starmap(slice, pairwise(documents.key_boundaries))
    totals = []
    for number, (rows, keys) in enumerate(zip(query_slices, key_slices, strict=True)):
        part = replace(problem.narrow(rows, keys), documents=None)
        if part.pairs:
            num_queries = rows.stop - rows.start
            num_keys = keys.stop - keys.start
            part = replace(part, **part.least_band(num_queries, num_keys, documents.query_offset(number)))
            totals.append(_received(part, log_z[..., rows], backend))
        else:
            totals.append(log_z.new_zeros(*part.query.shape[:3], part.key.shape[2]))
    return totals


def _received(problem: AttentionProblem, log_z: Tensor, backend: AttentionBackend) -> Float[Tensor, "B Hk G N"]:
    """What each key receives in one document, or without documents."""
    length = problem.query.shape[3]
    keys = problem.key.shape[2]
    if keys == 0:
        return log_z[..., :0]
    last_seen = min(keys, max(0, length + problem.offset)) if problem.is_causal else keys
    if last_seen < keys:
        # No query sees a key after the last query's own place.
        early = _received(problem.narrow(slice(length), slice(last_seen)), log_z, backend)
        return F.pad(early, (0, keys - last_seen))
    query = problem.query
    level = -log_z
    # A query gives nothing where its log Z is no number. With a sink log Z is finite also where it sees no key.
    gives_nothing = ~log_z.isfinite()
    sees_no_key = problem.sees_no_key()
    if sees_no_key is not None:
        gives_nothing = gives_nothing | sees_no_key
    undefined = None
    if not can_sync(gives_nothing.device) or not values_are_readable(gives_nothing) or any_true(gives_nothing):
        # These queries are left out of the sums, so that 0·NaN cannot arise; the keys that see an undefined one get NaN last.
        undefined = log_z.isnan() | (log_z == torch.inf)
        if sees_no_key is not None:
            undefined = undefined & ~sees_no_key
        level = level.masked_fill(gives_nothing, -torch.inf)
        query = query.masked_fill(gives_nothing.unsqueeze(-1), 0.0)
    weight = problem.log_weight
    if weight is not None and weight.shape[4] == 1 != weight.shape[3]:
        # One log-weight for each query joins its level. A boolean one needs nothing more: `gives_nothing` includes it.
        if weight.is_floating_point():
            level = (level + weight.squeeze(4)).masked_fill(gives_nothing, -torch.inf)
        weight = None
    problem = replace(problem, query=query, log_weight=weight)
    if weight is not None and weight.shape[3] != 1:
        return _received_by_pairs(problem, level, undefined, weight, backend)
    # log Σ_i exp(s_in − log Z_i) of each key n, to which its own log-weight is added.
    (log_sum,) = attend_without_sink(_exchanged(problem, level), backend)
    if problem.is_causal:
        log_sum = log_sum.flip(3)
    log_sum = log_sum.view(*query.shape[:3], keys)
    is_nan = None if undefined is None else _seen_by_any(undefined, problem.band, keys)
    if weight is not None:
        weight = weight.squeeze(3)
        visible = as_visible(weight)
        if weight.dtype == torch.bool:
            log_sum = log_sum.masked_fill(~visible, -torch.inf)
        else:
            log_sum = log_sum + weight
        if is_nan is not None:
            is_nan = is_nan & visible
    return _total(log_sum, is_nan)


def _exchanged(problem: AttentionProblem, level: Tensor) -> AttentionProblem:
    """Attention of the keys, as queries, over the queries, as keys of log-weight `level`; a head for each query head.

    Where causal, key n is seen by the queries from n − offset on, and causality cannot hide what comes before. In reverse
    order it can: place n of the keys then sees the places up to n + offset + L − N of the queries.
    """
    key = problem.key.unsqueeze(2).expand(*problem.query.shape[:3], -1, -1).flatten(1, 2)
    query = problem.query.flatten(1, 2)
    level = level.flatten(1, 2)
    offset = 0
    if problem.is_causal:
        key = key.flip(2)
        query = query.flip(2)
        level = level.flip(2)
        offset = problem.offset + query.shape[2] - key.shape[2]
    window = problem.window
    return replace(
        problem,
        query=key.unsqueeze(2),
        key=query,
        log_weight=level[:, :, None, None],
        offset=offset,
        window=None if window is None else (-window[1], -window[0]),
        sink=None,
    )


def _received_by_pairs(
    problem: AttentionProblem, level: Tensor, undefined: Tensor | None, weight: Tensor, backend: AttentionBackend
) -> Float[Tensor, "B Hk G N"]:
    """The same for a log-weight per query and key.

    Blocks of keys are computed one after the other, and again in the backward pass: level + weight, of the scores' size, is
    held for one block only.
    """
    length, keys = weight.shape[3:]
    exchanged = _exchanged(replace(problem, is_causal=False, window=None), level)
    # From (#B, #Hk, #G, L, N) to (#B, #Hk·G, 1, N, L).
    heads = (1, 1) if weight.shape[1] == weight.shape[2] == 1 else problem.query.shape[1:3]
    weight = weight.mT.expand(-1, *heads, -1, -1).flatten(1, 2).unsqueeze(2)
    band = problem.band
    if band is not None:
        # Query i sees key n if low ≤ n − i ≤ high, so key n is seen by queries n − high … n − low.
        low, high = band
        band = -high, length if low is None else -low
    if undefined is not None:
        undefined = undefined.flatten(1, 2)[:, :, None, None]
    keys_per_block = max(1, reference.BLOCK_PAIRS * keys // max(problem.pairs, 1))
    totals = []
    for key_slice in slices(keys, keys_per_block):
        part = exchanged.narrow(key_slice, slice(length))
        block = partial(_received_by_block, replace(part, log_weight=None), band, key_slice.start, backend)
        totals += recomputed(block, part.query, part.key, part.log_weight, weight[:, :, :, key_slice], undefined)
    return torch.cat(totals, dim=3).view(*problem.query.shape[:3], keys)


def _received_by_block(
    problem: AttentionProblem,
    band: Band,
    first: int,
    backend: AttentionBackend,
    query: Tensor,
    key: Tensor,
    level: Tensor,
    weight: Tensor,
    undefined: Tensor | None,
) -> tuple[Tensor]:
    """What some keys receive: the exchanged `query`, numbered from `first`. All tensors are of the exchanged problem."""
    visible = as_visible(weight.detach())
    hidden = hidden_by_position(band, first, query.shape[3], key.shape[2], query.device)
    if hidden is not None:
        visible = visible & ~hidden
    if weight.dtype != torch.bool:
        level = level + weight
    level = level.masked_fill(~visible | (level == -torch.inf), -torch.inf)
    # Derivatives are the reference's, whatever computed log Z: no other backend has one for a log-weight per pair.
    if may_be_differentiated(query, key, level):
        backend = "reference"
    (log_sum,) = attend_without_sink(replace(problem, query=query, key=key, log_weight=level), backend)
    is_nan = None if undefined is None else (visible & undefined).any(-1)
    return (_total(log_sum, is_nan),)


def _total(log_sum: Tensor, is_nan: Tensor | None) -> Tensor:
    """exp(log_sum), and NaN where `is_nan`. A product with NaN has NaN as gradient too, which a masked fill would hide."""
    total = log_sum.exp()
    if is_nan is None:
        return total
    return total * torch.where(is_nan, torch.nan, 1.0).to(total.dtype)


def _seen_by_any(marked: Bool[Tensor, "B Hk G L"], band: Band, keys: int) -> Bool[Tensor, "B Hk G #N"]:
    """Whether any of the marked queries sees a key by position."""
    if band is None:
        return marked.any(-1, keepdim=True)
    low, high = band
    length = marked.shape[-1]
    key = torch.arange(keys, device=marked.device)
    # Queries key − high … key − low see the key: cumulative counts tell whether one of them is marked.
    count_before = F.pad(marked.cumsum(-1), (1, 0))
    if low is None:
        end = count_before[..., -1:]
    else:
        end = count_before[..., (key - low + 1).clamp(0, length)]
    return end > count_before[..., (key - high).clamp(0, length)]
