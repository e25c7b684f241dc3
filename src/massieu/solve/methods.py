"""How iterates move: plainly, accelerated, by Newton's method, or as it pays; each item on its own."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from massieu.foundation.arguments import number, whole_number
from massieu.foundation.transforms import some
from massieu.solve.linear import GMRES
from massieu.solve.problem import BoundFunction
from massieu.solve.status import CONVERGED, DIVERGED, NOT_FINITE, RUNNING

_WINDOW = 5
"""How many ratios the estimate of the Lipschitz constant looks back on."""
_GROWTH = 10**6
"""By how much the residual grows until an item is given up; a fraction would be a symbol that compiled loops refuse."""
_LONGEST_WAIT = 16
"""How many plain moves follow a guarded one that failed, at most."""
_PROGRESS = 0.9
"""A guarded move that lowers the least residual so far to this part of it is a success."""


class IterationState(NamedTuple):
    """Items in the middle of an iteration; all fields lead with the items' dimensions."""

    point: Tensor  # z, (*items, n)
    image: Tensor  # f(z), (*items, n)
    size: Tensor  # ‖f(z) − z‖
    first: Tensor  # the same at the start
    least: Tensor  # the same at its smallest so far
    status: Tensor
    steps: Tensor
    evaluations: Tensor
    ratios: Tensor  # ‖Δf‖/‖Δz‖ of the last moves, newest first, (*items, _WINDOW); NaN where there was none
    moves: Tensor  # Δz, newest first, (*items, memory, n)
    changes: Tensor  # Δ(f(z) − z) of the same moves
    wait: Tensor  # plain moves until a guarded one is tried again
    penalty: Tensor  # how many those will be after the next failure
    daring: Tensor  # whether the last move was guarded

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
        return self.absolute + self.relative * torch.maximum(state.point.norm(dim=-1), state.image.norm(dim=-1))

    def judge(self, state: IterationState) -> IterationState:
        """Stop the items that are there, or will not be."""
        # A start that happens to be near a fixed point is no measure of growth: the size of z there is another.
        diverged = state.size > _GROWTH * (state.first + state.point.norm(dim=-1).clamp_max(1.0))
        status = torch.where(diverged, DIVERGED, RUNNING)
        status = torch.where(state.size <= self.of(state), CONVERGED, status)
        status = torch.where(state.size.isfinite(), status, NOT_FINITE)
        return state._replace(status=torch.where(state.running, status, state.status))

    def begin(self, start: Tensor, image: Tensor, memory: int) -> IterationState:
        size = (image - start).norm(dim=-1)
        count = torch.zeros_like(size, dtype=torch.int64)
        # A loop of a compiled graph wants all room from the beginning, others are faster without.
        room = memory if torch.compiler.is_compiling() else 0
        none = torch.zeros_like(start).unsqueeze(-2).expand(*start.shape[:-1], room, start.shape[-1])
        ratios = torch.full_like(size, torch.nan).unsqueeze(-1).expand(*size.shape, _WINDOW)
        running, one = count + RUNNING, count + 1
        state = IterationState(
            start, image, size, size, size, running, count, one, ratios, none, none, count, one, count.bool()
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
    size = (image - point).norm(dim=-1)
    moved = running & (~guarded | (size <= state.size))
    failed = running & ~moved
    grew = moved & ~guarded & (size > state.size)
    blamed = failed | (grew & state.daring)
    success = moved & guarded & (size < _PROGRESS * state.least)

    step, change = point - state.point, image - point - state.residual
    length = step.norm(dim=-1)
    # Over shorter moves Δf is rounding.
    seen = moved & (length > 64 * torch.finfo(point.dtype).eps * point.norm(dim=-1))
    ratio = ((step + change).norm(dim=-1) / length).unsqueeze(-1)
    return IterationState(
        point=torch.where(moved.unsqueeze(-1), point, state.point),
        image=torch.where(moved.unsqueeze(-1), image, state.image),
        size=torch.where(moved, size, state.size),
        first=state.first,
        least=torch.where(moved, torch.minimum(size, state.least), state.least),
        status=state.status,
        steps=state.steps + moved.long(),
        evaluations=state.evaluations + running.long(),
        ratios=torch.where(seen.unsqueeze(-1), torch.cat([ratio, state.ratios[..., :-1]], -1), state.ratios),
        moves=_remember(state.moves, step, moved, failed, memory),
        changes=_remember(state.changes, change, moved, failed, memory),
        wait=torch.where(failed | grew, state.penalty, (state.wait - 1).clamp_min(0)),
        penalty=torch.where(
            blamed, (2 * state.penalty).clamp_max(_LONGEST_WAIT), torch.where(success, 1, state.penalty)
        ),
        daring=guarded & moved,
    )


def _remember(history: Tensor, new: Tensor, moved: Tensor, failed: Tensor, memory: int) -> Tensor:
    """What is remembered with the newest first; nothing after a failure, as what misled once would again."""
    if not memory:
        return history
    longer = torch.cat([new.unsqueeze(-2), history], -2)
    same = torch.cat([torch.where(failed[..., None, None], 0.0, history), torch.zeros_like(new).unsqueeze(-2)], -2)
    return torch.where(moved[..., None, None], longer, same)[..., :memory, :]


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
        return move(evaluate, state, plain(state, self.share), torch.zeros_like(state.running))


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
        guarded = (state.steps > 0) & (state.wait == 0)
        return move(evaluate, state, mixed(state, guarded, self.share, self.ridge), guarded, self.memory)


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
        guarded = (state.steps > 1) & (state.wait == 0) & (ratio > self.fast) & (ratio < 1)
        return move(evaluate, state, mixed(state, guarded, self.share, self.ridge), guarded, self.memory)


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
        guarded = state.running & (state.wait == 0)
        right = torch.where(guarded.unsqueeze(-1), state.residual, 0.0)

        def product(vector: Tensor, point: Tensor, image: Tensor, *leaves: Tensor) -> Tensor:
            return vector - slope(BoundFunction(evaluate.problem, leaves), point, image, vector)

        constants = (state.point, state.image, *evaluate.leaves)
        found = GMRES(self.rtol, self.products, cycles=1).solve(product, right, constants)
        trial = torch.where(guarded.unsqueeze(-1), state.point + found.value, plain(state, self.share))
        moved = move(evaluate, state, trial, guarded)
        return moved._replace(evaluations=moved.evaluations + found.steps)


AS_IT_PAYS = Auto()


def plain(state: IterationState, damping: float) -> Tensor:
    return state.image if damping == 1 else state.point + damping * state.residual


def mixed(state: IterationState, guarded: Tensor, damping: float, ridge: float) -> Tensor:
    """Anderson's point for guarded items: the plain move, less what past moves say of it.

    The weights γ minimise ‖r − Σγᵢuᵢ‖² + ridge·‖γ‖² for the past changes of r, scaled to unit norm as uᵢ.
    """
    simple = plain(state, damping)
    if not state.changes.shape[-2] or not (torch.compiler.is_compiling() or some(guarded)):
        return simple
    lengths = state.changes.norm(dim=-1, keepdim=True)
    scale = torch.where(lengths > 0, 1 / lengths, 0.0)
    changes, moves = state.changes * scale, state.moves * scale
    # The normal equations square the condition.
    wide = changes if changes.device.type == "mps" else changes.double()
    eye = torch.eye(wide.shape[-2], dtype=wide.dtype, device=wide.device)
    right = wide @ state.residual.unsqueeze(-1).to(wide.dtype)
    weights = torch.linalg.solve_ex(wide @ wide.mT + ridge * eye, right).result.to(changes.dtype)
    past = ((moves + damping * changes).mT @ weights).squeeze(-1)
    return torch.where(guarded.unsqueeze(-1), simple - past, simple)


def slope(evaluate: BoundFunction, point: Tensor, image: Tensor, vector: Tensor) -> Tensor:
    """The Jacobian's product with a vector, by a forward difference: one evaluation, relative error about √eps."""
    length = vector.norm(dim=-1, keepdim=True)
    step = torch.finfo(point.dtype).eps ** 0.5 * (1 + point.norm(dim=-1, keepdim=True))
    moved = evaluate(point + step * vector * torch.where(length > 0, 1 / length, 0.0))
    return (moved - image) * (length / step)
