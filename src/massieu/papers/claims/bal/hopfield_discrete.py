"""B4: Hopfield networks of two-valued units."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from massieu.energy import BinaryHopfieldEnergy, DenseHopfieldEnergy, Energy
from massieu.energy.discrete import Values
from massieu.measures import Poisson, affine
from massieu.papers.claims.claim import BAL, QUADRATURE, Check, at_most, close, mean_of_draws
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.oracles import log_integral, spin_states
from massieu.papers.claims.registry import claim


@claim(
    "B4",
    title="Classical and modern discrete networks",
    statement="Gaussian hidden units leave E(v) = −a·v − ½vᵀWWᵀv, Poisson units −a·v − Σ e^{w_μ·v} + M. "
    "Asynchronous updates never raise these energies, nor any −Σ F(x_μ·v). Synchronous updates of the classical "
    "network end in a fixed point or a cycle of two.",
    source=f"{BAL}, §2.3, the two items after the effective energy; capacities: Demircigil et al., arXiv 1702.01929",
    status="quoted",
    corrected="For units of 0 and 1 the diagonal of WWᵀ shifts the bias by half of it. The constant beside the exponential "
    "energy is the number of hidden units.",
)
def discrete_hopfield_networks(
    units: int = 8, patterns: int = 4, networks: int = 200, seed: int = 0
) -> Iterator[Check]:
    check_at_least(2, units=units, patterns=patterns)
    normal = normal_draws(seed)
    weights = normal(patterns, units) * units**-0.5
    bias = normal(units)
    spins = spin_states(units)
    bits = (1 + spins) / 2
    yield from _hidden_units(weights, bias, spins)
    yield from _diagonal(weights, bits)
    square = normal(units, units)
    couplings = square + square.T
    kinds: tuple[tuple[str, Tensor, Values], ...] = (("±1", spins, "spins"), ("0/1", bits, "bits"))
    for name, states, values in kinds:
        classical = BinaryHopfieldEnergy.create(couplings, bias, values=values)
        cubic = DenseHopfieldEnergy.create(weights, bias, degree=3, values=values)
        exponential = DenseHopfieldEnergy.create(weights, bias, degree=None, values=values)
        yield from _asynchronous(f"classical, {name}", classical, states)
        yield from _asynchronous(f"F = z³, {name}", cubic, states)
        yield from _asynchronous(f"F = exp, {name}", exponential, states)
    # An odd number of whole powers of e never cancels: there are no ties.
    yield from _exponential_rule(normal(2 * patterns + 1, units).sign(), spins)
    yield from _synchronous(couplings, bias, spins)
    yield from _first_errors(normal, networks)
    yield from _exponential_storage(normal, max(1, networks // 10))


def _hidden_units(weights: Tensor, bias: Tensor, spins: Tensor) -> Iterator[Check]:
    """Gaussian hidden units leave the classical energy, Poisson units the exponential one and their number."""
    field = spins @ weights.T
    # The integrand is N(t, 1) times e^(t²/2).
    t = field.flatten()
    reach = 12 + float(t.abs().max())
    gaussian = log_integral(
        lambda h: t.unsqueeze(-1) * h - 0.5 * h.square() - 0.5 * math.log(2 * math.pi), -reach, reach
    ).reshape(field.shape)
    energy = BinaryHopfieldEnergy.of_patterns(weights, bias)(spins)
    yield close("Gaussian hidden units: −log ∫ and E", energy, -spins @ bias - gaussian.sum(-1), QUADRATURE)
    counts = torch.arange(200, dtype=torch.float64)
    summed = torch.logsumexp(field.unsqueeze(-1) * counts - 1 - torch.lgamma(counts + 1), -1).sum(-1)
    count = len(weights)
    energy = DenseHopfieldEnergy.create(weights, bias)(spins)
    yield close("Poisson hidden units: −log Σ and E + M", energy + count, -spins @ bias - summed)
    hidden = affine(Poisson.create(torch.ones(count, dtype=torch.float64)), weights.T)
    yield close("the same by the measure of the units", energy + count, -spins @ bias - hidden.log_partition(spins))


def _diagonal(weights: Tensor, bits: Tensor) -> Iterator[Check]:
    """Since v² = v for bits, the diagonal of the couplings is a bias of half its size."""
    couplings = weights.T @ weights
    diagonal = couplings.diagonal()
    hollow = BinaryHopfieldEnergy.create(couplings - torch.diag(diagonal), 0.5 * diagonal, values="bits")
    whole = BinaryHopfieldEnergy.create(couplings, values="bits")
    yield close("0/1: half the diagonal as bias", hollow(bits), whole(bits))


def _asynchronous(name: str, energy: Energy, states: Tensor) -> Iterator[Check]:
    """No sweep raises E, from any state; every unit in turn takes the value of least E, found by trying both."""
    path = energy.descend(states, steps=4)
    energy_scale = 1 + path.energies.abs().max()
    yield at_most(
        f"{name}: rise of E in a sweep, relative", (path.energies[1:] - path.energies[:-1]) / energy_scale, 1e-13
    )
    low = float(states.min())
    high = float(states.max())
    swept = states.clone()
    for unit in range(states.shape[-1]):
        with_low = swept.clone()
        with_high = swept.clone()
        with_low[:, unit] = low
        with_high[:, unit] = high
        high_is_better = energy(with_high) < energy(with_low)
        swept[:, unit] = torch.where(high_is_better, high, low)
    differing = (swept != path.states[1]).any(-1).sum()
    yield at_most(f"{name}: states whose sweep is not the better value of each unit in turn", differing, 0.0)


def _exponential_rule(patterns: Tensor, spins: Tensor) -> Iterator[Check]:
    """The update of F = exp is sgn Σ x_μi exp(Σ_{j≠i} x_μj v_j), since sinh(±1) = ±sinh 1."""
    swept = spins.clone()
    for unit in range(spins.shape[-1]):
        overlap_of_rest = swept @ patterns.T - patterns[:, unit] * swept[:, unit : unit + 1]
        pull = (patterns[:, unit] * overlap_of_rest.exp()).sum(-1)
        swept[:, unit] = pull.sign()
    differing = (swept != DenseHopfieldEnergy.create(patterns).step(spins)).any(-1).sum()
    yield at_most("F = exp, patterns of ±1: states whose sweep differs from the rule by e^(overlap)", differing, 0.0)


def _synchronous(couplings: Tensor, bias: Tensor, spins: Tensor) -> Iterator[Check]:
    """Synchronous updates end in a fixed point or a cycle of two, from any state.

    More sweeps are made than there are states on any path. A unit's field is half of what E falls by when the unit turns from
    −1 to 1; the diagonal, which cancels there, is added.
    """
    diagonal = couplings.diagonal()
    hollow = BinaryHopfieldEnergy.create(couplings - torch.diag(diagonal), bias)

    def sweep(states: Tensor) -> Tensor:
        # Each state with one unit turned, (states, units, units).
        turned = states.unsqueeze(-2) * (1 - 2 * torch.eye(states.shape[-1], dtype=states.dtype))
        field = 0.5 * states * (hollow(turned) - hollow(states).unsqueeze(-1))
        return (field + diagonal * states).sign()

    # States are numbered by their bits, so that `successor` maps the number of a state to that of the next.
    place_value = 2.0 ** torch.arange(spins.shape[-1], dtype=spins.dtype)
    order = ((spins > 0).double() @ place_value).argsort()
    successor = ((sweep(spins[order]) > 0).double() @ place_value).long()
    state = torch.arange(len(spins))
    for _ in range(2 * len(spins)):
        state = successor[state]
    not_repeated = (successor[successor[state]] != state).sum()
    yield at_most("synchronous updates: states not repeated after two", not_repeated, 0.0)


def _first_errors(normal: Normal, networks: int) -> Iterator[Check]:
    """Load: at a stored pattern a unit is unstable where (P − 1)(d − 1) independent signs sum to less than −(d − 1)."""
    units = 60
    patterns = 13
    stored = normal(networks, patterns, units).sign()
    network = BinaryHopfieldEnergy.create(stored.mT @ stored - patterns * torch.eye(units, dtype=torch.float64))
    # A unit is unstable where E falls when it turns.
    turn = 1 - 2 * torch.eye(units, dtype=torch.float64)
    fall = torch.stack([network(stored) - network(stored * row) for row in turn], -1)
    unstable = (fall > 0).double().mean((-2, -1))
    # The binomial law of the number of −1 among the signs.
    signs = (patterns - 1) * (units - 1)
    minus = torch.arange(signs + 1, dtype=torch.float64)
    total = torch.tensor(float(signs + 1), dtype=torch.float64)
    log_count = torch.lgamma(total) - torch.lgamma(minus + 1) - torch.lgamma(total - minus)
    tail = (log_count - signs * math.log(2)).exp()[signs - 2 * minus < -(units - 1)].sum()
    yield mean_of_draws("13 patterns of 60 spins: unstable units", unstable, tail)


def _exponential_storage(normal: Normal, networks: int) -> Iterator[Check]:
    """By Chebyshev a unit is unstable with probability of at most P·(cosh(2)/e²)^(d−1): here 1e-9, 1e-5 in a network."""
    stored = normal(networks, 256, 40).sign()
    sweep: Callable[[Tensor], Tensor] = DenseHopfieldEnergy.create(stored).step
    changed = (sweep(stored) != stored).sum()
    yield at_most("F = exp, 256 patterns of 40 spins (0.138·40 = 5.5): units that leave them", changed, 0.0)
