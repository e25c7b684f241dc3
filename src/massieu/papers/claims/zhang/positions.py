"""Z14: with their positions, tokens are a set."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from massieu import ops
from massieu.papers.claims.claim import ZHANG, Check, at_least, at_most
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.registry import claim
from massieu.posteriors import permutation_gap

_ROUNDING = 1e-12
"""Of a few layers in float64, relative to the largest output: sums in another order."""

_NOTICED = 1e-3
"""What a permutation that the map can tell changes at least, relative to the largest output."""


@claim(
    "Z14",
    title="Positional encodings",
    statement="An encoder is a function of the set of its (content, position) pairs: permuting the pairs permutes "
    "the output. Without positions, content alone may be permuted. Under a causal mask the mask must be permuted "
    "too, with absolute and with rotary positions alike.",
    source=f"{ZHANG}, abstract",
    status="abstract only",
    corrected="Tokens that include their positions are exchangeable only for attention without a mask. A causal "
    "mask also depends on the places, and has to be permuted with them.",
)
def encoders_of_sets(tokens: int = 9, width: int = 16, layers: int = 2, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, tokens=tokens)
    check_at_least(4, width=width)
    width += -width % 4
    normal = normal_draws(seed)
    content = normal(2, tokens, width)
    positions = normal(1, tokens, width).expand(2, -1, -1)
    stack = _encoder(normal, width, layers)
    generator = torch.Generator().manual_seed(seed)

    def encode(x: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        if positions is not None:
            x = x + positions
        for layer in stack:
            x = layer(x, src_mask=mask)
        return x

    yield at_most("no positions: gap", permutation_gap(encode, content, generator=generator).content, _ROUNDING)
    rotary = _rotary(normal, width)
    places = torch.arange(tokens, dtype=torch.float64).expand(2, -1)
    yield from _gaps("absolute positions", encode, content, positions, generator)
    yield from _gaps("rotary positions", rotary, content, places, generator)
    order = torch.arange(tokens).flip(0)
    difference = encode(content[:, order], positions[:, order]) - encode(content, positions)[:, order]
    largest = difference.abs().max().detach()
    yield at_most("absolute positions: the sequence reversed, by hand", largest, _ROUNDING * width)


def _gaps(
    name: str, encoder: Callable[..., Tensor], content: Tensor, positions: Tensor, generator: torch.Generator
) -> Iterator[Check]:
    """Without a mask, content and positions are permuted together; under a causal mask the mask is permuted too."""
    tokens = content.shape[1]
    no_mask = torch.zeros(tokens, tokens, dtype=torch.float64)
    gap = permutation_gap(encoder, content, positions=positions, mask=no_mask, generator=generator)
    assert gap.with_positions is not None and gap.with_mask is not None
    yield at_least(f"{name}: gap, content alone permuted", gap.content, _NOTICED)
    yield at_most(f"{name}: gap, permuted with positions", gap.with_positions, _ROUNDING)
    causal = torch.full((tokens, tokens), -torch.inf, dtype=torch.float64).triu(1)
    gap = permutation_gap(encoder, content, positions=positions, mask=causal, generator=generator)
    assert gap.with_positions is not None and gap.with_mask is not None
    yield at_least(f"{name}, causal mask: gap, permuted with positions", gap.with_positions, _NOTICED)
    yield at_most(f"{name}, causal mask: gap, permuted with positions and mask", gap.with_mask, _ROUNDING)


def _encoder(normal: Normal, width: int, layers: int) -> list[nn.TransformerEncoderLayer]:
    """PyTorch's own layers, with weights of the claim's own draws."""
    stack = []
    for _ in range(layers):
        layer = nn.TransformerEncoderLayer(
            width, 2, 2 * width, dropout=0.0, batch_first=True, device="meta", dtype=torch.float64
        )
        layer = layer.to_empty(device="cpu").eval()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(normal(*parameter.shape) / width**0.5)
        stack.append(layer)
    return stack


def _rotary(normal: Normal, width: int) -> Callable[..., Tensor]:
    """One layer of attention whose queries and keys are turned by their positions, and a residual."""
    to_query, to_key, to_value = (normal(width, width) / width**0.5 for _ in range(3))
    frequencies = 10.0 ** -torch.linspace(0, 2, width // 2, dtype=torch.float64)

    def turn(x: Tensor, positions: Tensor) -> Tensor:
        angle = positions.unsqueeze(-1) * frequencies
        even = x[..., ::2]
        odd = x[..., 1::2]
        return torch.cat([even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1)

    def layer(x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        query = turn(x @ to_query, positions).unsqueeze(1)
        key = turn(x @ to_key, positions).unsqueeze(1)
        value = (x @ to_value).unsqueeze(1)
        return x + ops.attention(query, key, value, log_weight=mask).output.squeeze(1)

    return layer
