"""The one differentiable linear solve, of which derivatives solve again: with the same matrix, or its transpose."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.errors import ConvergenceError
from massieu.foundation.arguments import floating, instance
from massieu.foundation.derivatives import forward_derivative, lean_reverse_derivative
from massieu.foundation.doors import door
from massieu.foundation.transforms import (
    any_true,
    derivative_orders,
    in_functorch,
    in_nested_forward_mode,
    may_be_differentiated,
    unwrapped,
)
from massieu.solve.linear import ANY_MATRIX, SOLVERS, LinearSolver, LinearSolveResult, Product, dense
from massieu.solve.problem import pose, refuse_captured
from massieu.solve.status import CONVERGED, names


@door(solver=None)  # its own sentence names the solvers
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
    a result is differentiated once. Compiled inside a `torch.func` transform, derivatives are right to third order. There, and
    in forward mode within forward mode, they need n² numbers for an item of n.

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

    Example:
        >>> import torch
        >>> from massieu.solve import linear_solve
        >>> a = torch.tensor([2.0, 4.0], requires_grad=True)
        >>> x = linear_solve(lambda x, a: a * x, torch.ones(2), (a,)).value
        >>> x.sum().backward()
        >>> x.detach().round(decimals=4).tolist(), a.grad.round(decimals=4).tolist()  # 1/a and −1/a²
        ([0.5, 0.25], [-0.25, -0.0625])
    """
    instance("solver", solver, LinearSolver, SOLVERS)
    if floating("right", right).ndim == 0:
        raise ValueError("right must have shape (*items, n), got a number")
    problem, right, leaves = pose(product, right, parameters, 1, ("product", "right"))
    if torch.is_grad_enabled():
        refuse_captured(problem(torch.zeros_like(right).detach(), *(leaf.detach() for leaf in leaves)), "product")
    # Compiled code cannot raise.
    lost = math.nan if throw and torch.compiler.is_compiling() else None
    system = LinearSystem(problem, solver, throw, lost, _WORDING)
    result = system.solution(right, leaves)
    if not may_be_differentiated(right, *leaves):
        return result
    if not needs_plain_operations():
        return result._replace(value=attach(system, result.value, right, *leaves))
    constants = [leaf.detach() for leaf in leaves]
    matrix = dense(lambda vector: system.image(vector, *constants), right)
    inverse = torch.linalg.inv_ex(matrix).inverse
    return result._replace(value=chord(lambda x: right - system.image(x, *leaves), result.value, inverse))


@dataclass(frozen=True)
class Wording:
    """What the error of a system that was not solved says."""

    name: str
    """Of the system."""
    advice: str
    """What may be wrong, and what to try."""


_WORDING = Wording(
    name="the linear system",
    advice="A is singular or nearly so, or, for conjugate gradients, not symmetric positive definite; try "
    "GMRES(memory=100), a preconditioner, a looser rtol, or float64",
)


@dataclass(frozen=True)
class LinearSystem:
    """A linear system A x = right without its tensors, which are the right side and those that A depends on.

    Its derivatives are dx = A⁻¹(dright − dA x), another solve.

    Attributes:
        product: (vector, *leaves) ↦ A vector.
        solver: How it is solved.
        throw: Whether an item that was not solved raises an error.
        lost: The value of an item that was not solved, where nothing is raised; None: its last iterate.
        wording: For the error.
        transposed: Whether the system is Aᵀx = right.
    """

    product: Product
    solver: LinearSolver
    throw: bool
    lost: float | None
    wording: Wording
    transposed: bool = False

    @property
    def transpose(self) -> "LinearSystem":
        """The system with the transposed matrix."""
        # Not `dataclasses.replace`, which compiled code would have to trace.
        return LinearSystem(self.product, self.solver, self.throw, self.lost, self.wording, not self.transposed)

    def image(self, vector: Tensor, *leaves: Tensor) -> Tensor:
        """The product A vector, or Aᵀ vector if the system is transposed."""
        if not self.transposed or self.solver.symmetric:
            return self.product(vector, *leaves)
        # Aᵀ is the reverse derivative of x ↦ A x, which is the same at every x, as the function is linear.
        (image,) = lean_reverse_derivative(lambda x: self.product(x, *leaves), [torch.zeros_like(vector)], vector)
        assert image is not None
        return image

    def solution(self, right: Tensor, leaves: Sequence[Tensor]) -> LinearSolveResult:
        """The solution without derivatives.

        Raises:
            ConvergenceError: an item was not solved, and `throw` is set.
        """
        constants = [leaf.detach() for leaf in leaves]
        with torch.no_grad():
            result = self.solver.solve(self.image, right.detach(), constants)
            failed = result.status != CONVERGED
            if self.throw and any_true(failed):
                raise ConvergenceError(self._reason(result))
            if self.lost is None:
                return result
            return result._replace(value=torch.where(failed.unsqueeze(-1), self.lost, result.value))

    def solve(self, right: Tensor, leaves: Sequence[Tensor]) -> Tensor:
        """The solution's value with derivatives that solve again: for use inside `pull` and `push`."""
        value = self.solution(right, leaves).value
        # A compiled function is differentiated once.
        return value if torch.compiler.is_compiling() else attach(self, value, right, *leaves)

    def pull(
        self, cotangent: Tensor, value: Tensor, inputs: Sequence[Tensor], wanted: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """The cotangents of the right side and of the leaves, the tensors on which the matrix depends.

        For A x = right that of the right side is u = A⁻ᵀ cotangent, and those of the leaves are the derivatives of −⟨u, A x⟩.
        For Aᵀx = right it is u = A⁻¹ cotangent. There ⟨u, Aᵀx⟩ is ⟨x, A u⟩, so that only products with A are differentiated.
        """
        leaves = inputs[1:]
        u = self.transpose.solve(cotangent, leaves)
        if self.transposed:
            multiplied, other = u, value
        else:
            multiplied, other = value, u
        of_leaves = lean_reverse_derivative(
            lambda *leaves: self.product(multiplied, *leaves), leaves, -other, wanted[1:]
        )
        return u, *of_leaves

    def push(self, tangents: Sequence[Tensor | None], value: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """The tangent A⁻¹(dright − dA x): a solve with the same matrix."""
        of_right, *of_leaves = tangents
        leaves = inputs[1:]
        tangent = forward_derivative(lambda *leaves: -self.image(value, *leaves), leaves, of_leaves)
        if of_right is not None:
            tangent = tangent + of_right
        return self.solve(tangent, leaves)

    def _reason(self, result: LinearSolveResult) -> str:
        """The sentence of the error: how many items failed, in which ways, and what to try."""
        status = unwrapped(result.status).flatten()
        steps = unwrapped(result.steps).flatten()
        failed = status != CONVERGED
        # Within `vmap` a residual that is the same for all items lacks their dimension.
        residual = float(unwrapped(result.residual).flatten().expand_as(status)[failed].amax())
        return (
            f"{self.wording.name} was not solved for {int(failed.sum())} of {failed.numel()} items "
            f"({names(status[failed])} after {int(steps.max())} products, residual {residual:.3g}): {self.wording.advice}"
        )


def attach(equation: Any, value: Tensor, *inputs: Tensor) -> Tensor:
    """`value` with the derivatives in the inputs that an equation gives it, of every order, by its `pull` and `push`.

    Args:
        equation: Has ``pull(cotangent, value, inputs, wanted)`` and ``push(tangents, value, inputs)``.
        value: The equation's solution, which is returned as it is.
        inputs: What the solution depends on.
    """
    rule = _ReverseRule if torch.compiler.is_compiling() else _ReverseAndForwardRule
    return rule.apply(equation, value, *inputs)


class _ReverseRule(torch.autograd.Function):
    """(equation, value, *inputs) ↦ value, whose reverse derivative is the equation's `pull`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(equation: Any, value: Tensor, *inputs: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.equation, _, *rest = inputs
        ctx.save_for_backward(output, *rest)
        ctx.save_for_forward(output, *rest)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        value, *inputs = ctx.saved_tensors
        return None, None, *ctx.equation.pull(cotangents[0], value, inputs, ctx.needs_input_grad[2:])


class _ReverseAndForwardRule(_ReverseRule):
    """With a rule for forward mode, which `torch.compile` does not take."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        value, *inputs = ctx.saved_tensors
        return ctx.equation.push(tangents[2:], value, inputs)


def needs_plain_operations() -> bool:
    """Whether a custom function's rules would be ignored here: compiled inside a transform, or in nested forward mode."""
    return in_nested_forward_mode() or (torch.compiler.is_compiling() and in_functorch())


def chord(missing: Callable[[Tensor], Tensor], value: Tensor, inverse: Tensor) -> Tensor:
    """The solution of missing(x) = 0 with its derivatives, by plain operations and n² numbers for each item.

    Steps of the chord method at the solution, x ← x + inverse·missing(x): each makes the derivatives of one more order right.

    Args:
        missing: How much is missing of the equation at x.
        value: The solution.
        inverse: Of minus the Jacobian of `missing` at the solution.
    """
    with torch.no_grad():
        # What rounding left of the equation is taken out, so that the value itself does not move.
        rounding = missing(value).detach()
    for _ in range(derivative_orders()):
        value = value + (inverse.detach() @ (missing(value) - rounding).unsqueeze(-1)).squeeze(-1)
    return value
