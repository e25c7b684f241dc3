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

_LARGEST_COUNTED_MEAN = 2.0**60
"""Means of Poisson variables that `torch.poisson` can draw: it counts in int64."""


class _TwoValued(Coordinates):
    """Independent coordinates with the two values `_bounds`; eta is added to the first field, the local field of h."""

    @property
    def _reference(self) -> Reference:
        return "counting"

    def _local_field(self, eta: Tensor) -> Tensor:
        return eta + self._align(self._first, eta)

    def _log_odds(self, eta: Tensor) -> Tensor:
        """Log-odds of the higher value under p_eta."""
        low, high = self._bounds
        return (high - low) * self._local_field(eta)

    def _cumulant(self, eta: Tensor, order: int) -> Tensor:
        low, high = self._bounds
        value = (high - low) ** order * _bit_cumulant(self._log_odds(eta), order)
        return low + value if order == 1 else value

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        low, high = self._bounds
        # Signs of the same log-odds, which are twice the field of a sign.
        half = 0.5 * (high - low)
        field = half * self._local_field(eta)
        change = half * delta
        return _sign_kl(field, field + change, change).sum(-1)

    def _kl_to(self, eta: Tensor, other: Tensor, delta: Tensor) -> Tensor:
        low, high = self._bounds
        half = 0.5 * (high - low)
        fields = half * self._local_field(eta), half * self._local_field(other)
        return _sign_kl(*fields, half * delta).sum(-1)

    def _tilt(self, eta: Tensor) -> Any:
        constructor: Any = type(self)
        return constructor(self._local_field(eta))

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
        # 2x − low − high is ±(high − low): plus the log-odds at the higher value, minus them at the lower.
        return F.logsigmoid((2 * point - sum(self._bounds)) * self._local_field(eta))

    def _listed(self) -> Listed | None:
        return listed.grid(self._first.new_tensor(self._bounds), self)


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
        # log cosh t = |t| + softplus(−2|t|) − log 2, so that A = |end| − |start| + a difference of softplus.
        field = self._align(self.field, eta)
        local_field = eta + field
        start = magnitude(field)
        end = magnitude(local_field)
        # If both fields have one sign, |eta + field| − |field| is ±eta, without cancellation.
        same_sign = (local_field < 0) == (field < 0)
        rise = torch.where(same_sign, torch.where(field < 0, -eta, eta), end - start)
        return rise + F.softplus(-2 * end) - F.softplus(-2 * start)

    def _cumulant(self, eta: Tensor, order: int) -> Tensor:
        if order == 1:
            return torch.tanh(self._local_field(eta))
        return super()._cumulant(eta, order)

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
        is_small = eta.abs() < 1
        # log(1 + p(exp eta − 1)), which is exact for small eta.
        small = torch.where(is_small, eta, 0.0)
        small_value = torch.log1p(torch.sigmoid(logit) * torch.expm1(small))
        # Otherwise softplus(eta + logit) − softplus(logit), by softplus t = max(0, t) + softplus(−|t|).
        large = torch.where(is_small, 1.0, eta)
        log_odds = large + logit
        # max(0, eta + logit) − max(0, logit), which is eta without cancellation if both are positive.
        rise_from_negative = torch.where(log_odds < 0, 0.0, log_odds)
        rise_from_positive = torch.where(log_odds < 0, -logit, large)
        rise = torch.where(logit < 0, rise_from_negative, rise_from_positive)
        large_value = rise + F.softplus(-magnitude(log_odds)) - F.softplus(-magnitude(logit))
        return torch.where(is_small, small_value, large_value)

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
        is_small = eta.abs() < 1
        # Not expm1 throughout: torch computes its derivative as expm1 + 1, which loses the digits of a small exponential.
        growth = torch.where(is_small, torch.expm1(torch.where(is_small, eta, 0.0)), torch.exp(eta) - 1)
        return self._align(self.rate, eta) * growth

    def _cumulant(self, eta: Tensor, order: int) -> Tensor:
        return self._align(self.rate, eta) * torch.exp(eta)

    def _kl(self, eta: Tensor, delta: Tensor) -> Tensor:
        return self._divergence(eta, eta + delta, delta)

    def _kl_to(self, eta: Tensor, other: Tensor, delta: Tensor) -> Tensor:
        return self._divergence(eta, other, delta)

    def _divergence(self, eta: Tensor, other: Tensor, delta: Tensor) -> Tensor:
        """The mean λ of p_eta times φ(delta), φ(δ) = exp δ − 1 − δ."""
        is_small = delta.abs() < 0.5
        mean = self._cumulant(eta, 1)
        overflows = mean.isinf()
        finite_mean = torch.where(overflows, 1.0, mean)
        small = torch.where(is_small, delta, 0.0)
        series = finite_mean * (small.square() * second_phi_series(small))
        # λ·exp δ is computed as the mean at eta + delta: one of the two factors may overflow and the other underflow.
        large = torch.where(is_small, 1.0, delta)
        difference = self._cumulant(torch.where(is_small, eta + 1.0, other), 1) - finite_mean * (1 + large)
        divergence = torch.where(is_small, series, difference)
        return torch.where(overflows & (delta != 0), torch.inf, divergence).sum(-1)

    def _tilt(self, eta: Tensor) -> "Poisson":
        return Poisson(self._cumulant(eta, 1))

    def _sample(self, eta: Tensor, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        mean = self._cumulant(eta, 1).expand(*shape, *eta.shape)
        is_counted = mean < _LARGEST_COUNTED_MEAN
        counts = torch.poisson(torch.where(is_counted, mean, 0.0), generator=generator)
        if bool(is_counted.all()):
            return counts
        # torch.poisson counts in int64 and would wrap. A normal variable differs by less than 1e-9 in probability here.
        noise = torch.randn(mean.shape, dtype=mean.dtype, device=mean.device, generator=generator)
        normal = torch.where(mean.isinf(), mean, mean + mean.sqrt() * torch.where(mean.isinf(), 0.0, noise))
        return torch.where(is_counted, counts, normal.round())

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
    """The cumulant of a bit of the given log-odds, of order 1 to 6: κ_{n+1} = p(1 − p) dκ_n/dp (B3)."""
    mean = torch.sigmoid(logit)
    if order == 1:
        return mean
    # With v = p(1 − p), even cumulants are polynomials in v: v, v(1 − 6v), v(1 − 30v + 120v²). The odd ones are
    # v(1 − 2p) and v(1 − 2p)(1 − 12v), where 1 − 2p = −tanh(logit/2).
    variance = mean * torch.sigmoid(-logit)
    factors = (1.0, 1.0, 1 - 6 * variance, 1 - 12 * variance, 1 - 30 * variance + 120 * variance**2)
    polynomial = variance * factors[order - 2]
    if order % 2 == 1:
        return -torch.tanh(0.5 * logit) * polynomial
    return polynomial


def _sign_kl(field: Tensor, other: Tensor, delta: Tensor) -> Tensor:
    """KL divergence between signs in the fields `field` and `other`, delta apart: bits of twice those log-odds.

    Where log-odds differ by more than 1 it is a Bregman difference, which then loses no more than a digit, and below the
    log-mean of the ratio of the two laws. The difference reads `other` by itself: its derivative there, which may be far
    larger than that in `field`, is not added to the latter.
    """
    # By symmetry the field is negative: +1 is the rarer sign, and exponentials are small.
    is_negative = field < 0
    rarer = -magnitude(field)
    moved = torch.where(is_negative, other, -other)
    change = torch.where(is_negative, delta, -delta)
    is_large = change.abs() > 0.5
    # The threshold is 40, as from the default of 20 on torch takes softplus for linear: too early for float64.
    level = F.softplus(2 * moved, threshold=40)
    difference = level - F.softplus(2 * rarer) - 2 * (change * torch.sigmoid(2 * rarer))
    # change·(x − mean) at x = ±1 is 2·change·P(−1) and −2·change·P(+1), which keep their digits in the tails.
    rarer = torch.where(is_large, 0.0, rarer)
    change = torch.where(is_large, 0.0, change)
    log_up = F.logsigmoid(2 * rarer)
    log_down = F.logsigmoid(-2 * rarer)
    centred = torch.stack([2 * (change * log_down.exp()), -2 * (change * log_up.exp())], -1)
    return torch.where(is_large, difference, centred_log_mean_exp(torch.stack([log_up, log_down], -1), centred))
