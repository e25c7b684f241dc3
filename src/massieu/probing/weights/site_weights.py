"""The attention weights of one site, with the tokens that they are about."""

from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from massieu.errors import InputError
from massieu.foundation.arguments import whole_number
from massieu.foundation.doors import input_door


@dataclass(frozen=True)
class StrongWeight:
    """One large attention weight.

    Attributes:
        site: name of the attention module.
        row: which sequence of the batch.
        query, key: positions of the query and of the key, from 0.
        query_token, key_token: the tokens there; None where they are not text.
        visible: how many keys the query sees. Uniform attention would give each the weight 1 / visible.
    """

    site: str
    layer: int
    head: int
    row: int
    query: int
    key: int
    query_token: str | None
    key_token: str | None
    weight: float
    visible: int


@dataclass(frozen=True, eq=False)
class SiteAttention:
    """The attention weights of some heads of one attention module.

    A query that sees no key has weights of 0. Rows add up to 1, less the share of a learned sink.

    Attributes:
        name: of the attention module, as `massieu.describe` lists it.
        layer: number of its block in its stack, from 0.
        stack: name of the list of blocks that it is in.
        kind: "self", "causal" or "cross".
        heads: numbers of the heads, in the order of ``weights``.
        num_heads: how many heads the module has.
        weights: in main memory, float32, or float64 for a model in float64.
        sink: share of a learned sink in each query's attention; None where there is none.
        no_distribution: the weights are negative somewhere, or do not add up to 1.
        same_tokens: the keys are those of the queries' tokens, one for one.
        query_real, key_real: False at padding.
        query_tokens, key_tokens: of each sequence; None where the tokens are not text, or not known.
        visible: how many keys each query sees.
    """

    name: str
    layer: int
    stack: str
    kind: str
    heads: tuple[int, ...]
    num_heads: int
    weights: Float[Tensor, "B H L N"] = field(repr=False)
    sink: Float[Tensor, "B H L"] | None = field(repr=False)
    no_distribution: bool
    same_tokens: bool
    query_real: Bool[Tensor, "B L"] = field(repr=False)
    key_real: Bool[Tensor, "B N"] = field(repr=False)
    query_tokens: list[list[str]] | None = field(repr=False)
    key_tokens: list[list[str]] | None = field(repr=False)
    visible: Int[Tensor, "B H L"] = field(repr=False)

    def __repr__(self) -> str:
        batch, heads, queries, keys = self.weights.shape
        return (
            f"{self.name}: {self.kind}, layer {self.layer}, {heads} of {self.num_heads} heads, weights of {batch} × "
            f"{queries} queries over {keys} keys"
        )

    def of_head(self, head: int) -> Float[Tensor, "B L N"]:
        """The weights of one head, by its number in the module.

        Raises:
            InputError: there are no weights of this head.
        """
        if head not in self.heads:
            raise InputError(f"there are no weights of head {head} of {self.name}; there are {list(self.heads)}")
        return self.weights[:, self.heads.index(head)]

    def chooses(self) -> Bool[Tensor, "B H L"]:
        """Queries that are no padding and see two keys or more; with one key the weight is 1 whatever the head does."""
        return (self.visible >= 2) & self.query_real[:, None]

    def has_nan(self) -> Bool[Tensor, "B H L"]:
        """Queries that are no padding, and of which some weight is NaN."""
        return self.weights.isnan().any(-1) & self.query_real[:, None]

    def mean_distance(self) -> Float[Tensor, " H"]:
        """Mean over queries of Σ_j p_j |i − j|, in tokens, of each head; a learned sink is left out of p.

        Only queries with two keys or more count. NaN where there is none, or where the keys are not the queries' tokens.
        """
        if not self.same_tokens:
            return self.weights.new_full((len(self.heads),), torch.nan)
        positions = torch.arange(self.weights.shape[-1], dtype=self.weights.dtype)
        distance = (positions[: self.weights.shape[2], None] - positions).abs()
        total = self.weights.sum(-1)  # less than 1 where a sink takes a share
        counted = self.chooses() & (total > 0)
        mean = (self.weights * distance).sum(-1) / torch.where(counted, total, 1.0)
        return torch.where(counted, mean, 0.0).sum((0, 2)) / counted.sum((0, 2))

    def weight_on_first(self) -> Float[Tensor, " H"]:
        """Mean weight on the first real token of each sequence, over the queries behind it with two keys or more."""
        first = self._first_keys()
        index = first[:, None, None, None].expand(*self.weights.shape[:3], 1)
        weights = self.weights.gather(3, index)[..., 0]
        counted = self.chooses()
        if self.same_tokens:
            is_later = torch.arange(self.weights.shape[2]) != first[:, None]
            counted = counted & is_later[:, None]
        return torch.where(counted, weights, 0.0).sum((0, 2)) / counted.sum((0, 2))

    @input_door(count=partial(whole_number, least=0))
    def strongest(self, count: int, *, first: bool = True) -> list[StrongWeight]:
        """The largest weights of queries with two keys or more, the largest first; weights that are NaN are left out.

        Args:
            first: whether weights on the first real token of each sequence are among them.
        """
        ranked = self._ranked(first).flatten()
        largest = ranked.topk(min(count, ranked.numel()))
        return self._strong_weights(largest.indices, largest.values)

    def strongest_of_each_head(self, *, first: bool = True) -> list[StrongWeight]:
        """The largest weight of each head, as `strongest` counts them; none of a head without such a weight."""
        _, heads, length, keys = self.weights.shape
        by_head = self._ranked(first).transpose(0, 1).flatten(1)  # (H, B·L·N)
        largest = by_head.max(1)
        row = largest.indices // (length * keys)
        place_in_row = largest.indices % (length * keys)
        # Places among all weights, which lie as (B, H, L, N).
        places = (row * heads + torch.arange(heads)) * length * keys + place_in_row
        return self._strong_weights(places, largest.values)

    def _ranked(self, first: bool) -> Float[Tensor, "B H L N"]:
        """The weights, −∞ where one is not ranked."""
        is_left_out = ~self.chooses()[..., None] | ~self.key_real[:, None, None] | self.weights.isnan()
        ranked = self.weights.masked_fill(is_left_out, -torch.inf)
        if first:
            return ranked
        is_first = torch.nn.functional.one_hot(self._first_keys(), self.key_real.shape[1]).bool()
        return ranked.masked_fill(is_first[:, None, None], -torch.inf)

    def _first_keys(self) -> Int[Tensor, " B"]:
        """Position of the first key of each sequence that is no padding."""
        return self.key_real.int().argmax(1)

    def _strong_weights(self, places: Int[Tensor, " S"], weights: Float[Tensor, " S"]) -> list[StrongWeight]:
        """Weights above 0, by their places among all; −∞ stands for one that is not ranked."""
        pairs = zip(places.tolist(), weights.tolist(), strict=True)
        return [self._strong_weight(place, weight) for place, weight in pairs if weight > 0]

    def _strong_weight(self, place: int, weight: float) -> StrongWeight:
        """One weight with its tokens, by its place among all."""
        row, head, query, key = (int(index) for index in torch.unravel_index(torch.tensor(place), self.weights.shape))
        return StrongWeight(
            site=self.name,
            layer=self.layer,
            head=self.heads[head],
            row=row,
            query=query,
            key=key,
            query_token=_token(self.query_tokens, row, query),
            key_token=_token(self.key_tokens, row, key),
            weight=weight,
            visible=int(self.visible[row, head, query]),
        )


def _token(tokens: list[list[str]] | None, row: int, place: int) -> str | None:
    return None if tokens is None else tokens[row][place]
