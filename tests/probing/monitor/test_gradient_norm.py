"""The norm of all gradients: explicit float64 sums, every precision, sparse gradients, NaN (sharded: test_processes.py)."""

import math

import pytest
import torch
from tests.support.probing.monitor_work import explicit_norm, with_gradient
from torch import nn

from massieu.probing.monitor.norms import gradient_norm


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_it_is_that_of_all_gradients_in_every_precision(dtype: torch.dtype):
    torch.manual_seed(0)
    gradients = [torch.randn(300, 7).to(dtype) * 100, torch.randn(5, 11).to(dtype).t()]
    parameters = [*map(with_gradient, gradients), torch.zeros(3, requires_grad=True)]
    # Sums of 2,100 squares in float32; their squares exceed float16's largest number.
    assert gradient_norm(parameters) == pytest.approx(explicit_norm(*gradients), rel=2100 * 2**-24)


def test_sparse_gradients_are_added_where_rows_repeat():
    rows = nn.Embedding(5, 3, sparse=True)
    rows(torch.tensor([1, 1, 4])).sum().backward()
    assert rows.weight.grad is not None
    assert gradient_norm(rows.parameters()) == pytest.approx(explicit_norm(rows.weight.grad.to_dense()))  # √(3·4 + 3)


def test_complex_gradients_have_two_parts():
    assert gradient_norm([with_gradient(torch.tensor([3 + 4j]))]) == pytest.approx(5)


def test_none_and_what_is_not_finite():
    assert gradient_norm(nn.Linear(2, 2).parameters()) is None
    assert math.isnan(gradient_norm([with_gradient(torch.tensor([1.0, math.nan]))]))  # pyright: ignore
    assert gradient_norm([with_gradient(torch.tensor([1.0, -math.inf]))]) == math.inf
