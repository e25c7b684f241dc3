"""Whether a matrix is positive definite: the same answer whatever the order of its rows, that is, of the roundings."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rows import every_row

from massieu.foundation.matrices import is_singular

DTYPES = st.sampled_from([torch.float32, torch.float64])


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def permutations(matrix: torch.Tensor, count: int = 20) -> torch.Tensor:
    """The same matrix in other orders of its coordinates: what is a rounding in one is another in the next."""
    generator = torch.Generator().manual_seed(1)
    orders = [torch.randperm(len(matrix), generator=generator) for _ in range(count)]
    return torch.stack([matrix[order][:, order] for order in orders])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(0, 29), st.integers(0, 99), DTYPES)
def test_a_singular_matrix_is_singular_in_every_order(size, rank, seed, dtype):
    half = draw(size, min(rank, size - 1), seed=seed).to(dtype)
    assert bool(is_singular(permutations(half @ half.mT)).all())


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(0, 99), DTYPES, st.integers(-40, 40))
def test_a_definite_matrix_is_definite_in_every_order_and_at_any_units(size, seed, dtype, exponent):
    """Of condition number 1/(100√n·ε), or as good as its size allows."""
    half = draw(size, size, seed=seed)
    matrix = half @ half.mT
    least = 100 * size**0.5 * torch.finfo(dtype).eps * torch.linalg.eigvalsh(matrix)[-1]
    matrix = matrix + least * torch.eye(size)
    units = matrix.diagonal().rsqrt()
    matrix = (units.unsqueeze(-1) * matrix * units).to(dtype)
    assert not bool(is_singular(permutations(matrix)).any())
    assert not bool(torch.linalg.cholesky_ex(permutations(matrix)).info.any())
    units = torch.ones(size, dtype=dtype)
    units[::2] = 2.0**exponent
    assert not bool(is_singular(units.unsqueeze(-1) * matrix * units).any())


@every_row("entry", [0.0, -1.0, torch.nan, torch.inf])
def test_what_is_no_covariance_is_singular(entry):
    matrix = torch.eye(3)
    matrix[1, 1] = entry
    assert is_singular(torch.stack([torch.eye(3), matrix])).tolist() == [False, True]


def test_none_and_a_batch_are_one_by_one():
    assert is_singular(torch.zeros(2, 0, 0)).tolist() == [False, False]
    matrices = torch.stack([torch.eye(2), torch.ones(2, 2)])
    assert torch.func.vmap(is_singular)(matrices).tolist() == [False, True]
