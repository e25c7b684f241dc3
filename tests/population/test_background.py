"""Draws from tokens and a Gaussian background, beside one set of atoms: the tokens, and the background's quadrature."""

import math

import pytest
import torch
from tests.population import cases
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row
from torch import Tensor

from massieu.measures import Gaussian, MissingFormError
from massieu.population import Flow, ResampledLayer

LAW = cases.law(seed=1)


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layer(log_weight: float = 0.5, background: Gaussian = LAW, **options) -> ResampledLayer:
    generator = torch.Generator().manual_seed(1)
    return ResampledLayer.create(
        generator=generator, background=background, background_log_weight=log_weight, **options
    )


def explicit(points: Tensor, weights: tuple[Tensor, Tensor, Tensor], scale: float, log_weight: float):
    """Weights over the tokens and the nodes of the background, and the values of both."""
    query, key, value = weights
    nodes, mass = cases.hermite(LAW, 32)
    atoms = torch.cat([points, nodes])
    level = torch.cat([torch.zeros(len(points)).double(), mass.log() + log_weight])
    p = torch.softmax(scale * (points @ query.T) @ (atoms @ key.T).T + level, -1)
    return p, atoms @ value.T


MAPS = tuple(0.6 * draws(2, 2, seed=seed) for seed in (4, 5, 6))
OPTIONS = dict(zip(("query_weight", "key_weight", "value_weight"), MAPS, strict=True)) | {"scale": 0.9}


@pytest.mark.parametrize("method", ["multinomial", "systematic"])
def test_draws_have_the_moments_of_the_hybrid_carrier(method):
    points = draws(5, 2)
    repetitions = 4000
    p, values = explicit(points, MAPS, 0.9, 0.5)
    mean = p @ values
    own = layer(**OPTIONS, method=method)
    torch.testing.assert_close(own.attended(points), mean, rtol=1e-7, atol=1e-8)
    result = own(points.expand(repetitions, 5, 2))
    variance = p @ values.square() - mean.square()
    assert ((result.mean(0) - mean).abs() < 5 * (variance / repetitions).sqrt()).all()
    squares = (result - mean).square()
    assert ((squares.mean(0) - variance).abs() < 5 * squares.std(0) / repetitions**0.5).all()


def test_effective_size_and_offspring_count_the_background_last():
    points = draws(5, 2)
    p, _ = explicit(points, MAPS, 0.9, 0.5)
    share = torch.cat([p[:, :5], p[:, 5:].sum(-1, keepdim=True)], -1)
    observed_tokens = layer(**OPTIONS).observed(points)
    torch.testing.assert_close(observed_tokens.background, share[:, -1], rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(observed_tokens.offspring, share.sum(0), rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(observed_tokens.effective_size, 1 / share.square().sum(-1), rtol=1e-7, atol=1e-8)
    assert observed_tokens.ancestors is None
    batch = layer(**OPTIONS).observed(draws(3, 4, 5, 2, seed=2))
    assert batch.offspring.shape == (3, 4, 6) and batch.background.shape == (3, 4, 5)
    result = Flow(layer(**OPTIONS), depth=2, observables=[]).run(points)
    assert 0 < result.values("background")[-1] < 1 and result.lineage is None


def test_without_mass_it_is_the_layer_without_a_background_and_with_all_of_it_new_tokens():
    points = draws(6, 2)
    without = ResampledLayer.create(generator=torch.Generator().manual_seed(1), **OPTIONS)
    torch.testing.assert_close(layer(-200.0, **OPTIONS)(points), without(points))
    torch.testing.assert_close(layer(-200.0, **OPTIONS).attended(points), without.attended(points))
    every = layer(200.0).observed(points)
    assert every.background.eq(1).all() and not torch.isin(every.particles, points).any()
    tilted = LAW.mean(points / math.sqrt(2))  # k^-½ by default
    torch.testing.assert_close(layer(200.0).attended(points), tilted)


def test_precision_and_its_gradient():
    """Draws have the values' gradient where they are tokens; the mean is differentiable in all."""
    points = draws(4, 2)
    check_derivatives(lambda x: layer(**OPTIONS).attended(x), [points], second=False)
    # Of the same noise: a new token moves with the query that tilts it, and a token is its own value.
    for log_weight in (200.0, -200.0, 0.5):
        check_derivatives(lambda x, b=log_weight: layer(b, **OPTIONS, draws=2)(x), [points], second=False)
    observed_tokens = layer(1.0, **OPTIONS, residual=True, step_size=0.5).observed(points.bfloat16())
    assert observed_tokens.particles.dtype == torch.float32 and observed_tokens.particles.isfinite().all()
    wide = Gaussian.create(torch.zeros(2, dtype=torch.float64), 6.0)
    far = layer(0.0, wide).observed(1e3 * points)
    assert far.background.eq(1).all() and far.particles.isfinite().all()  # 3‖η‖² wins over √2‖η‖² far out


@every_row(
    "make, words, kind",
    [
        (lambda: layer(background=0), "background must be a Gaussian", TypeError),
        (lambda: layer(background=Gaussian.create(torch.zeros(3, 2), 1.0)), "must be one Gaussian", ValueError),
        (lambda: layer(math.inf), "background_log_weight must be finite", ValueError),
        (lambda: layer("1"), "background_log_weight must be a number", TypeError),
        (lambda: layer(wrong=1), "has no option wrong", TypeError),
        (lambda: layer()(draws(4, 3)), "background is on 2 dimensions, the tokens have 3", ValueError),
        (lambda: layer()(draws(4, 2) * math.nan), "particles", ValueError),
        (lambda: layer(draws=0)(draws(4, 2)), "draws must be a whole number, at least 1", ValueError),
        (lambda: layer().gaussian(LAW), "have a mixture for a law", MissingFormError),
    ],
)
def test_bad_calls(make, words, kind):
    with pytest.raises(kind, match=words):
        make()
