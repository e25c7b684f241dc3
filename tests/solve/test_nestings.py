"""Transforms within transforms, to depth three and more, against closed forms and against iterates."""

import itertools

import pytest
import torch
from tests.support.rows import every_row, one_in
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from massieu.solve import GMRES, Dense, fixed_point, linear_solve

DOUBLE = torch.float64
MATRIX = torch.tensor([[0.3, -0.5], [0.2, 0.4]], dtype=DOUBLE)
SHIFT = torch.tensor([0.7, -0.2], dtype=DOUBLE)

TRANSFORMS = {
    "jvp": lambda f: lambda matrix, shift: jvp(f, (matrix, shift), (matrix.cos(), shift.cos()))[1],
    "vjp": lambda f: lambda matrix, shift: vjp(lambda m: f(m, shift).sin(), matrix)[1](f(matrix, shift).cos())[0],
    "grad": lambda f: lambda matrix, shift: grad(lambda m: f(m, shift).sin().sum())(matrix),
    "jacfwd": lambda f: lambda matrix, shift: jacfwd(lambda s: f(matrix, s))(shift),
    "jacrev": lambda f: lambda matrix, shift: jacrev(lambda s: f(matrix, s))(shift),
    "hessian": lambda f: lambda matrix, shift: hessian(lambda s: f(matrix, s).sin().sum())(shift),
    "vmap": lambda f: (
        lambda matrix, shift: vmap(f)(torch.stack([matrix, matrix.sin()]), torch.stack([shift, shift.sin()]))
    ),
}
"""Each makes of a function of a matrix and a vector another one."""


def times(vector, matrix):
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def solved(solver):
    """(2 + M)⁻¹ s."""
    return lambda matrix, shift: linear_solve(lambda x, m: 2 * x + times(x, m), shift, (matrix,), solver=solver).value


def cramer(matrix, shift):
    """The same by determinants."""
    a, b = matrix[..., 0, 0] + 2, matrix[..., 0, 1]
    c, d = matrix[..., 1, 0], matrix[..., 1, 1] + 2
    first, second = shift.unbind(-1)
    numerators = torch.stack([d * first - b * second, a * second - c * first], -1)
    return numerators / (a * d - b * c).unsqueeze(-1)


def contracted(z, matrix, shift):
    return torch.tanh(times(z, matrix / 3)) + shift


def settled(matrix, shift):
    start = torch.zeros_like(shift)
    return fixed_point(contracted, start, (matrix, shift), rtol=1e-13, atol=1e-13).value


def iterated(matrix, shift):
    """The same by plain iterates: the map contracts by more than 4, so that 30 leave nothing of four orders."""
    z = torch.zeros_like(shift)
    for _ in range(30):
        z = contracted(z, matrix, shift)
    return z


FUNCTIONS = {
    "linear solve": (solved(GMRES(rtol=1e-13)), cramer),
    "linear solve, dense": (solved(Dense()), cramer),
    "fixed point": (settled, iterated),
}


def assert_same(function, nesting):
    """That the transforms, the outermost first, make of the solver what they make of the formula."""
    found, expected = FUNCTIONS[function]
    for name in reversed(nesting):
        found, expected = TRANSFORMS[name](found), TRANSFORMS[name](expected)
    given, wanted = found(MATRIX, SHIFT), expected(MATRIX, SHIFT)
    torch.testing.assert_close(given, wanted, rtol=1e-8, atol=1e-8)


@every_row("function", FUNCTIONS)
def test_forward_mode_around_vmap(function):
    assert_same(function, ["jvp", "vmap"])


def test_forward_mode_of_autograd_around_vmap():
    """As `jvp` of `vmap`, by `torch.autograd.forward_ad`; x = s/(2 + m) moves by −s dm/(2 + m)²."""
    matrix, way = torch.tensor([[[1.0]], [[2.0]]], dtype=DOUBLE), torch.tensor([[[1.0]], [[3.0]]], dtype=DOUBLE)
    shift = torch.tensor([[3.0], [8.0]], dtype=DOUBLE)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(matrix, way)
        moved = torch.autograd.forward_ad.unpack_dual(vmap(solved(GMRES(rtol=1e-13)))(dual, shift)).tangent
    torch.testing.assert_close(moved, torch.tensor([[-1 / 3], [-1.5]], dtype=DOUBLE))


def test_second_derivatives_by_forward_mode_twice():
    """1/(2 + m) has the second derivative 2/(2 + m)³.

    `torch.linalg.solve` gives half of it to `jvp` of `jvp` and to `jacfwd` of `jacfwd` (torch 2.13).
    """
    matrix, one = torch.tensor([[1.0]], dtype=DOUBLE), torch.ones(1, dtype=DOUBLE)
    invert = lambda m: solved(GMRES(rtol=1e-13))(m, one)  # noqa: E731
    direction = (torch.ones_like(matrix),)
    twice = jvp(lambda m: jvp(invert, (m,), direction)[1], (matrix,), direction)[1]
    torch.testing.assert_close(twice, torch.full_like(one, 2 / 27))
    torch.testing.assert_close(jacfwd(jacfwd(invert))(matrix).flatten(), torch.full_like(one, 2 / 27))


@pytest.mark.medium
@one_in(
    3, {"outer": ["jvp", "grad", "vmap"], "inner": ["jvp", "grad", "vmap"], "function": ["linear solve", "fixed point"]}
)
def test_pairs(outer, inner, function):
    assert_same(function, [outer, inner])


@pytest.mark.slow
@every_row("nesting", itertools.product(TRANSFORMS, repeat=2), ids=" of ".join)
def test_every_pair(nesting):
    for function in FUNCTIONS:
        assert_same(function, nesting)


@pytest.mark.slow
@every_row("nesting", itertools.product(["jvp", "grad", "jacfwd", "vmap"], repeat=3), ids=" of ".join)
def test_triples(nesting):
    assert_same("linear solve", nesting)
    assert_same("fixed point", nesting)


@pytest.mark.slow
@every_row("nesting", [["hessian", "hessian"], ["jacfwd"] * 4, ["jacrev", "jacfwd", "jacfwd", "jacfwd"]], ids="-".join)
def test_fourth_order(nesting):
    assert_same("fixed point", nesting)
