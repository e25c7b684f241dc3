"""B5, B11: the modern Hopfield memory; its step is attention."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.energy import HopfieldEnergy, bounds
from massieu.measures import Atoms
from massieu.papers.claims.claim import (
    BAL,
    CLOSED_FORM,
    GRADIENT_BY_DIFFERENCES,
    HESSIAN_BY_DIFFERENCES,
    Check,
    at_least,
    at_most,
    close,
)
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.oracles import differences
from massieu.papers.claims.registry import claim
from massieu.papers.theory import damped_descent, energy_range, least_descent, path_length, smallest_move

_RAMSAUER = "constants by Ramsauer et al. (arXiv 2008.02217), proofs derived"

_EDGE = 1e-12
"""Rounding, relative to the size of the energies: how far an inequality may seem to fail."""


# --- B5 --------------------------------------------------------------------------------------------------------------


@claim(
    "B5",
    title="Modern continuous Hopfield network",
    statement="E(ξ) = ½‖ξ‖² − lse_β(Xξ) + β⁻¹ log N + ½M² lies between 0 and 2M² where ‖ξ‖ ≤ M. Its gradient step "
    "is attention, which lowers it by at least ½‖Δ‖²; a step with damping γ in (0, 2) lowers it by at least γ(1 − "
    "γ/2)‖∇E‖². The map has the Lipschitz constant βD²/4, retrieves pattern i to within 2M(N − 1)e^{−βΔᵢ}, and "
    "stores exponentially many patterns.",
    source=f"{BAL}, §1 and §2.4; {_RAMSAUER}",
    status="quoted",
    corrected="The paper sets β = 1 and omits the constants, which do not change the gradient.",
)
def modern_hopfield_memory(cases: int = 2000, atoms: int = 8, dimensions: int = 5, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, atoms=atoms, dimensions=dimensions)
    normal = normal_draws(seed)
    # Memories of all sizes and temperatures, and states of up to their size and beyond.
    patterns = normal(cases, atoms, dimensions) * normal(cases, 1, 1).exp()
    scale = normal(cases).exp()
    energy = HopfieldEnergy.create(patterns, scale=scale)
    norm = bounds.largest_norm(energy)
    state = normal(cases, dimensions) * (norm / math.sqrt(dimensions)).unsqueeze(-1)
    yield from _derivatives(normal, atoms, dimensions)
    yield from _range(energy, state, norm)
    yield from _descent(energy, state)
    yield from _contraction(energy, state)
    yield from _retrieval(energy, state, norm)
    yield from _pitchfork(normal, dimensions)
    yield from _capacity()


def _attention(patterns: Tensor, scale: float, state: Tensor) -> Tensor:
    return torch.softmax(scale * state @ patterns.T, -1) @ patterns


def _derivatives(normal: Normal, atoms: int, dimensions: int) -> Iterator[Check]:
    """Property 1 of B5 in docs/theory/bal.md: E, ∇E = ξ − attention and ∇²E = I − β Cov, for β ≠ 1."""
    patterns = normal(atoms, dimensions)
    state = normal(20, dimensions)
    scale = 0.6
    energy = HopfieldEnergy.create(patterns, scale=scale)
    attended = _attention(patterns, scale, state)
    formula = 0.5 * state.square().sum(-1) - torch.logsumexp(scale * state @ patterns.T, -1) / scale
    formula = formula + math.log(atoms) / scale + 0.5 * patterns.square().sum(-1).max()
    yield close("E and its formula", energy(state), formula)
    yield close("ξ − ∇E and attention", state + energy.force(state), attended)
    yield close(
        "differences of E and ξ − attention", differences(energy, state), state - attended, GRADIENT_BY_DIFFERENCES
    )
    second = differences(lambda x: differences(energy, x, 1e-4), state, 1e-4)
    weights = torch.softmax(scale * state @ patterns.T, -1)
    centred = patterns - attended.unsqueeze(-2)
    covariance = (weights.unsqueeze(-1) * centred).mT @ centred
    expected = torch.eye(dimensions, dtype=torch.float64) - scale * covariance
    yield close("∇²E and I − β Cov", energy.hessian(state), expected)
    yield close("differences and I − β Cov", second, expected, HESSIAN_BY_DIFFERENCES)


def _range(energy: HopfieldEnergy, state: Tensor, norm: Tensor) -> Iterator[Check]:
    """Property 2: E ≥ 0 everywhere, and E ≤ 2M² where ‖ξ‖ ≤ M."""
    lowest, highest = energy_range(energy)
    yield at_least("E/M² anywhere", (energy(3 * state) - lowest) / norm.square(), -_EDGE)
    inside = state * (norm / state.norm(dim=-1)).clamp(max=1).unsqueeze(-1)
    yield at_most("E/2M² where ‖ξ‖ ≤ M", energy(inside) / highest, 1 + _EDGE)


def _descent(energy: HopfieldEnergy, state: Tensor) -> Iterator[Check]:
    """Properties 3 and 4: an attention step lowers E by ½‖Δ‖² at least, a damped step by γ(1 − γ/2)‖∇E‖²."""
    path = energy.descend(state, steps=5)
    energy_scale = 1 + path.energies[0].abs() + state.square().sum(-1)
    decrease = path.energies[:-1] - path.energies[1:]
    least = least_descent(path.states[:-1], path.states[1:])
    yield at_least("E(ξ) − E(ξ⁺) − ½‖ξ − ξ⁺‖², relative", (decrease - least) / energy_scale, -_EDGE)
    moves = (path.states[1:] - path.states[:-1]).norm(dim=-1)
    total = moves.square().sum(0) - 2 * (path.energies[0] - path.energies[-1])
    yield at_most("Σ‖Δ‖² − 2(E₀ − E), relative", total / energy_scale, _EDGE)
    shortest = moves.amin(0).square() - smallest_move(path.energies[0], 5).square()
    yield at_most("least ‖Δ‖² of 5 − 2E₀/5, relative", shortest / energy_scale, _EDGE)
    force = energy.force(state)
    for damping in (0.1, 0.5, 1.5, 1.9):
        decrease = energy(state) - energy(energy.step(state, damping=damping))
        excess = (decrease - damped_descent(force, damping)) / energy_scale
        yield at_least(f"damping {damping}: E falls by γ(1 − γ/2)‖∇E‖², relative", excess, -_EDGE)


def _contraction(energy: HopfieldEnergy, state: Tensor) -> Iterator[Check]:
    """Properties 5 and 6: the map has the Lipschitz constant βD²/4, and below one its paths end in one point."""
    factor = bounds.lipschitz(energy)
    jacobian = torch.eye(state.shape[-1], dtype=torch.float64) - energy.hessian(state)
    yield at_most("‖∂f/∂ξ‖/(βD²/4)", torch.linalg.matrix_norm(jacobian, ord=2) / factor, 1 + _EDGE)
    other = state.flip(0)
    steepness = (energy.step(state) - energy.step(other)).norm(dim=-1) / (state - other).norm(dim=-1)
    yield at_most("‖f(ξ) − f(ξ′)‖/‖ξ − ξ′‖/(βD²/4)", steepness / factor, 1 + _EDGE)
    after = energy.step(state)
    force = energy.force(after).norm(dim=-1)
    move = (state - after).norm(dim=-1)
    yield at_most("‖∇E(ξ⁺)‖ − L‖ξ − ξ⁺‖, relative", (force - factor * move) / (1 + move), 1e3 * _EDGE)
    # The same memories, warm enough that L ≤ 0.4.
    contracting = HopfieldEnergy.create(energy.memory, scale=energy.scale * (0.4 / factor).clamp(max=1.0))
    path = contracting.descend(state, steps=28).states
    moves = (path[1:] - path[:-1]).norm(dim=-1)
    longest = path_length(moves[0], bounds.lipschitz(contracting))
    yield at_most("length of the path by ‖Δ₀‖/(1 − L), L ≤ 0.4", moves.sum(0) / longest, 1 + 1e-9)
    other_end = contracting.descend(other, steps=28).states[-1]
    # 0.4²⁸ = 7e-12.
    distance = (path[-1] - other_end).norm(dim=-1) / (1 + state.norm(dim=-1) + other.norm(dim=-1))
    yield at_most("distance of two ends, L ≤ 0.4, relative", distance, CLOSED_FORM)


def _retrieval(energy: HopfieldEnergy, state: Tensor, norm: Tensor) -> Iterator[Check]:
    """Property 7: one step retrieves pattern i to within its bound, from any state and for every i."""
    memory = energy.memory
    bound = bounds.retrieval_bound(energy, state)
    scores = energy.scale.unsqueeze(-1) * (memory.points @ state.unsqueeze(-1)).squeeze(-1)
    other_weights = 1 - torch.softmax(scores, -1)
    yield at_most("1 − pᵢ less (N − 1)e^(−βΔᵢ)", other_weights - bound.weight, _EDGE)
    distance = (energy.step(state).unsqueeze(-2) - memory.points).norm(dim=-1)
    yield at_most("(‖f(ξ) − xᵢ‖ less its bound)/M", (distance - bound.distance) / norm.unsqueeze(-1), 1e2 * _EDGE)
    unit_patterns = torch.nn.functional.normalize(memory.points, dim=-1)
    yield from _basins(unit_patterns)
    yield from _pairs(unit_patterns[:, 0])


def _basins(patterns: Tensor) -> Iterator[Check]:
    """Property 7: balls about patterns of norm one that keep a fixed point, and those that keep only one."""
    # Cold enough that most patterns have a ball of a tenth of their norm.
    radius = 0.1
    energy = HopfieldEnergy.create(patterns, scale=60.0)
    basin = bounds.basin(energy, radius)
    # Towards the nearest other pattern, where the lead falls fastest of all to a rival.
    points = energy.memory.points
    similarity = (points @ points.mT).masked_fill(torch.eye(points.shape[-2], dtype=torch.bool), -torch.inf)
    nearest = points.gather(-2, similarity.argmax(-1).unsqueeze(-1).expand_as(points))
    start = points + radius * torch.nn.functional.normalize(nearest - points, dim=-1)
    after = energy.step(start)
    end_from_edge = energy.retrieve(start, steps=6).state
    end_from_middle = energy.retrieve(points, steps=6).state
    yield at_least("patterns with a ball that keeps its one fixed point", basin.unique.double().sum(), 1.0)
    yield at_most("‖f(ξ) − xᵢ‖/r on the edge of such balls", (after - points).norm(dim=-1)[basin.exists] / radius, 1.0)
    excess = (end_from_edge - points).norm(dim=-1) - basin.distance
    yield at_most("distance of its fixed point by the bound", excess[basin.exists], _EDGE)
    distance = (end_from_edge - end_from_middle).norm(dim=-1)
    yield at_most("distance of two ends in one ball", distance[basin.unique], CLOSED_FORM)


def _pairs(pattern: Tensor) -> Iterator[Check]:
    """The bounds of property 7 are attained for patterns ±x: the step towards the other takes 2M·radius off the lead."""
    # A norm other than 1, so that a power of M too many or too few is noticed.
    norm = 1.5
    pattern = norm * pattern
    scale = torch.linspace(0.3, 9.0, len(pattern), dtype=torch.float64) / norm**2
    energy = HopfieldEnergy.create(torch.stack([pattern, -pattern], -2), scale=scale)
    for share in (0.1, 0.3, 0.5):
        radius = share * norm
        basin = bounds.basin(energy, radius)
        edge = (1 - share) * pattern
        distance = (energy.step(edge) - pattern).norm(dim=-1)
        exists = basin.exists[:, 0]
        yield at_least(f"pairs ±x: balls of radius {share}‖x‖ that are promised", exists.double().sum(), 1.0)
        ratio = distance[exists] / radius
        yield at_most(f"pairs ±x: ‖f(ξ) − x‖/r at the edge of such balls, r = {share}‖x‖", ratio, 1.0)
        # ‖f(ξ) − x‖ is 2M times the other's weight, whose odds are e^(−βΔ) with Δ = (x − (−x))·ξ.
        odds_of_other = torch.exp(-scale * norm**2 * (2 - 2 * share))
        attained = distance * (1 + odds_of_other)
        yield close(
            f"pairs ±x: the ball's bound and ‖f(ξ) − x‖(1 + e^(−βΔ)), r = {share}‖x‖", basin.distance[:, 0], attained
        )
        bound = bounds.retrieval_bound(energy, edge.unsqueeze(-2))
        weight_bound = bound.weight[:, 0, 0]
        yield close(f"pairs ±x: (N − 1)e^(−βΔ) and the other's odds, ξ = {1 - share:g}x", weight_bound, odds_of_other)
        distance_bound = bound.distance[:, 0, 0]
        yield close(
            f"pairs ±x: the step's bound and ‖f(ξ) − x‖(1 + e^(−βΔ)), ξ = {1 - share:g}x", distance_bound, attained
        )


def _pitchfork(normal: Normal, dimensions: int) -> Iterator[Check]:
    """Property 6 is sharp: for patterns ±a there is one fixed point up to β‖a‖² = 1 = βD²/4 and two more beyond it."""
    a = normal(dimensions)
    for product in (0.95, 1.05):
        scale = product / float(a.square().sum())
        energy = HopfieldEnergy.create(torch.stack([a, -a]), scale=scale)
        yield close(f"β‖a‖² = {product}: βD²/4", bounds.lipschitz(energy), product)
        end = energy.retrieve(a, steps=500).state.norm() / a.norm()
        root = _largest_root(product)
        yield close(f"β‖a‖² = {product}: ‖ξ*‖/‖a‖ and the root of t = tanh(β‖a‖²t)", end, root)


def _largest_root(product: float) -> float:
    """Of t = tanh(β‖a‖²t), where t·a is a fixed point: by bisection; 0 up to β‖a‖² = 1."""
    if product <= 1:
        return 0.0
    low = 1e-3
    high = 1.0
    for _ in range(100):
        middle = 0.5 * (low + high)
        if math.tanh(product * middle) > middle:
            low = middle
        else:
            high = middle
    return high


def _capacity() -> Iterator[Check]:
    """Property 8, capacity: the constants of the literature, to the digits printed there."""
    for dimension, radius, expected in ((20, 3.0, 3.1546), (75, 1.0, 1.3718)):
        base = bounds.capacity(dimension, scale=1.0, radius=radius).base
        yield close(f"c for β = 1, K = {radius:g}, d = {dimension}, p = 0.001", base, expected, 5e-5)
        argument = 2 / (dimension - 1) * (1 + math.log(2 * radius**2 * 0.001 * (dimension - 1)))
        b = 0.4 * radius**2
        lambert = b / base
        yield close(
            f"W = b/c solves We^W = e^(a + ln b), d = {dimension}", lambert + math.log(lambert), argument + math.log(b)
        )


# --- B11 -------------------------------------------------------------------------------------------------------------


@claim(
    "B11",
    title="One attention step as energy descent",
    statement="Cross-attention without values or projections is one unit gradient step on the Hopfield energy of "
    "its keys. Masks are −∞ inside lse, and heads are a sum of energies on subspaces. Values are in the energy only "
    "if vₙ = c·kₙ. The energy of a context that attends to itself has to be differentiated through both arguments.",
    source=f"{BAL}, §1; the author's other posts on the same energy",
    status="reconstructed",
)
def attention_is_a_descent_step(atoms: int = 10, dimensions: int = 4, heads: int = 3, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, atoms=atoms, dimensions=dimensions, heads=heads)
    normal = normal_draws(seed)
    scale = dimensions**-0.5
    keys = normal(heads, atoms, dimensions)
    query = normal(heads, 6, dimensions)
    log_weight = normal(heads, atoms)
    log_weight[:, ::3] = -torch.inf

    def step(point: Tensor) -> Tensor:
        """A unit gradient step on the heads' total energy, by autograd."""
        scores = scale * point @ keys.mT + log_weight.unsqueeze(-2)
        total = 0.5 * point.square().sum(-1) - torch.logsumexp(scores, -1) / scale
        return point - torch.autograd.grad(total.sum(), point)[0]

    attended = torch.softmax(scale * query @ keys.mT + log_weight.unsqueeze(-2), -1) @ keys
    energy = HopfieldEnergy.create(Atoms.create(keys, log_weight), scale=scale)
    yield close("unit gradient step of all heads, masked, and attention", step(query.requires_grad_()), attended, 1e-12)
    query = query.detach()
    yield close("step of the library and attention", energy.step(query), attended, 1e-12)
    other_keys = torch.where((log_weight == -torch.inf).unsqueeze(-1), 1e3 * normal(heads, atoms, dimensions), keys)
    masked = HopfieldEnergy.create(Atoms.create(other_keys, log_weight), scale=scale)
    yield close("energy with other keys under the mask", masked(query), energy(query))
    # Each head's keys in a subspace of one space: (heads, atoms, heads·dimensions), and queries (6, heads·dimensions).
    subspace_keys = torch.block_diag(*keys).reshape(heads, atoms, -1)
    subspaces = HopfieldEnergy.create(Atoms.create(subspace_keys, log_weight), scale=scale)
    joint_query = query.movedim(0, 1).reshape(6, -1).expand(heads, -1, -1)
    yield close(
        "lse of keys in the subspaces of one space, summed, and of the heads",
        _log_sum_exp(subspaces, joint_query).sum(0),
        _log_sum_exp(energy, query).sum(0),
    )
    yield from _values(normal, keys[0], query[0], scale)
    yield from _context(normal(atoms, dimensions), scale)


def _log_sum_exp(energy: HopfieldEnergy, state: Tensor) -> Tensor:
    """lse_β(Xξ), which is ½‖ξ‖² − E with the constants of E."""
    return 0.5 * state.square().sum(-1) - energy(state) + energy.constant.unsqueeze(-1)


def _values(normal: Normal, keys: Tensor, query: Tensor, scale: float) -> Iterator[Check]:
    """Only values c·keys are in the energy: the Jacobian of a map that is a gradient is symmetric."""
    memory = Atoms.create(keys)

    def asymmetry(values: Tensor) -> Tensor:
        slope = torch.func.vmap(torch.func.jacrev(lambda q: memory.expectation(scale * q, values)))(query)
        return torch.linalg.matrix_norm(slope - slope.mT) / torch.linalg.matrix_norm(slope)

    yield at_most("values c·keys: asymmetry of the Jacobian", asymmetry(1.7 * keys), CLOSED_FORM)
    independent = normal(*keys.shape)
    yield at_least("values of their own: asymmetry of the Jacobian", asymmetry(independent), 1e4 * CLOSED_FORM)


def _context(tokens: Tensor, scale: float) -> Iterator[Check]:
    """The energy Σ_i lse(x_i·X) of a context that attends to itself: queries and keys both move."""

    def total(tokens: Tensor) -> Tensor:
        return torch.logsumexp(scale * tokens @ tokens.T, -1).sum() / scale

    slope = torch.func.grad(total)(tokens)
    weights = torch.softmax(scale * tokens @ tokens.T, -1)
    yield close("gradient through queries and keys, and (P + Pᵀ)X", slope, (weights + weights.T) @ tokens)
    query_slope = torch.func.grad(lambda x: torch.logsumexp(scale * x @ tokens.T, -1).sum() / scale)(tokens)
    yield close("gradient through queries alone, and PX", query_slope, weights @ tokens)
    equal = tokens[:1].expand_as(tokens)
    yield close("tokens that are all one: the gradient is twice attention", torch.func.grad(total)(equal), 2 * equal)
