"""Wrong exponential families."""

import torch

from massieu.measures import Atoms, Exponential, Gaussian, Poisson, Spin


def _uncentred(self, eta):
    weights = self._log_probability(eta).exp()
    return (weights.unsqueeze(-1) * self.points).mT @ self.points


def _too_wide(self, eta, shape, generator):
    return 1.05 * _SAMPLE(self, eta, shape, generator)


def _spread(self, eta, shape, generator):
    mean = self._mean(eta)
    return mean + 1.2 * (_SAMPLE(self, eta, shape, generator) - mean)


def _swapped(self, eta, delta):
    return _KL(Spin(self.field + delta), eta, -delta)


_SAMPLE = Gaussian._sample
_KL = Spin._kl
_MEAN = Atoms._mean

WRONG = {
    "S1: no domain": ("S1", Exponential, "_in_domain", lambda self, eta: None),
    "S2: a sampler five percent too wide": ("S2", Gaussian, "_sample", _too_wide),
    "S2: a sampler of the right mean that spreads too far": ("S2", Gaussian, "_sample", _spread),
    "S2: a density without its constant": (
        "S2",
        Poisson,
        "_log_prob_each",
        lambda self, eta, x: eta * x - torch.lgamma(x + 1) - self._log_partition_each(eta),
    ),
    "S3: an output one percent too large": ("S3", Atoms, "_mean", lambda self, eta: 1.01 * _MEAN(self, eta)),
    "S4: a tilt the wrong way": ("S4", Spin, "_tilt", lambda self, eta: Spin(self.field - eta)),
    "S5: half the covariance": ("S5", Gaussian, "_mean", lambda self, eta: self.location + self._covariance_times(eta) / 2),
    "S7: arguments in the published order": ("S7", Spin, "_kl", _swapped),
    "S10: uncentred": ("S10", Atoms, "_fisher", _uncentred),
    "S25: an entropy that sees the origin": ("S25", Atoms, "_entropy", lambda self, eta: self._log_partition(eta)),
}  # fmt: skip
