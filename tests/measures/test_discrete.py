"""Bits, counts and categories: the table of cumulants, categories by enumeration, bad input."""

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import special
from tests.support.rows import every_row

from massieu.measures import Bernoulli, Categorical, Poisson, Spin

F64 = torch.float64
CHANCES = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.0, 0.125, 0.375]], dtype=F64)


def tensor_of(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def test_cumulants_at_the_origin_are_those_of_the_table():
    """B3."""
    origin = torch.zeros(1, dtype=F64)
    one = torch.ones(1, dtype=F64)
    assert Spin.create(one.new_zeros(1)).cumulants(origin, one, 6).tolist() == pytest.approx([0, 1, 0, -2, 0, 16])
    p = 0.3
    table = [p, p * (1 - p), p * (1 - p) * (1 - 2 * p), p * (1 - p) * (1 - 6 * p + 6 * p * p)]
    assert Bernoulli.create(p * one).cumulants(origin, one, 4).tolist() == pytest.approx(table)
    assert Poisson.create(1.75 * one).cumulants(origin, one, 6).tolist() == pytest.approx([1.75] * 6)


def test_spin_cumulants_are_bernoulli_numbers():
    """κ_2n = 2^2n (2^2n − 1) B_2n/(2n)."""
    cumulants = Spin.create(dim=1).cumulants(torch.zeros(1), torch.ones(1), 6)
    for n in (1, 2, 3):
        expected = float(4**n * (4**n - 1) * mpmath.bernoulli(2 * n) / (2 * n))
        assert cumulants[2 * n - 1].item() == pytest.approx(expected)


def test_the_cumulant_series_of_a_spin_converges_inside_its_radius_only():
    """B2: the radius is π/2."""
    with mpmath.workdps(30):
        series = mpmath.taylor(lambda t: mpmath.log(mpmath.cosh(t)), 0, 24)
    for t, converges in ((1.2, True), (1.9, False)):
        errors = [abs(sum(series[n] * t**n for n in range(top + 1)) - mpmath.log(mpmath.cosh(t))) for top in (12, 24)]
        assert (errors[1] < errors[0]) == converges
    ours = Spin.create(torch.zeros(1, dtype=F64)).cumulants(torch.zeros(1, dtype=F64), torch.ones(1, dtype=F64), 6)
    for n in range(1, 7):
        assert ours[n - 1].item() == pytest.approx(float(series[n] * math.factorial(n)), abs=1e-12)


def test_tilts_and_powers_stay_in_the_family():
    eta = draw(2, 3)
    point = draw(2, 5, 3, seed=1)
    measures = [
        Spin.create(draw(2, 3, seed=2)),
        Bernoulli.create(torch.sigmoid(draw(2, 3))),
        Poisson.create(draw(2, 3).exp()),
    ]
    for measure in (*measures, Categorical.create(logits=draw(2, 3))):
        tilted = measure.tilt(eta)
        assert type(tilted) is type(measure)
        moved = measure.log_partition(point + eta[:, None]) - measure.log_partition(eta)[:, None]
        torch.testing.assert_close(tilted.log_partition(point), moved)
    poisson = measures[-1]
    torch.testing.assert_close(poisson._power(2.5).log_partition(point), 2.5 * poisson.log_partition(point))
    assert Spin.create(dim=2)._power(0.5) is None and measures[1]._power(0.5) is None


def test_bernoulli_keeps_small_probabilities():
    measure = Bernoulli.create(torch.tensor([1e-30]))
    assert measure.probability.item() == pytest.approx(1e-30, rel=1e-5)
    assert measure.mean(torch.tensor([1.0])).item() == pytest.approx(math.e * 1e-30, rel=1e-5)
    assert measure.log_partition(torch.tensor([80.0])).item() == pytest.approx(
        math.log1p(1e-30 * math.exp(80)), rel=1e-5
    )


def test_an_all_but_certain_sign_has_finite_gradients():
    measure = Spin.create(tensor_of(30.0))
    mu = tensor_of(0.5, 1.0, 2.0)[:, None].requires_grad_()
    result = measure._natural(mu)
    assert result is not None
    assert result[:, 0].tolist() == pytest.approx([math.atanh(0.5) - 30, math.inf, math.nan], nan_ok=True)
    (slope,) = torch.autograd.grad(result[0].sum(), mu)
    assert slope[:, 0].tolist() == pytest.approx([4 / 3, 0, 0])


def test_extreme_divergences():
    largest = torch.finfo(torch.float32).max
    spin = Spin.create(dim=1)
    bit = Bernoulli.create(torch.tensor([0.5]))
    for eta in (1e10, largest, -largest):
        point = torch.tensor([eta])
        assert spin.entropy(point).item() == pytest.approx(-math.log(2))
        assert bit.entropy(point).item() == pytest.approx(-math.log(2))
        assert spin.kl(point, point).item() == bit.kl(point, point).item() == 0.0
    assert Poisson.create(torch.tensor([2.0])).entropy(torch.tensor([-100.0])).item() == pytest.approx(-2.0)


def test_categories_of_probabilities_are_those_of_logits():
    given = Categorical.create(CHANCES)
    shifted = Categorical.create(logits=CHANCES.log() + torch.tensor([[3.0], [-2.0]], dtype=F64))
    torch.testing.assert_close(given.probability, CHANCES)
    torch.testing.assert_close(shifted.probability, CHANCES)
    eta = draw(2, 5, 4)
    expected = torch.from_numpy(special.logsumexp(eta.numpy(), axis=-1, b=CHANCES.numpy()[:, None]))
    torch.testing.assert_close(given.log_partition(eta), expected)
    torch.testing.assert_close(shifted.log_partition(eta), expected)


def test_category_cumulants_by_enumeration():
    measure = Categorical.create(CHANCES)
    eta = draw(2, 3, 4)
    direction = draw(2, 3, 4, seed=1)
    cumulants = measure.cumulants(eta, direction, 6)
    for b in range(2):
        for q in range(3):
            with mpmath.workdps(60):
                terms = list(zip(CHANCES[b].tolist(), eta[b, q].tolist(), direction[b, q].tolist(), strict=True))
                taylor = mpmath.taylor(
                    lambda t, terms=terms: mpmath.log(sum(p * mpmath.exp(mpmath.mpf(e) + t * v) for p, e, v in terms)),
                    0,
                    6,
                    h=mpmath.mpf(10) ** -7,
                )
            expected = [float(taylor[n] * mpmath.factorial(n)) for n in range(1, 7)]
            np.testing.assert_allclose(cumulants[b, q].numpy(), expected, rtol=1e-4, atol=1e-4)


def test_category_fisher_keeps_its_digits_where_one_category_wins():
    measure = Categorical.create(torch.full((3,), 1 / 3))
    eta = torch.tensor([25.0, 0.0, 1.0])
    vector = torch.tensor([2.0, -1.0, 0.5])
    share = special.softmax(eta.double().numpy())
    with mpmath.workdps(40):
        exact = [mpmath.exp(e) for e in (25, 0, 1)]
        exact = [e / sum(exact) for e in exact]
        mean = sum(p * v for p, v in zip(exact, (2.0, -1.0, 0.5), strict=True))
        expected = [float(p * (v - mean)) for p, v in zip(exact, (2.0, -1.0, 0.5), strict=True)]
    np.testing.assert_allclose(measure.fisher_vp(eta, vector).numpy(), expected, rtol=3e-6)
    np.testing.assert_allclose((measure.fisher(eta) @ vector).numpy(), expected, rtol=3e-6)
    assert measure.fisher(eta)[0, 0].item() == pytest.approx(share[1] + share[2], rel=1e-5)


def test_category_samples_and_probabilities():
    measure = Categorical.create(CHANCES)
    eta = draw(2, 3, 4)
    count = 40_000
    draws = measure.sample(eta, (count,), generator=torch.Generator().manual_seed(0))
    assert set(draws.unique().tolist()) == {0.0, 1.0} and (draws.sum(-1) == 1).all()
    share = special.softmax(eta.numpy() + np.log(np.maximum(CHANCES.numpy(), 1e-300))[:, None], axis=-1)
    error = np.sqrt(share * (1 - share) / count)
    assert (np.abs(draws.mean(0).numpy() - share) <= 5 * error).all()
    assert (draws[:, 1, :, 1] == 0).all()
    identity = torch.eye(4, dtype=F64).reshape(4, 1, 1, 4).expand(4, 2, 3, 4)
    np.testing.assert_allclose(measure.log_prob(eta, identity).exp().movedim(0, -1).numpy(), share, atol=1e-14)
    broken = torch.tensor([[0.5, 0.5, 0, 0], [1.0, 1, 0, 0], [0.0, 0, 0, 0]], dtype=F64).expand(2, 3, 4)
    assert (measure.log_prob(eta, broken) == -math.inf).all()
    assert measure._support(torch.tensor([[1.0, 2, 3, 4], [1.0, 9, 3, 2]], dtype=F64)).tolist() == [4.0, 3.0]


def test_category_natural_has_least_norm():
    measure = Categorical.create(CHANCES)
    eta = draw(2, 3, 4)
    result = measure._natural(measure.mean(eta))
    torch.testing.assert_close(measure.mean(result), measure.mean(eta))
    kept = (CHANCES > 0)[:, None]
    torch.testing.assert_close((result * kept).sum(-1), torch.zeros(2, 3, dtype=F64), atol=1e-14, rtol=0)
    assert (result.masked_select(~kept) == 0).all()

    single = Categorical.create(torch.tensor([0.5, 0.0, 0.25, 0.25], dtype=F64))
    rows = [[0.5, 0.0, 0.5, 0.0], [0.5, 0.1, 0.2, 0.2], [0.6, 0.0, 0.6, -0.2], [0.6, 0.0, 0.5, 0.2]]
    edge, *outside = single._natural(torch.tensor(rows, dtype=F64)).tolist()
    assert edge == pytest.approx([-math.log(2) / 2, 0.0, math.log(2) / 2, -math.inf])
    assert all(math.isnan(number) for row in outside for number in row)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_category_extremes_are_finite(dtype):
    largest = torch.finfo(dtype).max
    measure = Categorical.create(logits=torch.tensor([0.0, 1.0, -torch.inf], dtype=dtype))
    rows = [[largest, -largest, 0.0], [-largest, -largest, largest], [0.0, 0.0, 0.0], [1e-4, 100.0, -100.0]]
    eta = torch.tensor(rows, dtype=dtype, requires_grad=True)
    value = measure.log_partition(eta)
    (first,) = torch.autograd.grad(value.sum(), eta, create_graph=True)
    (second,) = torch.autograd.grad((first * torch.tensor([1.0, 2.0, 3.0])).sum(), eta)
    assert value.isfinite().all() and first.isfinite().all() and second.isfinite().all()
    torch.testing.assert_close(first, measure.mean(eta))


@every_row(
    ("call", "kind", "message"),
    [
        (lambda: Bernoulli.create(torch.tensor([0.0])), ValueError, "above 0 and below 1, got 0"),
        (lambda: Bernoulli.create(torch.tensor([0.5, 1.5])), ValueError, r"above 0 and below 1, got 1.5"),
        (lambda: Bernoulli.create(torch.tensor([math.nan])), ValueError, "probability must be finite"),
        (lambda: Bernoulli.create(torch.tensor([1j])), TypeError, "probability must be real"),
        (lambda: Poisson.create([[1.0], []]), TypeError, "rate must be .* numbers to make one of, got list"),
        (lambda: Poisson.create(torch.tensor([1.0, 0.0])), ValueError, "rate must be positive and finite, got 0"),
        (lambda: Poisson.create(torch.zeros(2, 0)), ValueError, r"d ≥ 1, got \(2, 0\)"),
        (lambda: Categorical.create(), ValueError, "exactly one of"),
        (lambda: Categorical.create(torch.ones(2) / 2, logits=torch.ones(2)), ValueError, "exactly one of"),
        (lambda: Categorical.create(torch.ones(3)), ValueError, "sum to 1 over the last dimension, got a sum of 3"),
        (lambda: Categorical.create(torch.tensor([1.5, -0.5])), ValueError, "negative"),
        (lambda: Categorical.create(torch.tensor(1.0)), ValueError, "M ≥ 1"),
        (lambda: Categorical.create(torch.tensor([1j])), TypeError, "probability must be real"),
        (lambda: Categorical.create(logits=torch.tensor([math.nan, 0.0])), ValueError, "finite or −inf"),
        (lambda: Categorical.create(logits=torch.full((2,), -math.inf)), ValueError, "a finite one in every row"),
    ],
)
def test_bad_input_is_refused(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_the_nearest_sign_and_the_nearest_bit():
    point = torch.tensor([-1.25, -0.25, 0.25, 0.75, 1.25])
    assert Spin.create(dim=5)._nearest(point).tolist() == [-1, -1, 1, 1, 1]
    assert Bernoulli.create(0.5, dim=5)._nearest(point).tolist() == [0, 0, 0, 1, 1]
    assert all(law._nearest(torch.tensor([math.nan])).isnan() for law in (Spin.create(dim=1), Bernoulli.create(0.5)))
