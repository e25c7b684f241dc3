"""Slopes with their intervals: known power laws, and what must not pass."""

import pytest
import torch

from massieu.verification.rates import Rate, has_rate, rate

SIZES = [16, 32, 64, 128, 256, 512]


def errors(exponent: float, repetitions: int = 400, seed: int = 0) -> torch.Tensor:
    normal = torch.randn(len(SIZES), repetitions, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return normal * torch.tensor(SIZES, dtype=torch.float64)[:, None] ** exponent


def test_exact_power_law_has_its_exponent_and_no_width():
    exact = torch.tensor(SIZES, dtype=torch.float64)[:, None].expand(-1, 20) ** -0.4
    found = rate(SIZES, exact)
    assert found.slope == pytest.approx(-0.4, abs=1e-12)
    assert found.high - found.low < 1e-12


def test_interval_has_the_error_of_the_slope():
    # Var log rms of n normals is 1/(2n), and the slope is linear in the six of them.
    x = torch.tensor(SIZES, dtype=torch.float64).log()
    expected = 1.96 * (0.5 / 400 / (x - x.mean()).square().sum()).sqrt().item()
    found = rate(SIZES, errors(-0.5))
    assert (found.high - found.low) / 2 == pytest.approx(expected, rel=0.15)


def test_interval_covers_nineteen_times_in_twenty():
    found = [rate(SIZES, errors(-0.5, 60, seed)) for seed in range(1, 101)]
    covered = sum(r.low <= -0.5 <= r.high for r in found)
    assert covered >= 86  # binomial with 95 %: four standard deviations


def test_another_exponent_and_a_useless_interval_fail():
    assert has_rate("right", rate(SIZES, errors(-0.5)), -0.5).holds
    assert not has_rate("wrong", rate(SIZES, errors(-0.5)), -0.8).holds
    assert not has_rate("vague", Rate(-0.5, -0.8, -0.2), -0.5).holds


def test_too_little_is_refused():
    with pytest.raises(ValueError, match="20 or more"):
        rate(SIZES, errors(-0.5, 19))
    with pytest.raises(ValueError, match="octaves"):
        rate([1, 2, 4], torch.ones(3, 20))
