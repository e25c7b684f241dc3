"""Systems and determinants against torch's own outside of vmap, where those are right."""

import numpy as np
import pytest
import torch
from tests.support.rows import some_slow
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, vmap

from massieu.energy import SpinModel
from massieu.foundation import matrices
from massieu.measures import Gaussian, Spin


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


SYSTEM = 3 * torch.eye(4, dtype=torch.float64) + normal(2, 4, 4)


def test_values_and_derivatives():
    matrix = SYSTEM.requires_grad_()
    right = normal(2, 4, 3, seed=1).requires_grad_()
    torch.testing.assert_close(matrices.solve(matrix, right), torch.linalg.solve(matrix, right), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(matrices.log_determinant(matrix), torch.logdet(matrix), rtol=1e-12, atol=1e-12)
    for function, inputs in ((matrices.solve, (matrix, right)), (matrices.log_determinant, (matrix,))):
        assert gradcheck(function, inputs)
        assert gradgradcheck(function, inputs)


def test_a_root_has_the_derivatives_that_transforms_take():
    """d⁴√x/dx⁴ = −15/16·x^(−7/2), and one order more."""
    root = lambda x: matrices.square_root(x.reshape(1, 1), owner="this").sum()  # noqa: E731
    point = torch.tensor(2.0, dtype=torch.float64)
    fourth = hessian(hessian(root))
    torch.testing.assert_close(fourth(point), torch.tensor(-15 / 16 * 2**-3.5).double())
    torch.testing.assert_close(grad(fourth)(point), torch.tensor(105 / 32 * 2**-4.5).double())


def test_signs_of_determinants():
    given = torch.diag_embed(torch.tensor([[2.0, 3.0], [-2.0, 3.0], [-2.0, -3.0], [0.0, 1.0]])).double()
    swapped = given[:, [1, 0]]
    expected = torch.tensor([6.0, torch.nan, 6.0, 0.0]).double().log()
    torch.testing.assert_close(matrices.log_determinant(given), expected, equal_nan=True)
    torch.testing.assert_close(
        matrices.log_determinant(swapped), torch.tensor([torch.nan, 6.0, torch.nan, 0.0]).double().log(), equal_nan=True
    )


def test_least_squares_are_numpys_of_lower_rank_too_and_have_the_same_bits_in_each_call():
    matrix = normal(1000, 5)
    right = normal(1000, 3, seed=1)
    lower = torch.stack([matrix, torch.cat([matrix[:, :3], matrix[:, :2]], -1)])
    result = matrices.least_squares(lower, right.expand(2, -1, -1))
    for one, answer in zip(lower, result, strict=True):
        expected = np.linalg.lstsq(one.numpy(), right.numpy(), rcond=None)[0]
        torch.testing.assert_close(answer, torch.from_numpy(expected), rtol=1e-10, atol=1e-12)
    bits = set()
    memory = []
    for size in range(1, 61):
        memory.append(torch.full((size,), size, dtype=torch.int32))  # what is let go is what the next call finds
        memory = memory[-size % 7 :]
        bits.add(matrices.least_squares(lower.clone(), right.expand(2, -1, -1).clone()).numpy().tobytes())
    assert len(bits) == 1


def test_eigenvalues_of_what_is_not_finite_are_nan_and_the_process_goes_on():
    given = torch.stack([torch.tensor([[0.0, -2.0], [2.0, 0.0]]).double()] * 3)
    given[1, 0, 0], given[2, 1, 0] = torch.nan, torch.inf
    result = matrices.eigenvalues(given)
    assert sorted(result[0].imag.tolist()) == pytest.approx([-2.0, 2.0]) and result[1:].isnan().all()
    assert matrices.eigenvalues(torch.full((64, 64), torch.nan)).isnan().all()


FIELDS = normal(2, 4, seed=2)
COUPLING = normal(4, 4, seed=3)
COUPLING = 0.1 * (COUPLING + COUPLING.mT) * (1 - torch.eye(4, dtype=torch.float64))
FUNCTIONS = {
    "solve": lambda x: matrices.solve(SYSTEM[0].detach() + x.diag(), x.diag()).sum(),
    "log_determinant": lambda x: matrices.log_determinant(SYSTEM[0].detach() + x.diag()),
    "mean field": lambda x: SpinModel.create(Spin.create(x), COUPLING).mean_field().covariance.sum(),
    "adaptive TAP": lambda x: SpinModel.create(Spin.create(x), COUPLING).adaptive_tap().log_partition,
    "Gaussian sites": lambda x: (
        SpinModel.create(Gaussian.create(x.unsqueeze(-1), torch.ones(4).double()), COUPLING).exact().log_partition
    ),
}


@pytest.mark.medium
@some_slow("name", ["solve", "log_determinant", "Gaussian sites", "mean field", "adaptive TAP"], 3)
def test_second_derivatives_of_a_batch_are_those_of_its_items(name: str):
    each = torch.stack([hessian(FUNCTIONS[name])(field) for field in FIELDS])
    torch.testing.assert_close(vmap(hessian(FUNCTIONS[name]))(FIELDS), each, rtol=1e-9, atol=1e-10)
