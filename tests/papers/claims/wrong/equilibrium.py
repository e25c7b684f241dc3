"""What is wrong of the equilibrium theorem: alignment, expansion, renormalisation, rates."""

from collections.abc import Callable
from typing import Any

import torch

from massieu.measures import Atoms
from massieu.papers.claims.bridges import expansion as bridges
from massieu.papers.claims.shim import equilibrium, expansion, finite_keys, precision
from massieu.population import Renormalisation, TraceRenormalisation

_ALIGNMENT = precision.precision_alignment
_EXPANSION = bridges.expansion
_MEAN = Atoms._mean
_FACTOR = TraceRenormalisation._factor
_RATE = finite_keys.rate


def _with_its_own_inverse(score: Any, covariance: Any, *, power: float = -1.0, **keywords: Any) -> Any:
    return _ALIGNMENT(score, covariance, power=-power, **keywords)


def _share_of_the_draws(*arguments: Any, **keywords: Any) -> Any:
    """The share of the draws that reach the cosine, which may be 0, in place of a p-value."""
    alignment = _ALIGNMENT(*arguments, **keywords)
    return alignment._replace(share=float((alignment.null >= alignment.cosine).double().mean()))


def _a_triangular_root(self: Renormalisation, covariance: torch.Tensor) -> torch.Tensor:
    root = torch.linalg.cholesky(covariance)
    target_root = torch.linalg.cholesky(self.covariance)
    return target_root @ torch.linalg.inv(root)


def _half_of_the_divergence(*arguments: Any) -> Any:
    result = _EXPANSION(*arguments)
    return result._replace(bregman=result.bregman / 2)


def _one_more_order(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda order, *rest: function(order + 1, *rest)


WRONG = {
    "S11: the inverse power": ("S11", precision, "precision_alignment", _with_its_own_inverse),
    "S11: a p-value of 0": ("S11", precision, "precision_alignment", _share_of_the_draws),
    "S12: a mean map that is not monotone": ("S12", Atoms, "_mean", lambda self, eta: -_MEAN(self, eta)),
    "S12: the gain of half a step": (
        "S12",
        expansion,
        "entropy_gain",
        lambda keys, step: equilibrium.entropy_gain(keys, step / 2),
    ),
    "S13: a triangular root": ("S13", Renormalisation, "matrix", _a_triangular_root),
    "S13: no renormalisation": (
        "S13",
        Renormalisation,
        "matrix",
        lambda self, covariance: torch.eye(len(covariance), dtype=covariance.dtype),
    ),
    "S13: a trace not held": (
        "S13",
        TraceRenormalisation,
        "_factor",
        lambda self, covariance: 1.1 * _FACTOR(self, covariance),
    ),
    "S13: LayerNorm that keeps the mean": (
        "S13",
        equilibrium.activations,
        "LayerNorm",
        equilibrium.activations.RMSNorm,
    ),
    "S13: harmonics of the next degree": (
        "S13",
        equilibrium,
        "harmonic_growth",
        _one_more_order(equilibrium.harmonic_growth),
    ),
    "S15: errors that fall as 1/N": (
        "S15",
        finite_keys,
        "rate",
        lambda sizes, errors: _RATE(sizes, errors / torch.tensor(sizes, dtype=torch.float64)[:, None] ** 0.5),
    ),
    "X6: half the divergence": ("X6", bridges, "expansion", _half_of_the_divergence),
    "X7: the growth of the next order": ("X7", bridges, "cumulant_growth", _one_more_order(bridges.cumulant_growth)),
    "X7: a population that does not move": (
        "X7",
        bridges,
        "measured_cumulant_growth",
        lambda *arguments: torch.ones((), dtype=torch.float64),
    ),
}
