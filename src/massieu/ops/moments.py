"""Moments of attention's weights: what each query's attention looks like, in one pass over the scores."""

from collections.abc import Collection
from contextlib import nullcontext
from functools import partial
from typing import Generic, Literal, NamedTuple, TypeVar, overload

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.foundation.arguments import choice, described
from massieu.foundation.listening import as_one_call, listeners
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.transforms import in_autocast_dtype
from massieu.ops import backends, band, moment_blocks, packed_rows, reference, tiles
from massieu.ops import sink as with_sink
from massieu.ops.compiled.moments import CompiledMoments
from massieu.ops.cuda.triton_moments import TritonMoments
from massieu.ops.documents import Documents
from massieu.ops.observed import ObservedAttention, tell
from massieu.ops.shapes import AttentionProblem, Scale, Sink, Window, check_problem

MomentsBackend = Literal["auto", "reference", "triton", "compiled", "blocks"]

Moment = TypeVar("Moment", Float[Tensor, "*query"], Float[Tensor, "*query"] | None)


class MomentsResult(NamedTuple, Generic[Moment]):
    """What `attention_moments` returns: each moment is a number for each query, float32 (float64 for float64), in nats.

    A moment is None if the argument `moments` leaves it out.

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
    """Number of the first key that has the largest score, int64; −1 if `max_score` is not finite. A sink is no key."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


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

    Without gradient (under `torch.no_grad`, or no argument requires it) on the CPU this costs one to two times as much as
    fused attention where there is a C compiler, and two to three times as much where there is none. On CUDA the same tiles are
    larger, and cost many times as much as fused attention; "triton" costs about twice as much as it. With a gradient,
    forward mode or a `torch.func` transform, and on other devices, the reference computes all moments, differentiable any
    number of times.

    Args:
        query, key, value, log_weight, scale, is_causal, window, query_offset, documents, softcap, sink, sink_value: as in
            `massieu.ops.attention`; all moments but `max_position` are those with the sink as one more key, of score 0.
        moments: names of the fields of `MomentsResult` to compute, such as ``{"entropy", "max_score"}``; the others are
            None. By default all are computed. The output is returned whenever there are values.
        backend: `moments_backend` says what "auto" takes.

            - "reference": plain operations in blocks of queries;
            - "compiled": tiles on the CPU whose sums are compiled code, without gradient, in float32 and half precision. A C
              compiler makes it in about a second, once for each kind of processor, and it is kept in the user's cache
              (``$XDG_CACHE_HOME/massieu`` or ``~/.cache/massieu``). It takes boolean log-weights only;
            - "blocks": tiles that stay in cache, without gradient;
            - "triton": one pass over the keys on CUDA, compiled in about 2 s once. Weights are rounded to the values' dtype
              for the output, as fused attention does. It takes boolean log-weights only.

    Numbers agree between backends to rounding: in float32 the score's variance has an absolute error of about
    1e-6·(variance + log² n), the others about 1e-6 times the scores' spread over a query's keys. Tiles take a score of −1e30 or
    less for −∞, as of a product that overflows. A query with no other score has the log-partition −∞, and weights of NaN.
    A hidden product that overflows makes a query NaN that asks for a mean over its keys in tiles of tensor operations.

    Raises:
        TypeError: as `massieu.ops.attention`; also `moments` that is not a collection of names.
        ValueError: as there; also an unknown moment, an empty `moments`, or a backend that cannot take this call.

    Example:
        >>> import torch
        >>> from massieu import ops
        >>> moments = ops.attention_moments(torch.zeros(1, 1, 1, 2), torch.randn(1, 1, 4, 2))  # equal weights
        >>> round(moments.entropy.exp().item(), 3), round(moments.collision.item(), 3)
        (4.0, 0.25)
    """
    query, key, value = in_autocast_dtype(query, key, value)
    problem = check_problem(
        query, key, value, log_weight, scale, is_causal, window, softcap, sink, sink_value, query_offset, documents
    )
    choice("backend", backend, "auto", *BACKENDS)
    names = _checked_names(moments)
    computed_names = names if problem.sink is None else _with_sources(names)
    device = problem.query.device if backend == "auto" else None
    chosen = backends.choose(backend, _registry(computed_names, device), problem)
    # Whoever observes attention is shown one call with its output, not the calls for each part.
    observers = () if value is None else listeners()
    with as_one_call(observers) if observers else nullcontext():
        labels = computed_names if value is None else (*computed_names, "output")
        results = dict(zip(labels, _in_parts(chosen.forward, computed_names, problem, chosen.bands), strict=True))
        if problem.sink is not None:
            results = with_sink.moments(results, problem)
    if observers:
        results["output"] = tell(observers, ObservedAttention(problem, results["output"].to(query.dtype)))
    restored = {name: problem.restore(results[name]) for name in names}
    output = None if value is None else problem.restore(results["output"]).to(query.dtype)
    return MomentsResult(output, *(restored.get(name) for name in NAMES))


NAMES = MomentsResult._fields[1:]


def _checked_names(moments: Collection[str] | None) -> tuple[str, ...]:
    """Names in the order of `MomentsResult`, each once; all for None."""
    if moments is None:
        return NAMES
    if (
        isinstance(moments, str | Tensor)
        or not isinstance(moments, Collection)
        or not all(isinstance(name, str) for name in moments)
    ):
        raise TypeError(f"moments must be a collection of names, got {described(moments)}")
    unknown = sorted(set(moments).difference(NAMES))
    if unknown or not moments:
        got = ", ".join(map(repr, unknown)) or "none"
        raise ValueError(f"moments must be some of {', '.join(NAMES)}; got {got}")
    return tuple(name for name in NAMES if name in moments)


def _with_sources(names: tuple[str, ...]) -> tuple[str, ...]:
    """These names, and those of the moments from which they are computed if there is a sink."""
    needed = {"log_partition", *names}
    for name in names:
        needed.update(with_sink.NEEDED.get(name, ()))
    return tuple(name for name in NAMES if name in needed)


def _in_parts(
    forward: band.Function, names: tuple[str, ...], problem: AttentionProblem, bands: bool
) -> tuple[Tensor, ...]:
    """Results of `forward`, with documents and windows done in parts where it cannot take them.

    Args:
        forward: computes the moments of a problem without documents.
        names: of its results.
        bands: whether it takes windows.
    """
    if problem.documents is not None:
        results = packed_rows.apply(partial(_in_parts, forward, names, bands=bands), problem)
        if "max_position" not in names:
            return results
        # From a key's number in its document to that in the row.
        lengths, first_keys = torch.tensor(
            [problem.documents.lengths, problem.documents.key_boundaries[:-1]], device=problem.query.device
        )
        first_key = first_keys.repeat_interleave(lengths, output_size=problem.query.shape[3])
        place = names.index("max_position")
        position = results[place]
        return _replaced(results, place, torch.where(position < 0, -1, position + first_key))
    if problem.queries_before_keys:
        whole = partial(_in_parts, forward, names, bands=bands)
        return band.after_queries_before_keys(whole, partial(_without_keys, names), problem)
    if bands or problem.window is None:
        return forward(problem)
    without_keys = partial(_without_keys, names)
    if "max_position" not in names:
        return band.apply(forward, problem, without_keys=without_keys)
    place = names.index("max_position")

    def forward_relative(part: AttentionProblem) -> tuple[Tensor, ...]:
        results = forward(part)
        return _replaced(results, place, _shifted(results[place], part, -1))

    # Chunks number their keys anew, but a key's place in its query's window is the same in every chunk and in the row.
    results = band.apply(forward_relative, problem, without_keys=without_keys)
    return _replaced(results, place, _shifted(results[place], problem, 1))


def _without_keys(names: tuple[str, ...], problem: AttentionProblem) -> tuple[Tensor, ...]:
    """The moments of queries that are given no key."""
    return backends.choose("auto", _registry(names), problem).forward(problem)


def _replaced(results: tuple[Tensor, ...], place: int, result: Tensor) -> tuple[Tensor, ...]:
    """The results with one of them replaced."""
    return *results[:place], result, *results[place + 1 :]


def _shifted(position: Tensor, problem: AttentionProblem, sign: int) -> Tensor:
    """From the number of a key to its place in the query's window (sign −1), or back (sign 1); negative ones stay."""
    assert problem.window is not None
    low, _ = problem.window
    start = torch.arange(position.shape[3], device=position.device) + low
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
    """The backend that ``attention_moments(..., backend="auto")`` takes.

    - "triton" on CUDA, where it can take this call.
    - "compiled" on the CPU, where it can take this call and there is a C compiler.
    - "blocks" on the CPU and on CUDA else.
    - "reference" where neither works: gradients, transforms, other devices.

    A window, soft cap or sink makes no difference.

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
    return backends.choose("auto", _registry(_checked_names(moments)), problem).name


def _registry(names: tuple[str, ...], device: torch.device | None = None) -> tuple[backends.Backend, ...]:
    """Backends in order of preference; of a device, those that may run there."""
    blocks = tiles.Blocks(partial(moment_blocks.moments, names))
    by_reference = reference.Reference(partial(_by_reference, names))
    if device is not None and device.type == CompiledMoments.device_type:
        return CompiledMoments(names), blocks, by_reference
    if device is not None and device.type != TritonMoments.device_type:
        return blocks, by_reference
    return TritonMoments(names), CompiledMoments(names), blocks, by_reference


BACKENDS = ("triton", "compiled", "blocks", "reference")


def _by_reference(names: tuple[str, ...], problem: AttentionProblem) -> tuple[Tensor, ...]:
    """The moments of these names, and the output where there are values, in plain operations."""
    results = reference.in_blocks(problem.zero_queries_without_key(), partial(_reference_block, names))
    if "max_position" not in names:
        return results
    place = names.index("max_position")
    return _replaced(results, place, results[place].long())


def _reference_block(
    names: tuple[str, ...], scores: Tensor, log_weight: Tensor | None, value: Tensor | None
) -> tuple[Tensor, ...]:
    """The same for a block of queries, from its scores and log-weights ``(B, Hk, G, rows, N)``."""
    log_weight = torch.zeros_like(scores) if log_weight is None else log_weight.expand_as(scores)
    visible = log_weight != -torch.inf
    sees_no_key = ~visible.any(-1)
    results: dict[str, Tensor] = {}
    if value is not None or any(name in UNDER_P for name in names):
        weights, total, log_z = reference.softmax(scores, log_weight)
        p = weights / total.unsqueeze(-1)
        results["log_partition"] = log_z
        if "entropy" in names:
            # −Σ p·log p with log p = score + log-weight − log Z. Where p is 0 both −∞ are replaced, as 0·∞ is NaN.
            level = torch.where(sees_no_key, 0.0, log_z).unsqueeze(-1)
            results["entropy"] = -(p * (scores + torch.where(visible, log_weight, 0.0) - level)).sum(-1)
        if "mean_score" in names or "score_variance" in names:
            results |= _mean_and_variance("mean_score", "score_variance", names, p, scores)
        if "max_weight" in names:
            results["max_weight"] = _largest(p, visible).masked_fill(sees_no_key, 0.0)
        if "collision" in names:
            results["collision"] = p.square().sum(-1)
        if value is not None:
            results["output"] = reference.weighted_sum(p, value)
    if any(name.startswith("prior") for name in names):
        # The base measure is the softmax of the log-weights alone.
        weights, total, results["prior_log_partition"] = reference.softmax(torch.zeros_like(scores), log_weight)
        h = weights / total.unsqueeze(-1)
        results |= _mean_and_variance("prior_mean_score", "prior_score_variance", names, h, scores)
    if "max_score" in names:
        results["max_score"] = _largest(scores, visible)
    if "max_position" in names:
        results["max_position"] = _position(scores.detach().masked_fill(~visible, -torch.inf))
    labels = names if value is None else (*names, "output")
    return tuple(results[label] for label in labels)


UNDER_P = ("log_partition", "entropy", "mean_score", "score_variance", "max_weight", "collision")
"""Moments that need the attention weights p."""


def _mean_and_variance(
    mean: str, variance: str, names: tuple[str, ...], weights: Tensor, scores: Tensor
) -> dict[str, Tensor]:
    """Mean and variance of the scores under some weights, by their names; those that `names` needs."""
    results: dict[str, Tensor] = {}
    if mean in names or variance in names:
        results[mean] = (weights * scores).sum(-1)
    if variance in names:
        results[variance] = (weights * (scores - results[mean].unsqueeze(-1)).square()).sum(-1)
    return results


def _largest(numbers: Tensor, visible: Tensor) -> Tensor:
    """The largest number of a visible key; −∞ if there is none."""
    if numbers.shape[-1] == 0:
        return numbers.sum(-1) - torch.inf
    return numbers.masked_fill(~visible, -torch.inf).amax(-1)


def _position(scores: Tensor) -> Tensor:
    """Number of the first key with the largest score; −1 if that is not finite.

    As float64: the blocks that compute it are differentiated, and functions with integer results cannot be.
    """
    if scores.shape[-1] == 0:
        return scores.sum(-1).double() - 1
    return torch.where(scores.amax(-1).isfinite(), scores.argmax(-1), -1).double()
