"""Moments of attention's weights: what each query's attention looks like, in one pass over the scores."""

from collections.abc import Collection
from functools import partial
from typing import Generic, Literal, NamedTuple, TypeVar, overload

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.foundation.arguments import choice, described
from massieu.foundation.listening import in_one_call, listeners
from massieu.foundation.transforms import in_autocast_dtype
from massieu.ops import backends, band, moment_blocks, packed, reference, tiles
from massieu.ops import sink as with_sink
from massieu.ops.cuda.triton_moments import TritonMoments
from massieu.ops.documents import Documents
from massieu.ops.observed import ObservedAttention, tell
from massieu.ops.shapes import AttentionProblem, Scale, Sink, Window, check_problem

MomentsBackend = Literal["auto", "reference", "triton", "blocks"]

Moment = TypeVar("Moment", Float[Tensor, "*query"], Float[Tensor, "*query"] | None)


class MomentsResult(NamedTuple, Generic[Moment]):
    """What `attention_moments` returns: a number a query each, float32 (float64 for float64), nats.

    All are tensors, or, where `moments` names some, those that it leaves out are None.

    p are the attention weights, s the scores (scaled and soft-capped, without log-weight), h the base measure: the
    weights w = exp(log_weight) normalised over the keys a query sees. A query that sees no key has −inf for both
    log-partitions and the largest score, 0 for everything else.
    """

    output: Float[Tensor, "*query E"] | None
    """Σ p_n value_n in the query's dtype; None without values."""
    log_partition: Moment
    """log Σ w_n exp(s_n)."""
    entropy: Moment
    """−Σ p_n log p_n."""
    mean_score: Moment
    """Σ p_n s_n."""
    score_variance: Moment
    """Variance of s under p: the second cumulant, d² log Z(βs)/dβ² at β = 1."""
    max_weight: Moment
    """max p_n."""
    collision: Moment
    """Σ p_n², whose inverse is the effective sample size."""
    prior_log_partition: Moment
    """log Σ w_n: log n for n visible keys of weight one."""
    prior_mean_score: Moment
    """Σ h_n s_n. log_partition − prior_log_partition − prior_mean_score = KL(h‖p) ≥ 0 (S25)."""
    prior_score_variance: Moment
    """Variance of s under h."""
    max_score: Moment
    """Largest s of a visible key."""
    max_position: Moment
    """Which key has it, int64: the first of several; −1 if there is none, or `max_score` is not finite. A sink is no key."""


@overload
def attention_moments(
    query: Float[Tensor, "*query D"],
    key: Float[Tensor, "*batch Hk N D"],
    value: Float[Tensor, "*batch Hk N E"] | None = None,
    *,
    log_weight: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
    scale: Scale = None,
    is_causal: bool = False,
    window: Window = None,
    query_offset: int = 0,
    documents: Documents | None = None,
    softcap: float | None = None,
    sink: Sink = None,
    sink_value: Float[Tensor, "... E"] | None = None,
    moments: None = None,
    backend: MomentsBackend = "auto",
) -> MomentsResult[Tensor]: ...
@overload
def attention_moments(
    query: Float[Tensor, "*query D"],
    key: Float[Tensor, "*batch Hk N D"],
    value: Float[Tensor, "*batch Hk N E"] | None = None,
    *,
    log_weight: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
    scale: Scale = None,
    is_causal: bool = False,
    window: Window = None,
    query_offset: int = 0,
    documents: Documents | None = None,
    softcap: float | None = None,
    sink: Sink = None,
    sink_value: Float[Tensor, "... E"] | None = None,
    moments: Collection[str],
    backend: MomentsBackend = "auto",
) -> MomentsResult[Tensor | None]: ...
def attention_moments(
    query: Float[Tensor, "*query D"],
    key: Float[Tensor, "*batch Hk N D"],
    value: Float[Tensor, "*batch Hk N E"] | None = None,
    *,
    log_weight: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
    scale: Scale = None,
    is_causal: bool = False,
    window: Window = None,
    query_offset: int = 0,
    documents: Documents | None = None,
    softcap: float | None = None,
    sink: Sink = None,
    sink_value: Float[Tensor, "... E"] | None = None,
    moments: Collection[str] | None = None,
    backend: MomentsBackend = "auto",
) -> MomentsResult[Tensor] | MomentsResult[Tensor | None]:
    """Log-partition, entropy and moments of the scores of every query, in memory linear in queries and keys.

    Without gradient (under `torch.no_grad`, or no argument requires it) on the CPU this costs about as much as fused
    attention, and less where fewer moments are asked for. On CUDA the same tiles are larger, and cost many times as much
    as fused attention; "triton" costs about twice as much. Where a gradient, forward mode or a `torch.func` transform is
    wanted, and on other devices, the reference computes it, differentiable any number of times.

    Args:
        query, key, value, log_weight, scale, is_causal, window, query_offset, documents, softcap, sink, sink_value: as in
            `massieu.ops.attention`; all moments but `max_position` are those with the sink as one more key, of score 0.
        moments: which to compute, by the names of `MomentsResult`: ``{"entropy", "max_score"}``. The others are None. All by
            default; the output is there if there are values.
        backend: `moments_backend` says what "auto" takes.

            - "reference": plain operations in blocks of queries;
            - "blocks": tiles that stay in cache, without gradient;
            - "triton": one pass over the keys on CUDA, compiled in about 2 s once. Weights are rounded to the values' dtype
              for the output, as fused attention does. Of log-weights booleans alone.

    Numbers agree between backends to rounding: in float32 the score's variance has an absolute error of about
    1e-6·(variance + log² n), the others about 1e-6 times the scores' spread over a query's keys.

    Raises:
        TypeError: as `massieu.ops.attention`; also moments that are no collection of names.
        ValueError: as there; also an unknown moment or none, and a backend that cannot do this.

    Example:
        >>> import torch
        >>> from massieu import ops
        >>> found = ops.attention_moments(torch.zeros(1, 1, 1, 2), torch.randn(1, 1, 4, 2))  # equal weights
        >>> round(found.entropy.exp().item(), 3), round(found.collision.item(), 3)
        (4.0, 0.25)
    """
    query, key, value = in_autocast_dtype(query, key, value)
    problem = check_problem(
        query, key, value, log_weight, scale, is_causal, window, softcap, sink, sink_value, query_offset, documents
    )
    choice("backend", backend, "auto", *BACKENDS)
    wanted = _checked(moments)
    names = wanted if problem.sink is None else _with_needed(wanted)
    chosen = backends.choose(backend, _registry(names), problem)
    labels = names if value is None else (*names, "output")

    def computed() -> dict[str, Tensor]:
        found = dict(zip(labels, _in_parts(chosen.forward, names, problem, chosen.bands), strict=True))
        return found if problem.sink is None else with_sink.moments(found, problem)

    told = () if value is None else listeners()
    found = in_one_call(told, computed)
    if told:
        found["output"] = tell(told, ObservedAttention(problem, found["output"].to(query.dtype)))
    restored = {name: problem.restore(found[name]) for name in wanted}
    output = None if value is None else problem.restore(found["output"]).to(query.dtype)
    return MomentsResult(output, *(restored.get(name) for name in NAMES))


NAMES = MomentsResult._fields[1:]


def _checked(moments: Collection[str] | None) -> tuple[str, ...]:
    """Names in the order of `MomentsResult`."""
    if moments is None:
        return NAMES
    if (
        isinstance(moments, str | Tensor)
        or not isinstance(moments, Collection)
        or not all(isinstance(one, str) for one in moments)
    ):
        raise TypeError(f"moments must be a collection of names, got {described(moments)}")
    unknown = sorted(set(moments).difference(NAMES))
    if unknown or not moments:
        given = ", ".join(map(repr, unknown)) or "none"
        raise ValueError(f"moments must be some of {', '.join(NAMES)}; got {given}")
    return tuple(name for name in NAMES if name in moments)


def _with_needed(wanted: tuple[str, ...]) -> tuple[str, ...]:
    """And the moments that these follow from where there is a sink."""
    needed = {"log_partition", *wanted, *(more for name in wanted for more in with_sink.NEEDED.get(name, ()))}
    return tuple(name for name in NAMES if name in needed)


def _in_parts(
    forward: band.Function, names: tuple[str, ...], problem: AttentionProblem, bands: bool
) -> tuple[Tensor, ...]:
    """By documents and chunks of a window, if it has no bands; positions are then those in the whole row."""
    if bands and problem.documents is None:
        return forward(problem)
    if "max_position" not in names and problem.documents is not None:
        return packed.apply(partial(_in_parts, forward, names, bands=bands), problem)
    if "max_position" not in names or (problem.documents is None and problem.window is None):
        return band.apply(forward, problem)
    place = names.index("max_position")

    def change(found: tuple[Tensor, ...], position: Tensor) -> tuple[Tensor, ...]:
        return *found[:place], position, *found[place + 1 :]

    def relative(part: AttentionProblem) -> tuple[Tensor, ...]:
        found = forward(part)
        return change(found, _moved(found[place], part, -1))

    if problem.documents is None:
        found = band.apply(relative, problem)
        return change(found, _moved(found[place], problem, 1))
    found = packed.apply(partial(_in_parts, forward, names, bands=bands), problem)
    lengths, first = torch.tensor(
        [problem.documents.lengths, problem.documents.key_boundaries[:-1]], device=problem.query.device
    )
    first = first.repeat_interleave(lengths, output_size=problem.query.shape[3])
    return change(found, torch.where(found[place] < 0, -1, found[place] + first))


def _moved(position: Tensor, problem: AttentionProblem, sign: int) -> Tensor:
    """Positions of keys from (sign −1) or to (sign 1) places in a query's window, the same in each part of a window's work."""
    assert problem.window is not None
    start = torch.arange(position.shape[3], device=position.device) + problem.window[0]
    return torch.where(position < 0, position, position + sign * start)


def moments_backend(
    query: Float[Tensor, "*query D"],
    key: Float[Tensor, "*batch Hk N D"],
    value: Float[Tensor, "*batch Hk N E"] | None = None,
    *,
    log_weight: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
    scale: Scale = None,
    is_causal: bool = False,
    moments: Collection[str] | None = None,
) -> str:
    """Which backend ``attention_moments(..., backend="auto")`` takes: "reference", "blocks" or "triton".

    "triton" on CUDA, where it can do this; else "blocks", on the CPU and on CUDA; "reference" where that cannot go either:
    gradients, transforms, other devices. A window, soft cap or sink makes no difference.

    Raises:
        TypeError, ValueError: as `attention_moments`.

    Example:
        >>> import torch
        >>> from massieu import ops
        >>> ops.moments_backend(torch.zeros(1, 1, 1, 2, requires_grad=True), torch.zeros(1, 1, 4, 2))
        'reference'
    """
    query, key, value = in_autocast_dtype(query, key, value)
    problem = check_problem(query, key, value, log_weight, scale, is_causal)
    return backends.choose("auto", _registry(_checked(moments)), problem).name


def _registry(names: tuple[str, ...]) -> tuple[backends.Backend, ...]:
    """In order of preference."""
    return (
        TritonMoments(names),
        tiles.Blocks(partial(moment_blocks.moments, names)),
        reference.Reference(partial(_by_reference, names)),
    )


BACKENDS = ("triton", "blocks", "reference")


def _by_reference(names: tuple[str, ...], problem: AttentionProblem) -> tuple[Tensor, ...]:
    found = reference.in_blocks(problem.without_idle(), partial(_reference, names))
    if "max_position" not in names:
        return found
    place = names.index("max_position")
    return *found[:place], found[place].long(), *found[place + 1 :]


def _reference(
    names: tuple[str, ...], scores: Tensor, log_weight: Tensor | None, value: Tensor | None
) -> tuple[Tensor, ...]:
    log_weight = torch.zeros_like(scores) if log_weight is None else log_weight.expand_as(scores)
    visible = log_weight != -torch.inf
    none = ~visible.any(-1)
    found: dict[str, Tensor] = {}
    if value is not None or any(name in UNDER_P for name in names):
        weights, total, log_z = reference.softmax(scores, log_weight)
        p = weights / total.unsqueeze(-1)
        found["log_partition"] = log_z
        if "entropy" in names:
            level = torch.where(none, 0.0, log_z).unsqueeze(-1)
            found["entropy"] = -(p * (scores + torch.where(visible, log_weight, 0.0) - level)).sum(-1)
        if "mean_score" in names or "score_variance" in names:
            found |= _mean_and_variance("mean_score", "score_variance", names, p, scores)
        if "max_weight" in names:
            found["max_weight"] = _largest(p, visible).masked_fill(none, 0.0)
        if "collision" in names:
            found["collision"] = p.square().sum(-1)
        if value is not None:
            found["output"] = reference.weighted_sum(p, value)
    if any(name.startswith("prior") for name in names):
        weights, total, found["prior_log_partition"] = reference.softmax(torch.zeros_like(scores), log_weight)
        h = weights / total.unsqueeze(-1)
        found |= _mean_and_variance("prior_mean_score", "prior_score_variance", names, h, scores)
    if "max_score" in names:
        found["max_score"] = _largest(scores, visible)
    if "max_position" in names:
        found["max_position"] = _position(scores.detach().masked_fill(~visible, -torch.inf))
    return tuple(found[name] for name in (names if value is None else (*names, "output")))


UNDER_P = ("log_partition", "entropy", "mean_score", "score_variance", "max_weight", "collision")


def _mean_and_variance(
    mean: str, variance: str, names: tuple[str, ...], weights: Tensor, scores: Tensor
) -> dict[str, Tensor]:
    found = {mean: (weights * scores).sum(-1)} if mean in names or variance in names else {}
    if variance in names:
        found[variance] = (weights * (scores - found[mean].unsqueeze(-1)).square()).sum(-1)
    return found


def _largest(numbers: Tensor, visible: Tensor) -> Tensor:
    if numbers.shape[-1] == 0:
        return numbers.sum(-1) - torch.inf
    return numbers.masked_fill(~visible, -torch.inf).amax(-1)


def _position(scores: Tensor) -> Tensor:
    """Of the first of the largest; −1 if none is finite. No integers, which derivatives do not go through."""
    if scores.shape[-1] == 0:
        return scores.sum(-1).double() - 1
    return torch.where(scores.amax(-1).isfinite(), scores.argmax(-1), -1).double()
