"""Renormalisations of a whole population: they fix its mean and covariance, or its size alone (S13).

Both are operators on particles, by the moments of the particles themselves, and on Gaussian laws. Of particles that are
spread over processes they use the moments of all. Neither is LayerNorm, which sees one token at a time (trap 16); norm layers
are in `massieu.energy.activations`.
"""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation import matrices
from massieu.foundation.arguments import check_values, floating, number, positive
from massieu.foundation.transforms import all_true, unwrapped
from massieu.foundation.values import static_field
from massieu.measures import Gaussian
from massieu.ops.sharded.collectives import Peers, replicate, total
from massieu.population.operator import AffineMap, Operator, ParticleMoments


class Renormalisation(Operator):
    """Gives a population a wanted mean and covariance: x ↦ m* + C*^½ (C + eps·1)^(−½) (x − m) (S13).

    Roots are symmetric. With eps = 0 the population has mean m* and covariance C* afterwards. Differentiable three times,
    through the moments as well. A singular covariance of particles or of a law is a ValueError; that of n ≤ d particles
    always is, unless `eps` is positive. Use `create`, which checks.

    Attributes:
        mean: m*, shape (*batch, d); its batch broadcasts against that of the populations.
        covariance: C*, positive definite, shape (*batch, d, d).
        eps: Added to the eigenvalues of C, so that a population of fewer than d + 1 particles can be renormalised.

    Example:
        >>> import torch
        >>> from massieu.population import Renormalisation
        >>> white = Renormalisation.create(torch.zeros(1), torch.eye(1))
        >>> [round(x, 3) for x in white(torch.tensor([[3.0], [7.0]])).flatten().tolist()]
        [-1.0, 1.0]
    """

    mean: Float[Tensor, "*batch d"]
    covariance: Float[Tensor, "*batch d d"]
    eps: float = static_field(default=0.0)

    @classmethod
    def create(
        cls, mean: Float[Tensor, "*batch d"], covariance: Float[Tensor, "*batch d d"], *, eps: float = 0.0
    ) -> Self:
        """A renormalisation to this mean and covariance.

        Raises:
            ValueError: shapes do not fit, the covariance is not symmetric and positive definite, or `eps` is negative or
                not finite.
            TypeError: a tensor is not floating-point, or `eps` is no number.
        """
        check_values(mean=floating("mean", mean), covariance=floating("covariance", covariance))
        if covariance.ndim != mean.ndim + 1:
            raise ValueError(
                f"covariance must have shape {(*mean.shape, *mean.shape[-1:])} for a mean of shape {tuple(mean.shape)}, "
                f"got {tuple(covariance.shape)}"
            )
        Gaussian.create(mean, covariance)  # Checks shapes, finite entries and symmetry.
        matrices.square_root(covariance.detach().double(), owner="Renormalisation.create")
        dtype = torch.promote_types(mean.dtype, covariance.dtype)
        return cls(mean.to(dtype), covariance.to(dtype), float(number("eps", eps, least=0)))

    def affine(self, law: ParticleMoments) -> AffineMap:
        matrix = self.matrix(law.covariance)
        moved = (matrix @ law.mean.unsqueeze(-1)).squeeze(-1)
        return AffineMap(matrix, self.mean.to(moved.dtype) - moved)

    def matrix(self, covariance: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch d d"]:
        """C*^½ (C + eps·1)^(−½): the factor of deviations from the mean, for a population of covariance C.

        Raises:
            ValueError: C + eps·1 is not positive definite.
        """
        floating("covariance", covariance)
        if covariance.shape[-2:] != self.covariance.shape[-2:]:
            expected_shape = tuple(self.covariance.shape[-2:])
            raise ValueError(f"covariance must end in the shape {expected_shape}, got {tuple(covariance.shape)}")
        identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
        population_root = matrices.square_root(covariance + self.eps * identity, owner="Renormalisation")
        target_root = matrices.square_root(self.covariance.to(covariance.dtype), owner="Renormalisation")
        return target_root @ torch.linalg.inv(population_root)

    @property
    def _like(self) -> Tensor:
        return self.mean

    def _moved(self, particles: Tensor, group: Peers | None) -> Tensor:
        centred, covariance = _moments(particles, group)
        matrix = _spread(self.matrix(covariance), group)
        return _spread(self.mean.to(particles.dtype), group).unsqueeze(-2) + centred @ matrix.mT


class TraceRenormalisation(Operator):
    """Centres a population and scales it to a given trace of the covariance: x ↦ √(trace/tr C)·(x − m).

    One scalar fixes the size alone. Ratios of eigenvalues stay, so that those which attention makes grow keep growing (S13).
    A population of equal particles, or a law of covariance 0, is a ValueError. Use `create`, which checks.

    Attributes:
        trace: Positive, shape (*batch) or ().

    Example:
        >>> import torch
        >>> from massieu.population import TraceRenormalisation
        >>> TraceRenormalisation.create(1.0)(torch.tensor([[3.0], [7.0]])).tolist()
        [[-1.0], [1.0]]
    """

    trace: Float[Tensor, "*batch"]

    @classmethod
    def create(cls, trace: Float[Tensor, "*batch"] | float) -> Self:
        """A renormalisation to this trace; a ValueError unless it is positive and finite."""
        return cls(positive("trace", trace))

    def affine(self, law: ParticleMoments) -> AffineMap:
        factor = self._factor(law.covariance)
        identity = torch.eye(law.mean.shape[-1], dtype=factor.dtype, device=factor.device)
        return AffineMap(factor[..., None, None] * identity, -factor.unsqueeze(-1) * law.mean)

    def _moved(self, particles: Tensor, group: Peers | None) -> Tensor:
        centred, covariance = _moments(particles, group)
        return _spread(self._factor(covariance), group)[..., None, None] * centred

    def _factor(self, covariance: Tensor) -> Tensor:
        """√(trace/tr C)."""
        population_trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
        if not all_true(population_trace > 0):
            raise ValueError(
                "TraceRenormalisation needs a population that is not a single point, got a covariance of trace "
                f"{float(unwrapped(population_trace).min()):.3g}"
            )
        return (self.trace.to(population_trace) / population_trace).sqrt()


def _moments(particles: Tensor, group: Peers | None) -> tuple[Tensor, Tensor]:
    """The particles minus the population's mean, and the population's (biased) covariance."""
    if group is None:
        centred = particles - particles.mean(-2, keepdim=True)
        return centred, centred.mT @ centred / particles.shape[-2]
    count = total(particles.new_full((), particles.shape[-2]), group)
    mean = total(particles.sum(-2, keepdim=True), group) / count
    # Every process uses the mean on its own particles, and the gradients of all of them must reach the sums.
    centred = particles - replicate(mean, group)
    return centred, total(centred.mT @ centred, group) / count


def _spread(tensor: Tensor, group: Peers | None) -> Tensor:
    """A tensor that all processes hold, for use on the particles of each: its gradients are then added up."""
    return tensor if group is None else replicate(tensor, group)
