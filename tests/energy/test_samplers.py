"""Samplers of machines and memories against enumeration and quadrature: block Gibbs, annealing, Langevin."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch
from tests.support.rows import every_row, some_slow

from massieu.energy import BoltzmannMachine, HopfieldDensity, HopfieldEnergy
from massieu.inference import gibbs_init, gibbs_step, langevin_init, langevin_noise, langevin_step
from massieu.measures import (
    Atoms,
    Bernoulli,
    Categorical,
    Constant,
    Exponential,
    Gamma,
    Gaussian,
    Laplace,
    Poisson,
    Sphere,
    Spin,
    Uniform,
    product,
)

CHAINS = 10_000


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def drawn(*shape, size=1.0, seed=0):
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gauss(low, high, nodes=120):
    """Points and log-weights of the Gauss–Legendre rule."""
    x, w = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(nodes))
    return low + (high - low) * (x + 1) / 2, ((high - low) / 2 * w).log()


def gamma_law(shape, scale):
    """In x = √h the density is smooth at 0."""
    x, log_weight = gauss(0.0, math.sqrt(60 * scale))
    return x.square(), log_weight + (2 * shape - 1) * x.log() - x.square() / scale


def laplace_law(scale):
    h, log_weight = gauss(0.0, 60 * scale)
    return torch.cat([h, -h]), (log_weight - h / scale).repeat(2)


def gaussian_law(mean, variance):
    h = torch.linspace(-9, 9, 181, dtype=torch.float64)
    return h, -0.5 * (h - mean).square() / variance


def poisson_law(rate):
    h = torch.arange(60, dtype=torch.float64)
    return h, h * math.log(rate) - torch.lgamma(h + 1)


def sphere_law():
    """θ by Gauss–Legendre in cos θ, φ by the trapezoidal rule."""
    z, log_weight = gauss(-1.0, 1.0, 40)
    phi = 2 * math.pi * torch.arange(40, dtype=torch.float64) / 40
    ring = (1 - z.square()).sqrt()[:, None]
    points = torch.stack([ring * phi.cos(), ring * phi.sin(), z[:, None].expand(-1, 40)], -1)
    return points.reshape(-1, 3), log_weight.repeat_interleave(40)


def independent(*laws):
    """Two units: all pairs of their points."""
    (x, log_p), (y, log_q) = laws
    return torch.cartesian_prod(x, y), (log_p[:, None] + log_q).flatten()


POINTS = drawn(5, 2, size=0.7, seed=8)
# The units, and all their states (or nodes of a quadrature) with unnormalised log-probabilities.
UNITS = {
    "Bernoulli": (
        Bernoulli.create(tensor(0.3, 0.6)),
        independent((tensor(0, 1), tensor(0.7, 0.3).log()), (tensor(0, 1), tensor(0.4, 0.6).log())),
    ),
    "Spin": (
        Spin.create(tensor(0.1, -0.4)),
        independent((tensor(-1, 1), tensor(-0.1, 0.1)), (tensor(-1, 1), tensor(0.4, -0.4))),
    ),
    "Categorical": (Categorical.create(tensor(0.2, 0.3, 0.5)), (torch.eye(3).double(), tensor(0.2, 0.3, 0.5).log())),
    "Gaussian": (
        Gaussian.create(tensor(0.2, -0.1), tensor(1.0, 0.5)),
        independent(gaussian_law(0.2, 1.0), gaussian_law(-0.1, 0.5)),
    ),
    "Poisson": (Poisson.create(tensor(0.7, 1.2)), independent(poisson_law(0.7), poisson_law(1.2))),
    "Exponential": (
        Exponential.create(tensor(3.0, 2.5)),
        independent(gamma_law(1.0, 1 / 3), gamma_law(1.0, 0.4)),
    ),
    "Gamma": (Gamma.create(tensor(2.0, 1.5), tensor(0.3, 0.3)), independent(gamma_law(2.0, 0.3), gamma_law(1.5, 0.3))),
    "Laplace": (Laplace.create(tensor(0.3, 0.4)), independent(laplace_law(0.3), laplace_law(0.4))),
    "Uniform": (
        Uniform.create(tensor(-1.0, 0.0), tensor(1.0, 2.0)),
        independent(gauss(-1.0, 1.0, 30), gauss(0.0, 2.0, 30)),
    ),
    "Sphere": (Sphere.create(torch.tensor(1.0).double(), dim=3), sphere_law()),
    "Constant": (Constant.create(tensor(0.5, -1.0)), (tensor(0.5, -1.0)[None], tensor(0.0))),
    "Atoms": (Atoms.create(POINTS), (POINTS, torch.zeros(5).double())),
    "biased Laplace": (
        Laplace.create(tensor(0.3, 0.4)).tilt(tensor(0.5, -0.5)),
        independent(
            *((h, p + b * h) for (h, p), b in zip((laplace_law(0.3), laplace_law(0.4)), (0.5, -0.5), strict=True))
        ),
    ),
    "a product": (
        product(Bernoulli.create(tensor(0.3)), Spin.create(tensor(0.2))),
        independent((tensor(0, 1), tensor(0.7, 0.3).log()), (tensor(-1, 1), tensor(-0.2, 0.2))),
    ),
}
FINITE = ["Bernoulli", "Spin", "Categorical", "Atoms", "a product"]

FIELD = tensor(0.2, -0.3, 0.1)
SIGNS = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=3)), dtype=torch.float64)


def expected(p, spins, units):
    """Means of both layers, of their products, and of the units' squares, under p (spins, units)."""
    return (
        p.sum(1) @ spins,
        p.sum(0) @ units,
        spins.mT @ p @ units,
        p.sum(0) @ units.square(),
    )


@pytest.mark.medium
@some_slow(("kind", "role"), zip(UNITS, itertools.cycle(["visible", "hidden"]), strict=False), 6)
def test_chains_have_the_exact_law(kind, role):
    """10⁴ independent chains within five standard errors (B8), each kind of unit in each layer, beside spins."""
    measure, (points, log_weight) = UNITS[kind]
    weight = drawn(3, points.shape[-1], size=0.3)
    p = ((SIGNS @ FIELD)[:, None] + SIGNS @ weight @ points.mT + log_weight).flatten().softmax(0).reshape(8, -1)
    spins = Spin.create(FIELD)
    layers = (measure, spins, weight.mT) if role == "visible" else (spins, measure, weight)
    machine = BoltzmannMachine.create(*layers)
    generator = torch.Generator().manual_seed(0)
    start = machine.visible.sample(torch.zeros(CHAINS, len(machine.weight)).double(), generator=generator)
    state = gibbs_init(start, machine.sample_hidden, generator)
    state = gibbs_step(state, machine.sample_visible, machine.sample_hidden, generator, steps=15)
    units, spin = (state.visible, state.hidden) if role == "visible" else (state.hidden, state.visible)
    observed = (spin, units, spin[:, :, None] * units[:, None], units.square())
    for values, wanted in zip(observed, expected(p, SIGNS, points), strict=True):
        error = values.std(0) / math.sqrt(CHAINS)
        assert ((values.mean(0) - wanted).abs() < 5 * error + 1e-9).all()


@pytest.mark.medium
@every_row("pair", list(itertools.product(FINITE, FINITE)), ids=" × ".join)
def test_detailed_balance_by_the_exact_transition_matrix(pair):
    """p(v) T(v, v′) = p(v′) T(v′, v); one step of the sampler from every state has the frequencies of T."""
    (visible, (v, log_a)), (hidden, (h, log_b)) = (UNITS[kind] for kind in pair)
    weight = drawn(v.shape[-1], h.shape[-1], size=0.7, seed=1)
    machine = BoltzmannMachine.create(visible, hidden, weight)
    joint = v @ weight @ h.mT + log_a[:, None] + log_b
    transition = joint.softmax(1) @ joint.softmax(0).mT
    flow = joint.logsumexp(1).softmax(0)[:, None] * transition
    assert torch.allclose(flow, flow.mT, atol=1e-15)
    if "Atoms" not in pair:  # their density has no closed form
        energy = machine.effective_energy(v)
        assert torch.allclose((-energy).softmax(0), joint.logsumexp(1).softmax(0), atol=1e-14)
    each, generator = 4000, torch.Generator().manual_seed(2)
    start = v.repeat_interleave(each, 0)
    state = gibbs_init(start, machine.sample_hidden, generator)
    after = gibbs_step(state, machine.sample_visible, machine.sample_hidden, generator).visible
    index = torch.cdist(after, v).argmin(-1)
    counts = torch.nn.functional.one_hot(index, len(v)).reshape(len(v), each, -1).sum(1)
    error = (transition * (1 - transition) / each).sqrt()
    assert ((counts / each - transition).abs() < 5 * error).all()


# --- log Z -----------------------------------------------------------------------------------------------------------


def machine_of_bits(size=0.5):
    visible = Bernoulli.create(torch.sigmoid(drawn(16, size=0.5)))
    return BoltzmannMachine.create(
        visible, Bernoulli.create(torch.full((8,), 0.5).double()), drawn(16, 8, size=size, seed=1)
    )


def by_enumeration(machine):
    """log Σ over the 2⁸ hidden states, written out."""
    h = torch.tensor(list(itertools.product((0.0, 1.0), repeat=8)), dtype=torch.float64)
    p = torch.sigmoid(machine.visible.logit)
    return ((1 - p + p * (h @ machine.weight.mT).exp()).log().sum(-1) - 8 * math.log(2)).logsumexp(0)


@pytest.mark.medium
@some_slow(
    ("method", "size", "schedule"),
    [("importance", 0.5, 100), ("sequential", 0.5, 100), ("importance", 1.0, 500), ("sequential", 1.0, 500)],
    2,
)
def test_annealed_estimates_of_16_by_8_units(method, size, schedule):
    """Within three standard errors of enumeration."""
    machine = machine_of_bits(size)
    exact = by_enumeration(machine)
    assert torch.isclose(machine.log_partition(), exact, atol=1e-10)
    generator = torch.Generator().manual_seed(0)
    found = machine.estimate_log_partition(512, schedule=schedule, method=method, generator=generator)
    assert abs(found.log_partition - exact) < 3 * found.standard_error
    assert found.standard_error < 0.1


WITH_A_DENSITY = [
    ("Gaussian", "sequential"),
    ("Categorical", "importance"),
    ("Gamma", "importance"),
    ("Uniform", "importance"),
    ("a product", "sequential"),
]
"""Units are drawn by their measures' own samplers, whose laws are tested there; these are one of each kind."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "method"), WITH_A_DENSITY)
def test_annealed_estimates_of_every_unit(kind, method):
    """16 bits beside the units, 100 runs: the mean of Z is Σ over the 2¹⁶ states, and the error covers it."""
    measure, (points, log_weight) = UNITS[kind]
    weight = drawn(16, points.shape[-1], size=0.15, seed=3)
    p = torch.sigmoid(drawn(16, size=0.5))
    fields = points @ weight.mT
    log_prior = log_weight - log_weight.logsumexp(0)
    exact = ((1 - p + p * fields.exp()).log().sum(-1) + log_prior).logsumexp(0)
    machine = BoltzmannMachine.create(Bernoulli.create(p), measure, weight)
    runs = [
        machine.estimate_log_partition(64, schedule=10, method=method, generator=torch.Generator().manual_seed(seed))
        for seed in range(100)
    ]
    log_z, error = (torch.stack([getattr(run, name) for run in runs]) for name in ("log_partition", "standard_error"))
    ratio = (log_z - exact).exp()
    assert abs(ratio.mean() - 1) < 5 * ratio.std() / math.sqrt(100)
    reach = scipy.stats.t.ppf(0.975, (16 if method == "sequential" else 64) - 1)
    low, high = scipy.stats.binom.interval(0.9999, 100, 0.95)
    assert low <= ((log_z - exact).abs() < reach * error).sum() <= high


# --- Langevin --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("form", ["density", "energy"])
def test_langevin_on_a_hopfield_energy_has_the_moments_of_its_density(form):
    """exp(−βE) by the trapezoidal rule on a grid, E written out; chains start far from it."""
    patterns, scale = drawn(6, 2, size=1.3, seed=4), 1.4
    hopfield = HopfieldEnergy.create(patterns, scale=scale)
    mixture = HopfieldDensity.create(hopfield).measure()
    log_density = {
        "density": lambda x: mixture.log_prob(torch.zeros_like(x), x),
        "energy": lambda x: -scale * hopfield(x),
    }[form]
    axis = torch.linspace(-9, 9, 361, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    p = ((scale * grid @ patterns.mT).logsumexp(-1) - 0.5 * scale * grid.square().sum(-1)).softmax(0)

    def features(x):
        return torch.cat([x, x.square(), x[:, :1] * x[:, 1:], x.pow(3), x.square().sum(-1, keepdim=True).square()], -1)

    generator, chains = torch.Generator().manual_seed(5), 4000
    state = langevin_init(torch.full((chains, 2), 3.0).double(), log_density)
    for _ in range(150):
        state = langevin_step(state, langevin_noise(state, generator), log_density, step_size=0.9).state
    values = features(state.position)
    error = values.std(0) / math.sqrt(chains)
    assert ((values.mean(0) - p @ features(grid)).abs() < 5 * error).all()
