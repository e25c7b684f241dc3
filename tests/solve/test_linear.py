"""Linear solvers by products against `torch.linalg.solve`."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rows import every_row

from massieu.solve import GMRES, ConjugateGradients, Dense, Status

DOUBLE = torch.float64
SOLVERS = (ConjugateGradients(), GMRES(), GMRES(memory=5, cycles=400), Dense())


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def times(vector, matrix):
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def definite(items: int, size: int, condition: float, seed: int) -> torch.Tensor:
    """Symmetric matrices with eigenvalues between 1/condition and 1."""
    basis = torch.linalg.qr(normal(items, size, size, seed=seed)).Q
    return basis @ (torch.logspace(0, 1, size, base=1 / condition, dtype=DOUBLE)[:, None] * basis.mT)


@pytest.mark.medium
@given(
    solver=st.sampled_from(SOLVERS),
    size=st.integers(1, 20),
    condition=st.sampled_from([1.0, 10.0, 100.0]),
    scale=st.sampled_from([1e-8, 1.0, 1e8]),
    seed=st.integers(0, 1000),
)
def test_definite_systems(solver, size, condition, scale, seed):
    matrix, right = definite(4, size, condition, seed), scale * normal(4, size, seed=seed + 1)
    found = solver.solve(times, right, (matrix,))
    expected = torch.linalg.solve(matrix, right)
    assert (found.status == Status.CONVERGED).all()
    residual = (right - times(found.value, matrix)).norm(dim=-1)
    # What is asked, and rounding.
    allowed = 1e-10 * right.norm(dim=-1) + 1e-14 * condition * right.norm(dim=-1)
    assert (residual <= 1.1 * allowed).all()
    assert torch.allclose(found.residual, residual, rtol=0.1, atol=1e-13 * condition * scale)
    assert ((found.value - expected).norm(dim=-1) <= condition * 1.2 * allowed).all()


@pytest.mark.medium
@given(solver=st.sampled_from(SOLVERS[1:]), size=st.integers(1, 40), seed=st.integers(0, 1000))
def test_general_systems(solver, size, seed):
    matrix = torch.eye(size, dtype=DOUBLE) - 0.9 * normal(3, size, size, seed=seed) / (2 * size**0.5)
    right = normal(3, size, seed=seed + 1)
    found = solver.solve(times, right, (matrix,))
    assert (found.status == Status.CONVERGED).all()
    assert torch.allclose(found.value, torch.linalg.solve(matrix, right), rtol=1e-8, atol=1e-8)


def test_gmres_needs_no_more_products_than_an_item_has_numbers():
    matrix, right = normal(5, 8, 8), normal(5, 8, seed=1)
    found = GMRES().solve(times, right, (matrix,))
    assert (found.steps <= 8).all()
    assert torch.allclose(found.value, torch.linalg.solve(matrix, right), rtol=1e-7, atol=1e-7)


@pytest.mark.medium
@pytest.mark.parametrize("solver", SOLVERS)
def test_an_item_does_not_depend_on_its_mates(solver):
    matrix, right = definite(6, 12, 50.0, 0), normal(6, 12, seed=1)
    right[2] = 0
    right[4] = torch.nan
    together = solver.solve(times, right, (matrix,))
    assert together.status.tolist() == [0, 0, 0, 0, Status.NOT_FINITE, 0]
    assert (together.value[2] == 0).all()
    for place in (0, 5):
        alone = solver.solve(times, right[place], (matrix[place],))
        assert alone.steps == together.steps[place]
        assert torch.allclose(alone.value, together.value[place], rtol=0, atol=1e-8)


def test_what_has_no_solution_is_said():
    matrix = torch.diag(torch.tensor([1.0, 0.0, 2.0], dtype=DOUBLE))
    right = torch.tensor([1.0, 1.0, 1.0], dtype=DOUBLE)
    for solver in SOLVERS:
        assert solver.solve(times, right, (matrix,)).status == Status.SINGULAR
    # In the range there is one.
    right = torch.tensor([1.0, 0.0, 1.0], dtype=DOUBLE)
    for solver in SOLVERS[:-1]:
        found = solver.solve(times, right, (matrix,))
        assert found.status == Status.CONVERGED
        assert torch.allclose(found.value, torch.tensor([1.0, 0.0, 0.5], dtype=DOUBLE))


def test_conjugate_gradients_refuse_what_is_not_definite():
    matrix = torch.diag(torch.tensor([1.0, -0.5], dtype=DOUBLE))
    found = ConjugateGradients().solve(times, torch.tensor([0.1, 1.0], dtype=DOUBLE), (matrix,))
    assert found.status == Status.SINGULAR


def test_conjugate_gradients_stop_where_the_range_ends():
    """What is left of the right side then is out of reach, and directions grow along it without end."""
    factor = normal(8, 40, 30)
    found = ConjugateGradients(max_steps=1000).solve(times, normal(8, 40, seed=1), (factor @ factor.mT,))
    assert (found.status == Status.SINGULAR).all()
    assert (found.steps <= 40).all()


def test_products_run_out():
    matrix, right = definite(2, 30, 1e4, 0), normal(2, 30, seed=1)
    for solver in (ConjugateGradients(max_steps=3), GMRES(memory=3, cycles=1)):
        found = solver.solve(times, right, (matrix,))
        assert found.status.tolist() == [Status.MAX_STEPS] * 2
        assert found.steps.tolist() == [3, 3]
        assert torch.allclose(found.residual, (right - times(found.value, matrix)).norm(dim=-1))


@pytest.mark.parametrize("solver", SOLVERS)
def test_vmap_gives_the_batch(solver):
    matrix, right = definite(6, 7, 20.0, 0), normal(6, 7, seed=1)
    batch = solver.solve(times, right, (matrix,))
    mapped = torch.func.vmap(lambda matrix, right: solver.solve(times, right, (matrix,)))(matrix, right)
    for one, other in zip(batch, mapped, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


@every_row("solver", SOLVERS)
def test_single_precision(solver):
    matrix, right = definite(6, 16, 30.0, 0).float(), normal(6, 16, seed=1).float()
    found = solver.solve(times, right, (matrix,))
    assert (found.status == Status.CONVERGED).all()
    assert torch.allclose(found.value, torch.linalg.solve(matrix, right), rtol=1e-4, atol=1e-4)


def test_a_preconditioner_changes_the_way_and_not_the_solution():
    """Against the system split by a root of the preconditioner, S A S y = S b with x = S y: the same steps and norms."""
    size, columns = 40, 3
    scales = torch.logspace(-3, 3, size, dtype=DOUBLE)
    matrix = scales[:, None] * definite(2, size, 20.0, 0) * scales
    right = normal(2, columns, size, seed=1)
    jacobi = matrix.diagonal(dim1=-2, dim2=-1).reciprocal()
    operands = (matrix.unsqueeze(1), jacobi.unsqueeze(1))

    def product(vector, matrix, _):
        return times(vector, matrix)

    root = operands[1].sqrt()
    for limit in (1, 2, 7, 10):
        solver = ConjugateGradients(max_steps=limit, preconditioner=lambda x, _, jacobi: jacobi * x)
        found = solver.solve(product, right, operands)
        split = ConjugateGradients(max_steps=limit).solve(lambda x: root * times(root * x, operands[0]), root * right)
        assert torch.allclose(found.value, root * split.value, rtol=1e-6, atol=0)
        assert torch.allclose(found.residual, split.residual, rtol=1e-6, atol=0)
    found = replace(solver, max_steps=None).solve(product, right, operands)
    assert (found.status == Status.CONVERGED).all()
    left = root * (right - times(found.value, operands[0]))
    assert (left.norm(dim=-1) <= 1.1e-10 * (root * right).norm(dim=-1)).all()
    plain = ConjugateGradients(max_steps=10_000).solve(product, right, operands)
    assert (found.steps < plain.steps / 2).all()

    exact = torch.linalg.inv(matrix).unsqueeze(1)
    best = ConjugateGradients(preconditioner=lambda x, *_: times(x, exact)).solve(product, right, operands)
    assert (best.steps <= 3).all() and torch.allclose(best.value, found.value, rtol=1e-7, atol=0)


def test_settings_out_of_range():
    for name, value, error in (
        ("rtol", 0.0, "rtol must be positive and finite, got 0.0"),
        ("rtol", -1.0, "rtol must be positive and finite"),
        ("max_steps", 0, "max_steps must be a whole number, at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=error):
            ConjugateGradients(**{name: value})
    for name in ("memory", "cycles"):
        with pytest.raises(ValueError, match=f"{name} must be a whole number, at least 1, got 0"):
            GMRES(**{name: 0})
    for given_settings, error in (
        ({"rtol": "small"}, "rtol must be a number"),
        ({"memory": 2.5}, "memory must be a whole"),
    ):
        with pytest.raises(TypeError, match=error):
            GMRES(**given_settings)
