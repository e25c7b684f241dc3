"""How far draws may lie from their expectation: the quantiles against SciPy's, and what chance makes of right claims."""

import math

import pytest
import torch
from scipy import stats

from massieu.papers.claims.claim import differs, mean_of_draws, near_in_standard_errors, not_below
from massieu.papers.claims.false_alarms import FALSE_ALARM, allowed_distance, binomial_tail, skewness_of_mean


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("numbers", "degrees"),
    [(1, math.inf), (7, math.inf), (1, 19.0), (10, 29.0), (1, 99.0), (5, 5e3), (1, 1e6)],
)
def test_the_distance_is_a_quantile(numbers: int, degrees: float):
    law = stats.norm() if math.isinf(degrees) else stats.t(degrees)
    allowed = allowed_distance(numbers, degrees)
    assert allowed.false_alarm == pytest.approx(2 * numbers * law.sf(allowed.distance), rel=1e-9)
    # In steps of a hundredth.
    assert 2 * numbers * law.sf(allowed.distance - 0.01) > FALSE_ALARM >= allowed.false_alarm


def test_skewness_allows_more_and_says_where_it_is_too_much():
    symmetric = allowed_distance()
    skewed = allowed_distance(skewness=0.05)
    assert skewed.distance > symmetric.distance
    # Cramér's factor: the two tails are as improbable.
    expected = stats.norm.sf(skewed.distance) * 2 * math.exp(0.05 * skewed.distance**3 / 3)
    assert skewed.false_alarm == pytest.approx(expected, rel=1e-9)
    assert allowed_distance(skewness=0.3).false_alarm > 1e-3
    assert allowed_distance(degrees_of_freedom=99.0, skewness=0.3).false_alarm > 1e-3


def test_the_skewness_of_a_mean():
    # Of an exponential law: 2; n draws show normal noise of √(6/n) or more.
    draws = -torch.rand(100_000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log()
    assert skewness_of_mean(draws) == pytest.approx(2 / math.sqrt(100_000), rel=0.1)
    assert skewness_of_mean(_normal(50)) == 0.0


def test_a_binomial_tail():
    assert binomial_tail(101, 0.26, 51) == pytest.approx(stats.binom.sf(50, 101, 0.26), rel=1e-10)


def test_a_mean_of_draws_has_a_distance_in_standard_errors():
    draws = _normal(40, 3)
    check = mean_of_draws("means and 0", draws, 0.0)
    expected = stats.ttest_1samp(draws.numpy(), 0.0).statistic
    assert check.measured == pytest.approx(abs(expected).max(), rel=1e-12)
    assert 6 * stats.t.sf(check.bound, 39) == pytest.approx(check.false_alarm, rel=1e-9)
    assert check.basis == "Student's law, 39 degrees of freedom, 3 numbers"
    assert not mean_of_draws("means and 2", draws, 2.0).holds
    assert mean_of_draws("means and 2, but for a bias", draws, 2.0, bias=2.0).holds


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_not_a_number_meets_no_bound(broken: float):
    draws = _normal(40)
    draws[0] = broken
    assert not mean_of_draws("mean", draws, 0.0).holds
    assert not near_in_standard_errors("number", broken, 0.0, 1.0).holds


def test_one_side_and_away():
    draws = _normal(1000)
    assert not_below("above", draws + 1, 0.0).holds
    assert not_below("at it", draws, 0.0).holds
    assert not not_below("below", draws - 1, 0.0).holds
    assert differs("away", draws + 1, 0.0, 1.0).holds
    assert differs("away", draws + 1, 0.0, 1.0).false_alarm < 1e-30
    # Six standard errors away: as often nearer as a normal number is below −(6 − 5.2).
    near = differs("near", draws + 6 / math.sqrt(1000), 0.0, 6 / math.sqrt(1000))
    assert near.false_alarm == pytest.approx(0.2, rel=0.5)
    assert not differs("not away", draws, 0.0, 1.0).holds
    # The same at another origin.
    moved = differs("near", draws + 40 + 6 / math.sqrt(1000), 40.0, 40 + 6 / math.sqrt(1000))
    assert moved.false_alarm == pytest.approx(near.false_alarm, rel=1e-6)


def test_right_claims_pass_as_often_as_they_say():
    # 20,000 means of 30 normal draws: the level is 2e-7 each, and the least improbable of them is not beyond its law.
    draws = _normal(20_000, 30)
    distances = draws.mean(1).abs() / (draws.std(1) / math.sqrt(30))
    assert distances.max() < allowed_distance(1, 29.0).distance
    assert distances.max() > stats.t.isf(0.5 / 200, 29)
