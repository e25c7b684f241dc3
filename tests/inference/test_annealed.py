"""Annealed importance sampling and sequential Monte Carlo against normalisers in closed form."""

import math

import pytest
import scipy.stats
import torch
from tests.support.rows import every_row, some_slow

from massieu.inference import anneal

MEAN, DEVIATION = torch.tensor([1.5, -1.0]).double(), torch.tensor([0.6, 0.4]).double()
LOG_RATIO = DEVIATION.log().sum().item()  # of the normalisers of exp(−½((x − m)/σ)²) and exp(−½x²)


def path(position, t):
    """From the standard normal to another Gaussian, geometrically: every density on the way is a Gaussian."""
    start, end = -0.5 * position.square().sum(-1), -0.5 * ((position - MEAN) / DEVIATION).square().sum(-1)
    return (1 - t) * start + t * end


def move(position, t, generator):
    """Autoregressive, exact for the Gaussian at t."""
    precision = (1 - t) + t / DEVIATION.square()
    mean = t * MEAN / DEVIATION.square() / precision
    noise = torch.randn(position.shape, generator=generator, dtype=position.dtype)
    keep = 0.8
    return mean + keep * (position - mean) + math.sqrt(1 - keep**2) * noise / precision.sqrt()


def stay(position, t, generator):
    return position


def run(seed, particles=100, **keywords):
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(particles, 2, generator=generator, dtype=torch.float64)
    return anneal(start, path, move, generator=generator, **keywords)


@pytest.mark.medium
@some_slow(
    "keywords",
    [
        {},
        {"groups": 20},
        {"groups": 20, "threshold": 1.0},
    ],
    1,
)
def test_the_error_is_honest_over_many_runs(keywords):
    runs = 60
    found = [run(seed, particles=400, schedule=8, **keywords) for seed in range(runs)]
    log_z, error = (torch.stack([getattr(r, name) for r in found]) for name in ("log_partition", "standard_error"))
    # Student's 95 % intervals cover, as a binomial count allows at 99.9 %.
    reach = scipy.stats.t.ppf(0.975, keywords.get("groups", 400) - 1)
    low, high = scipy.stats.binom.interval(0.999, runs, 0.95)
    assert low <= ((log_z - LOG_RATIO).abs() < reach * error).sum() <= high
    # The estimate of Z is unbiased.
    ratio = (log_z - LOG_RATIO).exp()
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / math.sqrt(runs)


def test_resampling_within_a_group_alone():
    """Groups are independent: what happens in one does not depend on the others' weights."""
    start = torch.tensor([0.0, 1.0, 10.0, 11.0])

    def only_even(position, t):
        return torch.where((position[:, 0] % 2 == 0) | (t == 0), 0.0, -math.inf)

    found = anneal(start[:, None], only_even, stay, schedule=1, groups=2, threshold=1.0)
    assert found.position.flatten().tolist() == [0.0, 0.0, 10.0, 10.0]
    assert torch.isclose(found.log_partition, torch.tensor(0.5).log())
    assert found.history.t.tolist() == [1.0]
    assert found.history.resampled.tolist() == [2]
    assert found.history.effective_sample_size.tolist() == [2.0]


def test_more_temperatures_less_error():
    few, many = run(0, schedule=3, particles=1000), run(0, schedule=50, particles=1000)
    assert many.standard_error < 0.5 * few.standard_error
    assert many.effective_sample_size > few.effective_sample_size


def test_one_step_is_importance_sampling():
    start = torch.randn(500, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = anneal(start, path, stay, schedule=1)
    ratio = (path(start, 1.0) - path(start, 0.0)).exp()
    assert torch.isclose(found.log_partition, ratio.mean().log())
    error = ratio.std() / ratio.mean() / math.sqrt(500)
    assert torch.isclose(found.standard_error, error)
    assert torch.allclose(found.log_weight.exp(), ratio / ratio.sum())


def test_weighted_particles_are_a_sample():
    found = run(1, particles=5000, schedule=10)
    weights = found.log_weight.exp()
    mean = weights @ found.position
    variance = weights @ (found.position - mean).square()
    error = 5 * DEVIATION / found.effective_sample_size.sqrt()
    assert ((mean - MEAN).abs() < error).all()
    assert ((variance - DEVIATION.square()).abs() < error * math.sqrt(2) * DEVIATION).all()


def test_the_same_generator_gives_the_same_numbers():
    assert run(5, groups=10).log_partition == run(5, groups=10).log_partition


def test_no_weight_at_all_is_an_error():
    nowhere = lambda position, t: torch.full((len(position),), -math.inf if t else 0.0)  # noqa: E731
    for groups in (None, 2):
        with pytest.raises(ValueError, match="no particle has any weight"):
            anneal(torch.zeros(4, 1), nowhere, stay, schedule=2, groups=groups)


def test_a_point_outside_the_support_has_weight_zero():
    start = torch.tensor([[0.5], [2.0], [0.25], [3.0]])

    def box(position, t):
        return torch.where(position[:, 0] < 1, 0.0, -math.inf) if t == 1 else torch.zeros(len(position))

    found = anneal(start, box, stay, schedule=1)
    assert torch.isclose(found.log_partition, torch.tensor(0.5).log())
    assert (found.log_weight.exp() == torch.tensor([0.5, 0, 0.5, 0])).all()


@every_row(
    ("call", "message"),
    [
        (lambda: run(0, particles=1), "at least two groups .* got 1 and 1"),
        (lambda: run(0, particles=6, groups=4), "got 4 and 6"),
        (lambda: run(0, schedule=[0.5, 0.4, 1.0]), "schedule must rise"),
        (lambda: run(0, schedule=[0.5]), "schedule must rise"),
        (lambda: run(0, schedule=[0.5, 1.0, 1.5]), "schedule must rise"),
        (lambda: run(0, schedule=[math.nan, 1.0]), "schedule must rise"),
        (lambda: run(0, schedule=0), "schedule must rise"),
        (lambda: run(0, threshold=1.5), "threshold .* got 1.5"),
        (lambda: anneal(torch.full((3, 2), math.nan), path, move), "NaN"),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_more_steps_than_are_ever_done_are_refused(monkeypatch):
    monkeypatch.setattr("massieu.inference.annealed.MOST", 5)
    with pytest.raises(ValueError, match=r"schedule must be a whole number, .*5, got 6"):
        run(0, schedule=6)
