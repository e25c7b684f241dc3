"""What tokens that attend to each other see: log Z, entropies, the energy of their interaction (S25, N5)."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu import ops
from massieu.population.reading import Processes, check_cloud, counts, greatest, joined, summed


class SelfAttentionLevels(NamedTuple):
    """Means over the tokens of a cloud, each of which is a query among all of them as keys; nats."""

    log_partition: Float[Tensor, "*batch"]
    """log (1/n) Σ_j exp(scale·x_i·x_j)."""
    selective_log_partition: Float[Tensor, "*batch"]
    """The same with the mean score of each query taken off: KL(uniform‖p_i) ≥ 0, free of the origin of the keys (S25)."""
    entropy: Float[Tensor, "*batch"]
    """H(p_i), between 0 and log n: that of attention, not of the population (trap 17)."""
    log_interaction_energy: Float[Tensor, "*batch"]
    """log of (1/(2·scale·n²)) Σ_ij exp(scale·x_i·x_j), which clustering on the sphere raises (N5); no mean."""


def self_attention_levels(
    points: Float[Tensor, "*batch n d"], *, scale: float = 1.0, group: Processes = None
) -> SelfAttentionLevels:
    """Levels of self-attention of a cloud with tied queries, keys and values; in memory linear in n, time n².

    Nothing overflows: the interaction energy is given by its logarithm.

    Args:
        points: The tokens, at least float32 in the computation.
        scale: Inverse temperature.
        group: Processes that share the tokens.

    Raises:
        ValueError: no cloud, or a scale that is not positive and finite.
    """
    check_cloud(points)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")
    processes = joined(group)
    count = sum(counts(points, processes))
    tokens = points.to(torch.promote_types(points.dtype, torch.float32))
    heads = tokens.reshape(1, -1, *tokens.shape[-2:])
    if processes is None:
        output, log_z = ops.attention(heads, heads, heads, scale=scale)
    else:
        output, log_z = ops.sharded.attention(heads, heads, heads, scale=scale, queries="sharded", group=group)
    output, log_z = (each[0].reshape(*tokens.shape[:-2], *each.shape[2:]).double() for each in (output, log_z))
    tokens = tokens.double()
    mean = summed(tokens.sum(-2, keepdim=True), processes) / count
    level = log_z - math.log(count)
    selective = level - scale * (tokens * mean).sum(-1)
    # Scores are linear in the keys, so that their mean under attention is the score of the output.
    entropy = log_z - scale * (tokens * output).sum(-1)
    top = greatest(log_z.detach().amax(-1), processes)
    energy = top + summed((log_z - top.unsqueeze(-1)).exp().sum(-1), processes).log()
    means = summed(torch.stack([level, selective, entropy]).sum(-1), processes) / count
    return SelfAttentionLevels(*means.unbind(), log_interaction_energy=energy - math.log(2 * scale * count**2))
