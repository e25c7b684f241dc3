"""Derivative helpers, sums, quadrature and matrices against independent values."""

import math

import pytest
import torch
from torch.func import hessian, jacrev, vmap

from massieu.foundation import matrices, numerics
from massieu.foundation.derivatives import forward_derivative, reverse_derivative

DOUBLE = torch.float64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def one(x, index, y, absent):
    assert absent is None
    return torch.sin(x) * y + index


def two(x, index, y, absent):
    return one(x, index, y, absent), (x * y).sum(-1)


X = normal(3, 4)
Y = normal(3, 4, seed=1)
INDEX = torch.arange(4)
ARGUMENTS = (X, INDEX, Y, None)


def test_reverse_derivatives():
    v = normal(3, 4, seed=2)
    w = normal(3, seed=3)
    dx, none, dy, absent = reverse_derivative(one, ARGUMENTS, v)
    torch.testing.assert_close(dx, X.cos() * Y * v)
    torch.testing.assert_close(dy, X.sin() * v)
    assert none is None
    assert absent is None
    dx, _, dy, _ = reverse_derivative(two, ARGUMENTS, (v, w))
    torch.testing.assert_close(dy, X.sin() * v + X * w.unsqueeze(-1))
    dx, _, dy, _ = reverse_derivative(two, ARGUMENTS, (None, w), needed=[False, True, True, True])
    assert dx is None
    torch.testing.assert_close(dy, X * w.unsqueeze(-1))
    assert reverse_derivative(one, ARGUMENTS, v, needed=[False] * 4) == (None,) * 4


def test_forward_derivatives():
    dx = normal(3, 4, seed=2)
    dy = normal(3, 4, seed=3)
    torch.testing.assert_close(forward_derivative(one, ARGUMENTS, (dx, None, None, None)), X.cos() * Y * dx)
    first, second = forward_derivative(two, ARGUMENTS, (dx, None, dy, None))
    torch.testing.assert_close(first, X.cos() * Y * dx + X.sin() * dy)
    torch.testing.assert_close(second, (Y * dx + X * dy).sum(-1))
    torch.testing.assert_close(forward_derivative(one, ARGUMENTS, (None,) * 4), torch.zeros_like(X))
    assert [tuple(part.shape) for part in forward_derivative(two, ARGUMENTS, (None,) * 4)] == [(3, 4), (3,)]


def test_products_are_differentiated_again_in_transforms():
    def slope(x):
        pulled = reverse_derivative(one, (x, INDEX, Y[0], None), torch.ones_like(x))[0]
        moved = forward_derivative(one, (x, INDEX, Y[0], None), (torch.ones_like(x), None, None, None))
        return pulled, moved

    for result in vmap(jacrev(slope))(X):
        torch.testing.assert_close(result.diagonal(dim1=-2, dim2=-1), -X.sin() * Y[0])


def test_empty_rows():
    scores = torch.tensor([[0.0, 1.0], [-math.inf, -math.inf]], dtype=DOUBLE, requires_grad=True)
    total = numerics.logsumexp(scores)
    torch.testing.assert_close(total[0], torch.tensor(math.log(1 + math.e), dtype=DOUBLE))
    assert total[1] == -math.inf
    total[0].backward(retain_graph=True)
    (slope,) = torch.autograd.grad(numerics.log_softmax(scores)[:, 0].masked_fill(total.isinf(), 0.0).sum(), scores)
    assert slope.isfinite().all()
    assert scores.grad is not None
    assert scores.grad[1].tolist() == [0, 0]
    assert numerics.logsumexp(torch.ones(3, 0)).tolist() == [-math.inf] * 3
    assert (numerics.log_softmax(scores)[1] == -math.inf).all()


def test_exponentials_without_subnormal_numbers():
    scores = torch.tensor([0.0, -1.0, -79.0, -85.0, -math.inf])
    result = numerics.exp_(scores)
    assert result is scores
    torch.testing.assert_close(result[:3], torch.tensor([1.0, math.exp(-1), math.exp(-79)]))
    assert result[3:].tolist() == [0, 0]


def test_second_phi():
    y = torch.linspace(-0.5, 0.5, 11, dtype=DOUBLE)
    exact = [sum(v**k / math.factorial(k + 2) for k in range(30)) for v in y.tolist()]
    torch.testing.assert_close(numerics.second_phi_series(y), torch.tensor(exact, dtype=DOUBLE), rtol=4e-16, atol=0)


def test_quadrature():
    for power in range(16):
        result = sum(w * t**power for t, w in numerics.GAUSS_LEGENDRE)
        assert result == pytest.approx(1 / (power + 1), rel=1e-14)


def test_singular_matrices():
    rank_one = torch.ones(2, 2, dtype=DOUBLE)
    nan = torch.full((2, 2), math.nan, dtype=DOUBLE)
    scaled = torch.diag(torch.tensor([1e-200, 1e200], dtype=DOUBLE))
    result = matrices.is_singular(torch.stack([torch.eye(2, dtype=DOUBLE), rank_one, nan, scaled]))
    assert result.tolist() == [False, True, True, False]
    assert matrices.eigenvalue_rounding(100, DOUBLE) == 100 * torch.finfo(DOUBLE).eps


@pytest.mark.medium
def test_linear_algebra_has_right_second_derivatives_within_vmap():
    root = normal(2, 3, 3)
    covariance = root @ root.mT + torch.eye(3, dtype=DOUBLE)
    right = normal(3, 1, seed=4)

    def exact(matrix):
        return (torch.linalg.inv(matrix) @ right).sum(), matrix.logdet()

    def ours(matrix):
        return matrices.solve(matrix, right).sum(), matrices.log_determinant(matrix)

    for i in range(2):
        for j in range(2):
            expected = hessian(lambda m, j=j: exact(m)[j])(covariance[i])
            result = vmap(hessian(lambda m, j=j: ours(m)[j]))(covariance)[i]
            torch.testing.assert_close(result, expected)
    square = matrices.square_root(covariance, owner="this")
    torch.testing.assert_close(square @ square, covariance)
    for bad, words in ((torch.ones(2, 2, dtype=DOUBLE), "positive definite"), (covariance / 0, "finite covariance")):
        with pytest.raises(ValueError, match=f"this needs a {words}"):
            matrices.square_root(bad, owner="this")
    with pytest.raises(ValueError, match="this needs a positive definite covariance"):
        vmap(lambda matrix: matrices.square_root(matrix, owner="this"))(torch.ones(2, 2, 2, dtype=DOUBLE))
