"""Multi-head attention that takes PyTorch's place: projections, masks and layouts around a strategy for the heads."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from massieu.foundation.arguments import flag, floating, instance, number, whole_number
from massieu.foundation.doors import sequence
from massieu.nn.heads import Mask, log_weight_of, merge_heads, split_heads, with_more_keys, with_positions
from massieu.nn.modules import Device, Resettable, check_heads, check_input, settings
from massieu.nn.softmax import SoftmaxHeads
from massieu.nn.strategy import Heads, Request
from massieu.ops import Documents
from massieu.ops.moments import MomentsResult

_Pair = tuple[Tensor, Tensor | None]


class Attention(Resettable):
    """`torch.nn.MultiheadAttention`, call and state dict alike, with a strategy for the heads that can be chosen.

    Names of the parameters, their start and the order of arguments are those of PyTorch's module, so that this one takes its
    place and its state dict. Attributes are the arguments of the same names; the strategy, `heads`, has its own settings
    and parameters, named `heads.…` in the state dict. A query that sees no key gets 0 from the heads, not NaN.

    Example:
        >>> import torch
        >>> from massieu.nn import Attention
        >>> attention = Attention(4, 2, batch_first=True)
        >>> _ = attention.load_state_dict(torch.nn.MultiheadAttention(4, 2).state_dict())
        >>> _, _, moments = attention(torch.zeros(1, 3, 4), need_weights=False, is_causal=True, need_moments=True)
        >>> moments.entropy[0, 0].exp().round(decimals=3).tolist()  # query i attends to keys 0 … i alike
        [1.0, 2.0, 3.0]
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
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        heads: Heads | None = None,
    ) -> None:
        """The arguments of `torch.nn.MultiheadAttention`, and the strategy of the heads, by default `SoftmaxHeads()`.

        Dropout applies to the weights, which takes memory L×N in training. A call returns the weights before dropout.

        Raises:
            ValueError: an argument that the strategy does not support, or a strategy that belongs to another module.
        """
        super().__init__()
        check_heads(embed_dim, num_heads)
        number("dropout", dropout, least=0, below=1)
        heads = SoftmaxHeads() if heads is None else instance("heads", heads, Heads, "a strategy, as SoftmaxHeads() is")
        flag("bias", bias)
        check_supported(heads, dropout=dropout, add_bias_kv=add_bias_kv, add_zero_attn=add_zero_attn, vdim=vdim)
        heads.bind(num_heads, embed_dim // num_heads, device, dtype)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.kdim = kdim or embed_dim
        self.vdim = vdim or embed_dim
        self.dropout = dropout
        self.batch_first = batch_first
        self.add_zero_attn = add_zero_attn
        # False whatever the sizes: otherwise `nn.TransformerEncoderLayer` would skip this module and compute softmax attention
        # of its parameters.
        self._qkv_same_embed_dim = False
        self._create_projections(heads.projections, bias, add_bias_kv, {"device": device, "dtype": dtype})
        self.heads = heads
        self._draw()

    def _create_projections(
        self, projected: tuple[str, ...], bias: bool, add_bias_kv: bool, place: dict[str, Any]
    ) -> None:
        """Create the parameters under PyTorch's names: one packed weight if all inputs have the output's size."""

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, **place))

        embed_dim = self.embed_dim
        sizes = self._sizes()
        rows = len(projected) * embed_dim
        is_packed = all(sizes[name] == embed_dim for name in projected)
        self.in_proj_weight = parameter(rows, embed_dim) if is_packed else None
        for name, size in sizes.items():
            has_weight = name in projected and not is_packed
            self.register_parameter(f"{name[0]}_proj_weight", parameter(embed_dim, size) if has_weight else None)
        self.in_proj_bias = parameter(rows) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **place)
        self.bias_k = parameter(1, 1, embed_dim) if add_bias_kv else None
        self.bias_v = parameter(1, 1, embed_dim) if add_bias_kv else None

    def reset_parameters(self) -> None:
        """Draw the weights again, as `torch.nn.MultiheadAttention` does, and restore the strategy's numbers."""
        super().reset_parameters()
        self._draw()

    def _draw(self) -> None:
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            weight = getattr(self, name)
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for bias in (self.bias_k, self.bias_v):
            if bias is not None:
                nn.init.xavier_normal_(bias)

    def forward(
        self,
        query: Float[Tensor, "*batch L embed_dim"],
        key: Float[Tensor, "*batch N kdim"] | None = None,
        value: Float[Tensor, "*batch N vdim"] | None = None,
        key_padding_mask: Mask | None = None,
        need_weights: bool = True,
        attn_mask: Mask | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        query_offset: int = 0,
        documents: Documents | None = None,
        need_log_partition: bool = False,
        need_moments: bool | Collection[str] = False,
        need_potential: bool = False,
        need_variance: bool = False,
    ) -> tuple[Any, ...]:
        """`torch.nn.MultiheadAttention`'s call, with at most one further result on request.

        Args:
            query, key, value: (L, B, ·) and (N, B, ·); batch first with `batch_first=True`; or (L, ·) and (N, ·). Nested
                tensors are taken too, as `torch.nn.TransformerEncoder` makes them in evaluation where there is padding.
                Keys are by default the queries, values by default the keys.
            key_padding_mask: (B, N), or (N,). Booleans of which True hides a key, or log-weights of the keys.
            need_weights: Return the weights too, in memory L×N. Without them memory is linear in L and N where the
                strategy says so.
            attn_mask: (L, N) or (B·H, L, N). Booleans of which True hides, or numbers added to the scores.
            average_attn_weights: Return the weights averaged over the heads, (B, L, N), instead of (B, H, L, N).
            is_causal: Query i sees keys 0 … i only, in addition to what the masks hide.
            query_offset: Query i stands at position i + query_offset for causality and windows: a decoder's new queries see
                the keys of its cache.
            documents: Boundaries of packed rows, the same for every row of the batch: `massieu.ops.Documents`. Queries see the
                keys of their own document, and positions count within it. Join rows that are packed differently into one.
            need_log_partition: Return log Z in nats, (B, H, L), too: −inf for a query that sees no key.
            need_moments: Return a `massieu.ops.moments.MomentsResult` too, with log Z, entropy and moments of the scores, each
                (B, H, L): all moments for True, or those named, which costs less. Dropout does not change them.
            need_potential: Return the potential too, whose gradient is the heads' output, for strategies without log Z.
            need_variance: Return the variance of the strategy's estimate too.

        Returns:
            The output, in the query's shape; the weights, or None; and the further result, if requested, in float32 or float64.

        Raises:
            TypeError, ValueError: tensors or masks that do not fit the module or each other; a result or an argument that the
                strategy does not support.
        """
        if not isinstance(need_moments, bool):
            sequence("need_moments", need_moments)
            need_moments = tuple(need_moments)
        extra = self._requested_extra(
            log_partition=need_log_partition,
            moments=bool(need_moments),
            potential=need_potential,
            variance=need_variance,
        )
        check_supported(self.heads, attn_mask=attn_mask, is_causal=is_causal)
        whole_number("query_offset", query_offset)
        if documents is not None:
            self._check_packed(documents, query)
        nested_query = None
        query_padding = None
        if isinstance(query, Tensor) and query.is_nested:
            nested_query = query
            query, key, value, query_padding, key_padding_mask = self._padded_inputs(
                query, key, value, key_padding_mask
            )
        query_heads, key_heads, *value_heads = self.project(query, key, value)
        is_batched = query.ndim == 3
        if not is_batched and isinstance(key_padding_mask, Tensor):
            key_padding_mask = key_padding_mask.unsqueeze(0)
        if documents is not None:
            documents.check_fits(query_heads.shape[2], key_heads.shape[2])
        log_weight = log_weight_of(key_padding_mask, attn_mask, query_heads, key_heads)
        num_added_keys = (self.bias_k is not None) + self.add_zero_attn
        if num_added_keys or (query_offset and not self.heads.supports_query_offset):
            # Causality goes into the mask here: keys added behind the others would be in every query's future.
            log_weight = with_positions(log_weight, query_heads, key_heads, is_causal, query_offset=query_offset)
            log_weight = with_more_keys(log_weight, num_added_keys)
            is_causal = False
        keys = self._with_added_key(key_heads, self.bias_k)
        values = self._with_added_key(value_heads[0], self.bias_v) if value_heads else keys
        request = Request(
            log_weight,
            is_causal,
            need_weights,
            extra,
            dropout=self.dropout if self.training else 0.0,
            query_offset=query_offset,
            moments=None if isinstance(need_moments, bool) else need_moments,
            documents=documents,
        )
        result = self.heads.attend(query_heads, keys, values, request)
        output = self.out_proj(merge_heads(result.output))
        # A strategy may return more than was requested.
        weights = result.weights if need_weights else None
        extra_result = result.extra if extra else None
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not is_batched:
            output, weights, extra_result = pytree.tree_map_only(
                Tensor, lambda tensor: tensor.squeeze(0), (output, weights, extra_result)
            )
        elif not self.batch_first:
            output = output.transpose(0, 1)
        if nested_query is not None and query_padding is not None:
            output = nested_like(output, query_padding, nested_query)
        return (output, weights, extra_result) if extra else (output, weights)

    if TYPE_CHECKING:

        @overload
        def __call__(
            self, *given: Any, need_moments: Literal[True], **options: Any
        ) -> tuple[*_Pair, MomentsResult[Tensor]]: ...
        @overload
        def __call__(
            self, *given: Any, need_moments: Collection[str], **options: Any
        ) -> tuple[*_Pair, MomentsResult[Tensor | None]]: ...
        @overload
        def __call__(self, *given: Any, need_log_partition: Literal[True], **options: Any) -> tuple[*_Pair, Tensor]: ...
        @overload
        def __call__(self, *given: Any, need_potential: Literal[True], **options: Any) -> tuple[*_Pair, Tensor]: ...
        @overload
        def __call__(self, *given: Any, need_variance: Literal[True], **options: Any) -> tuple[*_Pair, Tensor]: ...
        @overload
        def __call__(self, *given: Any, **options: Tensor | bool | None) -> _Pair: ...
        def __call__(self, *given: Any, **options: Any) -> Any: ...

    def project(
        self,
        query: Float[Tensor, "*batch L embed_dim"],
        key: Float[Tensor, "*batch N kdim"] | None = None,
        value: Float[Tensor, "*batch N vdim"] | None = None,
    ) -> tuple[Float[Tensor, "B H _ D"], ...]:
        """Queries, keys and, unless keys are the values, values, by head: the arguments of the strategy's `solve`.

        Raises:
            TypeError, ValueError: as a call.
        """
        key = query if key is None else key
        value = key if value is None else value
        projected = self.heads.projections
        if "value" not in projected and value is not key:
            raise ValueError(f"{type(self.heads).__name__} uses the keys as values; pass value=None or value=key")
        tensors = {"query": query, "key": key, "value": value}
        inputs = {name: tensors[name] for name in projected}
        self._check_inputs(inputs)
        # From here on all inputs have shape (B, length, size).
        if query.ndim == 2:
            inputs = {name: tensor.unsqueeze(0) for name, tensor in inputs.items()}
        elif not self.batch_first:
            inputs = {name: tensor.transpose(0, 1) for name, tensor in inputs.items()}
        if self.in_proj_weight is None:
            weights = [getattr(self, f"{name[0]}_proj_weight") for name in inputs]
        else:
            weights = self.in_proj_weight.chunk(len(inputs))
        biases = [None] * len(inputs) if self.in_proj_bias is None else self.in_proj_bias.chunk(len(inputs))
        return tuple(
            split_heads(F.linear(tensor, weight, bias), self.num_heads)
            for tensor, weight, bias in zip(inputs.values(), weights, biases, strict=True)
        )

    def extra_repr(self) -> str:
        return settings(self, "embed_dim", "num_heads", "kdim", "vdim", "dropout", "batch_first")

    def _sizes(self) -> dict[str, int]:
        return {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}

    def _requested_extra(self, **requested: bool) -> str | None:
        """The one extra result requested (log_partition, moments, …), or None."""
        names = [name for name, is_requested in requested.items() if is_requested]
        supported = self.heads.extras
        if len(names) > 1 or (names and names[0] not in supported):
            limit = "no result besides output and weights"
            if supported:
                limit = f"at most one of {', '.join(f'need_{name}' for name in supported)}"
            if len(supported) == 1:
                limit = f"only need_{supported[0]} besides output and weights"
            given = " and ".join(f"need_{name}" for name in names)
            raise ValueError(f"{type(self.heads).__name__} can return {limit}; got {given}")
        return names[0] if names else None

    def _padded_inputs(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, key_padding_mask: Mask | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """Nested inputs as dense ones: query, key, value (None where it is the key), and the padding of queries and keys."""
        key = query if key is None else key
        self._check_nested(key, key if value is None else value, key_padding_mask)
        dense_query, query_padding = padded(query)
        dense_key, key_padding = padded(key)
        dense_value = None if value is None or value is key else padded(value)[0]
        return dense_query, dense_key, dense_value, query_padding, key_padding

    def _with_added_key(self, heads: Tensor, learned: Tensor | None) -> Tensor:
        """Keys or values, followed by the learned one (`add_bias_kv`) and the zero one (`add_zero_attn`)."""
        if learned is not None:
            learned = split_heads(learned, self.num_heads).to(heads.dtype)
            heads = torch.cat([heads, learned.expand(*heads.shape[:2], 1, -1)], 2)
        return F.pad(heads, (0, 0, 0, 1)) if self.add_zero_attn else heads

    def _check_packed(self, documents: object, query: object) -> None:
        instance("documents", documents, Documents, "what Documents.of_lengths or Documents.of_boundaries makes")
        if not self.heads.supports_documents:
            raise ValueError(f"{type(self.heads).__name__} does not support documents=; call it once per document")
        if self.bias_k is not None or self.add_zero_attn:
            raise ValueError(
                "documents= does not support add_bias_kv and add_zero_attn, whose keys are in no document; use a sink"
            )
        if isinstance(query, Tensor) and query.is_nested:
            raise ValueError("documents= needs dense tensors; nested ones have boundaries already")

    def _check_nested(self, key: object, value: object, key_padding_mask: object) -> None:
        all_nested = all(isinstance(tensor, Tensor) and tensor.is_nested for tensor in (key, value))
        if not self.batch_first or key_padding_mask is not None or not all_nested:
            raise ValueError(
                "nested tensors need batch_first=True, nested keys and values, and no key_padding_mask: "
                "their lengths are the mask"
            )

    def _check_inputs(self, inputs: dict[str, Tensor]) -> None:
        query = inputs["query"]
        sizes = self._sizes()
        shapes = {}
        for name, tensor in inputs.items():
            shape = tuple(floating(name, tensor).shape)
            shapes[name] = shape
            size = sizes[name]
            if len(shape) != query.ndim or len(shape) not in (2, 3) or shape[-1] != size:
                order = "(batch, length, {})" if self.batch_first else "(length, batch, {})"
                needed = order.format(size) if query.ndim == 3 else f"(length, {size}), or with a batch dimension,"
                raise ValueError(f"{name} must have shape {needed}, got {shape} for query {shapes['query']}")
            check_input(name, tensor, self, size)
        key_shape = shapes["key"]
        value_shape = shapes.get("value", key_shape)
        if key_shape[:-1] != value_shape[:-1]:
            raise ValueError(f"key and value must have one length and batch, got {key_shape} and {value_shape}")
        batch_dimension = 0 if self.batch_first else 1
        if query.ndim == 3 and query.shape[batch_dimension] != key_shape[batch_dimension]:
            raise ValueError(f"query and key must have one batch size, got {shapes['query']} and {key_shape}")


def check_supported(heads: Heads, **arguments: object) -> None:
    """Raise a ValueError if an argument is set that the strategy does not support."""
    for name, value in arguments.items():
        # A mask counts as set whatever its entries; its truth value would be an error.
        if name in heads.unsupported and (isinstance(value, Tensor) or value):
            raise ValueError(f"{type(heads).__name__} does not support {name}: {heads.unsupported[name]}")


def padded(nested: Tensor) -> tuple[Float[Tensor, "B L d"], Bool[Tensor, "B L"]]:
    """The sequences of a nested tensor in one dense tensor, filled up with zeros, and True where that padding is."""
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
