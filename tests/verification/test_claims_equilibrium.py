"""Claims on the equilibrium theorem notice what is wrong, and hold for other settings."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.rows import every_row
from tests.support.verification.small import SMALL

from massieu.errors import InputError
from massieu.measures import Atoms
from massieu.population import Renormalisation, TraceRenormalisation
from massieu.verification.bridges import expansion as bridges
from massieu.verification.run import verify
from massieu.verification.shim import equilibrium, expansion, finite_keys, precision

_ALIGNMENT, _EXPANSION, _MEAN = precision.precision_alignment, bridges.expansion, Atoms._mean
_MATRIX, _SIZE = Renormalisation.matrix, TraceRenormalisation._size


def _with_its_own_inverse(score: Any, covariance: Any, *, power: float = -1.0, **keywords: Any) -> Any:
    return _ALIGNMENT(score, covariance, power=-power, **keywords)


def _a_triangular_root(self: Renormalisation, covariance: torch.Tensor) -> torch.Tensor:
    own, wanted = torch.linalg.cholesky(covariance), torch.linalg.cholesky(self.covariance)
    return wanted @ torch.linalg.inv(own)


def _half_of_the_divergence(*arguments: Any) -> Any:
    found = _EXPANSION(*arguments)
    return found._replace(bregman=found.bregman / 2)


def _one_more_order(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda order, *rest: function(order + 1, *rest)


WRONG = {
    "S11: the inverse power": ("S11", precision, "precision_alignment", _with_its_own_inverse),
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
    "S13: a trace not held": ("S13", TraceRenormalisation, "_size", lambda self, own: 1.1 * _SIZE(self, own)),
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
_RATE = finite_keys.rate


@pytest.mark.medium
@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_fails_its_claim(case: str, monkeypatch: pytest.MonkeyPatch):
    id, owner, name, replacement = WRONG[case]
    monkeypatch.setattr(owner, name, replacement)
    assert verify(id, settings=SMALL.get(id))[0].verdict == "fails"


@every_row(
    ("id", "settings"),
    [
        ("S11", {"dimensions": 1}),
        ("S11", {"tokens": 10}),
        ("S12", {"pairs": 1}),
        ("S13", {"dimensions": 1}),
        ("S13", {"repetitions": 19}),
        ("X6", {"draws": 1}),
    ],
)
def test_too_few_to_check_anything(id: str, settings: dict[str, int]):
    with pytest.raises(InputError, match="must be at least"):
        verify(id, settings=settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("id", "settings"),
    [
        ("S11", {"dimensions": 2, "rank": 2, "heads": 20, "tokens": 40}),
        ("S11", {"dimensions": 24, "rank": 8, "heads": 20}),
        ("S12", {"pairs": 20, "dimensions": 2}),
        ("S12", {"pairs": 50, "dimensions": 12}),
        ("S13", {"dimensions": 2, "repetitions": 200}),
        ("S13", {"dimensions": 12}),
        ("X6", {"draws": 5, "dimensions": 2}),
        ("X6", {"draws": 20, "dimensions": 10}),
    ],
)
def test_the_claim_holds_for_other_settings(id: str, settings: dict[str, int]):
    assert verify(id, settings=settings)[0].verdict == "holds"
