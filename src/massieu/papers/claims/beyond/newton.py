"""N23: Newton's step on the energy."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from massieu.energy import HopfieldEnergy
from massieu.papers.claims.claim import Check, at_least, at_most, close
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.registry import claim
from massieu.papers.theory import newton_step

_ROUNDING = 1e-12


@claim(
    "N23",
    title="Newton's step on the energy",
    statement="Newton's step on the Hopfield energy, ξ − (I − βCov_p)⁻¹(ξ − f(ξ)), squares the error near a "
    "minimum. Restricted to states where the Hessian is positive definite and E falls at least as much as by "
    "attention, it never raises E.",
    source="momentum, Nesterov and Newton attention, arXiv 2511.00907; the guard is derived",
    status="quoted",
)
def newtons_attention(atoms: int = 8, dimensions: int = 5, draws: int = 50, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, atoms=atoms, dimensions=dimensions)
    normal = normal_draws(seed)
    patterns = normal(atoms, dimensions)
    # So warm that the patterns about a minimum are mixed: where one has all the weight, Newton's step and attention agree to
    # rounding, and either may be taken. No variance of points at distances up to D is above D²/4, so the Hessian is at least ½.
    warm = 2.0 / torch.cdist(patterns, patterns).max().item() ** 2
    for name, scale in (("warm", warm), ("β = 2", 2.0)):
        energy = HopfieldEnergy.create(patterns, scale=scale)
        minimum = energy.retrieve(normal(draws, dimensions), tol=1e-14, max_steps=20_000).state
        start = minimum + 1e-2 * F.normalize(normal(draws, dimensions), dim=-1)
        weights = torch.softmax(scale * start @ patterns.T, -1)
        attended = weights @ patterns
        centred = patterns - attended.unsqueeze(-2)
        hessian = torch.eye(dimensions, dtype=torch.float64) - scale * (weights.unsqueeze(-1) * centred).mT @ centred
        is_convex = torch.linalg.eigvalsh(hessian)[:, 0] > 0.1
        yield at_least(f"{name}: minima with a Hessian above 0.1", is_convex.double().sum(), 1.0)
        if name == "warm":
            newton = start - torch.linalg.solve(hessian, start - attended)
            yield _formula_of_step(energy, start, newton, attended, is_convex)
        state = start[is_convex]
        for _ in range(6):
            state = newton_step(energy, state)
        yield at_most(f"{name}: ‖∇E‖ after six steps", energy.force(state).norm(dim=-1), 5e-12)
        yield from _quadratic(name, energy, start[is_convex], minimum[is_convex])
    yield from _guarded(normal, patterns, draws)


def _formula_of_step(
    energy: HopfieldEnergy, start: Tensor, newton: Tensor, attended: Tensor, is_convex: Tensor
) -> Check:
    """The guarded step is Newton's where that lowers E by more than attention, which is taken elsewhere.

    Where the two are equal to rounding either may be taken: the one that the step is nearer to is compared with it.
    """
    is_lower = is_convex & (energy(newton) < energy(attended) - _ROUNDING)
    step = newton_step(energy, start)
    is_nearer = (step - newton).norm(dim=-1) < (step - attended).norm(dim=-1)
    expected = torch.where((is_lower | is_nearer).unsqueeze(-1), newton, attended)
    return close("warm: step and its formula", step[is_convex], expected[is_convex])


def _quadratic(name: str, energy: HopfieldEnergy, start: Tensor, minimum: Tensor) -> Iterator[Check]:
    """A step near a minimum squares the error: ‖e⁺‖ ≤ ½K‖e‖²/λ, λ the least curvature at the start.

    K = β²D³ ≥ ‖∇³E‖, which is β² times a third central moment of x·u.
    """
    error = (start - minimum).norm(dim=-1)
    error_after = (newton_step(energy, start) - minimum).norm(dim=-1)
    diameter = torch.cdist(energy.memory.points, energy.memory.points).max()
    third_derivative = energy.scale**2 * diameter**3
    least_curvature = torch.linalg.eigvalsh(energy.hessian(start))[:, 0]
    bound = 0.5 * third_derivative / least_curvature * error.square()
    yield at_most(f"{name}: error by ½‖∇³E‖/λ times the square of the one before", error_after / bound, 1.0)


def _guarded(normal: Normal, patterns: Tensor, draws: int) -> Iterator[Check]:
    """A guarded step never raises E, from anywhere, cold and warm, at indefinite Hessians too."""
    for scale in (0.5, 5.0, 50.0):
        energy = HopfieldEnergy.create(patterns, scale=scale)
        state = 2 * normal(draws, patterns.shape[-1])
        rises = []
        excess = []
        for _ in range(6):
            after = newton_step(energy, state)
            excess.append((energy(after) - _least_energy(energy, state)) / (1 + energy(state).abs()))
            rises.append(((energy(after) - energy(state)) / (1 + energy(state).abs())).max())
            state = after
        yield at_most(f"β = {scale}: rise of E in a guarded step, relative", torch.stack(rises), 1e-13)
        name = f"β = {scale}: E after it and the lower of Newton's and attention's, relative"
        yield at_most(name, torch.stack(excess).abs(), 1e-11)


def _least_energy(energy: HopfieldEnergy, state: Tensor) -> Tensor:
    """E after attention, or after Newton's step where that is lower and the Hessian is positive definite."""
    patterns = energy.memory.points
    weights = torch.softmax(energy.scale * state @ patterns.T, -1)
    attended = weights @ patterns
    centred = patterns - attended.unsqueeze(-2)
    identity = torch.eye(patterns.shape[-1], dtype=torch.float64)
    hessian = identity - energy.scale * (weights.unsqueeze(-1) * centred).mT @ centred
    is_convex = torch.linalg.eigvalsh(hessian)[:, 0] > 0
    newton = state - torch.linalg.solve(hessian, state - attended)
    newton_energy = torch.where(is_convex, energy(newton), torch.inf)
    return torch.minimum(newton_energy, energy(attended))
