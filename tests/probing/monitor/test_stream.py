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
