"""How iterates move: plainly, accelerated, by Newton's method, or as it pays."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from massieu.solve.iteration import State, move
from massieu.solve.linear import GMRES
from massieu.solve.loops import readable, some
from massieu.solve.problem import Map


class Method(ABC):
    """A way to a fixed point of f. A method moves all running items by one step, each on its own."""

    memory: int = 0
    """How many moves are remembered."""

    @abstractmethod
    def advance(self, evaluate: Map, state: State, damping: float) -> State:
        """The state after one step; a plain move is z + damping·(f(z) − z)."""


@dataclass(frozen=True)
class Picard(Method):
    """Plain iteration. It converges where f contracts, to the fixed point whose basin the start is in."""

    def advance(self, evaluate: Map, state: State, damping: float) -> State:
        """A plain move."""
        return move(evaluate, state, plain(state, damping), torch.zeros_like(state.running))


@dataclass(frozen=True)
class Anderson(Method):
    """Anderson's acceleration (1965) in the form of Walker & Ni (2011), wherever it does not raise the residual.

    Attributes:
        memory: How many moves the step is made of.
        ridge: Added to the normal equations of differences of unit norm, so that it is relative.
    """

    memory: int = 5
    ridge: float = 1e-8

    def advance(self, evaluate: Map, state: State, damping: float) -> State:
        """An accelerated move if the last one did not fail."""
        guarded = (state.steps > 0) & (state.wait == 0)
        return move(evaluate, state, mixed(state, guarded, damping, self.ridge), guarded, self.memory)


@dataclass(frozen=True)
class Auto(Method):
    """Plain iteration while it contracts fast or not at all, Anderson's acceleration while it contracts slowly.

    Where the residual grows the iterates leave a saddle, to which acceleration would take them back.

    Attributes:
        memory: As for `Anderson`; longer, since it serves the slow maps.
        ridge: As for `Anderson`.
        fast: Up to this ratio of successive residuals iteration stays plain.
    """

    memory: int = 16
    ridge: float = 1e-8
    fast: float = 0.2

    def advance(self, evaluate: Map, state: State, damping: float) -> State:
        """A plain or an accelerated move."""
        ratio = state.ratios[..., 0]
        guarded = (state.steps > 1) & (state.wait == 0) & (ratio > self.fast) & (ratio < 1)
        return move(evaluate, state, mixed(state, guarded, damping, self.ridge), guarded, self.memory)


@dataclass(frozen=True)
class Newton(Method):
    """Newton–Krylov: (I − J)d = f(z) − z by GMRES, with products by J from differences of f (Knoll & Keyes 2004).

    The fastest end, at several evaluations a step. It converges to saddles as well, so that the result is checked.

    Attributes:
        rtol: How exactly a step is solved for, relative to the residual.
        products: By J in a step, at most.
    """

    rtol: float = 1e-2
    products: int = 30

    def advance(self, evaluate: Map, state: State, damping: float) -> State:
        """Newton's move if the last one did not fail."""
        guarded = state.running & (state.wait == 0)
        right = torch.where(guarded.unsqueeze(-1), state.residual, 0.0)

        def product(vector: Tensor, point: Tensor, image: Tensor, *leaves: Tensor) -> Tensor:
            return vector - slope(Map(evaluate.problem, leaves), point, image, vector)

        constants = (state.point, state.image, *evaluate.leaves)
        found = GMRES(self.rtol, self.products, cycles=1).solve(product, right, constants)
        trial = torch.where(guarded.unsqueeze(-1), state.point + found.value, plain(state, damping))
        moved = move(evaluate, state, trial, guarded)
        return moved._replace(evaluations=moved.evaluations + found.steps)


METHODS: dict[str, Method] = {"auto": Auto(), "picard": Picard(), "anderson": Anderson(), "newton": Newton()}


def plain(state: State, damping: float) -> Tensor:
    return state.image if damping == 1 else state.point + damping * state.residual


def mixed(state: State, guarded: Tensor, damping: float, ridge: float) -> Tensor:
    """Anderson's point for guarded items: the plain move, less what past moves say of it.

    The weights γ minimise ‖r − Σγᵢuᵢ‖² + ridge·‖γ‖² for the past changes of r, scaled to unit norm as uᵢ.
    """
    simple = plain(state, damping)
    if not state.changes.shape[-2] or (readable() and not some(guarded)):
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


def slope(evaluate: Map, point: Tensor, image: Tensor, vector: Tensor) -> Tensor:
    """The Jacobian's product with a vector, by a forward difference: one evaluation, relative error about √eps."""
    length = vector.norm(dim=-1, keepdim=True)
    step = torch.finfo(point.dtype).eps ** 0.5 * (1 + point.norm(dim=-1, keepdim=True))
    moved = evaluate(point + step * vector * torch.where(length > 0, 1 / length, 0.0))
    return (moved - image) * (length / step)
