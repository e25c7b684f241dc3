"""Conditional mean attention where the exponential kernel is beyond the dtype's range, against 60 digits."""

import mpmath
import pytest
import torch
from tests.support.rows import every_row, one_in

from massieu.nn import Attention, ConditionalMeanHeads
from massieu.regression import Cholesky, ExponentialKernel, LowRank, conditional_mean_attention, leave_one_out
from massieu.solve import ConjugateGradients


def normal(*shape, seed=0, scale=1.0, dtype=torch.float32):
    return (scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).to(dtype)


def explicit(query, key, value, scale, ridge, weight=None):
    """Output, variance and leave-one-out residual of one head by their definitions, with 300 digits."""
    count = len(key)
    with mpmath.workdps(300):
        asked, rows = ([[mpmath.mpf(x) for x in row] for row in points.double().tolist()] for points in (query, key))
        weights = [mpmath.mpf(1)] * count if weight is None else [mpmath.exp(w) for w in weight.double().tolist()]

        def pair(a, b):
            return mpmath.exp(scale * mpmath.fsum(x * y for x, y in zip(a, b, strict=True)))

        gram = mpmath.matrix([[pair(a, b) for b in rows] for a in rows])
        inverse = (gram + mpmath.diag([mpmath.mpf(ridge) / w for w in weights])) ** -1
        solved = inverse * mpmath.matrix(value.double().tolist())
        cross = mpmath.matrix([[pair(a, b) for b in rows] for a in asked])
        explained = cross * inverse
        variance = [
            pair(a, a) - mpmath.fsum(explained[i, n] * cross[i, n] for n in range(count)) for i, a in enumerate(asked)
        ]
        output = cross * solved
        residual = mpmath.matrix(count, value.shape[1])
        for n in range(count):
            residual[n, :] = solved[n, :] / inverse[n, n]
        as_tensor = (
            torch.tensor([[float(x) for x in row] for row in matrix.tolist()], dtype=torch.float64)
            for matrix in (output, mpmath.matrix([variance]), residual)
        )
        return tuple(as_tensor)


def error_by_row(found, exact):
    """Each row relative to its own size: rows differ by tens of powers of ten."""
    assert exact.isfinite().all()
    return ((found.double() - exact).abs().amax(-1) / exact.abs().amax(-1)).max().item()


def within(dtype, query, key, scale):
    """Rounding of the largest exponent, and a condition of 30 beside it."""
    largest = scale * query.norm(dim=-1).max() * key.norm(dim=-1).max()
    return 30 * (1 + largest.item()) * torch.finfo(dtype).eps


METHODS = [Cholesky(), ConjugateGradients(), ConjugateGradients(preconditioner=lambda x: x), LowRank(64)]


@one_in(2, {"method": METHODS, "dtype, far, near": [(torch.float32, 10.0, 1.0), (torch.float64, 40.0, 1.5)]})
def test_distant_queries(method, dtype, far, near):
    """Queries of scale 10 beside keys of scale 1 in 8 dimensions: exp(½‖q‖²) is near exp(400) in float32."""
    query = normal(1, 1, 5, 8, scale=far, dtype=dtype)
    key = normal(1, 1, 9, 8, seed=1, scale=near, dtype=dtype)
    value = normal(1, 1, 9, 2, seed=2, dtype=dtype)
    result = conditional_mean_attention(
        query, key, value, kernel=ExponentialKernel.create(0.5), ridge=1.0, method=method
    )
    exact, _, _ = explicit(query[0, 0], key[0, 0], value[0, 0], 0.5, 1.0)
    bound = within(dtype, query, key, 0.5) + (1e-9 if isinstance(method, ConjugateGradients) else 0)
    assert error_by_row(result.output[0, 0], exact) < bound


LONG = torch.tensor([[9.5, 0.0], [0.0, 9.3], [-9.4, 0.0], [0.0, -9.6], [6.7, 6.6], [-6.6, 6.5]])


@every_row("method", [Cholesky(), ConjugateGradients(), "weights"])
def test_keys_beyond_the_range(method):
    """exp(‖key‖²) is above exp(86), and of some keys above float32's exp(88.7); variance and leave-one-out too."""
    key = LONG
    value = normal(6, 2, seed=3)
    query = 0.7 * key + normal(6, 2, seed=4, scale=0.1)
    weight = torch.tensor([0.5, -2.0, 0.0, 1.0, 0.2, -0.3]) if method == "weights" else None
    arguments = {"kernel": ExponentialKernel.create(1.0), "ridge": 2.0, "log_weight": weight}
    how = Cholesky() if method == "weights" else method
    result = conditional_mean_attention(
        query[None, None], key[None, None], value[None, None], **arguments, need_variance=True, method=how
    )
    output, variance, residual = explicit(query, key, value, 1.0, 2.0, weight)
    bound = within(torch.float32, query, key, 1.0)
    assert error_by_row(result.output[0, 0], output) < bound
    assert error_by_row(result.variance[0], variance) < bound
    left = leave_one_out(key[None, None], value[None, None], **arguments)
    assert error_by_row(left.residual[0, 0], residual) < bound


def test_causal_is_a_loop_over_prefixes_though_a_later_key_is_tens_of_powers_larger():
    key = torch.cat([normal(4, 2, scale=0.3), LONG[:3]])[None, None]
    query = 8 * key / key.norm(dim=-1, keepdim=True)
    value = normal(1, 1, 7, 2, seed=2)
    arguments = {"kernel": ExponentialKernel.create(1.0), "ridge": 0.5, "need_variance": True}
    result = conditional_mean_attention(query, key, value, **arguments, is_causal=True)
    for last in range(1, 8):
        output, variance, _ = explicit(query[0, 0, last - 1 : last], key[0, 0, :last], value[0, 0, :last], 1.0, 0.5)
        bound = within(torch.float32, query, key, 1.0)
        assert error_by_row(result.output[0, 0, last - 1 : last], output) < bound
        assert error_by_row(result.variance[0, :, last - 1 : last], variance) < bound


@pytest.mark.medium
@every_row("method", METHODS)
def test_gradients_of_distant_queries(method):
    """Against float64, where the definition has room."""
    inputs = (normal(5, 4, scale=9.0), normal(6, 4, seed=1), normal(6, 2, seed=2), torch.tensor(1.5), torch.tensor(0.6))
    cotangent = normal(5, 2, seed=5)

    def by_definition(query, key, value, ridge, scale):
        gram = (scale * key @ key.mT).exp() + ridge * torch.eye(6, dtype=key.dtype)
        output = (scale * query @ key.mT).exp() @ torch.linalg.solve(gram, value)
        return (output / output.detach().norm(dim=-1, keepdim=True) * cotangent.double()).sum()

    def ours(query, key, value, ridge, scale):
        result = conditional_mean_attention(
            query[None, None],
            key[None, None],
            value[None, None],
            kernel=ExponentialKernel(scale),
            ridge=ridge,
            method=method,
        )
        output = result.output[0, 0]
        return (output / output.detach().norm(dim=-1, keepdim=True) * cotangent).sum()

    expected = torch.func.grad(by_definition, argnums=(0, 1, 2, 3, 4))(*(each.double() for each in inputs))
    leaves = [each.clone().requires_grad_() for each in inputs]
    result = torch.autograd.grad(ours(*leaves), leaves)
    for slope, exact, name in zip(result, expected, ("query", "key", "value", "ridge", "scale"), strict=True):
        error = (slope.double() - exact).norm() / exact.norm()
        assert error < within(torch.float32, inputs[0], inputs[1], 0.6), name


@every_row("method", METHODS)
def test_what_has_no_finite_form_is_said(method):
    query = normal(1, 1, 5, 8, scale=30.0)
    key = normal(1, 1, 9, 8, seed=1)
    value = normal(1, 1, 9, 2, seed=2)
    arguments = {"kernel": ExponentialKernel.create(1.0), "ridge": 1.0, "method": method}
    with pytest.raises(ValueError, match=r"the output is beyond the range of torch.float32 for \d+ of 10 numbers"):
        conditional_mean_attention(query, key, value, **arguments)
    with pytest.raises(ValueError, match=r"the variance is beyond the range of torch.float32"):
        conditional_mean_attention(query / 3, key, value / 1e30, **arguments, need_variance=True)
    assert (
        conditional_mean_attention(query.double() / 3, key.double(), value.double(), **arguments)
        .output.isfinite()
        .all()
    )
    with pytest.raises(
        ValueError, match=r"kernel values κ\(key, key\) from exp\(0\) to exp\(400\), farther apart than"
    ):
        conditional_mean_attention(
            query, torch.zeros_like(key) + torch.tensor([20.0] + [0.0] * 7) * torch.eye(9, 1), value, **arguments
        )


def test_the_module_says_so_too():
    module = Attention(4, 1, batch_first=True, heads=ConditionalMeanHeads(kernel="exponential", width=0.01))
    tokens = normal(1, 3, 4, scale=3.0)
    with pytest.raises(ValueError, match=r"beyond the range of torch.float32|farther apart than torch.float32 holds"):
        module(tokens, tokens, tokens)


def test_the_range_of_few_centres_is_said():
    key = LONG[None, None] * 1.05
    value = normal(1, 1, 6, 2)
    with pytest.raises(ValueError, match=r"LowRank has kernel values κ\(key, key\) up to exp\(101.6\) beside a ridge"):
        conditional_mean_attention(key, key, value, kernel=ExponentialKernel.create(1.0), ridge=1.0, method=LowRank())
