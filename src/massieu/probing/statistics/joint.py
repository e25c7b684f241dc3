"""The heads of a layer as components of one mixture (claim S14, experiment E9).

Head a has the log-partition A_a = log Σ h_j e^{s_j}, with h its normalised weights and keys about their mean, which softmax
cannot see. A mixture of the heads with equal shares π has the log-partition log Σ π_a e^{A_a}. Multi-head attention adds
heads with fixed shares: that is the gradient of the bound Σ π_a A_a, whose gap is KL(π‖r) with r_a ∝ π_a e^{A_a}.
"""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.probing.capture.attention_call import explicit_attention
from massieu.probing.statistics.head_window import HeadSums, HeadWindow, WindowMeasure, mean_over_queries
from massieu.probing.statistics.registry import JOINT, SHIM, Register
from massieu.probing.statistics.windowed import HeadWindowGroup

REGISTER = Register[WindowMeasure](JOINT)
_of_heads = partial(
    REGISTER.statistic,
    claim="S14, E9",
    paper=SHIM,
    control="permuted_heads",
    caveat="The key origin is the keys' mean; another origin would give the heads other shares. "
    "The replacement 'joint' measures what one softmax over all heads does to the model's loss.",
)


def _log_responsibilities(window: HeadWindow) -> Float[Tensor, "H S"]:
    """log r of every head at each sampled query; NaN where some head sees no key."""
    call = window.call
    scores, log_weight = explicit_attention(call.at(window.queries))
    log_partition = torch.logsumexp(scores + log_weight, -1)[0].double() - torch.logsumexp(log_weight, -1)[0].double()
    if call.softcap is None:
        # Keys about their mean k̄: every score of a query falls by β q·k̄, and so does log Z.
        mean_key = window.of_heads(call.key)[:, window.real].mean(1).double()
        shift = call.scale * (call.query[0, :, window.queries].double() * mean_key[:, None]).sum(-1)
        log_partition = log_partition - shift
    if window.permuted:
        order = torch.rand(log_partition.shape, generator=window.generator()).argsort(1).to(log_partition.device)
        log_partition = log_partition.gather(1, order)
    return torch.log_softmax(log_partition, 0)


@_of_heads(
    "A head's part in the gap between separate heads and one softmax",
    formula="E log(π_a / r_a); its mean over the heads of a layer is KL(π‖r)",
    unit="nats",
    signed=True,
)
def mixture_gap(window: HeadWindow) -> HeadSums:
    """How far is adding the heads with equal shares from one softmax over all heads (layer average 0: the same)?"""
    log_responsibilities = _log_responsibilities(window)
    log_heads = torch.tensor(float(len(log_responsibilities))).log()
    return mean_over_queries(-log_responsibilities - log_heads)


@_of_heads(
    "Responsibility of a head", formula="H · E r_a, H the number of heads", control="reinitialised", scale="positive"
)
def responsibility(window: HeadWindow) -> HeadSums:
    """Would one softmax over all heads of the layer give this head more (above 1) or less than an equal share?"""
    log_responsibilities = _log_responsibilities(window)
    return mean_over_queries(len(log_responsibilities) * log_responsibilities.exp())


@_of_heads(
    "Information of a token about the head",
    formula="E r_a log(r_a / E r_a); summed over heads: what a token tells",
    unit="nats",
    scale="number",
)
def gating_information(window: HeadWindow) -> HeadSums:
    """Does the head's share of that softmax depend on the token, or is it the same for all tokens (0)?"""
    log_responsibilities = _log_responsibilities(window)
    responsibilities = log_responsibilities.exp()
    log_mean = responsibilities.nanmean(1, keepdim=True).log()
    return mean_over_queries(responsibilities * (log_responsibilities - log_mean))


class JointGroup(HeadWindowGroup):
    """The heads of a layer as one mixture."""

    name = JOINT
    register = REGISTER
