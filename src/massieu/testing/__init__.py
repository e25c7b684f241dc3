"""The laws every measure obeys, as a check to run on one's own: `check_measure`.

It needs neither pytest nor SciPy. Laws are grouped by theme: `derivatives`, `divergence`, `distribution` (density, samples,
support), `inverse` (mean to natural parameter), `edges` (boundary, emptiness, no values), `batching` and `precision`.
"""

from massieu.testing.activations import ActivationCase, activation_checks
from massieu.testing.check import check_measure
from massieu.testing.energies import EnergyCase, energy_checks
from massieu.testing.kernels import KernelCase, kernel_checks
from massieu.testing.operators import OperatorCase, operator_checks
from massieu.testing.posteriors import PosteriorCase, posterior_checks

__all__ = [
    "ActivationCase",
    "EnergyCase",
    "KernelCase",
    "OperatorCase",
    "PosteriorCase",
    "activation_checks",
    "check_measure",
    "energy_checks",
    "kernel_checks",
    "operator_checks",
    "posterior_checks",
]


def __dir__() -> list[str]:
    return __all__
