"""Doubly stochastic attention against a dense Sinkhorn's algorithm, closed forms, and its own joint energy."""

import math

import pytest
import torch
from tests.population import cases
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row

from massieu.energy import is_conservative, jacobian_asymmetry
from massieu.errors import ConvergenceError
from massieu.population import DoublyStochasticLayer, doubly_stochastic_attention, sinkhorn


def draws(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def dense(scores, weight, steps=20_000):
    """P with rows of sum 1 and Σ_i w_i P_ij = w_j, by alternating normalisation of the matrix."""
    mass = scores + weight.log()[..., :, None] + weight.log()[..., None, :]
    for _ in range(steps):
        mass = mass + weight.log()[..., None] - torch.logsumexp(mass, -1, keepdim=True)
        before = mass
        mass = mass + (weight.log() - torch.logsumexp(mass, -2)).unsqueeze(-2)
        if (mass - before).abs().max() < 1e-13:
            break
    return mass.exp() / weight.unsqueeze(-1)


@every_row("scale", [0.1, 1.0, 2.5])
def test_it_is_the_dense_algorithm(scale):
    query = draws(2, 3, 13, 4)
    key = draws(2, 3, 13, 4, seed=1)
    value = draws(2, 3, 13, 5, seed=2)
    result = doubly_stochastic_attention(query, key, value, scale=scale)
    expected = dense(scale * query @ key.mT, torch.ones(2, 3, 13, dtype=torch.float64))
    torch.testing.assert_close(result.output, expected @ value, atol=1e-9, rtol=1e-9)
    f = result.potentials.query_potential
    g = result.potentials.key_potential
    weights = (scale * query @ key.mT + f.unsqueeze(-1) + g.unsqueeze(-2)).exp()
    torch.testing.assert_close(weights, expected, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(f), atol=1e-13, rtol=0)
    residual = (weights.sum(-2) - 1).square().mean(-1).sqrt()
    torch.testing.assert_close(result.potentials.residual, residual, atol=1e-14, rtol=1e-3)
    assert (residual < 1e-10).all()
    assert (g.mean(-1).abs() < 1e-12).all()


def test_weights_and_hidden_tokens():
    """A token of weight two is two tokens; one of weight zero is none, whatever is in it."""
    points = draws(1, 1, 6, 3)
    weight = torch.tensor([1.0, 2, 1, 0.5, 3, 0], dtype=torch.float64)
    result = doubly_stochastic_attention(points, points, points, log_weight=weight.log(), scale=1.0)
    expected = dense((points @ points.mT)[..., :5, :5], weight[:5].expand(1, 1, 5)) @ points[..., :5, :]
    torch.testing.assert_close(result.output[..., :5, :], expected, atol=1e-9, rtol=1e-9)
    assert result.potentials.key_potential[..., 5] == result.potentials.query_potential[..., 5] == 0
    twice = torch.cat([points[..., :2, :], points[..., 1:2, :]], -2)
    doubled = doubly_stochastic_attention(twice, twice, twice).output
    once = doubly_stochastic_attention(*[points[..., :2, :]] * 3, log_weight=weight[:2].log()).output
    torch.testing.assert_close(doubled[..., :2, :], once, atol=1e-9, rtol=1e-9)
    none = sinkhorn(points, points, log_weight=torch.full((6,), -math.inf))
    assert none.key_potential.abs().max() == none.query_potential.abs().max() == none.residual.max() == 0


def test_gaussian_tokens_shrink_by_the_entropic_plan():
    """ρ = N(0, s²), scores xy/ε: E[y|x] = κx with κs² = c, c² + εc = s⁴; by quadrature over weighted tokens."""
    spread = 1.3
    epsilon = 0.4
    grid = torch.linspace(-9, 9, 401, dtype=torch.float64) * spread
    weight = -grid.square() / (2 * spread**2)
    tokens = grid[None, None, :, None]
    result = doubly_stochastic_attention(tokens, tokens, tokens, log_weight=weight, scale=1 / epsilon)
    covariance = (-epsilon + math.sqrt(epsilon**2 + 4 * spread**4)) / 2
    inner = grid.abs() < 4
    output = result.output[0, 0, inner, 0]
    torch.testing.assert_close(output, covariance / spread**2 * grid[inner], atol=1e-8, rtol=1e-8)


@pytest.mark.medium
def test_derivatives_are_exact():
    query = draws(1, 2, 3, 2)
    key = draws(1, 2, 3, 2, seed=1)
    weight = 0.3 * draws(3, seed=2)
    value = draws(1, 2, 3, 1, seed=3)

    def function(query, key, value, weight):
        return doubly_stochastic_attention(query, key, value, log_weight=weight, scale=0.8, tolerance=1e-13).output

    check_derivatives(function, (query, key, value, weight))


@pytest.mark.medium
def test_potentials_alone_have_derivatives_too():
    query = draws(1, 1, 4, 2)
    key = draws(1, 1, 4, 2, seed=1)
    check_derivatives(lambda q, k: sinkhorn(q, k, tolerance=1e-13)[:2], (query, key), second=False)


def test_tied_attention_is_a_joint_gradient_and_softmax_is_not():
    """P x is half the gradient of −(Σf + Σg)/scale in all tokens (trap 13 is what softmax attention fails)."""
    points = draws(5, 2)

    def level(flat):
        heads = flat.reshape(1, 1, 5, 2)
        result = sinkhorn(heads, heads, scale=1.5)
        return -(result.query_potential.sum() + result.key_potential.sum()) / 1.5

    def attended(flat):
        heads = flat.reshape(1, 1, 5, 2)
        return doubly_stochastic_attention(heads, heads, heads, scale=1.5).output.flatten()

    flat = points.flatten().requires_grad_()
    (slope,) = torch.autograd.grad(level(flat), flat)
    torch.testing.assert_close(slope / 2, attended(flat.detach()), atol=1e-9, rtol=1e-9)
    assert is_conservative(attended, flat.detach(), tolerance=1e-8)
    softmax = jacobian_asymmetry(
        lambda flat: (
            torch.softmax(1.5 * flat.reshape(5, 2) @ flat.reshape(5, 2).T, -1) @ flat.reshape(5, 2)
        ).flatten(),
        flat.detach(),
    )
    assert softmax > 1e-2


def test_the_layer_keeps_the_mean_of_the_values():
    points = draws(3, 50, 4) + 5
    query = draws(2, 4, seed=1) / 4
    key = draws(2, 4, seed=2) / 4
    layer = DoublyStochasticLayer.create(query_weight=query, key_weight=key, scale=1.0)
    after = layer(points)
    torch.testing.assert_close(after.mean(-2), points.mean(-2), atol=1e-10, rtol=0)
    softmax = torch.softmax((points @ query.T) @ (points @ key.T).mT, -1) @ points
    assert (softmax.mean(-2) - points.mean(-2)).abs().max() > 1e-2
    value = draws(4, 4, seed=3)
    moved = DoublyStochasticLayer.create(
        query_weight=query, key_weight=key, value_weight=value, step_size=0.3, residual=True
    )(points)
    torch.testing.assert_close(moved.mean(-2), points.mean(-2) + 0.3 * points.mean(-2) @ value.T, atol=1e-9, rtol=0)
    for item in range(3):
        torch.testing.assert_close(layer(points[item]), after[item], atol=1e-9, rtol=1e-9)
    single = layer(points.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), after, atol=1e-3, rtol=1e-4)
    assert layer(points.bfloat16()).dtype == torch.float32


def test_far_scores_converge_or_say_that_they_do_not():
    points = draws(1, 1, 30, 3)
    with pytest.raises(ConvergenceError, match="no fixed point for 1 of 1 items"):
        sinkhorn(points, points.flip(-2), scale=40.0, max_steps=3)
    far = sinkhorn(points, points, scale=10.0)  # one tensor: one potential, which converges whatever the scores
    assert far.residual < 1e-10
    assert far.steps < 100
    torch.testing.assert_close(
        far.key_potential, far.query_potential - far.query_potential.mean(), atol=1e-9, rtol=1e-9
    )


def test_one_tensor_twice_is_two_equal_ones():
    points = draws(2, 1, 9, 3).requires_grad_()
    weight = draws(9, seed=1)
    one, two = (sinkhorn(points, other, log_weight=weight, scale=0.7) for other in (points, points * 1))
    torch.testing.assert_close(one.key_potential, two.key_potential, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(one.query_potential, two.query_potential, atol=1e-10, rtol=1e-10)
    sums = [(each.key_potential.sin() + each.query_potential.cos()).sum() for each in (one, two)]
    slopes = [torch.autograd.grad(each, points)[0] for each in sums]
    torch.testing.assert_close(*slopes, atol=1e-8, rtol=1e-8)


def test_bad_calls():
    with pytest.raises(ValueError, match=r"one shape \(B, H, n, k\), got \(1, 1, 3, 2\) and \(1, 1, 4, 2\)"):
        sinkhorn(draws(1, 1, 3, 2), draws(1, 1, 4, 2))
    with pytest.raises(ValueError, match=r"log_weight of shape \(2,\) does not broadcast to the batch \(1, 1, 3\)"):
        sinkhorn(draws(1, 1, 3, 2), draws(1, 1, 3, 2), log_weight=torch.zeros(2))
    with pytest.raises(ValueError, match="scale must be finite, got nan"):
        sinkhorn(draws(1, 1, 3, 2), draws(1, 1, 3, 2), scale=math.nan)


@every_row("scale", [0.3, 1.5, -0.7])
def test_a_gaussian_law_goes_where_sinkhorn_takes_it(scale):
    """A quadrature of the law as weighted tokens, whose plan is found without knowing that it is Gaussian."""
    law = cases.law(seed=2)
    nodes, weight = cases.hermite(law, 20)
    has_weight = weight > 1e-16
    nodes = nodes[has_weight]
    weight = weight[has_weight]
    query, key, value = (0.7 * draws(2, 2, seed=each) for each in (4, 5, 6))
    heads = [(nodes @ each.T)[None, None] for each in (query, key, value)]
    output = doubly_stochastic_attention(*heads, log_weight=weight.log(), scale=scale).output[0, 0]
    moved = nodes - 0.6 * output
    mean = weight @ moved
    expected = (weight[:, None] * (moved - mean)).T @ (moved - mean)
    layer = DoublyStochasticLayer.create(
        query_weight=query, key_weight=key, value_weight=value, scale=scale, step_size=-0.6, residual=True
    )
    result = layer.gaussian(law)
    torch.testing.assert_close(result.location, mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(cases.covariance(result), expected, rtol=1e-6, atol=1e-6)


def test_a_singular_law_is_refused():
    with pytest.raises(ValueError, match="gaussian needs a positive definite covariance"):
        DoublyStochasticLayer.create().gaussian(cases.law(rank=1))
