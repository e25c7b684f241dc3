"""A sink: one more key at the origin, whose log-weight is learned, so that a query may attend to none of the keys.

Its score is 0 for every query, and its value is zero unless one is given: a sink of log-weight b and value v is a prior worth
exp(b) tokens v (X4). The results with it follow from those without it and from its share of the partition function.
"""

import torch
from torch import Tensor

from massieu.ops import reference
from massieu.ops.shapes import AttentionProblem


def attention(output: Tensor, log_z: Tensor, problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    """Output and log Z with the sink, from those without."""
    level, key_share, share = shares(log_z, problem)
    return _with_value(output, key_share, share, problem), level


def moments(results: dict[str, Tensor], problem: AttentionProblem) -> dict[str, Tensor]:
    """Moments of `MomentsResult`, by name, with the sink as one more key, from those without it.

    Positions do not change, as they number keys. `results` holds log Z and all that `NEEDED` names.
    """
    sink = problem.sink
    assert sink is not None
    log_z = results["log_partition"]
    level, key_share, share = shares(log_z, problem)
    result = results | {"log_partition": level}
    # Of a mixture of the keys, with weight `key_share`, and the sink, with weight `share` and score 0.
    if "entropy" in results:
        result["entropy"] = key_share * (results["entropy"] - _log(log_z, level)) - share * _log(sink, level)
    if "mean_score" in results:
        result["mean_score"] = key_share * results["mean_score"]
    if "score_variance" in results:
        result["score_variance"] = key_share * (results["score_variance"] + share * results["mean_score"].square())
    if "max_weight" in results:
        result["max_weight"] = torch.maximum(key_share * results["max_weight"], share)
    if "collision" in results:
        result["collision"] = key_share.square() * results["collision"] + share.square()
    if "prior_log_partition" in results:
        result["prior_log_partition"], key_share_prior, share_prior = shares(results["prior_log_partition"], problem)
        if "prior_mean_score" in results:
            result["prior_mean_score"] = key_share_prior * results["prior_mean_score"]
        if "prior_score_variance" in results:
            between = share_prior * results["prior_mean_score"].square()
            result["prior_score_variance"] = key_share_prior * (results["prior_score_variance"] + between)
    if "max_score" in results:
        largest = results["max_score"]
        absent = (sink == -torch.inf).expand_as(largest)
        result["max_score"] = torch.where(absent, largest, largest.clamp_min(0))
    if "output" in results:
        result["output"] = _with_value(results["output"], key_share, share, problem)
    return result


NEEDED: dict[str, tuple[str, ...]] = {
    "score_variance": ("mean_score",),
    "prior_mean_score": ("prior_log_partition",),
    "prior_score_variance": ("prior_log_partition", "prior_mean_score"),
}
"""Moments without the sink, beside log Z, from which a moment with it follows."""


def _with_value(output: Tensor, key_share: Tensor, share: Tensor, problem: AttentionProblem) -> Tensor:
    """The average of values over the keys and the sink."""
    mean = output * key_share.unsqueeze(-1)
    if problem.sink_value is not None:
        mean = mean + share.unsqueeze(-1) * problem.sink_value
    return mean.to(output.dtype)


def _log(part: Tensor, level: Tensor) -> Tensor:
    """log of the share exp(part − level), and 0 where the share is 0: it is then multiplied by it, and 0·∞ is NaN."""
    is_zero = part == -torch.inf
    return torch.where(is_zero, 0.0, part - torch.where(is_zero, 0.0, level))


def shares(log_z: Tensor, problem: AttentionProblem) -> tuple[Tensor, Tensor, Tensor]:
    """log Z with the sink, the share of the keys together, and the share of the sink, each ``(B, Hk, G, L)``.

    Shares and all derivatives are finite where log Z, the sink or both are −inf: only the larger of them is subtracted.
    """
    assert problem.sink is not None
    both = torch.stack(torch.broadcast_tensors(log_z, problem.sink), dim=-1)
    weights, total, level = reference.softmax(both, None)
    key_share, share = (weights / total.unsqueeze(-1)).unbind(-1)
    return level, key_share, share
