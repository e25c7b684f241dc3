"""Derivatives of a fixed point z* = f(z*, θ): those of the implicit function theorem, of one step, or of all (B12).

dz* = (I − J)⁻¹ ∂_θf dθ with J = ∂_z f at z*. Solving with I − J, or its transpose, has derivatives of its own that solve
again, so that derivatives of all orders are right and no iterate is kept.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from massieu.foundation.arguments import choice, flag, instance
from massieu.foundation.derivatives import forward_derivative, lean_reverse_derivative
from massieu.solve.linear import GMRES, SOLVERS, LinearSolver, dense
from massieu.solve.problem import FixedPointProblem
from massieu.solve.status import CONVERGED, MAX_STEPS, FixedPointResult
from massieu.solve.system import LinearSystem, Wording, attach, chord, needs_plain_operations


@dataclass(frozen=True)
class Implicit:
    """Derivatives by the implicit function theorem: of every order, in reverse and forward mode (B12).

    Nothing of the iteration is kept: a linear system with I − ∂f/∂z is solved for each. None flow to the start.

    Attributes:
        solver: Of that system; `ConjugateGradients` declares ∂f/∂z symmetric.
        lost: The derivative of an item that has none: "nan", which cannot be overlooked; or, with ``throw=False``, "zero",
            as if the item were not there, so that a query without a fixed point does not end the training of the others.
        check_attraction: Whether fixed points at which ∂f/∂z has an eigenvalue of modulus ≥ 1 are refused, at up to
            12 evaluations. None: where a derivative may be wanted, and after Newton's method.

    Example:
        >>> import torch
        >>> from massieu.solve import ConjugateGradients, Implicit, fixed_point
        >>> a = torch.tensor([0.5], requires_grad=True)
        >>> symmetric = Implicit(ConjugateGradients())
        >>> z = fixed_point(lambda z, a: a * z + 1, torch.zeros(1), (a,), adjoint=symmetric).value
        >>> round(torch.autograd.grad(z, a)[0].item(), 4)  # of 1/(1 − a)
        4.0
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
    """Derivatives of one step at the fixed point: cheap, with an error of about the Lipschitz constant; none for the start.

    Example:
        >>> import torch
        >>> from massieu.solve import OneStep, fixed_point
        >>> a = torch.tensor([0.5], requires_grad=True)
        >>> z = fixed_point(lambda z, a: a * z + 1, torch.zeros(1), (a,), adjoint=OneStep()).value
        >>> round(torch.autograd.grad(z, a)[0].item(), 4)  # z, where the whole derivative is z/(1 − a) = 4
        2.0
    """


@dataclass(frozen=True)
class Unrolled:
    """Derivatives through all plain iterations, which are kept in memory; the only ones that reach the start.

    Example:
        >>> import torch
        >>> from massieu.solve import Picard, Unrolled, fixed_point
        >>> start, ways = torch.zeros(1, requires_grad=True), {"method": Picard(), "adjoint": Unrolled()}
        >>> z = fixed_point(lambda z: 0.5 * z + 1, start, max_steps=3, throw=False, **ways).value
        >>> z.item(), torch.autograd.grad(z, start)[0].item()
        (1.75, 0.125)
    """


Adjoint = Implicit | OneStep | Unrolled
BY_THEOREM = Implicit()


def one_step(problem: FixedPointProblem, value: Tensor, leaves: tuple[Tensor, ...]) -> Tensor:
    """`value` with the derivatives that f has with respect to the leaves at a constant z."""
    image = problem(value, *leaves)
    return value + (image - image.detach())


def implicit(
    problem: FixedPointProblem, adjoint: Implicit, throw: bool, result: FixedPointResult, leaves: tuple[Tensor, ...]
) -> Tensor:
    """The flat value with the derivatives of the fixed point in the leaves; NaN or 0 for items without one."""
    # An item that ran out of steps keeps its derivative: its state may be near a fixed point.
    refused = (result.status != CONVERGED) & (result.status != MAX_STEPS)
    lost = math.nan if adjoint.lost == "nan" else 0.0
    system = LinearSystem(partial(_transposed_product, problem), adjoint.solver, throw, lost, _WORDING)
    equation = _FixedPointEquation(problem, system, lost)
    value = problem.flat(result.value)
    if needs_plain_operations():
        return equation.by_plain_operations(value, refused, *leaves)
    return attach(equation, value, refused, *leaves)


_WORDING = Wording(
    name="the linear system of the implicit derivative",
    advice="I − J is singular or nearly so at the fixed point, or, for conjugate gradients, not symmetric positive definite; "
    "try Implicit(GMRES(memory=100)), a looser rtol of the solver, or float64",
)


def _transposed_product(problem: FixedPointProblem, vector: Tensor, value: Tensor, *leaves: Tensor) -> Tensor:
    """(I − Jᵀ) vector."""
    (pulled,) = lean_reverse_derivative(lambda z: problem(z, *leaves), [value], vector)
    assert pulled is not None
    return vector - pulled


@dataclass(frozen=True)
class _FixedPointEquation:
    """The equation of a fixed point without its tensors, which are the refused items and the leaves."""

    problem: FixedPointProblem
    system: LinearSystem
    """(I − Jᵀ) u = g; its matrix depends on z and the leaves."""
    lost: float
    """The derivative of an item that has none."""

    def pull(
        self, cotangent: Tensor, value: Tensor, inputs: Sequence[Tensor], wanted: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """(∂_θf)ᵀ(I − Jᵀ)⁻¹g."""
        refused, *leaves = inputs
        value = self._harmless(value, refused)
        adjoint = self._solve(self.system, cotangent, value, refused, leaves)
        return None, *lean_reverse_derivative(partial(self.problem, value), leaves, adjoint, wanted[1:])

    def push(self, tangents: Sequence[Tensor | None], value: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """(I − J)⁻¹∂_θf dθ."""
        refused, *leaves = inputs
        value = self._harmless(value, refused)
        tangent = forward_derivative(partial(self.problem, value), leaves, tangents[1:])
        return self._solve(self.system.transpose, tangent, value, refused, leaves)

    def by_plain_operations(self, end: Tensor, refused: Tensor, *leaves: Tensor) -> Tensor:
        """The value with its derivatives, where no custom function may be used; n² numbers for each item."""
        end = end.detach()
        with torch.no_grad():
            value = self._harmless(end, refused)
            constants = [leaf.detach() for leaf in leaves]
            matrix = dense(lambda vector: self.system.transpose.image(vector, value, *constants), value)
            inverse = torch.linalg.inv_ex(matrix).inverse
            is_lost = refused | ~inverse.isfinite().all((-2, -1))
            inverse = torch.where(is_lost[..., None, None], self.lost, inverse)
        solution = chord(lambda z: self.problem(z, *leaves) - z, value, inverse)
        if math.isnan(self.lost):
            return solution
        # The number of a refused item is its last iterate; only its derivative is 0.
        return solution + (end - solution).detach()

    def _solve(
        self, system: LinearSystem, right: Tensor, value: Tensor, refused: Tensor, leaves: Sequence[Tensor]
    ) -> Tensor:
        """The system's solution; for refused items NaN or 0, and 0 in any case where the right side is 0."""
        is_refused = refused.unsqueeze(-1)
        is_lost = is_refused & (right != 0).any(-1, keepdim=True)
        # The right side 0 has the solution 0 at any matrix, so that refused items cannot fail.
        solution = system.solve(torch.where(is_refused, 0.0, right), [value, *leaves])
        return torch.where(is_lost, self.lost, solution)

    def _harmless(self, value: Tensor, refused: Tensor) -> Tensor:
        """The state, with 0 for refused items if their derivative is to be 0.

        Their state may not be finite, and 0 times a derivative there would be NaN.
        """
        if math.isnan(self.lost):
            return value
        return torch.where(refused.unsqueeze(-1), 0.0, value)
