"""The state of an iteration, each item on its own, and how it moves."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from massieu.solve.loops import readable
from massieu.solve.problem import Map
from massieu.solve.status import CONVERGED, DIVERGED, NOT_FINITE, RUNNING

_WINDOW = 5
"""How many ratios the estimate of the contraction looks back on."""
_GROWTH = 1e6
"""By how much the residual grows until an item is given up."""
_LONGEST_WAIT = 16
"""How many plain moves follow a guarded one that failed, at most."""
_PROGRESS = 0.9
"""A guarded move that lowers the least residual so far to this part of it is a success."""


class State(NamedTuple):
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


@dataclass(frozen=True)
class Tolerance:
    """An item has converged where ‖f(z) − z‖ ≤ absolute + relative·max(‖z‖, ‖f(z)‖)."""

    relative: float
    absolute: float

    def of(self, state: State) -> Tensor:
        return self.absolute + self.relative * torch.maximum(state.point.norm(dim=-1), state.image.norm(dim=-1))


def begin(start: Tensor, image: Tensor, tolerance: Tolerance, memory: int) -> State:
    size = (image - start).norm(dim=-1)
    count = torch.zeros_like(size, dtype=torch.int64)
    # A loop of a compiled graph wants all room from the beginning, others are faster without.
    room = 0 if readable() else memory
    history = torch.zeros_like(start).unsqueeze(-2).expand(*start.shape[:-1], room, start.shape[-1])
    ratios = torch.full_like(size, torch.nan).unsqueeze(-1).expand(*size.shape, _WINDOW)
    running, one = count + RUNNING, count + 1
    state = State(
        start, image, size, size, size, running, count, one, ratios, history, history, count, one, count.bool()
    )
    return judge(state, tolerance)


def judge(state: State, tolerance: Tolerance) -> State:
    """Stop the items that are there, or will not be."""
    # A start that happens to be near a fixed point is no measure of growth: the size of z there is another.
    diverged = state.size > _GROWTH * (state.first + state.point.norm(dim=-1).clamp_max(1.0))
    status = torch.where(diverged, DIVERGED, RUNNING)
    status = torch.where(state.size <= tolerance.of(state), CONVERGED, status)
    status = torch.where(state.size.isfinite(), status, NOT_FINITE)
    return state._replace(status=torch.where(state.running, status, state.status))


def move(evaluate: Map, state: State, trial: Tensor, guarded: Tensor, memory: int = 0) -> State:
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
    return State(
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


def contraction(state: State) -> Tensor:
    """The largest ratio in the window; NaN where there is none."""
    largest = torch.where(state.ratios.isnan(), -torch.inf, state.ratios).amax(-1)
    return torch.where(largest < 0, torch.nan, largest)
