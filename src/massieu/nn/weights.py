"""The matrix of attention weights, for those who ask for it or drop some of it: memory L×N."""

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.measures import stable
from massieu.nn.heads import Mask, added, per_head


def attention_weights(
    query: Float[Tensor, "B H L D"],
    key: Float[Tensor, "B H N D"],
    *,
    scale: float | Tensor | None,
    log_weight: Mask | None = None,
    sink: float | Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "B H L N"], Float[Tensor, "B H L"]]:
    """The weights under which `massieu.ops.attention` averages values, and log Z, both at least float32."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    beta = query.shape[-1] ** -0.5 if scale is None else per_head(scale)
    scores = query.to(dtype) @ key.to(dtype).mT * beta
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = added(log_weight, scores)
    log_partition = stable.logsumexp(scores) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    if sink is not None:
        level = torch.as_tensor(sink, dtype=dtype, device=query.device)
        log_partition = torch.logaddexp(log_partition, level.unsqueeze(-1) if level.ndim else level)
    level = log_partition.masked_fill(log_partition == -torch.inf, 0.0)
    return torch.exp(scores - level.unsqueeze(-1)), log_partition
