"""Contrastive and metric losses as Fenchel–Young losses of the log-partition, without the matrix of scores."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from massieu.foundation.arguments import check_one_device, described, flag, floating, integers, number
from massieu.foundation.doors import door
from massieu.foundation.transforms import without_autocast
from massieu.ops.documents import Documents, check_documents
from massieu.ops.linear_scores import check_places, index_tensor, log_partitions, one_number, values_are_known
from massieu.ops.score_tiles import ScorePlan
from massieu.ops.shapes import check_alike, working_dtype


class ContrastResult(NamedTuple):
    """What the losses of this file return with `return_log_partition=True`."""

    loss: Float[Tensor, ""]
    """Mean over the queries, in nats; one a document, where there are documents."""
    log_partition: Float[Tensor, "..."]
    """log Z of each query, (B,), in nats; for a symmetric loss (2, B), of queries over keys and of keys over queries."""


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
    positive: Int[Tensor, "B"] | None = None,
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
        query, key: (B, D) and (K, D), of one dtype and device. Query i's positive is key i, and K = B, unless
        positive: (B,) integers says which key is.
        negatives: (M, D), more keys that are nobody's positive; there are N = K + M in all.
        log_weight: log w, below +inf, or booleans of which True keeps a key: (N,), one a key, or (B, N), one a query and
            key; or `FalseNegatives`, which hides keys of equal ids. It acts in A alone, so a hidden positive is left
            out of A but still attracts, and −log p₊ is the loss plus A*(k₊) = −log w₊. A float tensor has a gradient
            ((B, N) by plain operations, slower). A query that sees no key has loss 0.
        temperature: above 0, a number or a tensor of one number, which has its gradient.
        symmetric: the mean of this loss and that of keys over queries, for two views or CLIP; positives are then on the
            diagonal. The negatives and the weights of single keys have no part in the second; pairs' weights have.
        documents: boundaries of packed queries and keys: a query is contrasted with the keys of its own document, and there
            is one loss a document, (documents,), equal to one call a document. `positive` numbers keys in the document.
            Not with `negatives` or weights of pairs, which belong to no document.
        return_log_partition: return `ContrastResult(loss, log_partition)`; both have their gradients.

    Both directions of a symmetric loss share their tiles of scores, which are computed in the forward and again in the
    backward pass; no memory in queries × keys. Differentiable any number of times, forwards too, under `torch.func` and
    `torch.compile`; beyond first derivatives, and in compiled transforms, by plain operations in blocks of queries.
    Results are float64 for float64 and float32 for every other dtype. Without a query the mean is NaN.

    Raises:
        TypeError: not a tensor, not floating-point or not integers, dtypes that differ, an option of another type.
        ValueError: shapes or devices that do not fit (both are named), a temperature that is not above 0 (a tensor is
            looked at on the CPU alone), `symmetric` with `positive`; on the CPU a positive out of range (elsewhere NaN).

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
            raise ValueError(
                "documents do not go with negatives, which belong to no document: add them to each one's keys"
            )
        options = {"temperature": temperature, "symmetric": symmetric}
        return _of_each(documents, query, key, positive, log_weight, return_log_partition, options)
    target = targets(query, key, positive, symmetric)
    if positive is not None and values_are_known(target):
        check_places("positive", target, len(key))
    fields = weights(log_weight, query, count)
    dtype = working_dtype(query)
    with without_autocast(query.device):
        keys = key if negatives is None else torch.cat([key, negatives])
        row = query.to(dtype) / one_number("temperature", temperature, dtype, above=0, query=query)
        found = log_partitions(ScorePlan(row, keys, target=target, both=symmetric, **fields))
        loss = torch.stack([direction.seen_excess().mean() for direction in found]).mean()
    return contrast(loss, [direction.log_partition for direction in found]) if return_log_partition else loss


def _of_each(
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
    lengths, key_lengths = list(documents.lengths), list(documents.key_lengths)
    none: list[Any] = [None] * len(documents)
    targets, weights = none, none
    if positive is not None:
        targets = index_tensor("positive", positive, (len(query),), query=query).split(lengths)
    if isinstance(log_weight, FalseNegatives):
        own, other = log_weight.query_ids, log_weight.key_ids
        own = index_tensor("query_ids", own, (len(query),), query=query)
        other = index_tensor("key_ids", own if other is None else other, (len(key),), query=query)
        weights = [FalseNegatives(*ids) for ids in zip(own.split(lengths), other.split(key_lengths), strict=True)]
    elif log_weight is not None:
        if tuple(floating("log_weight", log_weight, or_boolean=True).shape) != (len(key),):
            raise ValueError(f"log_weight must have shape {(len(key),)} with documents, got {tuple(log_weight.shape)}")
        weights = log_weight.split(key_lengths)
    parts = zip(query.split(lengths), key.split(key_lengths), targets, weights, strict=True)
    found = [
        info_nce(own, others, positive=target, log_weight=weight, return_log_partition=True, **options)
        for own, others, target, weight in parts
    ]
    loss = torch.stack([one.loss for one in found])
    return ContrastResult(loss, torch.cat([one.log_partition for one in found], -1)) if return_log_partition else loss


def contrast(loss: Tensor, levels: list[Tensor]) -> ContrastResult:
    """The result of one direction or of both."""
    return ContrastResult(loss, torch.stack(levels) if len(levels) > 1 else levels[0])


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
        norm_weight: adds norm_weight·mean(‖q‖² + ‖k‖²), the published regulariser (Sohn 2016, §3.2.2), as nothing else
            bounds the norms.

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
        labels: (N,) integers. A point whose label nobody shares counts in no mean; if there is no other, NaN.
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
        # No distance changes with the origin, so no derivative goes through it.
        point = point - point.mean(0).detach()
        norm = point.square().sum(-1)
        plan = ScorePlan(2 * point, point, -norm, torch.zeros_like(labels), rule="no self")
        alike = plan._replace(row_ids=labels, column_ids=labels, rule="peers")
        everyone, peers = (log_partitions(one)[0].log_partition for one in (plan, alike))
        counted = peers.detach() != -torch.inf
        loss = (everyone - peers.where(counted, 0.0)).where(counted, 0.0).sum() / counted.sum()
        return ContrastResult(loss, everyone - norm) if return_log_partition else loss


def check_arguments(
    query: Tensor, key: Tensor, negatives: Tensor | None, symmetric: bool, return_log_partition: bool
) -> int:
    """The number of keys, negatives included."""
    check_alike(query=query, key=key, **({} if negatives is None else {"negatives": negatives}))
    q, k = tuple(query.shape), tuple(key.shape)
    if len(q) != 2 or len(k) != 2 or q[1] != k[1] or q[1] == 0:
        raise ValueError(f"query and key must have shapes (B, D) and (K, D) with one D of at least 1, got {q} and {k}")
    if negatives is not None and (negatives.ndim != 2 or negatives.shape[1] != q[1]):
        raise ValueError(f"negatives must have shape (M, {q[1]}) for query {q}, got {tuple(negatives.shape)}")
    flag("symmetric", symmetric)
    flag("return_log_partition", return_log_partition)
    return len(key) + (0 if negatives is None else len(negatives))


def targets(query: Tensor, key: Tensor, positive: Tensor | None, symmetric: bool) -> Tensor:
    """Each query's positive."""
    if positive is None:
        if len(query) != len(key):
            raise ValueError(
                f"query and key must be as many, or positive must say which key is whose: got {len(query)} and {len(key)}"
            )
        return torch.arange(len(query), device=query.device)
    if symmetric:
        raise ValueError("a symmetric loss has its positives on the diagonal: give key[positive] for key, not positive")
    return index_tensor("positive", positive, (len(query),), query=query)


def weights(log_weight: LogWeight, query: Tensor, count: int, rows: int | None = None) -> dict[str, Any]:
    """Log-weights of single keys, and those of pairs: fields of a `ScorePlan`.

    Args:
        count: Of the keys.
        rows: Queries that pairs' log-weights are of; by default those of `query`.
    """
    if log_weight is None:
        return {"bias": None}
    if isinstance(log_weight, FalseNegatives):
        own = index_tensor("query_ids", log_weight.query_ids, (len(query),), query=query)
        others = log_weight.query_ids if log_weight.key_ids is None else log_weight.key_ids
        others = index_tensor("key_ids (negatives included)", others, (count,), query=query)
        return {"bias": None, "row_ids": own, "column_ids": others, "rule": "no equals"}
    if not isinstance(log_weight, Tensor):
        raise TypeError(f"log_weight must be a tensor or FalseNegatives, got {described(log_weight)}")
    floating("log_weight", log_weight, or_boolean=True)
    check_one_device(query=query, log_weight=log_weight)
    shape, rows = tuple(log_weight.shape), len(query) if rows is None else rows
    if shape == (rows, count):
        return {"bias": None, "log_weight": log_weight}
    if shape != (count,):
        raise ValueError(f"log_weight must have shape {(count,)} or {(rows, count)}, got {shape}")
    if log_weight.dtype == torch.bool:
        log_weight = torch.zeros_like(log_weight, dtype=query.dtype).masked_fill(~log_weight, -torch.inf)
    return {"bias": log_weight}
