"""Linear systems known by their products with vectors, each item on its own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from massieu.foundation.arguments import check_dense, described, number, whole_number
from massieu.foundation.doors import door
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.transforms import repeat
from massieu.solve.status import CONVERGED, MAX_STEPS, NOT_FINITE, RUNNING, SINGULAR

Product = Callable[..., Tensor]


class LinearSolveResult(NamedTuple):
    """The solution of a linear system, and how it came about; all but `value` have one number for each item.

    Attributes:
        value: x.
        status: Of `Status`: CONVERGED, MAX_STEPS, SINGULAR or NOT_FINITE.
        steps: Products until the item stopped.
        residual: ‖right − A x‖₂, as the recurrences of the method have it; √(xᵀMx) is the norm with a preconditioner M.
    """

    value: Float[Tensor, "*items n"]
    status: Int[Tensor, "*items"]
    steps: Int[Tensor, "*items"]
    residual: Float[Tensor, "*items"]

    __repr__ = fields_repr
    _repr_html_ = fields_html


class LinearSolver(ABC):
    """Base class of linear solvers, which `linear_solve` and implicit derivatives use.

    Example:
        >>> import torch
        >>> from massieu.solve import LinearSolver, linear_solve
        >>> from massieu.solve.linear import LinearSolveResult
        >>> class Diagonal(LinearSolver):  # a solver of one's own
        ...     def solve(self, product, right, constants=()):
        ...         diagonal, none = product(torch.ones_like(right), *constants), 0 * right[..., 0]
        ...         return LinearSolveResult(right / diagonal, none.long(), none.long() + 1, none)
        >>> linear_solve(lambda x: 2 * x, torch.ones(2), solver=Diagonal()).value.tolist()
        [0.5, 0.5]
    """

    symmetric: ClassVar[bool] = False
    """Whether choosing it declares A symmetric: the transpose's products are then A's own."""

    @abstractmethod
    def solve(
        self, product: Product, right: Float[Tensor, "*items n"], constants: Sequence[Tensor] = ()
    ) -> LinearSolveResult:
        """Solve A x = right from x = 0, where ``product(x, *constants)`` is A x, without derivatives and checks.

        Compiled, `product` may use no other tensors than `constants`.
        """


@door
@dataclass(frozen=True)
class ConjugateGradients(LinearSolver):
    """Conjugate gradients, for A that you declare symmetric positive definite by this choice (Hestenes & Stiefel 1952).

    Attributes:
        rtol: Of right's norm, for the residual; None: 1e-10 in float64, 1e-6 in float32.
        max_steps: None: twice the size of an item, at least 50.
        preconditioner: ``preconditioner(x, *constants)`` is M x, with M symmetric positive definite and near A⁻¹ but for a
            factor: the nearer, the fewer steps. Both norms above are then √(xᵀMx).

    Example:
        >>> import torch
        >>> from massieu.solve import ConjugateGradients, linear_solve
        >>> diagonal = torch.tensor([1.0, 10.0, 100.0])
        >>> inverse = ConjugateGradients(preconditioner=lambda x: x / diagonal)  # the exact one: one step
        >>> linear_solve(lambda x: diagonal * x, diagonal, solver=inverse).steps.item()
        1
    """

    symmetric: ClassVar[bool] = True
    rtol: float | None = None
    max_steps: int | None = None
    preconditioner: Product | None = None

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError for a number out of its range."""
        check_settings(self.rtol, max_steps=self.max_steps)

    def solve(
        self, product: Product, right: Float[Tensor, "*items n"], constants: Sequence[Tensor] = ()
    ) -> LinearSolveResult:
        """Solve A x = right; status SINGULAR at a direction of no or negative curvature, with the x before it."""
        rtol = default_rtol(self.rtol, right.dtype)
        limit = max(2 * right.shape[-1], 50) if self.max_steps is None else self.max_steps
        # At x = 0 the residual is the right side, and M times it the first direction.
        direction = self._preconditioned(right, constants)
        square = (right * direction).sum(-1)
        norm = square.sqrt()
        target = rtol * norm
        begun = _ConjugateState(
            value=torch.zeros_like(right),
            residual=right,
            direction=direction,
            square=square,
            length=square,
            steepest=torch.zeros_like(square),
            status=_first_status(norm, target),
            steps=torch.zeros_like(square, dtype=torch.int64),
            target=target,
        )

        def step(state: _ConjugateState, *constants: Tensor) -> _ConjugateState:
            return self._step(product, state, constants)

        end = repeat(step, begun, lambda state: state.status == RUNNING, limit, constants)
        return LinearSolveResult(end.value, _last_status(end.status), end.steps, end.square.sqrt())

    def _step(self, product: Product, state: "_ConjugateState", constants: Sequence[Tensor]) -> "_ConjugateState":
        """One step along the direction, and the next direction; items that have stopped keep what they have."""
        image = product(state.direction, *constants)
        curvature = (state.direction * image).sum(-1)
        running = state.status == RUNNING
        steepest = torch.maximum(state.steepest, curvature / state.length)
        # Curvature is positive beyond the rounding of the steepest direction's.
        rounding = 16 * torch.finfo(curvature.dtype).eps * steepest * state.length
        good = running & (curvature > rounding)
        step = torch.where(good, state.square / curvature, 0.0).unsqueeze(-1)
        residual = state.residual - step * torch.where(good.unsqueeze(-1), image, 0.0)
        preconditioned = self._preconditioned(residual, constants)
        square = torch.where(good, (residual * preconditioned).sum(-1), state.square)
        # The next direction is conjugate to all before it (Fletcher and Reeves' coefficient).
        coefficient = torch.where(good, square / state.square, 0.0)
        direction = preconditioned + coefficient.unsqueeze(-1) * state.direction
        length = square + coefficient.square() * state.length
        failure = torch.where(curvature.isfinite(), SINGULAR, NOT_FINITE)
        status = torch.where(running & ~good, failure, state.status)
        status = torch.where(good & (square.sqrt() <= state.target), CONVERGED, status)
        return _ConjugateState(
            value=state.value + step * state.direction,
            residual=residual,
            direction=torch.where(good.unsqueeze(-1), direction, state.direction),
            square=square,
            length=torch.where(good, length, state.length),
            steepest=steepest,
            status=status,
            steps=state.steps + running.long(),
            target=state.target,
        )

    def _preconditioned(self, vector: Tensor, constants: Sequence[Tensor]) -> Tensor:
        """M vector; raises TypeError or ValueError if the preconditioner does not return a vector like the one it is given."""
        if self.preconditioner is None:
            return vector
        image = self.preconditioner(vector, *constants)
        if not isinstance(image, Tensor):
            raise TypeError(f"preconditioner must return a vector like the one it is given, got {described(image)}")
        check_dense("preconditioner's value", image)
        if (image.shape, image.dtype, image.is_meta) != (vector.shape, vector.dtype, vector.is_meta):
            needed = f"{tuple(vector.shape)} of {vector.dtype} on {vector.device}"
            returned = f"{tuple(image.shape)} of {image.dtype} on {image.device}"
            raise ValueError(f"preconditioner must return a vector like the one it is given, {needed}, got {returned}")
        return image


@door
@dataclass(frozen=True)
class GMRES(LinearSolver):
    """Restarted GMRES, for any A (Saad & Schultz 1986).

    Attributes:
        rtol: Of ‖right‖, for the residual; None: 1e-10 in float64, 1e-6 in float32.
        memory: Vectors kept before a restart, for each item. None: 100, taken as they are needed, or in compiled code,
            which takes all room at once, 30.
        cycles: Restarts, the first included.

    Example:
        >>> import torch
        >>> from massieu.solve import GMRES, linear_solve
        >>> found = linear_solve(lambda x: 2 * x.flip(-1), torch.tensor([2.0, 4.0]), solver=GMRES(memory=10))
        >>> found.value.round(decimals=4).tolist()
        [2.0, 1.0]
    """

    rtol: float | None = None
    memory: int | None = None
    cycles: int = 10

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError for a number out of its range."""
        check_settings(self.rtol, memory=self.memory, cycles=self.cycles)

    def solve(
        self, product: Product, right: Float[Tensor, "*items n"], constants: Sequence[Tensor] = ()
    ) -> LinearSolveResult:
        """Solve A x = right; status SINGULAR where the Krylov space ends before the residual does."""
        norm = right.norm(dim=-1)
        target = default_rtol(self.rtol, right.dtype) * norm
        start = LinearSolveResult(
            value=torch.zeros_like(right),
            status=_first_status(norm, target),
            steps=torch.zeros_like(norm, dtype=torch.int64),
            residual=norm,
        )
        # At x = 0 the residual is the right side, which the first cycle need not compute.
        solution = self._cycle(product, right, start, target, constants)

        def restart(state: LinearSolveResult, right: Tensor, target: Tensor, *constants: Tensor) -> LinearSolveResult:
            running = state.status == RUNNING
            # Computed anew: the recurrences of the last cycle have gathered rounding.
            residual = right - product(state.value, *constants)
            norm = torch.where(running, residual.norm(dim=-1), state.residual)
            state = state._replace(residual=norm, steps=state.steps + running.long())
            return self._cycle(product, residual, state, target, constants)

        solution = repeat(
            restart, solution, lambda state: state.status == RUNNING, self.cycles - 1, (right, target, *constants)
        )
        return solution._replace(status=_last_status(solution.status))

    def _cycle(
        self, product: Product, residual: Tensor, state: LinearSolveResult, target: Tensor, constants: Sequence[Tensor]
    ) -> LinearSolveResult:
        """The state after one more Krylov space, which begins with its residual."""
        memory = self.memory
        if memory is None:
            memory = 30 if torch.compiler.is_compiling() else 100
        memory = min(memory, residual.shape[-1])
        # Tensors of a loop in a compiled graph cannot grow, so that their full length is taken at once.
        start = _begin_cycle(residual, state, target, memory if torch.compiler.is_compiling() else 0)

        def step(state: _Cycle, *constants: Tensor) -> _Cycle:
            return _gmres_step(product, state, constants)

        end = repeat(step, start, lambda state: state.status == RUNNING, memory, constants)
        weights = torch.linalg.solve_triangular(end.triangle, end.projected.unsqueeze(-1), upper=True)
        value = state.value + (end.basis[..., :-1, :].mT @ weights).squeeze(-1)
        return LinearSolveResult(value, end.status, end.steps, end.residual_norm.abs())


@dataclass(frozen=True)
class Dense(LinearSolver):
    """Builds the matrix and factorises it by LU: n products and n² numbers for each item. For small items.

    Example:
        >>> import torch
        >>> from massieu.solve import Dense, linear_solve
        >>> linear_solve(lambda x: 2 * x.flip(-1), torch.tensor([2.0, 4.0]), solver=Dense()).value.tolist()
        [2.0, 1.0]
    """

    def solve(
        self, product: Product, right: Float[Tensor, "*items n"], constants: Sequence[Tensor] = ()
    ) -> LinearSolveResult:
        """Solve A x = right; status SINGULAR where LU meets a pivot of 0."""
        matrix = dense(lambda vector: product(vector, *constants), right)
        solution = torch.linalg.solve_ex(matrix, right.unsqueeze(-1))
        value = solution.result.squeeze(-1)
        # LAPACK's info is the place of a pivot that is exactly 0, and 0 if there is none.
        is_singular = solution.info != 0
        status = torch.where(is_singular, SINGULAR, CONVERGED)
        status = torch.where(is_singular | value.isfinite().all(-1), status, NOT_FINITE)
        residual = (right - (matrix @ value.unsqueeze(-1)).squeeze(-1)).norm(dim=-1)
        return LinearSolveResult(value, status, torch.full_like(status, right.shape[-1]), residual)


def dense(product: Product, like: Float[Tensor, "*items n"]) -> Float[Tensor, "*items n n"]:
    """The matrix of each item's product, from the images of the unit vectors."""
    size = like.shape[-1]
    basis = torch.eye(size, dtype=like.dtype, device=like.device).reshape(size, *[1] * (like.ndim - 1), size)
    return torch.func.vmap(product, out_dims=-1)(basis.expand(size, *like.shape))


def check_settings(rtol: float | None, **counts: int | None) -> None:
    """Raises TypeError or ValueError if a solver's tolerance or one of its numbers of steps is out of its range."""
    if rtol is not None:
        number("rtol", rtol, above=0)
    for name, count in counts.items():
        if count is not None:
            whole_number(name, count, least=1)


def default_rtol(rtol: float | None, dtype: torch.dtype) -> float:
    """The relative tolerance that was given; without one 1e-10 in float64, else 1e-6."""
    if rtol is not None:
        return rtol
    return 1e-10 if dtype == torch.float64 else 1e-6


ANY_MATRIX = GMRES()
SOLVERS = "a LinearSolver, such as GMRES(), ConjugateGradients() or Dense()"


class _ConjugateState(NamedTuple):
    """Conjugate gradients under way; all but the vectors have one number for each item."""

    value: Tensor
    residual: Tensor
    direction: Tensor
    square: Tensor  # ‖residual‖², in the preconditioner's norm
    length: Tensor  # ‖direction‖², in that of its inverse
    steepest: Tensor  # the largest xᵀAx/‖x‖² so far
    status: Tensor
    steps: Tensor
    target: Tensor


class _Cycle(NamedTuple):
    """A Krylov basis in the making, and the least-squares problem in it, triangular by rotations."""

    basis: Tensor  # (*items, memory + 1, n), rows orthonormal or zero
    triangle: Tensor  # (*items, memory, memory), the identity in columns to come
    rotation: Tensor  # the product of all rotations, (*items, memory + 1, memory + 1)
    projected: Tensor  # the rotated right side, (*items, memory)
    residual_norm: Tensor  # with the sign that the rotations give it
    turn: Tensor  # which column is next
    status: Tensor
    steps: Tensor
    target: Tensor


def _begin_cycle(residual: Tensor, state: LinearSolveResult, target: Tensor, memory: int) -> _Cycle:
    """A Krylov space with its first vector and `memory` more to come."""
    items = state.residual.shape
    identity = torch.eye(memory + 1, dtype=residual.dtype, device=residual.device).expand(*items, -1, -1)
    return _Cycle(
        basis=krylov(residual, memory + 1),
        triangle=identity[..., :-1, :-1],
        rotation=identity,
        projected=torch.zeros_like(state.residual).unsqueeze(-1).expand(*items, memory),
        residual_norm=state.residual,
        turn=torch.zeros((), dtype=torch.int64, device=residual.device),
        status=state.status,
        steps=state.steps,
        target=target,
    )


def _with_room(state: _Cycle) -> _Cycle:
    """The state with room for one more basis vector and column: zeros, and 1 on the diagonals."""
    last = torch.arange(state.basis.shape[-2] + 1, device=state.basis.device) == state.basis.shape[-2]
    corner = (last.unsqueeze(-1) & last).to(state.basis.dtype)
    return state._replace(
        basis=pad(state.basis, (0, 0, 0, 1)),
        triangle=pad(state.triangle, (0, 1, 0, 1)) + corner[1:, 1:],
        rotation=pad(state.rotation, (0, 1, 0, 1)) + corner,
        projected=pad(state.projected, (0, 1)),
    )


def krylov(first: Tensor, length: int) -> Tensor:
    """Room for a basis of so many vectors, with the first in it, or 0 if that is 0."""
    size = first.norm(dim=-1, keepdim=True)
    unit = (first * torch.where(size > 0, 1 / size, 0.0)).unsqueeze(-2)
    return torch.cat([unit, torch.zeros_like(unit).expand(*unit.shape[:-2], length - 1, -1)], -2)


def _gmres_step(product: Product, state: _Cycle, constants: Sequence[Tensor]) -> _Cycle:
    """One more basis vector, one more column of the triangle. Both are written by masks: a compiled loop knows no index."""
    state = state if torch.compiler.is_compiling() else _with_room(state)
    places = torch.arange(state.basis.shape[-2], device=state.basis.device)
    here = (places == state.turn).to(state.basis.dtype)
    after = (places == state.turn + 1).to(state.basis.dtype)
    image = product(here @ state.basis, *constants)
    vector, column, length = orthogonalise(state.basis, image)
    column = column + length.unsqueeze(-1) * after
    column = (state.rotation @ column.unsqueeze(-1)).squeeze(-1)

    # The rotation of two rows that makes the entry below the diagonal zero.
    top = column @ here
    below = column @ after
    radius = torch.hypot(top, below)
    usable = radius > torch.finfo(radius.dtype).eps * image.norm(dim=-1)
    cosine = torch.where(usable, top / radius, 1.0).unsqueeze(-1)
    sine = torch.where(usable, below / radius, 0.0).unsqueeze(-1)
    upper = here @ state.rotation
    lower = after @ state.rotation
    rotation = state.rotation + here.unsqueeze(-1) * (cosine * upper + sine * lower - upper).unsqueeze(-2)
    rotation = rotation + after.unsqueeze(-1) * (cosine * lower - sine * upper - lower).unsqueeze(-2)
    column = column + (radius - top).unsqueeze(-1) * here - below.unsqueeze(-1) * after

    # Columns of items that stopped stay those of the identity, and their right side 0.
    running = state.status == RUNNING
    good = running & usable & radius.isfinite()
    column = torch.where(good.unsqueeze(-1), column, here)[..., :-1]
    share = torch.where(good, cosine.squeeze(-1) * state.residual_norm, 0.0).unsqueeze(-1)
    # What the rotated right side leaves below the triangle is the residual's norm.
    residual_norm = torch.where(good, -sine.squeeze(-1) * state.residual_norm, state.residual_norm)
    failure = torch.where(radius.isfinite(), SINGULAR, NOT_FINITE)
    status = torch.where(running & ~good, failure, state.status)
    status = torch.where(good & (residual_norm.abs() <= state.target), CONVERGED, status)
    basis = torch.where(after.bool().unsqueeze(-1), vector.unsqueeze(-2), state.basis)
    return _Cycle(
        basis=torch.where(good[..., None, None], basis, state.basis),
        triangle=torch.where(here[:-1].bool(), column.unsqueeze(-1), state.triangle),
        rotation=torch.where(good[..., None, None], rotation, state.rotation),
        projected=state.projected + share * here[:-1],
        residual_norm=residual_norm,
        turn=state.turn + 1,
        status=status,
        steps=state.steps + running.long(),
        target=state.target,
    )


def orthogonalise(basis: Tensor, vector: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A unit vector orthogonal to the basis' rows, `vector`'s coefficients in them, and the length of the rest.

    The vector is 0 where nothing but rounding is left.
    """
    first_length = vector.norm(dim=-1)
    coefficients = torch.zeros_like(basis[..., 0])
    # After one projection rounding leaves a part in the basis; after two none that matters (Giraud, Langou & Rozložník 2005).
    for _ in range(2):
        projection = (basis @ vector.unsqueeze(-1)).squeeze(-1)
        vector = vector - (basis.mT @ projection.unsqueeze(-1)).squeeze(-1)
        coefficients = coefficients + projection
    length = vector.norm(dim=-1)
    is_new = length > 16 * torch.finfo(vector.dtype).eps * first_length
    # What is not finite is kept, so that it is noticed.
    length = torch.where(is_new | ~first_length.isfinite(), length, 0.0)
    return vector * torch.where(is_new, 1 / length, 0.0).unsqueeze(-1), coefficients, length


def _first_status(residual_norm: Tensor, target: Tensor) -> Tensor:
    """RUNNING but for items that are solved already, or not finite."""
    status = torch.where(residual_norm <= target, CONVERGED, RUNNING)
    return torch.where(residual_norm.isfinite(), status, NOT_FINITE)


def _last_status(status: Tensor) -> Tensor:
    """The status with MAX_STEPS for items that were still running."""
    return torch.where(status == RUNNING, MAX_STEPS, status)
