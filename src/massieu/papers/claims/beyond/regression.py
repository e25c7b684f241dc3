"""N17: layers as regressions of values on keys."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from massieu import ops
from massieu.foundation.matrices import least_squares
from massieu.papers.claims.claim import Check, at_least, at_most, close
from massieu.papers.claims.inputs import check_at_least, normal_draws
from massieu.papers.claims.registry import claim
from massieu.regression import FeatureKernel, LinearKernel, conditional_mean_attention


def _affine(points: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(points[..., :1]), points], -1)


@claim(
    "N17",
    title="Test-time regression",
    statement="Softmax attention is the constant that fits the values best under its weights. Linear attention is "
    "one gradient step from 0 on a linear fit, and conditional mean attention with the linear kernel is the ridge "
    "solution of that fit. A local linear fit under softmax's weights has no bias on linear targets, even at the "
    "boundary, where softmax has one.",
    source="Wang, Shi and Fox, arXiv 2501.12352; MesaNet, arXiv 2506.05233; Intention, arXiv 2305.10203",
    status="quoted",
)
def regression_at_test_time(keys: int = 30, dimensions: int = 4, ridge: float = 0.7, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, dimensions=dimensions)
    check_at_least(dimensions + 2, keys=keys)
    normal = normal_draws(seed)
    scale = 0.8
    query = normal(1, 1, 5, dimensions)
    key = normal(1, 1, keys, dimensions)
    value = normal(1, 1, keys, 3)
    q = query[0, 0]
    k = key[0, 0]
    v = value[0, 0]
    # Weighted least squares: rows times the roots of their weights.
    root_weights = torch.softmax(scale * q @ k.T, -1).sqrt().unsqueeze(-1)
    constant = least_squares(root_weights, root_weights * v).squeeze(-2)
    softmax = ops.attention(query, key, value, scale=scale).output[0, 0]
    yield close("softmax attention and the best constant", softmax, constant)

    start = torch.zeros(dimensions, 3, dtype=torch.float64, requires_grad=True)
    slope = torch.autograd.grad(0.5 * (k @ start - v).square().sum(), start)[0]
    linear_attention = (q @ k.T) @ v
    yield close("linear attention and one gradient step of length 1", linear_attention, q @ (start - slope).detach())

    # A ridge is one more row √λ·e_i for each coordinate, with the value 0.
    rows = torch.cat([k, math.sqrt(ridge) * torch.eye(dimensions, dtype=torch.float64)])
    targets = torch.cat([v, torch.zeros(dimensions, 3, dtype=torch.float64)])
    fit = least_squares(rows, targets)
    output = conditional_mean_attention(query, key, value, kernel=LinearKernel.create(), ridge=ridge).output[0, 0]
    yield close("conditional mean attention and the ridge solution", output, q @ fit)
    # λ·(G + λI)⁻¹ differs from I by at most the largest eigenvalue over λ.
    large = 1e6
    output = conditional_mean_attention(query, key, value, kernel=LinearKernel.create(), ridge=large).output[0, 0]
    relative_bound = torch.linalg.eigvalsh(k.T @ k)[-1] / large
    norm = torch.linalg.matrix_norm(k.T @ v) * q.norm(dim=-1).max()
    share = (large * output - linear_attention).norm(dim=-1) / (relative_bound * norm)
    yield at_most("ridge 1e6: λ·output − linear attention, by its bound", share, 1.0)
    yield from _boundary()


def _boundary() -> Iterator[Check]:
    """A local linear fit has no bias at the boundary, where softmax has one.

    Keys fill [0, 1] evenly, and the target is linear; at an end all keys lie on one side.
    """
    key = ((torch.arange(2000, dtype=torch.float64) + 0.5) / 2000).reshape(1, 1, -1, 1)
    query = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64).reshape(3, 1, 1, 1)
    value = 1 + 2 * key
    width = 0.05
    # Gaussian weights are softmax's, with a log-weight of −‖k‖²/(2·width²).
    log_weight = -0.5 * (key / width).square().mT
    keys = key.expand(3, -1, -1, -1)
    values = value.expand(3, -1, -1, -1)
    constant = ops.attention(query, keys, values, log_weight=log_weight, scale=width**-2).output.flatten()
    log_kernel = log_weight + query * key.mT / width**2 - 0.5 * (query / width).square()
    linear = conditional_mean_attention(
        query, keys, values, kernel=FeatureKernel.create(_affine), ridge=0.0, log_weight=log_kernel
    ).output.flatten()
    log_kernels = log_kernel.expand(3, -1, -1, -1)
    of_square = conditional_mean_attention(
        query, keys, keys.square(), kernel=FeatureKernel.create(_affine), ridge=0.0, log_weight=log_kernels
    ).output.flatten()
    # Of k² it leaves width² inside, the variance of the kernel. At an end that is the constant of a line fitted to x² under
    # a half-normal law, whose moments are 1, √(2/π), 1 and 2√(2/π).
    at_end = (1 - 4 / math.pi) / (1 - 2 / math.pi)
    square_bias = width**2 * torch.tensor([at_end, 1.0, at_end], dtype=torch.float64)
    yield close(
        "local linear fit of k²: its error, and by moments", of_square - query.flatten().square(), square_bias, 1e-6
    )
    truth = 1 + 2 * query.flatten()
    # The mean of a half-normal of this width is √(2/π)·width; the grid's midpoints err by O(1/2000²).
    bias = 2 * math.sqrt(2 / math.pi) * width * torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
    yield close("softmax: its error at 0, ½, 1, and ±2√(2/π)·width", constant - truth, bias, 1e-5)
    yield at_most("local linear fit: its error", (linear - truth).abs(), 1e-9)
    yield at_least("softmax: its error at the boundary", (constant - truth).abs()[[0, 2]], 0.05)
