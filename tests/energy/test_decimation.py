"""Decimation against sums over all states, closed forms of the chain and the star, and roots of polynomials."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp
from tests.energy.cases import F64
from tests.support.rows import every_row
from torch import Tensor

from massieu.energy import SpinModel, decimation_fixed_point, decimation_flow, integrate_out
from massieu.measures import Gaussian, Spin


def drawn_model(number: int, seed: int, size: float = 0.5, between: float | None = None) -> SpinModel:
    """Fields and couplings of this size; those between even and odd sites, if named, of another."""
    generator = torch.Generator().manual_seed(seed)
    drawn = size * torch.randn(number, number, generator=generator, dtype=F64)
    if between is not None:
        differ = (torch.arange(number).unsqueeze(0) + torch.arange(number).unsqueeze(1)) % 2 == 1
        drawn = torch.where(differ, between / size * drawn, drawn)
    coupling = (drawn + drawn.T) * (1 - torch.eye(number, dtype=F64))
    return SpinModel.create(Spin.create(size * torch.randn(number, generator=generator, dtype=F64)), coupling)


def log_weights_left(model: SpinModel, kept: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """States of the kept sites, and the logarithm of their joint weight summed over the others, in NumPy."""
    number = len(model.coupling)
    field, coupling = model.site.field[:, 0].numpy(), model.coupling[:, :, 0, 0].numpy()
    states = np.array(list(itertools.product([-1.0, 1.0], repeat=number)))
    joint = states @ field + 0.5 * np.einsum("si,ij,sj->s", states, coupling, states) - np.log(2 * np.cosh(field)).sum()
    kept_states = np.array(list(itertools.product([-1.0, 1.0], repeat=len(kept))))
    left = [logsumexp(joint[(states[:, kept] == state).all(-1)]) for state in kept_states]
    return kept_states, np.array(left)


def expansion(interactions: Tensor, states: np.ndarray) -> np.ndarray:
    """Σ_A interactions_A Π_{i in A} S_i."""
    total = np.zeros(len(states))
    for subset in itertools.product([0, 1], repeat=interactions.ndim):
        total += float(interactions[subset]) * np.prod(states ** np.array(subset), -1)
    return total


@given(seed=st.integers(0, 10**6), number=st.integers(2, 6), data=st.data())
def test_interactions_are_those_of_the_marginal_law(seed: int, number: int, data: st.DataObject):
    model = drawn_model(number, seed, size=data.draw(st.sampled_from([0.0, 1e-3, 1.0, 30.0])))
    count = data.draw(st.integers(1, number - 1))
    removed = data.draw(st.permutations(range(number)))[:count]
    found = integrate_out(model, removed)
    kept = sorted(set(range(number)) - set(removed))
    assert list(found.kept) == kept
    states, expected = log_weights_left(model, kept)
    size = 1 + np.abs(expected).max()
    np.testing.assert_allclose(expansion(found.interactions, states), expected, atol=1e-13 * size, rtol=0)
    for place, site in enumerate(kept):
        one_hot = tuple(int(place == other) for other in range(len(kept)))
        assert float(found.model.site.field[place, 0]) == float(found.interactions[one_hot]), site


def test_the_model_keeps_log_z_and_means_where_no_higher_order_is_left():
    """One hidden spin of two neighbours leaves a pair: nothing is lost."""
    chain = torch.zeros(7, 7, dtype=F64)
    for site in range(6):
        chain[site, site + 1] = chain[site + 1, site] = 0.3 * (site + 1)
    model = SpinModel.create(Spin.create(torch.linspace(-0.5, 0.7, 7, dtype=F64)), chain)
    found = integrate_out(model, [1, 3, 5])
    exact, left = model.exact(), found.model.exact()
    torch.testing.assert_close(found.constant + left.log_partition, exact.log_partition)
    torch.testing.assert_close(left.mean, exact.mean[[0, 2, 4, 6]])
    assert (found.strength()[3:] < 1e-15).all()


def test_star_of_three_is_the_star_triangle_relation():
    """e^(4K') = cosh 3K / cosh K, and nothing of third order without a field."""
    coupling = torch.zeros(4, 4, dtype=F64)
    coupling[0, 1:] = coupling[1:, 0] = 0.8
    found = integrate_out(SpinModel.create(Spin.create(torch.zeros(4, dtype=F64)), coupling), [0])
    expected = 0.25 * math.log(math.cosh(2.4) / math.cosh(0.8))
    for one, other in itertools.combinations(range(3), 2):
        assert float(found.model.coupling[one, other, 0, 0]) == pytest.approx(expected, rel=1e-14)
    assert float(found.interactions[1, 1, 1]) == pytest.approx(0.0, abs=1e-16)


def test_cumulants_approach_the_exact_interactions_as_the_next_power_of_the_couplings():
    for order in (1, 2, 3, 4):
        errors = []
        for between in (0.04, 0.02):
            model = drawn_model(6, 3, size=0.4, between=between)
            exact = integrate_out(model, [0, 2, 4]).interactions
            errors.append(float((integrate_out(model, [0, 2, 4], order=order).interactions - exact).norm()))
        slope = math.log2(errors[0] / errors[1])
        # The next term of the series is smaller by the coupling: its part in the slope is a few times 0.04.
        assert slope == pytest.approx(order + 1, abs=0.3), order


def test_derivatives():
    def left(field: Tensor, coupling: Tensor, order: int | None) -> Tensor:
        symmetric = (coupling + coupling.T) * (1 - torch.eye(4, dtype=F64))
        return integrate_out(SpinModel.create(Spin.create(field), symmetric), [1, 2], order=order).interactions

    model = drawn_model(4, 1)
    field = model.site.field[:, 0].clone().requires_grad_()
    coupling = model.coupling[:, :, 0, 0].clone().requires_grad_()
    for order in (None, 3):
        assert torch.autograd.gradcheck(lambda f, j, n=order: left(f, j, n), (field, coupling))
    for start in (-1.3, -0.2, 0.0, 0.4, 2.0):
        start_field = torch.tensor(0.3, dtype=F64, requires_grad=True)
        start_coupling = torch.tensor(start, dtype=F64, requires_grad=True)
        assert torch.autograd.gradcheck(
            lambda k, h: decimation_flow(k, h, steps=2)[:2], (start_coupling, start_field)
        ), start


@given(
    coupling=st.floats(-3, 3),
    field=st.floats(-2, 2),
    block=st.integers(2, 5),
)
def test_a_step_of_the_chain_is_the_sum_over_the_spins_between(coupling: float, field: float, block: int):
    ends = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
    log_weight = []
    for first, last in ends:
        between = [np.array([first, *inner, last]) for inner in itertools.product([-1.0, 1.0], repeat=block - 1)]
        # Half of the field of the ends belongs to the neighbouring blocks.
        log_weight.append(
            logsumexp([coupling * (s[1:] * s[:-1]).sum() + field * (s.sum() - (first + last) / 2) for s in between])
        )
    up, unlike, down = log_weight
    found = decimation_flow(coupling, field, block=block)
    size = 1 + block * (abs(coupling) + abs(field))
    assert float(found.coupling[1]) == pytest.approx((up + down - 2 * unlike) / 4, abs=1e-14 * size)
    assert float(found.field[1]) == pytest.approx((up - down) / 2, abs=1e-14 * size)
    assert float(found.constant[1]) == pytest.approx((up + down + 2 * unlike) / 4, abs=1e-14 * size)


@given(
    coupling=st.one_of(st.floats(1e-30, 1e-3), st.floats(1e-3, 8)),
    sign=st.sampled_from([-1, 1]),
    block=st.integers(2, 4),
    dtype=st.sampled_from([torch.float32, F64]),
)
def test_without_a_field_tanh_is_raised_to_the_block(coupling: float, sign: int, block: int, dtype: torch.dtype):
    start = torch.tensor(sign * coupling, dtype=dtype)
    found = float(decimation_flow(start, block=block).coupling[1])
    value = float(start)
    # artanh(tanh^n K) = ½ log((1 + t)/(1 − t)), with tanh K = 1 − 2/(e^2K + 1) and 1 − t by expm1 where t is near 1.
    size = abs(value)
    log_tanh = math.log(math.tanh(size)) if size < 0.5 else math.log1p(-2 / (math.exp(2 * size) + 1))
    power = math.exp(block * log_tanh)
    expected = 0.5 * math.log1p(2 * power / -math.expm1(block * log_tanh)) * (1 if sign > 0 or block % 2 == 0 else -1)
    tiny = torch.finfo(dtype).tiny
    assert found == pytest.approx(expected, rel=100 * torch.finfo(dtype).eps, abs=1e3 * tiny)


def test_flow_gives_the_free_energy_of_the_chain():
    """log Z per site is log λ of the transfer matrix: the constants of all scales, each site counted once."""
    coupling, field = 0.7, 0.2
    found = decimation_flow(coupling, field, steps=40)
    shares = 0.5 ** torch.arange(1, 41, dtype=F64)
    # What is left after 40 steps is one spin in the last field, of weight 2⁻⁴⁰.
    total = float((found.constant[1:] * shares).sum())
    largest = math.exp(coupling) * math.cosh(field) + math.sqrt(
        math.exp(2 * coupling) * math.sinh(field) ** 2 + math.exp(-2 * coupling)
    )
    assert total == pytest.approx(math.log(largest), abs=1e-10)


def test_decimation_of_a_model_is_the_flow_of_its_chain():
    ring = torch.zeros(8, 8, dtype=F64)
    for site in range(8):
        ring[site, (site + 1) % 8] = ring[(site + 1) % 8, site] = 0.9
    model = SpinModel.create(Spin.create(torch.full((8,), 0.1, dtype=F64)), ring)
    left = integrate_out(model, [1, 3, 5, 7]).model
    flow = decimation_flow(0.9, 0.1)
    torch.testing.assert_close(left.coupling[0, 1, 0, 0], flow.coupling[1])
    torch.testing.assert_close(left.site.field[:, 0], flow.field[1].expand(4))


def test_fixed_points():
    # x = tanh K of Migdal and Kadanoff's point in two dimensions, block 2: (1 + x²)² = 4x, without the root 1.
    x = min(root.real for root in np.roots([1, 1, 3, -1]) if abs(root.imag) < 1e-12)
    found = decimation_fixed_point(2)
    assert found.coupling == pytest.approx(math.atanh(x), rel=1e-12)
    step = 1e-5
    ends = [float(decimation_flow(found.coupling + move, dimension=2).coupling[1]) for move in (-step, step)]
    assert found.exponent == pytest.approx(math.log2((ends[1] - ends[0]) / (2 * step)), rel=1e-8)
    for dimension, block in ((2, 3), (3, 2), (4, 2)):
        point = decimation_fixed_point(dimension, block=block).coupling
        assert float(decimation_flow(point, block=block, dimension=dimension).coupling[1]) == pytest.approx(
            point, rel=1e-9
        )
    below = decimation_flow(0.99 * found.coupling, steps=20, dimension=2).coupling[-1]
    above = decimation_flow(1.01 * found.coupling, steps=20, dimension=2).coupling[-1]
    assert below < 1e-6
    assert above > 10
    assert decimation_fixed_point(1) == (math.inf, 0.0)


def test_huge_and_batched_couplings():
    for dtype in (torch.bfloat16, torch.float32, F64):
        start = torch.tensor([-200.0, -1.0, 0.0, 1.0, 200.0], dtype=dtype)
        found = decimation_flow(start, torch.tensor(300.0, dtype=dtype), steps=3)
        assert found.coupling.shape == (4, 5)
        assert found.coupling.dtype == torch.promote_types(dtype, torch.float32)
        assert all(bool(values.isfinite().all()) for values in found)


RING = drawn_model(3, 0)
GAUSSIAN = SpinModel.create(Gaussian.create(torch.zeros(3, 1), torch.ones(3, 1, 1)), torch.zeros(3, 3))
REFUSED = {
    "no model": (lambda: integrate_out(torch.eye(3), [0]), TypeError, "SpinModel"),
    "Gaussian": (lambda: integrate_out(GAUSSIAN, [0]), TypeError, "spins"),
    "none": (lambda: integrate_out(RING, []), ValueError, "at least one"),
    "all": (lambda: integrate_out(RING, [0, 1, 2]), ValueError, "not all"),
    "twice": (lambda: integrate_out(RING, [1, 1]), ValueError, "differ"),
    "outside": (lambda: integrate_out(RING, [3]), ValueError, "sites"),
    "one number": (lambda: integrate_out(RING, 1), TypeError, "sites"),
    "fraction": (lambda: integrate_out(RING, [0.5]), TypeError, "sites"),
    "order": (lambda: integrate_out(RING, [0], order=5), ValueError, "order"),
    "too many": (lambda: integrate_out(drawn_model(21, 0), [0]), ValueError, "20 sites, got 21"),
    "two components": (
        lambda: integrate_out(SpinModel.create(Spin.create(torch.zeros(3, 2)), torch.zeros(3, 3)), [0]),
        ValueError,
        "one component",
    ),
    "NaN": (lambda: decimation_flow(math.nan), ValueError, "coupling"),
    "text": (lambda: decimation_flow("1"), TypeError, "coupling"),
    "field in two dimensions": (lambda: decimation_flow(1.0, 0.1, dimension=2), ValueError, "field"),
    "block": (lambda: decimation_flow(1.0, block=1), ValueError, "block"),
    "bonds of a flow": (lambda: decimation_flow(1.0, dimension=2000), ValueError, r"2\^53, got 2\^1999"),
    "bonds at a fixed point": (lambda: decimation_fixed_point(54, block=3), ValueError, r"2\^53, got 3\^53"),
    "dimension": (lambda: decimation_fixed_point(0), ValueError, "dimension"),
}


@every_row("name", REFUSED)
def test_bad_input_is_one_clear_error(name: str):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()
