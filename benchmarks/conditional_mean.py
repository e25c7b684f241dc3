"""Conditional mean attention beside scikit-learn's kernel ridge, and without the Gram matrix beside itself with it.

    python benchmarks/conditional_mean.py

float64, one thread, one head of 8 numbers a key and 8 a value, as many queries as keys, a Gaussian kernel of lengthscale 4
(the root of a squared distance's mean), ridge 0.1. `ConditionalMeanRegressor`'s choice of lengthscale and ridge among 7 and
16, beside the fits alone of a grid of 9 by 5. About five minutes.
"""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from sklearn.kernel_ridge import KernelRidge
from threadpoolctl import threadpool_limits
from torch import Tensor

import cases
import harness
from cases import Case, Sides
from massieu.regression import Cholesky, GaussianKernel, LowRank, conditional_mean_attention
from massieu.regression.conditional_mean import Method
from massieu.sklearn import ConditionalMeanRegressor
from massieu.solve import ConjugateGradients

SIZE, WIDTH, RIDGE, LENGTH = 8, 4.0, 0.1, 4096
ITERATIVE, CENTRES = ConjugateGradients(), LowRank()
GRAM = "ours with the Gram matrix"
SEARCH = "choice of lengthscale and ridge, 1,000 rows of 3 columns"


def _inputs(length: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 1, int(length), SIZE, dtype=torch.float64, generator=generator) for _ in range(3)]


def _forward(method: Method, length: float) -> Callable[[], tuple[Tensor, ...]]:
    query, key, value = _inputs(length)
    kernel = GaussianKernel.create(WIDTH)
    return lambda: (conditional_mean_attention(query, key, value, kernel=kernel, ridge=RIDGE, method=method).output,)


def _both_ways(method: Method, length: float) -> harness.Work:
    inputs = [tensor.requires_grad_() for tensor in _inputs(length)]
    kernel = GaussianKernel.create(WIDTH)

    def work() -> tuple[Tensor, ...]:
        found = conditional_mean_attention(*inputs, kernel=kernel, ridge=RIDGE, method=method)
        return torch.autograd.grad(found.output.square().sum(), inputs)

    return work


def _scikit_learn(length: float) -> Sides:
    query, key, value = (tensor[0, 0].numpy() for tensor in _inputs(length))

    def theirs() -> tuple[Tensor, ...]:
        model = KernelRidge(alpha=RIDGE, kernel="rbf", gamma=0.5 / WIDTH**2)  # pyright: ignore[reportArgumentType]
        return (torch.from_numpy(model.fit(key, value).predict(query))[None, None],)

    return theirs, _forward(Cholesky(), length)


def _search(rows: float) -> Sides:
    generator = np.random.default_rng(0)
    table = generator.normal(size=(int(rows), 3))
    target = np.sin(table @ [1.0, 2.0, 0.5]) + 0.3 * generator.normal(size=len(table))

    def theirs() -> None:
        for gamma, alpha in itertools.product(np.logspace(-2, 1, 9), np.logspace(-4, 0, 5)):
            KernelRidge(alpha=alpha, kernel="rbf", gamma=gamma).fit(table, target)  # pyright: ignore[reportArgumentType]

    return theirs, lambda: ConditionalMeanRegressor().fit(table, target)


def _beside_gram(method: Method, length: float) -> Sides:
    return _forward(Cholesky(), length), _forward(method, length)


def _gradients_beside_gram(method: Method, length: float) -> Sides:
    return _both_ways(Cholesky(), length), _both_ways(method, length)


def accuracy() -> dict[str, float]:
    """Largest differences from the Gram matrix's outputs, and the bounds that came with them."""
    query, key, value = _inputs(LENGTH)
    found = {}
    (exact,) = _forward(Cholesky(), LENGTH)()
    for name, method in (("conjugate gradients", ITERATIVE), ("256 centres", CENTRES)):
        ours = conditional_mean_attention(
            query, key, value, kernel=GaussianKernel.create(WIDTH), ridge=RIDGE, method=method
        )
        assert ours.error_bound is not None
        found[name] = (ours.output - exact).norm(dim=-1).max().item()
        found[f"{name}, bound"] = ours.error_bound.max().item()
    return found


CASES = {
    "by the Gram matrix, L = 1024": Case("scikit-learn's KernelRidge", 1024, _scikit_learn, 1.1, memory_rounds=0),
    "by the Gram matrix, L = 4096": Case(
        "scikit-learn's KernelRidge", LENGTH, _scikit_learn, 1.1, rounds=5, memory_rounds=0
    ),
    SEARCH: Case("scikit-learn's KernelRidge, 45 fits", 1000, _search, 0.4, rounds=5, memory_rounds=0),
    f"conjugate gradients, L = {LENGTH}": Case(
        GRAM, LENGTH, partial(_beside_gram, ITERATIVE), None, 0.1, rounds=9, fresh=True
    ),
    f"conjugate gradients, L = {LENGTH}, forward and backward": Case(
        GRAM, LENGTH, partial(_gradients_beside_gram, ITERATIVE), None, 0.1, rounds=3, fresh=True
    ),
    f"256 centres, L = {LENGTH}": Case(GRAM, LENGTH, partial(_beside_gram, CENTRES), rounds=5, fresh=True),
}


if __name__ == "__main__":
    threadpool_limits(1)
    cases.main(Path(__file__), __doc__, CASES, accuracy=accuracy)
