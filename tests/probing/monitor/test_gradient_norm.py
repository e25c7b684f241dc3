"""The norm of all gradients: explicit float64 sums, every precision, sparse and sharded gradients, NaN."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from massieu.probing.monitor.training import gradient_norm


def with_gradient(gradient: Tensor) -> Tensor:
    parameter = torch.zeros_like(gradient.to_dense() if gradient.is_sparse else gradient).requires_grad_()
    parameter.grad = gradient
    return parameter


def explicit(*gradients: Tensor) -> float:
    return math.sqrt(sum(float((each.double() ** 2).sum()) for each in gradients))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_it_is_that_of_all_gradients_in_every_precision(dtype: torch.dtype):
    torch.manual_seed(0)
    gradients = [torch.randn(300, 7).to(dtype) * 100, torch.randn(5, 11).to(dtype).t()]
    parameters = [*map(with_gradient, gradients), torch.zeros(3, requires_grad=True)]
    # Sums of 2,100 squares in float32; their squares exceed float16's largest number.
    assert gradient_norm(parameters) == pytest.approx(explicit(*gradients), rel=2100 * 2**-24)


def test_sparse_gradients_are_added_where_rows_repeat():
    rows = nn.Embedding(5, 3, sparse=True)
    rows(torch.tensor([1, 1, 4])).sum().backward()
    assert rows.weight.grad is not None
    assert gradient_norm(rows.parameters()) == pytest.approx(explicit(rows.weight.grad.to_dense()))  # √(3·4 + 3)


def test_complex_gradients_have_two_parts():
    assert gradient_norm([with_gradient(torch.tensor([3 + 4j]))]) == pytest.approx(5)


def test_none_and_what_is_not_finite():
    assert gradient_norm(nn.Linear(2, 2).parameters()) is None
    assert math.isnan(gradient_norm([with_gradient(torch.tensor([1.0, math.nan]))]))  # pyright: ignore
    assert gradient_norm([with_gradient(torch.tensor([1.0, -math.inf]))]) == math.inf


def sharded(rank: int, path: str, expected: float) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    first, second, third = torch.randn(6, 3), torch.randn(4), torch.randn(5)
    placed = [(first, Shard(0)), (second, Replicate())]
    parameters = [with_gradient(distribute_tensor(each, mesh, [where])) for each, where in placed]
    assert gradient_norm([*parameters, with_gradient(third)]) == pytest.approx(expected, rel=1e-6)
    dist.destroy_process_group()


@pytest.mark.medium
def test_sharded_gradients_count_as_a_whole(tmp_path):
    torch.manual_seed(0)
    expected = explicit(torch.randn(6, 3), torch.randn(4), torch.randn(5))
    processes.spawn(sharded, (str(tmp_path / "store"), expected), nprocs=2)
