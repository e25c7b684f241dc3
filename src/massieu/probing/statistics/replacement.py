"""What becomes of the model if a head writes the same at every token? (experiment E3)"""

from jaxtyping import Bool, Float
from torch import Tensor

from massieu.probing.statistics.registry import REPLACEMENT, statistic


@statistic(
    REPLACEMENT,
    "Loss if the head becomes its mean",
    formula="E[−log p(next)] with the head's output at its mean over the text, minus without",
    claim="E3",
    caveat="Of this head alone: another may do the same work, and heads that are off together lose more or less than the sum.",
    unit="nats a token",
    control=None,
    signed=True,
)
def loss_without_head(replaced: Tensor, stock: Tensor) -> Float[Tensor, "R L"]:
    """How much worse are the model's predictions if this head writes the same at every token?"""
    return replaced - stock


@statistic(
    REPLACEMENT,
    "Output's change if the head becomes its mean",
    formula="‖Δ last hidden state‖² / mean ‖x − x̄‖²",
    claim="E3",
    caveat="How far the model's result moves, not whether it is worse for it.",
    control=None,
)
def output_without_head(
    replaced: Float[Tensor, "R L D"], stock: Float[Tensor, "R L D"], real: Bool[Tensor, "R L"]
) -> Float[Tensor, "R L"]:
    """How far does the model's last hidden state move if this head writes the same at every token?"""
    weight = real[..., None].to(stock)
    mean = (stock * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp_min(1)
    spread = ((stock - mean).square() * weight).sum((1, 2)) / weight.sum((1, 2)).clamp_min(1)
    return (replaced - stock).square().sum(-1) / spread.clamp_min(1e-30)[:, None]
