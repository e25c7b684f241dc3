"""Precision matching against Gauss–Hermite quadrature, conditional Gaussians by NumPy, simulation and SciPy's minimiser."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize
from tests.support.rows import every_row
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close as close

from massieu import ops
from massieu.papers.theory import GaussianTokens, denoising_score, precision_matching_score


def tokens(d: int = 2, e: int = 2, seed: int = 0, spread: float = 0.7) -> GaussianTokens:
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, dtype=torch.float64, generator=generator)  # noqa: E731
    root = spread * normal(d + e, d + e + 2)
    joint = root @ root.mT / (d + e)
    return GaussianTokens.create(normal(d), normal(e), joint[:d, :d], joint[d:, :d], joint[d:, d:])


def draws(law: GaussianTokens, *shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values from the Cholesky factor of the joint covariance."""
    d, e = len(law.key_mean), len(law.value_mean)
    joint = torch.cat(
        [
            torch.cat([law.key_covariance, law.cross_covariance.mT], 1),
            torch.cat([law.cross_covariance, law.value_covariance], 1),
        ]
    )
    normal = torch.randn(*shape, d + e, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    both = normal @ torch.linalg.cholesky(joint).mT + torch.cat([law.key_mean, law.value_mean])
    return both[..., :d], both[..., d:]


def simulated(law: GaussianTokens, query: Tensor, share: float, keys: int, repetitions: int) -> tuple[float, float]:
    """Mean squared error and its standard error of attention over fresh tokens, a thousand thousand at a time."""
    logit = share * law.score @ (query - law.key_mean)
    errors, block = [], max(1, 10**6 // keys)
    for start in range(0, repetitions, block):
        k, v = draws(law, min(block, repetitions - start), keys, seed=start)
        q = logit.expand(len(k), 1, 1, -1)
        output = ops.attention(q, k[:, None], v[:, None], scale=1.0).output[:, 0, 0]
        errors.append((output - law.conditional_mean(query)).square().sum(-1))
    error = torch.cat(errors)
    return error.mean().item(), (error.std() / math.sqrt(repetitions)).item()


def test_attention_over_the_law_by_quadrature():
    law, query = tokens(), torch.tensor([0.4, -0.7], dtype=torch.float64)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    grid = torch.cartesian_prod(torch.from_numpy(nodes), torch.from_numpy(nodes))
    log_weight = torch.from_numpy(np.log(np.multiply.outer(weights, weights)).ravel())
    keys = law.key_mean + grid @ torch.linalg.cholesky(law.key_covariance).mT
    slope = torch.from_numpy(law.cross_covariance.numpy() @ np.linalg.inv(law.key_covariance.numpy()))
    values = law.value_mean + (keys - law.key_mean) @ slope.mT
    for score in (law.score, 0.3 * torch.eye(2, dtype=torch.float64), torch.tensor([[0.2, 0.5], [-0.4, 0.1]]).double()):
        shares = torch.softmax(keys @ score @ (query - law.key_mean) + log_weight, 0)
        close(law.attention(query, score), shares @ values, rtol=0, atol=1e-11)
    close(law.attention(query, law.score), law.value_mean + slope @ (query - law.key_mean), rtol=0, atol=1e-12)
    close(law.conditional_mean(query), law.attention(query, law.score), rtol=0, atol=1e-12)


def test_the_condition_is_necessary_and_no_stronger():
    """X1: equality for all x if and only if Σ_vk M = Σ_vk Σ_kk⁻¹."""
    law = tokens(3, 3)
    query = torch.randn(50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    other = law.score + 0.1 * torch.eye(3, dtype=torch.float64)
    gap = (law.attention(query, other) - law.conditional_mean(query)).norm(dim=-1)
    assert law.mismatch(law.score) < 1e-12
    assert (gap <= law.mismatch(other) * (query - law.key_mean).norm(dim=-1) + 1e-12).all()
    assert gap.max() > 0.3 * law.mismatch(other)

    # One value for three keys: Σ_vk has a null space, and scores that differ from Σ⁻¹ in it are as good.
    narrow = tokens(3, 1)
    null = torch.linalg.svd(narrow.cross_covariance).Vh[1]
    equal = narrow.score + torch.outer(null, torch.ones(3, dtype=torch.float64))
    assert (equal - narrow.score).norm() > 1
    assert narrow.mismatch(equal) < 1e-12
    close(narrow.attention(query, equal), narrow.conditional_mean(query), rtol=0, atol=1e-11)


def test_centring_is_needed():
    law, query = tokens(), torch.tensor([0.4, -0.7], dtype=torch.float64)
    uncentred = law.attention(query + law.key_mean, law.score)  # x in place of x − μ
    expected = law.cross_covariance @ law.score @ law.key_mean
    close(uncentred - law.conditional_mean(query), expected, rtol=0, atol=1e-12)
    assert expected.norm() > 0.1


@pytest.mark.parametrize("clean", [False, True])
def test_denoising_scores_give_the_best_output(clean):
    covariance, noise = tokens(3).key_covariance, 0.4
    identity = torch.eye(3, dtype=torch.float64)
    context = covariance if clean else covariance + noise * identity
    origin = torch.zeros(3, dtype=torch.float64)
    law = GaussianTokens.create(origin, origin, context, context, context)
    query = torch.tensor([0.5, -1.0, 0.2], dtype=torch.float64)
    best = torch.from_numpy(
        covariance.numpy() @ np.linalg.solve((covariance + noise * identity).numpy(), query.numpy())
    )
    close(law.attention(query, denoising_score(covariance, noise, clean_context=clean)), best, rtol=0, atol=1e-12)
    assert (law.attention(query, denoising_score(covariance, noise, clean_context=not clean)) - best).norm() > 0.05
    close(denoising_score(covariance, 0.0, clean_context=clean), precision_matching_score(covariance))


@pytest.mark.medium
def test_the_error_at_4000_keys_is_right_to_a_percent():
    law = tokens(3, 2)
    query = law.key_mean + torch.tensor([0.5, 0.4, -0.3], dtype=torch.float64)
    assert 0.5 < law.squared_distance(query) < 2
    for share in (0.5, 1.0):
        mean, error = simulated(law, query, share, 4000, 100)
        result = law.error(query, share, 4000).item()
        assert abs(result / mean - 1) < 0.01 + 5 * error / mean


@pytest.mark.medium
def test_the_bias_of_finitely_many_keys_is_in_the_error():
    """X2 with s²b alone in the bracket leaves out the product of both biases, of the same order."""
    origin, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    law = GaussianTokens.create(origin, origin, one, one, 1.001 * one)  # next to no noise
    query, share, keys = torch.tensor([1.5], dtype=torch.float64), 0.5, 120
    mean, error = simulated(law, query, share, keys, 50_000)
    result = law.error(query, share, keys).item()
    growth = math.exp(share**2 * 2.25) / keys
    without = result - growth * 2 * share * (1 - share) * 2.25
    remainder = 10 * growth**2
    assert abs(result - mean) < 5 * error + remainder
    assert abs(without - mean) > 2 * (5 * error + remainder)


@pytest.mark.medium
def test_the_optimal_share_is_the_only_minimum():
    law = tokens(4, 3)
    query = law.key_mean + torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    grid = torch.linspace(0, 1, 100, dtype=torch.float64)
    for keys in (1, 2, 50, 10**6):
        result = law.optimal_share(query, keys)
        error = law.error(query[:, None], grid, keys)
        assert (error.diff(n=2) > -1e-9 * error[:, 1:-1]).all()  # convex in s
        for x, share in zip(query, result, strict=True):
            expected = optimize.minimize_scalar(
                lambda s, x=x, keys=keys: law.error(x, s, keys).item(), bounds=(0, 1), options={"xatol": 1e-9}
            )
            assert abs(share.item() - expected.x) < 1e-4
        assert (result.square() * law.squared_distance(query) <= max(1.0, math.log(keys))).all()
    at_mean = law.optimal_share(law.key_mean, 100)
    assert at_mean == 0
    # Full precision matching needs L ≫ e^{‖z‖²}.
    close(law.optimal_share(query, 1e30), torch.ones(6, dtype=torch.float64), rtol=0, atol=1e-3)
    far = law.key_mean + 40.0
    assert law.optimal_share(far, 1000).square() * law.squared_distance(far) < math.log(1000)


@pytest.mark.medium
def test_derivatives_and_transforms():
    law, query = tokens(2, 2), torch.tensor([[0.4, -0.7], [1.0, 0.2]], dtype=torch.float64, requires_grad=True)
    keys = torch.tensor([30.0, 500.0], dtype=torch.float64, requires_grad=True)
    for function in (law.optimal_share, lambda x, n: law.error(x, 0.6, n)):
        assert gradcheck(function, (query, keys), fast_mode=True)
        assert gradgradcheck(function, (query, keys), fast_mode=True)
    covariance = law.key_covariance.clone().requires_grad_()
    symmetric = lambda c: precision_matching_score(0.5 * (c + c.mT))  # noqa: E731
    assert gradcheck(symmetric, covariance)
    assert gradgradcheck(symmetric, covariance)

    stack = torch.stack([covariance.detach(), 2 * covariance.detach()])
    close(torch.func.vmap(precision_matching_score)(stack), torch.linalg.inv(stack))
    curvature = torch.func.hessian(lambda c: precision_matching_score(c)[0, 0])
    close(torch.func.vmap(curvature)(stack), torch.stack([curvature(c) for c in stack]))


def test_half_precision_is_promoted_and_integers_are_refused():
    parameters = torch.zeros(2), torch.zeros(2), torch.eye(2), 0.5 * torch.eye(2), torch.eye(2)
    law = GaussianTokens.create(*(parameter.bfloat16() for parameter in parameters))
    query = torch.tensor([0.5, -1.0], dtype=torch.bfloat16)
    result = law.conditional_mean(query), law.optimal_share(query, 100), law.error(query, 0.5, 100)
    expected = GaussianTokens.create(*(parameter.double() for parameter in parameters))
    wide = query.double()
    exact = expected.conditional_mean(wide), expected.optimal_share(wide, 100), expected.error(wide, 0.5, 100)
    for one, other in zip(result, exact, strict=True):
        assert (one.dtype, other.dtype) == (torch.float32, torch.float64)
        close(one.double(), other, rtol=1e-5, atol=1e-6)
    assert precision_matching_score(torch.eye(2, dtype=torch.float16)).dtype == torch.float32
    with pytest.raises(TypeError, match="covariance must be a floating-point tensor"):
        precision_matching_score(torch.eye(2, dtype=torch.int64))
    with pytest.raises(TypeError, match="key_mean must be a floating-point tensor"):
        GaussianTokens.create(torch.zeros(2, dtype=torch.int64), *parameters[1:])


def test_the_share_at_the_mean_has_a_finite_gradient():
    law = tokens()
    query = law.key_mean.clone().requires_grad_()
    (slope,) = torch.autograd.grad(law.optimal_share(query, 50), query)
    assert slope.isfinite().all()


@every_row(
    ("call", "message"),
    [
        (lambda: precision_matching_score(torch.ones(2, 3)), "must have shape"),
        (lambda: precision_matching_score(torch.tensor([[1.0, 0.5], [0.0, 1.0]])), "must be symmetric"),
        (lambda: precision_matching_score(torch.tensor([[1.0, 2.0], [2.0, 1.0]])), "must be positive definite"),
        (lambda: precision_matching_score(torch.full((2, 2), math.nan)), "must be symmetric and finite"),
        (lambda: denoising_score(torch.eye(2), -1.0), "noise_variance must be finite and at least 0"),
        (lambda: tokens().attention(torch.zeros(2), torch.eye(3)), r"score must have shape \(2, 2\)"),
        (lambda: tokens().optimal_share(torch.zeros(3), 5), r"query must have shape \(\*lead, 2\)"),
        (lambda: tokens().error(torch.zeros(2).double(), 0.5, 0), "keys must be finite and at least 1, got 0"),
        (
            lambda: GaussianTokens.create(*(torch.zeros(2),) * 2, torch.eye(2), torch.eye(3), torch.eye(2)),
            r"cross_covariance must have shape \(2, 2\)",
        ),
        (
            lambda: GaussianTokens.create(*(torch.zeros(2),) * 2, torch.eye(2), 2 * torch.eye(2), torch.eye(2)),
            "no law has these covariances",
        ),
        (
            lambda: GaussianTokens.create(torch.zeros(2, 1), torch.zeros(2), *(torch.eye(2),) * 3),
            "key_mean must have shape",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
