"""Slopes with their intervals: known power laws, and what must not pass."""

import math

import pytest
import torch
from scipy import stats

from massieu.errors import InputError
from massieu.papers.claims.rates import RATE, Rate, has_exact_rate, has_rate, rate

SIZES = [16, 32, 64, 128, 256, 512]
EXACT = torch.tensor(SIZES, dtype=torch.float64)[:, None].expand(-1, 20) ** -0.4


def errors(exponent: float, repetitions: int = 400, seed: int = 0) -> torch.Tensor:
    normal = torch.randn(len(SIZES), repetitions, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return normal.abs() * torch.tensor(SIZES, dtype=torch.float64)[:, None] ** exponent


def test_exact_power_law_has_its_exponent():
    check = has_exact_rate("exact", SIZES, EXACT, -0.4)
    assert check.measured == pytest.approx(0.0, abs=1e-12)
    assert check.false_alarm == 0.0
    # One case of another exponent among many is enough.
    assert not has_exact_rate("one is off", SIZES, torch.cat([EXACT, EXACT[:, :1] ** 2], 1), -0.4).holds


def test_the_interval_has_the_error_of_the_slope():
    # Var log|x| of a normal number is π²/8, and the slope is linear in the six means.
    position = torch.tensor(SIZES, dtype=torch.float64).log()
    error = (math.pi**2 / 8 / 400 / (position - position.mean()).square().sum()).sqrt().item()
    estimate = rate(SIZES, errors(-0.5))
    assert estimate.half_width == pytest.approx(stats.t.isf(1e-7, estimate.degrees_of_freedom) * error, rel=0.1)
    # Repetitions that spread alike: nearly six times as many degrees of freedom, less for the ends' greater weights.
    assert 3 * 399 < estimate.degrees_of_freedom < 6 * 399


def test_the_slope_lies_within_its_error():
    # In standard errors its square has the mean 1 over seeds: 200 of them, five standard errors of a mean of χ²₁.
    estimates = [rate(SIZES, errors(-0.5, 60, seed)) for seed in range(200)]
    quantile = stats.t.isf(1e-7, estimates[0].degrees_of_freedom)
    squares = [(quantile * (estimate.slope + 0.5) / estimate.half_width) ** 2 for estimate in estimates]
    assert sum(squares) / 200 == pytest.approx(1.0, abs=5 * math.sqrt(2 / 200))


def test_heavy_tails_do_not_move_the_slope():
    # |x|³ of normal numbers has squares of infinitely many digits to average: its logarithm is three times log|x|.
    estimate = rate(SIZES, errors(0.0).pow(3) * torch.tensor(SIZES, dtype=torch.float64)[:, None] ** -0.5)
    assert abs(estimate.slope + 0.5) < estimate.half_width


def test_another_exponent_and_a_useless_interval_fail():
    assert has_rate("right", rate(SIZES, errors(-0.5, 1000)), -0.5).holds
    assert not has_rate("wrong", rate(SIZES, errors(-0.5, 1000)), -0.75).holds
    with pytest.raises(InputError, match=r"slope of 'vague' to ±0.3 only, and ±0.1 is needed; take more"):
        has_rate("vague", Rate(-0.5, 0.3, 1e-7, 100.0), -0.5)
    near = has_rate("near", Rate(-0.5 - RATE, 0.05, 1e-7, 100.0), -0.5)
    assert near.holds
    assert (near.false_alarm, near.basis) == (1e-7, "slope, Student's law, 100 degrees of freedom")


def test_too_little_is_refused():
    with pytest.raises(ValueError, match="20 or more"):
        rate(SIZES, errors(-0.5, 19))
    with pytest.raises(ValueError, match="octaves"):
        rate([1, 2, 4], torch.ones(3, 20))
