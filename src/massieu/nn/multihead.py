"""The frame of every attention module: `torch.nn.MultiheadAttention`'s parameters and call, with the heads' work left open."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from massieu.foundation.arguments import floating, number
from massieu.nn.heads import Mask, log_weight_of, merge_heads, split_heads, with_more_keys, with_positions
from massieu.nn.modules import check_heads, check_input


class Request(NamedTuple):
    """What a call wants of the heads."""

    log_weight: Mask | None
    """Boolean (True keeps) or a number, of N in its last dimension."""
    is_causal: bool
    need_weights: bool
    need_potential: bool


class HeadsResult(NamedTuple):
    """What the heads of a module return; what was not asked for may be None."""

    output: Float[Tensor, "B H L E"]
    weights: Float[Tensor, "B H L N"] | None
    potential: Float[Tensor, "B H L"] | None


class MultiHead(nn.Module, ABC):
    """Projections to heads, masks, the heads' work (`_attend`), and the projection of their outputs.

    Names of the parameters, their start and the order of arguments are those of `torch.nn.MultiheadAttention`, so
    that a module takes its place and its state dict. Attributes are the arguments of the same names.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        number("dropout", dropout, least=0, below=1)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, add_zero_attn
        # False whatever the sizes: else `nn.TransformerEncoderLayer` would compute its own attention of our parameters.
        self._qkv_same_embed_dim = False
        place = {"device": device, "dtype": dtype}
        packed = self.kdim == self.vdim == embed_dim
        sizes = {"q": embed_dim, "k": self.kdim, "v": self.vdim}
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, **place)) if packed else None
        for name, size in sizes.items():
            weight = None if packed else nn.Parameter(torch.empty(embed_dim, size, **place))
            self.register_parameter(f"{name}_proj_weight", weight)
        self.in_proj_bias = nn.Parameter(torch.empty(3 * embed_dim, **place)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **place)
        self.bias_k = nn.Parameter(torch.empty(1, 1, embed_dim, **place)) if add_bias_kv else None
        self.bias_v = nn.Parameter(torch.empty(1, 1, embed_dim, **place)) if add_bias_kv else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as `torch.nn.MultiheadAttention` does."""
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            weight = getattr(self, name)
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                nn.init.xavier_normal_(extra)

    def forward(
        self,
        query: Float[Tensor, "*batch L embed_dim"],
        key: Float[Tensor, "*batch N kdim"],
        value: Float[Tensor, "*batch N vdim"],
        key_padding_mask: Mask | None = None,
        need_weights: bool = True,
        attn_mask: Mask | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        need_potential: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """`torch.nn.MultiheadAttention`'s call, with the potential on request.

        Args:
            query, key, value: (L, B, ·) and (N, B, ·); batch first with `batch_first=True`; or (L, ·) and (N, ·). Nested
                tensors are taken too, as `torch.nn.TransformerEncoder` makes them in evaluation where there is padding.
            key_padding_mask: (B, N), or (N,). Booleans of which True hides a key, or log-weights of the keys.
            need_weights: Return the weights too, in memory L×N. Without them memory is linear in L and N where the
                module says so.
            attn_mask: (L, N) or (B·H, L, N). Booleans of which True hides, or numbers added to the scores.
            average_attn_weights: Weights averaged over the heads, or (B, H, L, N).
            is_causal: Query i sees keys 0 … i, whether a mask is given or not.
            need_potential: Return the potential of which the heads' output is the gradient, too.

        Returns:
            The output, in the query's shape; the weights, or None; and, asked for, the potential: (B, H, L), float32 or
            float64. The heads' output for a query that sees no key is 0.
        """
        nested, hidden = query, None
        if isinstance(query, Tensor) and query.is_nested:
            self._check_nested(key, value, key_padding_mask)
            (query, hidden), (key, key_padding_mask), (value, _) = padded(query), padded(key), padded(value)
        batched = self._check(query, key, value)
        query, key, value = (self._batch_first(tensor, batched) for tensor in (query, key, value))
        if not batched and isinstance(key_padding_mask, Tensor):
            key_padding_mask = key_padding_mask.unsqueeze(0)
        heads, key_heads, value_heads = self._project(query, key, value)
        log_weight = log_weight_of(key_padding_mask, attn_mask, heads, key_heads)
        more = (self.bias_k is not None) + self.add_zero_attn
        if more:
            # Keys behind the others would be in the future.
            log_weight = with_more_keys(with_positions(log_weight, heads, key_heads, is_causal), more)
        request = Request(log_weight, is_causal and not more, need_weights, need_potential)
        keys, values = self._with_more(key_heads, self.bias_k), self._with_more(value_heads, self.bias_v)
        found = self._attend(heads, keys, values, request)
        output = self.out_proj(merge_heads(found.output))
        weights, potential = found.weights if need_weights else None, found.potential
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            output = output.squeeze(0)
            weights, potential = (tensor if tensor is None else tensor.squeeze(0) for tensor in (weights, potential))
        elif not self.batch_first:
            output = output.transpose(0, 1)
        if hidden is not None:
            output = nested_like(output, hidden, nested)
        return (output, weights, potential) if need_potential else (output, weights)

    @abstractmethod
    def _attend(
        self,
        query: Float[Tensor, "B H L D"],
        key: Float[Tensor, "B H N D"],
        value: Float[Tensor, "B H N D"],
        request: Request,
    ) -> HeadsResult:
        """What the heads do."""

    def _dropped(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, self.dropout) if self._drops else weights

    @property
    def _drops(self) -> bool:
        return self.training and self.dropout > 0

    def _batch_first(self, tensor: Tensor, batched: bool) -> Tensor:
        if not batched:
            return tensor.unsqueeze(0)
        return tensor if self.batch_first else tensor.transpose(0, 1)

    def _project(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value by head."""
        packed = self.in_proj_weight
        apart = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        weights = apart if packed is None else packed.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(
            split_heads(F.linear(tensor, weight, bias), self.num_heads)  # pyright: ignore[reportArgumentType]
            for tensor, weight, bias in zip(inputs, weights, biases, strict=True)
        )

    def _with_more(self, heads: Tensor, learned: Tensor | None) -> Tensor:
        """Keys or values with the learned one, and the zero one, behind the others."""
        if learned is not None:
            learned = split_heads(learned, self.num_heads).to(heads.dtype)
            heads = torch.cat([heads, learned.expand(*heads.shape[:2], 1, -1)], 2)
        return F.pad(heads, (0, 0, 0, 1)) if self.add_zero_attn else heads

    def _check_nested(self, key: object, value: object, key_padding_mask: object) -> None:
        nested = all(isinstance(tensor, Tensor) and tensor.is_nested for tensor in (key, value))
        if not self.batch_first or key_padding_mask is not None or not nested:
            raise ValueError(
                "nested tensors need batch_first=True, keys and values that are nested too, and no key_padding_mask, "
                "which their lengths are"
            )

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether there is a batch dimension."""
        sizes = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        shapes = {}
        for (name, size), tensor in zip(sizes.items(), (query, key, value), strict=True):
            shapes[name] = tuple(floating(name, tensor).shape)
            if tensor.ndim != query.ndim or tensor.ndim not in (2, 3) or tensor.shape[-1] != size:
                order = "(batch, length, {})" if self.batch_first else "(length, batch, {})"
                wanted = order.format(size) if query.ndim == 3 else f"(length, {size}), or with a batch dimension,"
                raise ValueError(f"{name} must have shape {wanted}, got {shapes[name]} for query {shapes['query']}")
            check_input(name, tensor, self, size)
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(f"key and value must have one length and batch, got {shapes['key']} and {shapes['value']}")
        batch = 0 if self.batch_first else 1
        if query.ndim == 3 and query.shape[batch] != key.shape[batch]:
            raise ValueError(f"query and key must have one batch size, got {shapes['query']} and {shapes['key']}")
        return query.ndim == 3


def padded(nested: Tensor) -> tuple[Float[Tensor, "B L d"], Bool[Tensor, "B L"]]:
    """The sequences of a nested tensor in one dense tensor, 0 behind their ends, and where that padding is."""
    lengths = torch.tensor([len(sequence) for sequence in nested.unbind()], device=nested.device)
    dense = torch.nested.to_padded_tensor(nested, 0.0)
    return dense, torch.arange(dense.shape[1], device=nested.device) >= lengths.unsqueeze(-1)


def nested_like(dense: Float[Tensor, "B L d"], padding: Bool[Tensor, "B L"], nested: Tensor) -> Tensor:
    """The sequences of a dense tensor, in the layout of `nested`."""
    if nested.layout == torch.jagged:
        # With its own offsets, since sums of nested tensors ask whether these are the same.
        offsets = nested.offsets()  # pyright: ignore[reportAttributeAccessIssue]
        return torch.nested.nested_tensor_from_jagged(dense[~padding], offsets)
    rows = zip(dense, (~padding).sum(-1).tolist(), strict=True)
    return torch.nested.as_nested_tensor([row[:length] for row, length in rows])
