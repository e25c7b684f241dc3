"""The heads of a layer as components of one mixture (claim S14, experiment E9).

Head a has the log-partition A_a = log Σ h_j e^{s_j}, with h its normalised weights and keys about their mean, which softmax
cannot see. Of a mixture with equal shares π the log-partition is log Σ π_a e^{A_a}. Multi-head attention adds heads with
fixed shares: that is the gradient of the bound Σ π_a A_a, whose gap is KL(π‖r) with r_a ∝ π_a e^{A_a}.
"""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.probing.capture.attention_call import explicit_attention
from massieu.probing.statistics.head_window import HeadWindow, Sums, WindowMeasure, mean_over_queries
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


def _responsibilities(window: HeadWindow) -> Float[Tensor, "H S"]:
    """log r of every head at each sampled query; NaN where some head sees no key."""
    call, key = window.call, window.of_heads(window.call.key)
    scores, weight = explicit_attention(call.at(window.queries))
    evidence = torch.logsumexp(scores + weight, -1)[0].double() - torch.logsumexp(weight, -1)[0].double()
    if call.softcap is None:
        origin = key[:, window.real].mean(1).double()
        evidence = evidence - call.scale * (call.query[0, :, window.queries].double() * origin[:, None]).sum(-1)
    if window.permuted:
        order = torch.rand(evidence.shape, generator=window.generator()).argsort(1).to(evidence.device)
        evidence = evidence.gather(1, order)
    return torch.log_softmax(evidence, 0)


@_of_heads(
    "A head's part in the gap between separate heads and one softmax",
    formula="E log(π_a / r_a); its mean over the heads of a layer is KL(π‖r)",
    unit="nats",
    signed=True,
)
def mixture_gap(window: HeadWindow) -> Sums:
    """How far is adding the heads with equal shares from one softmax over all heads (layer average 0: the same)?"""
    logarithms = _responsibilities(window)
    return mean_over_queries(-logarithms - torch.tensor(float(len(logarithms))).log())


@_of_heads(
    "Responsibility of a head", formula="H · E r_a, H the number of heads", control="reinitialised", scale="positive"
)
def responsibility(window: HeadWindow) -> Sums:
    """Would one softmax over all heads of the layer give this head more (above 1) or less than an equal share?"""
    logarithms = _responsibilities(window)
    return mean_over_queries(len(logarithms) * logarithms.exp())


@_of_heads(
    "Information of a token about the head",
    formula="E r_a log(r_a / E r_a); summed over heads: what a token tells",
    unit="nats",
    scale="number",
)
def gating_information(window: HeadWindow) -> Sums:
    """Does the head's share of that softmax depend on the token, or is it the same for all tokens (0)?"""
    logarithms = _responsibilities(window)
    shares = logarithms.exp()
    return mean_over_queries(shares * (logarithms - shares.nanmean(1, keepdim=True).log()))


class JointGroup(HeadWindowGroup):
    """The heads of a layer as one mixture."""

    name = JOINT
    register = REGISTER
