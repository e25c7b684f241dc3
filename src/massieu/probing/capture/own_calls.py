"""The route of this package's own attention: functions of `ops`, and the modules made of them, tell what they were given.

What they tell is in the layout of `ops`, (B, Hk, G, L, D). It becomes an `AttentionCall` under the name of the innermost
module around it that has parameters. Heads of `massieu.nn.Attention` belong to their module, whose projections make the scores.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from massieu.foundation.transforms import in_functorch, may_be_differentiated
from massieu.ops.observed import ObservedAttention, ObservedWeights
from massieu.ops.shapes import AttentionProblem, hidden_by_position
from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.capture import Capture, StopAfterQuery, recomputing
from massieu.probing.capture.follow.fused import mask_log_weight
from massieu.probing.capture.follow.mode import Tap

SUM_TO_ONE = 1e-4
"""How far from 1 the weights of a query may add up to in float32 and be a distribution over its keys."""


@dataclass(eq=False)
class OwnCalls:
    """Hands what `massieu.ops` tells to a capture; a `massieu.foundation.listening.Listener`."""

    capture: Capture
    tap: Tap
    _unreadable: str | None = field(default=None, init=False)

    def listens(self) -> bool:
        """Whether the next call is one of the forward pass that is read, and not of another model beside it."""
        if self.capture.claimed or self.capture.thread != threading.get_ident() or recomputing():
            return False
        return self.tap.is_running or self.capture.projections is not None

    def claiming(self) -> AbstractContextManager[None]:
        """Inside, all is part of one call."""
        return self.capture.claiming()

    @contextmanager
    def refusing(self, reason: str) -> Iterator[None]:
        """Inside, attention cannot be read."""
        before, self._unreadable = self._unreadable, reason
        try:
            yield
        finally:
            self._unreadable = before

    def refuse(self, reason: str) -> None:
        """Name the module that attends."""
        if self.capture.projections is None:
            self.tap.refuse(reason)

    def hear(self, told: ObservedAttention | ObservedWeights) -> Tensor | None:
        """Give a call to the capture's observer, and what takes its output's place back to `ops`."""
        unreadable = self._unreadable
        if unreadable is None and in_functorch():
            unreadable = "it attends inside a transform of torch.func, where tensors have no numbers of their own"
        if unreadable is not None:
            self.refuse(unreadable)
            return None
        if self.capture.projections is not None:
            self.capture.projections.append(_projections(told))
            raise StopAfterQuery
        owner = self.tap.owner()
        call = self._of_weights(told, owner) if isinstance(told, ObservedWeights) else self._of_problem(told, owner)
        replaced = self.capture.observe(call)
        if replaced is None:
            return None
        return replaced.transpose(1, 2).reshape(told.output.shape).to(told.output.dtype)

    def _of_problem(self, told: ObservedAttention, owner: nn.Module) -> AttentionCall:
        problem = told.problem
        sides = problem.query.flatten(1, 2), problem.key
        site, repeated = self.capture.place(owner, *(sides[::-1] if told.exchanged else sides))
        query, scale = _scaled(problem)
        log_weight, is_causal = _log_weight(problem)
        moving = told.moving
        if moving is None:
            terms = problem.log_weight, problem.sink, problem.sink_value
            moving = any(term is not None and self.tap.is_moving(term) for term in terms)
        sink = _of_queries(None if problem.sink is None else problem.sink.unsqueeze(-1), problem)
        assert problem.value is not None
        return AttentionCall(
            site=site,
            module=owner,
            query=query,
            key=problem.key,
            value=problem.value,
            log_weight=log_weight,
            is_causal=is_causal,
            scale=scale,
            softcap=problem.softcap,
            sink=_of_heads(sink),
            sink_value=_of_queries(problem.sink_value, problem),
            output=told.output.flatten(1, 2).transpose(1, 2),
            moving=moving,
            repeated=repeated,
            route="ops",
        )

    def _of_weights(self, told: ObservedWeights, owner: nn.Module) -> AttentionCall:
        site, repeated = self.capture.place(owner, told.query, told.key)
        shares = _shares(told.weights)
        nothing = shares.log_weight.new_zeros(1)
        batch, heads, length, keys = shares.log_weight.shape
        # A query none of whose keys has a weight is as one that sees none.
        seen = ~shares.nowhere.expand(-1, -1, -1, keys) if told.seen is None else told.seen & ~shares.nowhere
        return AttentionCall(
            site=site,
            module=owner,
            query=nothing.expand(batch, heads, length, 1),
            key=nothing.expand(batch, heads, keys, 1),
            value=told.value,
            log_weight=shares.log_weight,
            is_causal=False,
            scale=1.0,
            softcap=None,
            sink=None,
            output=told.output.transpose(1, 2),
            grade="scores",
            weights=told.weights,
            seen=seen,
            no_distribution=shares.no_distribution,
            moving=True,
            repeated=repeated,
            route="ops",
        )


def _projections(told: ObservedAttention | ObservedWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value by head, as a call has them; of an iteration the query with which it began."""
    if isinstance(told, ObservedWeights):
        return told.query, told.key, told.value
    assert told.problem.value is not None
    if told.start is not None:
        return told.start, told.problem.key, told.problem.value
    return _scaled(told.problem)[0], told.problem.key, told.problem.value


def _scaled(problem: AttentionProblem) -> tuple[Float[Tensor, "B H L D"], float]:
    """Queries and a scale that is one number; others, and one that is differentiated, go into the queries."""
    query, scale = problem.query.flatten(1, 2), problem.scale
    if not isinstance(scale, Tensor):
        return query, scale
    first = scale.detach().flatten()[0]
    if bool((scale == first).all()) and not may_be_differentiated(scale):
        return query, float(first)
    # In the query's own dtype, as keys and values are.
    return (problem.query * scale).to(query.dtype).flatten(1, 2), 1.0


def _log_weight(problem: AttentionProblem) -> tuple[Tensor | None, bool]:
    """Log-weights (B or 1, H or 1, L or 1, N) that hold what positions hide; or none, and whether causality is all."""
    length, keys, device = problem.query.shape[3], problem.key.shape[2], problem.query.device
    plain = problem.documents is None and problem.window is None and not problem.offset
    if problem.log_weight is None and plain and length == keys:
        return None, problem.is_causal
    weight = None
    if problem.log_weight is not None:
        weight = problem.log_weight
        one = weight.shape[1] == weight.shape[2] == 1
        heads = problem.query.shape[1:3]
        weight = weight.squeeze(2) if one else weight.expand(-1, *heads, -1, -1).flatten(1, 2)
        weight = mask_log_weight(weight.expand(*weight.shape[:3], keys))
    hidden = _hidden(problem, length, keys, device)
    if hidden is None:
        return weight, False
    if weight is None or weight.dtype == torch.bool:
        return ~hidden if weight is None else weight & ~hidden, False
    return weight.masked_fill(hidden, -torch.inf), False


def _hidden(problem: AttentionProblem, length: int, keys: int, device: torch.device) -> Bool[Tensor, "1 1 L N"] | None:
    """Which keys positions hide, in the row or in its documents."""
    if problem.documents is None:
        hidden = hidden_by_position(problem.band, 0, length, keys, device)
    else:
        seen, behind = problem.documents.seen(device)
        low, high = problem.band or (None, None)
        hidden = ~seen
        hidden = hidden if high is None else hidden | (behind < -high)
        hidden = hidden if low is None else hidden | (behind > -low)
    return None if hidden is None else hidden[None, None]


def _of_queries(value: Tensor | None, problem: AttentionProblem) -> Float[Tensor, "B_or_1 H L_or_1 E"] | None:
    """What is given once, one a head, or one a query, with the heads in one dimension."""
    if value is None:
        return None
    value = value.reshape((1,) * (5 - value.dim()) + tuple(value.shape))
    return value.expand(-1, *problem.query.shape[1:3], -1, -1).flatten(1, 2)


def _of_heads(sink: Float[Tensor, "B_or_1 H L_or_1 1"] | None) -> Tensor | None:
    """One logit a head, where that is all."""
    if sink is None:
        return None
    return sink.flatten() if sink.shape[0] == sink.shape[2] == 1 else sink.squeeze(-1)


class _Shares(NamedTuple):
    """Weights as a distribution over keys: the logarithms of |w|/Σ|w|, where there are none, and whether weights differ."""

    log_weight: Float[Tensor, "B H L N"]
    nowhere: Bool[Tensor, "B H L 1"]
    no_distribution: bool


def _shares(weights: Float[Tensor, "B H L N"]) -> _Shares:
    wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
    size = wide.abs()
    total = size.sum(-1, keepdim=True)
    shares = size / torch.where(total > 0, total, 1.0)
    allowed = max(SUM_TO_ONE, 8 * torch.finfo(weights.dtype).eps)
    off = (wide.sum(-1, keepdim=True) - 1).abs() > allowed
    # NaN is no reason: what breaks down is told as such.
    no_distribution = bool((wide < 0).any() | (off & (total > 0) & total.isfinite()).any())
    return _Shares(shares.log(), total == 0, no_distribution)
