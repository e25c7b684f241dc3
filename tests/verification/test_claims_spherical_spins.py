"""Claims on spins notice what is wrong."""

import pytest
import torch
from tests.support.rows import every_row
from tests.support.verification.small import SMALL

from massieu.energy import KineticIsing, KineticSpins
from massieu.errors import InputError
from massieu.theory import SphericalSpins, large_dimension
from massieu.verification.run import verify

_SADDLE, _ECHO, _NEWTON = SphericalSpins.saddle_point, KineticSpins._echo, large_dimension._newton


def _without_temperature(self, **options):
    found = _SADDLE(self, **options)
    return found._replace(mean=self.scale * found.mean)


def _correlations_of_means(self, **options):
    found = _SADDLE(self, **options)
    return found._replace(transverse=torch.diag_embed(found.transverse.diagonal(dim1=-2, dim2=-1)))


def _own_gamma(self, state, before, field):
    """Every spin's own covariance in place of the others'."""
    return torch.stack([_ECHO(self, state, row.expand_as(before), field)[i] for i, row in enumerate(before)])


WRONG = {
    "B15: ∂log Z/∂h for the mean": ("B15", SphericalSpins, "saddle_point", _without_temperature),
    "B15: no minimum": (
        "B15",
        large_dimension,
        "_newton",
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
    "B16: half the echo": ("B16", KineticSpins, "_echo", lambda self, *given: 0.5 * _ECHO(self, *given)),
    "B16: no echo of binary spins": ("B16", KineticIsing, "_echo", lambda self, *given: 0 * given[0]),
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


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_model_fails_its_claim(case: str, monkeypatch: pytest.MonkeyPatch):
    id, owner, name, replacement = WRONG[case]
    monkeypatch.setattr(owner, name, replacement)
    assert verify(id, settings=SMALL.get(id))[0].verdict == "fails"


@every_row(("id", "settings"), [("B15", {"spins": 1}), ("B16", {"components": 2}), ("B21", {"spins": 1})])
def test_too_few_to_check_anything(id: str, settings: dict[str, int]):
    with pytest.raises(InputError, match="must be at least"):
        verify(id, settings=settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("id", "settings"),
    [
        ("B15", {"spins": 20, "components": 3, "scale": 2.0, "strength": 1.5}),
        ("B15", {"spins": 2, "components": 2, "scale": 0.1, "strength": 0.2}),
        ("B16", {"spins": 3, "components": 3, "scale": 0.5}),
        ("B16", {"spins": 10, "components": 30, "scale": 2.0}),
        ("B21", {"spins": 5, "components": 10, "scale": 2.0}),
    ],
)
def test_the_claim_holds_for_other_settings(id: str, settings: dict[str, int]):
    assert verify(id, settings=settings)[0].verdict == "holds"


@pytest.mark.medium
def test_the_reconstructed_forms_fail():
    for id in ("B15", "B16"):
        rows = [check for check in verify(id, settings=SMALL.get(id))[0].checks if check.form == "published"]
        assert rows
        assert not any(check.holds for check in rows)
