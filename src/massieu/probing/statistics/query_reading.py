"""One attention call, query by query: what the per-query statistics share, each computed once and when first asked for.

Keys are first centred on the mean of the real keys of their sequence. Softmax cannot see it, every headline number is
unchanged by it (S25), and the difference log Z − mean score then loses no digits; raw log Z gets the shift back.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from massieu import ops
from massieu.foundation.transforms import in_autocast_dtype, without_autocast
from massieu.ops.moments import NAMES, MomentsResult
from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.tokens import Tokens

ROUNDING = 1e-3
"""Nats by which a score may be rounded if weights are formed in float32; it is the relative error of a weight."""


TILE = 2**21
"""Weights that are formed at a time, of all heads and sequences together."""
PositionFunction = Callable[[Int[Tensor, "L 1"], Int[Tensor, "1 N"]], Tensor]
"""A function of the positions of queries and of keys, (L, N)."""


@dataclass(frozen=True, eq=False)
class QueryReading:
    """One attention call, as a statistic of its queries sees it: B sequences, H heads, L queries, N keys.

    Example:
        >>> import massieu
        >>> from massieu.probing import QueryReading
        >>> @massieu.statistic(unit="tokens", scale="positive")
        ... def distance(reading: QueryReading):
        ...     return reading.expected(lambda query, key: (query - key).abs())
        >>> distance.of
        'queries'

    Attributes:
        call: what the attention was given, and what it gave.
        queries, keys: the tokens asked about and those attended to (the same for self-attention).
        positions: where in the sequence the call's queries are.
        itself: the sequence attends to itself, so that "diagonal" and "previous" mean something.
        moment_names: the moments that are computed at once; another one costs a second pass over the scores.
        truncated: the keys are a cache of the latest tokens, as while a model with a window writes. Then positions are those in
            the cache, and the first token of the document is no longer a key.
    """

    call: AttentionCall
    queries: Tokens
    keys: Tokens
    positions: Int[Tensor, " L"]
    itself: bool
    moment_names: tuple[str, ...] = NAMES[:-1]
    truncated: bool = False

    @cached_property
    def _centre(self) -> Float[Tensor, "B Hk 1 D"] | None:
        """Mean of the unpadded keys; None under a soft cap, where centring would change the scores."""
        if self.call.softcap is not None:
            return None
        weight = self.keys.real.float()
        weight = weight / weight.sum(-1, keepdim=True).clamp_min(1)
        # A mean stays within the range of half precision, where the sum of the keys need not.
        return torch.einsum("bn,bhnd->bhd", weight.to(self.call.key.dtype), self.call.key)[:, :, None]

    @cached_property
    def key(self) -> Float[Tensor, "B Hk N D"]:
        """The keys, centred."""
        return self.call.key if self._centre is None else self.call.key - self._centre

    @cached_property
    def shift(self) -> Float[Tensor, "B H L"]:
        """What centring took from every score of a query: scale · query · mean key."""
        if self._centre is None:
            return torch.zeros_like(self.log_partition)
        query = _grouped(self.call.query, self.call.key)
        return self.call.scale * _inner_products(query, self._centre[:, :, None]).flatten(1, 2)[..., 0]

    @cached_property
    def moments(self) -> "_Moments":
        """Moments of the scores of the centred keys."""
        declared = _attention_moments(self.call, self.key, self.moment_names)
        return _Moments(self.call, self.key, declared)

    @cached_property
    def max_score(self) -> Float[Tensor, "B H L"]:
        """The largest score of the centred keys that a query sees, without keys that a mask of −100 or the like hides."""
        call = self.call.without_shut()
        if call is self.call:
            return self.moments.max_score
        return _computed(_attention_moments(call, self.key, ("max_score",)).max_score)

    @property
    def log_partition(self) -> Float[Tensor, "B H L"]:
        """log Z of the centred keys."""
        return self.moments.log_partition

    @cached_property
    def raw_log_partition(self) -> Float[Tensor, "B H L"]:
        """log Z of the keys before centring, without a learned sink."""
        return self.log_partition + self.shift

    def selective_log_partition(self) -> Float[Tensor, "B H L"]:
        """log Z − log Σw − Σ h_j s_j, the divergence of the attention from uniform attention over the visible keys."""
        moments = self.moments
        return self.log_partition - moments.prior_log_partition - moments.prior_mean_score

    @cached_property
    def largest_logit(self) -> Float[Tensor, "B H L"]:
        """The largest of scale · query · key over the keys that a query sees, before a soft cap, which would hide it."""
        if self.call.softcap is None and self.call.key.dtype not in (torch.float16, torch.bfloat16):
            return self.max_score + self.shift
        # Not from the centred keys: half precision has rounded their differences from the mean.
        return largest_logits(self.call)

    @cached_property
    def visible(self) -> Int[Tensor, "B_or_1 H_or_1 L"]:
        """Number of keys that a query sees; see `AttentionCall.visible`."""
        if self.call.is_causal:
            return torch.arange(1, self.call.query.shape[2] + 1, device=self.call.query.device)[None, None]
        if self.call.log_weight is None:
            return torch.full((1, 1, self.call.query.shape[2]), self.call.key.shape[2], device=self.call.query.device)
        return self.call.visible().sum(-1)

    @cached_property
    def real(self) -> Bool[Tensor, "B H L"]:
        """Queries that are not padding and see a key."""
        counted = self.queries.real[:, None] & (self.visible > 0)
        return counted.expand(self.call.query.shape[:3])

    @cached_property
    def valid(self) -> Bool[Tensor, "B H L"]:
        """Real queries whose log Z and entropy are finite."""
        moments = self.moments
        return self.real & moments.log_partition.isfinite() & moments.entropy.isfinite()

    @cached_property
    def has_choice(self) -> Bool[Tensor, "B H L"]:
        """Valid queries that see several keys. With one key the weight is 1 and the entropy 0, whatever the head does."""
        return self.valid & (self.visible >= 2)

    @cached_property
    def _precise(self) -> "_Precise":
        """The call from which weights of single keys are formed: in float32, or in float64 if its rounding would show.

        A weight is exp(s − log Z). Its two parts are formed in different ways, so each has a rounding of its own, which is
        about ε·β·|q||k| and is relative to the weight. Of scores of some millions it would be more than the weight itself.
        """
        call = self.call
        query, key = in_autocast_dtype(call.query, self.key)  # the numbers from which log Z is computed
        dtype = torch.promote_types(query.dtype, torch.float32)
        query = query.to(dtype)
        key = key.to(dtype)
        in_float32 = _Precise(replace(call, query=query), key, self.log_partition)
        if not query.numel() or not key.numel():
            return in_float32
        largest_log_partition = torch.where(self.real, self.log_partition.abs(), 0.0).amax()
        # The largest entries mostly are enough; Cauchy's bound from norms takes twice as long.
        for largest_product in (_product_of_largest_entries, _product_of_largest_norms):
            largest = torch.maximum(call.scale * largest_product(query, key), largest_log_partition)
            if bool(torch.finfo(dtype).eps * largest <= ROUNDING):
                return in_float32
        log_weight = call.log_weight
        if log_weight is not None and log_weight.dtype != torch.bool:
            log_weight = log_weight.double()
        query, key = in_autocast_dtype(call.query, call.key)
        call = replace(call, query=query.double(), key=key.double(), log_weight=log_weight)
        log_partition = _attention_moments(call, call.key, ("log_partition",)).log_partition
        return _Precise(call, call.key, _computed(log_partition))

    def _weights_of(self, scores: Float[Tensor, "B H L *S"]) -> Float[Tensor, "B H L *S"]:
        """Weights of keys from their scores plus log-weights; what rounding leaves above 1 is 1."""
        log_partition = self._precise.log_partition
        if scores.dim() > log_partition.dim():  # several keys for each query
            log_partition = log_partition[..., None]
        return torch.exp(scores - log_partition).clamp(max=1.0).to(self.log_partition.dtype)

    def weight_at_first(self) -> Float[Tensor, "B H L"]:
        """Attention of every query on the first real token of its document; NaN where that is no longer a key."""
        if self.truncated:
            return torch.full_like(self.log_partition, torch.nan)
        first = self.keys.first_of_document(self.positions)
        if first.shape[1] == 1:
            return self.weight_at(first)[..., 0]
        call = self._precise.call
        key = self._precise.key
        first_key = key.gather(2, first[:, None, :, None].expand(-1, key.shape[1], -1, key.shape[3]))
        product = _paired_product(_grouped(call.query, key), first_key[:, :, None]).flatten(1, 2)
        return self._weights_of(_plus_log_weight(call, _score(call, product)[..., None], first[..., None])[..., 0])

    def weight_at(self, index: Int[Tensor, "B S"]) -> Float[Tensor, "B H L S"]:
        """Attention of every query of a sequence on the same few keys."""
        return self._weights_of(_at_keys(self._precise.call, self._precise.key, index))

    def weight_before(self, offset: int) -> Float[Tensor, "B H L"]:
        """Attention on the key ``offset`` places before each query; on the first key where there is none."""
        return self._weights_of(_at_offset(self._precise.call, self._precise.key, self.positions, offset))

    def weight_special(self) -> Float[Tensor, "B H L"]:
        """Attention on all special tokens together."""
        special = self.keys.special
        slots = 0 if special is None or not special.numel() else int(special.sum(1).max())
        if special is None or slots == 0:
            return torch.zeros_like(self.log_partition)
        # Places of each row's special tokens, filled up with others to the largest number of any row.
        places = special.int().argsort(dim=1, descending=True, stable=True)[:, :slots]
        filler = ~special.gather(1, places)[:, None, None]
        return self.weight_at(places).masked_fill(filler, 0.0).sum(-1).clamp(max=1.0)

    # Scores of papers -------------------------------------------------------------------------------------------------

    def expected(self, numbers: PositionFunction) -> Float[Tensor, "B H L"]:
        """Mean over the attention, Σ_j p_j f(i, j), of numbers that depend on the positions of query and key.

        Args:
            numbers: called with the positions of some queries, (L, 1), and of all keys, (1, N).

        Example:
            How far away are the keys that a token attends to? ``reading.expected(lambda query, key: (query - key).abs())``
        """
        return self._over_tiles(lambda places: numbers(self.positions[places, None], self._key_places)[None, None])

    def weight_where(self, chosen: PositionFunction) -> Float[Tensor, "B H L"]:
        """Attention on all keys that are chosen by the positions of query and key.

        Args:
            chosen: called with the positions of some queries, (L, 1), and of all keys, (1, N); True at the keys that count.
        """

        def mask(places: Int[Tensor, " T"]) -> Bool[Tensor, "1 1 T N"]:
            return _boolean(chosen(self.positions[places, None], self._key_places))[None, None]

        return self._over_tiles(mask).clamp(max=1.0)

    def weight_where_tokens(
        self,
        chosen: Callable[[Int[Tensor, "B L 1"], Int[Tensor, "B 1 N"]], Bool[Tensor, "B L N"]],
        queries: Int[Tensor, "B L"] | None = None,
    ) -> Float[Tensor, "B H L"] | None:
        """Attention on all keys that are chosen by the token ids of query and key.

        Args:
            chosen: called with the ids of some queries, (B, L, 1), and of all keys, (B, 1, N); True at the keys that count.
            queries: ids to use in place of the queries' own.

        Returns:
            The weights; None where the model was given no token ids, as where it reads images.
        """
        query_ids = self.queries.ids if queries is None else queries
        key_ids = self.keys.ids
        if query_ids is None or key_ids is None:
            return None

        def mask(places: Int[Tensor, " T"]) -> Bool[Tensor, "B 1 T N"]:
            return _boolean(chosen(query_ids[:, places, None], key_ids[:, None]))[:, None]

        return self._over_tiles(mask).clamp(max=1.0)

    def weight_on(self, keys: Bool[Tensor, "B N"]) -> Float[Tensor, "B H L"]:
        """Attention on all keys that are chosen, the same for every query."""
        return self.expected_of_keys(_boolean(keys)[:, None].to(self.log_partition)).clamp(max=1.0)

    def expected_of_keys(self, numbers: Float[Tensor, "B #H N"]) -> Float[Tensor, "B H L"]:
        """Mean over the attention, Σ_j p_j f_j, of numbers that keys have, the same for every query; by head, or for all.

        Raises:
            ValueError: the numbers have another shape than (B, H, N) or (B, 1, N).
        """
        batch, heads, _, _ = self.call.query.shape
        keys = self.call.key.shape[2]
        if tuple(numbers.shape) not in ((batch, heads, keys), (batch, 1, keys)):
            raise ValueError(
                f"numbers of keys have shape (B, H, N) = ({batch}, {heads}, {keys}) or (B, 1, N), got {tuple(numbers.shape)}"
            )
        return self._over_tiles(lambda places: numbers[:, :, None])

    def strongest_key(self) -> Int[Tensor, "B H L"]:
        """Position of the key with the largest weight; of equal ones the first."""
        return torch.cat([self._tile(places).argmax(-1) for places in self._tiles()], dim=-1)

    def weighted_value(self) -> Float[Tensor, "B H L Dv"]:
        """Mean over the attention of the values, Σ_j p_j v_j, before the output projection, without a learned sink."""
        value = self.call.value.to(self.log_partition)
        value = value.repeat_interleave(self.call.query.shape[1] // value.shape[1], 1)
        value = value.to(self._precise.log_partition)
        with without_autocast(value.device):
            return torch.cat([self._tile(places) @ value for places in self._tiles()], dim=2).to(self.log_partition)

    @cached_property
    def value_norms(self) -> Float[Tensor, "B H N"]:
        """Norm of each key's value, as each head sees it."""
        norms = self.call.value.to(self.log_partition).norm(dim=-1)
        return norms.repeat_interleave(self.call.query.shape[1] // norms.shape[1], 1)

    def output_norm(self) -> Float[Tensor, "B H L"]:
        """Norm of the head's output at each query, before the output projection."""
        return self.call.output.to(self.log_partition).norm(dim=-1).transpose(1, 2)

    @property
    def _key_places(self) -> Int[Tensor, "1 N"]:
        return torch.arange(self.call.key.shape[2], device=self.call.key.device)[None]

    def _tiles(self) -> Iterator[Int[Tensor, " T"]]:
        """Places of the call's queries, in pieces whose weights take bounded memory."""
        batch, heads, length, _ = self.call.query.shape
        rows = max(1, TILE // max(1, batch * heads * self.call.key.shape[2]))
        yield from torch.arange(length, device=self.call.query.device).split(rows)

    def _tile(self, places: Int[Tensor, " T"]) -> Float[Tensor, "B H T N"]:
        """The weights of some queries on all keys."""
        call = self._precise.call.at(places)
        key = self._precise.key
        product = _inner_products(_grouped(call.query, key), key[:, :, None]).flatten(1, 2)
        logits = _score(call, product)
        if call.log_weight is not None and call.log_weight.dtype == torch.bool:
            logits = logits.masked_fill(~call.log_weight, -torch.inf)
        elif call.log_weight is not None:
            logits = logits + call.log_weight
        weights = torch.exp(logits - self._precise.log_partition[:, :, places, None])
        # A query that sees no key has no weights: exp(−∞ + ∞).
        return torch.where(logits.isneginf(), 0.0, weights).clamp(max=1.0)

    def _over_tiles(self, numbers: Callable[[Int[Tensor, " T"]], Tensor]) -> Float[Tensor, "B H L"]:
        """Σ_j p_j f(i, j), some queries at a time.

        Args:
            numbers: f of the queries at some places, or a mask that stands for 0 and 1; broadcasts with (B, H, T, N).
        """
        sums = []
        for places in self._tiles():
            weights = self._tile(places)
            values = numbers(places)
            if values.dtype == torch.bool:
                products = torch.where(values, weights, 0.0)
            else:
                # Numbers of keys that a query does not see may be infinite or NaN: 0 · NaN would be NaN.
                products = torch.where(weights > 0, weights * values, 0.0)
            sums.append(products.sum(-1))
        return torch.cat(sums, dim=-1).to(self.log_partition)


PerQuery = Float[Tensor, "B H L"] | tuple[Float[Tensor, "B H L"], Bool[Tensor, "B #H L"]] | None
"""A number for each query; a pair of these and of where they are defined; or None where the statistic has no meaning."""
QueryMeasure = Callable[[QueryReading], PerQuery]
"""A statistic of queries."""


@dataclass(frozen=True, eq=False)
class _Precise:
    """A call and its keys, from which scores of single keys are formed, and log Z of the same keys."""

    call: AttentionCall
    key: Float[Tensor, "B Hk N D"]
    log_partition: Float[Tensor, "B H L"]


class _Moments:
    """The moments that were computed at once, and others when they are first read.

    It holds the call and not the reading that holds it: a circle of references would keep queries, keys and values of many
    calls in memory until the garbage collector comes by.
    """

    def __init__(self, call: AttentionCall, key: Float[Tensor, "B Hk N D"], declared: MomentsResult[Any]) -> None:
        self._call = call
        self._key = key
        self.declared = declared
        self._undeclared: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Tensor:
        value = getattr(self.declared, name)
        if value is not None:
            return value
        if name not in self._undeclared:
            # It costs a second pass over the scores, never a result.
            warnings.warn(
                f"a statistic reads the moment {name!r} without declaring it: moments=({name!r},) saves a second pass",
                stacklevel=2,
            )
            self._undeclared[name] = getattr(_attention_moments(self._call, self._key, (name,)), name)
        return self._undeclared[name]


def _attention_moments(call: AttentionCall, key: Tensor, names: tuple[str, ...]) -> MomentsResult[Any]:
    """Moments of a call's scores, with ``key`` in the place of its keys."""
    return ops.attention_moments(
        call.query,
        key,
        moments=names,
        log_weight=call.log_weight,
        scale=call.scale,
        is_causal=call.is_causal,
        softcap=call.softcap,
    )


def largest_logits(call: AttentionCall) -> Float[Tensor, "B H L"]:
    """The largest of scale · query · key over the keys that each query sees, before a soft cap; −∞ where it sees none."""
    call = replace(call.without_shut(), softcap=None)
    return _computed(_attention_moments(call, call.key, ("max_score",)).max_score)


def _boolean(keys: Tensor) -> Bool[Tensor, "*shape"]:
    """A mask of keys.

    Raises:
        ValueError: it is not boolean.
    """
    if keys.dtype != torch.bool:
        raise ValueError(f"keys are chosen by True and False, got numbers of {keys.dtype}; expected() takes numbers")
    return keys


def _computed(moment: Tensor | None) -> Tensor:
    """A moment that was requested, and so is not None."""
    assert moment is not None
    return moment


def _grouped(query: Tensor, key: Tensor) -> Tensor:
    """The query with its heads split into (key heads, query heads of each)."""
    return query.unflatten(1, (key.shape[1], -1))


def _inner_products(
    query: Float[Tensor, "*batch L D"], key: Float[Tensor, "*batch S D"]
) -> Float[Tensor, "*batch L S"]:
    """q·k in float32 at the least, also where autocast is active.

    A product may leave the range of half precision, and a score of 100 that is rounded to bfloat16 is off by up to .25.
    """
    precision = torch.promote_types(query.dtype, torch.float32)
    with without_autocast(query.device):
        return query.to(precision) @ key.to(precision).mT


def _product_of_largest_norms(query: Tensor, key: Tensor) -> Float[Tensor, ""]:
    """A bound of all |q·k|: max ‖q‖ · max ‖k‖."""
    return query.norm(dim=-1).amax() * key.norm(dim=-1).amax()


def _product_of_largest_entries(query: Tensor, key: Tensor) -> Float[Tensor, ""]:
    """A looser bound of all |q·k|: d · max |q_i| · max |k_i|."""
    largest = [torch.maximum(part.amax(), -part.amin()) for part in (query, key)]
    return query.shape[-1] * largest[0] * largest[1]


def _paired_product(query: Float[Tensor, "*batch L D"], key: Float[Tensor, "*batch _ D"]) -> Float[Tensor, "*batch L"]:
    """q·k of each query with the key at its place, in float32 at the least."""
    precision = torch.promote_types(query.dtype, torch.float32)
    return (query.to(precision) * key.to(precision)).sum(-1)


def _score(call: AttentionCall, product: Float[Tensor, "B H L S"]) -> Float[Tensor, "B H L S"]:
    """The score of q·k: scaled, and capped where the call has a soft cap."""
    scores = call.scale * product
    return scores if call.softcap is None else call.softcap * torch.tanh(scores / call.softcap)


def _plus_log_weight(
    call: AttentionCall, scores: Float[Tensor, "B H L S"], index: Int[Tensor, "B L_or_1 S"]
) -> Float[Tensor, "B H L S"]:
    """Scores of some keys plus their log-weights; −inf where a query does not see the key.

    Args:
        index: the keys' positions, for each query or for all.
    """
    batch, _, length, _ = call.query.shape
    if call.is_causal:
        visible = index <= torch.arange(length, device=index.device)[:, None]
        return scores.masked_fill(~visible[:, None], -torch.inf)
    if call.log_weight is None:
        return scores
    log_weight = call.log_weight.expand(batch, -1, length, -1)
    log_weight = log_weight.gather(3, index[:, None].expand(batch, log_weight.shape[1], length, -1))
    return scores.masked_fill(~log_weight, -torch.inf) if log_weight.dtype == torch.bool else scores + log_weight


def _at_keys(call: AttentionCall, key: Tensor, index: Int[Tensor, "B S"]) -> Float[Tensor, "B H L S"]:
    """Scores plus log-weights of the same few keys for every query of a sequence."""
    few_keys = key.gather(2, index[:, None, :, None].expand(-1, key.shape[1], -1, key.shape[3]))
    product = _inner_products(_grouped(call.query, key), few_keys[:, :, None]).flatten(1, 2)
    return _plus_log_weight(call, _score(call, product), index[:, None])


def _at_offset(call: AttentionCall, key: Tensor, positions: Int[Tensor, " L"], offset: int) -> Float[Tensor, "B H L"]:
    """Score plus log-weight of the key ``offset`` places before each query; of the first key where there is none."""
    index = (positions - offset).clamp_min(0)
    query = _grouped(call.query, key)
    if len(positions) == key.shape[2]:  # every query in order: a shift instead of a gather
        first = _paired_product(query[..., :offset, :], key[:, :, None, :1])
        later = _paired_product(query[..., offset:, :], key[:, :, None, : key.shape[2] - offset])
        product = torch.cat([first, later], dim=-1).flatten(1, 2)
    else:
        product = _paired_product(query, key[:, :, None, index]).flatten(1, 2)
    places = index[None, :, None].expand(call.query.shape[0], -1, -1)  # one key for each query, in every sequence
    return _plus_log_weight(call, _score(call, product)[..., None], places)[..., 0]
