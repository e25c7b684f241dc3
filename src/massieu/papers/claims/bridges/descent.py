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
        batch = memory.batch_shape
        width = memory.event_shape[0]
        scale = normal(*batch).exp()
        energy = HopfieldEnergy.create(memory, scale=scale)
        state = normal(*batch, draws, width)
        for rate in (0.2, 1.0, 30.0):
            yield from _layers(f"{name}, γ = {rate:g}", energy, state, rate, layers)
    yield from _fixed_points(normal)


def _memories(normal: Normal) -> dict[str, Measure]:
    width = 4
    zeros = torch.zeros(4, dtype=torch.float64)
    masked = normal(3, 7)
    masked[:, ::2] = -torch.inf
    return {
        "keys": Atoms.create(normal(7, width)),
        "three heads of masked keys": Atoms.create(normal(3, 7, width), masked),
        "Gaussian": Gaussian.create(normal(width), 0.1 * normal(width).square()),
        "sphere": Sphere.create(torch.tensor(1.5, dtype=torch.float64), dim=width),
        "two Gaussians": mixture(
            normal(2), [Gaussian.create(zeros + sign, torch.full_like(zeros, 0.2)) for sign in (-1, 1)]
        ),
    }


def _layers(name: str, energy: HopfieldEnergy, state: Tensor, rate: float, layers: int) -> Iterator[Check]:
    scale = energy.scale.reshape(*energy.scale.shape, *[1] * (state.ndim - energy.scale.ndim))
    damping = rate / (1 + rate)
    apart = []
    margins = []
    for _ in range(layers):
        after = (state + rate * energy.memory.mean(scale * state)) / (1 + rate)
        # A Gaussian memory of large covariance drives the state away: rounding grows with it.
        apart.append((after - energy.step(state, damping=damping)).abs().max() / (1 + after.abs().max()))
        least = damped_descent(energy.force(state), damping)
        before = energy(state)
        margins.append(((before - energy(after) - least) / (1 + before.abs())).min())
        state = after
    yield at_most(f"{name}: distance of layer and damped step, relative", torch.stack(apart), _ROUNDING)
    yield at_least(f"{name}: E falls by γ′(1 − γ′/2)‖∇E‖² or more, relative", torch.stack(margins), -_ROUNDING)


def _fixed_points(normal: Normal) -> Iterator[Check]:
    """From one start to one minimum; the scalar reference's energy has the same step for γ′ = 1."""
    # One pattern leads for any start near it.
    patterns = torch.eye(4, dtype=torch.float64) + 0.05 * normal(4, 4)
    energy = HopfieldEnergy.create(patterns, scale=12.0)
    start = patterns + 0.02 * normal(4, 4)
    ends = [energy.retrieve(start, damping=rate / (1 + rate), tol=1e-13).state for rate in (0.5, 2.0, 50.0)]
    for rate, end in zip((0.5, 2.0), ends, strict=False):
        yield close(f"fixed point of γ = {rate} and of γ = 50", end, ends[-1], CLOSED_FORM)
    shrunk = HopfieldEnergy.create(patterns, reference=activations.Scalar.create(0.5), scale=12.0)
    yield close("reference ½‖·‖²/2: its step and half of attention", shrunk.step(start), 0.5 * energy.step(start))
