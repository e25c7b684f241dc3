"""Tokens of a cloud that attend to each other: log Z, entropy, the energy of their interaction (S25, N5)."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu import ops
from massieu.foundation.arguments import number, real
from massieu.foundation.doors import door
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.values import promoted_dtype
from massieu.ops.moments import MomentsResult
from massieu.population.reading import (
    ObservableReading,
    Processes,
    check_call,
    check_cloud,
    gather_tokens,
    greatest,
    summed,
)


class SelfAttentionLevelsResult(NamedTuple):
    """Means over the tokens of a cloud, where each token is a query and all tokens are keys; nats."""

    log_partition: Float[Tensor, "*batch"]
    """log (1/n) Σ_j exp(scale·x_i·x_j)."""
    selective_log_partition: Float[Tensor, "*batch"]
    """The same minus the mean score of each query: KL(uniform‖p_i) ≥ 0, which does not depend on the key origin (S25)."""
    entropy: Float[Tensor, "*batch"]
    """H(p_i), between 0 and log n: the entropy of attention, not of the population (trap 17)."""
    log_interaction_energy: Float[Tensor, "*batch"]
    """log of (1/(2·scale·n²)) Σ_ij exp(scale·x_i·x_j), which clustering on the sphere raises (N5); not a mean."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


def self_attention_levels(
    points: Float[Tensor, "*batch n d"], *, scale: float | None = None, group: Processes = None
) -> SelfAttentionLevelsResult:
    """log Z, entropy and energy of a cloud's self-attention without weights; memory is linear in n, time quadratic.

    The interaction energy is returned as its logarithm, so that it does not overflow.

    Args:
        points: The tokens; computed in at least float32.
        scale: Inverse temperature; d^-½ by default.
        group: Processes that share the tokens; each gets the tokens of all as keys.

    Raises:
        ValueError: the points are no cloud, or the scale is not positive and finite.
        TypeError: the points are no floating-point tensor, or the scale is no number.
    """

    def check() -> None:
        check_cloud(points)
        if scale is not None:
            number("scale", scale, above=0)

    processes = check_call("self_attention_levels", points, group, check, scale=scale)
    beta = points.shape[-1] ** -0.5 if scale is None else scale
    tokens = points.to(promoted_dtype(points))
    all_tokens = gather_tokens(tokens, processes)
    # Each cloud of the batch is a head: (1, batch, n, d).
    queries = tokens.reshape(1, -1, *tokens.shape[-2:])
    keys = all_tokens.reshape(1, -1, *all_tokens.shape[-2:])
    names = ("log_partition", "entropy", "prior_log_partition", "prior_mean_score")
    moments: MomentsResult[Any] = ops.attention_moments(queries, keys, scale=beta, moments=names)
    count = keys.shape[-2]
    log_z = moments.log_partition.double()
    selective = log_z - moments.prior_log_partition - moments.prior_mean_score
    levels = torch.stack([log_z - math.log(count), selective, moments.entropy.double()])[:, 0]
    means = (summed(levels.sum(-1), processes) / count).reshape(3, *points.shape[:-2])
    # Σ_ij exp(scale·x_i·x_j) is the sum of Z over the queries, added up relative to the largest one.
    top = greatest(log_z.detach().amax(-1, keepdim=True), processes)
    energy = top[0, :, 0] + summed((log_z - top).exp().sum(-1)[0], processes).log() - math.log(2 * beta * count**2)
    return SelfAttentionLevelsResult(*means.unbind(), log_interaction_energy=energy.reshape(points.shape[:-2]))


@door(scale=real)
@dataclass(frozen=True)
class SelfAttention:
    """Observable: log Z, entropy and energy of the tokens' self-attention; one attention pass. The default scale is d^-½.

    Example:
        >>> import torch
        >>> from massieu.population import SelfAttention
        >>> readings = SelfAttention()(torch.zeros(4, 2))  # all alike: attention is uniform over four
        >>> round(readings["attention_entropy"].value.exp().item(), 3)
        4.0
    """

    scale: float | None = None

    def __call__(self, points: Float[Tensor, "n d"], /, *, group: Processes = None) -> dict[str, ObservableReading]:
        levels = self_attention_levels(points, scale=self.scale, group=group)._asdict()
        return {
            name.replace("entropy", "attention_entropy"): ObservableReading(level) for name, level in levels.items()
        }
