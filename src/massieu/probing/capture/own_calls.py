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
from massieu.probing.capture.follow.mode import ScoreFollower

SUM_TO_ONE = 1e-4
"""How far from 1 the weights of a query may add up to in float32 and be a distribution over its keys."""


@dataclass(eq=False)
class OwnCalls:
    """Hands what `massieu.ops` tells to a capture; a `massieu.foundation.listening.Listener`."""

    capture: Capture
    follower: ScoreFollower
    _unreadable: str | None = field(default=None, init=False)

    def listens(self) -> bool:
        """Whether the next call is one of the forward pass that is read, and not of another model beside it."""
        if self.capture.claimed or self.capture.thread != threading.get_ident() or recomputing():
            return False
        return self.follower.is_running or self.capture.projections is not None

    def claiming(self) -> AbstractContextManager[None]:
        """Inside, all is part of one call."""
        return self.capture.claiming()

    @contextmanager
    def refusing(self, reason: str) -> Iterator[None]:
        """Inside, attention cannot be read."""
        outer = self._unreadable
        self._unreadable = reason
        try:
            yield
        finally:
            self._unreadable = outer

    def refuse(self, reason: str) -> None:
        """Name the module that attends."""
        if self.capture.projections is None:
            self.follower.refuse(reason)

    def hear(self, observed: ObservedAttention | ObservedWeights) -> Tensor | None:
        """Give a call to the capture's observer, and what takes its output's place back to `ops`."""
        reason = self._unreadable
        if reason is None and in_functorch():
            reason = "it attends inside a transform of torch.func, where tensors have no numbers of their own"
        if reason is not None:
            self.refuse(reason)
            return None
        if self.capture.projections is not None:
            self.capture.projections.append(_projections(observed))
            raise StopAfterQuery
        owner = self.follower.owner()
        if isinstance(observed, ObservedWeights):
            call = self._of_weights(observed, owner)
        else:
            call = self._of_problem(observed, owner)
        replacement = self.capture.observe(call)
        if replacement is None:
            return None
        return replacement.transpose(1, 2).reshape(observed.output.shape).to(observed.output.dtype)

    def _of_problem(self, observed: ObservedAttention, owner: nn.Module) -> AttentionCall:
        problem = observed.problem
        assert problem.value is not None
        queries = problem.query.flatten(1, 2)
        if observed.exchanged:
            site, repeated = self.capture.next_site(owner, problem.key, queries)
        else:
            site, repeated = self.capture.next_site(owner, queries, problem.key)
        query, scale = _scaled(problem)
        log_weight, is_causal = _log_weight(problem)
        sink = None
        if problem.sink is not None:
            sink = _by_query(problem.sink.unsqueeze(-1), problem)
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
            sink=_by_head(sink),
            sink_value=_by_query(problem.sink_value, problem),
            output=observed.output.flatten(1, 2).transpose(1, 2),
            moving=self._is_moving(observed),
            repeated=repeated,
            route="ops",
        )

    def _is_moving(self, observed: ObservedAttention) -> bool:
        """Whether what is added to the scores was computed from activations, where the caller does not say."""
        if observed.moving is not None:
            return observed.moving
        terms = observed.problem.log_weight, observed.problem.sink, observed.problem.sink_value
        return any(term is not None and self.follower.is_moving(term) for term in terms)

    def _of_weights(self, observed: ObservedWeights, owner: nn.Module) -> AttentionCall:
        site, repeated = self.capture.next_site(owner, observed.query, observed.key)
        shares = _shares(observed.weights)
        batch, heads, length, keys = shares.log_weight.shape
        # Scores are the log-weights alone: a query and a key of zeros add nothing to them.
        nothing = shares.log_weight.new_zeros(1)
        # A query none of whose keys has a weight is as one that sees none.
        if observed.seen is None:
            seen = ~shares.is_empty.expand(-1, -1, -1, keys)
        else:
            seen = observed.seen & ~shares.is_empty
        return AttentionCall(
            site=site,
            module=owner,
            query=nothing.expand(batch, heads, length, 1),
            key=nothing.expand(batch, heads, keys, 1),
            value=observed.value,
            log_weight=shares.log_weight,
            is_causal=False,
            scale=1.0,
            softcap=None,
            sink=None,
            output=observed.output.transpose(1, 2),
            grade="scores",
            weights=observed.weights,
            seen=seen,
            no_distribution=shares.no_distribution,
            moving=True,
            repeated=repeated,
            route="ops",
        )


def _projections(observed: ObservedAttention | ObservedWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value by head, as a call has them; of an iteration the query with which it began."""
    if isinstance(observed, ObservedWeights):
        return observed.query, observed.key, observed.value
    problem = observed.problem
    assert problem.value is not None
    query = _scaled(problem)[0] if observed.start is None else observed.start
    return query, problem.key, problem.value


def _scaled(problem: AttentionProblem) -> tuple[Float[Tensor, "B H L D"], float]:
    """Queries and a scale that is one number; other scales, and one that is differentiated, go into the queries."""
    query = problem.query.flatten(1, 2)
    scale = problem.scale
    if not isinstance(scale, Tensor):
        return query, scale
    first = scale.detach().flatten()[0]
    if bool((scale == first).all()) and not may_be_differentiated(scale):
        return query, float(first)
    # In the query's own dtype, as keys and values are.
    return (problem.query * scale).to(query.dtype).flatten(1, 2), 1.0


def _log_weight(problem: AttentionProblem) -> tuple[Tensor | None, bool]:
    """Log-weights (B or 1, H or 1, L or 1, N) that hold what positions hide; or None, and whether causality is all."""
    length = problem.query.shape[3]
    keys = problem.key.shape[2]
    hides_no_more = problem.documents is None and problem.window is None and not problem.offset
    if problem.log_weight is None and hides_no_more and length == keys:
        return None, problem.is_causal
    weight = None if problem.log_weight is None else _given_log_weight(problem.log_weight, problem)
    hidden = _hidden(problem, length, keys, problem.query.device)
    if hidden is None:
        return weight, False
    if weight is None:
        return ~hidden, False
    if weight.dtype == torch.bool:
        return weight & ~hidden, False
    return weight.masked_fill(hidden, -torch.inf), False


def _given_log_weight(weight: Tensor, problem: AttentionProblem) -> Tensor:
    """A log-weight (B or 1, Hk or 1, G or 1, L or 1, N or 1) of a problem, with the heads in one dimension."""
    if weight.shape[1] == weight.shape[2] == 1:
        by_head = weight.squeeze(2)
    else:
        by_head = weight.expand(-1, *problem.query.shape[1:3], -1, -1).flatten(1, 2)
    return mask_log_weight(by_head.expand(*by_head.shape[:3], problem.key.shape[2]))


def _hidden(problem: AttentionProblem, length: int, keys: int, device: torch.device) -> Bool[Tensor, "1 1 L N"] | None:
    """Which keys positions hide, in the row or in its documents."""
    if problem.documents is None:
        hidden = hidden_by_position(problem.band, 0, length, keys, device)
        return None if hidden is None else hidden[None, None]
    in_document, distance_back = problem.documents.seen(device)
    low, high = problem.band or (None, None)
    hidden = ~in_document
    if high is not None:
        hidden = hidden | (distance_back < -high)
    if low is not None:
        hidden = hidden | (distance_back > -low)
    return hidden[None, None]


def _by_query(value: Tensor | None, problem: AttentionProblem) -> Float[Tensor, "B_or_1 H L_or_1 E"] | None:
    """What there is once, once a head, or once a query, with the heads in one dimension."""
    if value is None:
        return None
    value = value.reshape((1,) * (5 - value.dim()) + tuple(value.shape))
    return value.expand(-1, *problem.query.shape[1:3], -1, -1).flatten(1, 2)


def _by_head(sink: Float[Tensor, "B_or_1 H L_or_1 1"] | None) -> Tensor | None:
    """One logit a head, (H,), where that is all; else one for each query."""
    if sink is None:
        return None
    if sink.shape[0] == sink.shape[2] == 1:
        return sink.flatten()
    return sink.squeeze(-1)


class _Shares(NamedTuple):
    """Weights as a distribution over keys.

    Attributes:
        log_weight: the logarithms of |w|/Σ|w|.
        is_empty: all weights of the query are 0.
        no_distribution: the weights themselves are none.
    """

    log_weight: Float[Tensor, "B H L N"]
    is_empty: Bool[Tensor, "B H L 1"]
    no_distribution: bool


def _shares(weights: Float[Tensor, "B H L N"]) -> _Shares:
    wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
    sizes = wide.abs()
    total = sizes.sum(-1, keepdim=True)
    shares = sizes / torch.where(total > 0, total, 1.0)
    allowed = max(SUM_TO_ONE, 8 * torch.finfo(weights.dtype).eps)
    is_off = (wide.sum(-1, keepdim=True) - 1).abs() > allowed
    # NaN is no reason: what breaks down is told as such.
    no_distribution = bool((wide < 0).any() | (is_off & (total > 0) & total.isfinite()).any())
    return _Shares(shares.log(), total == 0, no_distribution)
