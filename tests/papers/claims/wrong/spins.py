"""Wrong equations of spin models."""

import torch

from massieu.energy import adaptive, sites, spins

_TAP = spins._tap
_FIELD = spins._mean_field
_EQUATIONS = adaptive._equations
_NORMAL = sites.GaussianSites.tilted


def _echo_of_the_wrong_sign(eta, model):
    return 2 * _FIELD(eta, model) - _TAP(eta, model)


def _half_the_reaction(point, law, coupling):
    after = _EQUATIONS(point, law, coupling)
    return torch.cat([after[..., :1], 0.5 * after[..., 1:]], -1)


def _variance_that_does_not_change(self, field, curvature):
    """The Onsager term by itself, as a feed-forward layer would have it."""
    return _NORMAL(self, field, torch.zeros_like(curvature))


WRONG = {
    "B13: TAP without the Onsager term": ("B13", spins, "_tap", _FIELD),
    "B13: the Onsager term of the wrong sign": ("B13", spins, "_tap", _echo_of_the_wrong_sign),
    "B13: both orders of a pair in the field": ("B13", spins, "_mean_field", lambda eta, model: 2 * _FIELD(eta, model)),
    "B13: half of V": ("B13", adaptive, "_equations", _half_the_reaction),
    "B14: half of V": ("B14", adaptive, "_equations", _half_the_reaction),
    "B14: V in the field alone": ("B14", sites.GaussianSites, "tilted", _variance_that_does_not_change),
}
