"""Conditional mean attention without the Gram matrix: conjugate gradients on products with its rows, a block at a time."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree

from massieu.errors import ConvergenceError
from massieu.foundation.derivatives import lean_reverse_derivative
from massieu.regression.kernels import FeatureKernel, Kernel
from massieu.regression.logarithms import lifted, with_last
from massieu.regression.low_rank import pivoted_cholesky
from massieu.regression.tokens import KeyValuePairs, Prediction, SystemsSolved, need_positive
from massieu.solve import ConjugateGradients, LinearSolver, Status, linear_solve
from massieu.solve.linear import LinearSolveResult, Product, default_rtol

BLOCK_PAIRS = 1 << 18
"""Kernel values that are held at once."""

_ROUNDINGS = 32
"""Of an equation's size: below so many a residual is rounding."""


def iterative(
    tokens: KeyValuePairs,
    query: Float[Tensor, "B H Q D"],
    method: ConjugateGradients,
    preconditioner_rank: int,
    need_variance: bool,
    throw: bool,
) -> Prediction:
    """All value columns are solved for at once; the variance needs a system for each query.

    Without `throw` a system that has not converged has its last iterate, in the derivative too. The bound is what the
    residuals that are left let the output lie from the exact one.
    """
    need_positive(tokens.ridge, "conjugate gradients")
    if isinstance(tokens.kernel, FeatureKernel):
        raise ValueError(
            "conjugate gradients are for kernels without a map of features; method=Cholesky() uses the map"
        )
    own = method.preconditioner is not None or not preconditioner_rank
    logs, half = tokens.logarithms, _same if own else _half_preconditioner(tokens, preconditioner_rank)
    solver = _SplitConjugateGradients(method, half, logs is not None, throw)
    solved = _solve(solver, tokens, tokens.target)
    solution = solved.value.mT
    output = _predicted(tokens, query, tokens.root.unsqueeze(-1) * solution)
    prior = tokens.kernel.diagonal(query)
    with torch.no_grad():
        # |κᵀA⁻¹r| ≤ ½√κ(q, q)·‖Λ^-½r‖ for A = W^½GW^½ + Λ, as in `low_rank`.
        least = tokens.diagonal.clamp(min=torch.finfo(prior.dtype).tiny).sqrt().unsqueeze(-1)
        residual = ((tokens.target - _product(tokens, solution)) / least).flatten(2).norm(dim=-1, keepdim=True)
        bound = residual * prior.sqrt() / 2
        bound = bound if logs is None else lifted(bound, logs.half_at(query) - logs.centre)
    convergence = SystemsSolved(solved.status, solved.residual)
    if not need_variance:
        return Prediction(output, None, bound, convergence)
    variance = _variance(replace(solver, graded=False), tokens, query, prior)
    return Prediction(
        output, variance if logs is None else lifted(variance, 2 * logs.half_at(query)), bound, convergence
    )


def _predicted(
    tokens: KeyValuePairs, query: Tensor, coefficients: Float[Tensor, "B H N E"]
) -> Float[Tensor, "B H Q E"]:
    """κ(q, K) coefficients."""
    logs = tokens.logarithms
    if logs is None:
        return kernel_product(tokens.kernel, query, tokens.key, coefficients)
    with torch.no_grad():
        largest = torch.cat([logs.pairs(rows, tokens.key)[1] for rows in query.split(_rows(tokens.key), 2)], 2)
    image = kernel_product(
        logs.as_kernel(), with_last(query, largest), logs.keys(tokens.key), logs.coefficients(coefficients)
    )
    return lifted(image, largest.unsqueeze(-1))


def _variance(solver: LinearSolver, tokens: KeyValuePairs, query: Tensor, prior: Tensor) -> Float[Tensor, "B H Q"]:
    found = []
    for asked in query.split(_rows(tokens.key), 2):
        cross = tokens.root.unsqueeze(-1) * tokens.kernel(tokens.key, asked)
        found.append((cross * _solve(solver, tokens, cross).value.mT).sum(-2))
    return (prior - torch.cat(found, -1)).clamp(min=0.0)


# --- products --------------------------------------------------------------------------------------------------------


def _rows(key: Tensor) -> int:
    batch, heads, length, _ = key.shape
    return max(1, BLOCK_PAIRS // max(1, batch * heads * length))


def kernel_product(
    kernel: Kernel, left: Float[Tensor, "B H L D"], right: Float[Tensor, "B H N D"], vectors: Float[Tensor, "B H N C"]
) -> Float[Tensor, "B H L C"]:
    """κ(left, right) vectors, in memory linear in L and N, the gradient too; second derivatives take memory L×N."""
    leaves, structure = pytree.tree_flatten(kernel)
    return _KernelProduct.apply(structure, left, right, vectors, *leaves)


class _KernelProduct(torch.autograd.Function):
    """Blocks are computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, structure: Any, left: Tensor, right: Tensor, vectors: Tensor, *leaves: Tensor) -> Tensor:
        ctx.structure = structure
        ctx.save_for_backward(left, right, vectors, *leaves)
        kernel = pytree.tree_unflatten(leaves, structure)
        # Room taken at once: blocks' results between their matrices would scatter memory.
        image = vectors.new_empty(*left.shape[:3], vectors.shape[-1])
        for rows, place in zip(left.split(_rows(right), 2), image.split(_rows(right), 2), strict=True):
            place.copy_(kernel(rows, right) @ vectors)
        return image

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        left, *others = ctx.saved_tensors

        def block(rows: Tensor, right: Tensor, vectors: Tensor, *leaves: Tensor) -> Tensor:
            return pytree.tree_unflatten(leaves, ctx.structure)(rows, right) @ vectors

        size, needed = _rows(others[0]), ctx.needs_input_grad[1:]
        pieces: list[Tensor] = []
        totals: list[Tensor | None] = [None] * len(others)
        for rows, cotangent in zip(left.split(size, 2), cotangents[0].split(size, 2), strict=True):
            piece, *slopes = lean_reverse_derivative(block, (rows, *others), cotangent, needed)
            pieces += [] if piece is None else [piece]
            totals = [
                slope if total is None or slope is None else total + slope
                for total, slope in zip(totals, slopes, strict=True)
            ]
        return None, torch.cat(pieces, 2) if pieces else None, *totals


def _solve(solver: LinearSolver, tokens: KeyValuePairs, right: Float[Tensor, "B H N C"]) -> LinearSolveResult:
    """A⁻¹ right, a system for each column: (B, H, C, N). The solver raises itself."""
    return linear_solve(lambda x, tokens: _product(tokens, x.mT).mT, right.mT, (tokens,), solver=solver, throw=False)


def _product(tokens: KeyValuePairs, vectors: Float[Tensor, "B H N C"]) -> Float[Tensor, "B H N C"]:
    """A vectors."""
    root = tokens.root.unsqueeze(-1)
    image = root * kernel_product(tokens.kernel, tokens.key, tokens.key, root * vectors)
    return image + tokens.diagonal.unsqueeze(-1) * vectors


# --- the system ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SplitConjugateGradients(LinearSolver):
    """A x = b as HAH y = Hb with x = Hy: to a residual of each column's norm; if graded, of each equation's own size.

    Raises ConvergenceError where a residual stays above its tolerance, if `throw`. Residuals are relative.
    """

    symmetric: ClassVar[bool] = True
    method: ConjugateGradients
    half: Callable[[Tensor], Tensor]
    """H, the root of a preconditioner: rounding costs the square root of what it costs in a product with H²."""
    graded: bool
    throw: bool

    def solve(
        self, product: Product, right: Float[Tensor, "B H C N"], constants: Sequence[Tensor] = ()
    ) -> LinearSolveResult:
        """Refined where equations differ by powers of ten."""

        def image(columns: Tensor) -> Tensor:
            return product(columns, *constants)

        found = self._columns(image, right)
        return self._refined(image, right, found) if self.graded and right.numel() else found

    def _refined(self, product: Product, right: Tensor, found: LinearSolveResult) -> LinearSolveResult:
        # A residual small beside the largest equations says nothing of those that are smaller by tens of powers of ten:
        # what is left is solved for anew until it is small in each equation (Oettli & Prager 1964). No entry of A is negative.
        rtol = default_rtol(self.method.rtol, right.dtype)
        last, solution = (math.inf, math.inf), found.value
        while True:
            left = right - product(solution)
            size = right.abs() + product(solution.abs()) + torch.finfo(right.dtype).tiny
            error, norm = (left.abs() / size).amax().item(), left.norm().item()
            if error <= max(rtol, _ROUNDINGS * torch.finfo(right.dtype).eps):
                return found._replace(value=solution)
            if not (error < last[0] / 2 or norm < last[1] / 2):
                if not self.throw:
                    worst = (left.abs() / size).amax(-1)
                    lost = torch.where(worst.isfinite(), int(Status.MAX_STEPS), int(Status.NOT_FINITE))
                    status = torch.where(worst <= rtol, found.status, torch.maximum(lost, found.status))
                    return LinearSolveResult(solution, status, found.steps, worst)
                raise ConvergenceError(
                    f"conjugate gradients left a residual of {error:.1e} of one equation's size, beside others that are "
                    "larger by powers of ten; a larger rtol, float64, or method=Cholesky() may help"
                )
            last, solution = (error, norm), solution + self._columns(product, left).value

    def _columns(self, product: Product, right: Tensor) -> LinearSolveResult:
        def half(columns: Tensor) -> Tensor:
            return self.half(columns.mT).mT

        start = half(right)
        # In units of its own: squares of what a distant query has in common with the keys underflow.
        unit = start.abs().amax(-1, keepdim=True)
        unit = torch.where(unit > 0, unit, 1.0)
        start = (start / unit).contiguous()
        found = self.method.solve(lambda x: half(product(half(x))), start)
        near = start if self.method.preconditioner is None else self.method.preconditioner(start)
        norm = (start * near).sum(-1).sqrt()
        failed = found.status != Status.CONVERGED
        residual = found.residual / torch.where(norm > 0, norm, 1.0)
        if self.throw and bool(failed.any()):
            raise ConvergenceError(
                f"conjugate gradients left a relative residual of {residual.max().item():.1e} in {int(failed.sum())} of "
                f"{failed.numel()} systems after {int(found.steps.max())} steps; a larger ridge, a larger rank of the "
                "preconditioner, more max_steps, or method=Cholesky() may help"
            )
        return found._replace(value=unit * half(found.value), residual=residual)


def _same(vectors: Tensor) -> Tensor:
    return vectors


@torch.no_grad()
def _half_preconditioner(tokens: KeyValuePairs, rank: int) -> Callable[[Tensor], Tensor]:
    """H with HAH near λI: (FFᵀ/λ + I)^-½ for A ≈ FFᵀ + λI, as I + F core Fᵀ."""
    *_, factor = pivoted_cholesky(tokens, rank)
    squares, basis = torch.linalg.eigh(factor.mT @ factor)
    squares, ridge = squares.clamp(min=0.0), _typical(tokens).unsqueeze(-1)
    # (shrunk − 1)/squares for shrunk = √(λ/(squares + λ)), without the division by what may be 0.
    core = -1 / ((squares + ridge) * (1 + (ridge / (squares + ridge)).sqrt()))
    core = (basis * core.unsqueeze(-2)) @ basis.mT
    return lambda vectors: vectors + factor @ (core @ (factor.mT @ vectors))


def _typical(tokens: KeyValuePairs) -> Float[Tensor, "B H"]:
    """λ, or the geometric mean over visible keys where each has its own."""
    visible = tokens.root > 0
    mean = torch.where(visible, tokens.diagonal.log(), 0.0).sum(-1) / visible.sum(-1).clamp(min=1)
    # A ridge that the dtype does not hold beside the Gram matrix is rounding there.
    return mean.exp().clamp(min=torch.finfo(mean.dtype).eps) if tokens.logarithms is not None else tokens.ridge
