"""Derivatives of a fixed point z* = f(z*, θ): those of the implicit function theorem, of one step, or of all (B12).

dz* = (I − J)⁻¹ ∂_θf dθ with J = ∂_z f at z*. Solving with I − J, or its transpose, has derivatives of its own that solve
again, so that derivatives of all orders are right and no iterate is kept.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from massieu.foundation.arguments import choice, flag, instance
from massieu.foundation.derivatives import forward_derivative, reverse_derivative
from massieu.solve.linear import GMRES, SOLVERS, LinearSolver, dense
from massieu.solve.problem import FixedPointProblem
from massieu.solve.system import LinearSystem, chord, needs_plain_operations


@dataclass(frozen=True)
class Implicit:
    """Derivatives of the implicit function theorem: of every order, in reverse and forward mode (B12).

    Nothing of the iteration is kept: a linear system with I − ∂f/∂z is solved for each. None flow to the start.

    Attributes:
        solver: Of that system; `ConjugateGradients` declares ∂f/∂z symmetric.
        lost: The derivative of an item that has none: "nan", which cannot be overlooked; or, with ``throw=False``, "zero",
            as if the item were not there, so that a query without a fixed point does not end the training of the others.
        check_attraction: Whether fixed points at which ∂f/∂z has an eigenvalue of modulus ≥ 1 are refused, at up to
            12 evaluations. None: where a derivative may be wanted, and after Newton's method.
    """

    # Not the class itself: `torch.compile` makes no instance of a class that it meets as a default.
    solver: LinearSolver = field(default_factory=lambda: GMRES())
    lost: Literal["nan", "zero"] = "nan"
    check_attraction: bool | None = None

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError for a setting of another kind."""
        instance("solver", self.solver, LinearSolver, SOLVERS)
        choice("lost", self.lost, "nan", "zero")
        if self.check_attraction is not None:
            flag("check_attraction", self.check_attraction)


@dataclass(frozen=True)
class OneStep:
    """Derivatives of the function at a constant z: off by about the Lipschitz constant, but cheap. None to the start."""


@dataclass(frozen=True)
class Unrolled:
    """Derivatives of the plain moves that were made, all of which are kept; the only ones that flow to the start."""


Adjoint = Implicit | OneStep | Unrolled
BY_THEOREM = Implicit()


@dataclass(frozen=True)
class _Equation:
    """What the derivatives of a fixed point need beside tensors."""

    problem: FixedPointProblem
    transposed: LinearSystem
    """(I − Jᵀ) u = g; its matrix depends on z and the leaves."""
    lost: float

    def solve(self, transposed: bool, right: Tensor, value: Tensor, refused: Tensor, leaves: list[Tensor]) -> Tensor:
        """(I − Jᵀ)⁻¹ right, or if `transposed` (I − J)⁻¹ right; what is lost for refused items."""
        without = refused.unsqueeze(-1)
        lost = without & (right != 0).any(-1, keepdim=True)
        found = self.transposed.solve(transposed, torch.where(without, 0.0, right), [value, *leaves])
        return torch.where(lost, self.lost, found)

    def harmless(self, value: Tensor, refused: Tensor) -> Tensor:
        """The state, 0 for refused items whose derivative is to be 0: at what is not finite, 0 times a slope would be NaN."""
        return value if math.isnan(self.lost) else torch.where(refused.unsqueeze(-1), 0.0, value)


def implicit(
    problem: FixedPointProblem,
    adjoint: Implicit,
    throw: bool,
    value: Tensor,
    refused: Tensor,
    leaves: tuple[Tensor, ...],
) -> Tensor:
    """`value` with the derivatives of the fixed point in the leaves; what is lost for refused items."""
    lost = math.nan if adjoint.lost == "nan" else 0.0
    system = LinearSystem(partial(_left, problem), adjoint.solver, throw, lost, _NAME, _ADVICE)
    equation = _Equation(problem, system, lost)
    if needs_plain_operations():
        return _plain(equation, value, refused, leaves)
    function = _Reverse if torch.compiler.is_compiling() else _Forward
    return function.apply(equation, value, refused, *leaves)


def one_step(problem: FixedPointProblem, value: Tensor, leaves: tuple[Tensor, ...]) -> Tensor:
    """`value` with the derivatives that f has with respect to the leaves at a constant z."""
    image = problem(value, *leaves)
    return value + (image - image.detach())


_NAME = "the linear system of the implicit derivative"
_ADVICE = (
    "I − J is singular or nearly so at the fixed point, or, for conjugate gradients, not symmetric positive definite; try "
    "Implicit(GMRES(memory=100)), a looser rtol of the solver, or float64"
)


def _left(problem: FixedPointProblem, vector: Tensor, value: Tensor, *leaves: Tensor) -> Tensor:
    """(I − Jᵀ) vector."""
    pulled = reverse_derivative(lambda z: problem(z, *leaves), [value], vector)[0]
    assert pulled is not None
    return vector - pulled


class _Reverse(torch.autograd.Function):
    """(equation, z*, refused, *leaves) ↦ z*."""

    generate_vmap_rule = True

    @staticmethod
    def forward(equation: _Equation, value: Tensor, refused: Tensor, *leaves: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.equation, _, refused, *leaves = inputs
        ctx.save_for_backward(output, refused, *leaves)
        ctx.save_for_forward(output, refused, *leaves)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        value, refused, *leaves = ctx.saved_tensors
        value = ctx.equation.harmless(value, refused)
        solved = ctx.equation.solve(False, cotangents[0], value, refused, leaves)
        image = partial(ctx.equation.problem, value)
        return None, None, None, *reverse_derivative(image, leaves, solved, ctx.needs_input_grad[3:])


class _Forward(_Reverse):
    """With a rule for forward mode, which `torch.compile` does not take."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        value, refused, *leaves = ctx.saved_tensors
        value = ctx.equation.harmless(value, refused)
        moved = forward_derivative(partial(ctx.equation.problem, value), leaves, tangents[3:])
        return ctx.equation.solve(True, moved, value, refused, leaves)


def _plain(equation: _Equation, end: Tensor, refused: Tensor, leaves: tuple[Tensor, ...]) -> Tensor:
    """The same by plain operations."""
    problem, end = equation.problem, end.detach()
    with torch.no_grad():
        value, constants = equation.harmless(end, refused), [leaf.detach() for leaf in leaves]
        matrix = dense(lambda vector: equation.transposed.image(True, vector, value, *constants), value)
        inverse = torch.linalg.inv_ex(matrix).inverse
        lost = refused | ~inverse.isfinite().all((-2, -1))
        inverse = torch.where(lost[..., None, None], equation.lost, inverse)
    found = chord(lambda z: problem(z, *leaves) - z, value, inverse)
    return found if math.isnan(equation.lost) else found + (end - found).detach()
