"""Renormalisations of a whole population: what holds its mean and covariance, or its size alone, in place (S13).

Both are operators: on particles, whose own moments they use, on particles that are spread over processes, by the moments of
all of them, and on Gaussian laws. Neither is LayerNorm, which sees one token at a time (trap 16); those are in
`massieu.energy.activations`.
"""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation import matrices
from massieu.foundation.arguments import positive
from massieu.measures import Gaussian, static_field
from massieu.measures.value import values_are_readable
from massieu.ops.sharded.collectives import Group, replicate, total
from massieu.ops.sharded.keys import Processes
from massieu.population.arguments import need_tensors, need_values
from massieu.population.operator import AffineMap, ParticleMoments, Value, admit, admit_share, need_law, pushed


class Renormalisation(Value):
    """RN: x ↦ m* + C*^½ (C + eps·1)^(−½) (x − m), with m and C the population's own mean and covariance (S13).

    Roots are symmetric. With eps = 0 the population has mean m* and covariance C* afterwards. Differentiable three times,
    through the moments as well. A pytree; use `create`, which checks.

    Attributes:
        mean: m*, shape (*batch, d), whose batch broadcasts against the populations'.
        covariance: C*, positive definite, shape (*batch, d, d).
        eps: Added to the eigenvalues of C, so that a population of fewer than d + 1 particles can be renormalised.
    """

    mean: Float[Tensor, "*batch d"]
    covariance: Float[Tensor, "*batch d d"]
    eps: float = static_field(default=0.0)

    @classmethod
    def create(
        cls, mean: Float[Tensor, "*batch d"], covariance: Float[Tensor, "*batch d d"], *, eps: float = 0.0
    ) -> Self:
        """From the mean and the covariance that a population is to have.

        Raises:
            ValueError: shapes that do not fit, a covariance that is not symmetric and positive definite, or an `eps` that is
                negative or not finite.
            TypeError: the mean is not floating-point.
        """
        need_tensors(mean=mean, covariance=covariance)
        need_values(mean=mean, covariance=covariance)
        if covariance.ndim != mean.ndim + 1:
            raise ValueError(
                f"covariance must have shape {(*mean.shape, *mean.shape[-1:])} for a mean of shape {tuple(mean.shape)}, "
                f"got {tuple(covariance.shape)}"
            )
        Gaussian.create(mean, covariance)  # its checks are the ones that are needed
        if not 0 <= eps < float("inf"):
            raise ValueError(f"eps must be finite and at least 0, got {eps}")
        matrices.square_root(covariance.detach().double(), owner="Renormalisation.create")
        return cls(mean, covariance, float(eps))

    def __call__(self, particles: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The renormalised particles, by their own mean and covariance (divided by n); at least float32.

        Raises:
            ValueError: particles without two dimensions or with another d, or of a singular covariance, as always for n ≤ d
                without an `eps`.
            TypeError: they are not floating-point.
        """
        return self._moved(particles, None)

    def sharded(
        self, particles: Float[Tensor, "*batch n d"], *, group: Processes = None
    ) -> Float[Tensor, "*batch n d"]:
        """The same for this process's particles, of any number, of a population spread over a group of processes.

        By the moments of all particles. Gradients are those of one objective, the sum of the processes' losses; `mean` and
        `covariance` are replicated: every process has their whole gradient.

        Raises:
            ValueError, TypeError: as the call; or there is no process group.
        """
        return self._moved(particles, Group.of(group))

    def affine(self, law: ParticleMoments) -> AffineMap:
        """As an affine map, for a population of that law.

        Raises:
            ValueError: its covariance is singular without an `eps`.
        """
        matrix = self.matrix(law.covariance)
        moved = (matrix @ law.mean.unsqueeze(-1)).squeeze(-1)
        return AffineMap(matrix, self.mean.to(moved.dtype) - moved)

    def gaussian(self, law: Gaussian) -> Gaussian:
        """The renormalised law.

        Raises:
            ValueError, TypeError: a law of another d or another measure, or of a singular covariance without an `eps`.
        """
        before = need_law(self, law, self.mean.shape[-1], self._dtype)
        return Gaussian.create(*pushed(self.affine(before), before))

    def matrix(self, covariance: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch d d"]:
        """C*^½ (C + eps·1)^(−½): what the renormalisation multiplies deviations from the mean of a population of C by.

        Raises:
            ValueError: C + eps·1 is not positive definite.
        """
        identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
        own = matrices.square_root(covariance + self.eps * identity, owner="Renormalisation")
        wanted = matrices.square_root(self.covariance.to(covariance.dtype), owner="Renormalisation")
        return wanted @ torch.linalg.inv(own)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.promote_types(self.mean.dtype, self.covariance.dtype)

    def _moved(self, particles: Tensor, processes: Group | None) -> Tensor:
        size = self.mean.shape[-1]
        if processes is None:
            particles = admit(self, particles, size, self._dtype)
        else:
            particles = admit_share(self, particles, size, self._dtype, processes, eps=self.eps)
        centred, covariance = _moments(particles, processes)
        matrix = _spread(self.matrix(covariance), processes)
        return _spread(self.mean.to(particles.dtype), processes).unsqueeze(-2) + centred @ matrix.mT


class TraceRenormalisation(Value):
    """x ↦ √(trace/tr C)·(x − m): centred, and scaled by one number so that the trace of the covariance is constant.

    What a scalar can hold in place: ratios of eigenvalues stay, so that those which attention makes grow keep growing (S13).
    Differentiable; a pytree; use `create`, which checks.

    Attributes:
        trace: Positive, shape (*batch) or ().
    """

    trace: Float[Tensor, "*batch"]

    @classmethod
    def create(cls, trace: Float[Tensor, "*batch"] | float) -> Self:
        """Raises ValueError unless `trace` is positive and finite."""
        return cls(positive("trace", trace))

    def __call__(self, particles: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The renormalised particles; at least float32.

        Raises:
            ValueError: particles without two dimensions, or all equal.
            TypeError: they are not floating-point.
        """
        return self._moved(particles, None)

    def sharded(
        self, particles: Float[Tensor, "*batch n d"], *, group: Processes = None
    ) -> Float[Tensor, "*batch n d"]:
        """The same for this process's particles, of any number, of a population spread over a group of processes.

        Raises:
            ValueError, TypeError: as the call; or there is no process group.
        """
        return self._moved(particles, Group.of(group))

    def affine(self, law: ParticleMoments) -> AffineMap:
        """As an affine map, for a population of that law.

        Raises:
            ValueError: its covariance is zero.
        """
        size = self._size(law.covariance.diagonal(dim1=-2, dim2=-1).sum(-1))
        identity = torch.eye(law.mean.shape[-1], dtype=size.dtype, device=size.device)
        return AffineMap(size[..., None, None] * identity, -size.unsqueeze(-1) * law.mean)

    def gaussian(self, law: Gaussian) -> Gaussian:
        """The renormalised law.

        Raises:
            ValueError: its covariance is zero.
            TypeError: it is not Gaussian.
        """
        before = need_law(self, law, None, torch.float32)
        return Gaussian.create(*pushed(self.affine(before), before))

    def _moved(self, particles: Tensor, processes: Group | None) -> Tensor:
        if processes is None:
            particles = admit(self, particles, None, torch.float32)
        else:
            particles = admit_share(self, particles, None, torch.float32, processes)
        centred, covariance = _moments(particles, processes)
        size = _spread(self._size(covariance.diagonal(dim1=-2, dim2=-1).sum(-1)), processes)
        return size[..., None, None] * centred

    def _size(self, own: Tensor) -> Tensor:
        if values_are_readable(own) and not bool((own > 0).all()):
            raise ValueError(
                "TraceRenormalisation needs a population that is not a single point, got a covariance of trace "
                f"{float(own.min()):.3g}"
            )
        return (self.trace.to(own) / own).sqrt()


def _moments(particles: Tensor, processes: Group | None) -> tuple[Tensor, Tensor]:
    """The particles less the population's mean, and its covariance."""
    if processes is None:
        centred = particles - particles.mean(-2, keepdim=True)
        return centred, centred.mT @ centred / particles.shape[-2]
    count = total(particles.new_full((), particles.shape[-2]), processes)
    mean = total(particles.sum(-2, keepdim=True), processes) / count
    centred = particles - replicate(mean, processes)
    return centred, total(centred.mT @ centred, processes) / count


def _spread(tensor: Tensor, processes: Group | None) -> Tensor:
    """What all processes hold, for each to use on its own particles."""
    return tensor if processes is None else replicate(tensor, processes)
