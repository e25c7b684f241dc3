"""The claims on spin models notice wrong equations."""

import pytest
import torch

from massieu.energy import adaptive, sites, spins
from massieu.errors import InputError
from massieu.verification.run import verify

_TAP, _FIELD, _EQUATIONS = spins._tap, spins._mean_field, adaptive._equations
_NORMAL = sites.Normal.tilted


def _echo_of_the_wrong_sign(eta, model):
    return 2 * _FIELD(eta, model) - _TAP(eta, model)


def _half_the_reaction(point, law, coupling):
    moved = _EQUATIONS(point, law, coupling)
    return torch.cat([moved[..., :1], 0.5 * moved[..., 1:]], -1)


def _variance_that_does_not_change(self, field, curvature):
    """The Onsager term by itself, as a feed-forward layer would have it."""
    return _NORMAL(self, field, torch.zeros_like(curvature))


WRONG = {
    "B13: TAP without the Onsager term": ("B13", spins, "_tap", _FIELD),
    "B13: the Onsager term of the wrong sign": ("B13", spins, "_tap", _echo_of_the_wrong_sign),
    "B13: both orders of a pair in the field": ("B13", spins, "_mean_field", lambda eta, model: 2 * _FIELD(eta, model)),
    "B13: half of V": ("B13", adaptive, "_equations", _half_the_reaction),
    "B14: half of V": ("B14", adaptive, "_equations", _half_the_reaction),
    "B14: V in the field alone": ("B14", sites.Normal, "tilted", _variance_that_does_not_change),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_equation_fails_its_claim(case: str, monkeypatch: pytest.MonkeyPatch):
    id, owner, name, replacement = WRONG[case]
    monkeypatch.setattr(owner, name, replacement)
    assert verify(id)[0].verdict == "fails"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("id", "settings"),
    [
        ("B13", {"spins": 3}),
        ("B13", {"spins": 12}),
        ("B14", {"spins": 2, "size": 1}),
        ("B14", {"spins": 20, "size": 4}),
    ],
)
def test_the_claim_holds_for_other_settings(id: str, settings: dict[str, int]):
    assert verify(id, settings=settings)[0].verdict == "holds"


@pytest.mark.parametrize(("id", "settings"), [("B13", {"spins": 2}), ("B14", {"spins": 1})])
def test_too_few_to_check_anything(id: str, settings: dict[str, int]):
    with pytest.raises(InputError, match="must be at least"):
        verify(id, settings=settings)
