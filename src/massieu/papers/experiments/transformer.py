"""The small transformers that the experiments train; the parts in which their arms differ are arguments."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from massieu.nn import Attention

MakeAttention = Callable[[int, int], nn.Module]
"""From width and number of heads to a module that is called as `massieu.nn.Attention` is."""
MakeNorm = Callable[[int], nn.Module]
"""From width to a module that keeps the shape."""
MakeBlock = Callable[[int, int], nn.Module]
"""From width and number of heads to a module that is called as `TransformerBlock` is."""


def softmax_attention(width: int, heads: int) -> Attention:
    """Multi-head softmax attention of tensors (B, L, D)."""
    return Attention(width, heads, batch_first=True)


class TransformerBlock(nn.Module):
    """Attention and feed-forward network, each on normalised tokens and added to them.

    Attributes:
        residual_scale: The tokens are multiplied by this number before a write is added; 1 in a transformer.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        attention: MakeAttention | None = softmax_attention,
        norm: MakeNorm = nn.LayerNorm,
        *,
        hidden: int | None = None,
        residual_scale: float = 1.0,
    ) -> None:
        """A block of random weights.

        Args:
            width: The size of a token.
            heads: The number of heads.
            attention: Makes the attention; None leaves it out, so that a token sees itself alone.
            norm: Makes the two norms.
            hidden: The width of the feed-forward network's hidden layer; 4·width by default.
            residual_scale: See the class.
        """
        super().__init__()
        if hidden is None:
            hidden = 4 * width
        self.before_attention = None if attention is None else norm(width)
        self.before_feed_forward = norm(width)
        self.attention = None if attention is None else attention(width, heads)
        self.feed_forward = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.residual_scale = residual_scale

    def forward(self, tokens: Float[Tensor, "B L D"], is_causal: bool) -> Float[Tensor, "B L D"]:
        if self.attention is not None and self.before_attention is not None:
            normalised = self.before_attention(tokens)
            write, _ = self.attention(normalised, normalised, normalised, need_weights=False, is_causal=is_causal)
            tokens = self._kept(tokens) + write
        return self._kept(tokens) + self.feed_forward(self.before_feed_forward(tokens))

    def _kept(self, tokens: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        """The part of the tokens to which a write is added; at scale 1 the tensor itself, by which a probe knows the stream."""
        return tokens if self.residual_scale == 1 else self.residual_scale * tokens


class Transformer(nn.Module):
    """From tokens to logits: of the next token, or without `is_causal` of the token at each position."""

    def __init__(
        self,
        vocabulary: int,
        length: int,
        *,
        width: int = 64,
        heads: int = 4,
        depth: int = 2,
        block: MakeBlock = TransformerBlock,
        norm: MakeNorm = nn.LayerNorm,
        is_causal: bool = True,
    ) -> None:
        """A transformer of random weights; `block` makes each block, `norm` the norm before the readout."""
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.1 * torch.randn(length, width))
        self.blocks = nn.ModuleList(block(width, heads) for _ in range(depth))
        self.final_norm = norm(width)
        self.readout = nn.Linear(width, vocabulary)
        self.is_causal = is_causal

    def forward(self, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
        return self.readout(self.hidden(tokens))

    def hidden(self, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B L D"]:
        """The representation that the readout sees."""
        states = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            states = block(states, self.is_causal)
        return self.final_norm(states)


class VectorTransformer(nn.Module):
    """From vectors to vectors, one at each position; `length` None leaves positions out."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        length: int | None = None,
        width: int = 32,
        heads: int = 4,
        depth: int = 2,
        block: MakeBlock = TransformerBlock,
        is_causal: bool = True,
    ) -> None:
        super().__init__()
        self.embedding = nn.Linear(inputs, width)
        self.position = None if length is None else nn.Parameter(torch.randn(length, width))
        self.blocks = nn.ModuleList(block(width, heads) for _ in range(depth))
        self.final_norm = nn.LayerNorm(width)
        self.readout = nn.Linear(width, outputs)
        self.is_causal = is_causal

    def forward(self, tokens: Float[Tensor, "B L inputs"]) -> Float[Tensor, "B L outputs"]:
        return self.readout(self.hidden(tokens))

    def hidden(self, tokens: Float[Tensor, "B L inputs"]) -> Float[Tensor, "B L D"]:
        """The representation that the readout sees."""
        states = self.embedding(tokens)
        if self.position is not None:
            states = states + self.position
        for block in self.blocks:
            states = block(states, self.is_causal)
        return self.final_norm(states)
