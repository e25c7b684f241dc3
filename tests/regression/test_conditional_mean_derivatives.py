"""Derivatives of conditional mean attention of first and second order, transforms and compilation, and bad calls."""

import pytest
import torch
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row, one_in, some_slow

from massieu.regression import (
    Cholesky,
    ExponentialKernel,
    FeatureKernel,
    GaussianKernel,
    LinearKernel,
    LowRank,
    conditional_mean_attention,
    leave_one_out,
    ridge_from,
)
from massieu.solve import ConjugateGradients


def leaf(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def number(value):
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


KERNELS = {
    "linear": lambda n: LinearKernel.create(),
    "exponential": ExponentialKernel,
    "gaussian": GaussianKernel,
    "features": lambda n: FeatureKernel.create(lambda x: n * torch.cat([x, x.square()], -1)),
}


def inputs(keys=5, queries=3):
    return leaf(1, 2, queries, 2), leaf(1, 1, keys, 2, seed=1), leaf(1, 1, keys, 2, seed=2), leaf(1, 1, 1, keys, seed=3)


# With more keys than features (linear has 2, "features" 4) the features' matrix is factored, otherwise the Gram matrix.
@pytest.mark.medium
@some_slow(
    ("name", "what", "keys"),
    [
        ("linear", "variance", 3),
        ("exponential", "causal", 2),
        ("gaussian", "variance", 2),
        ("features", "causal", 5),
        ("linear", "causal", 1),
        ("features", "mean", 2),
        ("linear", "causal", 3),
        ("exponential", "variance", 5),
        ("gaussian", "causal", 5),
        ("features", "variance", 5),
    ],
    4,
)
def test_first_and_second_derivatives_of_the_exact_methods(name, what, keys):
    def function(q, k, v, w, ridge, n):
        result = conditional_mean_attention(
            q,
            k,
            v,
            kernel=KERNELS[name](n),
            ridge=ridge,
            log_weight=w,
            is_causal=what == "causal",
            need_variance=what != "mean",
        )
        return result[: 1 if what == "mean" else 2]

    arguments = (*inputs(keys, queries=max(keys, 2)), number([0.6]), number(0.8))
    check_derivatives(function, arguments, forward=True)


@pytest.mark.medium
@some_slow(
    ("name", "method", "rank"),
    [
        ("exponential", ConjugateGradients(), 2),
        ("gaussian", LowRank(2), 0),
        ("gaussian", ConjugateGradients(preconditioner=lambda x: 2 * x), 0),
        ("gaussian", ConjugateGradients(), 0),
    ],
    2,
)
def test_first_and_second_derivatives_without_the_gram_matrix(name, method, rank, monkeypatch):
    monkeypatch.setattr("massieu.regression.iterative.BLOCK_PAIRS", 6)  # two rows at a time

    def function(q, k, v, w, ridge, n):
        result = conditional_mean_attention(
            q,
            k,
            v,
            kernel=KERNELS[name](n),
            ridge=ridge,
            log_weight=w,
            need_variance=True,
            method=method,
            preconditioner_rank=rank,
        )
        return result.output, result.variance

    arguments = (*inputs(3, queries=2), number([0.6]), number(0.8))
    check_derivatives(function, arguments)


def test_the_solves_gradient_is_the_exact_ones():
    query, key, value, weight = inputs(40)
    ridge = number(0.05)
    width = number(0.8)
    slopes = []
    for method in (Cholesky(), ConjugateGradients()):
        result = conditional_mean_attention(
            query, key, value, kernel=GaussianKernel(width), ridge=ridge, log_weight=weight, method=method
        )
        slopes.append(torch.autograd.grad(result.output.square().sum(), (query, key, value, weight, ridge, width)))
    for exact, ours in zip(*slopes, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-7, atol=1e-7)


def test_hidden_keys_have_no_gradient_and_leave_finite_ones():
    query, key, value, weight = inputs()
    hidden = weight.detach().clone()
    hidden[..., [1, 3]] = -torch.inf
    hidden.requires_grad_()
    for is_causal in (False, True):
        result = conditional_mean_attention(
            query, key, value, kernel=GaussianKernel.create(1.0), ridge=0.4, log_weight=hidden, is_causal=is_causal
        )
        slopes = torch.autograd.grad(result.output.sum(), (query, key, value, hidden))
        assert all(slope.isfinite().all() for slope in slopes)
        for slope in slopes[1:3]:
            assert (slope[:, :, [1, 3]] == 0).all()
            assert (slope[:, :, [2, 4] if not is_causal else [2]] != 0).any()


@one_in(2, {"name": ["linear", "gaussian", "exponential"], "is_causal": [False, True]})
def test_vmap_of_second_derivatives_is_a_loop(name, is_causal):
    query, key, value = (leaf(3, *tensor.shape, seed=seed).detach() for seed, tensor in enumerate(inputs()[:3]))

    def energy(q, k, v):
        result = conditional_mean_attention(
            q, k, v, kernel=KERNELS[name](torch.tensor(0.8)), ridge=0.5, is_causal=is_causal, need_variance=True
        )
        return result.output.square().sum() + result.variance.sum()

    hessian = torch.func.hessian(energy, argnums=(1, 2))
    together = torch.func.vmap(hessian)(query, key, value)
    for item in range(3):
        alone = hessian(query[item], key[item], value[item])
        for row, expected in zip(together, alone, strict=True):
            for ours, theirs in zip(row, expected, strict=True):
                torch.testing.assert_close(ours[item], theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "is_causal"), [("linear", True), ("gaussian", False), ("exponential", False)])
def test_compiled(name, is_causal):
    query, key, value, weight = inputs()

    def function(q, k, v, w):
        result = conditional_mean_attention(
            q, k, v, kernel=KERNELS[name](torch.tensor(0.8)), ridge=0.5, log_weight=w, is_causal=is_causal
        )
        return result.output.square().sum()

    torch._dynamo.reset()
    eager = torch.autograd.grad(function(query, key, value, weight), (query, key, value, weight))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    result = torch.autograd.grad(compiled(query, key, value, weight), (query, key, value, weight))
    for ours, expected in zip(result, eager, strict=True):
        torch.testing.assert_close(ours, expected)


def test_leave_one_out_is_differentiable():
    _, key, value, weight = inputs()

    def function(k, v, w, ridge, width):
        return tuple(leave_one_out(k, v, kernel=GaussianKernel(width), ridge=ridge, log_weight=w))

    check_derivatives(function, (key, value, weight, number(0.4), number(0.9)))


# --- bad calls -------------------------------------------------------------------------------------------------------

Q = torch.ones(1, 1, 3, 2)
K = torch.eye(2).reshape(1, 1, 2, 2)
V = torch.ones(1, 1, 2, 4)
G = GaussianKernel.create(1.0)
TWICE = torch.ones(1, 1, 2, 2)


@every_row(
    ("changes", "error", "named"),
    [
        ({"ridge": -1.0}, ValueError, "ridge must be finite and at least 0, got -1"),
        ({"ridge": float("nan")}, ValueError, "ridge must be finite and at least 0, got nan"),
        ({"ridge": torch.tensor([float("nan")])}, ValueError, r"ridge must be finite and at least 0, got nan"),
        ({"ridge": torch.ones(3)}, ValueError, r"1 \(one a key head\) or of shape \(1, 1\), got \(3,\)"),
        ({"ridge": "large"}, TypeError, "ridge must be a number or a floating-point tensor, got 'large'"),
        ({"ridge": torch.tensor(1)}, TypeError, "ridge must be a floating-point tensor, got a tensor of torch.int64"),
        (
            {"ridge": None, "operator_ridge": 0.1, "is_causal": True},
            ValueError,
            "operator_ridge does not go with is_causal",
        ),
        (
            {"key": TWICE, "ridge": 0.0},
            ValueError,
            "Gram matrix plus its ridge is singular to rounding in torch.float32",
        ),
        ({"key": TWICE, "ridge": 1e-9}, ValueError, "a larger ridge is needed, or float64"),
        ({"key": K * torch.nan}, ValueError, "key must be finite where a key is visible"),
        ({"value": V * torch.inf}, ValueError, "value must be finite"),
        ({"query": Q * torch.nan}, ValueError, "query must be finite"),
        ({"key": torch.ones(1, 1, 2, 3)}, ValueError, r"one head size, got 2 in .* and 3 in"),
        ({"value": None}, TypeError, "value must be a tensor, got None"),
        ({"kernel": "rbf"}, TypeError, "kernel must be a massieu.regression.Kernel, got 'rbf'"),
        ({"method": "cholesky"}, TypeError, r"method must be Cholesky\(\), .* LowRank\(\) or None, got 'cholesky'"),
        ({"method": 3.5}, TypeError, "or None, got 3.5"),
        ({"method": LowRank(), "is_causal": True}, ValueError, r"is_causal goes with method=Cholesky\(\) alone"),
        ({"method": LowRank(), "ridge": 0.0}, ValueError, "LowRank needs a positive ridge, got 0.0"),
        ({"method": ConjugateGradients(), "ridge": 0.0}, ValueError, "needs a positive ridge, got 0.0"),
        (
            {"method": ConjugateGradients(), "kernel": FeatureKernel.create(lambda x: x)},
            ValueError,
            r"Cholesky\(\) uses the map",
        ),
        ({"preconditioner_rank": -1}, ValueError, "preconditioner_rank must be a whole number, at least 0, got -1"),
        ({"log_weight": torch.zeros(3, 2)}, ValueError, r"one a key, for all queries .*\(1, 1, 1, 2\)"),
        ({"log_weight": torch.full((2,), torch.nan)}, ValueError, r"log_weight must be below \+inf and not NaN"),
    ],
)
def test_bad_calls_are_named(changes, error, named):
    arguments = {"query": Q, "key": K, "value": V, "kernel": G, "ridge": 0.5} | changes
    with pytest.raises(error, match=named):
        conditional_mean_attention(**arguments)


def test_bad_numbers_are_named():
    for create, name in ((GaussianKernel.create, "lengthscale"), (ExponentialKernel.create, "scale")):
        with pytest.raises(ValueError, match=f"{name} must be positive and finite, got 0"):
            create(0.0)
        with pytest.raises(ValueError, match=rf"{name} must be one number or one a head, got shape \(2, 2\)"):
            create(torch.ones(2, 2))
        with pytest.raises(
            TypeError, match=f"{name} must be a floating-point tensor, or numbers to make one of, got 'wide'"
        ):
            create("wide")
    for call, error, named in (
        (lambda: LowRank(0), ValueError, "rank must be a whole number, at least 1, got 0"),
        (lambda: LowRank(2.5), TypeError, "rank must be a whole number, got 2.5"),
    ):
        with pytest.raises(error, match=named):
            call()
    with pytest.raises(ValueError, match=r"prior_variance must be positive and finite, got 0.0"):
        ridge_from(noise_variance=1.0, prior_variance=0.0)
    with pytest.raises(ValueError, match="noise_variance must be finite and at least 0"):
        ridge_from(noise_variance=torch.tensor(-1.0), prior_variance=1.0)
    with pytest.raises(ValueError, match="need_variance=True"):
        conditional_mean_attention(Q, K, V, kernel=G, ridge=1.0).predictive_variance(
            noise_variance=1.0, prior_variance=1.0
        )
    with pytest.raises(ValueError, match="leave-one-out in features needs a positive ridge"):
        leave_one_out(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 1), kernel=LinearKernel.create(), ridge=0.0)


def test_iterations_are_refused_inside_transforms():
    with pytest.raises(ValueError, match=r"inside torch.func transforms and torch.compile, use method=Cholesky\(\)"):
        torch.func.grad(
            lambda k: conditional_mean_attention(Q, k, V, kernel=G, ridge=1.0, method=LowRank()).output.sum()
        )(K)
