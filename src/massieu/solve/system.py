"""The one differentiable linear solve, of which derivatives solve again: with the same matrix, or its transpose."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.errors import ConvergenceError
from massieu.foundation.arguments import instance
from massieu.foundation.derivatives import forward_derivative, reverse_derivative
from massieu.foundation.transforms import in_functorch, in_nested_forward_mode, may_be_differentiated, some, unwrapped
from massieu.solve.linear import ANY_MATRIX, SOLVERS, LinearSolver, LinearSolveResult, Product, dense
from massieu.solve.problem import pose, refuse_captured
from massieu.solve.status import CONVERGED, names

_ORDERS = 3
"""Orders of derivatives that are right where a custom function cannot be used."""


def linear_solve(
    product: Callable[..., Tensor],
    right: Float[Tensor, "*items n"],
    parameters: tuple[Any, ...] = (),
    *,
    solver: LinearSolver = ANY_MATRIX,
    throw: bool = True,
) -> LinearSolveResult:
    """Solve A x = right, where ``product(x, *parameters)`` is A x, for each item by itself.

    x is differentiable in `right` and in `parameters`, to any order, in reverse and forward mode. A derivative is one more
    solve, with A or its transpose, and nothing of the iteration is kept. The transpose's products are derivatives of `product`;
    symmetric solvers use `product` itself.

    Inside `torch.compile(fullgraph=True)`, where nothing can be raised, items that were not solved become NaN if `throw`, and
    a result is differentiated once. Compiled inside a `torch.func` transform, or in forward mode within forward mode,
    derivatives are right to third order and need n² numbers for an item of n.

    Args:
        product: Linear in its first argument, of whose shape and dtype it returns a tensor. Items must not act on each other.
        right: One right side for each item; half precision is promoted to float32.
        parameters: Tensors, or pytrees of them such as measures; all that `product` needs a gradient for. Half precision is
            promoted too.
        solver: How: `GMRES` for any A, `ConjugateGradients` for symmetric positive definite A, `Dense` for small items. Its
            tolerance holds for the systems of derivatives too.
        throw: Raise where an item was not solved. If not, `status` tells, and the last iterate is used in derivatives too.

    Raises:
        ConvergenceError: an item was not solved, with its residual and what to try; also in the backward pass.
        TypeError: an argument is of the wrong kind.
        ValueError: `right` has no dimension, or `product` changes shape or dtype, or uses a tensor that requires grad and is
            not among the parameters.
    """
    instance("solver", solver, LinearSolver, SOLVERS)
    problem, right, leaves = pose(product, right, parameters, 1, ("product", "right"))
    if torch.is_grad_enabled():
        refuse_captured(problem(torch.zeros_like(right).detach(), *(leaf.detach() for leaf in leaves)), "product")
    lost = math.nan if throw and torch.compiler.is_compiling() else None
    system = LinearSystem(problem, solver, throw, lost, "the linear system", _ADVICE)
    found = system.solution(False, right, leaves)
    return found._replace(value=_attached(system, found.value, right, leaves))


_ADVICE = (
    "A is singular or nearly so, or, for conjugate gradients, not symmetric positive definite; try GMRES(memory=100), a "
    "preconditioner, a looser rtol, or float64"
)


@dataclass(frozen=True)
class LinearSystem:
    """What a linear system is beside tensors.

    Attributes:
        product: (vector, *leaves) ↦ A vector, for the tensors that A depends on.
        solver: How it is solved.
        throw: Whether an item that was not solved is an error.
        lost: The value of such an item if it is none, or if it cannot be raised; None for the last iterate.
        name, advice: For the error.
    """

    product: Product
    solver: LinearSolver
    throw: bool
    lost: float | None
    name: str
    advice: str

    def image(self, transposed: bool, vector: Tensor, *leaves: Tensor) -> Tensor:
        """A vector, or Aᵀ vector."""
        if not transposed or self.solver.symmetric:
            return self.product(vector, *leaves)
        # A linear function has the same derivative everywhere.
        pulled = reverse_derivative(lambda x: self.product(x, *leaves), [torch.zeros_like(vector)], vector)[0]
        assert pulled is not None
        return pulled

    def solution(self, transposed: bool, right: Tensor, leaves: Sequence[Tensor]) -> LinearSolveResult:
        """Without derivatives."""
        constants = [leaf.detach() for leaf in leaves]
        with torch.no_grad():
            found = self.solver.solve(lambda x, *leaves: self.image(transposed, x, *leaves), right.detach(), constants)
            failed = found.status != CONVERGED
            if self.throw and some(failed):
                raise ConvergenceError(self._reason(found))
            if self.lost is None:
                return found
            return found._replace(value=torch.where(failed.unsqueeze(-1), self.lost, found.value))

    def solve(self, transposed: bool, right: Tensor, leaves: Sequence[Tensor]) -> Tensor:
        """With derivatives that solve again, for the rules of custom functions."""
        value = self.solution(transposed, right, leaves).value
        # A compiled function is differentiated once.
        return value if torch.compiler.is_compiling() else _Forward.apply(self, transposed, value, right, *leaves)

    def _reason(self, found: LinearSolveResult) -> str:
        status, steps = unwrapped(found.status).flatten(), unwrapped(found.steps).flatten()
        failed = status != CONVERGED
        residual = float(unwrapped(found.residual).flatten().expand_as(status)[failed].amax())
        return (
            f"{self.name} was not solved for {int(failed.sum())} of {failed.numel()} items ({names(status[failed])} after "
            f"{int(steps.max())} products, residual {residual:.3g}): {self.advice}"
        )


def _attached(system: LinearSystem, value: Tensor, right: Tensor, leaves: tuple[Tensor, ...]) -> Tensor:
    """The solution with its derivatives."""
    if not may_be_differentiated(right, *leaves):
        return value
    if needs_plain_operations():
        constants = [leaf.detach() for leaf in leaves]
        matrix = dense(lambda vector: system.image(False, vector, *constants), value)
        return chord(lambda x: right - system.image(False, x, *leaves), value, torch.linalg.inv_ex(matrix).inverse)
    function = _Reverse if torch.compiler.is_compiling() else _Forward
    return function.apply(system, False, value, right, *leaves)


class _Reverse(torch.autograd.Function):
    """(system, transposed, x, right, *leaves) ↦ x, where A x = right or Aᵀx = right: dx = A⁻¹(dright − dA x)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(system: LinearSystem, transposed: bool, value: Tensor, right: Tensor, *leaves: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.system, ctx.transposed, _, _, *leaves = inputs
        ctx.save_for_backward(output, *leaves)
        ctx.save_for_forward(output, *leaves)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        value, *leaves = ctx.saved_tensors
        other = ctx.system.solve(not ctx.transposed, cotangents[0], leaves)
        # The derivatives of −⟨left, A x⟩.
        x, left = (other, value) if ctx.transposed else (value, other)
        product = ctx.system.product
        wanted = ctx.needs_input_grad[4:]
        shares = reverse_derivative(lambda *leaves: product(x, *leaves), leaves, -left, wanted)
        return None, None, None, other, *shares


class _Forward(_Reverse):
    """With a rule for forward mode, which `torch.compile` does not take."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        value, *leaves = ctx.saved_tensors
        moved = forward_derivative(
            lambda *leaves: -ctx.system.image(ctx.transposed, value, *leaves), leaves, tangents[4:]
        )
        right = moved if tangents[3] is None else moved + tangents[3]
        return ctx.system.solve(ctx.transposed, right, leaves)


def needs_plain_operations() -> bool:
    """Whether a custom function's rules would be lost here: compiled inside a transform, or in nested forward mode."""
    return in_nested_forward_mode() or (torch.compiler.is_compiling() and in_functorch())


def chord(missing: Callable[[Tensor], Tensor], value: Tensor, inverse: Tensor) -> Tensor:
    """The solution of missing(x) = 0 with its derivatives, by plain operations and n² numbers for each item.

    Steps of the chord method at the solution: each makes one more order right. What rounding left of the equation stays.
    """
    with torch.no_grad():
        left = missing(value).detach()
    for _ in range(_ORDERS):
        value = value + (inverse.detach() @ (missing(value) - left).unsqueeze(-1)).squeeze(-1)
    return value
