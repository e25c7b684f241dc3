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
from massieu.foundation.transforms import repeat
from massieu.solve.status import CONVERGED, MAX_STEPS, NOT_FINITE, RUNNING, SINGULAR

Product = Callable[..., Tensor]


class LinearSolveResult(NamedTuple):
    """What was found, one number for each item but for `value`.

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
        start = self._near(right, constants)
        square = (right * start).sum(-1)
        size, nothing = square.sqrt(), torch.zeros_like(square)
        count = torch.zeros_like(square, dtype=torch.int64)
        status, target, zero = _begin(size, rtol * size), rtol * size, torch.zeros_like(right)
        begun = _Conjugate(zero, right, start, square, square, nothing, status, count, target)

        def step(state: _Conjugate, *constants: Tensor) -> _Conjugate:
            image = product(state.direction, *constants)
            curvature = (state.direction * image).sum(-1)
            running = state.status == RUNNING
            steepest = torch.maximum(state.steepest, curvature / state.length)
            # Less than rounding of the steepest direction's is nothing.
            good = running & (curvature > 16 * torch.finfo(curvature.dtype).eps * steepest * state.length)
            step = torch.where(good, state.square / curvature, 0.0).unsqueeze(-1)
            value = state.value + step * state.direction
            residual = state.residual - step * torch.where(good.unsqueeze(-1), image, 0.0)
            near = self._near(residual, constants)
            square = torch.where(good, (residual * near).sum(-1), state.square)
            onward = torch.where(good, square / state.square, 0.0)
            direction = torch.where(good.unsqueeze(-1), near + onward.unsqueeze(-1) * state.direction, state.direction)
            length = torch.where(good, square + onward.square() * state.length, state.length)
            bad = torch.where(curvature.isfinite(), SINGULAR, NOT_FINITE)
            status = torch.where(running & ~good, bad, state.status)
            status = torch.where(good & (square.sqrt() <= state.target), CONVERGED, status)
            steps = state.steps + running.long()
            return _Conjugate(value, residual, direction, square, length, steepest, status, steps, state.target)

        end = repeat(step, begun, lambda state: state.status == RUNNING, limit, constants)
        return LinearSolveResult(end.value, _conclude(end.status), end.steps, end.square.sqrt())

    def _near(self, vector: Tensor, constants: Sequence[Tensor]) -> Tensor:
        """M vector, which must be like it."""
        if self.preconditioner is None:
            return vector
        image = self.preconditioner(vector, *constants)
        if not isinstance(image, Tensor):
            raise TypeError(f"preconditioner must return a vector like the one it is given, got {described(image)}")
        check_dense("preconditioner's value", image)
        if (image.shape, image.dtype, image.is_meta) != (vector.shape, vector.dtype, vector.is_meta):
            given = f"{tuple(vector.shape)} of {vector.dtype} on {vector.device}"
            got = f"{tuple(image.shape)} of {image.dtype} on {image.device}"
            raise ValueError(f"preconditioner must return a vector like the one it is given, {given}, got {got}")
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
        size = right.norm(dim=-1)
        target = default_rtol(self.rtol, right.dtype) * size
        steps = torch.zeros_like(size, dtype=torch.int64)
        solution = LinearSolveResult(torch.zeros_like(right), _begin(size, target), steps, size)
        solution = self._cycle(product, right, solution, target, constants)

        def again(state: LinearSolveResult, right: Tensor, target: Tensor, *constants: Tensor) -> LinearSolveResult:
            running = state.status == RUNNING
            residual = right - product(state.value, *constants)
            size = torch.where(running, residual.norm(dim=-1), state.residual)
            state = state._replace(residual=size, steps=state.steps + running.long())
            return self._cycle(product, residual, state, target, constants)

        solution = repeat(
            again, solution, lambda state: state.status == RUNNING, self.cycles - 1, (right, target, *constants)
        )
        return solution._replace(status=_conclude(solution.status))

    def _cycle(
        self, product: Product, residual: Tensor, state: LinearSolveResult, target: Tensor, constants: Sequence[Tensor]
    ) -> LinearSolveResult:
        """The state after one more Krylov space, which begins with its residual."""
        most = (30 if torch.compiler.is_compiling() else 100) if self.memory is None else self.memory
        memory = min(most, residual.shape[-1])
        start = _begin_cycle(residual, state, target, memory if torch.compiler.is_compiling() else 0)
        end = repeat(_arnoldi(product), start, lambda state: state.status == RUNNING, memory, constants)
        weights = torch.linalg.solve_triangular(end.triangle, end.projected.unsqueeze(-1), upper=True)
        value = state.value + (end.basis[..., :-1, :].mT @ weights).squeeze(-1)
        return LinearSolveResult(value, end.status, end.steps, end.size.abs())


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
        factors = torch.linalg.solve_ex(matrix, right.unsqueeze(-1))
        value = factors.result.squeeze(-1)
        status = torch.where(factors.info == 0, CONVERGED, SINGULAR)
        status = torch.where(value.isfinite().all(-1) | (factors.info != 0), status, NOT_FINITE)
        residual = (right - (matrix @ value.unsqueeze(-1)).squeeze(-1)).norm(dim=-1)
        return LinearSolveResult(value, status, torch.full_like(status, right.shape[-1]), residual)


def dense(product: Product, like: Float[Tensor, "*items n"]) -> Float[Tensor, "*items n n"]:
    """The matrices of a product."""
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
    if rtol is not None:
        return rtol
    return 1e-10 if dtype == torch.float64 else 1e-6


ANY_MATRIX = GMRES()
SOLVERS = "a LinearSolver, such as GMRES(), ConjugateGradients() or Dense()"


class _Conjugate(NamedTuple):
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
    size: Tensor  # ‖residual‖, with the sign that the rotations give it
    turn: Tensor  # which column is next
    status: Tensor
    steps: Tensor
    target: Tensor


def _begin_cycle(residual: Tensor, state: LinearSolveResult, target: Tensor, memory: int) -> _Cycle:
    items = state.residual.shape
    wide = torch.eye(memory + 1, dtype=residual.dtype, device=residual.device).expand(*items, -1, -1)
    zero = torch.zeros_like(state.residual).unsqueeze(-1).expand(*items, memory)
    turn = torch.zeros((), dtype=torch.int64, device=residual.device)
    basis, triangle = krylov(residual, memory + 1), wide[..., :-1, :-1]
    return _Cycle(basis, triangle, wide, zero, state.residual, turn, state.status, state.steps, target)


def _grown(state: _Cycle) -> _Cycle:
    """With room for one more vector."""
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


def _arnoldi(product: Product) -> Callable[..., _Cycle]:
    """A step of GMRES: one more basis vector, one more column of the triangle."""

    def step(state: _Cycle, *constants: Tensor) -> _Cycle:
        state = state if torch.compiler.is_compiling() else _grown(state)
        places = torch.arange(state.basis.shape[-2], device=state.basis.device)
        here, after = (places == state.turn).to(state.basis.dtype), (places == state.turn + 1).to(state.basis.dtype)
        image = product(here @ state.basis, *constants)
        vector, column, length = orthogonalise(state.basis, image)
        column = (state.rotation @ (column + length.unsqueeze(-1) * after).unsqueeze(-1)).squeeze(-1)

        # The rotation that makes the entry below the diagonal zero.
        top, below = column @ here, column @ after
        radius = torch.hypot(top, below)
        usable = radius > torch.finfo(radius.dtype).eps * image.norm(dim=-1)
        cosine = torch.where(usable, top / radius, 1.0).unsqueeze(-1)
        sine = torch.where(usable, below / radius, 0.0).unsqueeze(-1)
        upper, lower = here @ state.rotation, after @ state.rotation
        rotation = state.rotation + here.unsqueeze(-1) * (cosine * upper + sine * lower - upper).unsqueeze(-2)
        rotation = rotation + after.unsqueeze(-1) * (cosine * lower - sine * upper - lower).unsqueeze(-2)
        column = column + (radius - top).unsqueeze(-1) * here - below.unsqueeze(-1) * after

        running = state.status == RUNNING
        good = running & usable & radius.isfinite()
        # Columns of items that stopped stay those of the identity, and their right side 0.
        column = torch.where(good.unsqueeze(-1), column, here)[..., :-1]
        triangle = torch.where(here[:-1].bool(), column.unsqueeze(-1), state.triangle)
        share = torch.where(good, cosine.squeeze(-1) * state.size, 0.0).unsqueeze(-1)
        projected = state.projected + share * here[:-1]
        size = torch.where(good, -sine.squeeze(-1) * state.size, state.size)
        bad = torch.where(radius.isfinite(), SINGULAR, NOT_FINITE)
        status = torch.where(running & ~good, bad, state.status)
        status = torch.where(good & (size.abs() <= state.target), CONVERGED, status)
        basis = torch.where(after.bool().unsqueeze(-1), vector.unsqueeze(-2), state.basis)
        basis = torch.where(good[..., None, None], basis, state.basis)
        rotation = torch.where(good[..., None, None], rotation, state.rotation)
        steps = state.steps + running.long()
        return _Cycle(basis, triangle, rotation, projected, size, state.turn + 1, status, steps, state.target)

    return step


def orthogonalise(basis: Tensor, vector: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A unit vector orthogonal to the basis' rows, `vector`'s coefficients in them, and the length of the rest.

    The vector is 0 where nothing but rounding is left.
    """
    whole = vector.norm(dim=-1)
    coefficients = torch.zeros_like(basis[..., 0])
    # Twice is enough (Giraud, Langou & Rozložník 2005).
    for _ in range(2):
        part = (basis @ vector.unsqueeze(-1)).squeeze(-1)
        vector = vector - (basis.mT @ part.unsqueeze(-1)).squeeze(-1)
        coefficients = coefficients + part
    length = vector.norm(dim=-1)
    left = length > 16 * torch.finfo(vector.dtype).eps * whole
    length = torch.where(left | ~whole.isfinite(), length, 0.0)
    return vector * torch.where(left, 1 / length, 0.0).unsqueeze(-1), coefficients, length


def _begin(size: Tensor, target: Tensor) -> Tensor:
    status = torch.where(size <= target, CONVERGED, RUNNING)
    return torch.where(size.isfinite(), status, NOT_FINITE)


def _conclude(status: Tensor) -> Tensor:
    return torch.where(status == RUNNING, MAX_STEPS, status)
