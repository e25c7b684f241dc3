"""The largest logits of a module of PyTorch's own, written out in float64."""

import math

import torch
from torch import Tensor, nn


@torch.no_grad()
def largest_logits(attention: nn.MultiheadAttention, states: Tensor, unseen: Tensor | None = None) -> Tensor:
    """Of each head, over all queries and keys of (B, L, D), or over those pairs (B, 1, L, L) that are not unseen."""
    assert attention.in_proj_weight is not None
    assert attention.in_proj_bias is not None
    projected = states.double() @ attention.in_proj_weight.double().T + attention.in_proj_bias.double()
    parts = (part.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for part in projected.chunk(3, -1))
    query, key, _ = parts
    logits = query @ key.mT / math.sqrt(query.shape[-1])
    return (logits if unseen is None else logits.masked_fill(unseen, -torch.inf)).amax((0, 2, 3))
