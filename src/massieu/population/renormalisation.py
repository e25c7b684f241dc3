"""Renormalisations of a whole population: what holds its mean and covariance, or its size alone, in place (S13).

Both act on particles, whose own moments they use, and on Gaussian laws. Where the particles are spread over the processes of
a `group`, the moments are those of all of them, and gradients are those of one objective. Neither is LayerNorm, which sees one
token at a time (trap 16); those are in `massieu.energy.contraction`.
"""

import dataclasses
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from massieu.energy import matrices
from massieu.energy.contraction.base import positive
from massieu.measures import Gaussian, static_field
from massieu.measures.value import register, values_are_readable
from massieu.ops.sharded.collectives import Group, replicate, total


@dataclasses.dataclass(frozen=True, eq=False)
class Renormalisation:
    """RN: x ↦ m* + C*^½ (C + eps·1)^(−½) (x − m), with m and C the population's own mean and covariance (S13).

    Roots are symmetric. With eps = 0 the population has mean m* and covariance C* afterwards. Differentiable three times,
    through the moments as well. A pytree; use `create`, which checks.

    Attributes:
        mean: m*, shape (*batch, d), whose batch broadcasts against the populations'.
        covariance: C*, positive definite, shape (*batch, d, d).
        eps: Added to the eigenvalues of C, so that a population of fewer than d + 1 particles can be renormalised.
        group: Of the processes that hold the particles; None where all are here.
    """

    mean: Float[Tensor, "*batch d"]
    covariance: Float[Tensor, "*batch d d"]
    eps: float = static_field(default=0.0)
    group: ProcessGroup | DeviceMesh | None = static_field(default=None)  # noqa: RUF009 - a field specifier

    @classmethod
    def create(
        cls,
        mean: Float[Tensor, "*batch d"],
        covariance: Float[Tensor, "*batch d d"],
        *,
        eps: float = 0.0,
        group: ProcessGroup | DeviceMesh | None = None,
    ) -> Self:
        """From the mean and the covariance that a population is to have.

        Raises:
            ValueError: shapes that do not fit, a covariance that is not symmetric and positive definite, or an `eps` that is
                negative or not finite.
            TypeError: the mean is not floating-point.
        """
        if covariance.ndim != mean.ndim + 1:
            raise ValueError(
                f"covariance must have shape {(*mean.shape, *mean.shape[-1:])} for a mean of shape {tuple(mean.shape)}, "
                f"got {tuple(covariance.shape)}"
            )
        Gaussian.create(mean, covariance)  # its checks are the ones that are needed
        if not 0 <= eps < float("inf"):
            raise ValueError(f"eps must be finite and at least 0, got {eps}")
        matrices.square_root(covariance.detach().double(), owner="Renormalisation.create")
        return cls(mean, covariance, float(eps), group)

    def __call__(self, particles: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The renormalised particles, by their own mean and covariance (divided by n).

        Raises:
            ValueError: particles without two dimensions or with another d, or of a singular covariance, as always for n ≤ d
                without an `eps`.
        """
        self._need_width(particles.shape, (*particles.shape[:-2], "n", self.mean.shape[-1]), particles.ndim >= 2)
        particles = self._promoted(particles)
        centred, covariance = _moments(particles, self.group)
        matrix = _spread(self.matrix(covariance), self.group)
        return _spread(self.mean.to(particles.dtype), self.group).unsqueeze(-2) + centred @ matrix.mT

    def gaussian(self, law: Gaussian) -> Gaussian:
        """The renormalised law.

        Raises:
            ValueError: a law of another d, or of a singular covariance without an `eps`.
        """
        self._need_width(law.location.shape, (*law.location.shape[:-1], self.mean.shape[-1]), True)
        covariance = self._promoted(law.fisher(torch.zeros_like(law.location)))
        matrix = self.matrix(covariance)
        moved = matrix @ covariance @ matrix.mT
        location = self.mean.to(moved.dtype).expand(moved.shape[:-1])
        return Gaussian(location, 0.5 * (moved + moved.mT), location.new_zeros((*location.shape, 0)))

    def matrix(self, covariance: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch d d"]:
        """C*^½ (C + eps·1)^(−½): what the renormalisation multiplies deviations from the mean of a population of C by.

        Raises:
            ValueError: C + eps·1 is not positive definite.
        """
        identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
        own = matrices.square_root(covariance + self.eps * identity, owner="Renormalisation")
        wanted = matrices.square_root(self.covariance.to(covariance.dtype), owner="Renormalisation")
        return wanted @ torch.linalg.inv(own)

    def _promoted(self, tensor: Tensor) -> Tensor:
        dtype = torch.promote_types(torch.float32, torch.promote_types(tensor.dtype, self.mean.dtype))
        return tensor.to(torch.promote_types(dtype, self.covariance.dtype))

    def _need_width(self, shape: torch.Size, needed: tuple[object, ...], long_enough: bool) -> None:
        if not long_enough or shape[-1] != self.mean.shape[-1]:
            raise ValueError(f"Renormalisation needs a population of shape {needed}, got {tuple(shape)}")


@dataclasses.dataclass(frozen=True, eq=False)
class TraceRenormalisation:
    """x ↦ √(trace/tr C)·(x − m): centred, and scaled by one number so that the trace of the covariance is constant.

    What a scalar can hold in place: ratios of eigenvalues stay, so that those which attention makes grow keep growing (S13).
    Differentiable; a pytree; use `create`, which checks.

    Attributes:
        trace: Positive, shape (*batch) or ().
        group: Of the processes that hold the particles; None where all are here.
    """

    trace: Float[Tensor, "*batch"]
    group: ProcessGroup | DeviceMesh | None = static_field(default=None)  # noqa: RUF009 - a field specifier

    @classmethod
    def create(cls, trace: Float[Tensor, "*batch"] | float, *, group: ProcessGroup | DeviceMesh | None = None) -> Self:
        """Raises ValueError unless `trace` is positive and finite."""
        return cls(positive("trace", trace), group)

    def __call__(self, particles: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """The renormalised particles.

        Raises:
            ValueError: particles without two dimensions, or all equal.
        """
        if particles.ndim < 2:
            raise ValueError(
                f"TraceRenormalisation needs particles of shape (*batch, n, d), got {tuple(particles.shape)}"
            )
        particles = particles.to(torch.promote_types(torch.float32, particles.dtype))
        centred, covariance = _moments(particles, self.group)
        size = _spread(self._size(covariance.diagonal(dim1=-2, dim2=-1).sum(-1)), self.group)
        return size[..., None, None] * centred

    def gaussian(self, law: Gaussian) -> Gaussian:
        """The renormalised law.

        Raises:
            ValueError: its covariance is zero.
        """
        covariance = law.fisher(torch.zeros_like(law.location))
        size = self._size(covariance.diagonal(dim1=-2, dim2=-1).sum(-1))
        covariance = size.square()[..., None, None] * covariance
        location = covariance.new_zeros(covariance.shape[:-1])
        return Gaussian(location, covariance, location.new_zeros((*location.shape, 0)))

    def _size(self, own: Tensor) -> Tensor:
        if values_are_readable(own) and not bool((own > 0).all()):
            raise ValueError(
                "TraceRenormalisation needs a population that is not a single point, got a covariance of trace "
                f"{float(own.min()):.3g}"
            )
        return (self.trace.to(own) / own).sqrt()


def _moments(particles: Tensor, group: ProcessGroup | DeviceMesh | None) -> tuple[Tensor, Tensor]:
    """The particles less the population's mean, and its covariance."""
    if group is None:
        centred = particles - particles.mean(-2, keepdim=True)
        return centred, centred.mT @ centred / particles.shape[-2]
    processes = Group.of(group)
    count = total(particles.new_full((), particles.shape[-2]), processes)
    mean = total(particles.sum(-2, keepdim=True), processes) / count
    centred = particles - replicate(mean, processes)
    return centred, total(centred.mT @ centred, processes) / count


def _spread(tensor: Tensor, group: ProcessGroup | DeviceMesh | None) -> Tensor:
    """What all processes hold, for each to use on its own particles."""
    return tensor if group is None else replicate(tensor, Group.of(group))


register(Renormalisation)
register(TraceRenormalisation)
