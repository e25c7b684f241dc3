"""From an attention output that is followed to its merged heads: the attention call, laid out by batch, head and token."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.capture import Capture
from massieu.probing.capture.follow.dims import Dim, Dims, LabelledTensor, entries, labels_of, merged, whole
from massieu.probing.capture.follow.paths import Path
from massieu.probing.capture.follow.scores import HIDES, AffineScores, Scores, Weights, affine


@dataclass(frozen=True)
class HeadLayout:
    """Which labels are batch, heads, query tokens and a value's entries."""

    batch: Dim
    heads: Dim
    tokens: Dim
    values: Dim


ReadCall = Callable[[HeadLayout, Tensor], AttentionCall | str]
"""Builds a call from its layout and its output (B, L, H, Dv); or says why it cannot be read."""


@dataclass(frozen=True, eq=False)
class CallPlace:
    """Where in a model a call is.

    Attributes:
        owner: the module that the call is said to be of.
        path: the modules that are running around it.
        capture: the reading that numbers the calls.
    """

    owner: nn.Module
    path: Path
    capture: Capture


@dataclass(frozen=True, eq=False)
class FusedDims:
    """What the dimensions mean of the query, the key, the value and the output of one function that computes attention."""

    query: Dims
    key: Dims
    value: Dims
    output: Dims


@dataclass(frozen=True, eq=False)
class FusedCall:
    """What one function that computes attention was given, in its own layout: (…, L, D), (…, N, D), (…, N, Dv).

    Attributes:
        log_weight: broadcasts to (…, L, N) of the query.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    dims: FusedDims
    log_weight: LabelledTensor | None
    is_causal: bool
    scale: float


@dataclass(frozen=True, eq=False)
class Output:
    """The result of weights on values, or of a function that does all, until it is known how heads and tokens lie in it.

    Attributes:
        read: builds the call once that is known.
        values: labels of a value's entries.
        queries: labels that queries have and keys have not.
        token: number of what is open until the output is read.
        frozen: the output as attention gave it, where the tensor itself was changed since.
    """

    read: ReadCall
    dims: Dims
    values: Dim
    queries: Dim
    path: Path
    token: int = 0
    frozen: LabelledTensor | None = None


def layout_of(output: Output, last: Dim | None = None) -> HeadLayout | str:
    """The layout that the merged last dimension tells; or why it cannot be told.

    Args:
        last: labels that are heads and values, where the projection itself takes them apart.
    """
    dims = output.dims if output.frozen is None else output.frozen.dims
    values = whole(output.values)
    queries = set(whole(output.queries))
    if last is None:
        last = whole(output.dims[-1])
    if not set(values) <= set(last):
        return "it attends over channels, not over tokens"
    heads = tuple(label for label in last if label not in values)
    others = [label for label in labels_of(dims) if label not in heads and label not in values]
    tokens = tuple(label for label in others if label in queries)
    places = [others.index(label) for label in tokens]
    if places and places != list(range(places[0], places[0] + len(places))):
        return "its queries lie in several dimensions"
    batch = tuple(label for label in others if label not in queries)
    return HeadLayout(batch, heads, tokens, values)


def read_weights(weights: Weights, value: LabelledTensor, place: CallPlace) -> ReadCall:
    """A function that builds the call of scores, softmax and values that the model's code computed one after the other."""

    def read(layout: HeadLayout, output: Tensor) -> AttentionCall | str:
        scores = weights.scores
        product = scores.product
        keys = whole(weights.keys)
        form = None
        if weights.taken is None:
            form = affine(scores, (layout.batch, layout.heads, layout.tokens, keys))
        if form is None:
            return _scores_only(weights, layout, value, output, place)
        # The softmax runs over the labels of the key.
        query, key = product.left, product.right
        if not set(keys) <= set(key.labels()):
            query, key = key, query
        size = whole(product.summed)
        queries = merged(query, (layout.batch, layout.heads, layout.tokens, size))
        queries, scale = _scaled(queries, form)
        key_heads = _key_heads(layout.heads, key.labels(), value.labels())
        sink = _sink(scores, layout)
        if isinstance(sink, str):
            return sink
        site, repeated = place.capture.next_site(place.owner, product.left.tensor, product.right.tensor)
        return AttentionCall(
            site=site,
            module=place.owner,
            query=queries,
            key=merged(key, (layout.batch, key_heads, keys, size)),
            value=merged(value, (layout.batch, key_heads, keys, layout.values)),
            log_weight=_up_to_four(form.log_weight),
            is_causal=False,
            scale=scale,
            softcap=form.softcap,
            sink=sink,
            output=output,
            moving=scores.moving,
            repeated=repeated,
        )

    return read


def read_fused(call: FusedCall, place: CallPlace) -> ReadCall:
    """A function that builds the call of a single function that attends."""

    def read(layout: HeadLayout, output: Tensor) -> AttentionCall | str:
        query = LabelledTensor(call.query, call.dims.query)
        key = LabelledTensor(call.key, call.dims.key)
        value = LabelledTensor(call.value, call.dims.value)
        keys = whole(key.dims[-2])
        size = whole(query.dims[-1])
        key_heads = _key_heads(layout.heads, key.labels(), value.labels())
        log_weight = None
        if call.log_weight is not None:
            log_weight = merged(call.log_weight, (layout.batch, layout.heads, layout.tokens, keys), expand=False)
        site, repeated = place.capture.next_site(place.owner, call.query, call.key)
        return AttentionCall(
            site=site,
            module=place.owner,
            query=merged(query, (layout.batch, layout.heads, layout.tokens, size)),
            key=merged(key, (layout.batch, key_heads, keys, size)),
            value=merged(value, (layout.batch, key_heads, keys, layout.values)),
            log_weight=log_weight,
            is_causal=call.is_causal,
            scale=call.scale,
            softcap=None,
            sink=None,
            output=output,
            repeated=repeated,
        )

    return read


def _key_heads(heads: Dim, *labels_of_tensors: Dim) -> Dim:
    """The leading heads that keys and values have; all of them where those that are shared are not the last ones."""
    labels = set().union(*labels_of_tensors)
    is_shared = [label not in labels for label in heads]
    count = is_shared.index(True) if True in is_shared else len(heads)
    return heads[:count] if all(is_shared[count:]) else heads


def _scaled(query: Tensor, form: AffineScores) -> tuple[Tensor, float]:
    """Queries and a scale that is one number; other scales go into the queries."""
    coefficient = form.coefficient
    if not isinstance(coefficient, Tensor):
        return query, float(coefficient)
    first = coefficient.flatten()[0]
    if bool((coefficient == first).all()):
        return query, float(first)
    return (query * coefficient).to(query.dtype), 1.0


def _sink(scores: Scores, layout: HeadLayout) -> Tensor | str | None:
    """The sink's logit of each head, (H,); a reason where it is not the same for all queries, None where there is no sink."""
    if scores.sink is None:
        return None
    logits = merged(scores.sink, (layout.batch, layout.heads, layout.tokens), expand=False)
    if not bool((logits == logits[:1, :, :1]).all()):
        return "its sink depends on the query"
    return logits[0, :, 0].expand(entries(layout.heads)).detach().float()


def _scores_only(
    weights: Weights, layout: HeadLayout, value: LabelledTensor, output: Tensor, place: CallPlace
) -> AttentionCall | str:
    """The call of scores that are no known affine function of the product: they are log-weights of keys alike."""
    if weights.taken is None:
        return "its scores are no affine function of the products, and they were not kept"
    if weights.scores.sink is not None:
        return "its sink is mixed with scores that are no affine function of the products"
    assert weights.original is not None
    keys = whole(weights.keys)
    groups = (layout.batch, layout.heads, layout.tokens, keys)
    scores = merged(LabelledTensor(weights.taken, weights.original.dims), groups).float()
    log_weight = scores.masked_fill(scores <= HIDES, -torch.inf)
    batch, heads, length, num_keys = log_weight.shape
    nothing = log_weight.new_zeros(1)
    product = weights.scores.product
    site, repeated = place.capture.next_site(place.owner, product.left.tensor, product.right.tensor)
    return AttentionCall(
        site=site,
        module=place.owner,
        query=nothing.expand(batch, heads, length, 1),
        key=nothing.expand(batch, heads, num_keys, 1),
        value=merged(value, (layout.batch, layout.heads, keys, layout.values)),
        log_weight=log_weight,
        is_causal=False,
        scale=1.0,
        softcap=None,
        sink=None,
        output=output,
        grade="scores",
        weights=merged(weights.original, groups),
        moving=True,
        repeated=repeated,
    )


def _up_to_four(weight: Tensor | None) -> Tensor | None:
    """A log-weight of all four dimensions, a number among them too."""
    return weight if weight is None or weight.dim() == 4 else weight.reshape(1, 1, 1, 1)
