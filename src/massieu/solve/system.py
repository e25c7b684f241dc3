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
    derivative_orders,
    in_functorch,
    in_nested_forward_mode,
    may_be_differentiated,
    some,
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
    lost = math.nan if throw and torch.compiler.is_compiling() else None
    system = LinearSystem(problem, solver, throw, lost, _WORDS)
    found = system.solution(right, leaves)
    if not may_be_differentiated(right, *leaves):
        return found
    if not needs_plain_operations():
        return found._replace(value=attach(system, found.value, right, *leaves))
    constants = [leaf.detach() for leaf in leaves]
    inverse = torch.linalg.inv_ex(dense(lambda vector: system.image(vector, *constants), right)).inverse
    return found._replace(value=chord(lambda x: right - system.image(x, *leaves), found.value, inverse))


_WORDS = (
    "the linear system",
    "A is singular or nearly so, or, for conjugate gradients, not symmetric positive definite; try GMRES(memory=100), a "
    "preconditioner, a looser rtol, or float64",
)


@dataclass(frozen=True)
class LinearSystem:
    """What a linear system is beside its tensors, the right side and those that A depends on: dx = A⁻¹(dright − dA x).

    Attributes:
        product: (vector, *leaves) ↦ A vector.
        solver: How it is solved.
        throw: Whether an item that was not solved is an error.
        lost: The value of such an item if it is none, or if it cannot be raised; None for the last iterate.
        words: For the error: the system's name, and what to try.
        transposed: Whether it is Aᵀx = right.
    """

    product: Product
    solver: LinearSolver
    throw: bool
    lost: float | None
    words: tuple[str, str]
    transposed: bool = False

    @property
    def turned(self) -> "LinearSystem":
        """With the transpose."""
        return LinearSystem(self.product, self.solver, self.throw, self.lost, self.words, not self.transposed)

    def image(self, vector: Tensor, *leaves: Tensor) -> Tensor:
        """A vector, or Aᵀ vector."""
        if not self.transposed or self.solver.symmetric:
            return self.product(vector, *leaves)
        # A linear function has the same derivative everywhere.
        pulled = lean_reverse_derivative(lambda x: self.product(x, *leaves), [torch.zeros_like(vector)], vector)[0]
        assert pulled is not None
        return pulled

    def solution(self, right: Tensor, leaves: Sequence[Tensor]) -> LinearSolveResult:
        """Without derivatives."""
        constants = [leaf.detach() for leaf in leaves]
        with torch.no_grad():
            found = self.solver.solve(self.image, right.detach(), constants)
            failed = found.status != CONVERGED
            if self.throw and some(failed):
                raise ConvergenceError(self._reason(found))
            if self.lost is None:
                return found
            return found._replace(value=torch.where(failed.unsqueeze(-1), self.lost, found.value))

    def solve(self, right: Tensor, leaves: Sequence[Tensor]) -> Tensor:
        """With derivatives that solve again, for the rules of equations."""
        value = self.solution(right, leaves).value
        # A compiled function is differentiated once.
        return value if torch.compiler.is_compiling() else attach(self, value, right, *leaves)

    def pull(
        self, cotangent: Tensor, value: Tensor, inputs: Sequence[Tensor], wanted: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Another solve, and the derivatives of −⟨left, A x⟩."""
        leaves, other = inputs[1:], self.turned.solve(cotangent, inputs[1:])
        x, left = (other, value) if self.transposed else (value, other)
        return other, *lean_reverse_derivative(lambda *leaves: self.product(x, *leaves), leaves, -left, wanted[1:])

    def push(self, tangents: Sequence[Tensor | None], value: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """A solve with the same matrix."""
        right, *moving = tangents
        moved = forward_derivative(lambda *leaves: -self.image(value, *leaves), inputs[1:], moving)
        return self.solve(moved if right is None else moved + right, inputs[1:])

    def _reason(self, found: LinearSolveResult) -> str:
        name, advice = self.words
        status, steps = unwrapped(found.status).flatten(), unwrapped(found.steps).flatten()
        failed = status != CONVERGED
        residual = float(unwrapped(found.residual).flatten().expand_as(status)[failed].amax())
        return (
            f"{name} was not solved for {int(failed.sum())} of {failed.numel()} items ({names(status[failed])} after "
            f"{int(steps.max())} products, residual {residual:.3g}): {advice}"
        )


def attach(equation: Any, value: Tensor, *inputs: Tensor) -> Tensor:
    """`value` with the derivatives that an equation gives it in the inputs, of every order: by its `pull` and `push`."""
    return (_Reverse if torch.compiler.is_compiling() else _Forward).apply(equation, value, *inputs)


class _Reverse(torch.autograd.Function):
    """(equation, value, *inputs) ↦ value."""

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


class _Forward(_Reverse):
    """With a rule for forward mode, which `torch.compile` does not take."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        value, *inputs = ctx.saved_tensors
        return ctx.equation.push(tangents[2:], value, inputs)


def needs_plain_operations() -> bool:
    """Whether a custom function's rules would be lost here: compiled inside a transform, or in nested forward mode."""
    return in_nested_forward_mode() or (torch.compiler.is_compiling() and in_functorch())


def chord(missing: Callable[[Tensor], Tensor], value: Tensor, inverse: Tensor) -> Tensor:
    """The solution of missing(x) = 0 with its derivatives, by plain operations and n² numbers for each item.

    Steps of the chord method at the solution: each makes one more order right. What rounding left of the equation stays.
    """
    with torch.no_grad():
        left = missing(value).detach()
    for _ in range(derivative_orders()):
        value = value + (inverse.detach() @ (missing(value) - left).unsqueeze(-1)).squeeze(-1)
    return value
