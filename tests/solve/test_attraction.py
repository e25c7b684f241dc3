"""Spectral radii by products against eigenvalues of whole Jacobians."""

import pytest
import torch
from tests.support.rows import every_row

from massieu.solve import Implicit, Newton, Status, fixed_point, spectral_radius

DOUBLE = torch.float64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def nonlinear(z, weight):
    return torch.tanh(z @ weight.mT + 0.3)


@every_row("size", [1, 2, 5, 12])
@every_row(("dtype", "tolerance"), [(DOUBLE, 1e-6), (torch.float32, 5e-3)])
def test_small_items_have_the_radius_itself(size, dtype, tolerance):
    weight, value = normal(size, size), normal(4, size, seed=1)
    found = spectral_radius(nonlinear, value.to(dtype), (weight.to(dtype),))
    for place in range(4):
        jacobian = torch.func.jacrev(nonlinear)(value[place], weight)
        assert abs(found[place] - torch.linalg.eigvals(jacobian).abs().max()) < tolerance * (1 + found[place])


@every_row(("products", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError)])
def test_bad_numbers_of_products(products, error):
    with pytest.raises(error, match="products must be"):
        spectral_radius(torch.cos, torch.zeros(2), products=products)


def test_larger_symmetric_items_have_it_from_below():
    basis = torch.linalg.qr(normal(60, 60)).Q
    for leading in (0.95, 1.3):
        values = torch.cat([torch.tensor([leading], dtype=DOUBLE), torch.linspace(-0.5, 0.5, 59, dtype=DOUBLE)])
        matrix = basis @ (values[:, None] * basis.mT)
        found = spectral_radius(lambda z, matrix: z @ matrix, torch.zeros(60, dtype=DOUBLE), (matrix,))
        assert leading - 1e-4 < found < leading + 1e-6


def test_a_map_that_is_not_normal_is_not_refused():
    # Norm 30, spectral radius 0.5.
    matrix = torch.tensor([[0.5, 30.0], [0.0, 0.4]], dtype=DOUBLE)
    shift = torch.ones(2, dtype=DOUBLE)
    found = fixed_point(lambda z, a, b: a @ z + b, shift, (matrix, shift), adjoint=Implicit(check_attraction=True))
    assert torch.allclose(found.value, torch.linalg.solve(torch.eye(2, dtype=DOUBLE) - matrix, shift))


@every_row(("slope", "attracts"), [(0.99, True), (-0.99, True), (1.2, False), (-1.2, False)])
def test_what_attracts(slope, attracts):
    start = torch.full((1,), 0.0, dtype=DOUBLE)
    found = fixed_point(
        lambda z, a: a * torch.sin(z), start, (slope,), adjoint=Implicit(check_attraction=True), throw=False
    )
    assert found.status == (Status.CONVERGED if attracts else Status.NOT_ATTRACTING)


def test_newtons_method_finds_what_repels_and_says_so():
    # The fixed points of 3tanh: 0 repels, the others attract.
    start = torch.tensor([[0.1], [2.0]], dtype=DOUBLE)
    found = fixed_point(lambda z: 3 * torch.tanh(z), start, method=Newton(), throw=False)
    assert found.status.tolist() == [Status.NOT_ATTRACTING, Status.CONVERGED]
    kept = fixed_point(lambda z: 3 * torch.tanh(z), start, method=Newton(), adjoint=Implicit(check_attraction=False))
    assert kept.value[0].abs() < 1e-9


def test_an_empty_batch_and_one_product():
    assert spectral_radius(torch.cos, torch.zeros(0, 3)).shape == (0,)
    assert spectral_radius(lambda z: 0.5 * z, torch.ones(2, 3), products=1) == pytest.approx(0.5, abs=1e-3)
