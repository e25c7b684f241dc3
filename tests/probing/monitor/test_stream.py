"""Effective rank and spread of the stream: of tokens that differ, and of those that only rounding tells apart."""

import warnings

import numpy as np
import pytest
import torch
from tests.support.probing.plain import WIDTH, encoder
from tests.support.rows import every_row
from torch import Tensor

from massieu import Monitor
from massieu.probing.monitor.record import MonitorRecord
from massieu.probing.precision import is_one_point


def alike(noise: float, length: int = 24) -> Tensor:
    """One row of tokens that are one vector, but for noise."""
    generator = torch.Generator().manual_seed(0)
    point = torch.randn(1, 1, WIDTH, generator=generator)
    return point + noise * torch.randn(1, length, WIDTH, generator=generator)


def record_of(monitor: Monitor, step: int = 0) -> MonitorRecord:
    record = monitor(step)
    assert record is not None
    return record


def explicit(points: Tensor) -> tuple[float, float]:
    """Effective rank and spread, from singular values and from all pairs."""
    cloud = points.double().numpy()
    variances = np.linalg.svd(cloud - cloud.mean(0), compute_uv=False) ** 2
    shares = variances / variances.sum()
    shares = shares[shares > 0]
    pairs = [np.linalg.norm(a - b) for i, a in enumerate(cloud) for b in cloud[:i]]
    return float(np.exp(-(shares * np.log(shares)).sum())), float(np.mean(pairs))


@pytest.mark.medium
@every_row(
    ("noise", "dtype", "half"),
    [
        (0.0, torch.float32, False),
        (1e-7, torch.float32, False),
        (1e-16, torch.float64, False),
        (1e-3, torch.bfloat16, False),
        (1e-3, torch.float32, True),
    ],
)
def test_tokens_that_are_one_point_up_to_rounding_have_rank_1(noise, dtype, half):
    """`half`: float32 weights under bfloat16 autocast."""
    monitor = Monitor(encoder().to(dtype), alike(noise).to(dtype), every=1)
    with torch.autocast("cpu", torch.bfloat16, enabled=half), pytest.warns(UserWarning, match="one point") as said:
        record = record_of(monitor)
    (warning,) = said
    assert str(warning.message) == (
        "massieu.Monitor: at step 0, the tokens of a row are one point up to rounding behind layer0, layer1; its effective "
        "rank is recorded as 1"
    )
    assert [record[f"massieu/layer{layer}/effective_rank"] for layer in range(2)] == [1.0, 1.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record_of(monitor, 1)


@pytest.mark.medium
@every_row(
    ("noise", "dtype"), [(1e-4, torch.float32), (1e-7, torch.float64), (0.3, torch.bfloat16), (1.0, torch.float32)]
)
def test_tokens_that_differ_by_more_than_rounding_keep_their_rank(noise, dtype):
    model, tokens = encoder().to(dtype), alike(noise).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record = record_of(Monitor(model, tokens))
    for layer in range(2):
        with torch.no_grad():
            tokens = model.layers[layer](tokens)
        rank, spread = explicit(tokens[0])
        assert rank > 2
        # Matrix products of other shapes: some rounding errors, over the size of the noise
        near = 20 * torch.finfo(dtype).eps / noise
        assert record[f"massieu/layer{layer}/effective_rank"] == pytest.approx(rank, rel=near)
        assert record[f"massieu/layer{layer}/spread"] == pytest.approx(spread, rel=near)


@every_row("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@every_row("width", [16, 256, 1024])
def test_what_rounding_makes_of_one_token_is_one_point(dtype, width):
    """Products that are equal in exact arithmetic: factors are off by half a unit, and added up in another order each."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(width, 64, generator=generator).to(dtype)
    state = torch.randn(width, generator=generator, dtype=torch.float64)
    sums = torch.promote_types(dtype, torch.float32)
    tokens = []
    for _ in range(16):
        order = torch.randperm(width, generator=generator)
        off = torch.finfo(dtype).eps / 2 * (2 * torch.rand(width, generator=generator, dtype=torch.float64) - 1)
        factors = (state * (1 + off)).to(sums)
        tokens.append((factors[order, None] * weight[order].to(sums)).cumsum(0)[-1].to(dtype))
    points = torch.stack(tokens).double()
    assert float(points.var(0).sum()) > 0
    assert bool(is_one_point(points, dtype))
    size = float(points.square().mean().sqrt())
    rounding = max(torch.finfo(dtype).eps, points.shape[1] ** 0.5 * torch.finfo(sums).eps)
    apart = points + 4 * rounding * size * torch.randn(points.shape, generator=generator, dtype=torch.float64)
    assert not bool(is_one_point(apart, dtype))


def test_a_huge_coordinate_does_not_hide_how_the_others_vary():
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(32, 512, generator=generator)
    points[:, 7] = 3000.0
    assert not bool(is_one_point(points.bfloat16().double(), torch.bfloat16))


def test_tokens_that_are_not_finite_are_no_point():
    points = torch.zeros(3, 4, 5, dtype=torch.float64)
    points[1, 0, 0], points[2, 0, 0] = torch.nan, torch.inf
    assert is_one_point(points, torch.float32).tolist() == [True, False, False]
