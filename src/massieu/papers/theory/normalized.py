"""Attention without softmax: scores, normalised to mean zero and variance one, are the weights.

Richter and Wattenhofer's layer is a gradient: its potential is the *standard deviation* of the scores, in place of their
log Σ exp (B18). As a memory it finds principal axes: implicit power iteration.
"""

from typing import NamedTuple, Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.energy.patterns import PatternPotential
from massieu.foundation.arguments import as_tensor, check_range, expanded, floating, number
from massieu.foundation.numerics import log_softmax
from massieu.foundation.values import promoted_dtype, static_field
from massieu.measures import Atoms


class ScoreDeviation(PatternPotential):
    """Potential of attention that standardises scores in place of a softmax: A(eta) = gain·√(σ² + eps) + bias·z̄.

    z̄ and σ² are mean and variance of the scores z_n = x_n·eta under the shares of w. The weights of the mean are
    share_n(gain·(z_n − z̄)/√(σ² + eps) + bias): negative ones too, of sum `bias`, so that means leave the points'
    convex hull. In the layer of N points, g(z_n − z̄)/σ + b, gain is gN and bias bN.

    A is a norm of eta but for the bias, convex. With ``eps = 0`` its slope at σ = 0, where all scores are equal within
    rounding, is put to bias·Σ share_n x_n, and second derivatives do not exist there; a positive `eps` makes it smooth.

    Attributes:
        atoms: Points and log-weights.
        gain, bias: Shape (*batch).
        eps: Under the root.

    Example:
        >>> import torch
        >>> from massieu.papers.theory import ScoreDeviation
        >>> memory = ScoreDeviation.create(torch.tensor([[-2.0], [2.0]]))
        >>> memory.log_partition(torch.tensor([3.0])).item()  # the scores −6 and 6 deviate by 6
        6.0
    """

    atoms: Atoms
    gain: Float[Tensor, "*batch"]
    bias: Float[Tensor, "*batch"]
    eps: float = static_field()

    @classmethod
    def create(
        cls,
        points: Float[Tensor, "*batch N d"],
        *,
        gain: Float[Tensor, "..."] | float = 1.0,
        bias: Float[Tensor, "..."] | float = 0.0,
        eps: float = 0.0,
        log_weight: Float[Tensor, "*batch N"] | Bool[Tensor, "*batch N"] | None = None,
    ) -> Self:
        """Patterns under normalised scores.

        Args:
            points: Finite points, at least one.
            gain: Positive; a tensor broadcasts to the batch, as one for each head does, and so does the bias.
            eps: At least 0, in squared units of the scores.
            log_weight: The log of each point's multiplicity, or booleans of which True keeps it.

        Raises:
            ValueError: shapes that do not fit, no point, something that is not finite, a gain that is not positive.
            TypeError: something is not floating-point.
        """
        atoms = Atoms.create(floating("points", points), log_weight)
        gain = _as_tensor("gain", gain, atoms)
        bias = _as_tensor("bias", bias, atoms)
        check_range("gain", gain, above=0)
        check_range("bias", bias)
        gain = expanded("gain", gain, atoms.batch_shape)
        bias = expanded("bias", bias, atoms.batch_shape)
        return cls(atoms, gain, bias, float(number("eps", eps, least=0)))

    @property
    def covariance(self) -> Float[Tensor, "*batch d d"]:
        """Σ̂ of the points under the shares of w, biased; σ² = etaᵀΣ̂eta."""
        share = self._share
        centred = self.points - share.unsqueeze(-2) @ self.points
        return (centred * share.unsqueeze(-1)).mT @ centred

    def principal_axes(self) -> tuple[Float[Tensor, "*batch d"], Float[Tensor, "*batch d d"]]:
        """Eigenvalues λ of Σ̂, largest first, and gain·√λ times their unit eigenvectors as rows.

        With bias 0 and eps 0 these rows (either sign) are the fixed points of the mean, and of the step of the Hopfield
        energy ½‖x‖² − A(x), which is least, −½ gain²λ, at the first.
        """
        ascending, vectors = torch.linalg.eigh(self.covariance)
        values = ascending.flip(-1).clamp_min(0)
        axes = vectors.mT.flip(-2)
        return values, self.gain[..., None, None] * values.sqrt().unsqueeze(-1) * axes

    @property
    def _share(self) -> Tensor:
        return log_softmax(self.log_weight.to(promoted_dtype(self.points))).exp()

    def _statistics(self, scores: Tensor) -> "_ScoreStatistics":
        share = self._align(self._share, scores)
        mean = (share * scores).sum(-1, keepdim=True)
        centred = scores - mean
        variance = (share * centred.square()).sum(-1, keepdim=True) + self.eps
        rounding = 4 * torch.finfo(scores.dtype).eps * scores.detach().abs().amax(-1, keepdim=True)
        is_flat = variance <= rounding.square()
        # The inner `where` keeps the derivative of the root at 0 out of the gradient.
        deviation = torch.where(is_flat, 0.0, torch.where(is_flat, 1.0, variance).sqrt())
        return _ScoreStatistics(share, mean, centred, deviation)

    def _of_scores(self, scores: Tensor) -> Tensor:
        statistics = self._statistics(scores)
        gain = self._align(self.gain.unsqueeze(-1), scores)
        bias = self._align(self.bias.unsqueeze(-1), scores)
        value = (gain * statistics.deviation + bias * statistics.mean).squeeze(-1)
        is_empty = (self.log_weight == -torch.inf).all(-1, keepdim=True)
        return value.masked_fill(self._align(is_empty, scores).squeeze(-1), -torch.inf)

    def _weights_of_scores(self, scores: Tensor) -> Tensor:
        statistics = self._statistics(scores)
        gain = self._align(self.gain.unsqueeze(-1), scores)
        bias = self._align(self.bias.unsqueeze(-1), scores)
        deviation = torch.where(statistics.deviation == 0, 1.0, statistics.deviation)
        return statistics.share * (gain * statistics.centred / deviation + bias)


class _ScoreStatistics(NamedTuple):
    """Moments of the scores of each state under the shares of the points."""

    share: Float[Tensor, "*batch_query N"]
    mean: Float[Tensor, "*batch_query 1"]
    centred: Float[Tensor, "*batch_query N"]
    """Scores minus their mean."""
    deviation: Float[Tensor, "*batch_query 1"]
    """√(σ² + eps); 0 where it is no more than rounding."""


def _as_tensor(name: str, value: Tensor | float, atoms: Atoms) -> Tensor:
    """A tensor as it is; a number in the dtype and on the device of the points."""
    if isinstance(value, Tensor):
        return floating(name, value)
    return as_tensor(name, value, atoms.points, promoted_dtype(atoms.points))
