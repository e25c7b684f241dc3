"""Small modules that no library knows: a GPT written by hand, encoders of PyTorch's own, and wrappers."""

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS = 16, 4


def sharp(module: nn.Module, factor: float = 3.0) -> nn.Module:
    """In evaluation mode, with weights so large that attention is far from uniform."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
    return module.eval()


class CausalAttention(nn.Module):
    """Queries, keys and values from one projection, scores masked and normalised in the open."""

    def __init__(self, fused: bool, causal: bool = True) -> None:
        super().__init__()
        self.fused, self.causal = fused, causal
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def changed(self, scores: Tensor) -> Tensor:
        """What is done to the scores before the mask."""
        return scores

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=2)
        )
        if self.fused:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        else:
            scores = self.changed(query @ key.transpose(-2, -1) / math.sqrt(key.shape[-1]))
            seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            mixed = F.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1) @ value
        return self.out(mixed.transpose(1, 2).contiguous().view(batch, length, width))


class Curved(CausalAttention):
    """Scores that are no affine function of the products."""

    def __init__(self) -> None:
        super().__init__(False)

    def changed(self, scores: Tensor) -> Tensor:
        return F.gelu(scores)


class Mixed(CausalAttention):
    """Scores of several heads mixed, as in talking heads: no head has scores of its own."""

    def __init__(self) -> None:
        super().__init__(False)
        self.mix = nn.Linear(HEADS, HEADS, bias=False)

    def changed(self, scores: Tensor) -> Tensor:
        return self.mix(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Pair(nn.Module):
    """Reads two tensors of one form by position: attends from the first to the second, or adds the second."""

    def __init__(self, crossing: bool) -> None:
        super().__init__()
        self.crossing = crossing
        self.query, self.both = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.matrix, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        query, (key, value) = self.query(x), self.both(other if self.crossing else x).split(WIDTH, dim=2)
        heads = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2) @ self.matrix + self.bias
        return mixed if self.crossing else mixed + other


class Nested(nn.Module):
    """Blocks that are lists: attention and feed-forward part, which the model itself adds to the stream."""

    def __init__(self) -> None:
        super().__init__()
        feed = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        attend = nn.Sequential(nn.LayerNorm(WIDTH), CausalAttention(True))
        self.layers = nn.ModuleList(nn.ModuleList([copy.deepcopy(attend), copy.deepcopy(feed)]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for attend, feed in self.layers:  # type: ignore[misc]
            x = attend(x) + x
            x = feed(x) + x
        return x


class Block(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = CausalAttention(fused)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed(self.second(x))


class Gpt(nn.Module):
    """Tokens in, logits out; blocks in a list or in an `nn.Sequential`."""

    def __init__(self, *, fused: bool = True, sequential: bool = False, table: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(31, WIDTH)
        self.places = nn.Embedding(64, WIDTH) if table else nn.Parameter(torch.randn(64, WIDTH))
        blocks = [Block(fused) for _ in range(2)]
        self.blocks = nn.Sequential(*blocks) if sequential else nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 31)

    def forward(self, ids: Tensor) -> Tensor:
        places = self.places.weight if isinstance(self.places, nn.Embedding) else self.places
        x = self.tokens(ids) + places[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Holder(nn.Module):
    """A module around another, which says nothing about it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        result = self.inner(input_ids=ids, attention_mask=mask)
        return {"count": torch.tensor(ids.numel()), "states": result.last_hidden_state}


def gpt(**options: bool) -> Gpt:
    torch.manual_seed(0)
    made = Gpt(**options)
    sharp(made)
    return made


def encoder(*, batch_first: bool = True, norm_first: bool = False, seed: int = 0) -> nn.TransformerEncoder:
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=batch_first, norm_first=norm_first)
    made = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for each in made.layers:  # they are copies of one
        for module in each.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
            elif hasattr(module, "_reset_parameters"):
                module._reset_parameters()
    sharp(made)
    return made


def attention(state: Tensor, weight: Tensor, bias: Tensor, hidden: Tensor | None = None) -> dict[str, Tensor]:
    """Explicit attention in float64 of tokens (B, L, D) to themselves, by the packed weights of query, key and value.

    Args:
        hidden: what no query sees, (L, L) or (B, 1, 1, L).

    Returns:
        For each head, means over all queries of the batch that see a key.
    """
    batch, length, width = state.shape
    packed = state.double() @ weight.double().T + bias.double()
    query, key, _ = (p.view(batch, length, HEADS, -1).transpose(1, 2) for p in packed.split(width, dim=2))
    scores = query @ key.mT / math.sqrt(width // HEADS)
    hidden = torch.zeros(1, dtype=torch.bool) if hidden is None else hidden
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    seen = (~hidden).expand_as(scores)
    log_z = scores.masked_fill(hidden, -torch.inf).logsumexp(-1)
    number = seen.sum(-1)
    selective = log_z - number.log() - torch.where(seen, scores, 0).sum(-1) / number
    return {
        "entropy": torch.special.entr(weights).sum(-1),
        "selective_log_partition": selective,
        "weight_first": weights[..., 0],
    }
