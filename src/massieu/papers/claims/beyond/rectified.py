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
    energy = LogSumReLU.create(points, scale=beta)
    # Starts on the way from one pattern to another, so that something is active for most.
    share = torch.sigmoid(normal(draws, 1))
    first = torch.arange(draws) % patterns
    second = (first * 7 + 1) % patterns
    starts = torch.cat([share * points[first] + (1 - share) * points[second], points])
    starts = starts[energy(starts).isfinite()]
    yield from _gradient(energy, points, starts, beta)
    yield from _minima(energy, points, starts)
    yield from _single(normal(patterns, dimensions), beta)


def _gradient(energy: LogSumReLU, points: Tensor, state: Tensor, scale: float) -> Iterator[Check]:
    """The gradient of E is Σ_active (x − ξ)/Σ relu(…)."""
    # Differences do not see a kink, which is where a distance is the radius.
    squares = (state.unsqueeze(-2) - points).square().sum(-1)
    is_smooth = ((squares.sqrt() - math.sqrt(2 / scale)).abs() > 1e-3).all(-1)
    relu_sum = torch.relu(1 - 0.5 * scale * squares).sum(-1)
    is_tried = is_smooth & (relu_sum > 1e-2)
    state = state[is_tried]
    relu_sum = relu_sum[is_tried]
    active = (squares[is_tried] < 2 / scale).double()
    expected = (active.sum(-1, keepdim=True) * state - active @ points) / relu_sum.unsqueeze(-1)
    slope = differences(energy, state)
    # The third derivative grows with the cube of 1/Σ relu.
    error_scale = 1 + relu_sum.min().item() ** -3
    yield close("differences of E and Σ_active (x − ξ)/Σ relu", slope, expected, error_scale * GRADIENT_BY_DIFFERENCES)
    yield close("−the force and the same", -energy.force(state), expected)


def _minima(energy: LogSumReLU, points: Tensor, starts: Tensor) -> Iterator[Check]:
    """Descent never raises E, and ends in minima that are centroids of the patterns active there."""
    path = energy.descend(starts, steps=40)
    yield at_most("largest rise of E in a step", path.energies.diff(dim=0), _ROUNDING)
    long_steps = energy.descend(starts, steps=10, damping=1.9)
    yield at_most("largest rise of E in a step of damping 1.9", long_steps.energies.diff(dim=0), _ROUNDING)
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
    """A pattern with no other within reach is a single memory, exactly: here all are, at twice the radius and more."""
    radius = math.sqrt(2 / scale)
    distant = points / torch.pdist(points).min() * 2.5 * radius
    energy = LogSumReLU.create(distant, scale=scale)
    near = distant + 0.5 * radius * torch.nn.functional.normalize(points.roll(1, 0), dim=-1)
    yield at_most("no other in reach: one step and the memory", (energy.step(near) - distant).abs(), 0.0)
    yield close("no other in reach: E at the memory, and 0", energy(distant), 0.0)
