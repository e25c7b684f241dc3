"""How iterates move: plainly, accelerated, by Newton's method, or as it pays; each item on its own."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from massieu.foundation.arguments import number, whole_number
from massieu.foundation.transforms import any_true
from massieu.solve.linear import GMRES
from massieu.solve.problem import BoundFunction
from massieu.solve.status import CONVERGED, DIVERGED, NOT_FINITE, RUNNING

_WINDOW = 5
"""How many ratios the estimate of the Lipschitz constant looks back on."""
_GROWTH = 10**6
"""By how much the residual grows until an item is given up; a fraction would be a symbol that compiled loops refuse."""
_LONGEST_COOLDOWN = 16
"""How many plain moves follow a guarded one that failed, at most."""
_PROGRESS = 0.9
"""A guarded move that lowers the least residual so far to this part of it is a success."""


class IterationState(NamedTuple):
    """Items in the middle of an iteration; all fields lead with the items' dimensions.

    A *guarded* move is one that a method undoes if the residual has grown, as an accelerated or a Newton move; a *plain* move
    is z + γ(f(z) − z).
    """

    point: Tensor  # z, (*items, n)
    image: Tensor  # f(z), (*items, n)
    residual_norm: Tensor  # ‖f(z) − z‖
    first_residual_norm: Tensor  # at the start
    least_residual_norm: Tensor  # the smallest so far
    status: Tensor
    steps: Tensor
    evaluations: Tensor
    ratios: Tensor  # ‖Δf‖/‖Δz‖ of the last moves, newest first, (*items, _WINDOW); NaN where there was none
    moves: Tensor  # Δz, newest first, (*items, memory, n)
    residual_changes: Tensor  # Δ(f(z) − z) of the same moves
    cooldown: Tensor  # plain moves until a guarded one is tried again
    backoff: Tensor  # how long the cooldown after the next failure will be
    last_move_guarded: Tensor

    @property
    def residual(self) -> Tensor:
        return self.image - self.point

    @property
    def running(self) -> Tensor:
        return self.status == RUNNING

    @property
    def lipschitz_estimate(self) -> Tensor:
        """The largest ratio in the window; NaN where there is none."""
        largest = torch.where(self.ratios.isnan(), -torch.inf, self.ratios).amax(-1)
        return torch.where(largest < 0, torch.nan, largest)


class Tolerance(NamedTuple):
    """An item has converged where ‖f(z) − z‖ ≤ absolute + relative·max(‖z‖, ‖f(z)‖)."""

    relative: float
    absolute: float

    def of(self, state: IterationState) -> Tensor:
        """The residual norm at which each item has converged."""
        return self.absolute + self.relative * torch.maximum(state.point.norm(dim=-1), state.image.norm(dim=-1))

    def judge(self, state: IterationState) -> IterationState:
        """Stop the items that have converged, diverged, or met a number that is not finite."""
        # The first residual alone is no measure of growth: a start may happen to be near a fixed point.
        usual = state.first_residual_norm + state.point.norm(dim=-1).clamp_max(1.0)
        diverged = state.residual_norm > _GROWTH * usual
        status = torch.where(diverged, DIVERGED, RUNNING)
        status = torch.where(state.residual_norm <= self.of(state), CONVERGED, status)
        status = torch.where(state.residual_norm.isfinite(), status, NOT_FINITE)
        return state._replace(status=torch.where(state.running, status, state.status))

    def begin(self, start: Tensor, image: Tensor, memory: int) -> IterationState:
        """The state before the first move, of a method that remembers `memory` moves; items that have converged stop."""
        residual_norm = (image - start).norm(dim=-1)
        zero = torch.zeros_like(residual_norm, dtype=torch.int64)
        # Tensors of a loop in a compiled graph cannot grow, so that their full length is taken at once. Elsewhere a history
        # that grows is faster.
        length = memory if torch.compiler.is_compiling() else 0
        no_moves = torch.zeros_like(start).unsqueeze(-2).expand(*start.shape[:-1], length, start.shape[-1])
        state = IterationState(
            point=start,
            image=image,
            residual_norm=residual_norm,
            first_residual_norm=residual_norm,
            least_residual_norm=residual_norm,
            status=zero + RUNNING,
            steps=zero,
            evaluations=zero + 1,
            ratios=torch.full_like(residual_norm, torch.nan).unsqueeze(-1).expand(*residual_norm.shape, _WINDOW),
            moves=no_moves,
            residual_changes=no_moves,
            cooldown=zero,
            backoff=zero + 1,
            last_move_guarded=zero.bool(),
        )
        return self.judge(state)


def default_tolerance(dtype: torch.dtype) -> Tolerance:
    """1e-10 and 1e-12 in float64, else 2e-6 and 1e-8."""
    return Tolerance(1e-10, 1e-12) if dtype == torch.float64 else Tolerance(2e-6, 1e-8)


def move(
    evaluate: BoundFunction, state: IterationState, trial: Tensor, guarded: Tensor, memory: int = 0
) -> IterationState:
    """Evaluate at `trial` and go there; items that are `guarded` only if the residual does not grow.

    After a guarded move that failed, plain moves follow, the more the more often that happens: 1, 2, 4, … 16. A residual
    that grows in plain moves makes them follow too, since there the iterates leave a saddle that a guarded move would
    take them back to; it counts as a failure of the guarded move before it.
    """
    running = state.running
    point = torch.where(running.unsqueeze(-1), trial, state.point)
    image = evaluate(point)
    residual_norm = (image - point).norm(dim=-1)

    # Which items go to the trial, and what that says of guarded moves.
    moved = running & (~guarded | (residual_norm <= state.residual_norm))
    refused = running & ~moved
    grew = moved & ~guarded & (residual_norm > state.residual_norm)
    guarded_move_failed = refused | (grew & state.last_move_guarded)
    guarded_move_helped = moved & guarded & (residual_norm < _PROGRESS * state.least_residual_norm)
    longer_backoff = (2 * state.backoff).clamp_max(_LONGEST_COOLDOWN)
    backoff = torch.where(guarded_move_helped, 1, state.backoff)
    backoff = torch.where(guarded_move_failed, longer_backoff, backoff)

    # The ratio of lengths ‖Δf‖/‖Δz‖, with Δf = Δz + Δ(f − z).
    step = point - state.point
    residual_change = image - point - state.residual
    length = step.norm(dim=-1)
    ratio = ((step + residual_change).norm(dim=-1) / length).unsqueeze(-1)
    # Over shorter moves Δf is rounding.
    is_measurable = moved & (length > 64 * torch.finfo(point.dtype).eps * point.norm(dim=-1))
    with_ratio = torch.cat([ratio, state.ratios[..., :-1]], -1)

    least_residual_norm = torch.minimum(residual_norm, state.least_residual_norm)
    return IterationState(
        point=torch.where(moved.unsqueeze(-1), point, state.point),
        image=torch.where(moved.unsqueeze(-1), image, state.image),
        residual_norm=torch.where(moved, residual_norm, state.residual_norm),
        first_residual_norm=state.first_residual_norm,
        least_residual_norm=torch.where(moved, least_residual_norm, state.least_residual_norm),
        status=state.status,
        steps=state.steps + moved.long(),
        evaluations=state.evaluations + running.long(),
        ratios=torch.where(is_measurable.unsqueeze(-1), with_ratio, state.ratios),
        moves=_with_newest(state.moves, step, moved, refused, memory),
        residual_changes=_with_newest(state.residual_changes, residual_change, moved, refused, memory),
        cooldown=torch.where(refused | grew, state.backoff, (state.cooldown - 1).clamp_min(0)),
        backoff=backoff,
        last_move_guarded=guarded & moved,
    )


def _with_newest(history: Tensor, newest: Tensor, moved: Tensor, refused: Tensor, memory: int) -> Tensor:
    """The history (*items, moves, n) with the newest vector first, of at most `memory` vectors.

    Items that did not move keep theirs. It is emptied where a trial was refused: the same past would mislead again.
    """
    if not memory:
        return history
    longer = torch.cat([newest.unsqueeze(-2), history], -2)
    kept = torch.where(refused[..., None, None], 0.0, history)
    # A row of zeros at the end makes both equally long; `anderson_step` gives it no weight.
    kept = torch.cat([kept, torch.zeros_like(newest).unsqueeze(-2)], -2)
    return torch.where(moved[..., None, None], longer, kept)[..., :memory, :]


@dataclass(frozen=True)
class Method(ABC):
    """Base class of fixed-point methods: one step of all unfinished items, each by itself.

    Attributes:
        damping: γ in (0, 2): a plain move is z + γ(f(z) − z). No fixed point depends on it.

    Example:
        >>> from massieu.solve import Anderson, Method
        >>> isinstance(Anderson(memory=3), Method), Anderson().damping
        (True, 1.0)
    """

    damping: float = field(default=1.0, kw_only=True)
    memory = 0
    """How many moves are remembered."""
    _damping: ClassVar[str]

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError for a number out of its range."""
        number("damping", self.damping, above=0, below=2)
        object.__setattr__(self, "_damping", repr(self.damping))

    @property
    def share(self) -> float:
        """The damping, a constant of compiled code: its second value would else be an input, which loops there cannot have."""
        return float(self._damping) if torch.compiler.is_compiling() else self.damping

    @abstractmethod
    def advance(self, evaluate: BoundFunction, state: IterationState) -> IterationState:
        """The state after one step."""


@dataclass(frozen=True)
class Picard(Method):
    """Plain iteration z ← f(z). It converges where f contracts, to the fixed point whose basin the start is in.

    Example:
        >>> import torch
        >>> from massieu.solve import Picard, fixed_point
        >>> damped = Picard(damping=0.4)  # undamped, these iterates diverge
        >>> round(fixed_point(lambda z: 1 - 1.5 * z, torch.zeros(1), method=damped).value.item(), 4)
        0.4
    """

    def advance(self, evaluate: BoundFunction, state: IterationState) -> IterationState:
        """A plain move."""
        return move(evaluate, state, picard_step(state, self.share), guarded=torch.zeros_like(state.running))


@dataclass(frozen=True)
class Anderson(Method):
    """Anderson's acceleration (1965) in the form of Walker & Ni (2011), wherever it does not raise the residual.

    Attributes:
        memory: How many moves the step is made of.
        ridge: Added to the normal equations of differences of unit norm, so that it is relative.

    Example:
        >>> import torch
        >>> from massieu.solve import Anderson, fixed_point
        >>> found = fixed_point(lambda z: 0.9 * z + 1, torch.zeros(1), method=Anderson())
        >>> round(found.value.item(), 3), found.evaluations.item() < 10  # plain iteration takes over 100
        (10.0, True)
    """

    memory: int = 5
    ridge: float = 1e-8

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError for a number out of its range."""
        super().__post_init__()
        whole_number("memory", self.memory, least=1)
        number("ridge", self.ridge, least=0)

    def advance(self, evaluate: BoundFunction, state: IterationState) -> IterationState:
        """An accelerated move if the last one did not fail."""
        guarded = (state.steps > 0) & (state.cooldown == 0)
        trial = anderson_step(state, guarded, self.share, self.ridge)
        return move(evaluate, state, trial, guarded, self.memory)


@dataclass(frozen=True)
class Auto(Anderson):
    """Plain iteration while it contracts fast or not at all, Anderson's acceleration while it contracts slowly.

    Where the residual grows the iterates leave a saddle, to which acceleration would take them back.

    Attributes:
        memory: As for `Anderson`; longer, since it serves the slow maps.
        fast: Up to this ratio of successive residuals iteration stays plain.

    Example:
        >>> import torch
        >>> from massieu.solve import Auto, fixed_point
        >>> found = fixed_point(torch.cos, torch.zeros(1, dtype=torch.float64), method=Auto(damping=0.5))
        >>> round(found.value.item(), 6)
        0.739085
    """

    memory: int = 16
    fast: float = 0.2

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError for a number out of its range."""
        super().__post_init__()
        number("fast", self.fast, least=0)

    def advance(self, evaluate: BoundFunction, state: IterationState) -> IterationState:
        """A plain or an accelerated move."""
        ratio = state.ratios[..., 0]
        contracts_slowly = (ratio > self.fast) & (ratio < 1)
        guarded = (state.steps > 1) & (state.cooldown == 0) & contracts_slowly
        trial = anderson_step(state, guarded, self.share, self.ridge)
        return move(evaluate, state, trial, guarded, self.memory)


@dataclass(frozen=True)
class Newton(Method):
    """Newton–Krylov: (I − J)d = f(z) − z by GMRES, with products by J from differences of f (Knoll & Keyes 2004).

    The fastest end, at several evaluations a step. It converges to saddles as well, so that the result is checked.

    Attributes:
        rtol: How exactly a step is solved for, relative to the residual.
        products: By J in a step, at most.

    Example:
        >>> import torch
        >>> from massieu.solve import Implicit, Newton, fixed_point
        >>> there = {"method": Newton(), "adjoint": Implicit(check_attraction=False)}
        >>> round(fixed_point(lambda z: z**2, torch.full((1,), 0.9), **there).value.item(), 4)  # it repels
        1.0
    """

    rtol: float = 1e-2
    products: int = 30

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError for a number out of its range."""
        super().__post_init__()
        number("rtol", self.rtol, above=0)
        whole_number("products", self.products, least=1)

    def advance(self, evaluate: BoundFunction, state: IterationState) -> IterationState:
        """Newton's move if the last one did not fail."""
        guarded = state.running & (state.cooldown == 0)
        right = torch.where(guarded.unsqueeze(-1), state.residual, 0.0)

        def product(vector: Tensor, point: Tensor, image: Tensor, *leaves: Tensor) -> Tensor:
            return vector - jacobian_product(BoundFunction(evaluate.problem, leaves), point, image, vector)

        constants = (state.point, state.image, *evaluate.leaves)
        solution = GMRES(self.rtol, self.products, cycles=1).solve(product, right, constants)
        newton_point = state.point + solution.value
        trial = torch.where(guarded.unsqueeze(-1), newton_point, picard_step(state, self.share))
        moved = move(evaluate, state, trial, guarded)
        # Each product with I − J is one evaluation.
        return moved._replace(evaluations=moved.evaluations + solution.steps)


AS_IT_PAYS = Auto()


def picard_step(state: IterationState, damping: float) -> Tensor:
    """The plain move z + γ(f(z) − z)."""
    if damping == 1:
        return state.image
    return state.point + damping * state.residual


def anderson_step(state: IterationState, guarded: Tensor, damping: float, ridge: float) -> Tensor:
    """Anderson's point for guarded items, the plain one for others: the plain move, less what past moves predict of it.

    The weights γ minimise ‖r − Σγᵢuᵢ‖² + ridge·‖γ‖² for the past changes of r = f(z) − z, scaled to unit norm as uᵢ.
    """
    plain_point = picard_step(state, damping)
    has_history = state.residual_changes.shape[-2] > 0
    if not has_history or not (torch.compiler.is_compiling() or any_true(guarded)):
        return plain_point
    lengths = state.residual_changes.norm(dim=-1, keepdim=True)
    scale = torch.where(lengths > 0, 1 / lengths, 0.0)
    changes = state.residual_changes * scale
    moves = state.moves * scale
    # The normal equations square the condition number, so that they are formed in float64, which MPS does not have.
    wide = changes if changes.device.type == "mps" else changes.double()
    eye = torch.eye(wide.shape[-2], dtype=wide.dtype, device=wide.device)
    right = wide @ state.residual.unsqueeze(-1).to(wide.dtype)
    weights = torch.linalg.solve_ex(wide @ wide.mT + ridge * eye, right).result.to(changes.dtype)
    predicted = ((moves + damping * changes).mT @ weights).squeeze(-1)
    return torch.where(guarded.unsqueeze(-1), plain_point - predicted, plain_point)


def jacobian_product(evaluate: BoundFunction, point: Tensor, image: Tensor, vector: Tensor) -> Tensor:
    """The Jacobian's product with a vector, by a forward difference: one evaluation, relative error about √eps."""
    length = vector.norm(dim=-1, keepdim=True)
    inverse_length = torch.where(length > 0, 1 / length, 0.0)
    # With a step of √eps, in units of the point, rounding and curvature contribute errors of one size.
    step = torch.finfo(point.dtype).eps ** 0.5 * (1 + point.norm(dim=-1, keepdim=True))
    moved = evaluate(point + step * vector * inverse_length)
    return (moved - image) * (length / step)
