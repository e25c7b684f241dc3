"""N4: the log-sum-ReLU memory."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.papers.claims.claim import GRADIENT_BY_DIFFERENCES, Check, at_least, at_most, close
from massieu.papers.claims.inputs import check_at_least, normal_draws
from massieu.papers.claims.oracles import differences
from massieu.papers.claims.registry import claim
from massieu.papers.theory.rectified import LogSumReLU

_ROUNDING = 1e-12


@claim(
    "N4",
    title="Log-sum-ReLU memory",
    statement="The energy −log Σ relu(1 − β‖x − ξ‖²/2)/β has the gradient Σ_active (x − ξ)/Σ relu(…). Moving to the "
    "centroid of the active patterns never raises it, and ends after finitely many steps in a minimum that is the "
    "centroid of the patterns active there. That is a single memory, exactly, if no other is within √(2/β), and "
    "otherwise an emergent one.",
    source="Hoover, Shi, Balasubramanian, Krotov and Ram (arXiv 2506.10801)",
    status="quoted",
)
def log_sum_relu(
    patterns: int = 30, dimensions: int = 3, draws: int = 500, beta: float = 0.8, seed: int = 0
) -> Iterator[Check]:
    check_at_least(2, patterns=patterns, dimensions=dimensions)
    check_at_least(1e-3, beta=beta)
    normal = normal_draws(seed)
    points = normal(patterns, dimensions)
    scale = beta
    energy = LogSumReLU.create(points, scale=scale)
    # Starts on the way from one pattern to another, so that something is active for most.
    mix = torch.sigmoid(normal(draws, 1))
    order = torch.arange(draws) % patterns
    starts = torch.cat([mix * points[order] + (1 - mix) * points[(order * 7 + 1) % patterns], points])
    starts = starts[energy(starts).isfinite()]
    yield from _gradient(energy, points, starts, scale)
    yield from _minima(energy, points, starts, scale)
    yield from _single(normal(patterns, dimensions), scale)


def _gradient(energy: LogSumReLU, points: Tensor, state: Tensor, scale: float) -> Iterator[Check]:
    # Differences do not see a kink, which is where a distance is the radius.
    squares = (state.unsqueeze(-2) - points).square().sum(-1)
    smooth = ((squares.sqrt() - math.sqrt(2 / scale)).abs() > 1e-3).all(-1)
    rise = torch.relu(1 - 0.5 * scale * squares).sum(-1)
    state, squares, rise = (part[smooth & (rise > 1e-2)] for part in (state, squares, rise))
    active = (squares < 2 / scale).double()
    expected = (active.sum(-1, keepdim=True) * state - active @ points) / rise.unsqueeze(-1)
    slope = differences(energy, state)
    # The third derivative grows with the cube of 1/Σ relu.
    unit = 1 + rise.min().item() ** -3
    yield close("differences of E and Σ_active (x − ξ)/Σ relu", slope, expected, unit * GRADIENT_BY_DIFFERENCES)
    yield close("−the force and the same", -energy.force(state), expected)


def _minima(energy: LogSumReLU, points: Tensor, starts: Tensor, scale: float) -> Iterator[Check]:
    path = energy.descend(starts, steps=40)
    yield at_most("largest rise of E in a step", path.energies.diff(dim=0), _ROUNDING)
    twice = energy.descend(starts, steps=10, damping=1.9)
    yield at_most("largest rise of E in a step of damping 1.9", twice.energies.diff(dim=0), _ROUNDING)
    end = path.states[-1]
    yield at_most("how far the fortieth step still goes", (path.states[-2] - end).abs(), 0.0)
    active = energy.active(end).double()
    centroid = active @ points / active.sum(-1, keepdim=True)
    yield close("ends and the centroids of what is active at them", end, centroid)
    curvature = torch.linalg.eigvalsh(energy.hessian(end)).amin(-1)
    # On a centroid ∇²E = n/Σ relu ≥ 1.
    yield at_least("least eigenvalue of ∇²E at the ends", curvature, 1 - _ROUNDING)
    emergent = (active.sum(-1) > 1).double().sum()
    yield at_least("ends that are emergent memories", emergent, 1.0, f"{int(emergent)} of {len(end)} descents")


def _single(points: Tensor, scale: float) -> Iterator[Check]:
    """Spread out until every distance is beyond twice the radius."""
    radius = math.sqrt(2 / scale)
    apart = points / torch.pdist(points).min() * 2.5 * radius
    energy = LogSumReLU.create(apart, scale=scale)
    near = apart + 0.5 * radius * torch.nn.functional.normalize(points.roll(1, 0), dim=-1)
    yield at_most("no other in reach: one step and the memory", (energy.step(near) - apart).abs(), 0.0)
    yield close("no other in reach: E at the memory, and 0", energy(apart), 0.0)
