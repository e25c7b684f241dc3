"""Conditional mean attention against scikit-learn, weighted regression, prefixes, and its own definition in NumPy."""

import numpy as np
import pytest
import torch
from tests.support.memory import LargestTensor
from tests.support.rows import every_row, one_in, some_slow
from torch.utils._python_dispatch import TorchDispatchMode

from massieu.errors import ConvergenceError
from massieu.regression import (
    Cholesky,
    ExponentialKernel,
    FeatureKernel,
    GaussianKernel,
    Kernel,
    LinearKernel,
    LowRank,
    choose_ridge,
    conditional_mean_attention,
    leave_one_out,
    ridge_from,
)
from massieu.solve import ConjugateGradients, Status

CLOSED_FORM = {"rtol": 1e-8, "atol": 1e-8}


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tokens(keys=12, queries=7, size=3, values=2, batch=2, heads=2, dtype=torch.float64):
    return (
        normal(batch, heads, queries, size, dtype=dtype),
        normal(batch, heads, keys, size, seed=1, dtype=dtype),
        normal(batch, heads, keys, values, seed=2, dtype=dtype),
    )


def many_features(points):
    """All products of up to two coordinates: of three coordinates, 10 of them."""
    one = torch.ones_like(points[..., :1])
    wide = torch.cat([one, points], -1)
    return (wide.unsqueeze(-1) * wide.unsqueeze(-2)).flatten(-2)


KERNELS = {
    "linear": LinearKernel.create(),
    "exponential": ExponentialKernel.create(0.4),
    "gaussian": GaussianKernel.create(1.3),
    "features": FeatureKernel.create(many_features),
}


def by_definition(query, key, value, kernel, ridge, precision=None):
    """One head, in NumPy, with an inverse. `precision` is the weight of each key."""
    pairs = {
        "linear": lambda a, b: a @ b.T,
        "exponential": lambda a, b: np.exp(0.4 * a @ b.T),
        "gaussian": lambda a, b: np.exp(-((a[:, None] - b) ** 2).sum(-1) / (2 * 1.3**2)),
        "features": lambda a, b: (1 + a @ b.T) ** 2,
    }[kernel]
    query, key, value = (tensor.numpy() for tensor in (query, key, value))
    noise = ridge / (np.ones(len(key)) if precision is None else np.asarray(precision))
    cross = pairs(query, key)
    smoother = cross @ np.linalg.inv(pairs(key, key) + np.diag(noise))
    return smoother @ value, np.diag(pairs(query, query)) - (smoother * cross).sum(-1)


@every_row("name", KERNELS)
@every_row("keys", [6, 40])  # fewer and more than features
def test_the_definition(name, keys):
    query, key, value = tokens(keys)
    result = conditional_mean_attention(
        query, key, value, kernel=KERNELS[name], ridge=0.3, need_variance=True, method=Cholesky()
    )
    assert result.error_bound is None
    for item in np.ndindex(2, 2):
        output, variance = by_definition(query[item], key[item], value[item], name, 0.3)
        np.testing.assert_allclose(result.output[item], output, **CLOSED_FORM)
        np.testing.assert_allclose(result.variance[item], variance, **CLOSED_FORM)


@every_row("method", [Cholesky(), ConjugateGradients(), LowRank()])
def test_the_exponential_kernels_scale_is_softmaxs_by_default(method):
    query, key, value = tokens(size=5)
    key.requires_grad_()
    by_default, by_scale = (
        conditional_mean_attention(query, key, value, kernel=kernel, ridge=0.3, method=method, need_variance=True)
        for kernel in (ExponentialKernel.create(), ExponentialKernel.create(5**-0.5))
    )
    torch.testing.assert_close(by_default.output, by_scale.output)
    torch.testing.assert_close(by_default.variance, by_scale.variance)
    slopes = (torch.autograd.grad(result.output.sum(), key, retain_graph=True)[0] for result in (by_default, by_scale))
    torch.testing.assert_close(*slopes)


def test_kernels_take_numbers_lists_arrays_and_tensors():
    query, key, value = tokens()
    for create in (GaussianKernel.create, ExponentialKernel.create):
        for one, other in (
            (0.7, torch.tensor(0.7, dtype=torch.float64)),
            ([0.7, 1.1], np.array([0.7, 1.1])),
            (2, np.float64(2)),
        ):
            result, same = (
                conditional_mean_attention(query, key, value, kernel=create(number), ridge=0.3).output
                for number in (one, other)
            )
            assert torch.equal(result, same)
    with pytest.raises(TypeError, match="map must be a function, got 3"):
        FeatureKernel.create(3)


# scikit-learn takes a second to import: the tests do so, not their collection.
def test_scikit_learns_kernel_ridge_and_gaussian_process():
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel
    from sklearn.kernel_ridge import KernelRidge
    from sklearn.linear_model import Ridge

    query, key, value = tokens(40, batch=1, heads=1)
    q, k, v = (tensor[0, 0].numpy() for tensor in (query, key, value))
    result = conditional_mean_attention(query, key, value, kernel=GaussianKernel.create(1.3), ridge=0.3)
    theirs = KernelRidge(alpha=0.3, kernel="rbf", gamma=1 / (2 * 1.3**2)).fit(k, v).predict(q)
    np.testing.assert_allclose(result.output[0, 0], theirs, **CLOSED_FORM)
    result = conditional_mean_attention(query, key, value, kernel=LinearKernel.create(), ridge=0.3)
    np.testing.assert_allclose(
        result.output[0, 0], Ridge(alpha=0.3, fit_intercept=False).fit(k, v).predict(q), **CLOSED_FORM
    )
    noise = 0.5
    prior = 2.0
    ridge = ridge_from(noise_variance=noise, prior_variance=prior)
    result = conditional_mean_attention(
        query, key, value, kernel=GaussianKernel.create(1.3), ridge=ridge, need_variance=True
    )
    model = GaussianProcessRegressor(
        ConstantKernel(prior, "fixed") * RBF(1.3, "fixed"), alpha=noise, optimizer=None
    ).fit(k, v)
    mean, deviation = model.predict(q, return_std=True)
    np.testing.assert_allclose(result.output[0, 0], mean, **CLOSED_FORM)
    predictive = result.predictive_variance(noise_variance=noise, prior_variance=prior)
    np.testing.assert_allclose((predictive[0, 0] - noise).sqrt(), deviation[:, 0], **CLOSED_FORM)


def test_trap_19_the_operators_ridge_and_the_matrixs():
    query, key, value = tokens(40)
    keep = torch.arange(40) < 25
    for visible, count in ((None, 40), (keep, 25)):
        ours = conditional_mean_attention(
            query, key, value, kernel=KERNELS["gaussian"], operator_ridge=0.1, log_weight=visible
        )
        same = conditional_mean_attention(
            query, key, value, kernel=KERNELS["gaussian"], ridge=0.1 * count, log_weight=visible
        )
        torch.testing.assert_close(ours.output, same.output)
    # In features: C_vk (C_kk + (λ/L) I)⁻¹ φ(q).
    phi = many_features(key)
    asked = many_features(query)
    operator = phi.mT @ phi / 40 + 0.1 * torch.eye(16, dtype=torch.float64)
    expected = asked @ torch.linalg.inv(operator) @ (phi.mT @ value / 40)
    ours = conditional_mean_attention(query, key, value, kernel=KERNELS["features"], operator_ridge=0.1)
    torch.testing.assert_close(ours.output, expected, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="exactly one of ridge and operator_ridge"):
        conditional_mean_attention(query, key, value, kernel=LinearKernel.create(), ridge=0.1, operator_ridge=0.1)
    with pytest.raises(ValueError, match="operator_ridge must be given, got none"):
        conditional_mean_attention(query, key, value, kernel=LinearKernel.create())


@every_row("name", KERNELS)
@every_row("keys", [6, 40])
def test_log_weights_are_precisions_and_minus_infinity_hides(name, keys):
    from sklearn.linear_model import Ridge

    query, key, value = tokens(keys)
    weight = normal(2, 1, 1, keys, seed=3)
    weight[:, :, :, ::3] = -torch.inf
    # What is hidden may hold anything.
    for tensor in (key, value):
        tensor[:, :, ::3] = torch.nan
    result = conditional_mean_attention(
        query, key, value, kernel=KERNELS[name], ridge=0.3, log_weight=weight, need_variance=True
    )
    seen = [n for n in range(keys) if n % 3]
    for item in np.ndindex(2, 2):
        precision = weight[item[0], 0, 0, seen].exp()
        output, variance = by_definition(query[item], key[item][seen], value[item][seen], name, 0.3, precision)
        np.testing.assert_allclose(result.output[item], output, **CLOSED_FORM)
        np.testing.assert_allclose(result.variance[item], variance, **CLOSED_FORM)
    if name == "linear":
        model = Ridge(alpha=0.3, fit_intercept=False)
        model.fit(key[0, 0, seen], value[0, 0, seen], sample_weight=weight[0, 0, 0, seen].exp())
        np.testing.assert_allclose(result.output[0, 0], model.predict(query[0, 0]), **CLOSED_FORM)


@one_in(3, {"name": KERNELS, "method": [Cholesky(), ConjugateGradients(), LowRank()], "keys": [6, 40]})
def test_trap_15_without_a_visible_key_the_prior(name, method, keys):
    if name == "features" and isinstance(method, ConjugateGradients):
        return
    query, key, value = (tensor.requires_grad_() for tensor in tokens(keys))
    keep = torch.ones(2, 1, 1, keys, dtype=torch.bool)
    keep[1] = False
    result = conditional_mean_attention(
        query, key, value, kernel=KERNELS[name], ridge=0.3, log_weight=keep, need_variance=True, method=method
    )
    assert (result.output[1] == 0).all()
    prior = KERNELS[name].diagonal(query)
    torch.testing.assert_close(result.variance[1], prior[1])
    assert (result.variance[0] < prior[0]).all()
    result.output.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (query, key, value))
    assert (value.grad[1] == 0).all()


@one_in(3, {"name": KERNELS, "keys, queries": [(9, 9), (9, 5), (5, 9), (150, 170)]})
def test_causal_is_a_loop_over_prefixes(name, keys, queries):
    query, key, value = tokens(keys, queries, batch=1)
    weight = normal(1, 1, 1, keys, seed=3)
    weight[..., 2] = -torch.inf
    result = conditional_mean_attention(
        query, key, value, kernel=KERNELS[name], ridge=0.3, log_weight=weight, is_causal=True, need_variance=True
    )
    for place in range(0, queries, 1 if queries < 20 else 13):
        last = min(place + 1, keys)
        prefix = conditional_mean_attention(
            query[:, :, place : place + 1],
            key[:, :, :last],
            value[:, :, :last],
            kernel=KERNELS[name],
            ridge=0.3,
            log_weight=weight[..., :last],
            need_variance=True,
        )
        torch.testing.assert_close(result.output[:, :, place], prefix.output[:, :, 0], **CLOSED_FORM)
        torch.testing.assert_close(result.variance[:, :, place], prefix.variance[:, :, 0], **CLOSED_FORM)


@every_row("name", KERNELS)
@every_row("is_causal", [False, True])
def test_grouped_heads_and_numbers_a_head(name, is_causal):
    key = normal(2, 2, 20, 3)
    value = normal(2, 2, 20, 4, seed=1)
    query = normal(2, 6, 20, 3, seed=2)
    ridge = torch.tensor([0.2, 3.0], dtype=torch.float64)
    kernel = {"exponential": ExponentialKernel.create(ridge / 10), "gaussian": GaussianKernel.create(ridge)}.get(
        name, KERNELS[name]
    )
    result = conditional_mean_attention(
        query, key, value, kernel=kernel, ridge=ridge, is_causal=is_causal, need_variance=True
    )
    assert result.output.shape == (2, 6, 20, 4)
    assert result.variance.shape == (2, 6, 20)
    wide = conditional_mean_attention(
        query.unflatten(1, (2, 3)), key, value, kernel=kernel, ridge=ridge, is_causal=is_causal
    )
    torch.testing.assert_close(wide.output.flatten(1, 2), result.output, **CLOSED_FORM)
    for head in range(6):
        own = (
            type(kernel)(*[getattr(kernel, field)[head // 3] for field in _numbers(kernel)])
            if _numbers(kernel)
            else kernel
        )
        alone = conditional_mean_attention(
            query[:, [head]],
            key[:, [head // 3]],
            value[:, [head // 3]],
            kernel=own,
            ridge=ridge[head // 3],
            is_causal=is_causal,
        )
        torch.testing.assert_close(result.output[:, [head]], alone.output, **CLOSED_FORM)


def _numbers(kernel):
    return [name for name in ("scale", "lengthscale") if hasattr(kernel, name)]


def test_ridge_zero_interpolates_and_in_features_is_least_squares():
    from sklearn.linear_model import LinearRegression

    query, key, value = tokens(6)
    result = conditional_mean_attention(key, key, value, kernel=KERNELS["gaussian"], ridge=0.0, need_variance=True)
    torch.testing.assert_close(result.output, value, rtol=1e-9, atol=1e-9)
    assert result.variance.max() < 1e-9
    query, key, value = tokens(40)
    result = conditional_mean_attention(query, key, value, kernel=LinearKernel.create(), ridge=0.0)
    model = LinearRegression(fit_intercept=False).fit(key[0, 0], value[0, 0])
    np.testing.assert_allclose(result.output[0, 0], model.predict(query[0, 0]), **CLOSED_FORM)


@every_row("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_row("is_causal", [False, True])
def test_lower_precision_is_computed_in_float32(dtype, is_causal):
    query, key, value = tokens(40, 40, dtype=dtype)
    for kernel in KERNELS.values():
        result = conditional_mean_attention(
            query, key, value, kernel=kernel, ridge=0.5, is_causal=is_causal, need_variance=True
        )
        exact = conditional_mean_attention(
            query.double(), key.double(), value.double(), kernel=kernel, ridge=0.5, is_causal=is_causal
        )
        assert result.output.dtype == dtype
        assert result.variance.dtype == torch.float32
        size = torch.finfo(dtype).eps + 2000 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(result.output.double(), exact.output, rtol=size, atol=2 * size)


# --- without the Gram matrix -----------------------------------------------------------------------------------------


@pytest.mark.medium
@some_slow(("name", "rank"), [("exponential", 10), ("gaussian", 0), ("linear", 0)], 2)
def test_conjugate_gradients_are_exact_to_their_bound(name, rank, monkeypatch):
    monkeypatch.setattr("massieu.regression.iterative.BLOCK_PAIRS", 1000)
    query, key, value = tokens(40, 25, batch=1)
    weight = normal(1, 2, 1, 40, seed=3)
    weight[..., 5] = -torch.inf
    arguments = {"kernel": KERNELS[name], "ridge": 0.1, "log_weight": weight, "need_variance": True}
    exact = conditional_mean_attention(query, key, value, **arguments, method=Cholesky())
    arguments["preconditioner_rank"] = rank
    result = conditional_mean_attention(query, key, value, **arguments, method=ConjugateGradients())
    torch.testing.assert_close(result.output, exact.output, **CLOSED_FORM)
    torch.testing.assert_close(result.variance, exact.variance, **CLOSED_FORM)
    loose = conditional_mean_attention(query, key, value, **arguments, method=ConjugateGradients(rtol=1e-3))
    error = (loose.output - exact.output).norm(dim=-1)
    assert (error <= loose.error_bound + 1e-9).all()
    # Three keys' worth of directions are solved for exactly; so is what the preconditioner holds.
    assert error.max() > 1e-8 or rank > 0 or name == "linear"


def test_no_gram_matrix_is_ever_formed(monkeypatch):
    monkeypatch.setattr("massieu.regression.iterative.BLOCK_PAIRS", 9000)
    query, key, value = (tensor.requires_grad_() for tensor in tokens(300, 300, batch=1, heads=1))
    ridge = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    with LargestTensor() as largest:
        for method in (ConjugateGradients(), LowRank(20)):
            result = conditional_mean_attention(
                query,
                key,
                value,
                kernel=GaussianKernel(ridge / 2),
                ridge=ridge,
                method=method,
                preconditioner_rank=20,
            )
            result.output.square().sum().backward()
    assert largest.numbers <= 9000
    with LargestTensor() as largest:
        conditional_mean_attention(query, key, value, kernel=GaussianKernel(ridge / 2), ridge=ridge)
    assert largest.numbers == 300**2


def test_conjugate_gradients_that_stop_short_say_so():
    query, key, value = tokens(200, 5)
    with pytest.raises(ConvergenceError, match=r"relative residual of .* after 3 steps; a larger ridge"):
        conditional_mean_attention(
            query,
            key,
            value,
            kernel=KERNELS["gaussian"],
            ridge=1e-4,
            method=ConjugateGradients(max_steps=3),
            preconditioner_rank=0,
        )


def test_a_preconditioner_saves_steps():
    """Of all keys it is the inverse, whose eigenvalues are all one; one's own takes its place."""
    query, key, value = tokens(100, 5, batch=1, heads=1)
    arguments = {"kernel": KERNELS["gaussian"], "ridge": 1e-3, "method": ConjugateGradients(max_steps=3)}
    exact = conditional_mean_attention(query, key, value, **arguments | {"method": Cholesky()})
    result = conditional_mean_attention(query, key, value, **arguments, preconditioner_rank=100)
    torch.testing.assert_close(result.output, exact.output, **CLOSED_FORM)
    with pytest.raises(ConvergenceError):
        conditional_mean_attention(query, key, value, **arguments, preconditioner_rank=0)
    gram = KERNELS["gaussian"](key, key) + 1e-3 * torch.eye(100, dtype=torch.float64)
    inverse = torch.linalg.inv(gram)
    arguments["method"] = ConjugateGradients(max_steps=3, preconditioner=lambda x: x @ inverse)
    own = conditional_mean_attention(query, key, value, **arguments)
    torch.testing.assert_close(own.output, exact.output, **CLOSED_FORM)


@every_row("name", ["gaussian", "exponential"])
def test_conjugate_gradients_told_to_go_on_say_how_far_off_they_are(name):
    query, key, value = tokens(200, 5)
    arguments = {"kernel": KERNELS[name], "ridge": 1e-2}
    exact = conditional_mean_attention(query, key, value, **arguments, method=Cholesky())
    short = {"method": ConjugateGradients(max_steps=3), "preconditioner_rank": 0}
    result = conditional_mean_attention(query, key, value, **arguments, **short, throw=False)
    assert exact.convergence is None
    assert result.convergence is not None
    assert bool((result.convergence.status == Status.MAX_STEPS).any())
    assert float(result.convergence.residual.max()) > 1e-6
    error = (result.output - exact.output).norm(dim=-1)
    assert (error <= result.error_bound * (1 + 1e-9) + 1e-8).all()


@pytest.mark.parametrize("name", KERNELS)
def test_few_centres_stay_within_their_bound(name):
    query, key, value = tokens(80, 25)
    weight = normal(2, 2, 1, 80, seed=3)
    weight[..., 5] = -torch.inf
    arguments = {"kernel": KERNELS[name], "ridge": 0.1, "log_weight": weight, "need_variance": True}
    exact = conditional_mean_attention(query, key, value, **arguments, method=Cholesky())
    errors = []
    for rank in (2, 8, 30, 1000):
        result = conditional_mean_attention(query, key, value, **arguments, method=LowRank(rank))
        error = (result.output - exact.output).norm(dim=-1)
        assert (error <= result.error_bound * (1 + 1e-9) + 1e-8).all()
        errors.append(error.max().item())
    assert errors[0] > 100 * errors[-1]
    torch.testing.assert_close(result.output, exact.output, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result.variance, exact.variance, rtol=1e-6, atol=1e-6)
    assert result.error_bound.max() < 1e-2


def test_low_rank_is_the_regression_of_its_centres():
    """Subset of regressors: κ(q, C)(κ(C, K)κ(K, C) + λκ(C, C))⁻¹κ(C, K)v, with centres found by a plain loop."""
    query, key, value = tokens(30, batch=1, heads=1)
    k, q, v = (tensor[0, 0].numpy() for tensor in (key, query, value))

    def pairs(a, b):
        return np.exp(-((a[:, None] - b) ** 2).sum(-1) / (2 * 1.3**2))

    gram = pairs(k, k)
    chosen = []
    for _ in range(5):
        inverse = np.linalg.inv(gram[np.ix_(chosen, chosen)]) if chosen else np.zeros((0, 0))
        left = np.diag(gram) - np.einsum("ni,ij,nj->n", gram[:, chosen], inverse, gram[:, chosen])
        left[chosen] = -1
        chosen.append(int(left.argmax()))
    centre = k[chosen]
    matrix = pairs(centre, k) @ pairs(k, centre) + 0.2 * pairs(centre, centre)
    expected = pairs(q, centre) @ np.linalg.solve(matrix, pairs(centre, k) @ v)
    result = conditional_mean_attention(query, key, value, kernel=KERNELS["gaussian"], ridge=0.2, method=LowRank(5))
    np.testing.assert_allclose(result.output[0, 0], expected, **CLOSED_FORM)


def test_auto_forms_no_large_gram_matrix(monkeypatch):
    monkeypatch.setattr("massieu.regression.conditional_mean.LONGEST_GRAM", 30)
    query, key, value = tokens(40)
    assert conditional_mean_attention(query, key, value, kernel=KERNELS["gaussian"], ridge=0.1).error_bound is not None
    for kernel, ridge, causal in (
        (LinearKernel.create(), 0.1, False),
        (KERNELS["gaussian"], 0.1, True),
        (KERNELS["gaussian"], 0.0, False),
    ):
        exact = conditional_mean_attention(query, key, value, kernel=kernel, ridge=ridge, is_causal=causal)
        assert exact.error_bound is None


class Laplacian(Kernel):
    """exp(−‖a − b‖₁/width): a user's own."""

    width: torch.Tensor

    def __call__(self, left, right):
        return (-torch.cdist(left, right, p=1) / self.width).exp()

    def diagonal(self, points):
        return points.new_ones(points.shape[:-1])


@every_row("method", [Cholesky(), ConjugateGradients(), LowRank(40)])
def test_a_kernel_of_ones_own(method):
    from sklearn.kernel_ridge import KernelRidge

    query, key, value = tokens(40, batch=1, heads=1)
    width = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    result = conditional_mean_attention(query, key, value, kernel=Laplacian(width), ridge=0.3, method=method)
    model = KernelRidge(alpha=0.3, kernel="laplacian", gamma=1 / 1.5).fit(key[0, 0], value[0, 0])
    np.testing.assert_allclose(result.output[0, 0].detach(), model.predict(query[0, 0]), **CLOSED_FORM)
    result.output.sum().backward()
    assert width.grad is not None


@every_row("method", [Cholesky(), ConjugateGradients(), LowRank()])
@every_row(("keys", "queries"), [(0, 3), (3, 0), (1, 1)])
def test_no_key_or_no_query(method, keys, queries):
    query, key, value = tokens(keys, queries)
    result = conditional_mean_attention(
        query, key, value, kernel=KERNELS["gaussian"], ridge=0.3, need_variance=True, method=method
    )
    assert result.output.shape == (2, 2, queries, 2)
    assert result.variance.shape == (2, 2, queries)
    if keys == 0:
        assert (result.output == 0).all()
        assert (result.variance == 1).all()


# --- leave one out ---------------------------------------------------------------------------------------------------


@one_in(2, {"name": KERNELS, "keys": [6, 40]})
def test_leave_one_out_leaves_one_out(name, keys):
    _, key, value = tokens(keys)
    weight = normal(2, 1, 1, keys, seed=3)
    weight[..., 1] = -torch.inf
    result = leave_one_out(key, value, kernel=KERNELS[name], ridge=0.3, log_weight=weight)
    residual = torch.zeros_like(value)
    for place in (n for n in range(keys) if n != 1):
        without = weight.clone()
        without[..., place] = -torch.inf
        predicted = conditional_mean_attention(
            key[:, :, [place]], key, value, kernel=KERNELS[name], ridge=0.3, log_weight=without
        )
        residual[:, :, place] = value[:, :, place] - predicted.output[:, :, 0]
    torch.testing.assert_close(result.residual, residual, **CLOSED_FORM)
    share = torch.softmax(weight[:, :, 0], -1)
    torch.testing.assert_close(result.mean_squared_error, (share * residual.square().mean(-1)).sum(-1), **CLOSED_FORM)


@every_row("name", KERNELS)
@every_row("keys", [6, 40])
def test_the_errors_of_many_ridges_are_those_of_predictions_without_each_key(name, keys):
    _, key, value = tokens(keys)
    weight = normal(2, 1, 1, keys, seed=3)
    weight[..., 1] = -torch.inf
    ridges = [1e-3, 0.3, 20.0]
    result = choose_ridge(key, value, ridges, kernel=KERNELS[name], log_weight=weight).mean_squared_error
    share = torch.softmax(weight[:, :, 0], -1)
    for place, ridge in enumerate(ridges):
        expected = torch.zeros(2, 2, dtype=torch.float64)
        for item, head in np.ndindex(2, 2):
            for left_out in (n for n in range(keys) if n != 1):
                kept = [n for n in range(keys) if n not in (1, left_out)]
                own_key = key[item, head]
                own_value = value[item, head]
                precision = weight[item, 0, 0, kept].exp()
                predicted, _ = by_definition(
                    own_key[[left_out]], own_key[kept], own_value[kept], name, ridge, precision
                )
                error = np.square(own_value[left_out].numpy() - predicted[0]).mean()
                expected[item, head] += share[item, 0, left_out] * error
        torch.testing.assert_close(result[place], expected, rtol=1e-6, atol=0)


class Factorisations(TorchDispatchMode):
    """Counts factorisations of matrices of that size."""

    def __init__(self, size):
        super().__init__()
        self.size, self.names = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in ("aten::_linalg_eigh", "aten::linalg_cholesky_ex") and args[0].shape[-1] == self.size:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.medium
def test_one_eigendecomposition_serves_all_ridges():
    _, key, value = tokens(40)
    grid = [10.0**power for power in range(-5, 5)]
    with Factorisations(40) as factorisations:
        choose_ridge(key, value, grid, kernel=KERNELS["gaussian"])
    assert factorisations.names == ["aten::_linalg_eigh"]


@every_row("radius", [3.0, 28.0])
def test_ridges_that_eigenvalues_are_too_rough_for_are_solved_exactly(radius):
    """Rounding of the largest eigenvalue is beyond the ridge, or exp(‖key‖²) beyond the floating range."""
    angle = torch.arange(30, dtype=torch.float64) / 5
    key = radius * torch.stack([angle.cos(), angle.sin()], -1)[None, None]
    value = normal(1, 1, 30, 1, seed=2)
    ridges = [1e-11, 1e-3, 1e3]
    arguments = {"kernel": ExponentialKernel.create(1.0)}
    errors = choose_ridge(key, value, ridges, **arguments).mean_squared_error
    for ridge, error in zip(ridges, errors, strict=True):
        expected = leave_one_out(key, value, ridge=ridge, **arguments).mean_squared_error
        torch.testing.assert_close(error, expected, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="singular to rounding"):
        choose_ridge(key[:, :, [1, 1, 2]], value[:, :, :3], [1.0, 0.0], **arguments)


def test_the_chosen_ridge_has_the_least_error():
    _, key, _ = tokens(60)
    value = key @ normal(3, 2, seed=5) + 0.5 * normal(2, 2, 60, 2, seed=6)
    grid = [10.0**power for power in range(-6, 4)]
    result = choose_ridge(key, value, grid, kernel=KERNELS["gaussian"])
    assert result.ridge.shape == (2, 2)
    assert result.mean_squared_error.shape == (10, 2, 2)
    best = leave_one_out(key, value, kernel=KERNELS["gaussian"], ridge=result.ridge).mean_squared_error
    torch.testing.assert_close(best, result.mean_squared_error.amin(0))
    assert ((result.ridge > 1e-6) & (result.ridge < 1e3)).all()
    with pytest.raises(ValueError, match="at least one number"):
        choose_ridge(key, value, [], kernel=LinearKernel.create())
