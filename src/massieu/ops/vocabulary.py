"""The language-model head as log Z − score: cross-entropy over a vocabulary without its matrix of logits."""

from typing import Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.foundation.arguments import (
    check_fits,
    check_one_device,
    check_shape,
    choice,
    described,
    flag,
    floating,
    number,
    whole_number,
)
from massieu.foundation.transforms import autocasts, without_autocast
from massieu.ops.documents import Documents
from massieu.ops.linear_scores import Direction, check_places, compute, index_tensor, values_are_known
from massieu.ops.score_tiles import ScorePlan, rows_for_product
from massieu.ops.shapes import check_alike, working_dtype


class CrossEntropyResult(NamedTuple):
    """What `linear_cross_entropy(..., return_log_partition=True)` returns."""

    loss: Float[Tensor, "..."]
    """In nats."""
    log_partition: Float[Tensor, "*lead"]
    """log Z of every token, the ignored ones too, in nats."""


class _Options(TypedDict, total=False):
    bias: Tensor | None
    class_weight: Tensor | None
    documents: Documents | None
    softcap: float | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    reduction: Literal["none", "sum", "mean"]


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    return_log_partition: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...


@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *, return_log_partition: Literal[True], **options: Unpack[_Options]
) -> CrossEntropyResult: ...


def linear_cross_entropy(
    hidden: Float[Tensor, "*lead D"],
    weight: Float[Tensor, "V D"],
    target: Int[Tensor, "*lead"] | Float[Tensor, "*lead V"],
    *,
    bias: Float[Tensor, "V"] | None = None,
    class_weight: Float[Tensor, "V"] | None = None,
    documents: Documents | None = None,
    softcap: float | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["none", "sum", "mean"] = "mean",
    return_log_partition: bool = False,
) -> Tensor | CrossEntropyResult:
    """Cross-entropy of ``hidden @ weight.T + bias`` with the target words, in nats, without keeping the logits.

    For each token log Z − score of its word, log Z = log Σ_v exp(hidden·weight_v + bias_v): the Fenchel–Young loss of the
    log-partition (S23). It equals ``F.cross_entropy(hidden @ weight.T + bias, target, …)`` to rounding, with its class
    weights, probability targets, ignored tokens, label smoothing and reductions. Tiles of logits are computed in the
    forward pass and again in the backward pass: four matrix products where F.cross_entropy takes three, and no memory in
    tokens × words.

    Args:
        hidden: (*lead, D), any number of leading dimensions, none included.
        weight, bias: of the hidden's dtype and device; under autocast dtypes may differ. A bias of −inf hides a word.
        target: the hidden's leading shape, integers in 0 … V − 1, or `ignore_index`. Or (*lead, V), floating-point, how
            much of each word is wanted: loss −Σ_v target_v·log p_v, to which a word of target 0 adds 0, hidden or not.
        class_weight: factors of the words' −log p_v, as ``weight`` of F.cross_entropy: a mean over target words is divided
            by the sum of their factors, one over probability targets by the number of tokens.
        documents: of a packed row, the hidden's last leading dimension: one sum or mean for each, (*lead[:-1], documents),
            equal to one call a document. A document without tokens that count has sum 0 and mean NaN.
        softcap: c above 0: the logits are c·tanh((hidden·weight_v + bias_v)/c), as in Gemma 2.
        ignore_index: tokens with this target have loss 0 and no gradient, and count in no mean.
        label_smoothing: share in [0, 1] of the target spread over all words, as in F.cross_entropy.
        z_loss: adds z_loss·(log Z)² for each token that counts, times its target word's factor, which keeps log Z near 0. So
            a word of factor 2 counts as two tokens in either part. Liger's kernel does not weight this part: for its
            number add ``z_loss * log_partition.square().mean()`` of the tokens that count to a weighted loss without it.
        reduction: "none", "sum", or "mean" over the tokens that count; NaN without any, or where their factors are all 0, as in
            F.cross_entropy.
        return_log_partition: return `CrossEntropyResult(loss, log_partition)`; both have their gradients.

    Differentiable any number of times in hidden, weight, bias, class weights and probability targets (the latter two by
    plain operations), forwards too, under `torch.func` and `torch.compile`;
    beyond first derivatives, and in compiled transforms, by plain operations in blocks of tokens. Results are float64
    for float64 and float32 for every other dtype; half-precision inputs are promoted a tile at a time, and gradients of
    the weight are summed in float32 before they are rounded once.

    Raises:
        TypeError: not a tensor, not floating-point or not integers, dtypes that differ, an option of another type.
        ValueError: shapes or devices that do not fit (both are named), an option out of range; on the CPU a target out
            of range (elsewhere, compiled, or in a transform such a token's loss is NaN).

    Example:
        >>> import torch
        >>> from massieu import ops
        >>> loss = ops.linear_cross_entropy(torch.zeros(3, 2), torch.randn(5, 2), torch.tensor([0, 4, -100]))
        >>> round(float(loss.exp()), 3)  # five words alike
        5.0
    """
    check_heads(hidden, weight, bias)
    check_options(ignore_index, label_smoothing, z_loss, reduction, return_log_partition)
    softcap = checked_softcap(softcap, hidden)
    check_documents(documents, hidden, reduction)
    lead, count, dtype = hidden.shape[:-1], len(weight), working_dtype(hidden)
    factor = None if class_weight is None else checked_factor(class_weight, hidden, count)
    share = None
    if isinstance(target, Tensor) and target.is_floating_point():
        share = check_probabilities(hidden, target, count, ignore_index).reshape(-1, count)
        words = torch.zeros(lead, dtype=torch.int64, device=hidden.device).reshape(-1)
    else:
        words = index_tensor("target", target, lead, hidden=hidden).reshape(-1)
    with without_autocast(hidden.device):
        rows = hidden.reshape(-1, hidden.shape[-1])
        counted = words != ignore_index if share is None else torch.ones_like(words, dtype=torch.bool)
        chosen = None
        if share is None and values_are_known(words):
            check_places("target", words[counted], count, f" or be ignore_index, {ignore_index}")
            if not return_log_partition and not bool(counted.all()):
                chosen = counted.nonzero().squeeze(1)
                rows, words, counted = rows[chosen], words[chosen], counted[chosen]
        words, terms = words.where(counted, 0), None
        if share is not None or label_smoothing:
            ones = weight.new_ones(count, dtype=dtype) if factor is None else factor
            terms = torch.stack([(1 - label_smoothing) * ones, label_smoothing / count * ones])
        options = {"bias_in_score": True, "softcap": softcap, "share": share, "terms": terms}
        plan = ScorePlan(rows_for_product(rows, weight), weight, bias, words, **options)
        excess, level, *spread = compute(plan, share, class_weight)
        if share is not None:
            excess, factor = torch.zeros_like(excess), None
        of_word = None if factor is None else factor[words]
        direction = Direction(excess, level)
        loss = token_losses(direction, spread[0] if spread else None, counted, of_word, label_smoothing, z_loss)

        def of_all(one: Tensor) -> Tensor:
            one = one if chosen is None else one.new_zeros(lead.numel()).index_copy(0, chosen, one)
            return one.reshape(lead)

        def summed(one: Tensor) -> Tensor:
            return one.sum() if documents is None else documents.sums(of_all(one))

        if reduction == "mean":
            part = counted.to(dtype) if of_word is None else of_word.where(counted, 0.0)
            total = summed(part)
            # Smoothing gives a token loss whose own word has factor 0: over a weight of 0 that would be infinity.
            loss = summed(loss) / total.where(total != 0, torch.nan)
        else:
            loss = of_all(loss) if reduction == "none" else summed(loss)
    return CrossEntropyResult(loss, level.reshape(lead)) if return_log_partition else loss


def token_losses(
    found: Direction,
    spread: Tensor | None,
    counted: Tensor,
    factor: Tensor | None,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """The loss of each token, 0 for those that do not count.

    Args:
        spread: the part of a target that is spread over the words, with its factors.
        factor: of the rest.
    """
    loss, level = found
    if label_smoothing:
        loss = (1 - label_smoothing) * loss
    if z_loss:
        loss = loss + float(z_loss) * level.square()
    if factor is not None:
        loss = factor * loss
    if spread is not None:
        loss = loss + spread
    return loss.masked_fill(~counted, 0.0)


def check_heads(hidden: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = "") -> None:
    """Raise a TypeError or ValueError unless they fit each other; `prefix` begins their names in the error."""
    mixed = isinstance(hidden, Tensor) and autocasts(hidden.device.type)
    named = {f"{prefix}hidden": hidden, f"{prefix}weight": weight, **({} if bias is None else {f"{prefix}bias": bias})}
    check_alike(mixed, **named)
    h, w = tuple(hidden.shape), tuple(weight.shape)
    if len(w) != 2 or 0 in w:
        raise ValueError(f"{prefix}weight must have shape (V, D) with at least one word and one dimension, got {w}")
    if len(h) < 1 or h[-1] != w[1]:
        raise ValueError(f"{prefix}hidden must have shape (*lead, {w[1]}) for {prefix}weight {w}, got {h}")
    if bias is not None:
        check_shape(f"{prefix}bias", bias, w[:1])


def check_shapes(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
    """The targets as 64-bit integers."""
    check_heads(hidden, weight, bias)
    return index_tensor("target", target, hidden.shape[:-1], hidden=hidden)


def check_probabilities(hidden: Tensor, target: Tensor, count: int, ignore_index: int) -> Tensor:
    """Targets that are a number for each word."""
    wanted, shape = (*hidden.shape[:-1], count), tuple(floating("target", target).shape)
    if shape != wanted:
        raise ValueError(f"a floating-point target must have shape {wanted}, a share of each word, got {shape}")
    check_one_device(hidden=hidden, target=target)
    if ignore_index != -100:
        raise ValueError(f"ignore_index is for targets that are words, not shares of words, got {ignore_index}")
    return target


def checked_factor(class_weight: Tensor, hidden: Tensor, count: int) -> Tensor:
    """A factor for each word, in the results' dtype."""
    check_shape("class_weight", floating("class_weight", class_weight), (count,))
    check_one_device(hidden=hidden, class_weight=class_weight)
    return class_weight.to(working_dtype(hidden))


def check_documents(documents: Documents | None, hidden: Tensor, reduction: str) -> None:
    if documents is None:
        return
    if not isinstance(documents, Documents):
        raise TypeError(f"documents must be a Documents, got {described(documents)}")
    if reduction == "none":
        raise ValueError("documents need a sum or a mean as reduction; leave them out with reduction='none'")
    last, lead = documents.query_boundaries[-1], tuple(hidden.shape[:-1])
    if lead[-1:] != (last,):
        raise ValueError(
            f"documents must end where the row of tokens does, got {last} for hidden of leading shape {lead}"
        )


def checked_softcap(softcap: float | None, hidden: Tensor) -> float | None:
    if softcap is None:
        return None
    check_fits("softcap", number("softcap", softcap, above=0), working_dtype(hidden))
    return float(softcap)


def check_options(
    ignore_index: int, label_smoothing: float, z_loss: float, reduction: str, return_log_partition: bool
) -> None:
    whole_number("ignore_index", ignore_index, least=-(1 << 63))
    number("label_smoothing", label_smoothing, least=0, most=1)
    number("z_loss", z_loss, least=0)
    choice("reduction", reduction, "none", "sum", "mean")
    flag("return_log_partition", return_log_partition)
