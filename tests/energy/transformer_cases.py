"""Energy Transformers that the tests share, and their energy by explicit matrices."""

import torch
from tests.energy.cases import F64, constant, draw
from torch import Tensor

from massieu.energy import TransformerEnergy
from massieu.energy.activations import LayerNorm


def weights(heads=3, size=4, width=6, quantity=10, seed=0):
    return [
        draw(heads, size, width, seed=seed),
        draw(heads, size, width, seed=seed + 1),
        draw(quantity, width, seed=seed + 2),
    ]


def network(seed=0, gain=0.8, keep=None, scale=None, **sizes):
    key, query, memories = weights(seed=seed, **sizes)
    normalisation = LayerNorm.create(constant(gain), draw(key.shape[-1], seed=seed + 3), eps=1e-2)
    scale = torch.linspace(0.5, 2.0, len(key), dtype=F64) if scale is None else scale
    return TransformerEnergy.create(key, query, memories, normalisation=normalisation, scale=scale, keep=keep)


def padding(batch=3, count=5) -> Tensor:
    """Items of all, all but one, two, …; the last of one token."""
    return torch.arange(count) < torch.linspace(count, 1, batch).ceil().unsqueeze(-1)


def explicit_energy(energy: TransformerEnergy, g: Tensor) -> Tensor:
    """Of one item of tokens that are all there, by explicit matrices."""
    total = -0.5 * torch.relu(g @ energy.memories.T).square().sum()
    for key, query, scale in zip(energy.key_weight, energy.query_weight, energy.scale, strict=True):
        scores = scale * (g @ key.T) @ (g @ query.T).T
        scores = scores.masked_fill(torch.eye(len(g), dtype=torch.bool), -torch.inf)
        if len(g) > 1:
            total = total - torch.logsumexp(scores, 0).sum() / scale
    return total
