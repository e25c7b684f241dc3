"""What tokens that attend to each other see: log Z, entropies, the energy of their interaction (S25, N5)."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu import ops
from massieu.foundation.arguments import number, real
from massieu.foundation.doors import door
from massieu.foundation.values import promoted_dtype
from massieu.ops.moments import MomentsResult
from massieu.population.reading import (
    ObservableReading,
    Processes,
    check_cloud,
    collected,
    greatest,
    shared,
    summed,
)


class SelfAttentionLevelsResult(NamedTuple):
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
    points: Float[Tensor, "*batch n d"], *, scale: float | None = None, group: Processes = None
) -> SelfAttentionLevelsResult:
    """Levels of self-attention of a cloud with tied queries, keys and values; in memory linear in n, time n².

    Nothing overflows: the interaction energy is given by its logarithm.

    Args:
        points: The tokens, at least float32 in the computation.
        scale: Inverse temperature; d^-½ by default.
        group: Processes that share the tokens; each gets the tokens of all as keys.

    Raises:
        ValueError: no cloud, or a scale that is not positive and finite.
        TypeError: no floating-point tensor, or a scale that is no number.
    """

    def check() -> None:
        check_cloud(points)
        if scale is not None:
            number("scale", scale, above=0)

    processes = shared("self_attention_levels", points, group, check, scale=scale)
    beta = points.shape[-1] ** -0.5 if scale is None else scale
    tokens = points.to(promoted_dtype(points))
    queries, keys = (each.reshape(1, -1, *each.shape[-2:]) for each in (tokens, collected(tokens, processes)))
    names = ("log_partition", "entropy", "prior_log_partition", "prior_mean_score")
    found: MomentsResult[Any] = ops.attention_moments(queries, keys, scale=beta, moments=names)
    count = keys.shape[-2]
    log_z = found.log_partition.double()
    selective = log_z - found.prior_log_partition - found.prior_mean_score
    levels = torch.stack([log_z - math.log(count), selective, found.entropy.double()])[:, 0]
    means = (summed(levels.sum(-1), processes) / count).reshape(3, *points.shape[:-2])
    top = greatest(log_z.detach().amax(-1, keepdim=True), processes)
    energy = top[0, :, 0] + summed((log_z - top).exp().sum(-1)[0], processes).log() - math.log(2 * beta * count**2)
    return SelfAttentionLevelsResult(*means.unbind(), log_interaction_energy=energy.reshape(points.shape[:-2]))


@door(scale=real)
@dataclass(frozen=True)
class SelfAttention:
    """Observable: log Z and entropy of the tokens' self-attention; one attention pass. The default scale is d^-½.

    Example:
        >>> import torch
        >>> from massieu.population import SelfAttention
        >>> readings = SelfAttention()(torch.zeros(4, 2))  # all alike: attention is uniform over four
        >>> round(readings["attention_entropy"].value.exp().item(), 3)
        4.0
    """

    scale: float | None = None

    def __call__(self, points: Float[Tensor, "n d"], /, *, group: Processes = None) -> dict[str, ObservableReading]:
        found = self_attention_levels(points, scale=self.scale, group=group)._asdict()
        return {name.replace("entropy", "attention_entropy"): ObservableReading(each) for name, each in found.items()}
