"""Measures on signs, bits and counts."""

from typing import Any, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import check_range
from massieu.foundation.numerics import second_phi_series
from massieu.measures import listed
from massieu.measures.coordinates import Coordinates, checked_parameters, magnitude
from massieu.measures.deviance import log_poisson
from massieu.measures.hooks import Listed, Reference
from massieu.measures.moments import centred_log_mean_exp

_COUNTABLE = 2.0**60


class _TwoValued(Coordinates):
    """Coordinates with two values, which eta shifts the log-odds of."""

    @property
    def _reference(self) -> Reference:
        return "counting"

    def _local(self, eta: Tensor) -> Tensor:
        return eta + self._align(self._first, eta)

    def _log_odds(self, eta: Tensor) -> Tensor:
        low, high = self._bounds
        return (high - low) * self._local(eta)

    def _cumulant(self, eta: Tensor, order: int) -> Tensor:
        low, high = self._bounds
        value = (high - low) ** order * _bit_cumulant(self._log_odds(eta), order)
        return low + value if order == 1 else value

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        low, high = self._bounds
        half = 0.5 * (high - low)
        return _sign_kl(half * self._local(eta), half * delta).sum(-1)

    def _tilt(self, eta: Tensor) -> Any:
        make: Any = type(self)
        return make(self._local(eta))

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        low, high = self._bounds
        probability = torch.sigmoid(self._log_odds(eta)).expand(*shape, *eta.shape)
        return low + (high - low) * torch.bernoulli(probability, generator=generator)

    def _holds(self, point: Tensor) -> Tensor:
        low, high = self._bounds
        return (point == low) | (point == high)

    def _nearest(self, point: Tensor) -> Tensor:
        low, high = self._bounds
        nearest = torch.where(2 * point < low + high, low, high)
        return torch.where(point.isnan(), point, nearest.to(point.dtype))

    def _log_prob_each(self, eta: Tensor, point: Tensor) -> Tensor:
        return F.logsigmoid((2 * point - sum(self._bounds)) * self._local(eta))

    def _listed(self) -> Listed | None:
        return listed.independent(self._first.new_tensor(self._bounds), self)


class Spin(_TwoValued):
    """Independent ±1 coordinates, P(x_i = ±1) ∝ exp(±field_i).

    A(eta) = Σ log cosh(eta_i + field_i) − log cosh(field_i). Without a field these are fair signs: A = Σ log cosh
    eta_i, ∇A = tanh eta (S2). A and its derivatives are finite and right at 0 and at the largest finite eta alike.

    Attributes:
        field: Half the log-odds of +1, shape (*batch, d).

    Example:
        >>> from massieu.measures import Spin
        >>> round(Spin.create(dim=1).mean([0.5]).item(), 4)  # tanh(0.5)
        0.4621
    """

    field: Float[Tensor, "*batch d"]
    _bounds = (-1.0, 1.0)

    @classmethod
    def create(cls, field: Float[Tensor, "*batch d"] | float = 0.0, *, dim: int | None = None) -> Self:
        """Spins in a given field; ``Spin.create(dim=5)`` are five fair signs. See `Measure` for what is taken and raised."""
        return cls(*checked_parameters(dim, field=field))

    def _log_partition_each(self, eta: Tensor) -> Tensor:
        field = self._align(self.field, eta)
        local = eta + field
        start, end = magnitude(field), magnitude(local)
        # |eta + field| − |field| without cancellation where both have one sign.
        rise = torch.where((local < 0) == (field < 0), torch.where(field < 0, -eta, eta), end - start)
        return rise + F.softplus(-2 * end) - F.softplus(-2 * start)

    def _cumulant(self, eta: Tensor, order: int) -> Tensor:
        return torch.tanh(self._local(eta)) if order == 1 else super()._cumulant(eta, order)

    def _natural_each(self, mu: Tensor) -> Tensor:
        return torch.atanh(mu) - self._align(self.field, mu)


class Bernoulli(_TwoValued):
    """Independent bits, P(x_i = 1) = σ(logit_i).

    A(eta) = Σ log(1 − p_i + p_i exp eta_i), ∇A = σ(eta + logit) (S2, B3). Right at 0 and at the largest finite eta.

    Attributes:
        logit: Log-odds of 1, shape (*batch, d).

    Example:
        >>> from massieu.measures import Bernoulli
        >>> bit = Bernoulli.create(0.5)
        >>> bit.mean([0.0]).tolist(), bit.fisher([0.0]).tolist()
        ([0.5], [[0.25]])
    """

    logit: Float[Tensor, "*batch d"]
    _bounds = (0.0, 1.0)

    @classmethod
    def create(cls, probability: Float[Tensor, "*batch d"] | float, *, dim: int | None = None) -> Self:
        """Bits of a probability strictly between 0 and 1 (a certain bit is a `Constant`); raises what `Measure` says."""
        (probability,) = checked_parameters(dim, probability=probability)
        check_range("probability", probability, above=0, below=1)
        return cls(torch.logit(probability))

    @property
    def probability(self) -> Float[Tensor, "*batch d"]:
        """P(x = 1)."""
        return torch.sigmoid(self.logit)

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

    def _natural_each(self, mu: Tensor) -> Tensor:
        return torch.logit(mu) - self._align(self.logit, mu)


class Poisson(Coordinates):
    """Independent counts: A(eta) = Σ rate_i (exp eta_i − 1), ∇A = rate·exp eta; all cumulants are equal (S2, B3).

    As a hidden layer it makes no normalisable machine with real-valued visible units (B2).

    Attributes:
        rate: Mean count, shape (*batch, d).

    Example:
        >>> from massieu.measures import Poisson
        >>> Poisson.create(2.0).cumulants([0.0], [1.0], 4).tolist()  # all equal
        [2.0, 2.0, 2.0, 2.0]
    """

    rate: Float[Tensor, "*batch d"]
    _bounds = (0.0, torch.inf)

    @classmethod
    def create(cls, rate: Float[Tensor, "*batch d"] | float, *, dim: int | None = None) -> Self:
        """Counts of the given mean; see `Measure` for what is taken and raised."""
        return cls(*checked_parameters(dim, rate=rate, positive=True))

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
        small, mean = delta.abs() < 0.5, self._cumulant(eta, 1)
        infinite = mean.isinf()
        held = torch.where(infinite, 1.0, mean)
        near = torch.where(small, delta, 0.0)
        series = held * (near.square() * second_phi_series(near))
        far = torch.where(small, 1.0, delta)
        # rate·exp(eta)·(exp(delta) − 1 − delta), where one factor may be too large and the other too small to hold.
        difference = self._cumulant(eta + far, 1) - held * (1 + far)
        divergence = torch.where(small, series, difference)
        return torch.where(infinite & (delta != 0), torch.inf, divergence).sum(-1)

    def _tilt(self, eta: Tensor) -> "Poisson":
        return Poisson(self._cumulant(eta, 1))

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        mean = self._cumulant(eta, 1).expand(*shape, *eta.shape)
        countable = mean < _COUNTABLE
        counts = torch.poisson(torch.where(countable, mean, 0.0), generator=generator)
        if bool(countable.all()):
            return counts
        # torch.poisson counts in int64 and wraps. Here a normal variable differs by less than 1e-9 in probability.
        noise = torch.randn(mean.shape, dtype=mean.dtype, device=mean.device, generator=generator)
        drawn = torch.where(mean.isinf(), mean, mean + mean.sqrt() * torch.where(mean.isinf(), 0.0, noise))
        return torch.where(countable, counts, drawn.round())

    def _holds(self, point: Tensor) -> Tensor:
        return (point >= 0) & (point == point.floor()) & point.isfinite()

    def _nearest(self, point: Tensor) -> Tensor:
        return point.round().clamp_min(0)

    def _log_prob_each(self, eta: Tensor, point: Tensor) -> Tensor:
        return log_poisson(point, self._cumulant(eta, 1), eta + self._align(self.rate, eta).log())

    def _natural_each(self, mu: Tensor) -> Tensor:
        return torch.log(mu) - torch.log(self._align(self.rate, mu))

    def _power(self, exponent: float) -> "Poisson":
        return Poisson(exponent * self.rate)


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
    return torch.where(large, difference, centred_log_mean_exp(torch.stack([up, down], -1), centred))
