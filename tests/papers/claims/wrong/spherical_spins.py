"""Wrong spherical spins."""

import torch

from massieu.energy import KineticSpins
from massieu.papers.theory import KineticIsing, SphericalSpins, large_dimension

_SADDLE = SphericalSpins.saddle_point
_ECHO = KineticSpins._echo
_NEWTON = large_dimension._newton_step


def _without_temperature(self, **options):
    saddle = _SADDLE(self, **options)
    return saddle._replace(mean=self.scale * saddle.mean)


def _correlations_of_means(self, **options):
    saddle = _SADDLE(self, **options)
    diagonal = saddle.transverse.diagonal(dim1=-2, dim2=-1)
    return saddle._replace(transverse=torch.diag_embed(diagonal))


def _own_gamma(self, state, before, field):
    """Every spin's own covariance in place of the others'."""
    return torch.stack([_ECHO(self, state, row.expand_as(before), field)[i] for i, row in enumerate(before)])


WRONG = {
    "B15: ∂log Z/∂h for the mean": ("B15", SphericalSpins, "saddle_point", _without_temperature),
    "B15: no minimum": (
        "B15",
        large_dimension,
        "_newton_step",
        lambda t, field, coupling, scale: _NEWTON(t, 1.01 * field, coupling, scale),
    ),
    "B15: no longitudinal part": (
        "B15",
        SphericalSpins,
        "covariance",
        lambda self, point: torch.einsum(
            "ij,ab->iajb", point.transverse, torch.eye(self.field.shape[-1], dtype=torch.float64)
        ),
    ),
    "B16: γ of the wrong spin": ("B16", KineticSpins, "_echo", _own_gamma),
    "B16: half the echo": ("B16", KineticSpins, "_echo", lambda self, *arguments: 0.5 * _ECHO(self, *arguments)),
    "B16: no echo of binary spins": ("B16", KineticIsing, "_echo", lambda self, state, *_: 0 * state),
    "B16: a mean that is too long": (
        "B16",
        KineticSpins,
        "mean",
        lambda self, state: 1.01 * self._radial(state).value * state,
    ),
    "B16: entropy of the couplings, not of their asymmetry": (
        "B16",
        KineticSpins,
        "entropy_production",
        lambda self, state: self.coupling.square().sum(),
    ),
    "B21: spins that are independent": ("B21", SphericalSpins, "saddle_point", _correlations_of_means),
}
