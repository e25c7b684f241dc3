"""Layers, laws and second ways to what they do."""

import math

import numpy as np
import torch
from torch import Tensor

from massieu.measures import Gaussian
from massieu.population import AttentionLayer


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def weights(width=4, heads=3, size=2, value_size=5, seed=0) -> dict[str, Tensor]:
    shapes = {
        "query_weight": (heads, size, width),
        "key_weight": (heads, size, width),
        "value_weight": (heads, value_size, width),
        "output_weight": (heads, width, value_size),
        "query_bias": (heads, size),
        "bias": (width,),
    }
    return {name: 0.5 * draw(*shape, seed=seed + number) for number, (name, shape) in enumerate(shapes.items())}


def layer(seed=0, **options) -> AttentionLayer:
    return AttentionLayer.create(**weights(seed=seed), **({"scale": torch.tensor([0.5, 1.0, -0.7])} | options))


def by_hand(attention: AttentionLayer, x: Tensor, y: Tensor, log_weight: Tensor | None = None) -> Tensor:
    """Σ_h W_O softmax(scale·(W_Q x_i + b_Q)·(W_K y_j + b_K)) (W_V y_j + b_V) + b_O, head by head, token by token."""
    result = torch.zeros_like(x)
    b_key = draw(*attention.query_bias.shape, seed=90)
    b_value = draw(*attention.value_weight.shape[:2], seed=91)
    for h in range(len(attention.query_weight)):
        for i in range(len(x)):
            query = attention.query_weight[h] @ x[i] + attention.query_bias[h]
            scores = torch.stack(
                [attention.scale[h] * query @ (attention.key_weight[h] @ other + b_key[h]) for other in y]
            )
            scores = scores if log_weight is None else scores + log_weight
            share = scores.exp() / scores.exp().sum()
            values = torch.stack([attention.value_weight[h] @ other + b_value[h] for other in y])
            result[i] += attention.output_weight[h] @ (share @ values - b_value[h])
    return result + attention.bias


def law(width=2, seed=0, rank=None, batch=()) -> Gaussian:
    root = draw(*batch, width, rank or width, seed=seed + 50) / math.sqrt(width)
    return Gaussian.create(draw(*batch, width, seed=seed + 51), factor=root)


def hermite(gaussian: Gaussian, order: int = 60) -> tuple[Tensor, Tensor]:
    """Nodes and weights of a product rule for a two-dimensional Gaussian."""
    nodes, weight = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(order))
    origin = torch.zeros_like(gaussian.location)
    root = torch.linalg.cholesky(gaussian.fisher(origin))
    points = torch.cartesian_prod(nodes, nodes) @ root.mT + gaussian.location
    return points, (weight[:, None] * weight).flatten() / (2 * math.pi)


def covariance(gaussian: Gaussian) -> Tensor:
    return gaussian.fisher(torch.zeros_like(gaussian.location))
