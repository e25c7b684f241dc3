"""Rules: what a head could write in place of its own output, computed from the inputs of its attention.

A rule is called with an `AttentionCall` and returns outputs, (B, L, H, Dv). Masks, causality, caps of scores, learned sinks
and grouped keys are the model's own; a query that sees no key gets 0. All but `Resampled` and `Received` are differentiable.

Rooms that a single rule needs are imported when it is called: a probe that replaces nothing begins without them.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from massieu import ops
from massieu.errors import InputError
from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.replaced.shared import (
    PAIRS,
    Outputs,
    attention_of,
    by_weights,
    narrowed,
    needs_scores,
    needs_values,
    of_query_heads,
    one_query_per_item,
    query_positions,
    real_queries,
    settings_of,
    softmax,
)

Rule = Callable[[AttentionCall], Tensor]


@dataclass(frozen=True)
class Unchanged:
    """The model's own output, bit for bit."""

    name: ClassVar[str] = "identity"

    def __call__(self, call: AttentionCall) -> Outputs:
        return call.output


@dataclass(frozen=True, eq=False)
class Off:
    """0, or each head's mean output over a text.

    Attributes:
        means: the mean outputs of each site's heads (H, Dv), by the site's name; None for 0.
    """

    name: ClassVar[str] = "off"
    means: Mapping[str, Tensor] | None = None

    def __call__(self, call: AttentionCall) -> Outputs:
        if self.means is None:
            return torch.zeros_like(call.output)
        if call.site.name not in self.means:
            raise InputError(f"the mean output of {call.site.name} was not measured")
        mean = self.means[call.site.name].to(call.output)
        return mean.expand_as(call.output)


@dataclass(frozen=True, eq=False)
class Resampled:
    """The mean of the values of n keys, drawn by the attention weights: unbiased, with covariance Cov/n (S19, E5)."""

    name: ClassVar[str] = "resample"
    draws: int
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0), repr=False)

    def __call__(self, call: AttentionCall) -> Outputs:
        needs_values(call)
        if call.softcap is not None or call.sink is not None:
            raise InputError(f"{self.name} does not support soft-capped scores or sinks, and {call.site.name} has one")
        drawn = ops.resample_attention(
            call.query,
            call.key,
            call.value,
            generator=self.generator,
            draws=self.draws,
            scale=call.scale,
            log_weight=call.log_weight,
            is_causal=call.is_causal,
        )
        return drawn.sample.mean(-2).transpose(1, 2)


@dataclass(frozen=True)
class Joint:
    """One softmax over all pairs of a head and a key: each head's output, times H Z_a / Σ_b Z_b (S14, E9).

    The sum of the outputs is H times the exact gradient of the mixture of all heads. It is equal to that of attention where
    all heads have one log Z.
    """

    name: ClassVar[str] = "joint"

    def __call__(self, call: AttentionCall) -> Outputs:
        attention = attention_of(call)
        share = softmax(attention.log_partition.transpose(1, 2)) * call.query.shape[1]  # over heads, (B, L, H)
        return share[..., None] * attention.output.transpose(1, 2)


@dataclass(frozen=True)
class Steps:
    """The value after k − 1 steps of retrieval among the keys, z ← Σ p_n(z) key_n, from the query (B3, B12)."""

    name: ClassVar[str] = "steps"
    steps: int

    def __call__(self, call: AttentionCall) -> Outputs:
        needs_scores(self, call)
        query = call.query
        for _ in range(self.steps - 1):
            query = attention_of(call, query, call.key).output.to(query.dtype)
        return attention_of(call, query).output.transpose(1, 2)


@dataclass
class AtRest:
    """The value at the fixed point of z = (1 − α)·query + α·Σ p_n(z) key_n (B12).

    Attributes:
        lost: for how many queries no fixed point was found, so that the last state was taken; the first call with any warns.
    """

    name: ClassVar[str] = "implicit"
    alpha: float = 0.5
    lost: int = field(default=0, compare=False)

    def __call__(self, call: AttentionCall) -> Outputs:
        from massieu.solve import Status, fixed_point

        needs_scores(self, call)

        def retrieval_step(point: Tensor, query: Tensor, key: Tensor) -> Tensor:
            retrieved = ops.attention(point.to(key.dtype), key, key, **settings_of(call)).output
            return query + self.alpha * (retrieved.to(query.dtype) - query)

        start = call.query.to(torch.promote_types(call.query.dtype, torch.float32))
        # Query and key are arguments, and not closed over, so that implicit gradients reach them.
        solution = fixed_point(
            retrieval_step, start, (start, call.key), item_dims=1, max_steps=1000, rtol=1e-6, throw=False
        )
        lost = int((solution.status != Status.CONVERGED).sum())
        if lost and not self.lost:
            warnings.warn(
                f"{lost:,} of {solution.status.numel():,} fixed points of {call.site.name} were not found, and the last state "
                "was taken; a smaller alpha has one for each query",
                stacklevel=2,
            )
        self.lost += lost
        return attention_of(call, solution.value.to(call.query.dtype)).output.transpose(1, 2)


@dataclass(frozen=True)
class Entmax:
    """Weights entmax_α of the scores with their log-weights; α = 1 is softmax."""

    name: ClassVar[str] = "entmax"
    alpha: float

    def __call__(self, call: AttentionCall) -> Outputs:
        from massieu.energy.entmax import entmax

        return by_weights(call, self, lambda logits: entmax(logits, self.alpha))


@dataclass(frozen=True)
class TopK:
    """Attention on the k keys with the largest weights alone; a learned sink keeps its term."""

    name: ClassVar[str] = "top_k"
    keys: int

    def __call__(self, call: AttentionCall) -> Outputs:
        def weights_of_largest(logits: Tensor) -> Tensor:
            keys = logits.shape[-1] - (call.sink is not None)  # the last column is the sink's
            largest = logits[..., :keys].topk(min(self.keys, keys), dim=-1).indices
            keep = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, largest, True)
            keep[..., keys:] = True
            return softmax(logits.masked_fill(~keep, -torch.inf))

        return by_weights(call, self, weights_of_largest)


@dataclass(frozen=True)
class Window:
    """Attention on keys fewer than w tokens away."""

    name: ClassVar[str] = "window"
    tokens: int

    def __call__(self, call: AttentionCall) -> Outputs:
        positions = query_positions(call)
        if positions is None:
            raise InputError(
                f"{self.name} needs self-attention, and it is not known which of the {call.key.shape[2]} keys of "
                f"{call.site.name} belong to its {call.query.shape[2]} queries"
            )
        near = (positions[:, None] - torch.arange(call.key.shape[2], device=positions.device)).abs() < self.tokens
        return attention_of(call, keep=near).output.transpose(1, 2)


@dataclass(frozen=True)
class Scaled:
    """Attention at c times its inverse temperature.

    Terms of the scores that are computed from queries or keys, such as relative positions in DeBERTa and XLNet, are multiplied
    too. Masks, and biases that depend on positions alone, are not, if they are known separately.
    """

    name: ClassVar[str] = "scale"
    factor: float

    def __call__(self, call: AttentionCall) -> Outputs:
        if (call.grade == "scores" or call.moving) and call.log_weight is not None:
            hidden = call.log_weight == -torch.inf
            call = replace(call, log_weight=(call.log_weight * self.factor).masked_fill(hidden, -torch.inf))
        if call.softcap is not None:  # inside the cap, the scores would change in another way
            return by_weights(call, self, None, factor=self.factor)
        return attention_of(call, scale=call.scale * self.factor).output.transpose(1, 2)


@dataclass(frozen=True)
class ConditionalMean:
    """The conditional mean of a value given its key, by kernel ridge regression on the visible tokens (Z4, E19).

    The kernel is attention's own, exp(scale·a·b), of keys about the mean of the visible ones. Where queries see different
    keys, as in causal attention, each query has a linear system of its own: time N³ for each query and head.
    """

    name: ClassVar[str] = "conditional_mean"
    ridge: float = 1.0

    def __call__(self, call: AttentionCall) -> Outputs:
        needs_scores(self, call)
        needs_values(call)
        if call.softcap is not None or call.sink is not None:
            raise InputError(f"{self.name} does not support soft-capped scores or sinks, and {call.site.name} has one")
        log_weight = call.log_weight
        same_keys = log_weight is None or bool((log_weight == log_weight[:, :, :1]).all())
        if same_keys and not call.is_causal:
            return self._with_shared_keys(call)
        batch, heads, length = call.query.shape[:3]
        queries_per_piece = max(1, PAIRS // max(batch * heads * call.key.shape[2] ** 2, 1))
        outputs = []
        for places in torch.arange(length, device=call.query.device).split(queries_per_piece):
            output = self._with_shared_keys(one_query_per_item(call.at(places)))
            outputs.append(output.reshape(batch, len(places), heads, -1))
        return torch.cat(outputs, 1)

    def _with_shared_keys(self, call: AttentionCall) -> Outputs:
        """The output where all queries of an item see the same keys."""
        from massieu.regression import ExponentialKernel, conditional_mean_attention

        query = call.query.double()
        key = call.key.double()
        value = call.value.double()
        log_weight = None if call.log_weight is None else call.log_weight[:, :, :1]
        if log_weight is not None and log_weight.shape[1] not in (1, key.shape[1]):  # query heads see different keys
            key = of_query_heads(key, call)
            value = of_query_heads(value, call)
        visible = call.visible()[:, :, :1].mT
        key = torch.where(visible, key, 0.0)
        # The mean of the keys, which a softmax does not see, would be most of the kernel.
        mean = key.sum(2, keepdim=True) / visible.sum(2, keepdim=True).clamp_min(1)
        kernel = ExponentialKernel.create(call.scale)
        result = conditional_mean_attention(
            query, torch.where(visible, key - mean, 0.0), value, kernel=kernel, ridge=self.ridge, log_weight=log_weight
        )
        return result.output.transpose(1, 2).to(call.output.dtype)


@dataclass(frozen=True)
class Received:
    """Attention on keys whose mean weight, over the queries that see them, is at least a share of the mean key's.

    A query keeps its own key, if it has one; padding does not count as a query. The weight that a key receives includes later
    queries, which a cache that drops keys by their past attention cannot know.
    """

    name: ClassVar[str] = "received_at_least"
    share: float

    def __call__(self, call: AttentionCall) -> Outputs:
        with torch.no_grad():
            positions = query_positions(call)
            visible = call.visible()
            real = real_queries(visible, positions)
            settings = settings_of(call)
            if real is not None:
                visible = visible & real
                settings |= {"log_weight": narrowed(call, real), "is_causal": False}
            received = ops.attention_received(call.query, call.key, **settings).total
            seeing_queries = visible.sum(2).clamp_min(1)
            # What a key would receive if every query attended to its visible keys uniformly.
            uniform = (visible / visible.sum(-1, keepdim=True).clamp_min(1)).sum(2)
            keep = (received / seeing_queries >= self.share * uniform / seeing_queries)[:, :, None]
            if positions is not None:
                keep = keep | (positions[:, None] == torch.arange(call.key.shape[2], device=keep.device))
        return attention_of(call, keep=keep).output.transpose(1, 2)


# --- Names of rules ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _NumberRule:
    """A rule with one number, written as ``name(number)``.

    Attributes:
        number_type: int or float.
        least: the smallest number.
        meaning: of the number, for an error message.
        default: None if the number must be given.
        below: the number must be smaller than this.
    """

    create: Any
    number_type: type
    least: float
    meaning: str
    default: float | None = None
    below: float = math.inf


_NUMBER_RULES = {
    "resample": _NumberRule(Resampled, int, 1, "a number of draws"),
    "steps": _NumberRule(Steps, int, 1, "a number of steps"),
    "entmax": _NumberRule(Entmax, float, 1, "an exponent"),
    "top_k": _NumberRule(TopK, int, 1, "a number of keys"),
    "window": _NumberRule(Window, int, 1, "a number of tokens"),
    "scale": _NumberRule(Scaled, float, 0, "a factor"),
    "received_at_least": _NumberRule(Received, float, 0, "a share"),
    "conditional_mean": _NumberRule(ConditionalMean, float, 0, "a ridge", default=1.0),
    "implicit": _NumberRule(AtRest, float, 0, "a pull", default=0.5, below=1),
}
_RULES_WITHOUT_NUMBER = {"identity": Unchanged, "off": Off, "joint": Joint}
MEAN = "off(mean)"
"""The rule `Off` with means, which a probe measures first."""


def parse(text: str) -> Rule:
    """The rule with a name such as ``"top_k(8)"``; not `MEAN`, which needs means.

    Raises:
        InputError: there is no such rule, or its number is missing or out of its range.
    """
    name, bracket, rest = text.strip().partition("(")
    if not bracket and name in _RULES_WITHOUT_NUMBER:
        return _RULES_WITHOUT_NUMBER[name]()
    if name not in _NUMBER_RULES or (bracket and not rest.endswith(")")):
        names = [*_RULES_WITHOUT_NUMBER, MEAN, *(f"{name}(…)" for name in _NUMBER_RULES)]
        raise InputError(f"unknown rule {text!r}; known are {', '.join(names)}")
    rule = _NUMBER_RULES[name]
    argument = rest[:-1].strip()
    if not argument and rule.default is not None:
        return rule.create(rule.default)
    try:
        number = rule.number_type(argument)
    except ValueError:
        number = math.nan  # fails the comparison below
    if not rule.least <= number < rule.below:
        below = "" if rule.below == math.inf else f" and below {rule.below}"
        raise InputError(f"{name} needs {rule.meaning}, at least {rule.least}{below}, got {argument or 'nothing'}")
    return rule.create(number)


def rule_of(rule: Any) -> Rule:
    """A rule, from its name or from a function.

    Raises:
        InputError: as `parse`; `MEAN`, which needs means of a text; or something else than a name or a function.
    """
    if isinstance(rule, str):
        if rule.strip() == MEAN:
            raise InputError(f"{MEAN} needs each head's mean output over a text: massieu.probe(…, replace={MEAN!r})")
        return parse(rule)
    if not callable(rule):
        raise InputError(f"a rule must be a text or a function of an attention call, got {type(rule).__name__}")
    return cast(Rule, rule)
