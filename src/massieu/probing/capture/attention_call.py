"""What one attention call was given and gave, whichever way it was read: the one thing that statistics are computed from."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

GAP = 80.0
"""Nats without a log-weight between them that tell a mask from a bias by position; e^−80 is nothing beside a float's digits."""

_BROADCASTING = ("log_weight", "seen", "sink", "sink_value")
"""What a call has for each item, head and query, or once for all of them; a sink of one dimension is once a head."""


@dataclass(frozen=True)
class AttentionSite:
    """One place where attention is computed: a module and which of its calls in one forward pass.

    A shared module (ALBERT) is one module and several sites.
    """

    module_name: str
    ordinal: int = 0

    @property
    def name(self) -> str:
        name = self.module_name or "(the module itself)"
        return name if self.ordinal == 0 else f"{name} (call {self.ordinal + 1})"


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What one attention function was given, and what the model's own code made of it.

    Attributes:
        query: after rotary embedding and normalisation, as the scores see it.
        key: may have fewer heads than ``query`` (grouped queries).
        log_weight: log-weights of the keys, boolean (True = visible) or float with −inf for hidden keys; carries masks,
            windows and additive position biases; None when every key is visible or ``is_causal`` says it all.
        scale: inverse temperature of the scores.
        softcap: scores are ``softcap · tanh(score / softcap)`` before the log-weight; None where there is no cap.
        sink: one extra logit per head (gpt-oss), or for each query; None elsewhere.
        sink_value: the value that the sink has; None for 0.
        output: the model's own result, before the output projection.
        grade: "full": scores are exactly what query, key, scale and log-weight give. "scores": they are not an affine function
            of q·k that is known, so the log-weight holds them whole, query and key are zeros, and statistics that
            need scores apart from log-weights have no meaning.
        weights: the model's own attention weights, of the grade "scores".
        seen: which keys a query can see, where log-weights do not tell: weights may be exactly 0. None elsewhere.
        no_distribution: the weights are negative somewhere, or do not add up to 1: then the log-weight holds the logarithms
            of |w|/Σ|w|, and the output is that of `weights`.
        route: how it was read: through transformers' attention "interface", by the "tap" that follows scores, or told by
            the "ops" of this package.
        moving: the log-weight is computed from the queries or the keys, so that it would change with them.
        repeated: the same queries and keys as in the call before, of the same module: its weights applied to other values,
            or its scores read the other way.
    """

    site: AttentionSite
    module: nn.Module
    query: Float[Tensor, "B H L D"]
    key: Float[Tensor, "B Hk N D"]
    value: Float[Tensor, "B Hk N Dv"]
    log_weight: Tensor | None
    is_causal: bool
    scale: float
    softcap: float | None
    sink: Float[Tensor, " H"] | Float[Tensor, "B_or_1 H L_or_1"] | None
    output: Float[Tensor, "B L H Dv"]
    grade: Literal["full", "scores"] = "full"
    weights: Float[Tensor, "B H L N"] | None = None
    moving: bool = False
    repeated: bool = False
    route: Literal["interface", "tap", "ops"] = "tap"
    sink_value: Float[Tensor, "B_or_1 H L_or_1 Dv"] | None = None
    seen: Bool[Tensor, "B_or_1 H_or_1 L_or_1 N"] | None = None
    no_distribution: bool = False

    @property
    def sink_logits(self) -> Float[Tensor, "B_or_1 H L_or_1"] | None:
        """The sink's logit for each query."""
        return self.sink[None, :, None] if self.sink is not None and self.sink.dim() == 1 else self.sink

    def visible(self) -> Bool[Tensor, "B_or_1 H_or_1 L N"]:
        """Which keys each query can see: what is counted, what fractions refer to, and where a largest score is looked for.

        A key is shut where its log-weight is −∞. It is shut too where its log-weight lies below the row's largest by a gap of
        80 nats or more with no log-weight in it: some models write −100 or −10,000 in their masks. A bias by position
        (ALiBi) falls in steps without such a gap, so all its keys are visible. Scores, weights and log-weights keep the
        model's own numbers.
        """
        length = self.query.shape[2]
        keys = self.key.shape[2]
        if self.seen is not None:
            return self.seen.expand(*self.seen.shape[:2], length, keys)
        if self.is_causal:
            return torch.ones(length, keys, dtype=torch.bool, device=self.query.device).tril()[None, None]
        if self.log_weight is None:
            return torch.ones(1, 1, length, keys, dtype=torch.bool, device=self.query.device)
        if self.log_weight.dtype == torch.bool:
            visible = self.log_weight
        elif self.grade == "scores":  # log-weights that hold the scores too may have such gaps without a mask
            visible = ~self.log_weight.isneginf()
        else:
            visible = self._above_gap
        return visible.expand(*visible.shape[:2], length, keys)

    @cached_property
    def _above_gap(self) -> Bool[Tensor, "B H L N"]:
        assert self.log_weight is not None
        return above_gap(self.log_weight)

    def without_shut(self) -> "AttentionCall":
        """The same call with log-weights of −∞ for all keys that are shut, for what is looked for among visible keys."""
        if self.log_weight is None or self.log_weight.dtype == torch.bool or self.grade == "scores":
            return self
        shut = ~self._above_gap
        if bool((shut == self.log_weight.isneginf()).all()):
            return self
        return replace(self, log_weight=self.log_weight.masked_fill(shut, -torch.inf))

    def rows(self, index: slice | Tensor) -> "AttentionCall":
        """The same call for some items of the batch."""
        return replace(
            self,
            query=self.query[index],
            key=self.key[index],
            value=self.value[index],
            output=self.output[index],
            weights=None if self.weights is None else self.weights[index],
            **self._chosen(0, index),
        )

    def at(self, positions: Int[Tensor, " S"]) -> "AttentionCall":
        """The same call for some of the queries, all keys kept; causality becomes a mask."""
        parts = self._chosen(2, positions)
        if self.is_causal:
            keys = torch.arange(self.key.shape[2], device=self.key.device)
            parts["log_weight"] = (positions[:, None] >= keys)[None, None]
        return replace(
            self,
            query=self.query[:, :, positions],
            output=self.output[:, positions],
            weights=None if self.weights is None else self.weights[:, :, positions],
            is_causal=False,
            **parts,
        )

    def of_heads(self, heads: Int[Tensor, " S"]) -> "AttentionCall":
        """The same call for some of the query heads, each with its key head."""
        key_heads = heads // (self.query.shape[1] // self.key.shape[1])
        parts = self._chosen(1, heads)
        if self.sink is not None and self.sink.dim() == 1:
            parts["sink"] = self.sink[heads]
        return replace(
            self,
            query=self.query[:, heads],
            key=self.key[:, key_heads],
            value=self.value[:, key_heads],
            output=self.output[:, :, heads],
            weights=None if self.weights is None else self.weights[:, heads],
            **parts,
        )

    def _chosen(self, dim: int, index: slice | Tensor) -> dict[str, Any]:
        """What broadcasts, with some entries of one dimension; as it is if it has one entry there, or is once a head."""
        chosen: dict[str, Any] = {}
        for name in _BROADCASTING:
            value = getattr(self, name)
            if value is not None and value.dim() > 1 and value.shape[dim] > 1:
                value = value[(slice(None),) * dim + (index,)]
            chosen[name] = value
        return chosen

    def of_pairs(
        self, items: Int[Tensor, " S"], heads: Int[Tensor, " S"], queries: Int[Tensor, " S"]
    ) -> "AttentionCall":
        """One query of each of some heads, each in an item of the batch, as S heads with a single query and keys of their own.

        It has scores and no more: values and output are empty, since copies of them for each head would be large.
        """
        key_heads = heads // (self.query.shape[1] // self.key.shape[1])
        zeros = torch.zeros_like(heads)

        def of_pair(part: Tensor) -> Tensor:
            """From (B or 1, H or 1, L or 1, …) to (1, S, 1, …)."""
            places = (items, heads, queries)
            # A dimension of size 1 is broadcast.
            indices = [place if size > 1 else zeros for place, size in zip(places, part.shape[:3], strict=True)]
            return part[tuple(indices)][None, :, None]

        parts: dict[str, Any] = {}
        for name in ("weights", "log_weight", "seen", "sink_value"):
            part = getattr(self, name)
            parts[name] = None if part is None else of_pair(part)
        if self.is_causal:
            visible = queries[:, None] >= torch.arange(self.key.shape[2], device=queries.device)
            parts["log_weight"] = visible[None, :, None]
        if self.sink is not None:
            parts["sink"] = self.sink[heads] if self.sink.dim() == 1 else of_pair(self.sink)
        parts["query"] = of_pair(self.query)
        parts["key"] = self.key[items, key_heads][None]
        parts["value"] = self.value.new_empty(1, len(heads), self.value.shape[2], 0)
        parts["output"] = self.output.new_empty(1, 1, len(heads), 0)
        return replace(self, **parts, is_causal=False)


def explicit_attention(
    call: AttentionCall, dtype: torch.dtype = torch.float32
) -> tuple[Float[Tensor, "B H L N"], Float[Tensor, "B H L N"]]:
    """Scores with hidden keys at −inf (log-weights not added), and log-weights, both formed explicitly."""
    scores = _explicit_scores(call, dtype)
    if call.log_weight is not None and call.log_weight.dtype != torch.bool:
        # Not `visible`: a key that a mask of −100 shuts has a weight all the same, if a tiny one.
        weight = call.log_weight.expand_as(scores).to(dtype)
        return scores.masked_fill(weight.isneginf(), -torch.inf), weight
    hidden = ~call.visible()
    weight = torch.zeros_like(scores)
    return scores.masked_fill(hidden, -torch.inf), weight.masked_fill(hidden, -torch.inf)


def _explicit_scores(call: AttentionCall, dtype: torch.dtype) -> Float[Tensor, "B H L N"]:
    """Scores of all keys, hidden ones too."""
    key = call.key.to(dtype)
    heads_per_key = call.query.shape[1] // key.shape[1]
    if heads_per_key > 1:  # it copies in any case
        key = key.repeat_interleave(heads_per_key, 1)
    scores = call.scale * call.query.to(dtype) @ key.mT
    return scores if call.softcap is None else call.softcap * torch.tanh(scores / call.softcap)


def explicit_scores(call: AttentionCall, dtype: torch.dtype = torch.float32) -> Float[Tensor, "B H L N"]:
    """Scores without log-weights, −inf for keys that `AttentionCall.visible` leaves out, formed explicitly."""
    scores = _explicit_scores(call, dtype)
    if call.log_weight is None and call.seen is None and not call.is_causal:
        return scores
    if call.log_weight is not None and call.log_weight.dtype != torch.bool:
        scores = torch.where(call.log_weight.isneginf(), -torch.inf, scores)
    return torch.where(call.visible(), scores, -torch.inf)


def explicit_logits(call: AttentionCall, dtype: torch.dtype = torch.float32) -> Float[Tensor, "B H L N"]:
    """Scores plus log-weights, −inf for hidden keys, formed explicitly; the sum of what `explicit_attention` returns."""
    scores = _explicit_scores(call, dtype)
    if call.log_weight is not None and call.log_weight.dtype != torch.bool:
        return torch.where(call.log_weight.isneginf(), -torch.inf, scores + call.log_weight.to(dtype))
    if call.log_weight is None and call.seen is None and not call.is_causal:
        return scores
    return torch.where(call.visible(), scores, -torch.inf)


def explicit_weights(
    call: AttentionCall, dtype: torch.dtype = torch.float64
) -> tuple[Float[Tensor, "B H L N"], Float[Tensor, "B H L"] | None]:
    """Attention weights on all keys, formed explicitly, and the share of a learned sink; None where there is no sink.

    A query that sees no key has weights of 0. Weights that are no distribution are the model's own.
    """
    if call.no_distribution and call.weights is not None:
        return call.weights.to(dtype), None
    logits = explicit_logits(call, dtype)
    sink = call.sink_logits
    if sink is not None:
        column = sink.to(dtype).unsqueeze(-1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], dim=-1)
    # A softmax over hidden keys alone would be NaN. A logit that is NaN is not hidden, and stays.
    sees_some_key = ~logits.isneginf().all(-1, keepdim=True)
    softmax = torch.softmax(torch.where(sees_some_key, logits, 0.0), dim=-1)
    weights = torch.where(sees_some_key, softmax, 0.0)
    if sink is None:
        return weights, None
    return weights[..., :-1], weights[..., -1]


def above_gap(log_weight: Float[Tensor, "B H L N"]) -> Bool[Tensor, "B H L N"]:
    """Where log-weights are not separated from their row's largest by `GAP` nats or more without a log-weight in it.

    NaN is not separated from anything.
    """
    unseen = log_weight.isneginf()
    finite = torch.where(log_weight.isfinite(), log_weight, torch.inf)
    if bool((finite.amin(-1) > log_weight.amax(-1) - GAP).all()):
        return ~unseen
    # The lowest log-weight that is reached from the row's largest in steps of less than the gap.
    lowest = log_weight.amax(-1, keepdim=True)
    while True:
        near = log_weight > lowest - GAP
        reached = torch.where(near, log_weight, torch.inf).amin(-1, keepdim=True).minimum(lowest)
        if not bool((reached < lowest).any()):
            return ~unseen & ~(log_weight < lowest)
        lowest = reached
