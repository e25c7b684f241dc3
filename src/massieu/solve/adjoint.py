"""Derivatives of a fixed point z* = f(z*, θ): those of the implicit function theorem, or of one step (B12).

dz* = (I − J)⁻¹ ∂_θf dθ with J = ∂_z f at z*. Solving with I − J, or its transpose, is a function with derivatives of its own
that solve again, so that derivatives of all orders are right and no iterate is kept.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from massieu.errors import ConvergenceError
from massieu.foundation.derivatives import forward_derivative, reverse_derivative
from massieu.foundation.transforms import in_functorch, in_nested_forward_mode, some, unwrapped
from massieu.solve.linear import LinearSolver, LinearSolveResult, dense
from massieu.solve.problem import FixedPointProblem
from massieu.solve.status import CONVERGED, names

_ORDERS = 3
"""Orders of derivatives that are right where the theorem's own function cannot be used."""


@dataclass(frozen=True)
class Implicit:
    """What the derivatives of a fixed point need beside tensors."""

    problem: FixedPointProblem
    solver: LinearSolver
    throw: bool
    lost: float = math.nan
    """The derivative of an item that has none: NaN, or 0 where such an item must not end the training of the others."""


def implicit(system: Implicit, value: Tensor, refused: Tensor, leaves: tuple[Tensor, ...]) -> Tensor:
    """`value` with the derivatives of the fixed point in the leaves; NaN for refused items, or what the system says."""
    # Compiled inside a transform, a custom function's backward would be ignored.
    if in_nested_forward_mode() or (torch.compiler.is_compiling() and in_functorch()):
        return _chord(system, value, refused, leaves)
    function = _Implicit if torch.compiler.is_compiling() else _ImplicitForwardMode
    return function.apply(system, value, refused, *leaves)


def one_step(problem: FixedPointProblem, value: Tensor, leaves: tuple[Tensor, ...]) -> Tensor:
    """`value` with the derivatives that f has with respect to the leaves at a constant z."""
    image = problem(value, *leaves)
    return value + (image - image.detach())


class _Implicit(torch.autograd.Function):
    """(system, z*, refused, *leaves) ↦ z*."""

    generate_vmap_rule = True

    @staticmethod
    def forward(system: Implicit, value: Tensor, refused: Tensor, *leaves: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.system, _, refused, *leaves = inputs
        ctx.save_for_backward(output, refused, *leaves)
        ctx.save_for_forward(output, refused, *leaves)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        value, refused, *leaves = ctx.saved_tensors
        solved = _solve(ctx.system, True, cotangents[0], value, refused, leaves)
        value = _harmless(ctx.system, value, refused)
        image = partial(ctx.system.problem, value)
        return None, None, None, *reverse_derivative(image, leaves, solved, ctx.needs_input_grad[3:])


class _ImplicitForwardMode(_Implicit):
    """With a rule for forward mode, which `torch.compile` does not take."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        value, refused, *leaves = ctx.saved_tensors
        value = _harmless(ctx.system, value, refused)
        moved = forward_derivative(partial(ctx.system.problem, value), leaves, tangents[3:])
        return _solve(ctx.system, False, moved, value, refused, leaves)


class _Solve(torch.autograd.Function):
    """(system, transposed, right, z, refused, *leaves) ↦ (I − J)⁻¹ right, or (I − Jᵀ)⁻¹ right."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        system: Implicit, transposed: bool, right: Tensor, value: Tensor, refused: Tensor, *leaves: Tensor
    ) -> Tensor:
        return _solution(system, transposed, right, value, refused, leaves)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.system, ctx.transposed, _, value, refused, *leaves = inputs
        ctx.save_for_backward(output, value, refused, *leaves)
        ctx.save_for_forward(output, value, refused, *leaves)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        solution, value, refused, *leaves = ctx.saved_tensors
        value = _harmless(ctx.system, value, refused)
        other = _solve(ctx.system, not ctx.transposed, cotangents[0], value, refused, leaves)
        # The derivatives of ⟨left, J right⟩ in z and the leaves.
        left, right = (solution, other) if ctx.transposed else (other, solution)
        wanted = ctx.needs_input_grad[3], *ctx.needs_input_grad[5:]
        product = _product(ctx.system.problem, left, True)
        share, *shares = reverse_derivative(product, [value, *leaves], right, wanted)
        return None, None, other, share, None, *shares

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        solution, value, refused, *leaves = ctx.saved_tensors
        value = _harmless(ctx.system, value, refused)
        product = _product(ctx.system.problem, solution, ctx.transposed)
        right = forward_derivative(product, [value, *leaves], (tangents[3], *tangents[5:]))
        if tangents[2] is not None:
            right = right + tangents[2]
        return _solve(ctx.system, ctx.transposed, right, value, refused, leaves)


def _solve(
    system: Implicit, transposed: bool, right: Tensor, value: Tensor, refused: Tensor, leaves: list[Tensor]
) -> Tensor:
    if torch.compiler.is_compiling():
        # A compiled function is differentiated once.
        return _solution(system, transposed, right, value, refused, leaves)
    return _Solve.apply(system, transposed, right, value, refused, *leaves)


def _solution(system: Implicit, transposed: bool, right: Tensor, value: Tensor, refused: Tensor, leaves: Any) -> Tensor:
    used, value = (right != 0).any(-1), _harmless(system, value, refused)

    def product(vector: Tensor, value: Tensor, *leaves: Tensor) -> Tensor:
        return vector - _product(system.problem, vector, transposed)(value, *leaves)

    with torch.no_grad():
        asked = torch.where(refused.unsqueeze(-1), 0.0, right)
        found = system.solver.solve(product, asked, (value, *leaves))
        failed = found.status != CONVERGED
        if system.throw and some(failed):
            raise ConvergenceError(_reason(found))
        return torch.where(((failed | refused) & used).unsqueeze(-1), system.lost, found.value)


def _harmless(system: Implicit, value: Tensor, refused: Tensor) -> Tensor:
    """The state, 0 for refused items whose derivative is to be 0: at what is not finite, 0 times a slope would be NaN."""
    return value if math.isnan(system.lost) else torch.where(refused.unsqueeze(-1), 0.0, value)


def _reason(found: LinearSolveResult) -> str:
    status, steps = unwrapped(found.status).flatten(), unwrapped(found.steps).flatten()
    failed = status != CONVERGED
    residual = float(unwrapped(found.residual).flatten().expand_as(status)[failed].amax())
    return (
        f"the linear system of the implicit derivative was not solved for {int(failed.sum())} of {failed.numel()} items "
        f"({names(status[failed])} after {int(steps.max())} products, residual {residual:.3g}): I − J is singular or "
        "nearly so at the fixed point, or, for conjugate gradients, not symmetric positive definite; try "
        "linear_solver='gmres', GMRES(memory=100), a looser rtol, or float64"
    )


def _product(problem: FixedPointProblem, vector: Tensor, transposed: bool) -> Callable[..., Tensor]:
    """(z, *leaves) ↦ Jᵀ vector, or J vector, for which no forward mode is needed."""

    def product(value: Tensor, *leaves: Tensor) -> Any:
        def function(z: Tensor) -> Tensor:
            return problem(z, *leaves)

        if transposed:
            return reverse_derivative(function, [value], vector)[0]
        return forward_derivative(function, [value], [vector])

    return product


def _chord(system: Implicit, value: Tensor, refused: Tensor, leaves: tuple[Tensor, ...]) -> Tensor:
    """The same by plain operations, n² numbers for each item: steps of the chord method at the solution.

    Each makes one more order of derivatives right; what rounding left of the equation stays.
    """
    with torch.no_grad():
        end = value.detach()
        value = _harmless(system, end, refused)
        constants = [leaf.detach() for leaf in leaves]
        matrix = dense(lambda vector: vector - _product(system.problem, vector, False)(value, *constants), value)
        inverse = torch.linalg.inv_ex(matrix).inverse
        lost = refused | ~inverse.isfinite().all((-2, -1))
        inverse = torch.where(lost[..., None, None], system.lost, inverse).detach()
        left = (system.problem(value, *constants) - value).detach()
    for _ in range(_ORDERS):
        missing = system.problem(value, *leaves) - value - left
        value = value + (inverse @ missing.unsqueeze(-1)).squeeze(-1)
    return value if math.isnan(system.lost) else value + (end - value).detach()
