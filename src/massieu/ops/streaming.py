"""Attention over keys that do not fit in memory: a store is read block by block and the results are merged.

The results of `massieu.ops.attention` and `log_partition`, with an `AtomStore` in place of keys and values.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import described, floating, whole_number
from massieu.foundation.derivatives import forward_derivative, reverse_derivative
from massieu.foundation.numerics import exp_
from massieu.foundation.transforms import in_functorch, in_nested_forward_mode, may_be_differentiated, uncompiled
from massieu.ops.attention import AttentionResult
from massieu.ops.attention import attention as block_attention
from massieu.ops.partial import Partial, around, shares
from massieu.ops.shapes import AttentionProblem, Scale, check_problem
from massieu.ops.store import AtomBlock, AtomStore

__all__ = ["attention", "log_partition"]

TILE_PAIRS = 1 << 18
"""Scores at once in a gradient: two float32 buffers of this size fill a 2 MiB second-level cache."""

Progress = Callable[[int, int], None]
"""(keys done, keys in all), called after each block; what it raises ends the work."""


@dataclass(frozen=True)
class _Pass:
    """How a store is gone through."""

    store: AtomStore
    block_size: int
    progress: Progress | None
    values_are_points: bool

    def blocks(self, like: Tensor) -> Iterator[AtomBlock]:
        """Blocks in the dtype and on the device of `like`, with values."""
        done = 0
        for points, values, log_weight in self.store.blocks(self.block_size):
            points = points.to(like)
            values = points if values is None or self.values_are_points else values.to(like)
            yield AtomBlock(points, values, None if log_weight is None else log_weight.to(like))
            done += points.shape[1]
            if self.progress is not None:
                self.progress(done, len(self.store))


@uncompiled
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
        store: points are the keys; values, or the points where it has none; log-weights. Of any dtype: blocks are
            brought to float32 (float64 for a float64 query) and to the query's device.
        scale: as in `massieu.ops.attention`.
        block_size: atoms of one head in memory at a time. More is faster up to some ten thousand.
        progress: called with (atoms done, atoms in all) after each block, in the backward pass too, which goes through
            the store once more.

    Both results have exact gradients with respect to the query and a tensor `scale`, any number of times, forwards
    too, and under `torch.func`: each derivative goes through the store again, with nothing kept but numbers a query
    (forward mode within forward mode keeps some for each block).
    The store's atoms have no gradient. `torch.compile` runs this as it is and compiles what is around it.

    Raises:
        TypeError: the query is not a floating-point tensor, `store` is no `AtomStore`, a scale or progress of another
            type.
        ValueError: shapes do not fit (both are named), a block of no atoms, or a file has changed since the store was opened.
    """
    problem, eta = _prepare(query, store, scale, block_size, progress)
    found = _stream(eta, _Pass(store, block_size, progress, values_are_points=False))
    return AttentionResult(_restore(found.mean, problem).to(query.dtype), _restore(found.log_partition, problem))


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

    Arguments, guarantees and errors are those of `attention`, but that the first gradient needs no further pass: it is
    scale·Σ p_n point_n, found with log Z (S3).
    """
    problem, eta = _prepare(query, store, scale, block_size, progress)
    found = _stream(eta, _Pass(store, block_size, progress, values_are_points=True))
    if may_be_differentiated(eta) and not in_nested_forward_mode():
        return _restore(_WithMean.apply(eta, found.log_partition.detach(), found.mean), problem)  # pyright: ignore
    return _restore(found.log_partition, problem)


def _prepare(
    query: Tensor, store: AtomStore, scale: Scale, block_size: int, progress: Progress | None
) -> tuple[AttentionProblem, Tensor]:
    """The checked problem, and scale·query as (1, Hk, B·G·L, D) in the working dtype."""
    if not isinstance(store, AtomStore):
        raise TypeError(
            f"store must be an AtomStore, got {described(store)}; ops.attention takes keys that are tensors"
        )
    floating("query", query)
    whole_number("block_size", block_size, least=1)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be a function of two numbers or None, got {described(progress)}")
    # One atom a head stands for the store: shapes and types are checked as for keys.
    batch = query.shape[0] if query.ndim else 1
    problem = check_problem(query, query.new_zeros(batch, store.heads, 1, store.size), None, None, scale, False)
    eta = problem.scaled_query()
    return problem, eta.transpose(0, 1).flatten(1, 3).unsqueeze(0)


def _restore(result: Tensor, problem: AttentionProblem) -> Tensor:
    batch, _, group, length, _ = problem.query.shape
    return problem.restore(result.squeeze(0).unflatten(1, (batch, group, length)).transpose(0, 1))


def _stream(eta: Tensor, run: _Pass) -> Partial:
    """The merged result, differentiable in eta."""
    store = run.store
    size = store.size if run.values_are_points else store.value_size
    if len(store) == 0:
        heads = store.heads, 0
        return _part(eta, AtomBlock(eta.new_zeros(*heads, store.size), eta.new_zeros(*heads, size)))
    if in_nested_forward_mode():
        # A custom function has one forward derivative only.
        return reduce(Partial.merge, (_part(eta, block) for block in run.blocks(eta)))
    anchor = Partial.empty(eta.shape[:-1], size, dtype=eta.dtype, device=eta.device)
    with torch.no_grad():
        still = eta.detach()
        for block in run.blocks(eta):
            anchor = anchor.merge(_part(still, block))
    if not may_be_differentiated(eta):
        return anchor
    # The sums of the shares are known: 1 and 0. Their derivatives are sums over the blocks again.
    known = (anchor.log_partition > -torch.inf).to(eta.dtype), torch.zeros_like(anchor.mean)
    weight, moment = _BlockSum.apply(run, _shares, 2, *known, eta, *anchor)  # pyright: ignore
    return around(anchor, weight, moment)


def _part(eta: Tensor, block: AtomBlock) -> Partial:
    points, values, log_weight = (None if part is None else part.unsqueeze(0) for part in block)
    assert points is not None and values is not None
    log_weight = None if log_weight is None else log_weight.unsqueeze(-2)
    return Partial.of(block_attention(eta, points, values, log_weight=log_weight, scale=1.0))


def _shares(block: AtomBlock, eta: Tensor, level: Tensor, mean: Tensor) -> tuple[Tensor, ...]:
    return shares(Partial(level, mean), _part(eta, block))


Term = Callable[..., tuple[Tensor, ...]]


class _BlockSum(torch.autograd.Function):
    """(pass, term, number of known sums, known sums, tensors) ↦ Σ_blocks term(block, *tensors).

    The derivative of a sum over blocks is one too, so this serves every order.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(run: _Pass, term: Term, known: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        if known:
            return tuple(tensor.clone() for tensor in tensors[:known])
        total: tuple[Tensor, ...] | None = None
        for block in run.blocks(tensors[0]):
            found = term(block, *tensors)
            total = found if total is None else tuple(a + b for a, b in zip(total, found, strict=True))
        assert total is not None
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.run, ctx.term, ctx.known, *tensors = inputs
        ctx.save_for_backward(*tensors[ctx.known :])
        ctx.save_for_forward(*tensors[ctx.known :])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        none = (None,) * (3 + ctx.known)
        if all(cotangent is None for cotangent in cotangents):
            return *none, *(None for _ in tensors)
        present = tuple(cotangent is not None for cotangent in cotangents)
        term = partial(_gradients, ctx.term, len(tensors), present)
        given = (cotangent for cotangent in cotangents if cotangent is not None)
        return *none, *_BlockSum.apply(ctx.run, term, 0, *tensors, *given)  # pyright: ignore

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        tensors = ctx.saved_tensors
        filled = (
            torch.zeros_like(tensor) if tangent is None else tangent
            for tensor, tangent in zip(tensors, tangents[3 + ctx.known :], strict=True)
        )
        return _BlockSum.apply(ctx.run, partial(_tangents, ctx.term), 0, *tensors, *filled)  # pyright: ignore


def _gradients(
    term: Term, count: int, present: tuple[bool, ...], block: AtomBlock, *arguments: Tensor
) -> tuple[Tensor, ...]:
    """The vector-Jacobian product of one block's term."""
    given = iter(arguments[count:])
    cotangents = tuple(next(given) if there else None for there in present)
    if term is _shares and not in_functorch():
        eta, level, mean = arguments[:count]
        # The anchor is a constant, whose gradient nobody takes.
        return _share_gradient(block, eta, level, mean, *cotangents), torch.zeros_like(level), torch.zeros_like(mean)
    found = reverse_derivative(partial(term, block), arguments[:count], cotangents)
    return tuple(gradient for gradient in found if gradient is not None)


def _share_gradient(
    block: AtomBlock, eta: Tensor, level: Tensor, mean: Tensor, grad: Tensor | None, grad_moment: Tensor | None
) -> Tensor:
    """Σ_n p_n (grad + grad_moment·(value_n − mean)) point_n with p_n = w_n exp(eta·point_n − level), in tiles.

    Three products, where a fused backward pass after a recomputed forward pass takes seven, four of them for gradients of
    points and values.
    """
    points, values, log_weight = block
    level = level.masked_fill(level == -torch.inf, torch.inf).unsqueeze(-1)
    base = torch.zeros_like(level) if grad is None else grad.unsqueeze(-1)
    if grad_moment is not None:
        base = base - (grad_moment * mean).sum(-1, keepdim=True)
    result = torch.zeros_like(eta)
    atoms = max(1, TILE_PAIRS // max(1, eta.shape[1] * eta.shape[2]))
    for first in range(0, points.shape[1], atoms):
        tile = slice(first, first + atoms)
        key = points[:, tile]
        weights = (eta @ key.mT).sub_(level)
        if log_weight is not None:
            weights += log_weight[:, tile].unsqueeze(-2)
        exp_(weights)
        if grad_moment is None or values is None:
            weights *= base
        else:
            weights *= (grad_moment @ values[:, tile].mT).add_(base)
        result += weights @ key
    return result


def _tangents(term: Term, block: AtomBlock, *arguments: Tensor) -> tuple[Tensor, ...]:
    half = len(arguments) // 2
    return forward_derivative(partial(term, block), arguments[:half], arguments[half:])


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
