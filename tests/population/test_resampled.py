"""Layers of drawn tokens: their law, their genealogies, and attention as their mean."""

import math

import pytest
import torch
from tests.population import cases

from massieu.energy.activations import LayerNorm, RMSNorm
from massieu.measures import MissingFormError
from massieu.population import Flow, ResampledLayer


def draws(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layer(**options):
    return ResampledLayer.create(generator=torch.Generator().manual_seed(1), **options)


def test_a_draw_has_mean_attention_and_the_covariance_of_its_weights():
    points = draws(6, 3)
    repetitions = 8000
    query = draws(2, 3, seed=2)
    value = draws(3, 3, seed=3)
    own = layer(query_weight=query, key_weight=2 * query, value_weight=value, scale=0.7, step_size=0.5, residual=True)
    p = torch.softmax(0.7 * (points @ query.T) @ (2 * points @ query.T).T, -1)
    values = points @ value.T
    mean = points + 0.5 * p @ values
    torch.testing.assert_close(own.attended(points), mean, atol=1e-12, rtol=1e-12)
    result = own(points.expand(repetitions, 6, 3))
    variance = 0.25 * (p @ values.square() - (p @ values).square())
    assert ((result.mean(0) - mean).abs() < 5 * (variance / repetitions).sqrt()).all()
    deviation = (result - mean).square()
    error = deviation.std(0) / repetitions**0.5
    assert ((deviation.mean(0) - variance).abs() < 5 * error).all()


def test_of_several_draws_the_variance_is_divided_by_their_number():
    points = draws(5, 2)
    repetitions = 5000
    p = torch.softmax(points @ points.T, -1)
    variance = p @ points.square() - (p @ points).square()
    spread = {}
    for method in ("multinomial", "systematic"):
        spread[method] = layer(draws=8, method=method, scale=1.0)(points.expand(repetitions, 5, 2)).var(0)
    ratio = 8 * spread["multinomial"] / variance
    assert ((ratio > 0.85) & (ratio < 1.15)).all()  # five standard errors of a variance are 10 % for normal laws
    assert spread["systematic"].sum() < 0.7 * spread["multinomial"].sum()


def test_what_is_told_of_the_draws():
    points = draws(9, 3)
    drawn = layer(scale=0.5).observed(points)
    p = torch.softmax(0.5 * points @ points.T, -1)
    torch.testing.assert_close(drawn.effective_size, 1 / p.square().sum(-1))
    torch.testing.assert_close(drawn.offspring, p.sum(0))
    assert torch.equal(drawn.particles, points[drawn.ancestors])
    readings = drawn.readings()
    assert readings["effective_size"].value == drawn.effective_size.mean()
    assert readings["offspring"].value[[0, -1]].tolist() == [p.sum(0).min().item(), p.sum(0).max().item()]
    assert layer(draws=2).observed(points).ancestors is None


@pytest.mark.medium
def test_genealogies_coalesce_as_uniform_draws_do():
    """Uniform weights are the Wright–Fisher model: two tokens have one ancestor with probability 1 − (1 − 1/n)^t."""
    tokens = 10
    generations = 4
    repetitions = 60
    shared = torch.zeros(repetitions, generations, dtype=torch.float64)
    own = layer(scale=0.0)
    for repetition in range(repetitions):
        result = Flow(own, depth=generations, observables=[]).run(draws(tokens, 1), progress=False)
        shared[repetition] = result.values("shared_ancestry")[1:]
    expected = 1 - (1 - 1 / tokens) ** torch.arange(1, generations + 1, dtype=torch.float64)
    torch.testing.assert_close(result.nulls("shared_ancestry")[1:], expected, rtol=1e-12, atol=0)
    assert ((shared.mean(0) - expected).abs() < 5 * shared.std(0) / repetitions**0.5).all()


def test_lineages_lead_to_the_tokens_of_the_start():
    points = draws(40, 2)
    result = Flow([layer(scale=2.0), lambda x: 3 * x, layer(scale=0.1)], observables=[]).run(points)
    torch.testing.assert_close(result.particles, 3 * points[result.lineage])
    assert result.values("distinct_ancestors")[-1] == len(result.lineage.unique())
    distinct = result.values("distinct_ancestors")
    assert distinct[1] >= distinct[3]
    assert distinct[[0, 2]].isnan().all()


@pytest.mark.medium
def test_trap_34_draws_are_unbiased_for_attention_which_is_biased_for_the_population():
    """Keys from N(0, 1), one query η: the mean of tilted keys is η; attention is off by −e^{η²}η/N, and its draws no more."""
    eta = 0.7
    keys = 20
    sets = 30_000
    drawn = draws(sets, keys, 1)
    weights = torch.softmax(eta * drawn, -2)
    attention = (weights * drawn).sum((-2, -1))
    # A control variate of mean zero takes the noise of the keys away, not the bias.
    noise = (torch.exp(eta * drawn - eta**2 / 2) * (drawn - eta)).mean((-2, -1))
    bias = attention - eta - noise
    error = bias.std() / sets**0.5
    expected = -math.exp(eta**2) * eta / keys
    assert abs(bias.mean()) > 10 * error
    assert bias.mean().item() == pytest.approx(expected, abs=5 * error.item() + 4 / keys**2)
    sets = 5000
    points = torch.cat([drawn[:sets], torch.full((sets, 1, 1), eta)], 1)
    own = ResampledLayer.create(generator=torch.Generator().manual_seed(2), scale=1.0)
    difference = (own(points) - own.attended(points))[:, -1, 0]
    assert abs(difference.mean()) < 5 * difference.std() / sets**0.5


def test_options_and_bad_calls():
    points = draws(7, 3)
    inside = layer(activation=RMSNorm.create(eps=0.0), step_size=2.0, residual=True)
    torch.testing.assert_close(inside(points).square().mean(-1), torch.ones(7, dtype=torch.float64))
    assert inside(points.bfloat16()).dtype == torch.float32
    with pytest.raises(ValueError, match=r"key_weight must have shape \(·, 3\) for tokens of d = 3, got \(2, 2\)"):
        layer(key_weight=torch.ones(2, 2))(points)
    with pytest.raises(ValueError, match="scale must be finite, got inf"):
        layer(scale=math.inf)
    with pytest.raises(TypeError, match="activation must be an Activation, or an operator"):
        layer(activation=torch.tanh)
    with pytest.raises(ValueError, match="draws must be a whole number, at least 1"):
        layer(draws=0)(points)


def test_a_gaussian_law_stays_one_and_has_the_covariance_of_the_draws_too():
    """Attention's weights as a quadrature of the law, and the law of total covariance; then particles."""
    law = cases.law(seed=1)
    nodes, weight = cases.hermite(law, 32)
    query, key, value = (0.6 * draws(2, 2, seed=each) for each in (4, 5, 6))
    own = layer(
        query_weight=query, key_weight=key, value_weight=value, scale=0.9, step_size=0.8, residual=True, draws=3
    )
    p = torch.softmax(0.9 * (nodes @ query.T) @ (nodes @ key.T).T + weight.log(), -1)
    values = nodes @ value.T
    means = p @ values
    within = torch.einsum("ij,jk,jl->ikl", p, values, values) - means[:, :, None] * means[:, None, :]
    moved = nodes + 0.8 * means
    mean = weight @ moved
    between = (weight[:, None] * (moved - mean)).T @ (moved - mean)
    expected = between + 0.64 * torch.einsum("i,ikl->kl", weight, within) / 3
    result = own.gaussian(law)
    torch.testing.assert_close(result.location, mean, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(cases.covariance(result), expected, rtol=1e-7, atol=1e-7)

    count = 4000
    cloud = law.sample(torch.zeros(2).double(), (count,), generator=torch.Generator().manual_seed(3))
    after = own(cloud)
    # The spread of tokens, and as much again for what all of them attended to.
    assert (after.mean(0) - mean).norm() < 8 * (expected.trace() / count).sqrt()
    assert (after.T.cov() - expected).norm() < 12 * expected.trace() / count**0.5


def test_which_laws_are_not_known():
    law = cases.law()
    with pytest.raises(MissingFormError, match="mean of 4 systematic draws is not Gaussian"):
        layer(draws=4, method="systematic").gaussian(law)
    with pytest.raises(MissingFormError, match="LayerNorm is not affine"):
        layer(activation=LayerNorm.create()).gaussian(law)
    with pytest.raises(ValueError, match=r"query_weight must have shape \(·, 2\) for tokens of d = 2"):
        layer(query_weight=torch.ones(2, 3)).gaussian(law)
