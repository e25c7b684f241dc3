"""A null slot: a key at the origin with a value of zero, whose log-weight is learned, so that a query may attend to nothing.

Its score is 0 for every query, so it changes an attention's results by its share of the partition function alone.
"""

import torch
from torch import Tensor

from massieu.ops import reference


def attention(output: Tensor, log_z: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log Z with the null slot, from those without."""
    level, kept, _ = shares(log_z, sink)
    return (output * kept.unsqueeze(-1)).to(output.dtype), level


def moments(found: tuple[Tensor, ...], sink: Tensor) -> tuple[Tensor, ...]:
    """The ten moments of `MomentsResult` in order, and the output where there is one, with the null slot as one more key."""
    log_z, entropy, mean, variance, top, collision, prior, prior_mean, prior_variance, largest, *output = found
    level, kept, null = shares(log_z, sink)
    prior_level, prior_kept, prior_null = shares(prior, sink)
    absent = (sink == -torch.inf).expand_as(log_z)
    moments = (
        level,
        kept * (entropy - _log(log_z, level)) - null * _log(sink, level),
        kept * mean,
        kept * (variance + null * mean.square()),
        torch.maximum(kept * top, null),
        kept.square() * collision + null.square(),
        prior_level,
        prior_kept * prior_mean,
        prior_kept * (prior_variance + prior_null * prior_mean.square()),
        torch.where(absent, largest, largest.clamp_min(0)),
    )
    return (*moments, *(mean * kept.unsqueeze(-1) for mean in output))


def _log(part: Tensor, level: Tensor) -> Tensor:
    """log of a share, and 0 where that is 0."""
    none = part == -torch.inf
    return torch.where(none, 0.0, part - torch.where(none, 0.0, level))


def shares(log_z: Tensor, sink: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log Z with the null slot, and the weights of the keys together and of the null slot.

    All is finite, and so is every derivative, where either or both are −inf: nothing is subtracted but the larger.
    """
    weights, total, level = reference.softmax(torch.stack(torch.broadcast_tensors(log_z, sink), dim=-1), None)
    kept, null = (weights / total.unsqueeze(-1)).unbind(-1)
    return level, kept, null
