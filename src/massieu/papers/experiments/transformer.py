"""The small transformer that the experiments on sequences train; what differs between their arms is passed in."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from massieu.nn import Attention

MakeAttention = Callable[[int, int], nn.Module]
"""From width and number of heads to a module that is called as `massieu.nn.Attention` is."""
MakeNorm = Callable[[int], nn.Module]
"""From width to a module that keeps the shape."""


def softmax_attention(width: int, heads: int) -> Attention:
    """The usual one."""
    return Attention(width, heads, batch_first=True)


class TransformerBlock(nn.Module):
    """Attention and feed-forward network, each on normalised tokens and added to them.

    Attributes:
        kept: What the tokens are multiplied by before a write is added; 1 in a transformer.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        attention: MakeAttention | None = softmax_attention,
        norm: MakeNorm = nn.LayerNorm,
        *,
        hidden: int | None = None,
        kept: float = 1.0,
    ) -> None:
        """Without attention where that is None: then a token sees itself alone. `hidden` is 4·width by default."""
        super().__init__()
        hidden = 4 * width if hidden is None else hidden
        self.before_attention = None if attention is None else norm(width)
        self.before_feed_forward = norm(width)
        self.attention = None if attention is None else attention(width, heads)
        self.feed_forward = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.kept = kept

    def forward(self, tokens: Float[Tensor, "B L D"], is_causal: bool) -> Float[Tensor, "B L D"]:
        if self.attention is not None and self.before_attention is not None:
            inner = self.before_attention(tokens)
            write = self.attention(inner, inner, inner, need_weights=False, is_causal=is_causal)[0]
            tokens = self.kept * tokens + write
        return self.kept * tokens + self.feed_forward(self.before_feed_forward(tokens))


class Transformer(nn.Module):
    """From tokens to logits of the next one, or with `is_causal` off of each one."""

    def __init__(
        self,
        vocabulary: int,
        length: int,
        *,
        width: int = 64,
        heads: int = 4,
        depth: int = 2,
        block: Callable[[int, int], nn.Module] = TransformerBlock,
        norm: MakeNorm = nn.LayerNorm,
        is_causal: bool = True,
    ) -> None:
        """Takes the sizes, and how a block is made from width and heads; `norm` is the last one, before the readout."""
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.1 * torch.randn(length, width))
        self.blocks = nn.ModuleList(block(width, heads) for _ in range(depth))
        self.after = norm(width)
        self.readout = nn.Linear(width, vocabulary)
        self.is_causal = is_causal

    def forward(self, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
        return self.readout(self.hidden(tokens))

    def hidden(self, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B L D"]:
        """What the readout sees."""
        found = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            found = block(found, self.is_causal)
        return self.after(found)


class VectorTransformer(nn.Module):
    """From vectors to vectors, one at each place; without positions where no length is given."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        length: int | None = None,
        width: int = 32,
        heads: int = 4,
        depth: int = 2,
        block: Callable[[int, int], nn.Module] = TransformerBlock,
        is_causal: bool = True,
    ) -> None:
        super().__init__()
        self.embedding = nn.Linear(inputs, width)
        self.position = None if length is None else nn.Parameter(torch.randn(length, width))
        self.blocks = nn.ModuleList(block(width, heads) for _ in range(depth))
        self.after = nn.LayerNorm(width)
        self.readout = nn.Linear(width, outputs)
        self.is_causal = is_causal

    def forward(self, tokens: Float[Tensor, "B L inputs"]) -> Float[Tensor, "B L outputs"]:
        return self.readout(self.hidden(tokens))

    def hidden(self, tokens: Float[Tensor, "B L inputs"]) -> Float[Tensor, "B L D"]:
        """What the readout sees."""
        found = self.embedding(tokens)
        if self.position is not None:
            found = found + self.position
        for block in self.blocks:
            found = block(found, self.is_causal)
        return self.after(found)
