"""Moments of attention's weights: what each query's attention looks like, in one pass over the scores."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.foundation.arguments import choice
from massieu.foundation.transforms import in_autocast_dtype
from massieu.ops import backends, band, moment_blocks, reference, tiles
from massieu.ops import sink as with_sink
from massieu.ops.documents import Documents
from massieu.ops.shapes import AttentionProblem, Scale, Sink, Window, check_problem

MomentsBackend = Literal["auto", "reference", "compiled", "blocks"]

REPAYING_PAIRS = 4e10
"""So many scores make up for a compilation: about 15 s, against 0.4 ns saved a score."""


class MomentsResult(NamedTuple):
    """What `attention_moments` returns: a number a query each, float32 (float64 for float64), nats.

    p are the attention weights, s the scores (scaled and soft-capped, without log-weight), h the base measure: the
    weights w = exp(log_weight) normalised over the keys a query sees. A query that sees no key has −inf for both
    log-partitions and the largest score, 0 for everything else.
    """

    output: Float[Tensor, "*query E"] | None
    """Σ p_n value_n in the query's dtype; None without values."""
    log_partition: Float[Tensor, "*query"]
    """log Σ w_n exp(s_n)."""
    entropy: Float[Tensor, "*query"]
    """−Σ p_n log p_n."""
    mean_score: Float[Tensor, "*query"]
    """Σ p_n s_n."""
    score_variance: Float[Tensor, "*query"]
    """Variance of s under p: the second cumulant, d² log Z(βs)/dβ² at β = 1."""
    max_weight: Float[Tensor, "*query"]
    """max p_n."""
    collision: Float[Tensor, "*query"]
    """Σ p_n², whose inverse is the effective sample size."""
    prior_log_partition: Float[Tensor, "*query"]
    """log Σ w_n: log n for n visible keys of weight one."""
    prior_mean_score: Float[Tensor, "*query"]
    """Σ h_n s_n. log_partition − prior_log_partition − prior_mean_score = KL(h‖p) ≥ 0 (S25)."""
    prior_score_variance: Float[Tensor, "*query"]
    """Variance of s under h."""
    max_score: Float[Tensor, "*query"]
    """Largest s of a visible key."""


class _Work:
    """Scores that `auto` has met in this process and that compiled tiles would have done faster."""

    pairs = 0


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
    backend: MomentsBackend = "auto",
) -> MomentsResult:
    """Log-partition, entropy and moments of the scores of every query, in memory linear in queries and keys.

    Without gradient (under `torch.no_grad`, or no argument requires it) on the CPU this costs about as much as fused
    attention. Where a gradient, forward mode or a `torch.func` transform is wanted, and on other devices, the reference
    computes it, differentiable any number of times.

    Args:
        query, key, value, log_weight, scale, is_causal, window, query_offset, documents, softcap, sink, sink_value: as in
            `massieu.ops.attention`; all moments are those with the sink as one more key, of score 0.
        backend: `moments_backend` says what "auto" takes.

            - "reference": plain operations in blocks of queries;
            - "blocks": tiles that stay in cache, without gradient;
            - "compiled": the same with each tile fused by `torch.compile`: 5 to 30 s once, needs a C++ compiler. Float
              log-weights and tiles of a single query or key are done as in "blocks".

    Numbers agree between backends to rounding: in float32 the score's variance has an absolute error of about
    1e-6·(variance + log² n), the others about 1e-6 times the scores' spread over a query's keys.

    Raises:
        TypeError: as `massieu.ops.attention`.
        ValueError: as there; also a backend that cannot do this.

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
    choice("backend", backend, "auto", *(each.name for each in BACKENDS))
    chosen = backends.choose(backend, _registry(problem, backend), problem)

    def compute(part: AttentionProblem) -> tuple[Tensor, ...]:
        if backend == "auto" and chosen.name != "reference" and moment_blocks.is_fusable(part):
            _Work.pairs += part.pairs
        return chosen.forward(part)

    found = band.apply(compute, problem)
    if problem.sink is not None:
        found = with_sink.moments(found, problem)
    moments, output = found[:10], found[10] if value is not None else None
    restored = [problem.restore(moment) for moment in moments]
    return MomentsResult(None if output is None else problem.restore(output).to(query.dtype), *restored)


def moments_backend(
    query: Float[Tensor, "*query D"],
    key: Float[Tensor, "*batch Hk N D"],
    value: Float[Tensor, "*batch Hk N E"] | None = None,
    *,
    log_weight: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
    scale: Scale = None,
    is_causal: bool = False,
) -> str:
    """Which backend ``attention_moments(..., backend="auto")`` would take now: "reference", "blocks" or "compiled".

    "reference" where "blocks" cannot go (gradients, transforms, other devices than the CPU); "compiled" once the calls
    of this process have met `REPAYING_PAIRS` scores, about what makes up for the compilation, and there is a C++
    compiler; else "blocks". A window, soft cap or sink makes no difference.

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
    return backends.choose("auto", _registry(problem, "auto"), problem).name


class _Compiled(tiles.Blocks):
    name = "compiled"

    def refuses(self, problem: AttentionProblem, *others: Tensor) -> str | None:
        reason = super().refuses(problem, *others)
        return "no C++ compiler was found" if reason is None and not moment_blocks.compiler_exists() else reason


def _registry(problem: AttentionProblem, asked: str) -> tuple[backends.Backend, ...]:
    """In order of preference. A compilation is taken where it is asked for, or repaid."""
    repaid = asked != "auto" or (_Work.pairs >= REPAYING_PAIRS and moment_blocks.is_fusable(problem))
    return BACKENDS if repaid else BACKENDS[1:]


def _reference(scores: Tensor, log_weight: Tensor | None, value: Tensor | None) -> tuple[Tensor, ...]:
    log_weight = torch.zeros_like(scores) if log_weight is None else log_weight.expand_as(scores)
    visible = log_weight != -torch.inf
    finite_weight = torch.where(visible, log_weight, 0.0)
    weights, total, log_z = reference.softmax(scores, log_weight)
    p = weights / total.unsqueeze(-1)
    prior, prior_total, prior_log_z = reference.softmax(torch.zeros_like(scores), log_weight)
    h = prior / prior_total.unsqueeze(-1)
    none = ~visible.any(-1)
    mean, prior_mean = (p * scores).sum(-1), (h * scores).sum(-1)
    level = torch.where(none, 0.0, log_z).unsqueeze(-1)
    log_p = scores + finite_weight - level
    moments = (
        log_z,
        -(p * log_p).sum(-1),
        mean,
        (p * (scores - mean.unsqueeze(-1)).square()).sum(-1),
        _largest(p, visible).masked_fill(none, 0.0),
        p.square().sum(-1),
        prior_log_z,
        prior_mean,
        (h * (scores - prior_mean.unsqueeze(-1)).square()).sum(-1),
        _largest(scores, visible),
    )
    return moments if value is None else (*moments, reference.weighted_sum(p, value))


def _largest(numbers: Tensor, visible: Tensor) -> Tensor:
    if numbers.shape[-1] == 0:
        return numbers.sum(-1) - torch.inf
    return numbers.masked_fill(~visible, -torch.inf).amax(-1)


BACKENDS: tuple[backends.Backend, ...] = (
    _Compiled(moment_blocks.compiled_moments),
    tiles.Blocks(moment_blocks.moments),
    reference.Reference(lambda problem: reference.in_blocks(problem.without_idle(), _reference)),
)
