"""A sink: one more key at the origin, whose log-weight is learned, so that a query may attend to none of the keys.

Its score is 0 for every query. It has a value, or zero for one: a sink of log-weight b and value v is a prior worth exp(b)
tokens v (X4). An attention's results with it follow from those without and its share of the partition function.
"""

import torch
from torch import Tensor

from massieu.ops import reference
from massieu.ops.shapes import AttentionProblem


def attention(output: Tensor, log_z: Tensor, problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    """Output and log Z with the sink, from those without."""
    level, kept, share = shares(log_z, problem)
    return _with_value(output, kept, share, problem), level


def moments(found: tuple[Tensor, ...], problem: AttentionProblem) -> tuple[Tensor, ...]:
    """The ten moments of `MomentsResult` in order, and the output where there is one, with the sink as one more key."""
    log_z, entropy, mean, variance, top, collision, prior, prior_mean, prior_variance, largest, *output = found
    sink = problem.sink
    assert sink is not None
    level, kept, share = shares(log_z, problem)
    prior_level, prior_kept, prior_share = shares(prior, problem)
    absent = (sink == -torch.inf).expand_as(log_z)
    moments = (
        level,
        kept * (entropy - _log(log_z, level)) - share * _log(sink, level),
        kept * mean,
        kept * (variance + share * mean.square()),
        torch.maximum(kept * top, share),
        kept.square() * collision + share.square(),
        prior_level,
        prior_kept * prior_mean,
        prior_kept * (prior_variance + prior_share * prior_mean.square()),
        torch.where(absent, largest, largest.clamp_min(0)),
    )
    return (*moments, *(_with_value(mean, kept, share, problem) for mean in output))


def _with_value(output: Tensor, kept: Tensor, share: Tensor, problem: AttentionProblem) -> Tensor:
    """The average over the keys and the sink."""
    whole = output * kept.unsqueeze(-1)
    if problem.sink_value is not None:
        whole = whole + share.unsqueeze(-1) * problem.sink_value
    return whole.to(output.dtype)


def _log(part: Tensor, level: Tensor) -> Tensor:
    """log of a share, and 0 where that is 0."""
    none = part == -torch.inf
    return torch.where(none, 0.0, part - torch.where(none, 0.0, level))


def shares(log_z: Tensor, problem: AttentionProblem) -> tuple[Tensor, Tensor, Tensor]:
    """log Z with the sink, and the weights of the keys together and of the sink.

    All is finite, and so is every derivative, where either or both are −inf: nothing is subtracted but the larger.
    """
    assert problem.sink is not None
    both = torch.stack(torch.broadcast_tensors(log_z, problem.sink), dim=-1)
    weights, total, level = reference.softmax(both, None)
    kept, share = (weights / total.unsqueeze(-1)).unbind(-1)
    return level, kept, share
