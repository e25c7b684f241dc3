"""Conformance suites: named checks for your own measure, energy, activation, operator, posterior, kernel or statistic.

`measure_checks`, `energy_checks`, `activation_checks`, `operator_checks`, `posterior_checks`, `kernel_checks` and
`statistic_checks` take a case (the object, points and independent oracles) and return pairs of a name and a check. None of
them needs pytest or SciPy.

The laws of measures are grouped by theme: `derivatives`, `divergence`, `distribution` (density, samples, support), `inverse`
(mean to natural parameter, the boundary), `edges` (empty tensors, no values), `batching` and `precision`. Laws that all the
other contracts share are in `everywhere`.
"""

from typing import TYPE_CHECKING, Any

from massieu.foundation.lazy_names import lazy_names
from massieu.testing.activations import ActivationCase, activation_checks
from massieu.testing.energies import EnergyCase, energy_checks
from massieu.testing.kernels import KernelCase, kernel_checks
from massieu.testing.measures import measure_checks
from massieu.testing.operators import OperatorCase, operator_checks
from massieu.testing.posteriors import PosteriorCase, posterior_checks
from massieu.testing.subject import MeasureCase

if TYPE_CHECKING:
    StatisticCase: Any
    statistic_checks: Any

__all__ = [
    "ActivationCase",
    "EnergyCase",
    "KernelCase",
    "MeasureCase",
    "OperatorCase",
    "PosteriorCase",
    "StatisticCase",
    "activation_checks",
    "energy_checks",
    "kernel_checks",
    "measure_checks",
    "operator_checks",
    "posterior_checks",
    "statistic_checks",
]

# Statistics belong to the probe, which this room does not import: it is loaded when these two names are first used.
__getattr__, __dir__ = lazy_names(
    __name__,
    __all__,
    {
        "StatisticCase": "massieu.probing.statistic_checks:StatisticCase",
        "statistic_checks": "massieu.probing.statistic_checks:statistic_checks",
    },
)
