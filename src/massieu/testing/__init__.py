"""Conformance suites: named checks for your own measure, energy, activation, operator, posterior or kernel.

`measure_checks`, `energy_checks`, `activation_checks`, `operator_checks`, `posterior_checks` and `kernel_checks` take a case,
the object beside points and independent oracles, and return pairs of a name and a check. None of them needs pytest or SciPy.

Of measures, laws are grouped by theme: `derivatives`, `divergence`, `distribution` (density, samples, support), `inverse`
(mean to natural parameter, the boundary), `edges` (emptiness, no values), `batching` and `precision`. What all the other
contracts share is in `everywhere`.
"""

from massieu.testing.activations import ActivationCase, activation_checks
from massieu.testing.energies import EnergyCase, energy_checks
from massieu.testing.kernels import KernelCase, kernel_checks
from massieu.testing.measures import measure_checks
from massieu.testing.operators import OperatorCase, operator_checks
from massieu.testing.posteriors import PosteriorCase, posterior_checks
from massieu.testing.subject import MeasureCase

__all__ = [
    "ActivationCase",
    "EnergyCase",
    "KernelCase",
    "MeasureCase",
    "OperatorCase",
    "PosteriorCase",
    "activation_checks",
    "energy_checks",
    "kernel_checks",
    "measure_checks",
    "operator_checks",
    "posterior_checks",
]


def __dir__() -> list[str]:
    return __all__
