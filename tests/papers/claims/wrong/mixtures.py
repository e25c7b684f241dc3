"""Wrong mixtures, cumulants and attention maps."""

import torch
from torch import Tensor

from massieu.measures import Atoms, ConjugatePrior, Gaussian, Laplace, Spin, boosting
from massieu.measures.mixture import Mixture
from massieu.papers.claims.shim import boosting as boosting_claims

_MEAN = Atoms._mean
_LAPLACE = Laplace._cumulant
_PRIOR = ConjugatePrior._cumulant
_HEADS = Mixture.lower_bound


def _heads_of_equal_weight(self: Mixture, eta: Tensor, weights: Tensor | None = None) -> Tensor:
    return _HEADS(self, eta, torch.softmax(0 * self.log_weight, -1))


def _one_sided(self: Laplace, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Each side with probability ½, the tilt only in the sizes."""
    size = torch.empty((2, *shape, *eta.shape), dtype=eta.dtype).exponential_(generator=generator)
    positive = torch.rand(size.shape[1:], generator=generator) < 0.5
    return torch.where(positive, size[0] / (1 / self.scale - eta), -size[1] / (1 / self.scale + eta))


WRONG = {
    "S14: heads of equal weight": ("S14", Mixture, "lower_bound", _heads_of_equal_weight),
    "S16: a posterior mean one percent off": (
        "S16",
        ConjugatePrior,
        "_cumulant",
        lambda self, eta, order: 1.01 * _PRIOR(self, eta, order),
    ),
    "S17: weights of the wrong sign": (
        "S17",
        boosting_claims,
        "boosting",
        lambda labels, logits, learners: boosting(-labels, logits, learners),
    ),
    "S18: half the covariance": (
        "S18",
        Gaussian,
        "_mean",
        lambda self, eta: self.location + self._covariance_times(eta) / 2,
    ),
    "B2: no domain": ("B2", Laplace, "_in_domain", lambda self, eta: None),
    "B3: the published cumulants of Laplace": (
        "B3",
        Laplace,
        "_cumulant",
        lambda self, eta, order: _LAPLACE(self, eta, order) / 2,
    ),
    "B9: a Laplace unit that is positive half of the time": ("B9", Laplace, "_sample", _one_sided),
    "B19: an output that is no gradient": ("B19", Atoms, "_mean", lambda self, eta: _MEAN(self, eta).roll(1, -1)),
    "X8: −A for the entropy": ("X8", Spin, "_entropy", lambda self, eta: -self._log_partition(eta)),
}
