"""What a model loses if a head writes its mean at every token (experiment E3)."""

from collections.abc import Callable

from jaxtyping import Bool, Float
from torch import Tensor

from massieu.probing.statistics.registry import REPLACEMENT, Register

REGISTER = Register[Callable[..., Tensor]](REPLACEMENT)
"""Both statistics have arguments of their own: one takes losses, the other last states and a mask of real tokens."""


@REGISTER.statistic(
    "Loss when the head's output is replaced by its mean",
    formula="E[−log p(next)] with the head's output at its mean over the text, minus without",
    claim="E3",
    caveat="Only this head is replaced. Another head may do the same work, so replacing both may cost more or less "
    "than the sum.",
    unit="nats a token",
    control=None,
    signed=True,
)
def loss_without_head(replaced: Tensor, stock: Tensor) -> Float[Tensor, "R L"]:
    """How much worse does the model predict the next token if this head writes its mean at every token?"""
    return replaced - stock


@REGISTER.statistic(
    "Change of the output when the head's output is replaced by its mean",
    formula="‖Δ last hidden state‖² / mean ‖x − x̄‖²",
    claim="E3",
    caveat="It says how far the result moves, not whether the result is worse.",
    control=None,
    scale="positive",
)
def output_without_head(
    replaced: Float[Tensor, "R L D"], stock: Float[Tensor, "R L D"], real: Bool[Tensor, "R L"]
) -> Float[Tensor, "R L"]:
    """How far does the last hidden state move if this head writes its mean at every token?"""
    # Mean squared distance of the row's real states from their mean: ‖x − x̄‖² is summed over D and averaged over tokens.
    weight = real[..., None].to(stock)
    mean = (stock * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp_min(1)
    spread = ((stock - mean).square() * weight).sum((1, 2)) / weight.sum((1, 2)).clamp_min(1)
    return (replaced - stock).square().sum(-1) / spread.clamp_min(1e-30)[:, None]
