"""How large is what a head reads at the first token, and what it writes? (claims X4, N25; experiment E3)"""

from functools import partial

from jaxtyping import Bool, Float
from torch import Tensor

from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.tokens import Tokens
from massieu.probing.statistics.registry import VALUES, statistic

_of_values = partial(statistic, VALUES)


@_of_values(
    "Norm of the first token's value",
    formula="‖v_first‖ / mean ‖v_j‖",
    claim="X4, N25",
    caveat="A small norm makes the head a candidate no-op on that text, never a dead head.",
    scale="positive",
)
def first_value_norm_ratio(call: AttentionCall, keys: Tokens) -> tuple[Float[Tensor, "B H"], Bool[Tensor, "B H"]]:
    """How large is the first token's value vector, relative to the other tokens' values?"""
    norms = call.value.float().norm(dim=-1)
    weight = keys.real[:, None].to(norms)
    mean = (norms * weight).sum(-1) / weight.sum(-1).clamp_min(1)
    begins = keys.begins()[:, None].to(norms)
    first = (norms * begins).sum(-1) / begins.sum(-1)
    ratio = (first / mean).repeat_interleave(call.query.shape[1] // call.key.shape[1], 1)
    return ratio, ratio.isfinite() & keys.real.any(-1)[:, None]


@_of_values(
    "Norm of the head's write",
    formula="‖W_O,h o_h‖ / ‖r‖",
    claim="E3",
    caveat="A large write need not matter to later layers, and a small one may.",
    scale="positive",
)
def write_norm_ratio(writes: Float[Tensor, "H B S D"], residual: Float[Tensor, "B S D"]) -> Float[Tensor, "B H S"]:
    """How large is the vector that the head adds, relative to the residual stream?"""
    return (writes.norm(dim=-1) / residual.norm(dim=-1).clamp_min(1e-30)).transpose(0, 1)
