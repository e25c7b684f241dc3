"""Cumulants and transport distances of projections, against SciPy, quadrature and exact laws."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from tests.support.rows import every_row

from massieu.population import CloudShape
from massieu.population.cloud_shape import (
    gaussian_cumulant_spread,
    gaussian_distance_null,
    projected_cumulants,
    random_directions,
    squared_gaussian_distance,
)


def draws(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def directions(dimension, count=5, seed=1):
    return random_directions(dimension, count, generator=torch.Generator().manual_seed(seed))


@every_row("tokens", [4, 5, 30])
def test_cumulants_are_ratios_of_scipys_k_statistics(tokens):
    points = draws(tokens, 3).exp() + 40
    lines = directions(3, 40)  # more than a block
    result = projected_cumulants(points, 3 * lines)
    along = ((points - points.mean(0)) @ lines.T).numpy()  # SciPy's powers lose digits off centre
    k2, k3, k4 = (np.array([stats.kstat(column, order) for column in along.T]) for order in (2, 3, 4))
    np.testing.assert_allclose(result.third, k3 / k2**1.5, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(result.fourth, k4 / k2**2, rtol=1e-8, atol=1e-9)


@every_row("tokens", [4, 9, 50])
def test_spreads_of_gaussian_tokens(tokens):
    repetitions = 20_000
    result = projected_cumulants(draws(repetitions, tokens, 1, seed=tokens), torch.ones(1, 1))
    for each, spread in zip(result, gaussian_cumulant_spread(tokens), strict=True):
        error = each.square().std() / repetitions**0.5
        assert abs(each.square().mean() - spread**2) < 5 * error
        assert abs(each.mean()) < 5 * spread / repetitions**0.5


def by_quadrature(values):
    """∫ (F⁻¹(t) − mean − σΦ⁻¹(t))² dt/σ², share by share."""
    ordered = np.sort(values)
    n = len(values)
    mean = ordered.mean()
    sigma = ordered.std()
    total = 0.0
    for index, value in enumerate(ordered):
        low = special.ndtri(index / n)
        high = special.ndtri((index + 1) / n)
        total += integrate.quad(
            lambda z, value=value: ((value - mean) / sigma - z) ** 2 * stats.norm.pdf(z), low, high, epsabs=1e-13
        )[0]
    return total


@pytest.mark.parametrize("tokens", [2, 3, 17])
def test_the_distance_is_the_integral_over_quantiles(tokens):
    points = draws(tokens, 2).exp() - 30
    lines = directions(2)
    result = squared_gaussian_distance(points, lines)
    expected = [by_quadrature(column) for column in (points @ lines.T).T.numpy()]
    np.testing.assert_allclose(result, expected, rtol=1e-8, atol=1e-10)


def test_the_distance_of_many_gaussian_quantiles_vanishes():
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    quantiles = torch.special.ndtri(grid).unsqueeze(-1)
    assert 0 <= squared_gaussian_distance(quantiles, torch.ones(1, 1))[0] < 1e-4
    uniform = squared_gaussian_distance(grid.unsqueeze(-1), torch.ones(1, 1))[0]
    # Of the uniform law on [0, 1]: 2 − 2√12 ∫ tΦ⁻¹(t) dt = 2 − 2√12/(2√π).
    assert uniform.item() == pytest.approx(2 - math.sqrt(12 / math.pi), abs=1e-3)


def exact_null(tokens):
    """By order statistics: distance and scale are independent (Basu), so that a ratio's mean is a ratio of means."""
    edge = np.arange(tokens + 1) / tokens
    density = stats.norm.pdf(special.ndtri(edge))
    share = density[:-1] - density[1:]
    best = 0.0
    for index in range(tokens):
        law = stats.beta(index + 1, tokens - index)
        mean = integrate.quad(lambda z, law=law: z * law.pdf(stats.norm.cdf(z)) * stats.norm.pdf(z), -9, 9)[0]
        best += mean * share[index]
    deviation = math.sqrt(2 / tokens) * math.exp(math.lgamma(tokens / 2) - math.lgamma((tokens - 1) / 2))
    return 2 - 2 * best / deviation


@pytest.mark.medium
@pytest.mark.parametrize("tokens", [2, 5])
def test_the_null_is_that_of_order_statistics(tokens):
    mean, error = gaussian_distance_null(tokens)
    assert abs(mean - exact_null(tokens)) <= 5 * error + 1e-9
    assert gaussian_distance_null(tokens) == (mean, error)


@pytest.mark.medium
def test_gaussian_tokens_are_at_their_nulls_and_others_are_not():
    lines = CloudShape(projections=64)
    gaussian = lines(draws(2000, 6) @ draws(6, 6, seed=4))
    heavy = lines(draws(2000, 6).exp())
    for name, reading in gaussian.items():
        assert reading.value < 1.5 * reading.null, name
        assert heavy[name].value > 2 * reading.null, name
    assert gaussian["third_cumulant"].value > 0.5 * gaussian["third_cumulant"].null


def test_batches_are_their_items_whatever_dtype_location_and_scale():
    points = draws(2, 3, 40, 4)
    lines = directions(4)
    for function in (squared_gaussian_distance, lambda *given: projected_cumulants(*given).fourth):
        whole = function(points, lines)
        assert whole.shape == (2, 3, 5)
        torch.testing.assert_close(whole[1, 2], function(points[1, 2], lines))
        torch.testing.assert_close(function(1e3 * points - 50, lines), whole, atol=1e-9, rtol=1e-9)
        half = points.bfloat16()
        torch.testing.assert_close(function(half, lines), function(half.double(), lines))


def test_collapsed_and_broken_clouds():
    points = torch.stack([torch.full((9, 3), 0.1).double(), draws(9, 3)])
    points = torch.cat([points, points[1:].clone()])
    points[2, 4, 1] = math.nan
    result = [squared_gaussian_distance(points, directions(3)), *projected_cumulants(points, directions(3))]
    for each in result:
        assert (each[0] == 0).all()
        assert each[1].isfinite().all()
        assert each[2].isnan().all()
    assert squared_gaussian_distance(draws(1, 3), directions(3)).tolist() == [0] * 5


def test_bad_calls():
    with pytest.raises(ValueError, match="at least 4 tokens, got 3"):
        projected_cumulants(draws(3, 2), directions(2))
    with pytest.raises(ValueError, match=r"shape \(m, 2\) for points \(3, 2\), got \(5, 3\)"):
        squared_gaussian_distance(draws(3, 2), directions(3))
    with pytest.raises(ValueError, match="tokens must be a whole number, at least 4, got 3"):
        gaussian_cumulant_spread(3)
    with pytest.raises(ValueError, match="tokens must be a whole number, at least 1, got 0"):
        gaussian_distance_null(0)
    with pytest.raises(ValueError, match="count must be a whole number, at least 1, got 0"):
        directions(3, 0)
    with pytest.raises(TypeError, match="floating-point"):
        squared_gaussian_distance(torch.ones(3, 2, dtype=torch.int64), directions(2))


@every_row("size", [1e-150, 1e-30, 1.0, 1e30, 1e150])
def test_cumulants_and_distances_know_no_scale(size):
    generator = torch.Generator().manual_seed(5)
    cloud = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    directions = random_directions(3, 7, generator=generator)
    along = (cloud @ directions.T).numpy()
    result = projected_cumulants(size * cloud, directions)
    k2, k3, k4 = (torch.tensor([stats.kstat(column, order) for column in along.T]) for order in (2, 3, 4))
    torch.testing.assert_close(result.third, k3 / k2**1.5, atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(result.fourth, k4 / k2.square(), atol=1e-11, rtol=1e-11)
    distance = squared_gaussian_distance(size * cloud, directions)
    torch.testing.assert_close(distance, squared_gaussian_distance(cloud, directions), atol=1e-12, rtol=0.0)


def test_rounding_has_no_shape():
    """Tokens on a line across a direction fall on one point of it, but for the rounding of inner products."""
    line = torch.linspace(0, 1, 9, dtype=torch.float64)
    cloud = torch.stack([line, 3 * line], -1)
    across = torch.tensor([[3.0, -1.0]], dtype=torch.float64) / math.sqrt(10)
    result = projected_cumulants(cloud, across)
    assert result.third.item() == result.fourth.item() == squared_gaussian_distance(cloud, across).item() == 0


def test_the_error_over_directions_is_the_jackknifes():
    """Of the root of a mean over directions, each left out in turn."""
    points = draws(200, 6).exp()
    lines = random_directions(6, 64, generator=torch.Generator().manual_seed(0))
    squares = projected_cumulants(points, lines).third.square().numpy()
    count = len(squares)
    left_out = np.sqrt((squares.sum() - squares) / (count - 1))
    jackknife = math.sqrt((count - 1) / count * np.square(left_out - left_out.mean()).sum())
    reading = CloudShape(projections=count, seed=0)(points)["third_cumulant"]
    assert reading.standard_error is not None
    # The slope of the root stands for its differences, which are of the order 1/count.
    assert abs(float(reading.standard_error) / jackknife - 1) < 2 / math.sqrt(count)
