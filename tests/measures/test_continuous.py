"""Exponential, gamma, Laplace and uniform laws and the point: the table of cumulants, extremes, bad input."""

import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import integrate
from tests.support.rows import every_row

from massieu.measures import ConjugatePrior, Constant, DomainError, Exponential, Gamma, Laplace, Uniform
from massieu.measures.combine import Tilted

F64 = torch.float64


def tensor(*values: float, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def test_cumulants_at_the_origin_are_those_of_the_table():
    """B3."""
    origin = tensor(0.0)
    one = tensor(1.0)
    tables = {
        Exponential.create(tensor(2.0)): [math.factorial(n - 1) / 2**n for n in range(1, 7)],
        Gamma.create(tensor(1.5), tensor(0.5)): [1.5 * math.factorial(n - 1) * 0.5**n for n in range(1, 7)],
        Laplace.create(tensor(0.5)): [0 if n % 2 else 2 * math.factorial(n - 1) * 0.5**n for n in range(1, 7)],
        Constant.create(tensor(-3.0)): [-3, 0, 0, 0, 0, 0],
        # Of the uniform law on an interval of width w: w^n B_n/n.
        Uniform.create(tensor(-1.0), tensor(2.0)): [
            0.5,
            *(float(3**n * mpmath.bernoulli(n) / n) for n in range(2, 7)),
        ],
    }
    for measure, table in tables.items():
        assert measure.cumulants(origin, one, 6).tolist() == pytest.approx(table, rel=1e-12)


def test_laplace_sampler():
    """B9: at scale .8 and eta .6, mean .9979 and variance 2.659."""
    measure = Laplace.create(tensor(0.8))
    eta = tensor(0.6)
    count = 200_000
    mean = 2 * 0.64 * 0.6 / (1 - 0.2304)
    variance = 2 * 0.64 * (1 + 0.2304) / (1 - 0.2304) ** 2
    assert (round(mean, 4), round(variance, 3)) == (0.9979, 2.659)
    assert measure.mean(eta).item() == pytest.approx(mean) and measure.fisher(eta).item() == pytest.approx(variance)
    draws = measure.sample(eta, (count,), generator=torch.Generator().manual_seed(0)).numpy()
    square = (draws - mean) ** 2
    assert abs(draws.mean() - mean) < 5 * math.sqrt(variance / count)
    assert abs(square.mean() - variance) < 5 * square.std() / math.sqrt(count)
    share = (1 + 0.8 * 0.6) / 2
    assert abs((draws > 0).mean() - share) < 5 * math.sqrt(share * (1 - share) / count)


def test_gamma_samples_of_small_shape():
    measure = Gamma.create(tensor(0.05), tensor(2.0))
    count = 100_000
    draws = measure.sample(tensor(0.25), (count,), generator=torch.Generator().manual_seed(0))
    assert abs(draws.mean().item() - 0.05 * 4) < 5 * math.sqrt(0.05 * 16 / count)
    assert (draws >= 0).all()


def test_tilts_and_powers():
    point = tensor(0.4)
    exponential = Exponential.create(tensor(3.0))
    gamma = Gamma.create(tensor(0.7), tensor(0.2))
    uniform = Uniform.create(-draw(2, 3), 2 * draw(2, 3, seed=1) + 0.1)
    for measure in (exponential, gamma, Laplace.create(tensor(0.3)), uniform.tilt(0.1 * draw(2, 3))):
        tilt = torch.full((*measure.batch_shape, *measure.event_shape), 1.1, dtype=F64)
        points = point.expand(tilt.shape)
        moved = measure.log_partition(points + tilt) - measure.log_partition(tilt)
        torch.testing.assert_close(measure.tilt(tilt).log_partition(points), moved)
    assert isinstance(exponential.tilt(point), Exponential) and isinstance(gamma.tilt(point), Gamma)
    for measure in (exponential, gamma, Constant.create(tensor(2.0))):
        torch.testing.assert_close(measure._power(2.5).log_partition(point), 2.5 * measure.log_partition(point))
    assert isinstance(exponential._power(2.5), Gamma)
    assert Laplace.create(tensor(1.0))._power(0.5) is None and uniform._power(0.5) is None


def test_the_domain_is_a_product_and_its_message_lists_the_bounds():
    for measure, message in (
        (Exponential.create(tensor(1.0, 2.0)), r"Exponential: eta .* eta < rate = \[1, 2\] in every"),
        (Gamma.create(tensor(3.0, 3.0), tensor(1.0, 0.5)), r"eta < 1/scale = \[1, 2\]"),
        (Laplace.create(tensor(1.0, 0.5)), r"\|eta\| < 1/scale = \[1, 2\]"),
        (Exponential.create(torch.linspace(1, 9, 50, dtype=F64)), r"between 1 and 9"),
    ):
        inside = torch.full(measure.event_shape, 0.9, dtype=F64)
        assert measure.log_partition(inside).isfinite()
        for outside in (inside + 0.1, inside.index_fill(0, torch.tensor([0]), 5.0)):
            with pytest.raises(DomainError, match=message):
                measure.mean(outside)


def test_uniform_extremes_in_float32():
    """The law on [0, 1] concentrates at a bound: the distance from it is 1/|eta|."""
    measure = Uniform.create(torch.zeros(1), torch.ones(1))
    largest = torch.finfo(torch.float32).max
    for eta in (-1e3, -1e10, -largest):
        point = torch.tensor([eta])
        assert measure.mean(point).item() == pytest.approx(1 / abs(eta), rel=1e-5)
        assert measure.log_partition(point).item() == pytest.approx(-math.log(abs(eta)), rel=1e-6)
        assert measure.entropy(point).item() == pytest.approx(1 - math.log(abs(eta)), rel=1e-6)
        if abs(eta) < largest:
            natural = measure._natural(measure.mean(point))
            assert natural is not None
            assert natural.item() == pytest.approx(eta, rel=1e-5)
    for eta in (0.0, 1e-30, 1e-4, 1.999, 2.001, 30.0):
        for sign in (1, -1):
            point = torch.tensor([sign * eta])
            mean = measure.mean(point)
            assert mean.item() + measure.mean(-point).item() == pytest.approx(1.0)
            torch.testing.assert_close(measure.mean(measure._natural(mean)), mean)


def test_uniform_third_to_sixth_cumulants_in_float32():
    measure = Uniform.create(torch.tensor([-1.0]), torch.tensor([1.5]))
    eta = torch.tensor([[0.0], [1e-4], [0.7], [0.9], [3.0], [-20.0]])
    single = measure.cumulants(eta, torch.ones_like(eta), 6)
    double = measure.cumulants(eta.double(), torch.ones_like(eta).double(), 6)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-7)


def test_constant():
    measure = Constant.create(tensor(2.0, -1.0))
    eta = torch.stack([tensor(0.0, 0.0), tensor(3.0, -1e300)])
    torch.testing.assert_close(measure.log_partition(eta), eta @ tensor(2.0, -1.0))
    torch.testing.assert_close(measure.mean(eta), tensor(2.0, -1.0).expand(2, 2))
    assert not measure.fisher(eta).any() and not measure.kl(eta, -eta).any()
    assert not measure.entropy(eta).any()
    assert (measure.sample(eta, (5,)) == tensor(2.0, -1.0)).all()
    assert measure.tilt(eta[1]) is measure
    result = measure._natural(torch.stack([tensor(2.0, -1.0), tensor(2.0, 0.0)]))
    np.testing.assert_array_equal(result.numpy(), [[0, 0], [0, math.nan]])
    points = torch.stack([tensor(2.0, -1.0), tensor(2.0, 0.0)])
    assert measure.log_prob(torch.zeros(2, 2, dtype=F64), points).tolist() == [0.0, -math.inf]
    assert measure._support(tensor(1.0, 4.0)).item() == -2.0


def test_densities_of_continuous_laws_integrate_to_one():
    for measure, eta, ends in (
        (Exponential.create(tensor(0.5)), 0.2, (0, 1, 200)),
        (Laplace.create(tensor(0.8)), 0.6, (-80, 0, 80)),
        (Uniform.create(tensor(-1.0), tensor(3.0)), 2.5, (-1, 3)),
    ):

        def density(x, measure=measure, eta=eta):
            return measure.log_prob(tensor(eta)[None], tensor(x)[None]).exp().item()

        total = sum(integrate.quad(density, a, b, epsrel=1e-10)[0] for a, b in itertools.pairwise(ends))
        assert total == pytest.approx(1.0, abs=1e-9)


@every_row(
    ("call", "kind", "message"),
    [
        (lambda: Exponential.create(tensor(0.0)), ValueError, "rate must be positive and finite, got 0"),
        (lambda: Exponential.create(tensor(math.inf)), ValueError, "rate must be positive and finite"),
        (lambda: Exponential.create(torch.tensor([1j])), TypeError, "rate must be real"),
        (
            lambda: Gamma.create(tensor(1.0), tensor(1.0, 2.0)),
            ValueError,
            r"scale must have shape \(1,\), got \(2,\)",
        ),
        (lambda: Gamma.create(tensor(-1.0), tensor(1.0)), ValueError, "shape must be positive and finite, got -1"),
        (lambda: Gamma.create(tensor(1.0), tensor(math.nan)), ValueError, "scale must be positive and finite"),
        (lambda: Laplace.create("one"), TypeError, r"scale must be .* numbers to make one of, got '\w+'"),
        (lambda: Laplace.create(tensor(-1.0)), ValueError, "scale must be positive"),
        (lambda: Uniform.create(tensor(0.0), tensor(0.0)), ValueError, "low must be below high, got 0 and 0"),
        (lambda: Uniform.create(tensor(0.0, 1.0), tensor(1.0)), ValueError, r"high must have shape \(2,\), got \(1,\)"),
        (lambda: Constant.create(tensor(math.nan)), ValueError, "value must be finite"),
        (lambda: Constant.create(torch.zeros(0)), ValueError, "d ≥ 1"),
    ],
)
def test_bad_input_is_refused(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_waiting_times_know_the_eta_of_a_mean_and_where_their_tilts_live():
    rate = torch.tensor([0.5, 2.0]).double()
    eta = rate - torch.tensor([0.3, 4.0]).double()
    for measure in (Exponential.create(rate), Gamma.create(3.0, 1 / rate), Laplace.create(1 / (2 + rate))):
        torch.testing.assert_close(measure._natural(measure.mean(eta)), eta)
        torch.testing.assert_close(measure._conjugate(measure.mean(eta)), -measure.entropy(eta))
    prior = ConjugatePrior.create(Exponential.create(rate), 2.0)
    interior = prior._interior()
    assert interior is not None
    tilted = Tilted(prior, interior + 5.0)
    inner = tilted._interior()
    assert inner is not None
    inside = tilted._in_domain(inner)
    assert inside is not None
    assert inside.all()
    torch.testing.assert_close(inner + interior + 5.0, interior)
