"""Rules: what a head could write in place of its own output, computed from what its attention was given.

A rule is called with an `AttentionCall` and returns outputs, (B, L, H, Dv). Masks, causality, caps of scores, learned sinks
and grouped keys are the model's own; a query that sees no key gets 0. All but `Resampled` and `Received` are differentiable.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from massieu import ops
from massieu.energy.entmax import entmax
from massieu.errors import InputError
from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.replaced.shared import (
    PAIRS,
    Outputs,
    apart,
    attention_of,
    by_weights,
    narrowed,
    needs_scores,
    needs_values,
    own_places,
    real_queries,
    repeated,
    settings_of,
    softmax,
)
from massieu.regression import ExponentialKernel, conditional_mean_attention
from massieu.solve import Status, fixed_point

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
        means: of each site, by its name (H, Dv); None is 0.
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
        how = {"scale": call.scale, "log_weight": call.log_weight, "is_causal": call.is_causal}
        drawn = ops.resample_attention(
            call.query, call.key, call.value, generator=self.generator, draws=self.draws, **how
        )
        return drawn.sample.mean(-2).transpose(1, 2)


@dataclass(frozen=True)
class Joint:
    """One softmax over all pairs of a head and a key: heads share by their evidence Z, times their number (S14, E9).

    Σ_a of the outputs is H times the exact gradient of the mixture of all heads, equal to that of attention where all
    heads have one log Z.
    """

    name: ClassVar[str] = "joint"

    def __call__(self, call: AttentionCall) -> Outputs:
        found = attention_of(call)
        share = softmax(found.log_partition.transpose(1, 2)) * call.query.shape[1]
        return share[..., None] * found.output.transpose(1, 2)


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
        lost: for how many queries none was found, so that the last state was taken; the first time a warning says so.
    """

    name: ClassVar[str] = "implicit"
    alpha: float = 0.5
    lost: int = field(default=0, compare=False)

    def __call__(self, call: AttentionCall) -> Outputs:
        needs_scores(self, call)

        def pulled(point: Tensor, query: Tensor, key: Tensor) -> Tensor:
            retrieved = ops.attention(point.to(key.dtype), key, key, **settings_of(call)).output
            return query + self.alpha * (retrieved.to(query.dtype) - query)

        start = call.query.to(torch.promote_types(call.query.dtype, torch.float32))
        found = fixed_point(pulled, start, (start, call.key), item_dims=1, max_steps=1000, rtol=1e-6, throw=False)
        lost = int((found.status != Status.CONVERGED).sum())
        if lost and not self.lost:
            warnings.warn(
                f"{lost:,} of {found.status.numel():,} fixed points of {call.site.name} were not found, and the last state was "
                "taken; a smaller alpha has one for each query",
                stacklevel=2,
            )
        self.lost += lost
        return attention_of(call, found.value.to(call.query.dtype)).output.transpose(1, 2)


@dataclass(frozen=True)
class Entmax:
    """Weights entmax_α of the scores with their log-weights; α = 1 is softmax."""

    name: ClassVar[str] = "entmax"
    alpha: float

    def __call__(self, call: AttentionCall) -> Outputs:
        return by_weights(call, self, lambda logits: entmax(logits, self.alpha))


@dataclass(frozen=True)
class TopK:
    """Attention on the k keys with the largest weights alone; a learned sink keeps its term."""

    name: ClassVar[str] = "top_k"
    keys: int

    def __call__(self, call: AttentionCall) -> Outputs:
        def kept(logits: Tensor) -> Tensor:
            keys = logits.shape[-1] - (call.sink is not None)
            found = logits[..., :keys].topk(min(self.keys, keys), dim=-1).indices
            keep = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, found, True)
            keep[..., keys:] = True
            return softmax(logits.masked_fill(~keep, -torch.inf))

        return by_weights(call, self, kept)


@dataclass(frozen=True)
class Window:
    """Attention on keys fewer than w tokens away."""

    name: ClassVar[str] = "window"
    tokens: int

    def __call__(self, call: AttentionCall) -> Outputs:
        places = own_places(call)
        if places is None:
            raise InputError(
                f"{self.name} needs self-attention, and it is not known which of the {call.key.shape[2]} keys of "
                f"{call.site.name} belong to its {call.query.shape[2]} queries"
            )
        near = (places[:, None] - torch.arange(call.key.shape[2], device=places.device)).abs() < self.tokens
        return attention_of(call, keep=near).output.transpose(1, 2)


@dataclass(frozen=True)
class Scaled:
    """Attention at c times its inverse temperature.

    Terms of the scores that are computed from queries or keys, as of relative positions in DeBERTa and XLNet, are multiplied
    with their product; masks and biases of positions alone are not, where they are known apart.
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

    The kernel is exp(scale·a·b), attention's own, of keys about the mean of those that the query sees. Where queries see
    different keys, as they do in causal attention, each has a system of its own: time N³ a query and a head.
    """

    name: ClassVar[str] = "conditional_mean"
    ridge: float = 1.0

    def __call__(self, call: AttentionCall) -> Outputs:
        needs_scores(self, call)
        needs_values(call)
        if call.softcap is not None or call.sink is not None:
            raise InputError(f"{self.name} does not support soft-capped scores or sinks, and {call.site.name} has one")
        weight = call.log_weight
        shared = weight is None or bool((weight == weight[:, :, :1]).all())
        if shared and not call.is_causal:
            return self._of_seen(call)
        batch, heads, length = call.query.shape[:3]
        at_once = max(1, PAIRS // max(batch * heads * call.key.shape[2] ** 2, 1))
        places = torch.arange(length, device=call.query.device)
        return torch.cat([self._of_seen(apart(call.at(each))).reshape(batch, len(each), heads, -1)
                          for each in places.split(at_once)], 1)  # fmt: skip

    def _of_seen(self, call: AttentionCall) -> Outputs:
        """Where all queries of an item see the same keys."""
        query, key, value = (each.double() for each in (call.query, call.key, call.value))
        weight = None if call.log_weight is None else call.log_weight[:, :, :1]
        if weight is not None and weight.shape[1] not in (1, key.shape[1]):
            key, value = repeated(key, call), repeated(value, call)
        seen = call.visible()[:, :, :1].mT
        key = torch.where(seen, key, 0.0)
        # The mean of the keys, which a softmax does not see, would be most of the kernel.
        mean = key.sum(2, keepdim=True) / seen.sum(2, keepdim=True).clamp_min(1)
        kernel = ExponentialKernel.create(call.scale)
        found = conditional_mean_attention(
            query, torch.where(seen, key - mean, 0.0), value, kernel=kernel, ridge=self.ridge, log_weight=weight
        )
        return found.output.transpose(1, 2).to(call.output.dtype)


@dataclass(frozen=True)
class Received:
    """Attention on keys whose mean weight, over the queries that see them, is at least a share of the mean key's.

    A query keeps its own key, where it has one; padding is no query. What a key receives is known from the whole text, later
    queries too, as caches that drop keys by their past attention do not know it.
    """

    name: ClassVar[str] = "received_at_least"
    share: float

    def __call__(self, call: AttentionCall) -> Outputs:
        with torch.no_grad():
            places, visible = own_places(call), call.visible()
            real = real_queries(visible, places)
            settings = settings_of(call)
            if real is not None:
                visible = visible & real
                settings |= {"log_weight": narrowed(call, real), "is_causal": False}
            total = ops.attention_received(call.query, call.key, **settings).total
            seen = visible.sum(2).clamp_min(1)  # by how many queries
            fair = (visible / visible.sum(-1, keepdim=True).clamp_min(1)).sum(2)  # what a key gets of uniform attention
            keep = (total / seen >= self.share * fair / seen)[:, :, None]
            if places is not None:
                keep = keep | (places[:, None] == torch.arange(call.key.shape[2], device=keep.device))
        return attention_of(call, keep=keep).output.transpose(1, 2)


# --- as text -------------------------------------------------------------------------------------------------------------

_NUMBERS: dict[str, tuple[Any, type, float, float | None, str]] = {
    "resample": (Resampled, int, 1, None, "a number of draws"),
    "steps": (Steps, int, 1, None, "a number of steps"),
    "entmax": (Entmax, float, 1, None, "an exponent"),
    "top_k": (TopK, int, 1, None, "a number of keys"),
    "window": (Window, int, 1, None, "a number of tokens"),
    "scale": (Scaled, float, 0, None, "a factor"),
    "received_at_least": (Received, float, 0, None, "a share"),
    "conditional_mean": (ConditionalMean, float, 0, 1.0, "a ridge"),
    "implicit": (AtRest, float, 0, 0.5, "a pull"),
}
"""Rules of one number: its type, the least that it may be, its default, and what it is."""
_PLAIN = {"identity": Unchanged, "off": Off, "joint": Joint}
MEAN = "off(mean)"


def parse(text: str) -> Rule:
    """The rule that a text such as ``"top_k(8)"`` stands for; `MEAN` needs means, and is none of them.

    Raises:
        InputError: there is no such rule, or its number is missing or out of its range.
    """
    name, bracket, rest = text.strip().partition("(")
    if not bracket and name in _PLAIN:
        return _PLAIN[name]()
    if name not in _NUMBERS or (bracket and not rest.endswith(")")):
        raise InputError(
            f"unknown rule {text!r}; known are {', '.join([*_PLAIN, MEAN, *(f'{n}(…)' for n in _NUMBERS)])}"
        )
    made, kind, least, default, what = _NUMBERS[name]
    given, most = rest[:-1].strip(), 1 if name == "implicit" else math.inf
    if not given and default is not None:
        return made(default)
    try:
        number = kind(given)
    except ValueError:
        number = math.nan
    if not least <= number < most:
        below = "" if most == math.inf else f" and below {most}"
        raise InputError(f"{name} needs {what}, at least {least}{below}, got {given or 'nothing'}")
    return made(number)


def made_of(rule: Any) -> Rule:
    """A rule, from its text where it is one.

    Raises:
        InputError: as `parse`; a rule that needs a text to be measured on, or is no function.
    """
    if isinstance(rule, str):
        if rule.strip() == MEAN:
            raise InputError(f"{MEAN} needs each head's mean output over a text: massieu.probe(…, replace={MEAN!r})")
        return parse(rule)
    if not callable(rule):
        raise InputError(f"a rule must be a text or a function of an attention call, got {type(rule).__name__}")
    made: Any = rule
    return made
