"""Networks of two-valued units against enumeration: energies, single flips, hidden units, capacity."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import gammaln, logsumexp
from tests.energy.cases import F64, draw
from tests.support.rows import every_row
from torch import Tensor

from massieu.energy import BinaryHopfieldEnergy, DenseHopfieldEnergy, Energy

WIDTH = 6
PAIRS = {"spins": (-1.0, 1.0), "bits": (0.0, 1.0)}


def every_state(values: str, width: int = WIDTH) -> Tensor:
    return torch.tensor(list(itertools.product(PAIRS[values], repeat=width)), dtype=F64)


def binary_energy(state, couplings, bias) -> float:
    return float(-bias @ state - 0.5 * state @ couplings @ state)


def dense_energy(state, patterns, bias, degree) -> float:
    overlap = patterns @ state
    return float(-bias @ state - (np.exp(overlap) if degree is None else overlap**degree).sum())


def networks(values: str) -> list[tuple[Energy, Callable[..., float]]]:
    """Each with its energy in NumPy."""
    patterns, bias = draw(4, WIDTH), draw(WIDTH, seed=1)
    symmetric = draw(WIDTH, WIDTH, seed=2)
    symmetric = symmetric + symmetric.T
    x, a, j = patterns.numpy(), bias.numpy(), symmetric.numpy()
    built: list[tuple[Energy, Callable[..., float]]] = [
        (BinaryHopfieldEnergy.create(symmetric, bias, values=values), lambda v: binary_energy(v, j, a)),
        (BinaryHopfieldEnergy.of_patterns(patterns, bias, values=values), lambda v: binary_energy(v, x.T @ x, a)),
    ]
    for degree in (2, 3, 4, None):
        energy = DenseHopfieldEnergy.create(patterns, bias, degree=degree, values=values)
        built.append((energy, lambda v, n=degree: dense_energy(v, x, a, n)))
    return built


@pytest.mark.parametrize("values", PAIRS)
def test_energies_of_all_states(values: str):
    states = every_state(values)
    for energy, formula in networks(values):
        np.testing.assert_allclose(energy(states), [formula(v) for v in states.numpy()], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("values", PAIRS)
def test_a_step_takes_the_better_value_of_each_unit_in_turn(values: str):
    states = every_state(values)
    for energy, formula in networks(values):
        expected = states.numpy().copy()
        for v in expected:
            for i in range(WIDTH):
                trials = []
                for value in PAIRS[values]:
                    v[i] = value
                    trials.append(formula(v))
                v[i] = PAIRS[values][int(np.argmin(trials))]
        np.testing.assert_array_equal(energy.step(states), expected)


@pytest.mark.medium
@given(
    seed=st.integers(0, 10**6),
    values=st.sampled_from(sorted(PAIRS)),
    kind=st.sampled_from(["couplings", 2, 3, 5, None]),
    batch=st.sampled_from([(), (2,)]),
    size=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_energy_never_rises_and_the_end_is_a_local_minimum(seed, values, kind, batch, size):
    generator = torch.Generator().manual_seed(seed)
    patterns = size * torch.randn(*batch, 5, WIDTH, generator=generator, dtype=F64)
    bias = size * torch.randn(*batch, WIDTH, generator=generator, dtype=F64)
    if kind == "couplings":
        energy = BinaryHopfieldEnergy.create(patterns.mT @ patterns, bias, values=values)
    else:
        energy = DenseHopfieldEnergy.create(patterns, bias, degree=kind, values=values)
    low, high = PAIRS[values]
    state = torch.where(torch.rand(*batch, 7, WIDTH, generator=generator) < 0.5, low, high).double()
    path = energy.descend(state, steps=12)
    size = 1 + path.energies.abs().amax()
    assert (path.energies[1:] <= path.energies[:-1] + 1e-13 * size).all()
    end = path.states[-1]
    torch.testing.assert_close(energy.step(end), end)
    for unit in range(WIDTH):
        flipped = end.clone()
        flipped[..., unit] = low + high - end[..., unit]
        assert (energy(flipped) >= path.energies[-1] - 1e-12 * size).all()


def test_on_a_tie_a_unit_stays():
    states = every_state("spins")
    energy = BinaryHopfieldEnergy.create(torch.zeros(WIDTH, WIDTH, dtype=F64))
    torch.testing.assert_close(energy.step(states), states)


def test_the_diagonal_is_a_constant_for_spins_and_a_bias_for_bits():
    patterns = draw(4, WIDTH)
    couplings = patterns.T @ patterns
    hollow = couplings - torch.diag(couplings.diagonal())
    spins, bits = every_state("spins"), every_state("bits")
    apart = BinaryHopfieldEnergy.create(couplings)(spins) - BinaryHopfieldEnergy.create(hollow)(spins)
    torch.testing.assert_close(apart, (-0.5 * couplings.trace()).expand(len(spins)))
    torch.testing.assert_close(
        BinaryHopfieldEnergy.create(couplings, values="bits")(bits),
        BinaryHopfieldEnergy.create(hollow, 0.5 * couplings.diagonal(), values="bits")(bits),
    )


def test_exponential_rule_of_the_literature():
    """For patterns of ±1, v_i ← sgn Σ x_i exp(Σ_{j≠i} x_j v_j)."""
    patterns = draw(5, WIDTH).sign()
    energy = DenseHopfieldEnergy.create(patterns)
    expected = every_state("spins").numpy().copy()
    x = patterns.numpy()
    for v in expected:
        for i in range(WIDTH):
            rest = x @ v - x[:, i] * v[i]
            pull = (x[:, i] * np.exp(rest)).sum()
            v[i] = np.sign(pull) if abs(pull) > 1e-12 else v[i]
    np.testing.assert_array_equal(energy.step(every_state("spins")), expected)


@pytest.mark.parametrize("values", PAIRS)
def test_poisson_hidden_units_leave_the_exponential_energy(values: str):
    """−log Σ_h Π Poisson(h_n; 1) exp(h_n x_n·v) = −Σ exp(x_n·v) + N, by summing over h."""
    patterns, states = 0.4 * draw(3, WIDTH), every_state(values)
    h = np.arange(200)
    t = (states @ patterns.T).numpy()
    summed = -logsumexp(-1 - gammaln(h + 1) + t[..., None] * h, axis=-1).sum(-1)
    np.testing.assert_allclose(
        DenseHopfieldEnergy.create(patterns, values=values)(states) + 3, summed, rtol=1e-11, atol=1e-11
    )


def test_gaussian_hidden_units_leave_the_classical_energy():
    """−log ∫ N(h; 0, 1) exp(h x_n·v) dh = −½(x_n·v)², by quadrature."""
    patterns, states = draw(3, WIDTH), every_state("spins")
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    t = 0.5 * (states @ patterns.T).numpy()
    integral = -logsumexp(np.log(weights / weights.sum()) + t[..., None] * nodes, axis=-1).sum(-1)
    np.testing.assert_allclose(BinaryHopfieldEnergy.of_patterns(0.5 * patterns)(states), integral, rtol=1e-8, atol=1e-8)


def test_large_overlaps_step_rightly_though_the_energy_overflows():
    generator = torch.Generator().manual_seed(0)
    patterns = torch.where(torch.rand(20, 200, generator=generator) < 0.5, -1.0, 1.0)
    energy = DenseHopfieldEnergy.create(patterns)
    assert energy(patterns).isneginf().all()
    spoiled = patterns.clone()
    spoiled[:, :40] *= -1
    torch.testing.assert_close(energy.step(spoiled), patterns)


def test_capacity_grows_with_the_degree():
    """60 random patterns of 40 spins: far beyond 0.138·40 for degree 2; within reach of degree 4 and exp."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.where(torch.rand(60, 40, generator=generator) < 0.5, -1.0, 1.0).double()
    kept = {}
    for name, energy in {
        "classical": BinaryHopfieldEnergy.of_patterns(patterns),
        "degree 4": DenseHopfieldEnergy.create(patterns, degree=4),
        "exp": DenseHopfieldEnergy.create(patterns),
    }.items():
        kept[name] = float((energy.step(patterns) == patterns).all(-1).double().mean())
    assert kept["classical"] < 0.1
    assert kept["degree 4"] > 0.9
    assert kept["exp"] == 1.0


def signs(count: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randint(0, 2, (count, width), generator=generator).double() - 1


@pytest.mark.parametrize("values", PAIRS)
def test_pseudo_inverse_energy_is_half_the_squared_distance_from_the_span(values: str):
    low, high = PAIRS[values]
    patterns = torch.where(signs(3, WIDTH, 0) > 0, high, low).double()
    bias, states = draw(WIDTH, seed=1), every_state(values)
    energy = BinaryHopfieldEnergy.of_patterns(patterns, bias, values=values, rule="pseudo_inverse")
    # Least squares, by NumPy: the distance of each state from the nearest combination of patterns.
    coefficients = np.linalg.lstsq(patterns.numpy().T, states.numpy().T, rcond=None)[0]
    distance = np.linalg.norm(states.numpy().T - patterns.numpy().T @ coefficients, axis=0)
    constant = 0.5 * WIDTH if values == "spins" else 0.0
    expected = 0.5 * distance**2 - constant - states.numpy() @ bias.numpy()
    np.testing.assert_allclose(energy(states), expected, rtol=1e-11, atol=1e-11)


@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 15),
    values=st.sampled_from(sorted(PAIRS)),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, F64]),
)
def test_pseudo_inverse_keeps_patterns_however_alike(seed: int, count: int, values: str, dtype: torch.dtype):
    """Fifteen patterns of 16 units, most of them one flip from the first, and each there twice."""
    low, high = PAIRS[values]
    patterns = signs(1, 16, seed).repeat(count, 1)
    patterns[torch.arange(1, count), torch.arange(1, count)] *= -1
    patterns = torch.where(patterns > 0, high, low).to(dtype).repeat(2, 1)
    energy = BinaryHopfieldEnergy.of_patterns(patterns, values=values, rule="pseudo_inverse")
    found = energy.step(patterns)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found, patterns.to(found.dtype), rtol=0, atol=0)


def test_pseudo_inverse_stores_where_hebb_fails_and_derivatives_are_right():
    patterns = signs(30, 40, 0)
    kept = {
        rule: float((BinaryHopfieldEnergy.of_patterns(patterns, rule=rule).step(patterns) == patterns).double().mean())
        for rule in ("hebb", "pseudo_inverse")
    }
    # 0.138·40 = 5.5 patterns: beyond that Hebb's errors are P(z > √(d/N)) = 12 % of the units.
    assert kept["hebb"] < 0.95
    assert kept["pseudo_inverse"] == 1.0
    state = every_state("spins")[:5]
    points = draw(3, WIDTH).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: BinaryHopfieldEnergy.of_patterns(x, rule="pseudo_inverse")(state), points)
    stacked = torch.stack([points.detach(), points.detach().flip(0)])
    batched = BinaryHopfieldEnergy.of_patterns(stacked, rule="pseudo_inverse")(state.expand(2, -1, -1))
    torch.testing.assert_close(batched[0], batched[1])
    mapped = torch.func.vmap(lambda x: BinaryHopfieldEnergy.of_patterns(x, rule="pseudo_inverse")(state))(stacked)
    torch.testing.assert_close(mapped, batched)


def test_retrieval_ends_at_a_fixed_point():
    patterns = draw(3, 16).sign()
    energy = DenseHopfieldEnergy.create(patterns)
    spoiled = patterns.clone()
    spoiled[:, :3] *= -1
    found = energy.retrieve(spoiled)
    torch.testing.assert_close(found.state, patterns)
    assert (found.residual == 0).all()


def test_low_precision_and_vmap():
    patterns = draw(3, 5, WIDTH).sign()
    energy, states = DenseHopfieldEnergy.create(patterns, degree=3), every_state("spins").expand(3, -1, -1)
    assert energy(states.bfloat16()).dtype == F64
    assert DenseHopfieldEnergy.create(patterns.bfloat16())(states.bfloat16()).dtype == torch.float32
    found = torch.func.vmap(lambda x, v: DenseHopfieldEnergy.create(x, degree=3).step(v))(patterns, states)
    torch.testing.assert_close(found, energy.step(states))


REFUSED = {
    "asymmetric": (lambda: BinaryHopfieldEnergy.create(draw(4, 4)), ValueError, "symmetric"),
    "not square": (lambda: BinaryHopfieldEnergy.create(draw(4, 3)), ValueError, r"\(4, 3\)"),
    "patterns as couplings": (lambda: BinaryHopfieldEnergy.create(draw(4, 3)), ValueError, "of_patterns"),
    "as many patterns as units": (lambda: BinaryHopfieldEnergy.create(draw(4, 4)), ValueError, "of_patterns"),
    "rule": (
        lambda: BinaryHopfieldEnergy.of_patterns(draw(2, 4), rule="delta"),
        ValueError,
        "delta.*pseudo_inverse|pseudo_inverse.*delta",
    ),
    "span": (
        lambda: BinaryHopfieldEnergy.of_patterns(draw(5, 4), rule="pseudo_inverse"),
        ValueError,
        "fewer than their 4 dimensions, got 5 patterns",
    ),
    "NaN, pseudo-inverse": (
        lambda: BinaryHopfieldEnergy.of_patterns(draw(2, 4) * torch.nan, rule="pseudo_inverse"),
        ValueError,
        "finite",
    ),
    "bias": (lambda: BinaryHopfieldEnergy.create(torch.eye(4), torch.zeros(3)), ValueError, r"\(4,\).*\(3,\)"),
    "values": (lambda: DenseHopfieldEnergy.create(draw(2, 4), values="trits"), ValueError, "trits"),
    "degree": (lambda: DenseHopfieldEnergy.create(draw(2, 4), degree=1), ValueError, "1"),
    "no patterns": (lambda: DenseHopfieldEnergy.create(draw(0, 4)), ValueError, r"\(0, 4\)"),
    "NaN": (lambda: DenseHopfieldEnergy.create(draw(2, 4) * torch.nan), ValueError, "finite"),
    "state": (lambda: DenseHopfieldEnergy.create(draw(2, 4))(torch.zeros(4, dtype=F64)), ValueError, "-1 and 1"),
    "width": (lambda: DenseHopfieldEnergy.create(draw(2, 4)).step(torch.ones(5, dtype=F64)), ValueError, r"\(5,\)"),
    "damping": (
        lambda: DenseHopfieldEnergy.create(draw(2, 4)).step(torch.ones(4, dtype=F64), damping=0.5),
        ValueError,
        "damping",
    ),
}


@every_row("name", REFUSED)
def test_bad_input_is_one_clear_error(name: str):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()
