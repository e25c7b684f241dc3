"""Laws after drawn and doubly stochastic layers: derivatives, batches, vmap, compilation, half precision, contractions."""

from functools import partial

import pytest
import torch
from tests.population import cases
from tests.support.derivatives import check_derivatives
from torch.func import vmap

from massieu.measures import Gaussian
from massieu.population import (
    AttentionLayer,
    Composition,
    DoublyStochasticLayer,
    Operator,
    Renormalisation,
    ResampledLayer,
    SelfAttention,
    sinkhorn,
)

F64 = torch.float64
MEAN = cases.draw(3, 2, seed=1)
FACTOR = cases.draw(3, 2, 2, seed=2)


def drawn(**options):
    return ResampledLayer.create(generator=torch.Generator().manual_seed(0), scale=0.5, residual=True, **options)


def moments_after(layer):
    def function(mean, factor):
        after = layer.gaussian(Gaussian.create(mean, factor=factor))
        return after.location, cases.covariance(after)

    return function


LAYERS = [drawn(), DoublyStochasticLayer.create(scale=0.5)]


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_compiled(layer):
    function = moments_after(layer)
    compiled = torch.compile(function, fullgraph=True, backend="eager")(MEAN[0], FACTOR[0])
    torch.testing.assert_close(compiled, function(MEAN[0], FACTOR[0]))


@pytest.mark.medium
@pytest.mark.parametrize("layer", LAYERS)
def test_transforms_of_laws(layer):
    assert isinstance(layer, Operator)
    function = moments_after(layer)
    whole = function(MEAN, FACTOR)
    each = [torch.stack(parts) for parts in zip(*map(function, MEAN, FACTOR), strict=True)]
    mapped = vmap(function)(MEAN, FACTOR)
    for result, expected, again in zip(whole, each, mapped, strict=True):
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(again, expected)
    check_derivatives(function, (MEAN[0], FACTOR[0]))
    half = layer.gaussian(Gaussian.create(MEAN[0].bfloat16(), factor=FACTOR[0].bfloat16()))
    assert half.location.dtype == torch.float32


def test_many_draws_and_flat_scores_are_attention():
    """Draws add a covariance of order 1/S; doubly stochastic weights are softmax's to first order in the scale."""
    law = cases.law(seed=3)
    same = torch.eye(2, dtype=F64)
    attention = AttentionLayer.from_score(same, same, scale=0.5).gaussian(law)
    excess = cases.covariance(drawn(draws=10).gaussian(law)) - cases.covariance(attention)
    torch.testing.assert_close(excess, cases.covariance(law) / 10)
    gaps = []
    for scale in (1e-2, 1e-3):
        softmax = AttentionLayer.from_score(same, same, scale=scale).gaussian(law)
        balanced = DoublyStochasticLayer.create(scale=scale, residual=True).gaussian(law)
        gaps.append((cases.covariance(softmax) - cases.covariance(balanced)).norm().item())
    assert gaps[1] < 2e-2 * gaps[0]


def test_a_renormalisation_stands_behind_them_too():
    held = cases.law(seed=4)
    back = Renormalisation.create(held.location, cases.covariance(held))
    layers = Composition.create([drawn(activation=back), DoublyStochasticLayer.create(activation=back)])
    after = layers.gaussian(cases.law(seed=5))
    torch.testing.assert_close(cases.covariance(after), cases.covariance(held))
    cloud = layers(cases.draw(50, 2, seed=6))
    torch.testing.assert_close(cloud.mean(0), held.location)
    torch.testing.assert_close(cloud.T.cov(correction=0), cases.covariance(held))


def test_the_scale_is_one_by_the_root_of_the_width_by_default():
    points = cases.draw(6, 4, seed=7)
    law = cases.law(4, seed=8)
    narrow = cases.draw(2, 4, seed=9)
    maps = {"query_weight": narrow, "key_weight": cases.draw(2, 4, seed=10)}
    for options, scale in (({}, 0.5), (maps, 2**-0.5)):
        default = DoublyStochasticLayer.create(**options)
        explicit = DoublyStochasticLayer.create(**options, scale=scale)
        assert torch.equal(default(points), explicit(points))
        for build in (DoublyStochasticLayer.create, partial(ResampledLayer.create, generator=torch.Generator())):
            laws = [build(**options, **given).gaussian(law) for given in ({}, {"scale": scale})]
            torch.testing.assert_close(laws[0].covariance, laws[1].covariance)
    heads = points[None, None]
    assert torch.equal(
        sinkhorn(heads, 2 * heads).query_potential, sinkhorn(heads, 2 * heads, scale=0.5).query_potential
    )
    assert SelfAttention()(points) == SelfAttention(0.5)(points)
