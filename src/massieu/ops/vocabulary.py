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
from massieu.foundation.short_repr import fields_html, fields_repr
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

    __repr__ = fields_repr
    _repr_html_ = fields_html


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
            equal to one call per document. A document without tokens that count has sum 0 and mean NaN.
        softcap: c above 0: the logits are c·tanh((hidden·weight_v + bias_v)/c), as in Gemma 2.
        ignore_index: tokens with this target have loss 0 and no gradient, and count in no mean.
        label_smoothing: share in [0, 1] of the target that is divided equally over all words, as in F.cross_entropy.
        z_loss: adds z_loss·(log Z)² for each token that counts, which keeps log Z near 0. It is multiplied by the factor of
            the token's target word, so that a word of factor 2 counts as two tokens in either part. Liger's kernel does not
            weight this part: for its number add ``z_loss * log_partition.square().mean()`` of the tokens that count to a
            weighted loss without it.
        reduction: "none", "sum", or "mean" over the tokens that count. The mean is NaN without such tokens, or if all their
            factors are 0, as in F.cross_entropy.
        return_log_partition: return `CrossEntropyResult(loss, log_partition)`; both have their gradients.

    Differentiable any number of times in hidden, weight, bias, class weights and probability targets, forwards too, under
    `torch.func` and `torch.compile`. Plain operations in blocks of tokens compute the derivatives in class weights and
    probability targets, all beyond the first, and compiled transforms. Results are float64 for float64 and float32 for
    every other dtype. Half-precision inputs are promoted a tile at a time, and gradients of the weight are summed in float32
    before they are rounded once.

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
    lead = hidden.shape[:-1]
    count = len(weight)
    dtype = working_dtype(hidden)
    word_factors = None if class_weight is None else checked_factor(class_weight, hidden, count)
    probabilities = None
    if isinstance(target, Tensor) and target.is_floating_point():
        probabilities = check_probabilities(hidden, target, count, ignore_index).reshape(-1, count)
        # A plan needs targets that are words; their excess is not used.
        words = torch.zeros(lead, dtype=torch.int64, device=hidden.device).reshape(-1)
    else:
        words = index_tensor("target", target, lead, hidden=hidden).reshape(-1)
    with without_autocast(hidden.device):
        rows = hidden.reshape(-1, hidden.shape[-1])
        counts = words != ignore_index if probabilities is None else torch.ones_like(words, dtype=torch.bool)
        counted = None
        if probabilities is None and values_are_known(words):
            check_places("target", words[counts], count, f" or be ignore_index, {ignore_index}")
            if not return_log_partition and not bool(counts.all()):
                # Tokens that are ignored are not computed.
                counted = counts.nonzero().squeeze(1)
                rows = rows[counted]
                words = words[counted]
                counts = counts[counted]
        words = words.where(counts, 0)
        terms = None
        if probabilities is not None or label_smoothing:
            # The soft target of word v: its factor times ((1 − ε)·probability_v + ε/V), for the smoothing ε.
            factors = weight.new_ones(count, dtype=dtype) if word_factors is None else word_factors
            terms = torch.stack([(1 - label_smoothing) * factors, label_smoothing / count * factors])
        plan = ScorePlan(
            row=rows_for_product(rows, weight),
            column=weight,
            bias=bias,
            target=words,
            share=probabilities,
            terms=terms,
            bias_in_score=True,
            softcap=softcap,
        )
        excess, log_z, *soft_results = compute(plan, probabilities, class_weight)
        soft_loss = soft_results[0] if soft_results else None
        token_factors = None
        if probabilities is not None:
            # The soft target is all of the target.
            excess = torch.zeros_like(excess)
        elif word_factors is not None:
            token_factors = word_factors[words]
        loss = token_losses(Direction(excess, log_z), soft_loss, counts, token_factors, label_smoothing, z_loss)

        def of_all_tokens(numbers: Tensor) -> Tensor:
            """Numbers of the computed tokens in the caller's shape, with 0 for the others."""
            if counted is not None:
                numbers = numbers.new_zeros(lead.numel()).index_copy(0, counted, numbers)
            return numbers.reshape(lead)

        def summed(numbers: Tensor) -> Tensor:
            return numbers.sum() if documents is None else documents.sums(of_all_tokens(numbers))

        if reduction == "none":
            loss = of_all_tokens(loss)
        elif reduction == "sum":
            loss = summed(loss)
        else:
            token_weights = counts.to(dtype) if token_factors is None else token_factors.where(counts, 0.0)
            total = summed(token_weights)
            # With smoothing a token whose word has factor 0 has a loss: divided by a total of 0 it would be infinite.
            loss = summed(loss) / total.where(total != 0, torch.nan)
    return CrossEntropyResult(loss, log_z.reshape(lead)) if return_log_partition else loss


def token_losses(
    direction: Direction,
    soft_loss: Tensor | None,
    counts: Tensor,
    factor: Tensor | None,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """The loss of each token, 0 for those that do not count.

    Args:
        direction: log Z, and its excess over the score of the token's word.
        soft_loss: the loss of the soft target, its factors included.
        counts: whether a token counts.
        factor: of the token's word, for the rest of the loss.
    """
    loss, log_z = direction
    if label_smoothing:
        loss = (1 - label_smoothing) * loss
    if z_loss:
        loss = loss + float(z_loss) * log_z.square()
    if factor is not None:
        loss = factor * loss
    if soft_loss is not None:
        loss = loss + soft_loss
    return loss.masked_fill(~counts, 0.0)


def check_heads(hidden: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = "") -> None:
    """Check that hidden states, weight and bias of a head fit each other.

    Args:
        prefix: of their names in errors.

    Raises:
        TypeError: not a floating-point tensor; dtypes that differ, outside autocast.
        ValueError: shapes or devices that do not fit.
    """
    mixed = isinstance(hidden, Tensor) and autocasts(hidden.device.type)
    tensors = {f"{prefix}hidden": hidden, f"{prefix}weight": weight}
    if bias is not None:
        tensors[f"{prefix}bias"] = bias
    check_alike(mixed, **tensors)
    h = tuple(hidden.shape)
    w = tuple(weight.shape)
    if len(w) != 2 or 0 in w:
        raise ValueError(f"{prefix}weight must have shape (V, D) with at least one word and one dimension, got {w}")
    if len(h) < 1 or h[-1] != w[1]:
        raise ValueError(f"{prefix}hidden must have shape (*lead, {w[1]}) for {prefix}weight {w}, got {h}")
    if bias is not None:
        check_shape(f"{prefix}bias", bias, w[:1])


def check_shapes(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
    """Check a head, and targets that are words; the targets as 64-bit integers."""
    check_heads(hidden, weight, bias)
    return index_tensor("target", target, hidden.shape[:-1], hidden=hidden)


def check_probabilities(hidden: Tensor, target: Tensor, count: int, ignore_index: int) -> Tensor:
    """Check targets that have a probability for each word, (*lead, count)."""
    full_shape = (*hidden.shape[:-1], count)
    shape = tuple(floating("target", target).shape)
    if shape != full_shape:
        raise ValueError(f"a floating-point target must have shape {full_shape}, a share of each word, got {shape}")
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
    """Check that documents end where the row of tokens does, and that there is a reduction."""
    if documents is None:
        return
    if not isinstance(documents, Documents):
        raise TypeError(f"documents must be a Documents, got {described(documents)}")
    if reduction == "none":
        raise ValueError("documents need a sum or a mean as reduction; leave them out with reduction='none'")
    last = documents.query_boundaries[-1]
    lead = tuple(hidden.shape[:-1])
    if lead[-1:] != (last,):
        raise ValueError(
            f"documents must end where the row of tokens does, got {last} for hidden of leading shape {lead}"
        )


def checked_softcap(softcap: float | None, hidden: Tensor) -> float | None:
    """A soft cap as a float, above 0 and within the range of the results' dtype."""
    if softcap is None:
        return None
    check_fits("softcap", number("softcap", softcap, above=0), working_dtype(hidden))
    return float(softcap)


def check_options(
    ignore_index: int, label_smoothing: float, z_loss: float, reduction: str, return_log_partition: bool
) -> None:
    """Check the options of `linear_cross_entropy`."""
    whole_number("ignore_index", ignore_index, least=-(1 << 63))
    number("label_smoothing", label_smoothing, least=0, most=1)
    number("z_loss", z_loss, least=0)
    choice("reduction", reduction, "none", "sum", "mean")
    flag("return_log_partition", return_log_partition)
