"""Boltzmann machines against enumeration and quadrature: energies, conditional laws, couplings, normalisers."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.linalg import sqrtm
from tests.support.derivatives import check_derivatives
from tests.support.memory import LargestTensor
from tests.support.rows import every_row

from massieu.energy.boltzmann import BoltzmannMachine
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
    Spin,
    Uniform,
    product,
)


def weights(visible, hidden, size=0.4, seed=0):
    return size * torch.randn(visible, hidden, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def half(number):
    return torch.full((number,), 0.5, dtype=torch.float64)


def signs(number):
    return torch.tensor(list(itertools.product((-1.0, 1.0), repeat=number)), dtype=torch.float64)


SPINS = Spin.create(torch.tensor([0.2, -0.3, 0.1, 0.0]).double())
HIDDEN = {
    "Bernoulli": Bernoulli.create(torch.tensor([0.3, 0.6]).double()),
    "Spin": Spin.create(torch.tensor([0.1, -0.4]).double()),
    "Gaussian": Gaussian.create(torch.tensor([0.2, -0.1]).double(), torch.tensor([1.0, 0.5]).double()),
    "Poisson": Poisson.create(torch.tensor([0.7, 1.2]).double()),
    "Exponential": Exponential.create(torch.tensor([3.0, 3.0]).double()),
    "Gamma": Gamma.create(torch.tensor([2.0, 1.5]).double(), torch.tensor([0.3, 0.3]).double()),
    "Laplace": Laplace.create(torch.tensor([0.3, 0.3]).double()),
    "Uniform": Uniform.create(torch.tensor([-1.0, 0.0]).double(), torch.tensor([1.0, 2.0]).double()),
    "Categorical": Categorical.create(torch.tensor([0.3, 0.7]).double()),
    "Constant": Constant.create(torch.tensor([0.5, -1.0]).double()),
}


def cgf(name, hidden, t):
    """log E exp(t·h), written out or integrated."""
    if name == "Bernoulli":
        return sum(math.log(1 - p + p * math.exp(x)) for p, x in zip((0.3, 0.6), t, strict=True))
    if name == "Spin":
        return sum(math.log(math.cosh(b + x) / math.cosh(b)) for b, x in zip((0.1, -0.4), t, strict=True))
    if name == "Gaussian":
        return sum(m * x + 0.5 * v * x * x for m, v, x in zip((0.2, -0.1), (1.0, 0.5), t, strict=True))
    if name == "Poisson":
        return sum(r * (math.exp(x) - 1) for r, x in zip((0.7, 1.2), t, strict=True))
    if name == "Exponential":
        return sum(math.log(quad(lambda h: 3 * math.exp((x - 3) * h), 0, np.inf)[0]) for x in t)  # noqa: B023
    if name == "Gamma":
        return sum(-k * math.log(1 - 0.3 * x) for k, x in zip((2.0, 1.5), t, strict=True))
    if name == "Laplace":
        return sum(-math.log(1 - (0.3 * x) ** 2) for x in t)
    if name == "Uniform":
        return sum(
            math.log(quad(lambda h: math.exp(x * h) / 2, low, low + 2)[0])  # noqa: B023
            for x, low in zip(t, (-1.0, 0.0), strict=True)
        )
    if name == "Categorical":
        return math.log(0.3 * math.exp(t[0]) + 0.7 * math.exp(t[1]))
    return 0.5 * t[0] - t[1]


def exact_log_density(name, weight):
    """Unnormalised log p(v) of all 16 states of the visible spins, by hand."""
    hidden, states, fields = HIDDEN[name], signs(4), SPINS.field
    prior = [
        sum(b * s - math.log(2 * math.cosh(b)) for b, s in zip(fields.tolist(), v, strict=True))
        for v in states.tolist()
    ]
    return torch.tensor(
        [p + cgf(name, hidden, t) for p, t in zip(prior, (states @ weight).tolist(), strict=True)]
    ).double()


@every_row("name", HIDDEN)
def test_effective_energy_and_normaliser(name):
    weight = weights(4, 2)
    machine = BoltzmannMachine.create(SPINS, HIDDEN[name], weight)
    wanted = exact_log_density(name, weight)
    assert torch.allclose(machine.effective_energy(signs(4)), -wanted, atol=1e-8)
    assert torch.isclose(machine.log_partition(), wanted.logsumexp(0), atol=1e-8)


def test_energy_integrates_to_the_effective_energy():
    machine = BoltzmannMachine.create(SPINS, HIDDEN["Gaussian"], weights(4, 2))
    axis = torch.linspace(-12, 12, 121, dtype=torch.float64)  # the trapezoidal rule is exact for such a density
    hidden = torch.cartesian_prod(axis, axis)
    for visible in signs(4):
        energies = machine.energy(visible.expand(len(hidden), 4), hidden)
        wanted = -(torch.logsumexp(-energies, 0) + 2 * math.log(0.2))
        assert torch.isclose(wanted, machine.effective_energy(visible), atol=1e-10)


def test_a_gaussian_machines_precision():
    """Gaussian visible and hidden units: the joint precision is [[Σ_v⁻¹, −W], [−Wᵀ, Σ_h⁻¹]]."""
    weight = weights(3, 2, size=0.3)
    variance = torch.tensor([0.5, 0.8, 1.1]).double()
    visible = Gaussian.create(torch.tensor([0.3, -0.2, 0.5]).double(), variance)
    machine = BoltzmannMachine.create(visible, HIDDEN["Gaussian"], weight)
    prior = torch.cat([1 / variance, 1 / torch.tensor([1.0, 0.5]).double()])
    coupling = torch.zeros(5, 5, dtype=torch.float64)
    coupling[:3, 3:], coupling[3:, :3] = weight, weight.mT
    precision = prior.diag() - coupling
    location = torch.cat([visible.location, torch.tensor([0.2, -0.1]).double()])
    pull = prior * location
    wanted = 0.5 * (pull @ torch.linalg.solve(precision, pull) - (prior * location.square()).sum())
    wanted = wanted - 0.5 * torch.linalg.slogdet(precision)[1] + 0.5 * prior.log().sum()
    found = machine.estimate_log_partition(20_000, schedule=50, generator=torch.Generator().manual_seed(0))
    assert abs(found.log_partition - wanted) < 4 * found.standard_error
    assert found.standard_error < 0.02


def walsh(values):
    """Coefficients of a function of four signs in products of them."""
    states = signs(4)
    return {
        chosen: (states[:, chosen].prod(1) * values).mean().item()
        for n in range(5)
        for chosen in itertools.combinations(range(4), n)
    }


def test_couplings_are_the_series_of_the_effective_energy():
    """Truncated after n terms, the error of the exact interactions falls with n (B10)."""
    weight = weights(4, 2, size=0.25)
    machine = BoltzmannMachine.create(SPINS, HIDDEN["Spin"], weight)
    exact = walsh(-machine.effective_energy(signs(4)))
    states, errors = signs(4), []
    couplings = machine.couplings(4)
    total = (SPINS.field * states).sum(-1)
    for n, tensor in enumerate(couplings, start=1):
        letters = "abcd"[:n]
        term = torch.einsum(f"{letters},{','.join('s' + letter for letter in letters)}->s", tensor, *[states] * n)
        total = total + term / math.factorial(n)
        found = walsh(total)
        errors.append(max(abs(found[chosen] - exact[chosen]) for chosen in exact if chosen))
    assert errors[1] < errors[0]
    assert errors[3] < 0.5 * errors[1]
    # The second-order term is Hebb's rule, and is not the exact pair coupling.
    hebb = torch.einsum("am,m,bm->ab", weight, 1 - torch.tanh(HIDDEN["Spin"].field).square(), weight)
    assert torch.allclose(couplings[1], hebb)
    assert abs(walsh(-machine.effective_energy(states))[(0, 1)] - hebb[0, 1].item()) > 1e-4


def test_categorical_hidden_units_are_attention():
    """One hidden unit of N states: its law is softmax, what it gives back to Gaussian visible units is attention (B6)."""
    patterns = weights(5, 7, 1.0).mT  # (N, d)
    machine = BoltzmannMachine.create(
        Gaussian.create(torch.zeros(5).double(), torch.tensor(1.0).double()),
        Categorical.create(torch.full((7,), 1 / 7, dtype=torch.float64)),
        patterns.mT,
    )
    visible = torch.randn(3, 5, generator=torch.Generator().manual_seed(3)).double()
    p = torch.softmax(visible @ patterns.mT, -1)
    assert torch.allclose(machine.hidden.mean(machine.hidden_field(visible)), p)
    assert torch.allclose(machine.visible.mean(machine.visible_field(p)), p @ patterns)
    constants = 2.5 * math.log(2 * math.pi) + math.log(7)
    wanted = 0.5 * visible.square().sum(-1) - torch.logsumexp(visible @ patterns.mT, -1) + constants
    assert torch.allclose(machine.effective_energy(visible), wanted)
    # Its normaliser: Σ exp(½‖x‖²)/N.
    assert torch.isclose(machine.log_partition(), (0.5 * patterns.square().sum(-1)).logsumexp(0) - math.log(7))


def test_gradients_and_values_are_pytrees():
    weight = weights(4, 2).requires_grad_()
    machine = BoltzmannMachine.create(SPINS, HIDDEN["Spin"], weight)
    likelihood = lambda w: BoltzmannMachine(SPINS, HIDDEN["Spin"], w).log_partition()  # noqa: E731
    check_derivatives(likelihood, [weight], second=False)
    (found,) = torch.autograd.grad(machine.log_partition(), weight)
    p = exact_log_density("Spin", weight.detach()).softmax(0)
    hidden = torch.tanh(signs(4) @ weight + HIDDEN["Spin"].field)
    assert torch.allclose(found, torch.einsum("s,sv,sh->vh", p, signs(4), hidden))
    batch = torch.func.vmap(machine.effective_energy)(signs(4))
    assert torch.allclose(batch, machine.effective_energy(signs(4)))


UNBOUNDED = {
    "Gaussian": Gaussian.create(torch.zeros(2).double(), torch.tensor(1.0).double()),
    **{name: HIDDEN[name] for name in ("Poisson", "Exponential", "Gamma", "Laplace")},
}


@every_row(
    ("visible", "hidden", "weight", "message"),
    [
        ("Gaussian", "Poisson", 1e-6, "never have one"),
        ("Laplace", "Gaussian", 0.1, "never have one"),
        ("Laplace", "Exponential", -0.1, "never have one"),
        ("Gaussian", "Gaussian", 1.01, "spectral norm below 1, got 1.01"),
        ("Poisson", "Poisson", 0.01, "nowhere positive, got up to 0.01"),
        ("Gamma", "Exponential", 0.01, "nowhere positive"),
    ],
)
def test_machines_without_a_normaliser(visible, hidden, weight, message):
    with pytest.raises(ValueError, match=message):
        BoltzmannMachine.create(UNBOUNDED[visible], UNBOUNDED[hidden], weight * torch.eye(2).double())


@every_row(
    ("visible", "hidden", "weight"),
    [
        ("Gaussian", "Gaussian", 0.99),
        ("Poisson", "Poisson", -0.5),
        ("Gamma", "Exponential", -2.0),
        ("Gaussian", "Poisson", 0.0),
    ],
)
def test_machines_with_one(visible, hidden, weight):
    BoltzmannMachine.create(UNBOUNDED[visible], UNBOUNDED[hidden], weight * torch.eye(2).double())


@pytest.mark.medium
@every_row(
    ("visible", "hidden"),
    [
        (Bernoulli.create(0.5, dim=600), Poisson.create(1.0, dim=3)),
        (Gaussian.create(0.0, 1.0, dim=600), Bernoulli.create(0.5, dim=3)),
        (Gaussian.create(0.0, 1.0, dim=600), Gaussian.create(0.0, 1.0, dim=3)),
        (product(Spin.create(dim=300), Uniform.create(0.0, 1.0, dim=300)), Gamma.create(2.0, 0.1, dim=3)),
        (Spin.create(dim=600).tilt(torch.ones(600)), Exponential.create(9.0, dim=3)),
    ],
)
def test_whether_there_is_a_normaliser_takes_memory_linear_in_units(visible, hidden):
    with LargestTensor() as largest:
        BoltzmannMachine.create(visible, hidden, torch.full((600, 3), 1e-3))
        BoltzmannMachine.create(hidden, visible, torch.full((3, 600), 1e-3))
    assert largest.numbers <= 8 * 600 * 3 < 600 * 600


@every_row("covariance", ["full", "one a coordinate", "of low rank and a number"])
def test_the_coupling_of_gaussian_layers_is_a_singular_value(covariance):
    """By the roots of both covariances, at which it is 1 the normaliser ends; either layer may have more units."""
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    options = {
        "full": {"covariance": root @ root.mT},
        "one a coordinate": {"covariance": root[0].square()},
        "of low rank and a number": {"covariance": 0.3, "factor": root[:, :2]},
    }[covariance]
    wide, narrow = Gaussian.create(root[1], **options), Gaussian.create(root[2, :3], root[:3, :3] @ root[:3, :3].mT)
    matrices = [layer.fisher(torch.zeros_like(layer.location)).numpy() for layer in (wide, narrow)]
    weight = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    norm = np.linalg.norm(sqrtm(matrices[0]) @ weight.numpy() @ sqrtm(matrices[1]), 2)
    # Eigenvalues are off by some roundings times the number of units.
    for layers, couplings in (((wide, narrow), weight / norm), ((narrow, wide), weight.mT / norm)):
        BoltzmannMachine.create(*layers, (1 - 1e-12) * couplings)
        with pytest.raises(ValueError, match="spectral norm below 1, got 2"):
            BoltzmannMachine.create(*layers, 2 * couplings)


def test_the_field_must_stay_in_the_domain():
    strong = 1.6 * torch.eye(2).double()
    with pytest.raises(
        ValueError, match=r"hidden unit 0 reaches from -3.2 to 3.2, and Exponential needs eta < rate = 3"
    ):
        BoltzmannMachine.create(Spin.create(dim=2), HIDDEN["Exponential"], 2 * strong)
    BoltzmannMachine.create(Spin.create(dim=2), HIDDEN["Exponential"], strong)
    with pytest.raises(ValueError, match="visible unit 0 reaches from 0 to 4"):
        BoltzmannMachine.create(HIDDEN["Laplace"], Atoms.create(4 * torch.eye(2).double()), torch.eye(2).double())


@every_row(
    ("arguments", "error", "message"),
    [
        ((SPINS, SPINS, torch.zeros(4, 3)), ValueError, r"\(4, 4\), got \(4, 3\)"),
        ((SPINS, "spin", torch.zeros(4, 4)), TypeError, "hidden must be a measure, got 'spin'"),
        ((SPINS, SPINS, torch.zeros(4, 4, dtype=torch.int64)), TypeError, "int64"),
        ((SPINS, SPINS, torch.full((4, 4), math.nan)), ValueError, "finite"),
        ((Spin(torch.zeros(2, 4)), SPINS, torch.zeros(4, 4)), ValueError, "one measure"),
    ],
)
def test_bad_machines(arguments, error, message):
    with pytest.raises(error, match=message):
        BoltzmannMachine.create(*arguments)


def test_a_tilt_that_has_no_closed_form_is_looked_through():
    """Tilted, a Laplace unit is of another class: what it is beside Gaussian units, and its domain, stay."""
    laplace = HIDDEN["Laplace"].tilt(torch.tensor([1.0, 0.0]).double())
    with pytest.raises(ValueError, match="Laplace hidden and Gaussian visible units never have one"):
        BoltzmannMachine.create(UNBOUNDED["Gaussian"], laplace, 0.1 * torch.eye(2).double())
    near = 2.4 * torch.eye(2).double()  # |1 + 2.4| > 1/0.3 > 2.4
    with pytest.raises(ValueError, match=r"hidden unit 0 reaches from -2.4 to 2.4, and Laplace needs"):
        BoltzmannMachine.create(Spin.create(dim=2), laplace, near)
    BoltzmannMachine.create(Spin.create(dim=2), HIDDEN["Laplace"], near)


def test_states_of_the_wrong_shape_or_not_finite():
    machine = BoltzmannMachine.create(SPINS, HIDDEN["Spin"], weights(4, 2))
    for call in (machine.effective_energy, machine.hidden_field, machine.sample_hidden):
        with pytest.raises(ValueError, match=r"visible must have shape \(\*items, 4\), got \(3, 2\)"):
            call(torch.zeros(3, 2).double())
    for call in (machine.visible_field, machine.sample_visible, lambda h: machine.energy(signs(4), h)):
        with pytest.raises(ValueError, match=r"hidden must have shape \(\*items, 2\), got \(\)"):
            call(torch.tensor(0.0).double())
    with pytest.raises(ValueError, match="those of 1 items do not"):
        machine.sample_hidden(torch.tensor([[1.0, 1.0, 1.0, math.nan], [1.0, 1.0, 1.0, 1.0]]).double())


def test_bad_calls():
    machine = BoltzmannMachine.create(UNBOUNDED["Gaussian"], UNBOUNDED["Gaussian"], torch.zeros(2, 2).double())
    with pytest.raises(ValueError, match="infinitely many visible and infinitely many hidden"):
        machine.log_partition()
    with pytest.raises(ValueError, match="order"):
        machine.couplings(5)
    with pytest.raises(ValueError, match="multiple of 16 for 'sequential', got 30"):
        machine.estimate_log_partition(30, method="sequential")
    dependent = Gaussian.create(torch.zeros(2).double(), torch.tensor([[1.0, 0.5], [0.5, 1.0]]).double())
    with pytest.raises(ValueError, match="hidden units of Gaussian are not independent"):
        BoltzmannMachine.create(SPINS, dependent, torch.zeros(4, 2).double()).couplings(2)
