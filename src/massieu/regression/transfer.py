"""The condition number of a downstream task, estimated from a model's features, masked tokens and labels (Z13).

Given the latent z tokens are independent, so that the best prediction of a masked token is Gs and that of a label Ds, s being
the posterior of z. Where Ds is a function of Gs, E[label | context] = Λ E[masked token | context] + offset, and κ = ‖Λ‖₂ bounds
the downstream excess risk. Neither z nor s is observed. But the equation holds for the context, and so for the mean given any
features φ of the context, such as a model's states at the masked place:

    E[label | φ] = Λ E[masked token | φ] + offset.

Both sides are estimated by linear regression on φ, and Λ by regression of the first on the second: two-stage least squares,
with φ as instruments (Theil 1953). The model need not predict well for this; it has to vary along all directions of Gs.
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.foundation.arguments import (
    check_finite,
    check_one_device,
    check_shape,
    check_values,
    doubles,
    integers,
    number,
    whole_number,
)
from massieu.foundation.doors import door
from massieu.foundation.short_repr import fields_html, fields_repr

_RESAMPLES = 200
_LEVEL = 0.95
_RANK_LEVEL = 0.01
"""Of the test by which directions that are noise are left out."""


class TransferRiskResult(NamedTuple):
    """What a worse prediction of masked tokens costs there and downstream, each a mean of paired differences."""

    masked_excess: float
    """Squared error at the masked tokens, above that of the reference."""
    masked_error: float
    """Its standard error."""
    label_excess: float
    """Squared error of the labels that are read off the prediction, above that of the reference."""
    label_error: float
    """Its standard error."""
    bound: float
    """κ² · masked_excess."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


class TransferEstimateResult(NamedTuple):
    """The probe from masked tokens to labels, and its condition number with an interval."""

    condition_number: float
    """κ = ‖Λ‖₂, in label units per token unit."""
    interval: tuple[float, float]
    """Of κ, by the bootstrap over sequences."""
    probe: Float[Tensor, "c p"]
    """Λ."""
    offset: Float[Tensor, "c"]
    """Λ·(prediction of the masked token) + offset predicts the label."""
    rank: int
    """The number of directions of the masked token that the features predict beyond noise."""
    lost_share: float
    """The share of what the features predict of the labels that the predicted masked tokens do not carry, 0 to 1.

    It is about 0 if the labels can be identified from the masked tokens. NaN where the features predict no label beyond noise.
    """

    __repr__ = fields_repr
    _repr_html_ = fields_html

    def predict(self, prediction: Float[Tensor, "*lead p"]) -> Float[Tensor, "*lead c"]:
        """The labels' means that follow from predictions of the masked tokens."""
        return prediction.to(self.probe.dtype) @ self.probe.mT + self.offset

    def risks(
        self,
        prediction: Float[Tensor, "n p"],
        reference: Float[Tensor, "n p"],
        masked: Float[Tensor, "n p"],
        labels: Float[Tensor, "n c"],
    ) -> TransferRiskResult:
        """The measured downstream excess risk of a prediction beside the bound κ²·(its excess risk at the masked tokens).

        The bound holds in the mean if the reference is the best prediction; use sequences that the estimate has not seen.

        Args:
            prediction: Of the masked tokens.
            reference: A better prediction of them, by the same or by another model.
            masked: The masked tokens.
            labels: The labels, as numbers; classes as indicators.
        """
        arrays = _matrices(prediction=prediction, reference=reference, masked=masked, labels=labels)
        prediction, reference, masked, labels = arrays
        if not prediction.shape == reference.shape == masked.shape or labels.shape[1:] != self.offset.shape:
            raise ValueError(
                f"prediction, reference and masked must have one shape (n, {self.probe.shape[1]}) and labels the shape "
                f"(n, {self.probe.shape[0]}), got {', '.join(str(tuple(each.shape)) for each in arrays)}"
            )
        at_masked = _squared_error(prediction, masked) - _squared_error(reference, masked)
        at_labels = _squared_error(self.predict(prediction), labels) - _squared_error(self.predict(reference), labels)
        masked_excess, masked_error = _mean(at_masked)
        label_excess, label_error = _mean(at_labels)
        bound = self.condition_number**2 * masked_excess
        return TransferRiskResult(masked_excess, masked_error, label_excess, label_error, bound)


@door
def transfer_estimate(
    features: Float[Tensor, "n q"],
    masked: Float[Tensor, "n p"],
    labels: Float[Tensor, "n c"],
    *,
    sequence: Int[Tensor, "n"] | None = None,
    rank: int | None = None,
    resamples: int = _RESAMPLES,
    level: float = _LEVEL,
    generator: torch.Generator | None = None,
) -> TransferEstimateResult:
    """κ of a downstream task from features at masked places, the masked tokens and labels, with a bootstrap interval (Z13).

    Λ is the two-stage least-squares estimate, in those `rank` directions of the masked token that the features predict best. It
    is consistent where the masked token identifies the labels, for any features that are functions of the context. It is biased
    if features hardly vary along some direction, or if there are few rows for their number. The interval is that of the
    bootstrap's percentiles, at a fixed rank. In float64; not differentiable.

    Args:
        features: φ, what the model computes at masked places, a row for each: its states, or its predictions of the tokens.
        masked: The tokens that stood there, as vectors: pixels, embeddings, indicators of classes.
        labels: The downstream targets of the same rows, as numbers; classes as indicators.
        sequence: The number of each row's sequence. Rows of one sequence share a latent, and are resampled together. By
            default each row is a sequence of its own.
        rank: By default the number of canonical correlations between features and tokens that Bartlett's test at 1 % finds.
            Of directions that are left out, κ says nothing: with more rows it may grow.
        resamples: How many.
        level: Of the interval.
        generator: Draws the resamples; by default one seeded with 0.

    Raises:
        TypeError, ValueError: arguments that are no matrices of as many rows, or not finite; fewer than 2 (q + 1) rows; a rank
            above min(p, q); one sequence alone; features that predict no direction of the tokens beyond noise.

    Example:
        >>> import torch
        >>> from massieu.regression import transfer_estimate
        >>> features = torch.randn(500, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> estimate = transfer_estimate(features, features, 2 * features[:, :1])
        >>> round(estimate.condition_number, 6), estimate.rank
        (2.0, 3)
    """
    features, masked, labels = _matrices(features=features, masked=masked, labels=labels)
    _check_sizes(features, masked, labels, rank)
    whole_number("resamples", resamples, least=2)
    level = number("level", level, above=0, below=1)
    sequence = _checked_sequence(sequence, features)
    generator = generator or torch.Generator().manual_seed(0)
    basis = _orthonormal(features)
    rank = rank or _rank_beyond_noise(basis, masked)
    if not rank:
        raise ValueError("the features must predict the masked tokens beyond noise, got no such direction")
    stage = _first_stage(basis, masked, labels, torch.ones_like(masked[:, 0]))
    probe = stage.probe(rank)
    draws = [
        torch.linalg.matrix_norm(_first_stage(basis, masked, labels, weight).probe(rank), 2)
        for weight in _resampled_weights(sequence, resamples, generator)
    ]
    tails = torch.tensor([0.5 - level / 2, 0.5 + level / 2], dtype=torch.float64, device=features.device)
    low, high = torch.quantile(torch.stack(draws), tails).tolist()
    labels_variance = float((labels - stage.labels_mean).square().sum())
    return TransferEstimateResult(
        condition_number=float(torch.linalg.matrix_norm(probe, 2)),
        interval=(low, high),
        probe=probe,
        offset=stage.labels_mean - probe @ stage.masked_mean,
        rank=rank,
        lost_share=stage.lost_share(probe, rank, labels_variance, len(labels)),
    )


class _FirstStage(NamedTuple):
    """Tokens and labels regressed on the features, all centred, in orthonormal coordinates of the features.

    The singular values of `masked` are those of the (n, p) predictions, and so on, so that n appears no more.
    """

    masked_mean: Float[Tensor, "p"]
    labels_mean: Float[Tensor, "c"]
    masked: Float[Tensor, "q p"]
    labels: Float[Tensor, "q c"]

    def probe(self, rank: int) -> Float[Tensor, "c p"]:
        """Λ by least squares of the predicted labels on the first directions of the predicted tokens."""
        left, values, right = torch.linalg.svd(self.masked, full_matrices=False)
        # A resample may have fewer directions than the rank.
        rank = min(rank, int((values > _rounding(self.masked) * values[:1]).sum()))
        return (self.labels.mT @ left[:, :rank] / values[:rank]) @ right[:rank]

    def lost_share(self, probe: Float[Tensor, "c p"], rank: int, labels_variance: float, num_rows: int) -> float:
        """1 − (what the predicted tokens carry)/(what the features predict) of the labels' variance, both less their noise."""
        num_features = len(self.labels)
        predicted = float(self.labels.square().sum())
        noise = max(labels_variance - predicted, 0.0) / max(num_rows - num_features - 1, 1)
        carried = float((self.masked @ probe.mT).square().sum()) - rank * noise
        predicted -= num_features * noise
        if predicted <= 0:
            return math.nan
        return min(max(1 - carried / predicted, 0.0), 1.0)


def _first_stage(
    basis: Float[Tensor, "n q"], masked: Float[Tensor, "n p"], labels: Float[Tensor, "n c"], weight: Float[Tensor, "n"]
) -> _FirstStage:
    """The regressions with so much weight on each row, of features in a basis that is nearly orthonormal."""
    share = weight / weight.sum()
    masked_mean = share @ masked
    labels_mean = share @ labels
    centred = basis - share @ basis
    weighted = weight[:, None] * centred
    # (centredᵀ W centred)^(−1/2); a feature that no drawn row has is left out.
    variances, axes = torch.linalg.eigh(centred.mT @ weighted)
    is_kept = variances > _rounding(centred) * variances[-1]
    whitening = axes[:, is_kept] / variances[is_kept].sqrt()
    coordinates = whitening.mT @ weighted.mT
    return _FirstStage(
        masked_mean, labels_mean, coordinates @ (masked - masked_mean), coordinates @ (labels - labels_mean)
    )


def _orthonormal(matrix: Float[Tensor, "n q"]) -> Float[Tensor, "n r"]:
    """An orthonormal basis of the span of the centred columns."""
    left, values, _ = torch.linalg.svd(matrix - matrix.mean(0), full_matrices=False)
    return left[:, values > _rounding(matrix) * torch.linalg.vector_norm(matrix)]


def _rounding(matrix: Tensor) -> float:
    """What rounding makes of zero, relative to the largest singular value."""
    return max(matrix.shape) * torch.finfo(torch.float64).eps


def _rank_beyond_noise(basis: Float[Tensor, "n q"], masked: Float[Tensor, "n p"]) -> int:
    """How many canonical correlations of features and tokens are not zero, by Bartlett's test of those that are left."""
    tokens = _orthonormal(masked)
    num_rows = len(masked)
    squares = torch.linalg.svdvals(basis.mT @ tokens).square()
    factor = num_rows - 1 - (basis.shape[1] + tokens.shape[1] + 1) / 2
    for rank in range(len(squares)):
        left = -torch.log1p(-squares[rank:].clamp_max(1 - torch.finfo(torch.float64).eps)).sum() * factor
        degrees = torch.tensor((basis.shape[1] - rank) * (tokens.shape[1] - rank), dtype=torch.float64)
        if float(torch.special.gammaincc(degrees / 2, left.cpu().clamp_min(0) / 2)) > _RANK_LEVEL:
            return rank
    return len(squares)


def _resampled_weights(
    sequence: Int[Tensor, "n"], resamples: int, generator: torch.Generator
) -> "list[Float[Tensor, 'n']]":
    """How often each row is in each resample, in which sequences are drawn with replacement."""
    count = int(sequence.max()) + 1
    weights = []
    for _ in range(resamples):
        drawn = torch.randint(count, (count,), generator=generator, device=generator.device)
        times = torch.bincount(drawn, minlength=count).to(sequence.device)
        weights.append(times[sequence].double())
    return weights


def _check_sizes(
    features: Float[Tensor, "n q"], masked: Float[Tensor, "n p"], labels: Float[Tensor, "n c"], rank: int | None
) -> None:
    num_rows, num_features = features.shape
    if not num_rows == len(masked) == len(labels):
        raise ValueError(
            f"features, masked and labels must have as many rows, got {num_rows}, {len(masked)} and {len(labels)}"
        )
    if num_rows < 2 * (num_features + 1):
        raise ValueError(
            f"there must be at least {2 * (num_features + 1)} rows for {num_features} features, got {num_rows}"
        )
    if rank is not None and whole_number("rank", rank, least=1) > min(num_features, masked.shape[1]):
        raise ValueError(
            f"rank must be at most {min(num_features, masked.shape[1])}, as many as features and as coordinates of the "
            f"tokens, got {rank}"
        )


def _checked_sequence(sequence: object, features: Float[Tensor, "n q"]) -> Int[Tensor, "n"]:
    """The sequences' numbers without gaps."""
    if sequence is None:
        return torch.arange(len(features), device=features.device)
    numbers = integers("sequence", sequence)
    check_shape("sequence", numbers, features.shape[:1])
    kinds, index = torch.unique(numbers, return_inverse=True)
    if len(kinds) < 2:
        raise ValueError("there must be at least 2 sequences to resample, got 1")
    return index.to(features.device)


def _matrices(**arrays: Any) -> tuple[Tensor, ...]:
    """The matrices in float64, without their gradients."""
    checked = {name: doubles(name, value).detach() for name, value in arrays.items()}
    check_values(**checked)
    for name, value in checked.items():
        if value.ndim != 2 or 0 in value.shape:
            raise ValueError(
                f"{name} must have shape (rows, columns) with at least one of each, got {tuple(value.shape)}"
            )
    check_one_device(**checked)
    check_finite(**checked)
    return tuple(checked.values())


def _squared_error(prediction: Float[Tensor, "n m"], target: Float[Tensor, "n m"]) -> Float[Tensor, "n"]:
    return (prediction - target).square().sum(-1)


def _mean(values: Float[Tensor, "n"]) -> tuple[float, float]:
    """The mean and its standard error."""
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))
