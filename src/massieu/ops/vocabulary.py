"""The language-model head as log Z − score: cross-entropy over a vocabulary without its matrix of logits."""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.ops.linear_scores import (
    autocasts,
    check_integers,
    check_range,
    check_tensors,
    full_precision,
    log_partitions,
    values_are_known,
)
from massieu.ops.shapes import check_choice, check_flag, told


class CrossEntropyResult(NamedTuple):
    """What `linear_cross_entropy(..., return_log_partition=True)` returns."""

    loss: Float[Tensor, "..."]
    """In nats."""
    log_partition: Float[Tensor, "*lead"]
    """log Z of every token, the ignored ones too, in nats."""


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
    """
    check_shapes(hidden, weight, target, bias)
    check_options(ignore_index, label_smoothing, z_loss, reduction, return_log_partition)
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    with full_precision(hidden):
        rows, words = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1).long()
        counted = words != ignore_index
        chosen = None
        if values_are_known(target):
            check_range("target", words[counted], len(weight), f" or be ignore_index, {ignore_index}")
            if not return_log_partition and not bool(counted.all()):
                chosen = counted.nonzero().squeeze(1)
                rows, words, counted = rows[chosen], words[chosen], counted[chosen]
        rows, words = rows.to(dtype), words.where(counted, 0)
        # Before log Z: its gradient is then added last, in place, to the weight's.
        average = _mean_score(rows, weight, bias) if label_smoothing else None
        (found,) = log_partitions(rows, weight, bias, words, bias_in_score=True)
        loss, level = found.excess, found.log_partition
        if average is not None:
            loss = (1 - label_smoothing) * loss + label_smoothing * (level - average)
        if z_loss:
            loss = loss + float(z_loss) * level.square()
        loss = loss.masked_fill(~counted, 0.0)
        if reduction == "mean":
            loss = loss.sum() / counted.sum()
        elif reduction == "sum":
            loss = loss.sum()
        else:
            if chosen is not None:
                loss = loss.new_zeros(target.numel()).index_copy(0, chosen, loss)
            loss = loss.reshape(target.shape)
    return CrossEntropyResult(loss, level.reshape(target.shape)) if return_log_partition else loss


def _mean_score(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The average score of all words, for each token."""
    # The gradient of a sum is its cotangent, repeated without memory; that of a mean would be written out.
    mean = rows @ (weight.sum(0, dtype=rows.dtype) / len(weight))
    return mean if bias is None else mean + bias.mean(dtype=rows.dtype)


def check_shapes(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    tensors = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    mixed = isinstance(hidden, Tensor) and autocasts(hidden)
    check_tensors(tensors, mixed)
    h, w = tuple(hidden.shape), tuple(weight.shape)
    if len(w) != 2 or 0 in w:
        raise ValueError(f"weight must have shape (V, D) with at least one word and one dimension, got {w}")
    if len(h) < 1 or h[-1] != w[1]:
        raise ValueError(f"hidden must have shape (*lead, {w[1]}) for weight {w}, got {h}")
    if bias is not None and tuple(bias.shape) != w[:1]:
        raise ValueError(f"bias must have shape {w[:1]} for weight {w}, got {tuple(bias.shape)}")
    check_integers("target", target, h[:-1], f"for hidden {h}", hidden.device)


def check_options(
    ignore_index: int, label_smoothing: float, z_loss: float, reduction: str, return_log_partition: bool
) -> None:
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an integer, got {told(ignore_index)}")
    if not -(1 << 63) <= ignore_index < 1 << 63:
        raise ValueError(f"ignore_index must be a 64-bit integer, got {ignore_index}")
    for name, number in (("label_smoothing", label_smoothing), ("z_loss", z_loss)):
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise TypeError(f"{name} must be a number, got {type(number).__name__}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss must be finite and at least 0, got {z_loss}")
    check_choice("reduction", reduction, "none", "sum", "mean")
    check_flag("return_log_partition", return_log_partition)
