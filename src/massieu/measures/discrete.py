"""Measures on signs, bits, counts and categories."""

from typing import Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from massieu.measures import stable
from massieu.measures.base import Measure, values_are_readable
from massieu.measures.coordinates import Coordinates, check_floating, check_parameters, in_words, magnitude
from massieu.measures.hooks import Reference
from massieu.measures.moments import cumulants_of_moments


class Spin(Coordinates):
    """Independent ±1 coordinates, P(x_i = ±1) ∝ exp(±field_i).

    A(eta) = Σ log cosh(eta_i + field_i) − log cosh(field_i). Without a field these are fair signs: A = Σ log cosh
    eta_i, ∇A = tanh eta (S2). A and its derivatives are finite and right at 0 and at the largest finite eta alike.

    Attributes:
        field: Half the log-odds of +1, shape (*batch, d).
    """

    field: Float[Tensor, "*batch d"]

    @classmethod
    def create(cls, field: Float[Tensor, "*batch d"] | int) -> Self:
        """Spins in a given field, or, from a dimension, that many fair signs.

        Raises:
            ValueError: no coordinate, or a field that is not finite.
            TypeError: a field that is not floating-point.
        """
        if isinstance(field, int):
            if field < 1:
                raise ValueError(f"Spin needs at least one coordinate, got {field}")
            return cls(torch.zeros(field))
        check_parameters(field=field)
        return cls(field)

    @property
    def _reference(self) -> Reference:
        return "counting"

    def _local_field(self, eta: Tensor) -> Tensor:
        return eta + self._align(self.field, eta)

    def _log_partition_each(self, eta: Tensor) -> Tensor:
        field = self._align(self.field, eta)
        local = eta + field
        start, end = magnitude(field), magnitude(local)
        # |eta + field| − |field| without cancellation where both have one sign.
        rise = torch.where((local < 0) == (field < 0), torch.where(field < 0, -eta, eta), end - start)
        return rise + F.softplus(-2 * end) - F.softplus(-2 * start)

    def _cumulant(self, eta: Tensor, order: int) -> Tensor:
        local = self._local_field(eta)
        return torch.tanh(local) if order == 1 else 2**order * _bit_cumulant(2 * local, order)

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        return _sign_kl(self._local_field(eta), delta).sum(-1)

    def _tilt(self, eta: Tensor) -> "Spin":
        return Spin(self._local_field(eta))

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        probability = torch.sigmoid(2 * self._local_field(eta)).expand(*shape, *eta.shape)
        return 2 * torch.bernoulli(probability, generator=generator) - 1

    def _range(self) -> tuple[Tensor, Tensor]:
        return torch.full_like(self.field, -1), torch.ones_like(self.field)

    def _holds(self, point: Tensor) -> Tensor:
        return point.abs() == 1

    def _log_density_each(self, point: Tensor) -> Tensor:
        return F.logsigmoid(2 * point * self._align(self.field, point))

    def _natural_each(self, mu: Tensor) -> Tensor:
        return torch.atanh(mu) - self._align(self.field, mu)


class Bernoulli(Coordinates):
    """Independent bits, P(x_i = 1) = σ(logit_i).

    A(eta) = Σ log(1 − p_i + p_i exp eta_i), ∇A = σ(eta + logit) (S2, B3). Right at 0 and at the largest finite eta.

    Attributes:
        logit: Log-odds of 1, shape (*batch, d).
    """

    logit: Float[Tensor, "*batch d"]

    @classmethod
    def create(cls, probability: Float[Tensor, "*batch d"]) -> Self:
        """Bits that are 1 with the given probability, strictly between 0 and 1 (a certain bit is a `Constant`).

        Raises:
            ValueError: no coordinate, or a probability that is not between 0 and 1.
            TypeError: a probability that is not floating-point.
        """
        check_parameters(probability=probability)
        if values_are_readable(probability) and not bool(((probability > 0) & (probability < 1)).all()):
            raise ValueError(f"probability must lie strictly between 0 and 1, got {in_words(probability)}")
        return cls(torch.logit(probability))

    @property
    def probability(self) -> Float[Tensor, "*batch d"]:
        """P(x = 1)."""
        return torch.sigmoid(self.logit)

    @property
    def _reference(self) -> Reference:
        return "counting"

    def _local_logit(self, eta: Tensor) -> Tensor:
        return eta + self._align(self.logit, eta)

    def _log_partition_each(self, eta: Tensor) -> Tensor:
        logit = self._align(self.logit, eta)
        near = eta.abs() < 1
        small = torch.where(near, eta, 0.0)
        close = torch.log1p(torch.sigmoid(logit) * torch.expm1(small))
        eta = torch.where(near, 1.0, eta)
        local = eta + logit
        # max(0, eta + logit) − max(0, logit) without cancellation where both have one sign.
        rise = torch.where(logit < 0, torch.where(local < 0, 0.0, local), torch.where(local < 0, -logit, eta))
        far = rise + F.softplus(-magnitude(local)) - F.softplus(-magnitude(logit))
        return torch.where(near, close, far)

    def _cumulant(self, eta: Tensor, order: int) -> Tensor:
        return _bit_cumulant(self._local_logit(eta), order)

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        return _sign_kl(0.5 * self._local_logit(eta), 0.5 * delta).sum(-1)

    def _tilt(self, eta: Tensor) -> "Bernoulli":
        return Bernoulli(self._local_logit(eta))

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        probability = torch.sigmoid(self._local_logit(eta)).expand(*shape, *eta.shape)
        return torch.bernoulli(probability, generator=generator)

    def _range(self) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(self.logit), torch.ones_like(self.logit)

    def _holds(self, point: Tensor) -> Tensor:
        return (point == 0) | (point == 1)

    def _log_density_each(self, point: Tensor) -> Tensor:
        return F.logsigmoid((2 * point - 1) * self._align(self.logit, point))

    def _natural_each(self, mu: Tensor) -> Tensor:
        return torch.logit(mu) - self._align(self.logit, mu)


class Poisson(Coordinates):
    """Independent counts: A(eta) = Σ rate_i (exp eta_i − 1), ∇A = rate·exp eta; all cumulants are equal (S2, B3).

    As a hidden layer it makes no normalisable machine with real-valued visible units (B2).

    Attributes:
        rate: Mean count, shape (*batch, d).
    """

    rate: Float[Tensor, "*batch d"]

    @classmethod
    def create(cls, rate: Float[Tensor, "*batch d"]) -> Self:
        """Counts of the given mean.

        Raises:
            ValueError: no coordinate, or a rate that is not positive and finite.
            TypeError: a rate that is not floating-point.
        """
        check_parameters(rate=rate, positive=True)
        return cls(rate)

    @property
    def _reference(self) -> Reference:
        return "counting"

    def _log_partition_each(self, eta: Tensor) -> Tensor:
        small = eta.abs() < 1
        # The derivative of expm1 is computed as expm1 + 1, which loses the digits of a small exponential.
        growth = torch.where(small, torch.expm1(torch.where(small, eta, 0.0)), torch.exp(eta) - 1)
        return self._align(self.rate, eta) * growth

    def _cumulant(self, eta: Tensor, order: int) -> Tensor:
        return self._align(self.rate, eta) * torch.exp(eta)

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        small = delta.abs() < 0.5
        series = self._cumulant(eta, 1) * stable.phi_series(torch.where(small, delta, 0.0))
        far = torch.where(small, 1.0, delta)
        # rate·exp(eta)·(exp(delta) − 1 − delta), where one factor may be too large and the other too small to hold.
        difference = self._cumulant(eta + far, 1) - self._cumulant(eta, 1) * (1 + far)
        return torch.where(small, series, difference).sum(-1)

    def _tilt(self, eta: Tensor) -> "Poisson":
        return Poisson(self._cumulant(eta, 1))

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return torch.poisson(self._cumulant(eta, 1).expand(*shape, *eta.shape), generator=generator)

    def _range(self) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(self.rate), torch.full_like(self.rate, torch.inf)

    def _holds(self, point: Tensor) -> Tensor:
        return (point >= 0) & (point == point.floor()) & point.isfinite()

    def _log_density_each(self, point: Tensor) -> Tensor:
        rate = self._align(self.rate, point)
        return torch.xlogy(point, rate) - rate - torch.lgamma(point + 1)

    def _natural_each(self, mu: Tensor) -> Tensor:
        return torch.log(mu) - torch.log(self._align(self.rate, mu))

    def _power(self, exponent: float) -> "Poisson":
        return Poisson(exponent * self.rate)


class Categorical(Measure):
    """One of M categories as a one-hot vector: A(eta) = log Σ π_m exp eta_m, ∇A = softmax(eta + log π) (S2).

    The family is not minimal: adding a constant to eta changes nothing but A. Attention over orthonormal keys.

    Attributes:
        log_probability: log π, shape (*batch, M), with Σ π = 1; −inf leaves a category out.
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
            ValueError: both or none given, no category, a negative or NaN entry, probabilities that do not sum to 1, or
                all categories left out.
            TypeError: not floating-point.
        """
        if (probability is None) == (logits is None):
            raise ValueError("Categorical needs exactly one of probability and logits")
        name, given = ("logits", logits) if probability is None else ("probability", probability)
        assert given is not None
        check_floating(name, given)
        if given.ndim == 0 or given.shape[-1] == 0:
            raise ValueError(f"{name} must have shape (*batch, M) with M ≥ 1, got {tuple(given.shape)}")
        if values_are_readable(given):
            if probability is not None:
                _check_probability(probability)
            elif not bool((given < torch.inf).all() & (given > -torch.inf).any(-1).all()):
                raise ValueError("logits must be finite or −inf, with a finite one in every row")
        return cls(stable.log_softmax(given if probability is None else given.log()))

    @property
    def probability(self) -> Float[Tensor, "*batch M"]:
        """π."""
        return self.log_probability.exp()

    @property
    def batch_shape(self) -> torch.Size:
        return self.log_probability.shape[:-1]

    @property
    def event_shape(self) -> torch.Size:
        return self.log_probability.shape[-1:]

    @property
    def _reference(self) -> Reference:
        return "counting"

    def _scores(self, eta: Tensor) -> Tensor:
        return eta + self._align(self.log_probability, eta)

    def _log_share(self, eta: Tensor) -> Tensor:
        """The log-probabilities under p_eta."""
        return stable.log_softmax(self._scores(eta))

    def _log_partition(self, eta: Tensor) -> Tensor:
        return stable.logsumexp(self._scores(eta))

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
        return stable.logsumexp(self._align(self.log_probability, eta)) - self._kl(eta, -eta)

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        log_share = self._log_share(eta)
        return stable.centred_log_mean_exp(log_share, _centred(log_share, delta))

    def _tilt(self, eta: Tensor) -> "Categorical":
        return Categorical(self._log_share(eta))

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        share, count = self._mean(eta), torch.Size(shape).numel()
        chosen = torch.multinomial(share.reshape(-1, share.shape[-1]), count, replacement=True, generator=generator)
        return F.one_hot(chosen.T.reshape(*shape, *eta.shape[:-1]), share.shape[-1]).to(eta.dtype)

    def _support(self, direction: Tensor) -> Tensor:
        kept = self._align(self.log_probability, direction) > -torch.inf
        return torch.where(kept, direction, -torch.inf).amax(-1)

    def _log_density(self, point: Tensor) -> Tensor:
        log_probability = self._align(self.log_probability, point)
        one_hot = ((point == 0) | (point == 1)).all(-1) & (point.sum(-1) == 1)
        density = torch.where(point == 1, log_probability, 0.0).sum(-1)
        return torch.where(one_hot, density, -torch.inf)

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
    if not bool((probability >= 0).all()):
        raise ValueError("probability must not be negative or NaN")
    total = probability.detach().double().sum(-1)
    if not bool(((total - 1).abs() <= torch.finfo(probability.dtype).eps ** 0.5).all()):
        worst = total.flatten()[(total - 1).abs().argmax()]
        raise ValueError(f"probability must sum to 1 over the last dimension, got a sum of {float(worst):.6g}")


def _centred(log_share: Tensor, values: Tensor) -> Tensor:
    """values − Σ p values; the likeliest category's value is taken off first, to keep the digits as its p tends to 1."""
    values = values - values.gather(-1, log_share.argmax(-1, keepdim=True))
    return values - (log_share.exp() * values).sum(-1, keepdim=True)


def _bit_cumulant(logit: Tensor, order: int) -> Tensor:
    """The cumulant of a bit of the given log-odds: κ_{n+1} = p(1 − p) dκ_n/dp (B3)."""
    mean = torch.sigmoid(logit)
    if order == 1:
        return mean
    variance = mean * torch.sigmoid(-logit)
    factors = (1.0, 1.0, 1 - 6 * variance, 1 - 12 * variance, 1 - 30 * variance + 120 * variance**2)
    even = variance * factors[order - 2]
    return -torch.tanh(0.5 * logit) * even if order % 2 else even


def _sign_kl(field: Tensor, delta: Tensor) -> Tensor:
    """KL divergence between signs in `field` and in `field + delta`, or bits of twice those log-odds.

    From 1/4 on as a difference, on the side where the exponentials are small; else as the log-mean of the ratio.
    """
    rarer, change = -magnitude(field), torch.where(field < 0, delta, -delta)
    moved = F.softplus(2 * (rarer + change), threshold=40)  # not linear from 20 on, as by default
    difference = moved - F.softplus(2 * rarer) - 2 * (change * torch.sigmoid(2 * rarer))
    large = difference > 0.25
    rarer, change = torch.where(large, 0.0, rarer), torch.where(large, 0.0, change)
    up, down = F.logsigmoid(2 * rarer), F.logsigmoid(-2 * rarer)
    # change·(x − mean), in forms that keep their digits in the tails.
    centred = torch.stack([2 * (change * down.exp()), -2 * (change * up.exp())], -1)
    return torch.where(large, difference, stable.centred_log_mean_exp(torch.stack([up, down], -1), centred))
