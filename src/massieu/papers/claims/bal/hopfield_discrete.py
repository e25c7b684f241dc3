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
    symmetric = normal(units, units)
    built: dict[str, tuple[Energy, Tensor]] = {}
    kinds: tuple[tuple[str, Tensor, Values], ...] = (("±1", spins, "spins"), ("0/1", bits, "bits"))
    for name, states, values in kinds:
        built[f"classical, {name}"] = (
            BinaryHopfieldEnergy.create(symmetric + symmetric.T, bias, values=values),
            states,
        )
        for degree in (3, None):
            energy = DenseHopfieldEnergy.create(weights, bias, degree=degree, values=values)
            built[f"F = {'exp' if degree is None else 'z³'}, {name}"] = (energy, states)
    for name, (energy, states) in built.items():
        yield from _asynchronous(name, energy, states)
    # An odd number of whole powers of e never cancels: there are no ties.
    yield from _exponential_rule(normal(2 * patterns + 1, units).sign(), spins)
    yield from _synchronous(symmetric + symmetric.T, bias, spins)
    yield from _first_errors(normal, networks)
    yield from _exponential_storage(normal, max(1, networks // 10))


def _hidden_units(weights: Tensor, bias: Tensor, spins: Tensor) -> Iterator[Check]:
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
    couplings = weights.T @ weights
    diagonal = couplings.diagonal()
    hollow = BinaryHopfieldEnergy.create(couplings - torch.diag(diagonal), 0.5 * diagonal, values="bits")
    whole = BinaryHopfieldEnergy.create(couplings, values="bits")
    yield close("0/1: half the diagonal as bias", hollow(bits), whole(bits))


def _asynchronous(name: str, energy: Energy, states: Tensor) -> Iterator[Check]:
    """From all states: no sweep raises E; every unit takes the value of least E, by trying both."""
    path = energy.descend(states, steps=4)
    size = 1 + path.energies.abs().max()
    yield at_most(f"{name}: rise of E in a sweep, relative", (path.energies[1:] - path.energies[:-1]) / size, 1e-13)
    low = float(states.min())
    high = float(states.max())
    tried = states.clone()
    for unit in range(states.shape[-1]):
        below = tried.clone()
        above = tried.clone()
        below[:, unit] = low
        above[:, unit] = high
        better = energy(above) < energy(below)
        tried[:, unit] = torch.where(better, high, low)
    wrong = (tried != path.states[1]).any(-1).sum()
    yield at_most(f"{name}: states whose sweep is not the better value of each unit in turn", wrong, 0.0)


def _exponential_rule(patterns: Tensor, spins: Tensor) -> Iterator[Check]:
    """sgn Σ x_μi exp(Σ_{j≠i} x_μj v_j), since sinh(±1) = ±sinh 1."""
    tried = spins.clone()
    for unit in range(spins.shape[-1]):
        rest = tried @ patterns.T - patterns[:, unit] * tried[:, unit : unit + 1]
        pull = (patterns[:, unit] * rest.exp()).sum(-1)
        tried[:, unit] = pull.sign()
    wrong = (tried != DenseHopfieldEnergy.create(patterns).step(spins)).any(-1).sum()
    yield at_most("F = exp, patterns of ±1: states whose sweep differs from the rule by e^(overlap)", wrong, 0.0)


def _synchronous(couplings: Tensor, bias: Tensor, spins: Tensor) -> Iterator[Check]:
    """From all states, after more sweeps than there are states on any path. E(s) + E(s′) with one unit of each is what the
    rule looks at: a unit's field is half of what E falls by when it turns from −1 to 1, the diagonal apart."""
    hollow = BinaryHopfieldEnergy.create(couplings - torch.diag(couplings.diagonal()), bias)
    own = couplings.diagonal()

    def sweep(states: Tensor) -> Tensor:
        turned = states.unsqueeze(-2) * (1 - 2 * torch.eye(states.shape[-1], dtype=states.dtype))
        field = 0.5 * states * (hollow(turned) - hollow(states).unsqueeze(-1))
        return (field + own * states).sign()

    # The numbers of the states that follow each of them, all of which are there.
    place = 2.0 ** torch.arange(spins.shape[-1], dtype=spins.dtype)
    order = ((spins > 0).double() @ place).argsort()
    following = ((sweep(spins[order]) > 0).double() @ place).long()
    state = torch.arange(len(spins))
    for _ in range(2 * len(spins)):
        state = following[state]
    yield at_most(
        "synchronous updates: states not repeated after two", (following[following[state]] != state).sum(), 0.0
    )


def _first_errors(normal: Normal, networks: int) -> Iterator[Check]:
    """Load: at a stored pattern a unit is unstable where (P − 1)(d − 1) independent signs sum to less than −(d − 1)."""
    units = 60
    count = 13
    stored = normal(networks, count, units).sign()
    network = BinaryHopfieldEnergy.create(stored.mT @ stored - count * torch.eye(units, dtype=torch.float64))
    # A unit is unstable where E falls when it turns.
    turn = 1 - 2 * torch.eye(units, dtype=torch.float64)
    fall = torch.stack([network(stored) - network(stored * row) for row in turn], -1)
    unstable = (fall > 0).double().mean((-2, -1))
    signs = (count - 1) * (units - 1)
    minus = torch.arange(signs + 1, dtype=torch.float64)  # how many of the signs are −1
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
