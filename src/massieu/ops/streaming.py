"""Attention over keys that do not fit in memory: a store is read block by block and the results are merged.

The results of `massieu.ops.attention` and `log_partition`, with an `AtomStore` in place of keys and values.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import described, floating, whole_number
from massieu.foundation.listening import unreadable
from massieu.foundation.numerics import exp_
from massieu.foundation.transforms import in_nested_forward_mode, may_be_differentiated, uncompiled
from massieu.ops.attention import AttentionResult
from massieu.ops.attention import attention as block_attention
from massieu.ops.differentiable import BlockSum
from massieu.ops.partial import Partial, around, shares
from massieu.ops.shapes import AttentionProblem, Scale, check_problem, scores_per_tile, slices
from massieu.ops.store import AtomStore

__all__ = ["attention", "log_partition"]

TILE_PAIRS = 1 << 18
"""Scores at once in a gradient: two float32 buffers of this size fill a 2 MiB second-level cache."""

Progress = Callable[[int, int], None]
"""(keys done, keys in all), called after each block; what it raises ends the work."""


@dataclass(frozen=True)
class _Pass:
    """A pass over a store, block by block; it can be iterated any number of times."""

    store: AtomStore
    block_size: int
    progress: Progress | None
    values_are_points: bool
    dtype: torch.dtype
    device: torch.device
    """Where blocks are brought, in `dtype`."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Points, values and log-weights of each block."""
        done = 0
        for points, values, log_weight in self.store.blocks(self.block_size):
            points = points.to(dtype=self.dtype, device=self.device)
            values = (
                points if values is None or self.values_are_points else values.to(dtype=self.dtype, device=self.device)
            )
            if log_weight is not None:
                log_weight = log_weight.to(dtype=self.dtype, device=self.device)
            yield points, values, log_weight
            done += points.shape[1]
            if self.progress is not None:
                self.progress(done, len(self.store))


@uncompiled
@unreadable("it attends by massieu.ops.streaming, whose keys are on disk", attends=True)
def attention(
    query: Float[Tensor, "*query D"],
    store: AtomStore,
    *,
    scale: Scale = None,
    block_size: int = 1 << 16,
    progress: Progress | None = None,
) -> AttentionResult:
    """Softmax attention over the atoms of a store, and its log-partition: `massieu.ops.attention` in bounded memory.

    Args:
        query: (B, H, L, D) with H a multiple of the store's heads, or (B, Hk, G, L, D). All items share the atoms.
        store: its points are the keys; its values, or the points if it has none, are the values; its log-weights count. It may
            have any dtype: blocks are brought to float32 (float64 for a float64 query) and to the query's device.
        scale: as in `massieu.ops.attention`.
        block_size: atoms of one head in memory at a time. More is faster up to some ten thousand.
        progress: called with (atoms done, atoms in all) after each block; also in the backward pass, which reads the store
            once more.

    Both results have exact gradients with respect to the query and a tensor `scale`, any number of times, forwards
    too, and under `torch.func`. Each derivative reads the store again, and only a few numbers per query are kept (in forward
    mode within forward mode a few for each block).
    The store's atoms have no gradient. `torch.compile` runs this as it is and compiles what is around it.

    Raises:
        TypeError: the query is not a floating-point tensor, `store` is not an `AtomStore`, or scale or progress have another
            type.
        ValueError: shapes do not fit (both are named), `block_size` is below 1, or a file has changed since the store was
            opened.

    Example:
        >>> import tempfile, torch
        >>> from massieu.ops import AtomBlock, AtomStore, streaming
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = AtomStore.write(f"{folder}/atoms", [AtomBlock(torch.eye(2)[None])])
        ...     round(streaming.attention(torch.zeros(1, 1, 1, 2), store, block_size=1).output.sum().item(), 3)
        1.0
    """
    problem, eta, blocks = _prepare(query, store, scale, block_size, progress, values_are_points=False)
    result = _stream(eta, blocks)
    return AttentionResult(_restore(result.mean, problem).to(query.dtype), _restore(result.log_partition, problem))


@uncompiled
def log_partition(
    query: Float[Tensor, "*query D"],
    store: AtomStore,
    *,
    scale: Scale = None,
    block_size: int = 1 << 16,
    progress: Progress | None = None,
) -> Float[Tensor, "*query"]:
    """log Z = log Σ_n w_n exp(scale·query·point_n) over the atoms of a store, in bounded memory.

    Arguments, guarantees and errors are those of `attention`, except that the first gradient needs no further pass: it is
    scale·Σ p_n point_n, which is computed with log Z (S3).

    Example:
        >>> import tempfile, torch
        >>> from massieu.ops import AtomBlock, AtomStore, streaming
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = AtomStore.write(f"{folder}/atoms", [AtomBlock(torch.ones(1, 8, 2))])
        ...     round(streaming.log_partition(torch.zeros(1, 1, 1, 2), store, block_size=3).exp().item(), 3)
        8.0
    """
    problem, eta, blocks = _prepare(query, store, scale, block_size, progress, values_are_points=True)
    result = _stream(eta, blocks)
    if may_be_differentiated(eta) and not in_nested_forward_mode():
        return _restore(_WithMean.apply(eta, result.log_partition.detach(), result.mean), problem)  # pyright: ignore
    return _restore(result.log_partition, problem)


def _prepare(
    query: Tensor, store: AtomStore, scale: Scale, block_size: int, progress: Progress | None, values_are_points: bool
) -> tuple[AttentionProblem, Tensor, _Pass]:
    """The checked problem, scale·query as (1, Hk, B·G·L, D) in the working dtype, and the store's blocks."""
    if not isinstance(store, AtomStore):
        raise TypeError(
            f"store must be an AtomStore, got {described(store)}; ops.attention takes keys that are tensors"
        )
    floating("query", query)
    whole_number("block_size", block_size, least=1)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be a function of two numbers or None, got {described(progress)}")
    # One atom per head stands for the store, so that shapes and types are checked as for keys.
    batch = query.shape[0] if query.ndim else 1
    key = query.new_zeros(batch, store.heads, 1, store.size)
    problem = check_problem(query, key, None, log_weight=None, scale=scale, is_causal=False)
    # All items share the atoms: they become more queries of each key head. From (B, Hk, G, L, D) to (1, Hk, B·G·L, D).
    eta = problem.scaled_query().transpose(0, 1).flatten(1, 3).unsqueeze(0)
    return problem, eta, _Pass(store, block_size, progress, values_are_points, eta.dtype, eta.device)


def _restore(result: Tensor, problem: AttentionProblem) -> Tensor:
    """From (1, Hk, B·G·L, ...) to the shape of the caller's query."""
    batch, _, group, length, _ = problem.query.shape
    return problem.restore(result.squeeze(0).unflatten(1, (batch, group, length)).transpose(0, 1))


def _stream(eta: Tensor, blocks: _Pass) -> Partial:
    """The merged result, differentiable in eta."""
    store = blocks.store
    size = store.size if blocks.values_are_points else store.value_size
    if len(store) == 0:
        points = eta.new_zeros(store.heads, 0, store.size)
        return _part(eta, points, eta.new_zeros(store.heads, 0, size), None)
    if in_nested_forward_mode():
        # A custom function has only one forward derivative, so autograd keeps what it needs.
        return reduce(Partial.merge, (_part(eta, *block) for block in blocks))
    anchor = Partial.empty(eta.shape[:-1], size, dtype=eta.dtype, device=eta.device)
    with torch.no_grad():
        constant_eta = eta.detach()
        for block in blocks:
            anchor = anchor.merge(_part(constant_eta, *block))
    if not may_be_differentiated(eta):
        return anchor
    # Around the anchor the shares sum to 1 and their deviations to 0. Their derivatives are sums over the blocks again.
    weight_sum = (anchor.log_partition > -torch.inf).to(eta.dtype)
    known = weight_sum, torch.zeros_like(anchor.mean)
    weight, moment = BlockSum(_shares, blocks, _share_gradients)(eta, *anchor, known=known)
    return around(anchor, weight, moment)


def _part(eta: Tensor, points: Tensor, values: Tensor, log_weight: Tensor | None) -> Partial:
    """The result over one block of atoms."""
    weight = None if log_weight is None else log_weight[None, :, None]
    return Partial.of(block_attention(eta, points[None], values[None], log_weight=weight, scale=1.0))


def _shares(
    points: Tensor, values: Tensor, log_weight: Tensor | None, eta: Tensor, level: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor]:
    """`massieu.ops.partial.shares` of one block, for the anchor (level, mean)."""
    return shares(Partial(level, mean), _part(eta, points, values, log_weight))


def _share_gradients(*arguments: Any) -> tuple[Tensor, ...]:
    """Σ_n p_n (grad + grad_moment·(value_n − mean)) point_n with p_n = w_n exp(eta·point_n − level), in tiles.

    It takes three products. A fused backward pass after a recomputed forward pass takes seven, four of them for gradients of
    points and values. The anchor (level, mean) is a constant: its gradients are zeros.
    """
    points, values, log_weight, eta, level, mean, grad, grad_moment = arguments
    anchor_gradients = torch.zeros_like(level), torch.zeros_like(mean)
    # A query that sees no key has level −∞; with +∞ all its weights are 0.
    level = level.masked_fill(level == -torch.inf, torch.inf).unsqueeze(-1)
    base = torch.zeros_like(level) if grad is None else grad.unsqueeze(-1)
    if grad_moment is not None:
        # The mean's part of the bracket is the same for all atoms.
        base = base - (grad_moment * mean).sum(-1, keepdim=True)
    result = torch.zeros_like(eta)
    atoms = max(1, scores_per_tile(TILE_PAIRS, eta.device) // max(1, eta.shape[1] * eta.shape[2]))
    for tile in slices(points.shape[1], atoms):
        key = points[:, tile]
        weights = (eta @ key.mT).sub_(level)
        if log_weight is not None:
            weights += log_weight[:, tile].unsqueeze(-2)
        exp_(weights)
        if grad_moment is None:
            weights *= base
        else:
            weights *= (grad_moment @ values[:, tile].mT).add_(base)
        result += weights @ key
    return result, *anchor_gradients


class _WithMean(torch.autograd.Function):
    """(eta, log Z, mean of the points) ↦ log Z, whose gradient in eta is that mean."""

    generate_vmap_rule = True

    @staticmethod
    def forward(eta: Tensor, log_z: Tensor, mean: Tensor) -> Tensor:
        return log_z.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])
        ctx.save_for_forward(inputs[2])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        return cotangents[0].unsqueeze(-1) * ctx.saved_tensors[0], None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return (tangents[0] * ctx.saved_tensors[0]).sum(-1)


def __dir__() -> list[str]:
    return __all__
