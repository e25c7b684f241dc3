"""The measure on categories."""

from typing import Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import real_tensor
from massieu.foundation.numerics import log_softmax, logsumexp
from massieu.foundation.transforms import all_true, unwrapped
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
        if probability is not None:
            probability = real_tensor("probability", probability)
            _check_categories("probability", probability)
            _check_probability(probability)
            logits = probability.log()
        else:
            logits = real_tensor("logits", logits)
            _check_categories("logits", logits)
            if not all_true((logits < torch.inf).all(-1) & (logits > -torch.inf).any(-1)):
                raise ValueError("logits must be finite or −inf, with a finite one in every row")
        return cls(log_softmax(logits))

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
        # Moments about the mean: those about zero would cancel.
        log_share = self._log_share(eta)
        share = log_share.exp()
        centred = _centred(log_share, direction)
        moments = [(share * centred**n).sum(-1) for n in range(1, order + 1)]
        cumulants = cumulants_of_moments(torch.stack(moments, -1))
        mean = (share * direction).sum(-1, keepdim=True)
        return torch.cat([mean, cumulants[..., 1:]], -1)

    def _entropy(self, eta: Tensor) -> Tensor:
        # −KL(p_eta ‖ h) plus A(0) = log Σ π, which rounding moves off 0.
        return logsumexp(self._align(self.log_probability, eta)) - self._kl(eta, -eta)

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        log_share = self._log_share(eta)
        return centred_log_mean_exp(log_share, _centred(log_share, delta))

    def _tilt(self, eta: Tensor) -> "Categorical":
        return Categorical(self._log_share(eta))

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        share = self._mean(eta)
        count = torch.Size(shape).numel()
        # Draws (rows, count), one row for each eta; transposed, the sample dimensions come first.
        chosen = torch.multinomial(share.reshape(-1, share.shape[-1]), count, replacement=True, generator=generator)
        return F.one_hot(chosen.T.reshape((*shape, *eta.shape[:-1])), share.shape[-1]).to(eta.dtype)

    def _support(self, direction: Tensor) -> Tensor:
        in_support = self._align(self.log_probability, direction) > -torch.inf
        return torch.where(in_support, direction, -torch.inf).amax(-1)

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
        """Σ mu log(mu/π): inside the simplex by the entropy, with derivatives along it; on its faces by the deviances."""
        eta = self._natural(mu)
        is_inside = eta.isfinite().all(-1)
        origin = torch.zeros_like(mu)
        safe_eta = torch.where(is_inside.unsqueeze(-1), eta, origin)
        value = self._fenchel(safe_eta, torch.where(is_inside.unsqueeze(-1), mu, self._mean(origin)))
        # Σ mu log(mu/π) = Σ (mu log(mu/π) + π − mu), of which no term is negative. A category without mu has the term π.
        log_probability = self._align(self.log_probability, mu).expand_as(mu)
        is_positive = (mu > 0) & (log_probability > -torch.inf)
        safe_log_probability = torch.where(is_positive, log_probability, 0.0)
        deviances = deviance(torch.where(is_positive, mu, 1.0), safe_log_probability.exp(), safe_log_probability)
        face_value = torch.where(is_positive, deviances, log_probability.exp()).sum(-1).detach()
        is_outside = eta.isnan().any(-1)
        return torch.where(is_inside, value, torch.where(is_outside, torch.inf, face_value))

    def _natural(self, mu: Tensor) -> Tensor:
        """log(mu/π), centred over the categories of positive mu: the eta of least norm; 0 for categories left out."""
        log_probability = self._align(self.log_probability, mu)
        in_support = (log_probability > -torch.inf).expand_as(mu)
        is_positive = mu > 0
        counts = in_support & is_positive
        rounding = 64 * torch.finfo(mu.dtype).eps * mu.shape[-1] ** 0.5
        sums_to_one = (mu.sum(-1) - 1).abs() <= rounding
        valid = (mu >= 0).all(-1) & ~(is_positive & ~in_support).any(-1) & sums_to_one
        valid = valid.unsqueeze(-1)
        # What the sum exceeds one by is subtracted evenly, so that derivatives are those along the simplex.
        num_counted = counts.sum(-1, keepdim=True).clamp_min(1)
        excess = (torch.where(counts, mu, 0.0).sum(-1, keepdim=True) - 1) / num_counted
        log_mu = torch.where(counts, mu - torch.where(valid, excess, 0.0), 1.0).log()
        log_ratio = log_mu - torch.where(in_support, log_probability, 0.0)
        log_ratio = torch.where(counts, log_ratio, 0.0)
        log_ratio = log_ratio - log_ratio.sum(-1, keepdim=True) / num_counted
        eta = torch.where(counts, log_ratio, torch.where(in_support, -torch.inf, 0.0))
        return torch.where(valid, eta, torch.nan)


def _check_categories(name: str, values: Tensor) -> None:
    if values.ndim == 0 or values.shape[-1] == 0:
        raise ValueError(f"{name} must have shape (*batch, M) with M ≥ 1, got {tuple(values.shape)}")


def _check_probability(probability: Tensor) -> None:
    if not all_true(probability >= 0):
        raise ValueError("probability must not be negative or NaN")
    excess = probability.detach().double().sum(-1) - 1
    if not all_true(excess.abs() <= torch.finfo(probability.dtype).eps ** 0.5):
        worst = max(unwrapped(excess).flatten().tolist(), key=abs)
        raise ValueError(f"probability must sum to 1 over the last dimension, got a sum of {1 + worst:.6g}")


def _centred(log_share: Tensor, values: Tensor) -> Tensor:
    """values − Σ p values; the likeliest category's value is subtracted first, to keep digits as its p tends to 1."""
    values = values - values.gather(-1, log_share.argmax(-1, keepdim=True))
    return values - (log_share.exp() * values).sum(-1, keepdim=True)
