"""Contrastive and metric losses as Fenchel–Young losses of the log-partition, without the matrix of scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from massieu.foundation.arguments import check_one_device, check_shape, described, flag, floating, integers, number
from massieu.foundation.doors import door
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.transforms import without_autocast
from massieu.ops.differentiable import recomputed
from massieu.ops.documents import Documents, check_documents
from massieu.ops.linear_scores import check_places, index_tensor, log_partitions, one_number, values_are_known
from massieu.ops.score_tiles import ScorePlan
from massieu.ops.shapes import check_alike, slices, working_dtype

POSITIVE_PAIRS = 1 << 22
"""Entries of a mask of positives that are turned into numbers at a time."""


class ContrastResult(NamedTuple):
    """What the losses of this file return with `return_log_partition=True`."""

    loss: Float[Tensor, ""]
    """Mean over the queries, in nats; one a document, where there are documents."""
    log_partition: Float[Tensor, "..."]
    """log Z of each query, (B,), in nats; for a symmetric loss (2, B), of queries over keys and of keys over queries."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


@door(query_ids=integers, key_ids=integers)
@dataclass(frozen=True)
class FalseNegatives:
    """Masks false negatives: a log-weight of −inf for keys with the query's id, except the query's positive.

    Given as `log_weight` it hides, for instance, other captions of the same image, and no matrix of pairs is made.

    Example:
        >>> import torch
        >>> from massieu import ops
        >>> twins = ops.FalseNegatives(torch.tensor([7, 7]))  # no other image is left
        >>> float(ops.info_nce(torch.eye(2), torch.eye(2), temperature=1.0, log_weight=twins))
        0.0
    """

    query_ids: Int[Tensor, "B"]
    key_ids: Int[Tensor, "N"] | None = None
    """Ids of the keys, extra negatives last; None: the queries' ids."""


LogWeight = Float[Tensor, "..."] | Bool[Tensor, "..."] | FalseNegatives | None


class _Options(TypedDict, total=False):
    positive: Tensor | None
    negatives: Tensor | None
    log_weight: LogWeight
    symmetric: bool
    documents: Documents | None


@overload
def info_nce(
    query: Tensor,
    key: Tensor,
    *,
    temperature: float | Tensor,
    return_log_partition: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...


@overload
def info_nce(
    query: Tensor,
    key: Tensor,
    *,
    temperature: float | Tensor,
    return_log_partition: Literal[True],
    **options: Unpack[_Options],
) -> ContrastResult: ...


def info_nce(
    query: Float[Tensor, "B D"],
    key: Float[Tensor, "K D"],
    *,
    positive: Int[Tensor, "B"] | Bool[Tensor, "B K"] | None = None,
    negatives: Float[Tensor, "M D"] | None = None,
    log_weight: LogWeight = None,
    temperature: float | Float[Tensor, ""],
    symmetric: bool = False,
    documents: Documents | None = None,
    return_log_partition: bool = False,
) -> Tensor | ContrastResult:
    """The InfoNCE loss in nats: mean over queries of A(q) − q·k₊/temperature, A(q) = log Σ_j w_j exp(q·k_j/temperature).

    That is the Fenchel–Young loss of A at the positive (S23): its gradient in q·1/temperature is the keys' mean under
    the softmax less the positive key. Without weights it is at least 0, and 0 in the limit where the softmax is all on
    the positive. Queries and keys are taken as they are: normalise them for cosine scores.

    Args:
        query, key: (B, D) and (K, D), of one dtype and device. Without `positive`, K = B and query i's positive is key i.
        positive: (B,) integers, the number of each query's positive key; or (B, K) booleans, True for its positives. With
            several, −q·k₊/temperature is the mean over them: the supervised contrastive loss (Khosla et al. 2020, eq. 2).
            A query without a positive is left out of the mean, which is NaN if all are. It gets no gradient then, and may hold
            NaN unless the loss is symmetric; so may a key that the log-weight hides from all queries, and that is no positive.
        negatives: (M, D), more keys, which are no query's positive; there are N = K + M in all.
        log_weight: log w, below +inf, or booleans of which True keeps a key: (N,), one a key, or (B, N), one a query and
            key; or `FalseNegatives`, which hides keys of equal ids. It acts in A alone, so a hidden positive is left
            out of A but still attracts, and −log p₊ is the loss plus A*(k₊) = −log w₊. A float tensor has a gradient
            ((B, N) by plain operations, slower). A query that sees no key has loss 0.
        temperature: above 0, a number or a tensor of one number, which has its gradient.
        symmetric: the mean of this loss and that of keys over queries, for two views or CLIP; positives are then on the
            diagonal, or booleans. The second loss uses weights of pairs, but neither the negatives nor weights of single
            keys.
        documents: boundaries of packed queries and keys. Each query is contrasted with the keys of its own document. The
            result has one loss per document, (documents,), equal to one call per document. `positive` counts keys within
            the document. It excludes `negatives`, booleans for `positive` and weights of pairs, which belong to no document.
        return_log_partition: return `ContrastResult(loss, log_partition)`; both have their gradients.

    Both directions of a symmetric loss share their tiles of scores, which are computed in the forward and again in the
    backward pass; no memory in queries × keys. Differentiable any number of times, forwards too, under `torch.func` and
    `torch.compile`; beyond first derivatives, and in compiled transforms, by plain operations in blocks of queries.
    Results are float64 for float64 and float32 for every other dtype. Without a query the mean is NaN.

    Raises:
        TypeError: not a tensor, not floating-point or not integers, dtypes that differ, an option of another type.
        ValueError: shapes or devices that do not fit (both are named), `symmetric` with numbers of positives, a temperature
            that is not above 0, a positive out of range. Values of tensors are checked on the CPU alone; elsewhere such a
            positive gives NaN.

    Example:
        >>> import torch
        >>> from massieu import ops
        >>> loss = ops.info_nce(torch.eye(2), torch.eye(2), temperature=1 / torch.tensor(3.0).log())
        >>> round(float((-loss).exp()), 3)  # the positive's weight is 3 of 3 + 1
        0.75
    """
    count = check_arguments(query, key, negatives, symmetric, return_log_partition)
    if documents is not None:
        if negatives is not None:
            raise ValueError("negatives belong to no document, got both: add the negatives to each document's keys")
        if isinstance(positive, Tensor) and positive.dtype == torch.bool:
            raise ValueError("positive= of booleans does not go with documents: call info_nce once per document")
        options = {"temperature": temperature, "symmetric": symmetric}
        return _per_document(documents, query, key, positive, log_weight, return_log_partition, options)
    if isinstance(positive, Tensor) and positive.dtype == torch.bool:
        return _of_several_positives(
            query, key, positive, negatives, log_weight, temperature, symmetric, return_log_partition
        )
    target = targets(query, key, positive, symmetric)
    if positive is not None and values_are_known(target):
        check_places("positive", target, len(key))
    fields = weights(log_weight, query, count)
    dtype = working_dtype(query)
    with without_autocast(query.device):
        keys = key if negatives is None else torch.cat([key, negatives])
        row = query.to(dtype) / one_number("temperature", temperature, dtype, above=0, query=query)
        directions = log_partitions(ScorePlan(row, keys, target=target, both=symmetric, **fields))
        loss = torch.stack([direction.seen_excess().mean() for direction in directions]).mean()
    if return_log_partition:
        return contrast_result(loss, [direction.log_partition for direction in directions])
    return loss


def _of_several_positives(
    query: Tensor,
    key: Tensor,
    positive: Bool[Tensor, "B K"],
    negatives: Tensor | None,
    log_weight: LogWeight,
    temperature: float | Tensor,
    symmetric: bool,
    return_log_partition: bool,
) -> Tensor | ContrastResult:
    """`info_nce` where a mask says which keys are positives of which queries."""
    check_shape("positive", positive, (len(query), len(key)))
    check_one_device(query=query, positive=positive)
    keys = key if negatives is None else torch.cat([key, negatives])
    fields = seen_pairs(weights(log_weight, query, len(keys)), positive)
    is_unread = unread_queries(query, positive, symmetric, return_log_partition)
    query = query.masked_fill(is_unread.unsqueeze(1), 0.0)
    keys = keys.masked_fill(unread_keys(keys, positive, is_unread, symmetric, fields).unsqueeze(1), 0.0)
    key = keys[: len(key)]
    dtype = working_dtype(query)
    with without_autocast(query.device):
        row = query.to(dtype) / one_number("temperature", temperature, dtype, above=0, query=query)
        level = log_partition_of_rows(ScorePlan(row, keys, target=_no_target(row), **fields))
        levels = [level.masked_fill(is_unread, torch.nan)]
        losses = [_mean_excess(level, row, key, positive)]
        if symmetric:
            column = key.to(dtype)
            pairs = pairs_of_keys(fields, len(key))
            plan = ScorePlan(column, row, None, target=_no_target(column), log_weight=pairs)
            levels.append(log_partition_of_rows(plan))
            losses.append(_mean_excess(levels[1], column, row, positive.mT))
        loss = torch.stack(losses).mean()
    if return_log_partition and len(levels) == 2 and len(query) != len(key):
        raise ValueError(
            "the log-partitions of both directions need as many queries as keys to be one tensor, "
            f"got {len(query)} and {len(key)}"
        )
    return contrast_result(loss, levels) if return_log_partition else loss


def seen_pairs(fields: dict[str, Any], positive: Bool[Tensor, "B K"]) -> dict[str, Any]:
    """The fields of a `ScorePlan` in which positives that a `FalseNegatives` would hide are seen.

    The tiles know of one positive a query; a mask of pairs is as large as that of the positives.
    """
    if "row_ids" not in fields:
        return fields
    keep = fields["row_ids"].unsqueeze(1) != fields["column_ids"]
    count = positive.shape[1]
    return {"bias": None, "log_weight": torch.cat([keep[:, :count] | positive, keep[:, count:]], 1)}


def pairs_of_keys(fields: dict[str, Any], count: int) -> Tensor | None:
    """The log-weights of pairs of a key and a query, for the direction of keys over queries."""
    log_weight = fields.get("log_weight")
    return None if log_weight is None else log_weight[:, :count].mT


def unread_queries(
    query: Float[Tensor, "B D"], positive: Bool[Tensor, "B K"], symmetric: bool, is_returned: bool
) -> Bool[Tensor, "B"]:
    """Queries that are not counted and enter no result, or only as NaN: zeros in their place change nothing but derivatives,
    where 0·NaN would be NaN.

    Args:
        symmetric: Queries are the keys' columns too, and all of them are read.
        is_returned: The log-partitions of all queries are results: then only queries that are not finite are left out.
    """
    is_unread = ~positive.any(1)
    if symmetric:
        return torch.zeros_like(is_unread)
    return is_unread & ~query.detach().isfinite().all(1) if is_returned else is_unread


def unread_keys(
    keys: Float[Tensor, "N D"],
    positive: Bool[Tensor, "B K"],
    is_unread: Bool[Tensor, "B"],
    symmetric: bool,
    fields: dict[str, Any],
) -> Bool[Tensor, "N"]:
    """Keys that no query that is read sees, and that are no positive. `positive` and `is_unread` are of all queries."""
    count = positive.shape[1]
    is_read = torch.nn.functional.pad(positive.any(0), (0, len(keys) - count))
    pairs = fields.get("log_weight")
    if pairs is not None:
        seen = pairs if pairs.dtype == torch.bool else pairs.detach() > -torch.inf
        return ~(is_read | (seen & ~is_unread.unsqueeze(1)).any(0))
    bias = fields["bias"]
    if bias is None or symmetric:
        # Weights of single keys do not act on the keys' own loss.
        return torch.zeros_like(is_read)
    return ~(is_read | (bias.detach() > -torch.inf))


def _no_target(row: Tensor) -> Tensor:
    """Targets of a plan whose log-partitions alone are read."""
    return torch.zeros(len(row), dtype=torch.long, device=row.device)


def log_partition_of_rows(plan: ScorePlan) -> Tensor:
    """log Z of each row over the columns."""
    return log_partitions(plan)[0].log_partition


def _mean_excess(
    log_partition: Float[Tensor, "B"],
    row: Float[Tensor, "B D"],
    key: Float[Tensor, "K D"],
    positive: Bool[Tensor, "B K"],
) -> Float[Tensor, ""]:
    """Mean of log Z less the mean score of the positives, over rows that have some; 0 for a row that sees no key."""
    score = positive_scores(row, key, positive, positive.sum(1))
    has_positive = positive.any(1)
    return excess_sum(log_partition, score, has_positive) / has_positive.sum()


def excess_sum(
    log_partition: Float[Tensor, "B"], score: Float[Tensor, "B"], has_positive: Bool[Tensor, "B"]
) -> Float[Tensor, ""]:
    """Sum of log Z less the score over rows that have a positive; 0 for a row that sees no key."""
    is_counted = has_positive & (log_partition.detach() != -torch.inf)
    # A difference that is not counted is taken of zeros: the derivative of NaN would be NaN.
    return (log_partition.where(is_counted, 0.0) - score.where(is_counted, 0.0)).sum()


def positive_scores(
    row: Float[Tensor, "B D"], key: Float[Tensor, "K D"], positive: Bool[Tensor, "B K"], count: Int[Tensor, "B"]
) -> Float[Tensor, "B"]:
    """Sum of each row's scores over its positives, divided by a count of them."""
    rows_at_once = max(1, POSITIVE_PAIRS // max(1, len(key)))
    scores = [
        recomputed(_mean_positive_score, row[rows], key, positive[rows], count[rows])[0]
        for rows in slices(len(row), rows_at_once)
    ]
    return torch.cat(scores) if scores else row.sum(1)


def _mean_positive_score(row: Tensor, key: Tensor, positive: Tensor, count: Tensor) -> tuple[Tensor]:
    """Sum of row·key over the positives, divided by a count of them; 0 where there is none."""
    share = positive.to(row.dtype) / count.clamp_min(1).unsqueeze(1)
    return ((row * (share @ key.to(row.dtype))).sum(-1),)


def _per_document(
    documents: Documents,
    query: Tensor,
    key: Tensor,
    positive: Tensor | None,
    log_weight: LogWeight,
    return_log_partition: bool,
    options: dict[str, Any],
) -> Tensor | ContrastResult:
    """`info_nce` of each document."""
    check_documents(documents, len(query), len(key))
    lengths = list(documents.lengths)
    key_lengths = list(documents.key_lengths)
    document_targets: Sequence[Tensor | None] = [None] * len(documents)
    if positive is not None:
        document_targets = index_tensor("positive", positive, (len(query),), query=query).split(lengths)
    document_weights: Sequence[LogWeight] = [None] * len(documents)
    if isinstance(log_weight, FalseNegatives):
        query_ids = index_tensor("query_ids", log_weight.query_ids, (len(query),), query=query)
        key_ids = query_ids if log_weight.key_ids is None else log_weight.key_ids
        key_ids = index_tensor("key_ids", key_ids, (len(key),), query=query)
        pairs_of_ids = zip(query_ids.split(lengths), key_ids.split(key_lengths), strict=True)
        document_weights = [FalseNegatives(*ids) for ids in pairs_of_ids]
    elif log_weight is not None:
        if tuple(floating("log_weight", log_weight, or_boolean=True).shape) != (len(key),):
            raise ValueError(f"log_weight must have shape {(len(key),)} with documents, got {tuple(log_weight.shape)}")
        document_weights = log_weight.split(key_lengths)
    results = [
        info_nce(document_query, document_key, positive=target, log_weight=weight, return_log_partition=True, **options)
        for document_query, document_key, target, weight in zip(
            query.split(lengths), key.split(key_lengths), document_targets, document_weights, strict=True
        )
    ]
    loss = torch.stack([result.loss for result in results])
    if return_log_partition:
        return ContrastResult(loss, torch.cat([result.log_partition for result in results], -1))
    return loss


def contrast_result(loss: Tensor, log_partitions: list[Tensor]) -> ContrastResult:
    """The result with the log-partitions of one direction, or stacked of both."""
    if len(log_partitions) > 1:
        return ContrastResult(loss, torch.stack(log_partitions))
    return ContrastResult(loss, log_partitions[0])


def n_pairs(
    query: Float[Tensor, "B D"],
    key: Float[Tensor, "B D"],
    *,
    log_weight: LogWeight = None,
    documents: Documents | None = None,
    norm_weight: float = 0.0,
) -> Tensor:
    """The N-pair loss: mean log(1 + Σ_{j≠i} exp(q_i·k_j − q_i·k_i)), in nats: `info_nce` of plain dot products.

    Args:
        query, key, log_weight, documents: as in `info_nce`, positives on the diagonal.
        norm_weight: adds norm_weight·mean(‖q‖² + ‖k‖²), the published regulariser (Sohn 2016, §3.2.2). Nothing else bounds
            the norms.

    Raises:
        TypeError, ValueError: as `info_nce`.

    Example:
        >>> import torch
        >>> from massieu import ops
        >>> round(float(ops.n_pairs(torch.zeros(4, 2), torch.zeros(4, 2)).exp()), 3)  # four keys alike
        4.0
    """
    number("norm_weight", norm_weight, least=0)
    loss = info_nce(query, key, log_weight=log_weight, temperature=1.0, documents=documents)
    if not norm_weight:
        return loss
    norms = query.to(loss.dtype).square().sum(-1) + key.to(loss.dtype).square().sum(-1)
    if documents is None:
        return loss + float(norm_weight) * norms.mean()
    counts = torch.tensor(documents.lengths, device=norms.device)
    return loss + float(norm_weight) * documents.sums(norms) / counts


@overload
def nca(embedding: Tensor, labels: Tensor, *, return_log_partition: Literal[False] = False) -> Tensor: ...


@overload
def nca(embedding: Tensor, labels: Tensor, *, return_log_partition: Literal[True]) -> ContrastResult: ...


def nca(
    embedding: Float[Tensor, "N D"], labels: Int[Tensor, "N"], *, return_log_partition: bool = False
) -> Tensor | ContrastResult:
    """The loss of neighbourhood components analysis: mean of −log Σ_{j of i's label} p_ij, p_ij ∝ exp(−‖x_i − x_j‖²), j ≠ i.

    With x = A·features, whose A is learned (Goldberger et al. 2004, the objective of log-probabilities). The squared
    distances are attention with scores 2·x_i·x_j, intrinsic log-weights −‖x_j‖² and the own index left out (S23, S24), so
    the loss is a difference of two log-partitions: all others, less those of the same label.

    Args:
        embedding: (N, D), x.
        labels: (N,) integers. A point whose label no other point has is left out of the mean, which is NaN if all are.
        return_log_partition: return `ContrastResult(loss, log_partition)` with log Σ_{j≠i} exp(−‖x_i − x_j‖²), (N,), in nats:
            up to a constant the leave-one-out Gaussian log-density; −inf for a single point.

    Computed about the mean of the embeddings, as no distance depends on it; memory, precision and derivatives are those
    of `info_nce`.

    Raises:
        TypeError: not a tensor, not floating-point, labels that are not integers.
        ValueError: shapes or devices that do not fit (both are named).

    Example:
        >>> import torch
        >>> from massieu import ops
        >>> round(float(ops.nca(torch.zeros(4, 1), torch.tensor([0, 0, 1, 1])).exp()), 3)  # one of three alike
        3.0
    """
    floating("embedding", embedding)
    if embedding.ndim != 2 or embedding.shape[1] == 0:
        raise ValueError(f"embedding must have shape (N, D) with D at least 1, got {tuple(embedding.shape)}")
    labels = index_tensor("labels", labels, (len(embedding),), embedding=embedding)
    flag("return_log_partition", return_log_partition)
    dtype = working_dtype(embedding)
    with without_autocast(embedding.device):
        point = embedding.to(dtype)
        # Distances do not depend on the origin: about the mean the norms are small, and no derivative goes through it.
        point = point - point.mean(0).detach()
        norm = point.square().sum(-1)
        # −‖x_i − x_j‖² = 2·x_i·x_j − ‖x_j‖² − ‖x_i‖², and −‖x_i‖² cancels in the loss.
        plan = ScorePlan(2 * point, point, -norm, torch.zeros_like(labels), rule="no self")
        peers_plan = plan._replace(row_ids=labels, column_ids=labels, rule="peers")
        over_all = log_partitions(plan)[0].log_partition
        over_peers = log_partitions(peers_plan)[0].log_partition
        has_peer = over_peers.detach() != -torch.inf
        loss = (over_all - over_peers.where(has_peer, 0.0)).where(has_peer, 0.0).sum() / has_peer.sum()
    if return_log_partition:
        return ContrastResult(loss, over_all - norm)
    return loss


def check_arguments(
    query: Tensor, key: Tensor, negatives: Tensor | None, symmetric: bool, return_log_partition: bool
) -> int:
    """Check the arguments of `info_nce` but the positives and weights; the number of keys, negatives included."""
    tensors = {"query": query, "key": key}
    if negatives is not None:
        tensors["negatives"] = negatives
    check_alike(**tensors)
    q = tuple(query.shape)
    k = tuple(key.shape)
    if len(q) != 2 or len(k) != 2 or q[1] != k[1] or q[1] == 0:
        raise ValueError(f"query and key must have shapes (B, D) and (K, D) with one D of at least 1, got {q} and {k}")
    if negatives is not None and (negatives.ndim != 2 or negatives.shape[1] != q[1]):
        raise ValueError(f"negatives must have shape (M, {q[1]}) for query {q}, got {tuple(negatives.shape)}")
    flag("symmetric", symmetric)
    flag("return_log_partition", return_log_partition)
    return len(key) if negatives is None else len(key) + len(negatives)


def targets(query: Tensor, key: Tensor, positive: Tensor | None, symmetric: bool) -> Tensor:
    """The number of each query's positive key, (B,)."""
    if positive is None:
        if len(query) != len(key):
            raise ValueError(
                "query and key must have equal length unless positive= gives each query's key, "
                f"got {len(query)} and {len(key)}"
            )
        return torch.arange(len(query), device=query.device)
    if symmetric:
        raise ValueError(
            "a symmetric loss has its positives on the diagonal, or a mask of them: give key[positive] for key, not numbers"
        )
    return index_tensor("positive", positive, (len(query),), query=query)


def weights(log_weight: LogWeight, query: Tensor, count: int, rows: int | None = None) -> dict[str, Any]:
    """The fields of a `ScorePlan` for a log-weight: `bias` for single keys; `log_weight`, or ids and `rule`, for pairs.

    Args:
        count: number of keys, negatives included.
        rows: number of queries in log-weights of pairs; by default that of `query`.
    """
    if log_weight is None:
        return {"bias": None}
    if isinstance(log_weight, FalseNegatives):
        query_ids = index_tensor("query_ids", log_weight.query_ids, (len(query),), query=query)
        key_ids = log_weight.query_ids if log_weight.key_ids is None else log_weight.key_ids
        key_ids = index_tensor("key_ids (negatives included)", key_ids, (count,), query=query)
        return {"bias": None, "row_ids": query_ids, "column_ids": key_ids, "rule": "no equals"}
    if not isinstance(log_weight, Tensor):
        raise TypeError(f"log_weight must be a tensor or FalseNegatives, got {described(log_weight)}")
    floating("log_weight", log_weight, or_boolean=True)
    check_one_device(query=query, log_weight=log_weight)
    shape = tuple(log_weight.shape)
    if rows is None:
        rows = len(query)
    if shape == (rows, count):
        return {"bias": None, "log_weight": log_weight}
    if shape != (count,):
        raise ValueError(f"log_weight must have shape {(count,)} or {(rows, count)}, got {shape}")
    if log_weight.dtype == torch.bool:
        log_weight = torch.zeros_like(log_weight, dtype=query.dtype).masked_fill(~log_weight, -torch.inf)
    return {"bias": log_weight}
