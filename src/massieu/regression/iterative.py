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
"""Kernel values in memory at one time."""

_ROUNDINGS = 32
"""A residual below so many roundings of its equation's size is rounding itself."""


def iterative(
    tokens: KeyValuePairs,
    query: Float[Tensor, "B H Q D"],
    method: ConjugateGradients,
    preconditioner_rank: int,
    need_variance: bool,
    throw: bool,
) -> Prediction:
    """All value columns are solved for at once; the variance needs one system for each query.

    Without `throw` the last iterate of a system that has not converged is used, in the derivative too. The error bound is
    the largest distance from the exact output that the remaining residuals allow.
    """
    need_positive(tokens.ridge, "conjugate gradients")
    if isinstance(tokens.kernel, FeatureKernel):
        raise ValueError(
            "conjugate gradients are for kernels without a map of features; method=Cholesky() uses the map"
        )
    logs = tokens.logarithms
    if method.preconditioner is not None or not preconditioner_rank:
        half_preconditioner = _identity
    else:
        half_preconditioner = _half_preconditioner(tokens, preconditioner_rank)
    solver = _SplitConjugateGradients(method, half_preconditioner, logs is not None, throw)
    solved = _solve(solver, tokens, tokens.target)
    solution = solved.value.mT
    output = _predicted(tokens, query, tokens.root.unsqueeze(-1) * solution)
    prior = tokens.kernel.diagonal(query)
    with torch.no_grad():
        # |κᵀA⁻¹r| ≤ ½√κ(q, q)·‖Λ^-½r‖ for A = W^½GW^½ + Λ, as in `low_rank`.
        root_diagonal = tokens.diagonal.clamp(min=torch.finfo(prior.dtype).tiny).sqrt().unsqueeze(-1)
        residual = (tokens.target - _product(tokens, solution)) / root_diagonal
        bound = residual.flatten(2).norm(dim=-1, keepdim=True) * prior.sqrt() / 2
        if logs is not None:
            bound = lifted(bound, logs.half_at(query) - logs.centre)
    convergence = SystemsSolved(solved.status, solved.residual)
    if not need_variance:
        return Prediction(output, None, bound, convergence)
    variance = _variance(replace(solver, graded=False), tokens, query, prior)
    if logs is not None:
        variance = lifted(variance, 2 * logs.half_at(query))
    return Prediction(output, variance, bound, convergence)


def _predicted(
    tokens: KeyValuePairs, query: Tensor, coefficients: Float[Tensor, "B H N E"]
) -> Float[Tensor, "B H Q E"]:
    """κ(q, K)·coefficients."""
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
    """κ(q, q) − κᵀA⁻¹κ, with κ(q, q) = prior, a block of queries at a time."""
    explained = []
    for block in query.split(_rows(tokens.key), 2):
        cross = tokens.root.unsqueeze(-1) * tokens.kernel(tokens.key, block)
        explained.append((cross * _solve(solver, tokens, cross).value.mT).sum(-2))
    return (prior - torch.cat(explained, -1)).clamp(min=0.0)


# --- products --------------------------------------------------------------------------------------------------------


def _rows(key: Tensor) -> int:
    """Rows of the Gram matrices of all heads that make up a block."""
    batch, heads, length, _ = key.shape
    return max(1, BLOCK_PAIRS // max(1, batch * heads * length))


def kernel_product(
    kernel: Kernel, left: Float[Tensor, "B H L D"], right: Float[Tensor, "B H N D"], vectors: Float[Tensor, "B H N C"]
) -> Float[Tensor, "B H L C"]:
    """κ(left, right)·vectors, in memory linear in L and N, the gradient too; second derivatives take memory L×N."""
    leaves, structure = pytree.tree_flatten(kernel)
    return _KernelProduct.apply(structure, left, right, vectors, *leaves)


class _KernelProduct(torch.autograd.Function):
    """Blocks are computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, structure: Any, left: Tensor, right: Tensor, vectors: Tensor, *leaves: Tensor) -> Tensor:
        ctx.structure = structure
        ctx.save_for_backward(left, right, vectors, *leaves)
        kernel = pytree.tree_unflatten(leaves, structure)
        # Allocated at once: results of blocks between their matrices would fragment memory.
        image = vectors.new_empty(*left.shape[:3], vectors.shape[-1])
        for rows, place in zip(left.split(_rows(right), 2), image.split(_rows(right), 2), strict=True):
            place.copy_(kernel(rows, right) @ vectors)
        return image

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        left, *others = ctx.saved_tensors

        def block(rows: Tensor, right: Tensor, vectors: Tensor, *leaves: Tensor) -> Tensor:
            return pytree.tree_unflatten(leaves, ctx.structure)(rows, right) @ vectors

        block_size = _rows(others[0])
        needed = ctx.needs_input_grad[1:]
        # Each row belongs to one block, so that its gradient is there; of the others, gradients add over blocks.
        row_gradients: list[Tensor] = []
        totals: list[Tensor | None] = [None] * len(others)
        for rows, cotangent in zip(left.split(block_size, 2), cotangents[0].split(block_size, 2), strict=True):
            row_gradient, *gradients = lean_reverse_derivative(block, (rows, *others), cotangent, needed)
            if row_gradient is not None:
                row_gradients.append(row_gradient)
            totals = [
                gradient if total is None or gradient is None else total + gradient
                for total, gradient in zip(totals, gradients, strict=True)
            ]
        return None, torch.cat(row_gradients, 2) if row_gradients else None, *totals


def _solve(solver: LinearSolver, tokens: KeyValuePairs, right: Float[Tensor, "B H N C"]) -> LinearSolveResult:
    """A⁻¹ right, one system for each column: (B, H, C, N). The solver raises errors itself."""
    return linear_solve(lambda x, tokens: _product(tokens, x.mT).mT, right.mT, (tokens,), solver=solver, throw=False)


def _product(tokens: KeyValuePairs, vectors: Float[Tensor, "B H N C"]) -> Float[Tensor, "B H N C"]:
    """A·vectors."""
    root = tokens.root.unsqueeze(-1)
    image = root * kernel_product(tokens.kernel, tokens.key, tokens.key, root * vectors)
    return image + tokens.diagonal.unsqueeze(-1) * vectors


# --- the system ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SplitConjugateGradients(LinearSolver):
    """A x = b as HAH y = Hb with x = Hy, until the residual is small relative to each column's norm.

    If `graded`, until it is small relative to each equation's size. If `throw`, a residual that stays above the tolerance is
    a ConvergenceError.
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
        """x for each right side; refined, if `graded`."""

        def image(columns: Tensor) -> Tensor:
            return product(columns, *constants)

        first = self._solve_columns(image, right)
        if self.graded and right.numel():
            return self._refined(image, right, first)
        return first

    def _refined(self, product: Product, right: Tensor, first: LinearSolveResult) -> LinearSolveResult:
        """The first solution, corrected until the residual is small in each equation."""
        # A residual that is small beside the largest equations may be large in equations smaller by powers of ten. So the
        # residual is solved for again until it is small relative to |b| + |A||x| in each (Oettli & Prager 1964). No entry
        # of A is negative, so that |A||x| is A|x|.
        rtol = default_rtol(self.method.rtol, right.dtype)
        last_error = math.inf
        last_norm = math.inf
        solution = first.value
        while True:
            residual = right - product(solution)
            size = right.abs() + product(solution.abs()) + torch.finfo(right.dtype).tiny
            error = (residual.abs() / size).amax().item()
            norm = residual.norm().item()
            if error <= max(rtol, _ROUNDINGS * torch.finfo(right.dtype).eps):
                return first._replace(value=solution)
            if not (error < last_error / 2 or norm < last_norm / 2):
                if not self.throw:
                    worst = (residual.abs() / size).amax(-1)
                    failure = torch.where(worst.isfinite(), int(Status.MAX_STEPS), int(Status.NOT_FINITE))
                    status = torch.where(worst <= rtol, first.status, torch.maximum(failure, first.status))
                    return LinearSolveResult(solution, status, first.steps, worst)
                raise ConvergenceError(
                    f"conjugate gradients left a residual of {error:.1e} of one equation's size, beside others that are "
                    "larger by powers of ten; a larger rtol, float64, or method=Cholesky() may help"
                )
            last_error = error
            last_norm = norm
            solution = solution + self._solve_columns(product, residual).value

    def _solve_columns(self, product: Product, right: Tensor) -> LinearSolveResult:
        """The solution to a residual relative to each column's norm."""

        def half(columns: Tensor) -> Tensor:
            return self.half(columns.mT).mT

        half_right = half(right)
        # In units of its largest entry: a distant query has kernel values with the keys whose squares underflow.
        unit = half_right.abs().amax(-1, keepdim=True)
        unit = torch.where(unit > 0, unit, 1.0)
        half_right = (half_right / unit).contiguous()
        solved = self.method.solve(lambda x: half(product(half(x))), half_right)
        # The norm that the method measures residuals by is that of its preconditioner.
        preconditioned = half_right
        if self.method.preconditioner is not None:
            preconditioned = self.method.preconditioner(half_right)
        norm = (half_right * preconditioned).sum(-1).sqrt()
        failed = solved.status != Status.CONVERGED
        residual = solved.residual / torch.where(norm > 0, norm, 1.0)
        if self.throw and bool(failed.any()):
            raise ConvergenceError(
                f"conjugate gradients left a relative residual of {residual.max().item():.1e} in {int(failed.sum())} of "
                f"{failed.numel()} systems after {int(solved.steps.max())} steps; a larger ridge, a larger rank of the "
                "preconditioner, more max_steps, or method=Cholesky() may help"
            )
        return solved._replace(value=unit * half(solved.value), residual=residual)


def _identity(vectors: Tensor) -> Tensor:
    return vectors


@torch.no_grad()
def _half_preconditioner(tokens: KeyValuePairs, rank: int) -> Callable[[Tensor], Tensor]:
    """H with HAH near λI: (FFᵀ/λ + I)^-½ for A ≈ FFᵀ + λI, as I + F core Fᵀ."""
    _, _, factor = pivoted_cholesky(tokens, rank)
    eigenvalues, basis = torch.linalg.eigh(factor.mT @ factor)
    eigenvalues = eigenvalues.clamp(min=0.0)
    ridge = _typical_ridge(tokens).unsqueeze(-1)
    # (shrinkage − 1)/s for an eigenvalue s of FᵀF and shrinkage = √(λ/(s + λ)), without a division by s, which may be 0.
    core = -1 / ((eigenvalues + ridge) * (1 + (ridge / (eigenvalues + ridge)).sqrt()))
    core = (basis * core.unsqueeze(-2)) @ basis.mT
    return lambda vectors: vectors + factor @ (core @ (factor.mT @ vectors))


def _typical_ridge(tokens: KeyValuePairs) -> Float[Tensor, "B H"]:
    """λ; with `logarithms`, where each key has its own, the geometric mean over visible keys."""
    if tokens.logarithms is None:
        return tokens.ridge
    is_visible = tokens.root > 0
    mean_log = torch.where(is_visible, tokens.diagonal.log(), 0.0).sum(-1) / is_visible.sum(-1).clamp(min=1)
    # Kernel values κ' are at most 1: a ridge below ε is rounding beside them.
    return mean_log.exp().clamp(min=torch.finfo(mean_log.dtype).eps)
