"""Edges of conditional mean attention: masks beside other scales, distant queries, what has no answer."""

import math

import pytest
import torch
from tests.support.rows import every_row

from massieu.regression import (
    Cholesky,
    ExponentialKernel,
    FeatureKernel,
    GaussianKernel,
    LinearKernel,
    LowRank,
    choose_ridge,
    conditional_mean_attention,
    leave_one_out,
)
from massieu.solve import ConjugateGradients

NAN = math.nan


def draws(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@every_row("size", [1e-6, 1.0, 1e3])
def test_a_mask_is_no_singular_matrix_at_any_size_of_the_keys(size):
    """In float32 the hidden keys' own equations, were they of size 1, are rounding beside large keys, or large ones."""
    key = (size * draws(1, 2, 24, 40)).float()
    value = draws(1, 2, 24, 2, seed=1).float()
    seen = torch.arange(24) < 20
    arguments = {"kernel": LinearKernel.create(), "ridge": 0.1 * size**2}
    result = conditional_mean_attention(key[:, :, :3], key, value, log_weight=seen, **arguments)
    alone = conditional_mean_attention(key[:, :, :3], key[:, :, :20], value[:, :, :20], **arguments)
    torch.testing.assert_close(result.output, alone.output, rtol=1e-4, atol=1e-4)


@every_row("kernel", [FeatureKernel.create(lambda x: x / x.norm(dim=-1, keepdim=True)), GaussianKernel.create(1.0)])
@every_row("method", [Cholesky(), LowRank()])
def test_hidden_keys_stand_where_the_kernel_is_defined(kernel, method):
    """At the origin a normalising map is not; and keys far from it lose their digits beside it."""
    far = 0.0 if isinstance(kernel, FeatureKernel) else 1e4
    key = draws(1, 1, 12, 4)
    query = draws(1, 1, 3, 4, seed=1)
    value = draws(1, 1, 12, 2, seed=2)
    hidden = key.clone()
    seen = torch.arange(12) >= 4
    hidden[:, :, :4] = NAN
    hidden, query = (hidden + far).float().requires_grad_(), (query + far).float()
    rest = (key[:, :, 4:] + far).float()
    arguments = {"kernel": kernel, "ridge": 0.1, "need_variance": True, "method": method}
    result = conditional_mean_attention(query, hidden, value.float(), log_weight=seen, **arguments)
    alone = conditional_mean_attention(query, rest, value[:, :, 4:].float(), **arguments)
    torch.testing.assert_close(result.output, alone.output, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result.variance, alone.variance, rtol=1e-3, atol=1e-4)
    (slope,) = torch.autograd.grad(result.output.sum(), hidden)
    assert bool(slope.isfinite().all()) and not bool(slope[:, :, :4].any())


def test_an_operator_ridge_sees_ratios_of_weights_alone():
    key = draws(1, 1, 8, 3).float()
    query = draws(1, 1, 2, 3, seed=1).float()
    value = draws(1, 1, 8, 1, seed=2).float()
    weight = draws(8, seed=3).float()
    arguments = {"kernel": GaussianKernel.create(1.0), "operator_ridge": 0.1}
    plain = conditional_mean_attention(query, key, value, log_weight=weight, **arguments).output
    for shift in (-300.0, 300.0):  # beyond the range of float32
        moved = conditional_mean_attention(query, key, value, log_weight=weight + shift, **arguments).output
        torch.testing.assert_close(moved, plain, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match=r"finite weights in torch.float32, got 30"):
        conditional_mean_attention(
            query, key, value, log_weight=weight * 0 + 300, kernel=GaussianKernel.create(1.0), ridge=1.0
        )


def test_no_query_under_a_causal_mask():
    key = draws(1, 1, 6, 2)
    value = draws(1, 1, 6, 3, seed=1)
    result = conditional_mean_attention(
        key[:, :, :0], key, value, kernel=LinearKernel.create(), ridge=1.0, is_causal=True, need_variance=True
    )
    assert result.output.shape == (1, 1, 0, 3) and result.variance.shape == (1, 1, 0)


@pytest.mark.parametrize("spelt_out", [False, True])
def test_predictive_variance_with_numbers_of_each_head(spelt_out):
    """Head by head, by single calls."""
    key = draws(2, 2, 5, 3)
    value = draws(2, 2, 5, 1, seed=1)
    query = draws(2, 4, 6, 3, seed=2)
    query = query.unflatten(1, (2, 2)) if spelt_out else query
    noise = torch.tensor([0.3, 0.7]).double()
    prior = torch.tensor([1.5, 0.2]).double()
    result = conditional_mean_attention(
        query, key, value, kernel=GaussianKernel.create(1.0), ridge=noise / prior, need_variance=True
    )
    both = result.predictive_variance(noise_variance=noise, prior_variance=prior.expand(2, 2))
    assert both.shape == query.shape[:-1]
    for head in range(2):
        place = (slice(None), head) if spelt_out else (slice(None), slice(2 * head, 2 * head + 2))
        torch.testing.assert_close(both[place], noise[head] + prior[head] * result.variance[place], rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"noise_variance must be one number or one a key head, got shape \(3,\)"):
        result.predictive_variance(noise_variance=torch.ones(3), prior_variance=1.0)
    with pytest.raises(ValueError, match=r"noise_variance must be finite and at least 0, got -1.0"):
        result.predictive_variance(noise_variance=-1.0, prior_variance=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_conjugate_gradients_for_distant_queries(dtype):
    """Squares of their kernels lose digits, and underflow: about 10 lengthscales away in float32, 27 in float64."""
    key = draws(1, 1, 18, 3).to(dtype)
    value = draws(1, 1, 18, 1, seed=1).to(dtype)
    middle = 10.0 if dtype == torch.float32 else 27.0
    query = key.mean(2, keepdim=True) + torch.linspace(middle - 2, middle + 2, 40, dtype=dtype).unsqueeze(-1) / 3**0.5
    arguments = {"kernel": GaussianKernel.create(1.0), "ridge": 0.1, "need_variance": True}
    result = conditional_mean_attention(
        query, key, value, method=ConjugateGradients(), preconditioner_rank=5, **arguments
    )
    exact = conditional_mean_attention(query, key, value, method=Cholesky(), **arguments)
    torch.testing.assert_close(result.variance, exact.variance, rtol=1e-4, atol=1e-5)


def test_bounds_are_bounds():
    """Of both methods that approximate, on random keys of all sizes, against the exact output."""
    generator = torch.Generator().manual_seed(0)
    uniform = lambda low, high: low + (high - low) * torch.rand((), generator=generator).item()  # noqa: E731
    for turn in range(20):
        count = int(uniform(1, 20))
        key, query = (10 ** uniform(-1, 0.5) * draws(1, 1, n, 3, seed=turn + n) for n in (count, 4))
        value = draws(1, 1, count, 2, seed=turn + 99)
        kernel = (GaussianKernel.create(10 ** uniform(-0.5, 0.7)), ExponentialKernel.create(10 ** uniform(-2, -1)))[
            turn % 2
        ]
        arguments = {"kernel": kernel, "ridge": 10 ** uniform(-3, 1), "log_weight": draws(count, seed=turn)}
        exact = conditional_mean_attention(query, key, value, method=Cholesky(), **arguments).output
        for method in (LowRank(1 + turn % count), ConjugateGradients(rtol=10 ** uniform(-8, -1))):
            result = conditional_mean_attention(
                query, key, value, method=method, preconditioner_rank=turn % 3, **arguments
            )
            error = (result.output - exact).norm(dim=-1)
            assert bool((error <= result.error_bound + 1e-9 * (1 + exact.norm(dim=-1))).all())


def test_a_key_of_its_own_direction_is_refused_where_rounding_is_all():
    key = torch.zeros(1, 1, 5, 2, dtype=torch.float64)
    key[..., :4, 0], key[..., 4, 1] = draws(4), 1.0
    value = draws(1, 1, 5, 1, seed=1)
    # Nothing is known of it from the others: the residual is the value.
    result = leave_one_out(key, value, kernel=LinearKernel.create(), ridge=1e-6)
    torch.testing.assert_close(result.residual[..., 4, :], value[..., 4, :], rtol=1e-9, atol=0)
    with pytest.raises(ValueError, match="a key alone determines its own prediction"):
        leave_one_out(key, value, kernel=LinearKernel.create(), ridge=1e-20)
    for ridges, error in ((None, TypeError), (["a"], TypeError), ([1.0, -1.0], ValueError), ([], ValueError)):
        with pytest.raises(error, match="ridge"):
            choose_ridge(key, value, ridges, kernel=LinearKernel.create())


def test_the_bound_of_few_centres_falls_to_0_where_they_are_all_keys():
    """Of keys so long that the kernel's numbers are counted from their largest logarithm."""
    key = 2 * draws(1, 1, 8, 3)
    query = draws(1, 1, 4, 3, seed=1)
    value = draws(1, 1, 8, 2, seed=2)
    arguments = {"kernel": ExponentialKernel.create(1.0), "ridge": 0.1}
    exact = conditional_mean_attention(query, key, value, method=Cholesky(), **arguments).output
    result = conditional_mean_attention(query, key, value, method=LowRank(8), **arguments)
    assert bool(((result.output - exact).norm(dim=-1) <= result.error_bound + 1e-9).all())
    # What is left of the variance is a rounding, and the bound has its root, 1.5e-8.
    assert bool((result.error_bound < 1e-6).all())
