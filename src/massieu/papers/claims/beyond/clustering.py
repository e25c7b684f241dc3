"""N5: tokens that cluster on a sphere."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from massieu.papers.claims.claim import GRADIENT_BY_DIFFERENCES, Check, at_least, at_most, close
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.oracles import differences
from massieu.papers.claims.registry import claim
from massieu.papers.theory import ClusteringEnergy
from massieu.population.clusters import cluster_count

_ROUNDING = 1e-12


@claim(
    "N5",
    title="Clustering on the sphere",
    statement="On the sphere, ẋᵢ = Proj Σ e^{β⟨xᵢ,xⱼ⟩}xⱼ is gradient ascent of (1/2βn²) Σ Σ e^{β⟨xᵢ,xⱼ⟩}. That sum "
    "never falls either if all tokens attend to each other at once and are then projected onto the sphere. In three "
    "dimensions and more, generic tokens end in one cluster. But two groups stay below a cosine c for at least "
    "e^{β(1−c)} steps, up to a factor that does not depend on β.",
    source="Geshkovski, Letrouit, Polyanskiy, Rigollet, arXiv 2312.10794; the discrete step is derived",
    status="quoted",
)
def clustering_on_the_sphere(tokens: int = 12, dimensions: int = 3, draws: int = 20, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, tokens=tokens, dimensions=dimensions)
    normal = normal_draws(seed)
    for scale in (0.5, 4.0, 40.0):
        energy = ClusteringEnergy.create(scale)
        state = F.normalize(normal(draws, tokens, dimensions), dim=-1)
        weights = (scale * (state @ state.mT)).exp()
        formula = weights.sum((-2, -1)) / (2 * scale * tokens**2)
        yield close(f"β = {scale}: −E and its formula", -energy(state), formula, _ROUNDING)
        attended = F.normalize(torch.softmax(scale * (state @ state.mT), -1) @ state, dim=-1)
        yield close(f"β = {scale}: step and normalised self-attention", energy.step(state), attended, _ROUNDING)
        path = energy.descend(state, steps=10).energies
        rise = (path[1:] - path[:-1]) / path[0].abs()
        yield at_most(f"β = {scale}: rise of E in a step, relative", rise, 1e-13 * (1 + scale))
    yield from _flow(normal, tokens, dimensions)
    for width in (dimensions, 2 * dimensions):
        yield from _one_cluster(F.normalize(normal(draws, tokens, width), dim=-1))
    yield from _two_clusters(tokens, dimensions)


def _one_cluster(start: Tensor) -> Iterator[Check]:
    """Generic tokens end in one cluster."""
    width = start.shape[-1]
    end = ClusteringEnergy.create(1.0).descend(start, steps=100).states[-1]
    yield close(f"β = 1, d = {width}, 100 steps: cosines of the tokens", end @ end.mT, 1.0, 1e-6)
    clusters_at_start, clusters_at_end = cluster_count(torch.stack([start, end])).clusters.double()
    yield at_least(f"d = {width}: clusters at the start", clusters_at_start, 2.0)
    yield close(f"d = {width}: clusters in the end, and 1", clusters_at_end, 1.0)


def _two_clusters(tokens: int, dimensions: int, cosine: float = 0.2, steps: int = 200) -> Iterator[Check]:
    """Two equal groups move as two tokens: with r = e^{−β(1−c)}, c ← (c(1 + r²) + 2r)/(1 + r² + 2rc), by at most 2r(1 + c).

    So the phase with two clusters lasts, while c ≤ c' < 1, at least (c' − c)e^{β(1−c')}/(2(1 + c')) steps.
    """
    half = (tokens + 1) // 2
    later_cosine = 0.5
    # By β = 5 the least is more than the one step in which nothing has moved yet.
    for scale in (5.0, 8.0, 11.0):
        state = torch.zeros(2 * half, dimensions, dtype=torch.float64)
        state[:half, 0] = 1.0
        state[half:, 0] = cosine
        state[half:, 1] = (1 - cosine**2) ** 0.5
        path = ClusteringEnergy.create(scale).descend(state, steps=steps)
        cosines = (path.states[:, 0] * path.states[:, -1]).sum(-1)
        expected = [cosine]
        for _ in range(steps):
            c = expected[-1]
            r = math.exp(-scale * (1 - c))
            expected.append((c * (1 + r * r) + 2 * r) / (1 + r * r + 2 * r * c))
        yield close(f"two groups, β = {scale}: cosine by step", cosines, torch.tensor(expected, dtype=torch.float64))
        least_steps = (later_cosine - cosine) * math.exp(scale * (1 - later_cosine)) / (2 * (1 + later_cosine))
        steps_apart = (cosines <= later_cosine).sum().item()
        name = f"two groups, β = {scale}: steps with c ≤ {later_cosine}, by the least there can be"
        yield at_least(name, steps_apart / least_steps, 1.0)


def _flow(normal: Normal, tokens: int, dimensions: int) -> Iterator[Check]:
    """The tangential gradient of −E is the flow's velocity over n², and E falls along it."""
    scale = 2.0
    state = F.normalize(normal(tokens, dimensions), dim=-1)
    pull = (scale * (state @ state.T)).exp() @ state
    velocity = pull - (pull * state).sum(-1, keepdim=True) * state

    def on_the_sphere(flat: Tensor) -> Tensor:
        x = F.normalize(flat.reshape(tokens, dimensions), dim=-1)
        return (scale * (x @ x.T)).exp().sum() / (2 * scale * tokens**2)

    slope = differences(on_the_sphere, state.flatten()).reshape(state.shape)
    yield close(
        "differences on the sphere and the flow's velocity/n²", slope, velocity / tokens**2, GRADIENT_BY_DIFFERENCES
    )
    after = F.normalize(state + 1e-4 * velocity, dim=-1)
    gain = on_the_sphere(after.flatten()) - on_the_sphere(state.flatten())
    yield at_least("gain of a small step of the flow", gain, 0.0)
