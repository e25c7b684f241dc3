"""The Fisher information of attention's weights applied to vectors, without a matrix."""

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.foundation.transforms import in_autocast_dtype, without_autocast
from massieu.ops import backends, band, reference, tiles
from massieu.ops import sink as with_sink
from massieu.ops.documents import Documents
from massieu.ops.fused import CPU
from massieu.ops.shapes import AttentionProblem, Scale, Sink, Window, check_alike, check_problem
from massieu.ops.tiles import Plan, Slab

FisherBackend = Literal["auto", "blocks", "reference"]

PAIRS_PER_THREAD = 1 << 18
"""Scores of a tile per thread: two float32 buffers of this size fill a 2 MiB second-level cache."""


def fisher_vp(
    query: Float[Tensor, "*query D"],
    key: Float[Tensor, "*batch Hk N D"],
    vector: Float[Tensor, "*query D"],
    *,
    log_weight: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
    scale: Scale = None,
    is_causal: bool = False,
    window: Window = None,
    query_offset: int = 0,
    documents: Documents | None = None,
    sink: Sink = None,
    backend: FisherBackend = "auto",
) -> Float[Tensor, "*query D"]:
    """Covariance of the keys under each query's attention weights, times that query's vector.

    Σ_n p_n (key_n − Σ p key) (key_n·vector) with the weights p_n ∝ w_n exp(scale·query·key_n) of `attention`. That is
    ∇²A(eta)·vector at eta = scale·query for A(eta) = log Σ w_n exp(eta·key_n): the Fisher information in eta (S10). No
    factor of `scale` comes with it: the Hessian of `log_partition` in the query is scale² times this, and attention
    with values = keys has the derivative scale·fisher_vp along `vector`.

    In memory linear in queries and keys; without gradient on the CPU in the time of two to three fused attentions.

    Args:
        query, key, log_weight, scale, is_causal, window, query_offset, documents: as in `attention`.
        sink: as in `attention`; the covariance is that with one more key, at the origin, of log-weight `sink`.
        vector: of the query's shape, dtype and device.
        backend: "reference": plain operations, in blocks of queries that are computed again in the backward pass;
            right on every device. "blocks": tiles of scores, which stay in cache on the CPU, on the CPU and on CUDA,
            without gradient. "auto": blocks where no derivative may be wanted (under `torch.no_grad`, or no argument
            requires it), outside `torch.func` and `torch.compile`, on these devices; elsewhere the reference.

    Differentiable any number of times in query, key, vector, a float `log_weight` and a tensor `scale`, forwards too,
    and under `torch.func` transforms and `torch.compile`, as `attention` is. A query that sees no key has result 0 and
    gradient 0.

    The result has the query's dtype and is computed in float32 (float64 for float64), about the weighted mean of the
    keys, as a shift of all keys does not change it (S25). Its error is a few units of rounding times ‖vector‖, the
    distance of the attended keys from that mean, and their spread; where nearly all weight is on one key, the small
    result keeps its digits until the share of the others comes near the square of the rounding unit.

    Raises:
        TypeError: as `attention`.
        ValueError: as there; also "blocks" where it cannot go.

    Example:
        >>> import torch
        >>> from massieu import ops
        >>> key = torch.tensor([-1.0, 1.0]).view(1, 1, 2, 1)  # of equal weights: variance 1
        >>> ops.fisher_vp(torch.zeros(1, 1, 1, 1), key, torch.full((1, 1, 1, 1), 2.0)).item()
        2.0
    """
    query, key, vector = in_autocast_dtype(query, key, vector)
    if documents is not None and log_weight is None and isinstance(key, Tensor):
        # Weights show which keys are padding, which must not move the mean of the others.
        log_weight = torch.ones(key.shape[-2:-1], dtype=torch.bool, device=key.device)
    problem = check_problem(
        query,
        key,
        None,
        log_weight,
        scale,
        is_causal,
        window,
        sink=sink,
        query_offset=query_offset,
        documents=documents,
    )
    check_alike(query=query, vector=vector)
    if vector.shape != query.shape:
        raise ValueError(f"vector must have the query's shape {tuple(query.shape)}, got {tuple(vector.shape)}")
    chosen = backends.choose(backend, BACKENDS, problem, vector)
    vector = vector.reshape(problem.query.shape).to(problem.dtype)
    (product,) = band.apply(
        lambda part, vectors: chosen.forward(_centred(part), vectors),
        problem,
        vector,
        without_keys=lambda part, vectors: (torch.zeros_like(vectors),),
    )
    if problem.sink is not None:
        product = _with_sink(problem, vector, product)
    return problem.restore(product).to(query.dtype)


def _centred(problem: AttentionProblem) -> AttentionProblem:
    """The problem in its working dtype, with the scale in the query, keys about a weighted mean, and the keys as values.

    The covariance does not depend on the origin. About the mean its terms are small, and keep more digits.
    """
    query = problem.scaled_query()
    key = problem.key.to(problem.dtype)
    weight = problem.log_weight
    low, high = problem.band or (None, key.shape[2])
    # Hidden keys may be arbitrarily large, so they must not move the mean.
    seen = slice(max(0, low or 0), min(key.shape[2], query.shape[3] + high))
    count = seen.stop - seen.start
    if problem.pairs > 0 and count > 0:
        # No derivative goes through the mean, which cancels.
        seen_keys = key[:, :, seen].detach()
        if weight is None:
            share = seen_keys.new_full((1, 1, count), 1 / count)
        else:
            share = _shares(weight.detach(), seen, key.dtype)
        with without_autocast(key.device):
            key = key - share.unsqueeze(-2) @ seen_keys
    return replace(problem, query=query, key=key, value=key, scale=1.0)


def _shares(weight: Tensor, seen: slice, dtype: torch.dtype) -> Tensor:
    """The largest weight that any query of a key head gives each of some keys, normalised: (#B, #Hk, keys)."""
    if weight.shape[-1] > 1:
        weight = weight[..., seen]
    else:
        weight = weight.expand(*weight.shape[:-1], seen.stop - seen.start)
    if weight.dtype == torch.bool:
        visible = weight.any(3).any(2).to(dtype)
        return visible / visible.sum(-1, keepdim=True).clamp_min(1)
    level = weight.amax((2, 3)).to(dtype)
    share = (level - level.amax(-1, keepdim=True).clamp_min(torch.finfo(dtype).min)).exp()
    return share / share.sum(-1, keepdim=True).clamp_min(1)


def _with_sink(problem: AttentionProblem, vector: Tensor, product: Tensor) -> Tensor:
    """The covariance with the sink, one more key at the origin: κ·Cov + κ(1 − κ)·mean meanᵀ for the keys' share κ."""
    key = problem.key.to(problem.dtype)
    means_of_keys = replace(problem, query=problem.query.to(problem.dtype), key=key, value=key)
    attention = CPU.forward if CPU.refuses(means_of_keys) is None else reference.attention
    mean, log_z = band.apply(attention, means_of_keys, without_keys=reference.attention)
    _, key_share, share = (share.unsqueeze(-1) for share in with_sink.shares(log_z, problem))
    return key_share * (product + share * mean * (mean * vector).sum(-1, keepdim=True))


def _reference(problem: AttentionProblem, vector: Tensor) -> tuple[Tensor, ...]:
    """The product in plain operations."""
    # The vectors are more queries of each key head: their products with the keys are the changes of the scores.
    both = torch.cat([problem.zero_queries_without_key().query, vector], dim=2)
    return reference.in_blocks(replace(problem, query=both), _reference_block)


def _reference_block(scores: Tensor, log_weight: Tensor | None, key: Tensor | None) -> tuple[Tensor]:
    """Σ p·(change − mean change)·key for a block of queries, whose scores are followed by their changes."""
    assert key is not None
    scores, change = scores.chunk(2, dim=2)
    weights, total, _ = reference.softmax(scores, log_weight)
    total = total.unsqueeze(-1)
    # The mean is subtracted twice: the rounding of the first may exceed the spread. It cancels, and needs no derivative.
    change = change - ((weights * change).sum(-1, keepdim=True) / total).detach()
    change = weights * change
    change = change - weights * (change.sum(-1, keepdim=True) / total)
    return (reference.weighted_sum(change, key) / total,)


def _blocks(problem: AttentionProblem, vector: Tensor) -> tuple[Tensor, ...]:
    """The product in tiles."""

    def work(slab: Slab) -> tuple[Tensor, ...]:
        """Fill the slab's product. Each line is one pass over the tile's two buffers."""
        vectors = slab.fold(vector)
        weight = slab.weight()
        for tile in slab.tiles():
            weights = tile.scores  # once `exponentiate` has overwritten them
            change = tile.scratch[0]
            _, total = tile.exponentiate(weight)
            torch.bmm(vectors[tile.heads], slab.key[tile.heads], out=change)
            change.mul_(weights)
            # The largest weight is exactly 1. With nearly all weight on one key only the mean is rounded: subtract it twice.
            for _ in range(2):
                change.addcmul_(weights, change.sum(-1, keepdim=True).div_(total), value=-1)
            tile.multiply(change, total)
        return ()

    return Plan.of(problem, PAIRS_PER_THREAD, buffers=2).run(work)


BACKENDS: tuple[backends.Backend, ...] = (tiles.Blocks(_blocks), reference.Reference(_reference))
"""In order of preference."""
