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

        Dropout is of weights, and then takes memory L×N in training. The weights returned are those before it.

        Raises:
            ValueError: an argument that the strategy does not go with, or a strategy that another module has.
        """
        super().__init__()
        check_heads(embed_dim, num_heads)
        number("dropout", dropout, least=0, below=1)
        heads = SoftmaxHeads() if heads is None else instance("heads", heads, Heads, "a strategy, as SoftmaxHeads() is")
        flag("bias", bias)
        check_taken(heads, dropout=dropout, add_bias_kv=add_bias_kv, add_zero_attn=add_zero_attn, vdim=vdim)
        heads.bind(num_heads, embed_dim // num_heads, device, dtype)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, add_zero_attn
        # False whatever the sizes: else `nn.TransformerEncoderLayer` would compute its own attention of our parameters.
        self._qkv_same_embed_dim = False
        place = {"device": device, "dtype": dtype}
        count, sizes = len(heads.projections), self._sizes()
        packed = all(sizes[name] == embed_dim for name in heads.projections)
        self.in_proj_weight = nn.Parameter(torch.empty(count * embed_dim, embed_dim, **place)) if packed else None
        for name, size in sizes.items():
            own = name in heads.projections and not packed
            weight = nn.Parameter(torch.empty(embed_dim, size, **place)) if own else None
            self.register_parameter(f"{name[0]}_proj_weight", weight)
        self.in_proj_bias = nn.Parameter(torch.empty(count * embed_dim, **place)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **place)
        self.bias_k = nn.Parameter(torch.empty(1, 1, embed_dim, **place)) if add_bias_kv else None
        self.bias_v = nn.Parameter(torch.empty(1, 1, embed_dim, **place)) if add_bias_kv else None
        self.heads = heads
        self._draw()

    def reset_parameters(self) -> None:
        """Start anew, as `torch.nn.MultiheadAttention` does; the strategy's numbers are those that were given."""
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
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                nn.init.xavier_normal_(extra)

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
        """`torch.nn.MultiheadAttention`'s call, with one thing more on request.

        Args:
            query, key, value: (L, B, ·) and (N, B, ·); batch first with `batch_first=True`; or (L, ·) and (N, ·). Nested
                tensors are taken too, as `torch.nn.TransformerEncoder` makes them in evaluation where there is padding.
                Without keys, the queries; without values, the keys.
            key_padding_mask: (B, N), or (N,). Booleans of which True hides a key, or log-weights of the keys.
            need_weights: Return the weights too, in memory L×N. Without them memory is linear in L and N where the
                strategy says so.
            attn_mask: (L, N) or (B·H, L, N). Booleans of which True hides, or numbers added to the scores.
            average_attn_weights: Weights averaged over the heads, or (B, H, L, N).
            is_causal: Query i sees keys 0 … i, whether a mask is given or not.
            query_offset: Query i stands at position i + query_offset for causality and windows: a decoder's new queries see
                the keys of its cache.
            documents: Boundaries of packed rows, the same for every row of the batch: `massieu.ops.Documents`. Queries see the
                keys of their own document, in which positions count. Rows packed differently are one row, joined.
            need_log_partition: Return log Z in nats, (B, H, L), too: −inf for a query that sees no key.
            need_moments: Return a `massieu.ops.moments.MomentsResult` too, with log Z, entropy and moments of the scores, each
                (B, H, L): all of them, or those of these names, which cost less. Dropout does not change them.
            need_potential: Return too what the heads' output is the gradient of, where that is not log Z.
            need_variance: Return the variance of an estimate too.

        Returns:
            The output, in the query's shape; the weights, or None; and what was asked for, in float32 or float64.

        Raises:
            TypeError, ValueError: tensors or masks that do not fit the module or each other; what the strategy has not.
        """
        if not isinstance(need_moments, bool):
            sequence("need_moments", need_moments)
            need_moments = tuple(need_moments)
        asked = {"log_partition": need_log_partition, "moments": bool(need_moments)}
        beside = self._beside(**asked, potential=need_potential, variance=need_variance)
        check_taken(self.heads, attn_mask=attn_mask, is_causal=is_causal)
        whole_number("query_offset", query_offset, least=0)
        if documents is not None:
            self._check_packed(documents, query)
        nested, hidden = query, None
        if isinstance(query, Tensor) and query.is_nested:
            given = (query, query if key is None else key)
            self._check_nested(given[1], given[1] if value is None else value, key_padding_mask)
            (query, hidden), (key, key_padding_mask) = map(padded, given)
            value = None if value is None or value is given[1] else padded(value)[0]
        heads, key_heads, *others = self.project(query, key, value)
        batched = query.ndim == 3
        if not batched and isinstance(key_padding_mask, Tensor):
            key_padding_mask = key_padding_mask.unsqueeze(0)
        if documents is not None:
            documents.check_fits(heads.shape[2], key_heads.shape[2])
        log_weight = log_weight_of(key_padding_mask, attn_mask, heads, key_heads)
        more = (self.bias_k is not None) + self.add_zero_attn
        if more or (query_offset and not self.heads.takes_offset):
            # Keys behind the others would be in the future.
            log_weight = with_positions(log_weight, heads, key_heads, is_causal, query_offset=query_offset)
            log_weight, is_causal = with_more_keys(log_weight, more), False
        dropout = self.dropout if self.training else 0.0
        keys = self._with_more(key_heads, self.bias_k)
        values = self._with_more(others[0], self.bias_v) if others else keys
        moments = None if isinstance(need_moments, bool) else need_moments
        request = Request(log_weight, is_causal, need_weights, beside, dropout, query_offset, moments, documents)
        found = self.heads.attend(heads, keys, values, request)
        output = self.out_proj(merge_heads(found.output))
        weights, told = found.weights if need_weights else None, found.beside if beside else None
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            found = output, weights, told
            output, weights, told = pytree.tree_map_only(Tensor, lambda tensor: tensor.squeeze(0), found)
        elif not self.batch_first:
            output = output.transpose(0, 1)
        if hidden is not None:
            output = nested_like(output, hidden, nested)
        return (output, weights, told) if beside else (output, weights)

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
        """Queries, keys and, where the strategy takes values of their own, values, by head, as its `solve` takes them.

        Raises:
            TypeError, ValueError: as a call.
        """
        key = query if key is None else key
        value = key if value is None else value
        wanted = self.heads.projections
        if "value" not in wanted and value is not key:
            raise ValueError(f"the values of {type(self.heads).__name__} are the keys: give the key as value, or none")
        given = {"query": query, "key": key, "value": value}
        inputs = {name: given[name] for name in wanted}
        self._check(inputs)
        if query.ndim == 2:
            inputs = {name: tensor.unsqueeze(0) for name, tensor in inputs.items()}
        elif not self.batch_first:
            inputs = {name: tensor.transpose(0, 1) for name, tensor in inputs.items()}
        count, packed, bias = len(inputs), self.in_proj_weight, self.in_proj_bias
        apart = [getattr(self, f"{name[0]}_proj_weight") for name in inputs]
        weights = apart if packed is None else packed.chunk(count)
        biases = count * [None] if bias is None else bias.chunk(count)
        return tuple(
            split_heads(F.linear(tensor, weight, bias), self.num_heads)
            for tensor, weight, bias in zip(inputs.values(), weights, biases, strict=True)
        )

    def extra_repr(self) -> str:
        return settings(self, "embed_dim", "num_heads", "kdim", "vdim", "dropout", "batch_first")

    def _sizes(self) -> dict[str, int]:
        return {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}

    def _beside(self, **asked: bool) -> str | None:
        """What is asked for beside output and weights."""
        names = [name for name, wanted in asked.items() if wanted]
        known = self.heads.gives
        if len(names) > 1 or (names and names[0] not in known):
            has = " or ".join(f"need_{name}" for name in known) if known else "nothing"
            given = " and ".join(f"need_{name}" for name in names)
            raise ValueError(f"a call to {type(self.heads).__name__} may ask for {has} beside the weights, got {given}")
        return names[0] if names else None

    def _with_more(self, heads: Tensor, learned: Tensor | None) -> Tensor:
        """Keys or values with the learned one, and the zero one, behind the others."""
        if learned is not None:
            learned = split_heads(learned, self.num_heads).to(heads.dtype)
            heads = torch.cat([heads, learned.expand(*heads.shape[:2], 1, -1)], 2)
        return F.pad(heads, (0, 0, 0, 1)) if self.add_zero_attn else heads

    def _check_packed(self, documents: object, query: object) -> None:
        instance("documents", documents, Documents, "what Documents.of_lengths or Documents.of_boundaries makes")
        if not self.heads.takes_documents:
            raise ValueError(f"{type(self.heads).__name__} do not go with documents: call them once a document")
        if self.bias_k is not None or self.add_zero_attn:
            raise ValueError(
                "documents do not go with add_bias_kv and add_zero_attn, whose keys are in no document; use sink"
            )
        if isinstance(query, Tensor) and query.is_nested:
            raise ValueError("documents go with dense tensors, got nested ones, which have boundaries of their own")

    def _check_nested(self, key: object, value: object, key_padding_mask: object) -> None:
        nested = all(isinstance(tensor, Tensor) and tensor.is_nested for tensor in (key, value))
        if not self.batch_first or key_padding_mask is not None or not nested:
            raise ValueError(
                "nested tensors need batch_first=True, keys and values that are nested too, and no key_padding_mask, "
                "which their lengths are"
            )

    def _check(self, inputs: dict[str, Tensor]) -> None:
        query, sizes, shapes = inputs["query"], self._sizes(), {}
        for name, tensor in inputs.items():
            shapes[name], size = tuple(floating(name, tensor).shape), sizes[name]
            if tensor.ndim != query.ndim or tensor.ndim not in (2, 3) or tensor.shape[-1] != size:
                order = "(batch, length, {})" if self.batch_first else "(length, batch, {})"
                wanted = order.format(size) if query.ndim == 3 else f"(length, {size}), or with a batch dimension,"
                raise ValueError(f"{name} must have shape {wanted}, got {shapes[name]} for query {shapes['query']}")
            check_input(name, tensor, self, size)
        key, value = shapes["key"], shapes.get("value", shapes["key"])
        if key[:-1] != value[:-1]:
            raise ValueError(f"key and value must have one length and batch, got {key} and {value}")
        batch = 0 if self.batch_first else 1
        if query.ndim == 3 and query.shape[batch] != key[batch]:
            raise ValueError(f"query and key must have one batch size, got {shapes['query']} and {key}")


def check_taken(heads: Heads, **given: object) -> None:
    """Raise a ValueError at an argument that the strategy does not go with."""
    for name, value in given.items():
        if name in heads.refused and (isinstance(value, Tensor) or value):
            raise ValueError(f"{type(heads).__name__} do not go with {name}: {heads.refused[name]}")


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
