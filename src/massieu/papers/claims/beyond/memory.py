"""N5, N14, N23: tokens that cluster on a sphere, scores of foreignness, Newton's steps."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from massieu.energy import HopfieldEnergy, boosting_energy, ood_score
from massieu.measures import Atoms
from massieu.papers.claims.claim import GRADIENT_BY_DIFFERENCES, Check, at_least, at_most, close
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.oracles import differences
from massieu.papers.claims.registry import claim
from massieu.papers.theory import ClusteringEnergy, newton_step
from massieu.population.clusters import cluster_count

_ROUNDING = 1e-12


# --- N5 --------------------------------------------------------------------------------------------------------------


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
        by_hand = weights.sum((-2, -1)) / (2 * scale * tokens**2)
        yield close(f"β = {scale}: −E and its formula", -energy(state), by_hand, _ROUNDING)
        attended = F.normalize(torch.softmax(scale * (state @ state.mT), -1) @ state, dim=-1)
        yield close(f"β = {scale}: step and normalised self-attention", energy.step(state), attended, _ROUNDING)
        path = energy.descend(state, steps=10).energies
        rise = (path[1:] - path[:-1]) / path[0].abs()
        yield at_most(f"β = {scale}: rise of E in a step, relative", rise, 1e-13 * (1 + scale))
    yield from _flow(normal, tokens, dimensions)
    for width in (dimensions, 2 * dimensions):
        start = F.normalize(normal(draws, tokens, width), dim=-1)
        end = ClusteringEnergy.create(1.0).descend(start, steps=100).states[-1]
        yield close(f"β = 1, d = {width}, 100 steps: cosines of the tokens", end @ end.mT, 1.0, 1e-6)
        found = cluster_count(torch.stack([start, end])).clusters.double()
        yield at_least(f"d = {width}: clusters at the start", found[0], 2.0)
        yield close(f"d = {width}: clusters in the end, and 1", found[1], 1.0)
    yield from _two_clusters(tokens, dimensions)


def _two_clusters(tokens: int, dimensions: int, cosine: float = 0.2, steps: int = 200) -> Iterator[Check]:
    """Two equal groups move as two tokens: with r = e^{−β(1−c)}, c ← (c(1 + r²) + 2r)/(1 + r² + 2rc), by at most 2r(1 + c).

    So the phase with two clusters lasts, while c ≤ c' < 1, at least (c' − c)e^{β(1−c')}/(2(1 + c')) steps.
    """
    half = (tokens + 1) // 2
    later = 0.5
    # By β = 5 the least is more than the one step in which nothing has moved yet.
    for scale in (5.0, 8.0, 11.0):
        state = torch.zeros(2 * half, dimensions, dtype=torch.float64)
        state[:half, 0] = 1.0
        state[half:, 0] = cosine
        state[half:, 1] = (1 - cosine**2) ** 0.5
        path = ClusteringEnergy.create(scale).descend(state, steps=steps)
        found = (path.states[:, 0] * path.states[:, -1]).sum(-1)
        expected = [cosine]
        for _ in range(steps):
            c = expected[-1]
            r = math.exp(-scale * (1 - c))
            expected.append((c * (1 + r * r) + 2 * r) / (1 + r * r + 2 * r * c))
        yield close(f"two groups, β = {scale}: cosine by step", found, torch.tensor(expected, dtype=torch.float64))
        least = (later - cosine) * math.exp(scale * (1 - later)) / (2 * (1 + later))
        apart = (found <= later).sum().item()
        yield at_least(
            f"two groups, β = {scale}: steps with c ≤ {later}, by the least there can be", apart / least, 1.0
        )


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
    small = F.normalize(state + 1e-4 * velocity, dim=-1)
    gain = on_the_sphere(small.flatten()) - on_the_sphere(state.flatten())
    yield at_least("gain of a small step of the flow", gain, 0.0)


# --- N14 -------------------------------------------------------------------------------------------------------------


@claim(
    "N14",
    title="Free-energy scores of foreign inputs",
    statement="Free energies score how foreign an input is. T·lse(f/T) of logits is lse of the last layer's weights "
    "as memory. The energy −2lse(β, (X,O)ξ) + lse(β, Xξ) + lse(β, Oξ) of Hopfield Boosting is β⁻¹ log[p(1 − p)], p "
    "the share of X, and is largest on the boundary p = ½.",
    source="Liu et al., arXiv 2010.03759; Zhang et al., ICLR 2023 (SHE); Hopfield Boosting, arXiv 2405.08766",
    status="quoted",
)
def scores_of_foreignness(atoms: int = 9, dimensions: int = 5, draws: int = 100, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, atoms=atoms, dimensions=dimensions)
    normal = normal_draws(seed)
    familiar = normal(atoms, dimensions)
    outliers = normal(atoms + 3, dimensions)
    state = normal(draws, dimensions)
    for scale in (0.3, 1.0, 4.0):
        inner, outer = (torch.logsumexp(scale * state @ each.T, -1) / scale for each in (familiar, outliers))
        both = torch.logsumexp(scale * state @ torch.cat([familiar, outliers]).T, -1) / scale
        boosted = boosting_energy(state, familiar, outliers, scale=scale)
        yield close(f"β = {scale}: E_b and its three terms", boosted, -2 * both + inner + outer)
        share = (scale * (inner - both)).exp()
        other = (scale * (outer - both)).exp()
        yield close(f"β = {scale}: E_b and β⁻¹ log[p(1 − p)]", boosted, (share * other).log() / scale)
        yield close(f"β = {scale}: p + (1 − p)", share + other, 1.0)
        yield at_most(f"β = {scale}: E_b + β⁻¹ log 4", boosted + math.log(4) / scale, _ROUNDING)
        score = ood_score(state, kind="hopfield_boosting", memory=familiar, outliers=outliers, scale=scale)
        yield close(f"β = {scale}: boosting score and β⁻¹ log[(1 − p)/p]", score, (other / share).log() / scale)
        score = ood_score(state, kind="she", memory=familiar, scale=scale)
        yield close(f"β = {scale}: Hopfield score and −lse(β, Xξ)", score, -inner)
        bias = normal(atoms)
        weights = Atoms.create(familiar, scale * bias)
        score = ood_score(state @ familiar.T + bias, kind="energy", scale=scale)
        as_memory = ood_score(state, kind="she", memory=weights, scale=scale)
        yield close(f"β = {scale}: energy of the logits, and of the weights as memory", score, as_memory)
    # Far out in a pattern's direction lse is its dot product, to log(N)/β.
    cold = ood_score(state, kind="she", memory=familiar, scale=1e6)
    label = (state @ familiar.T).argmax(-1)
    linear = ood_score(state, kind="she", memory=familiar, label=label)
    yield at_most("β = 10⁶: |lse − largest dot product|·β/log N", (cold - linear).abs() * 1e6 / math.log(atoms), 1.0)


# --- N23 -------------------------------------------------------------------------------------------------------------


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
        convex = torch.linalg.eigvalsh(hessian)[:, 0] > 0.1
        yield at_least(f"{name}: minima with a Hessian above 0.1", convex.double().sum(), 1.0)
        if scale == warm:
            by_hand = start - torch.linalg.solve(hessian, start - attended)
            lower = convex & (energy(by_hand) < energy(attended) - _ROUNDING)
            step = newton_step(energy, start)
            nearer = (step - by_hand).norm(dim=-1) < (step - attended).norm(dim=-1)
            expected = torch.where((lower | nearer).unsqueeze(-1), by_hand, attended)
            yield close(f"{name}: step and its formula", step[convex], expected[convex])
        state = start[convex]
        for _ in range(6):
            state = newton_step(energy, state)
        yield at_most(f"{name}: ‖∇E‖ after six steps", energy.force(state).norm(dim=-1), 5e-12)
        yield from _quadratic(name, energy, start[convex], minimum[convex])
    yield from _guarded(normal, patterns, draws)


def _quadratic(name: str, energy: HopfieldEnergy, start: Tensor, minimum: Tensor) -> Iterator[Check]:
    """‖e⁺‖ ≤ ½K‖e‖²/λ, λ the least curvature at the start, K = β²D³ ≥ ‖∇³E‖: β² times a third central moment of x·u."""
    error = (start - minimum).norm(dim=-1)
    after = (newton_step(energy, start) - minimum).norm(dim=-1)
    scale = energy.scale
    spread = torch.cdist(energy.memory.points, energy.memory.points).max()
    third = scale**2 * spread**3
    least = torch.linalg.eigvalsh(energy.hessian(start))[:, 0]
    yield at_most(
        f"{name}: error by ½‖∇³E‖/λ times the square of the one before",
        after / (0.5 * third / least * error.square()),
        1.0,
    )


def _guarded(normal: Normal, patterns: Tensor, draws: int) -> Iterator[Check]:
    """From anywhere, cold and warm, by indefinite Hessians too."""
    for scale in (0.5, 5.0, 50.0):
        energy = HopfieldEnergy.create(patterns, scale=scale)
        state = 2 * normal(draws, patterns.shape[-1])
        rises = []
        for _ in range(6):
            after = newton_step(energy, state)
            rises.append(((energy(after) - energy(state)) / (1 + energy(state).abs())).max())
            state = after
        yield at_most(f"β = {scale}: rise of E in a guarded step, relative", torch.stack(rises), 1e-13)
