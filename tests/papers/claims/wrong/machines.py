"""Wrong Boltzmann machines."""

import torch

from massieu.energy import BoltzmannMachine, boltzmann
from massieu.measures import Bernoulli, Exponential, Gaussian, Laplace, Spin
from massieu.papers.claims.bal import learning

_ENERGY = BoltzmannMachine.energy
_COUPLINGS = BoltzmannMachine.couplings
_VISIBLE = BoltzmannMachine.sample_visible
_SWEEP = learning.gibbs_step
_DIVERGENCE = learning.contrastive_divergence
_BITS = Bernoulli._sample


def _energy_of_other_sign(self, visible, hidden):
    return _ENERGY(self, visible, -hidden)


def _one_layer_swept(state, sample_visible, sample_hidden, generator, *, steps=1):
    """Visible units that are never drawn anew."""
    return state._replace(hidden=sample_hidden(state.visible, generator))


def _couplings_without_skewness(self, order):
    couplings = _COUPLINGS(self, order)
    if order >= 3:
        couplings[2] = 0 * couplings[2]
    return couplings


WRONG = {
    "B1: couplings of the other sign": ("B1", BoltzmannMachine, "energy", _energy_of_other_sign),
    "B1: machines without a normaliser": ("B1", boltzmann, "why_not_normalisable", lambda *machine: None),
    "B1: half of the Gaussian term": (
        "B1",
        Gaussian,
        "_log_prob",
        lambda self, eta, point: -0.25 * ((point - self.location).square() / self.covariance).sum(-1),
    ),
    "B8: half of the field": (
        "B8",
        BoltzmannMachine,
        "sample_visible",
        lambda self, hidden, generator=None: _VISIBLE(self, 0.5 * hidden, generator),
    ),
    "B8: one layer that stands still": ("B8", learning, "gibbs_step", _one_layer_swept),
    "B8: the gradient's other sign": (
        "B8",
        learning,
        "contrastive_divergence",
        lambda energy, data, sample: -_DIVERGENCE(energy, data, sample),
    ),
    "B8: bits too often on": (
        "B8",
        Bernoulli,
        "_sample",
        lambda self, eta, shape, generator: _BITS(self, eta + 0.5, shape, generator),
    ),
    "B8: a mean of another prior": (
        "B8",
        Exponential,
        "_cumulant",
        lambda self, eta, order: Laplace(1 / self.rate)._cumulant(eta, order),
    ),
    "B10: no third order": ("B10", BoltzmannMachine, "couplings", _couplings_without_skewness),
    "B10: spins with the variance of bits": (
        "B10",
        Spin,
        "_log_partition_each",
        lambda self, eta: torch.nn.functional.softplus(eta),
    ),
}
