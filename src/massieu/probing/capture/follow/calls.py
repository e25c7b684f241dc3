"""From an attention output that is followed to its merged heads: the attention call, laid out by batch, head and token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.capture import Capture
from massieu.probing.capture.follow.dims import Dim, Dims, entries, merged, of, whole
from massieu.probing.capture.follow.scores import HIDES, AffineScores, Path, Scores, Weights, affine


@dataclass(frozen=True, eq=False)
class FusedCall:
    """What one function that computes attention was given, in its own layout: (…, L, D), (…, N, D), (…, N, Dv).

    Attributes:
        query_dims, key_dims, value_dims: what the dimensions mean.
        log_weight: broadcasts to (…, L, N) of the query.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_dims: Dims
    key_dims: Dims
    value_dims: Dims
    log_weight: tuple[Tensor, Dims] | None
    is_causal: bool
    scale: float


@dataclass(frozen=True, eq=False)
class Output:
    """The result of weights on values, or of a function that does all, until it is known how heads and tokens lie in it.

    Attributes:
        read: builds the call once that is known: from the layout and the output to an `AttentionCall`, or a reason why not.
        values: labels of a value's entries.
        queries: labels that queries have and keys have not.
        token: number of what is open until the output is read.
        frozen: the output as attention gave it, and its dimensions, where the tensor itself was changed since.
    """

    read: "Callable[[HeadLayout, Tensor], AttentionCall | str]"
    dims: Dims
    values: Dim
    queries: Dim
    path: Path
    token: int = 0
    frozen: tuple[Tensor, Dims] | None = None


@dataclass(frozen=True)
class HeadLayout:
    """Which labels are batch, heads, query tokens and a value's entries."""

    batch: Dim
    heads: Dim
    tokens: Dim
    values: Dim


def layout_of(output: Output, last: Dim | None = None) -> HeadLayout | str:
    """The layout that the merged last dimension tells; or why it cannot be told.

    Args:
        last: labels that are heads and values, where the projection itself takes them apart.
    """
    dims = output.dims if output.frozen is None else output.frozen[1]
    values, queries = whole(output.values), set(whole(output.queries))
    if last is None:
        last = whole(output.dims[-1])
    if not set(values) <= set(last):
        return "it attends over channels, not over tokens"
    heads = tuple(label for label in last if label not in values)
    others = [label for label in of(dims) if label not in heads and label not in values]
    tokens = tuple(label for label in others if label in queries)
    places = [others.index(label) for label in tokens]
    if places and places != list(range(places[0], places[0] + len(places))):
        return "its queries lie in several dimensions"
    batch = tuple(label for label in others if label not in queries)
    return HeadLayout(batch, heads, tokens, values)


def read_weights(weights: Weights, value: Tensor, value_dims: Dims, owner: nn.Module, capture: Capture) -> Any:
    """A function that builds the call of scores, softmax and values that the model's code computed one after the other."""

    def read(layout: HeadLayout, output: Tensor) -> AttentionCall | str:
        scores, product = weights.scores, weights.scores.product
        query, key, query_dims, key_dims = _sides(weights)
        keys, size = whole(weights.keys), whole(product.summed)
        groups = (layout.batch, layout.heads, layout.tokens, keys)
        found = affine(scores, groups) if weights.taken is None else None
        common: dict[str, Any] = {"module": owner, "output": output, "is_causal": False}
        if found is None:
            return _scores_only(weights, layout, (value, value_dims), common, capture)
        query = merged(query, query_dims, (layout.batch, layout.heads, layout.tokens, size))
        query, scale = _scaled(query, found)
        heads = _key_heads(layout.heads, of(key_dims), of(value_dims))
        key = merged(key, key_dims, (layout.batch, heads, keys, size))
        values = merged(value, value_dims, (layout.batch, heads, keys, layout.values))
        sink = _sink(scores, layout)
        if isinstance(sink, str):
            return sink
        site, repeated = capture.place(owner, product.left, product.right)
        return AttentionCall(
            site, query=query, key=key, value=values, log_weight=_up_to_four(found.log_weight), scale=scale,
            softcap=found.softcap, sink=sink, repeated=repeated, moving=scores.moving, **common,
        )  # fmt: skip

    return read


def read_fused(call: FusedCall, owner: nn.Module, capture: Capture) -> Any:
    """A function that builds the call of a single function that attends."""

    def read(layout: HeadLayout, output: Tensor) -> AttentionCall | str:
        keys, size = whole(call.key_dims[-2]), whole(call.query_dims[-1])
        heads = _key_heads(layout.heads, of(call.key_dims), of(call.value_dims))
        query = merged(call.query, call.query_dims, (layout.batch, layout.heads, layout.tokens, size))
        key = merged(call.key, call.key_dims, (layout.batch, heads, keys, size))
        value = merged(call.value, call.value_dims, (layout.batch, heads, keys, layout.values))
        weight = None
        if call.log_weight is not None:
            groups = (layout.batch, layout.heads, layout.tokens, keys)
            weight = merged(*call.log_weight, groups, expand=False)
        site, repeated = capture.place(owner, call.query, call.key)
        return AttentionCall(
            site, owner, query, key, value, weight, call.is_causal, call.scale, None, None, output,
            repeated=repeated,
        )  # fmt: skip

    return read


def _sides(weights: Weights) -> tuple[Tensor, Tensor, Dims, Dims]:
    """Query and key: the softmax runs over the labels of the key."""
    product = weights.scores.product
    left, right = (product.left, product.left_dims), (product.right, product.right_dims)
    (query, query_dims), (key, key_dims) = (
        (left, right) if set(whole(weights.keys)) <= set(of(right[1])) else (right, left)
    )
    return query, key, query_dims, key_dims


def _key_heads(heads: Dim, *of_tensors: Dim) -> Dim:
    """The leading heads that keys and values have; all of them where those that are shared are not the last ones."""
    own = set().union(*of_tensors)
    shared = [label not in own for label in heads]
    count = shared.index(True) if True in shared else len(heads)
    return heads[:count] if all(shared[count:]) else heads


def _scaled(query: Tensor, found: AffineScores) -> tuple[Tensor, float]:
    """A scale that is one number; others go into the queries."""
    coefficient = found.coefficient
    if not isinstance(coefficient, Tensor):
        return query, float(coefficient)
    first = coefficient.flatten()[0]
    if bool((coefficient == first).all()):
        return query, float(first)
    return (query * coefficient).to(query.dtype), 1.0


def _sink(scores: Scores, layout: HeadLayout) -> Tensor | str | None:
    if scores.sink is None:
        return None
    tensor = merged(*scores.sink, (layout.batch, layout.heads, layout.tokens), expand=False)
    if not bool((tensor == tensor[:1, :, :1]).all()):
        return "its sink depends on the query"
    return tensor[0, :, 0].expand(entries(layout.heads)).detach().float()


def _scores_only(
    weights: Weights, layout: HeadLayout, values: tuple[Tensor, Dims], common: dict[str, Any], capture: Capture
) -> AttentionCall | str:
    """The call of scores that are no known affine function of the product: they are log-weights of keys alike."""
    if weights.taken is None:
        return "its scores are no affine function of the products, and they were not kept"
    keys = whole(weights.keys)
    if weights.scores.sink is not None:
        return "its sink is mixed with scores that are no affine function of the products"
    assert weights.original is not None
    groups = (layout.batch, layout.heads, layout.tokens, keys)
    dims = weights.original[1]
    log_weight = merged(weights.taken, dims, groups).float()
    log_weight = log_weight.masked_fill(log_weight <= HIDES, -torch.inf)
    batch, heads, length, count = log_weight.shape
    nothing = log_weight.new_zeros(1)
    query, key = nothing.expand(batch, heads, length, 1), nothing.expand(batch, heads, count, 1)
    value = merged(*values, (layout.batch, layout.heads, keys, layout.values))
    product = weights.scores.product
    site, repeated = capture.place(common["module"], product.left, product.right)
    return AttentionCall(
        site, query=query, key=key, value=value, log_weight=log_weight, scale=1.0, softcap=None, sink=None,
        grade="scores", weights=merged(*weights.original, groups), repeated=repeated, moving=True, **common,
    )  # fmt: skip


def _up_to_four(weight: Tensor | None) -> Tensor | None:
    """A log-weight of all four dimensions, a number among them too."""
    return weight if weight is None or weight.dim() == 4 else weight.reshape(1, 1, 1, 1)
