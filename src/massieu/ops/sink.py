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


def moments(found: dict[str, Tensor], problem: AttentionProblem) -> dict[str, Tensor]:
    """Moments of `MomentsResult`, by name, with the sink as one more key; but for positions, which are those of keys.

    The given ones have those that theirs follow from (`NEEDED`).
    """
    sink = problem.sink
    assert sink is not None
    log_z = found["log_partition"]
    level, kept, share = shares(log_z, problem)
    result = found | {"log_partition": level}
    if "entropy" in found:
        result["entropy"] = kept * (found["entropy"] - _log(log_z, level)) - share * _log(sink, level)
    if "mean_score" in found:
        result["mean_score"] = kept * found["mean_score"]
    if "score_variance" in found:
        result["score_variance"] = kept * (found["score_variance"] + share * found["mean_score"].square())
    if "max_weight" in found:
        result["max_weight"] = torch.maximum(kept * found["max_weight"], share)
    if "collision" in found:
        result["collision"] = kept.square() * found["collision"] + share.square()
    if "prior_log_partition" in found:
        result["prior_log_partition"], kept_prior, share_prior = shares(found["prior_log_partition"], problem)
        if "prior_mean_score" in found:
            result["prior_mean_score"] = kept_prior * found["prior_mean_score"]
        if "prior_score_variance" in found:
            between = share_prior * found["prior_mean_score"].square()
            result["prior_score_variance"] = kept_prior * (found["prior_score_variance"] + between)
    if "max_score" in found:
        largest = found["max_score"]
        absent = (sink == -torch.inf).expand_as(largest)
        result["max_score"] = torch.where(absent, largest, largest.clamp_min(0))
    if "output" in found:
        result["output"] = _with_value(found["output"], kept, share, problem)
    return result


NEEDED: dict[str, tuple[str, ...]] = {
    "score_variance": ("mean_score",),
    "prior_mean_score": ("prior_log_partition",),
    "prior_score_variance": ("prior_log_partition", "prior_mean_score"),
}
"""What else a moment with the sink follows from, beside log Z."""


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
