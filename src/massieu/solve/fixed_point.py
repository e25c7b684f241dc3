"""The one function: where z = f(z, θ), how it was found, and how it depends on θ."""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.errors import ConvergenceError
from massieu.foundation.arguments import choice, described, number, whole_number
from massieu.foundation.transforms import may_be_differentiated, repeat, some, unwrapped
from massieu.solve.adjoint import Implicit, implicit, one_step
from massieu.solve.attraction import PRODUCTS, spectrum
from massieu.solve.linear import GMRES, ConjugateGradients, Dense, LinearSolver
from massieu.solve.methods import METHODS, IterationState, Method, Newton, Picard, Tolerance
from massieu.solve.problem import BoundFunction, FixedPointProblem, pose, refuse_captured
from massieu.solve.status import CONVERGED, DIVERGED, MAX_STEPS, NOT_ATTRACTING, NOT_FINITE, FixedPointResult, Status

Adjoint = Literal["implicit", "one_step", "unrolled"]

_LINEAR: dict[str, LinearSolver] = {"auto": GMRES(), "gmres": GMRES(), "cg": ConjugateGradients(), "dense": Dense()}
_LOST = {"nan": math.nan, "zero": 0.0}


def fixed_point(
    function: Callable[..., Tensor],
    start: Float[Tensor, "*items_item"],
    parameters: tuple[Any, ...] = (),
    *,
    method: Method | Literal["auto", "picard", "anderson", "newton"] = "auto",
    adjoint: Adjoint = "implicit",
    item_dims: int = 1,
    max_steps: int = 200,
    rtol: float | None = None,
    atol: float | None = None,
    damping: float = 1.0,
    linear_solver: LinearSolver | Literal["auto", "gmres", "cg", "dense"] = "auto",
    throw: bool = True,
    lost_derivative: Literal["nan", "zero"] = "nan",
    check_attraction: bool | None = None,
) -> FixedPointResult:
    """Find z with ``function(z, *parameters) = z``, for each item by itself (B12).

    An item has converged where ‖f(z) − z‖₂ ≤ atol + rtol·max(‖z‖₂, ‖f(z)‖₂); from then on it does not change. Items must
    not act on each other in `function`.

    Derivatives with respect to `parameters` are, by `adjoint`:

    * "implicit": those of the implicit function theorem, of every order, in reverse and forward mode; nothing of the
      iteration is kept. A linear system with I − ∂f/∂z is solved for each. None flow to `start`.
    * "one_step": those of `function` at a constant z: off by about the Lipschitz constant, but cheap.
    * "unrolled": those of the plain moves that were made, all of which are kept; the only ones that flow to `start`.

    Inside `torch.compile(fullgraph=True)`, where nothing can be raised, items without a fixed point become NaN if `throw`.
    Compiled inside a `torch.func` transform, or in forward mode within forward mode, derivatives are right to third order
    and need n² numbers for an item of n.

    Args:
        function: ``function(z, *parameters)``, of z's shape and dtype.
        start: Where the iteration begins; half precision is promoted to float32.
        parameters: Tensors, or pytrees of them such as measures; all that `function` needs a gradient for. Half
            precision is promoted too.
        method: How iterates move; "auto" is plain iteration while that contracts fast, acceleration while it is slow.
        adjoint: Where derivatives come from.
        item_dims: How many of the last dimensions are one item.
        max_steps: Moves before giving up, those tried in vain included.
        rtol: None: 1e-10 in float64, 2e-6 in float32.
        atol: None: 1e-12 in float64, 1e-8 in float32.
        damping: γ in (0, 2): a plain move is z + γ(f(z) − z). No fixed point depends on it.
        linear_solver: For the implicit derivative; "auto" is GMRES, "cg" declares ∂f/∂z symmetric.
        throw: Raise where an item has no fixed point or the derivative does not exist. If not: the status tells, the
            value is the last iterate, and its implicit derivative is lost unless the item converged or ran out of steps.
        lost_derivative: "nan", which cannot be overlooked; or, with `throw=False`, "zero": as if the item were not there,
            so that a query without a fixed point does not end the training of the others.
        check_attraction: Whether fixed points at which ∂f/∂z has an eigenvalue of modulus ≥ 1 are refused, at up to
            12 evaluations. None: where an implicit derivative may be wanted, and after Newton's method.

    Raises:
        ConvergenceError: an item did not converge, with its residual and what to try; in the backward pass, the linear
            system was not solved.
        TypeError: an argument is of the wrong kind.
        ValueError: an argument is out of range, `function` changes shape or dtype, or uses a tensor that requires grad
            and is not among the parameters.
    """
    way = _chosen(method, METHODS, Method, "method")
    solver = _chosen(linear_solver, _LINEAR, LinearSolver, "linear_solver")
    _check(adjoint, way, max_steps, damping, rtol=rtol, atol=atol)
    if lost_derivative not in _LOST or (throw and lost_derivative == "zero"):
        raise ValueError(f"lost_derivative must be 'nan', or 'zero' with throw=False, got {lost_derivative!r}")
    problem, flat, leaves = pose(function, start, parameters, item_dims)
    tolerance = _tolerance(rtol, atol, flat.dtype)
    point, constants = flat.detach(), tuple(leaf.detach() for leaf in leaves)
    image = problem(point, *constants)
    if torch.is_grad_enabled():
        refuse_captured(image)
    if adjoint == "unrolled":
        state = _iterate(
            problem, flat, problem(flat, *leaves), leaves, way, tolerance, max_steps, damping, unrolled=True
        )
        return _finish(problem, state, tolerance, max_steps, throw)
    differentiated = may_be_differentiated(*leaves)
    with torch.no_grad():
        state = _iterate(problem, point, image.detach(), constants, way, tolerance, max_steps, damping)
        if check_attraction is None:
            check_attraction = isinstance(way, Newton) or (differentiated and adjoint == "implicit")
        if check_attraction:
            state = _check_attraction(problem, state, constants, damping)
    found = _finish(problem, state, tolerance, max_steps, throw)
    if not differentiated:
        return found
    if adjoint == "one_step":
        value = one_step(problem, problem.flat(found.value), leaves)
    else:
        refused = (found.status != CONVERGED) & (found.status != MAX_STEPS)
        system = Implicit(problem, solver, throw, _LOST[lost_derivative])
        value = implicit(system, problem.flat(found.value), refused, leaves)
    return found._replace(value=problem.shaped(value))


def _iterate(
    problem: FixedPointProblem,
    start: Tensor,
    image: Tensor,
    leaves: tuple[Tensor, ...],
    method: Method,
    tolerance: Tolerance,
    max_steps: int,
    damping: float,
    unrolled: bool = False,
) -> IterationState:
    def step(state: IterationState, *leaves: Tensor) -> IterationState:
        return tolerance.judge(method.advance(BoundFunction(problem, leaves), state, damping))

    begun = tolerance.begin(start, image, method.memory)
    state = repeat(step, begun, lambda state: state.running, max_steps, leaves, unrolled)
    return state._replace(status=torch.where(state.running, MAX_STEPS, state.status))


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
    failed, value = state.status != CONVERGED, state.point
    if throw and torch.compiler.is_compiling():
        value = torch.where(failed.unsqueeze(-1), torch.nan, value)
    size, ratio = state.size.detach(), state.lipschitz_estimate.detach()
    if throw and some(failed):
        raise ConvergenceError(_reason(state, size, ratio, tolerance, max_steps))
    return FixedPointResult(problem.shaped(value), state.status, state.steps, state.evaluations, size, ratio)


def _reason(state: IterationState, size: Tensor, ratio: Tensor, tolerance: Tolerance, max_steps: int) -> str:
    """What went wrong, at the first item of the worst kind, and what to try."""
    needed = tolerance.of(state).detach()
    fields = (state.status, state.steps, size, needed, ratio)
    status, *numbers = (unwrapped(field).expand(unwrapped(size).shape) for field in fields)
    kind = Status(int(status.amax()))
    place = tuple(int(i) for i in (status == kind).nonzero()[0])
    steps, residual, wanted, slope = (float(field[place]) for field in numbers)
    where = f"item {place}" if place else "the item"
    failures = f"{int((status != CONVERGED).sum())} of {status.numel()} items"
    advice = _advice(kind, residual < 100 * wanted, slope)
    return (
        f"no fixed point for {failures}: {where} {_WHAT[kind].format(steps=max_steps)} after {steps:.0f} moves, "
        f"residual {residual:.3g} (needed {wanted:.3g}), Lipschitz constant about {slope:.3g}; {advice}"
    )


_WHAT = {
    MAX_STEPS: "ran out of its {steps} steps",
    DIVERGED: "diverged",
    NOT_FINITE: "met a value that is not finite",
    NOT_ATTRACTING: "came to a saddle, where ∂f/∂z has an eigenvalue of modulus ≥ 1,",
}


def _advice(kind: Status, near: bool, slope: float) -> str:
    if kind == NOT_ATTRACTING:
        return "try another start, damping below 1, or check_attraction=False if the saddle is wanted"
    if kind == MAX_STEPS and near:
        return "it may be rounding: try a looser rtol, float64, or more max_steps"
    if kind == MAX_STEPS and slope < 1:
        return "try more max_steps, or method='anderson' or 'newton'"
    return "try damping below 1, method='anderson' or 'newton', another start, or a map that contracts more"


def _tolerance(rtol: float | None, atol: float | None, dtype: torch.dtype) -> Tolerance:
    exact = dtype == torch.float64
    return Tolerance(
        (1e-10 if exact else 2e-6) if rtol is None else rtol, (1e-12 if exact else 1e-8) if atol is None else atol
    )


def _chosen(given: Any, known: dict[str, Any], kind: type, name: str) -> Any:
    """What a name stands for, or the object given."""
    if isinstance(given, kind):
        return given
    if isinstance(given, str) and given in known:
        return known[given]
    raise ValueError(
        f"{name} must be one of {', '.join(map(repr, known))} or a {kind.__name__}, got {described(given)}"
    )


def _check(adjoint: str, method: Method, max_steps: int, damping: float, **tolerances: float | None) -> None:
    choice("adjoint", adjoint, "implicit", "one_step", "unrolled")
    if adjoint == "unrolled" and not isinstance(method, Picard):
        raise ValueError(f"adjoint='unrolled' differentiates plain moves: it needs method='picard', got {method!r}")
    whole_number("max_steps", max_steps, least=0)
    number("damping", damping, above=0, below=2)
    for name, value in tolerances.items():
        if value is not None:
            number(name, value, least=0)
