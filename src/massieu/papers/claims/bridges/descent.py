"""X5: ascent of the log-partition and a scalar contraction make damped Hopfield descent."""

from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.energy import HopfieldEnergy, activations
from massieu.measures import Atoms, Gaussian, Measure, Sphere, mixture
from massieu.papers.claims.claim import CLOSED_FORM, Check, at_least, at_most, close
from massieu.papers.claims.inputs import Normal, normal_draws
from massieu.papers.claims.registry import claim
from massieu.papers.theory import damped_descent

_ROUNDING = 1e-12


@claim(
    "X5",
    title="Ascent plus contraction is damped descent",
    statement="(ξ + γ∇A(βξ))/(1 + γ) = ξ − γ′∇E(ξ), γ′ = γ/(1 + γ), for every memory and γ > 0. Layers of residual "
    "attention, each followed by that contraction, therefore descend the Hopfield energy, and all γ have the same "
    "fixed points.",
    source="joins Shim §6 and Bal §1; B5 with damping",
    status="derived",
)
def ascent_and_contraction_are_descent(layers: int = 12, draws: int = 30, seed: int = 0) -> Iterator[Check]:
    normal = normal_draws(seed)
    for name, memory in _memories(normal).items():
        scale = normal(*memory.batch_shape).exp()
        energy = HopfieldEnergy.create(memory, scale=scale)
        state = normal(*memory.batch_shape, draws, *memory.event_shape)
        for step in (0.2, 1.0, 30.0):
            yield from _layers(f"{name}, γ = {step:g}", energy, state, step, layers)
    yield from _fixed_points(normal)


def _memories(normal: Normal) -> dict[str, Measure]:
    width = 4
    log_weight = normal(3, 7)
    log_weight[:, ::2] = -torch.inf
    zeros = torch.zeros(width, dtype=torch.float64)
    parts = [Gaussian.create(zeros + sign, torch.full_like(zeros, 0.2)) for sign in (-1, 1)]
    return {
        "keys": Atoms.create(normal(7, width)),
        "three heads of masked keys": Atoms.create(normal(3, 7, width), log_weight),
        "Gaussian": Gaussian.create(normal(width), 0.1 * normal(width).square()),
        "sphere": Sphere.create(torch.tensor(1.5, dtype=torch.float64), dim=width),
        "two Gaussians": mixture(normal(2), parts),
    }


def _layers(name: str, energy: HopfieldEnergy, state: Tensor, step: float, layers: int) -> Iterator[Check]:
    """Layers of residual attention and contraction, against damped steps, and the energy along them."""
    # One scale for each head, beside states (heads, draws, width).
    scale = energy.scale.reshape(energy.scale.shape + (1,) * (state.ndim - energy.scale.ndim))
    damping = step / (1 + step)
    distances = []
    margins = []
    for _ in range(layers):
        after = (state + step * energy.memory.mean(scale * state)) / (1 + step)
        damped_step = energy.step(state, damping=damping)
        # A Gaussian memory of large covariance drives the state away: rounding grows with it.
        distances.append((after - damped_step).abs().max() / (1 + after.abs().max()))
        energy_before = energy(state)
        least_fall = damped_descent(energy.force(state), damping)
        margin = energy_before - energy(after) - least_fall
        margins.append((margin / (1 + energy_before.abs())).min())
        state = after
    yield at_most(f"{name}: distance of layer and damped step, relative", torch.stack(distances), _ROUNDING)
    yield at_least(f"{name}: E falls by γ′(1 − γ′/2)‖∇E‖² or more, relative", torch.stack(margins), -_ROUNDING)


def _fixed_points(normal: Normal) -> Iterator[Check]:
    """All γ lead from one start to one minimum; with the scalar reference a whole step is half of attention."""
    # Patterns so far apart that a start near one of them retrieves it.
    patterns = torch.eye(4, dtype=torch.float64) + 0.05 * normal(4, 4)
    energy = HopfieldEnergy.create(patterns, scale=12.0)
    start = patterns + 0.02 * normal(4, 4)

    def fixed_point(step: float) -> Tensor:
        return energy.retrieve(start, damping=step / (1 + step), tol=1e-13).state

    expected = fixed_point(50.0)
    for step in (0.5, 2.0):
        yield close(f"fixed point of γ = {step} and of γ = 50", fixed_point(step), expected, CLOSED_FORM)
    scalar = HopfieldEnergy.create(patterns, reference=activations.Scalar.create(0.5), scale=12.0)
    yield close("reference ½‖·‖²/2: its step and half of attention", scalar.step(start), 0.5 * energy.step(start))
