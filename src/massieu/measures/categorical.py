"""The measure on categories."""

from typing import Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import real_tensor
from massieu.foundation.numerics import log_softmax, logsumexp
from massieu.foundation.transforms import every, unwrapped
from massieu.measures.base import Measure
from massieu.measures.deviance import deviance
from massieu.measures.hooks import Listed, Reference
from massieu.measures.listed import MOST_LISTED
from massieu.measures.moments import centred_log_mean_exp, cumulants_of_moments


class Categorical(Measure):
    """One of M categories as a one-hot vector: A(eta) = log Σ π_m exp eta_m, ∇A = softmax(eta + log π) (S2).

    The family is not minimal: adding a constant to eta changes nothing but A. Attention over orthonormal keys.

    Attributes:
        log_probability: log π, shape (*batch, M), with Σ π = 1; −inf leaves a category out.

    Example:
        >>> from massieu.measures import Categorical
        >>> Categorical.create([0.5, 0.5]).mean([0.0, 0.0]).tolist()
        [0.5, 0.5]
    """

    log_probability: Float[Tensor, "*batch M"]

    @classmethod
    def create(
        cls, probability: Float[Tensor, "*batch M"] | None = None, *, logits: Float[Tensor, "*batch M"] | None = None
    ) -> Self:
        """A category drawn with the given probabilities, or with softmax(logits).

        Args:
            probability: Not negative, of sum 1; zero leaves a category out.
            logits: Below +inf; −inf leaves a category out.

        Raises:
            ValueError, TypeError: see `Measure`; both or none given, probabilities that are negative or do not sum to 1, or
                all categories left out.
        """
        if (probability is None) == (logits is None):
            raise ValueError("Categorical needs exactly one of probability and logits")
        name, given = ("logits", logits) if probability is None else ("probability", probability)
        assert given is not None
        given = real_tensor(name, given)
        if given.ndim == 0 or given.shape[-1] == 0:
            raise ValueError(f"{name} must have shape (*batch, M) with M ≥ 1, got {tuple(given.shape)}")
        if probability is not None:
            _check_probability(given)
        elif not every((given < torch.inf).all(-1) & (given > -torch.inf).any(-1)):
            raise ValueError("logits must be finite or −inf, with a finite one in every row")
        return cls(log_softmax(given if probability is None else given.log()))

    @property
    def probability(self) -> Float[Tensor, "*batch M"]:
        """π."""
        return self.log_probability.exp()

    @property
    def _reference(self) -> Reference:
        return "counting"

    def _scores(self, eta: Tensor) -> Tensor:
        return eta + self._align(self.log_probability, eta)

    def _log_share(self, eta: Tensor) -> Tensor:
        """The log-probabilities under p_eta."""
        return log_softmax(self._scores(eta))

    def _log_partition(self, eta: Tensor) -> Tensor:
        return logsumexp(self._scores(eta))

    def _mean(self, eta: Tensor) -> Tensor:
        return self._log_share(eta).exp()

    def _fisher_vp(self, eta: Tensor, vector: Tensor) -> Tensor:
        log_share = self._log_share(eta)
        return log_share.exp() * _centred(log_share, vector)

    def _fisher(self, eta: Tensor) -> Tensor:
        share = self._mean(eta)
        products = share.unsqueeze(-1) * share.unsqueeze(-2)
        # p(1 − p) as the sum of the row's other products, which keeps its digits as p tends to 1.
        others = products * (1 - torch.eye(share.shape[-1], dtype=share.dtype, device=share.device))
        return torch.diag_embed(others.sum(-1)) - others

    def _cumulants(self, eta: Tensor, direction: Tensor, order: int) -> Tensor:
        log_share = self._log_share(eta)
        share, centred = log_share.exp(), _centred(log_share, direction)
        moments = [(share * centred**n).sum(-1) for n in range(1, order + 1)]
        about_mean = cumulants_of_moments(torch.stack(moments, -1))
        mean = (share * direction).sum(-1, keepdim=True)
        return torch.cat([mean, about_mean[..., 1:]], -1)

    def _entropy(self, eta: Tensor) -> Tensor:
        # A(0) is the rounding of log Σ π.
        return logsumexp(self._align(self.log_probability, eta)) - self._kl(eta, -eta)

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        log_share = self._log_share(eta)
        return centred_log_mean_exp(log_share, _centred(log_share, delta))

    def _tilt(self, eta: Tensor) -> "Categorical":
        return Categorical(self._log_share(eta))

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        share, count = self._mean(eta), torch.Size(shape).numel()
        chosen = torch.multinomial(share.reshape(-1, share.shape[-1]), count, replacement=True, generator=generator)
        return F.one_hot(chosen.T.reshape((*shape, *eta.shape[:-1])), share.shape[-1]).to(eta.dtype)

    def _support(self, direction: Tensor) -> Tensor:
        kept = self._align(self.log_probability, direction) > -torch.inf
        return torch.where(kept, direction, -torch.inf).amax(-1)

    def _log_density(self, point: Tensor) -> Tensor:
        log_probability = self._align(self.log_probability, point)
        one_hot = ((point == 0) | (point == 1)).all(-1) & (point.sum(-1) == 1)
        density = torch.where(point == 1, log_probability, 0.0).sum(-1)
        return torch.where(one_hot, density, -torch.inf)

    def _log_prob(self, eta: Tensor, point: Tensor) -> Tensor:
        one_hot = ((point == 0) | (point == 1)).all(-1) & (point.sum(-1) == 1)
        chosen = torch.where(point == 1, self._log_share(eta), 0.0).sum(-1)
        return torch.where(one_hot, chosen, -torch.inf)

    def _nearest(self, point: Tensor) -> Tensor:
        return F.one_hot(point.argmax(-1), point.shape[-1]).to(point.dtype)

    def _listed(self) -> Listed | None:
        count = self.event_shape[0]
        if count > MOST_LISTED:
            return None
        one_hot = torch.eye(count, dtype=self.log_probability.dtype, device=self.log_probability.device)
        one_hot = one_hot.expand(*self.batch_shape, count, count)
        return Listed(one_hot, self.log_probability, one_hot)

    def _conjugate(self, mu: Tensor) -> Tensor:
        """Σ mu log(mu/π): on faces by the deviances, none of which is negative; inside as −entropy, along the simplex."""
        eta = self._natural(mu)
        inside = eta.isfinite().all(-1)
        start = torch.zeros_like(mu)
        held = torch.where(inside.unsqueeze(-1), eta, start)
        value = self._fenchel(held, torch.where(inside.unsqueeze(-1), mu, self._mean(start)))
        log_probability = self._align(self.log_probability, mu).expand_as(mu)
        positive = (mu > 0) & (log_probability > -torch.inf)
        known = torch.where(positive, log_probability, 0.0)
        terms = deviance(torch.where(positive, mu, 1.0), known.exp(), known)
        face = torch.where(positive, terms, log_probability.exp()).sum(-1).detach()
        return torch.where(inside, value, torch.where(eta.isnan().any(-1), torch.inf, face))

    def _natural(self, mu: Tensor) -> Tensor:
        """log(mu/π), centred over the categories that mu has: of least norm, and 0 for categories left out."""
        log_probability = self._align(self.log_probability, mu)
        kept, positive = (log_probability > -torch.inf).expand_as(mu), mu > 0
        both = kept & positive
        rounding = 64 * torch.finfo(mu.dtype).eps * mu.shape[-1] ** 0.5
        valid = (mu >= 0).all(-1) & ~(positive & ~kept).any(-1) & ((mu.sum(-1) - 1).abs() <= rounding)
        valid = valid.unsqueeze(-1)
        # A sum other than one is taken off evenly, so that derivatives are those along the simplex.
        count = both.sum(-1, keepdim=True).clamp_min(1)
        excess = (torch.where(both, mu, 0.0).sum(-1, keepdim=True) - 1) / count
        ratio = torch.where(both, mu - torch.where(valid, excess, 0.0), 1.0).log() - torch.where(
            kept, log_probability, 0.0
        )
        ratio = torch.where(both, ratio, 0.0)
        ratio = ratio - ratio.sum(-1, keepdim=True) / count
        eta = torch.where(both, ratio, torch.where(kept, -torch.inf, 0.0))
        return torch.where(valid, eta, torch.nan)


def _check_probability(probability: Tensor) -> None:
    if not every(probability >= 0):
        raise ValueError("probability must not be negative or NaN")
    excess = probability.detach().double().sum(-1) - 1
    if not every(excess.abs() <= torch.finfo(probability.dtype).eps ** 0.5):
        worst = max(unwrapped(excess).flatten().tolist(), key=abs)
        raise ValueError(f"probability must sum to 1 over the last dimension, got a sum of {1 + worst:.6g}")


def _centred(log_share: Tensor, values: Tensor) -> Tensor:
    """values − Σ p values; the likeliest category's value is taken off first, to keep the digits as its p tends to 1."""
    values = values - values.gather(-1, log_share.argmax(-1, keepdim=True))
    return values - (log_share.exp() * values).sum(-1, keepdim=True)
