"""The one function: where z = f(z, θ), how it was found, and how it depends on θ."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.errors import ConvergenceError
from massieu.foundation.arguments import described, instance, number, whole_number
from massieu.foundation.doors import door, function
from massieu.foundation.listening import unreadable
from massieu.foundation.transforms import any_true, may_be_differentiated, repeat, unwrapped
from massieu.solve.adjoint import BY_THEOREM, Adjoint, Implicit, OneStep, Unrolled, implicit, one_step
from massieu.solve.attraction import PRODUCTS, spectrum
from massieu.solve.methods import AS_IT_PAYS, IterationState, Method, Newton, Picard, Tolerance, default_tolerance
from massieu.solve.problem import BoundFunction, FixedPointProblem, pose, refuse_captured
from massieu.solve.status import CONVERGED, DIVERGED, MAX_STEPS, NOT_ATTRACTING, NOT_FINITE, FixedPointResult, Status


@door(function=function)
@unreadable(
    "it attends inside massieu.solve.fixed_point, where the number of steps follows from the data", attends=False
)
def fixed_point(
    function: Callable[..., Tensor],
    start: Float[Tensor, "*items_item"],
    parameters: tuple[Any, ...] = (),
    *,
    method: Method = AS_IT_PAYS,
    adjoint: Adjoint = BY_THEOREM,
    item_dims: int = 1,
    max_steps: int = 200,
    rtol: float | None = None,
    atol: float | None = None,
    throw: bool = True,
) -> FixedPointResult:
    """Find z with ``function(z, *parameters) = z``, for each item by itself (B12).

    An item has converged where ‖f(z) − z‖₂ ≤ atol + rtol·max(‖z‖₂, ‖f(z)‖₂); from then on it does not change. Items must
    not act on each other in `function`.

    Inside `torch.compile(fullgraph=True)`, where nothing can be raised, items without a fixed point become NaN if `throw`.
    Compiled inside a `torch.func` transform, derivatives are right to third order. There, and in forward mode within
    forward mode, they need n² numbers for an item of n.

    Args:
        function: ``function(z, *parameters)``, of z's shape and dtype.
        start: Where the iteration begins; half precision is promoted to float32.
        parameters: Tensors, or pytrees of them such as measures; all that `function` needs a gradient for. Half
            precision is promoted too.
        method: How iterates move: `Auto`, `Picard`, `Anderson` or `Newton`, with the damping of plain moves.
        adjoint: Where derivatives come from: `Implicit`, `OneStep` or, with `Picard`, `Unrolled`.
        item_dims: How many of the last dimensions are one item.
        max_steps: Moves before giving up, those tried in vain included.
        rtol: None: 1e-10 in float64, 2e-6 in float32.
        atol: None: 1e-12 in float64, 1e-8 in float32.
        throw: Raise where an item has no fixed point or the derivative does not exist. If not: the status tells, the
            value is the last iterate, and its implicit derivative is lost unless the item converged or ran out of steps.

    Raises:
        ConvergenceError: an item did not converge, with its residual and what to try; in the backward pass, the linear
            system was not solved.
        TypeError: an argument is of the wrong kind.
        ValueError: an argument is out of range, `function` changes shape or dtype, or uses a tensor that requires grad
            and is not among the parameters.

    Example:
        >>> import torch
        >>> from massieu.solve import fixed_point
        >>> a = torch.tensor([0.5], requires_grad=True)
        >>> z = fixed_point(lambda z, a: a * z + 1, torch.zeros(1), (a,)).value  # 1/(1 − a)
        >>> z.sum().backward()
        >>> round(z.item(), 4), round(a.grad.item(), 4)
        (2.0, 4.0)
    """
    instance("method", method, Method, "a Method, such as Auto(), Picard(), Anderson() or Newton()")
    _check(method, adjoint, max_steps, throw, rtol=rtol, atol=atol)
    problem, flat, leaves = pose(function, start, parameters, item_dims)
    tolerance = _tolerance(rtol, atol, flat.dtype)
    point = flat.detach()
    constants = tuple(leaf.detach() for leaf in leaves)
    image = problem(point, *constants)
    if torch.is_grad_enabled():
        # The arguments are detached, so that a derivative of the image can only come from a captured tensor.
        refuse_captured(image)

    def step(state: IterationState, *leaves: Tensor) -> IterationState:
        return tolerance.judge(method.advance(BoundFunction(problem, leaves), state))

    def iterate(begun: IterationState, leaves: tuple[Tensor, ...], differentiable: bool) -> IterationState:
        state = repeat(step, begun, lambda state: state.running, max_steps, leaves, differentiable)
        return state._replace(status=torch.where(state.running, MAX_STEPS, state.status))

    if isinstance(adjoint, Unrolled):
        begun = tolerance.begin(flat, problem(flat, *leaves), method.memory)
        state = iterate(begun, leaves, differentiable=True)
        return _finish(problem, state, tolerance, max_steps, throw)
    is_differentiated = may_be_differentiated(*leaves)
    with torch.no_grad():
        begun = tolerance.begin(point, image.detach(), method.memory)
        state = iterate(begun, constants, differentiable=False)
        if _attraction_is_checked(method, adjoint, is_differentiated):
            state = _check_attraction(problem, state, constants, method.share)
    result = _finish(problem, state, tolerance, max_steps, throw)
    if not is_differentiated:
        return result
    # The value is the iteration's; only its derivatives come from the adjoint.
    if isinstance(adjoint, OneStep):
        value = one_step(problem, problem.flat(result.value), leaves)
    else:
        value = implicit(problem, adjoint, throw, result, leaves)
    return result._replace(value=problem.shaped(value))


def _attraction_is_checked(method: Method, adjoint: Adjoint, is_differentiated: bool) -> bool:
    """Whether saddles are refused: what the user says, else after Newton's method and where the theorem gives derivatives."""
    if isinstance(adjoint, Implicit) and adjoint.check_attraction is not None:
        return adjoint.check_attraction
    return isinstance(method, Newton) or (is_differentiated and isinstance(adjoint, Implicit))


def _check_attraction(
    problem: FixedPointProblem, state: IterationState, leaves: tuple[Tensor, ...], damping: float
) -> IterationState:
    """Refuse the fixed points of which an eigenvalue of modulus ≥ 1 is proven, beyond what differences leave open."""
    proven = spectrum(BoundFunction(problem, leaves), state.point, state.image, PRODUCTS, damping).proven
    bound = 1 + 4 * torch.finfo(state.point.dtype).eps ** 0.5
    refused = (state.status == CONVERGED) & (proven >= bound)
    return state._replace(
        status=torch.where(refused, NOT_ATTRACTING, state.status),
        evaluations=state.evaluations + min(PRODUCTS, state.point.shape[-1]),
    )


def _finish(
    problem: FixedPointProblem, state: IterationState, tolerance: Tolerance, max_steps: int, throw: bool
) -> FixedPointResult:
    """The result, or an error."""
    failed = state.status != CONVERGED
    value = state.point
    if throw and torch.compiler.is_compiling():
        # Compiled code cannot raise.
        value = torch.where(failed.unsqueeze(-1), torch.nan, value)
    residual = state.residual_norm.detach()
    lipschitz_estimate = state.lipschitz_estimate.detach()
    if throw and any_true(failed):
        raise ConvergenceError(_reason(state, residual, lipschitz_estimate, tolerance, max_steps))
    return FixedPointResult(
        value=problem.shaped(value),
        status=state.status,
        steps=state.steps,
        evaluations=state.evaluations,
        residual=residual,
        lipschitz_estimate=lipschitz_estimate,
    )


def _reason(
    state: IterationState, residuals: Tensor, lipschitz_estimates: Tensor, tolerance: Tolerance, max_steps: int
) -> str:
    """What went wrong, at the first item of the worst kind, and what to try."""
    # Within `vmap` a field that is the same for all items lacks their dimension.
    shape = unwrapped(residuals).shape
    status = unwrapped(state.status).expand(shape)
    kind = Status(int(status.amax()))
    place = tuple((status == kind).nonzero()[0].tolist())

    def at_place(field: Tensor) -> float:
        return float(unwrapped(field).expand(shape)[place])

    residual = at_place(residuals)
    needed = at_place(tolerance.of(state).detach())
    lipschitz = at_place(lipschitz_estimates)
    where = f"item {place}" if place else "the item"
    what = _WHAT_HAPPENED[kind].format(steps=max_steps)
    failures = f"{int((status != CONVERGED).sum())} of {status.numel()} items"
    advice = _advice(kind, is_near=residual < 100 * needed, lipschitz=lipschitz)
    return (
        f"no fixed point for {failures}: {where} {what} after {at_place(state.steps):.0f} moves, "
        f"residual {residual:.3g} (needed {needed:.3g}), Lipschitz constant about {lipschitz:.3g}; {advice}"
    )


_WHAT_HAPPENED = {
    MAX_STEPS: "ran out of its {steps} steps",
    DIVERGED: "diverged",
    NOT_FINITE: "met a value that is not finite",
    NOT_ATTRACTING: "came to a saddle, where ∂f/∂z has an eigenvalue of modulus ≥ 1,",
}


def _advice(kind: Status, is_near: bool, lipschitz: float) -> str:
    """What to try, where the iteration ended near a fixed point or not."""
    if kind == NOT_ATTRACTING:
        return (
            "try another start, a method's damping below 1, or Implicit(check_attraction=False) if the saddle is wanted"
        )
    if kind == MAX_STEPS and is_near:
        return "it may be rounding: try a looser rtol, float64, or more max_steps"
    if kind == MAX_STEPS and lipschitz < 1:
        return "try more max_steps, or method=Anderson() or Newton()"
    return "try Auto(damping=0.5), Newton(), another start, or a map that contracts more"


def _tolerance(rtol: float | None, atol: float | None, dtype: torch.dtype) -> Tolerance:
    default = default_tolerance(dtype)
    return Tolerance(
        relative=default.relative if rtol is None else rtol,
        absolute=default.absolute if atol is None else atol,
    )


def _check(method: Method, adjoint: Adjoint, max_steps: int, throw: bool, **tolerances: float | None) -> None:
    if not isinstance(adjoint, Implicit | OneStep | Unrolled):
        raise TypeError(f"adjoint must be Implicit(), OneStep() or Unrolled(), got {described(adjoint)}")
    if isinstance(adjoint, Unrolled) and not isinstance(method, Picard):
        raise ValueError(f"Unrolled() differentiates plain moves: it needs method=Picard(), got {method!r}")
    if isinstance(adjoint, Implicit) and throw and adjoint.lost == "zero":
        raise ValueError("Implicit(lost='zero') needs throw=False")
    whole_number("max_steps", max_steps, least=0)
    for name, value in tolerances.items():
        if value is not None:
            number(name, value, least=0)
