"""The language-model head as log Z − score: cross-entropy over a vocabulary without its matrix of logits."""

from typing import Literal, NamedTuple, TypedDict, Unpack, overload

from jaxtyping import Float, Int
from torch import Tensor

from massieu.foundation.arguments import check_shape, choice, flag, number, whole_number
from massieu.foundation.transforms import autocasts, without_autocast
from massieu.ops.linear_scores import Direction, check_places, index_tensor, log_partitions, values_are_known
from massieu.ops.score_tiles import ScorePlan
from massieu.ops.shapes import check_alike, working_dtype


class CrossEntropyResult(NamedTuple):
    """What `linear_cross_entropy(..., return_log_partition=True)` returns."""

    loss: Float[Tensor, "..."]
    """In nats."""
    log_partition: Float[Tensor, "*lead"]
    """log Z of every token, the ignored ones too, in nats."""


class _Options(TypedDict, total=False):
    bias: Tensor | None
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
    target: Int[Tensor, "*lead"],
    *,
    bias: Float[Tensor, "V"] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["none", "sum", "mean"] = "mean",
    return_log_partition: bool = False,
) -> Tensor | CrossEntropyResult:
    """Cross-entropy of ``hidden @ weight.T + bias`` with the target words, in nats, without keeping the logits.

    For each token log Z − score of its word, log Z = log Σ_v exp(hidden·weight_v + bias_v): the Fenchel–Young loss of the
    log-partition (S23). It equals ``F.cross_entropy(hidden @ weight.T + bias, target, …)`` to rounding, with its ignored
    tokens, label smoothing and reductions. Tiles of logits are computed in the forward pass and again in the backward
    pass: four matrix products where F.cross_entropy takes three, and no memory in tokens × words.

    Args:
        hidden: (*lead, D), any number of leading dimensions, none included.
        weight, bias: of the hidden's dtype and device; under autocast dtypes may differ. A bias of −inf hides a word.
        target: the hidden's leading shape, integers in 0 … V − 1, or `ignore_index`.
        ignore_index: tokens with this target have loss 0 and no gradient, and count in no mean.
        label_smoothing: share in [0, 1] of the target spread over all words, as in F.cross_entropy.
        z_loss: adds z_loss·(log Z)² for each token that counts, which keeps log Z near 0.
        reduction: "none", "sum", or "mean" over the tokens that count; without any, NaN, as in F.cross_entropy.
        return_log_partition: return `CrossEntropyResult(loss, log_partition)`; both have their gradients.

    Differentiable any number of times in hidden, weight and bias, forwards too, under `torch.func` and `torch.compile`;
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
    words = check_shapes(hidden, weight, target, bias).reshape(-1)
    check_options(ignore_index, label_smoothing, z_loss, reduction, return_log_partition)
    with without_autocast(hidden.device):
        rows = hidden.reshape(-1, hidden.shape[-1])
        counted = words != ignore_index
        chosen = None
        if values_are_known(target):
            check_places("target", words[counted], len(weight), f" or be ignore_index, {ignore_index}")
            if not return_log_partition and not bool(counted.all()):
                chosen = counted.nonzero().squeeze(1)
                rows, words, counted = rows[chosen], words[chosen], counted[chosen]
        rows, words = rows.to(working_dtype(hidden)), words.where(counted, 0)
        # Before log Z: its gradient is then added last, in place, to the weight's.
        average = _mean_score(rows, weight, bias) if label_smoothing else None
        (found,) = log_partitions(ScorePlan(rows, weight, bias, words, bias_in_score=True))
        loss, level = token_losses(found, average, counted, label_smoothing, z_loss), found.log_partition
        if reduction == "mean":
            loss = loss.sum() / counted.sum()
        elif reduction == "sum":
            loss = loss.sum()
        else:
            if chosen is not None:
                loss = loss.new_zeros(target.numel()).index_copy(0, chosen, loss)
            loss = loss.reshape(target.shape)
    return CrossEntropyResult(loss, level.reshape(target.shape)) if return_log_partition else loss


def token_losses(
    found: Direction, mean_score: Tensor | None, counted: Tensor, label_smoothing: float, z_loss: float
) -> Tensor:
    """The loss of each token, 0 for those that do not count; with the mean score of all words where labels are smoothed."""
    loss, level = found
    if mean_score is not None:
        loss = (1 - label_smoothing) * loss + label_smoothing * (level - mean_score)
    if z_loss:
        loss = loss + float(z_loss) * level.square()
    return loss.masked_fill(~counted, 0.0)


def _mean_score(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The average score of all words, for each token."""
    # The gradient of a sum is its cotangent, repeated without memory; that of a mean would be written out.
    mean = rows @ (weight.sum(0, dtype=rows.dtype) / len(weight))
    return mean if bias is None else mean + bias.mean(dtype=rows.dtype)


def check_shapes(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
    """The targets as 64-bit integers."""
    mixed = isinstance(hidden, Tensor) and autocasts(hidden.device.type)
    check_alike(mixed, hidden=hidden, weight=weight, **({} if bias is None else {"bias": bias}))
    h, w = tuple(hidden.shape), tuple(weight.shape)
    if len(w) != 2 or 0 in w:
        raise ValueError(f"weight must have shape (V, D) with at least one word and one dimension, got {w}")
    if len(h) < 1 or h[-1] != w[1]:
        raise ValueError(f"hidden must have shape (*lead, {w[1]}) for weight {w}, got {h}")
    if bias is not None:
        check_shape("bias", bias, w[:1])
    return index_tensor("target", target, h[:-1], hidden=hidden)


def check_options(
    ignore_index: int, label_smoothing: float, z_loss: float, reduction: str, return_log_partition: bool
) -> None:
    whole_number("ignore_index", ignore_index, least=-(1 << 63))
    number("label_smoothing", label_smoothing, least=0, most=1)
    number("z_loss", z_loss, least=0)
    choice("reduction", reduction, "none", "sum", "mean")
    flag("return_log_partition", return_log_partition)
