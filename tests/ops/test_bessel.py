"""Bessel ratios and the sphere's log-partition against mpmath, SciPy and the elementary case d = 3."""

import math
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import gammaln, ive
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row, one_in, some_slow
from torch import Tensor

from massieu.ops import bessel

DIMENSIONS = [2, 3, 8, 64, 512, 4096]
# Halfway between the points of a decade and where κ is of the size of the order at which the expansion starts.
CONCENTRATIONS = [1e-8, 1e-4, 0.03, 1.0, 7.0, 24.0, 40.0, 300.0, 2048.0, 4e4, 1e6]


def ratio_of(kappa, dimension):
    """I_{d/2}(κ)/I_{d/2−1}(κ)."""
    return bessel.bessel_ratios(kappa, dimension, 1).squeeze(-1)


def derivative_of_ratio(kappa, dimension):
    unit = kappa.detach().double().clamp_min(1)
    tangent = bessel.sphere_slopes((kappa.double() / unit).square(), dimension, unit).tangent
    return (tangent / unit).to(kappa.dtype)


@pytest.fixture(autouse=True)
def sixty_digits():
    with mpmath.workdps(60):
        yield


def exact(dimension: int, concentration: float) -> tuple[Any, Any, Any]:
    """log E exp(κ x₁), R and R' from the power series of ₀F₁ or, where that is long, from I itself."""
    kappa, order = mpmath.mpf(concentration), mpmath.mpf(dimension) / 2 - 1
    if concentration < 50 + dimension:
        series = [mpmath.hyp0f1(order + i, kappa**2 / 4) for i in (1, 2)]
        value, ratio = mpmath.log(series[0]), kappa / dimension * series[1] / series[0]
    else:
        functions = [mpmath.besseli(order + i, kappa, maxterms=10**6) for i in (0, 1)]
        value = mpmath.loggamma(order + 1) + order * mpmath.log(2 / kappa) + mpmath.log(functions[0])
        ratio = functions[1] / functions[0]
    return value, ratio, 1 - ratio**2 - (dimension - 1) * ratio / kappa


def relative(actual: Tensor, expected: Any) -> float:
    return float(abs(mpmath.mpf(actual.item()) / expected - 1))


@pytest.mark.slow
@pytest.mark.parametrize("dimension", DIMENSIONS)
@every_row(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-7)])
def test_value_two_derivatives_and_entropy(dimension, dtype, tolerance):
    for concentration in CONCENTRATIONS:
        kappa = torch.tensor(concentration, dtype=dtype)
        value, ratio, derivative = exact(dimension, kappa.item())
        square, unit = torch.ones((), dtype=dtype), kappa
        slopes = bessel.sphere_slopes(square, dimension, unit)
        length = mpmath.mpf(kappa.item())
        pairs = (
            (bessel.log_sphere_partition(square, dimension, unit), value),
            (bessel.sphere_entropy(square, dimension, unit), value - length * ratio),
            (ratio_of(kappa, dimension), ratio),
            (derivative_of_ratio(kappa, dimension), derivative),
            (bessel.sphere_chord(square, dimension, unit), ratio),
            (slopes.chord, ratio),
            (slopes.tangent, derivative * length),
            (slopes.bend, ratio - derivative * length),
        )
        for index, (actual, expected) in enumerate(pairs):
            assert actual.dtype == dtype
            assert relative(actual, expected) < tolerance, (index, concentration)


@pytest.mark.medium
@some_slow("dimension", DIMENSIONS, len(DIMENSIONS) - 1)
def test_automatic_derivatives(dimension):
    kappa = torch.tensor(CONCENTRATIONS, dtype=torch.float64)
    first = torch.func.grad(lambda k: bessel.log_sphere_partition(k.square(), dimension).sum())
    second = torch.func.grad(lambda k: first(k).sum())
    slope = torch.func.grad(lambda k: ratio_of(k, dimension).sum())
    for concentration, one, two, three in zip(CONCENTRATIONS, first(kappa), second(kappa), slope(kappa), strict=True):
        _, ratio, derivative = exact(dimension, concentration)
        assert relative(one, ratio) < 1e-12
        # A is a function of κ², whose curvature along κ is a difference of numbers of size 1/κ.
        for actual in (two, three):
            assert relative(actual, derivative) < 1e-12 + 1e-14 * concentration / (dimension - 1)


@given(st.floats(-8, 6), st.integers(2, 600))
def test_scipy(exponent, dimension):
    kappa = torch.tensor(10.0**exponent, dtype=torch.float64)
    order = dimension / 2 - 1
    scaled = [ive(order + i, kappa.item()) for i in (0, 1)]
    if scaled[1] < 1e-280:  # beyond SciPy's range
        return
    terms = [gammaln(order + 1), order * math.log(2 / kappa.item()), math.log(scaled[0]), kappa.item()]
    rounding = 1e-14 * (1 + sum(map(abs, terms)))
    actual = bessel.log_sphere_partition(kappa.square(), dimension).item()
    assert actual == pytest.approx(sum(terms), rel=1e-11, abs=rounding)
    assert ratio_of(kappa, dimension).item() == pytest.approx(scaled[1] / scaled[0], rel=1e-11)


@every_row("kappa", [1e-200, 1e-9, 1.0, 1e9, 1e200, 1.7e308])
def test_three_dimensions_are_elementary(kappa):
    with mpmath.workdps(1300 if kappa < 1e-5 else 60):  # cancellation
        k = mpmath.mpf(kappa)
        value = mpmath.log(mpmath.sinh(k) / k) if k < 100 else k - mpmath.log(2 * k)
        ratio = mpmath.coth(k) - 1 / k if k < 100 else 1 - 1 / k
        derivative = 1 / k**2 - 1 / mpmath.sinh(k) ** 2 if k < 100 else 1 / k**2
        entropy = value - k * ratio if k < 100 else 1 - mpmath.log(2 * k)
        unit_length = max(k, 1)
        bend = (ratio / k - derivative) * unit_length**3 / k**2
    tensor = torch.tensor(kappa, dtype=torch.float64)
    assert ratio_of(tensor, 3).item() == pytest.approx(float(ratio), rel=1e-14)
    # Below the smallest normal number digits are lost.
    tiny = torch.finfo(torch.float64).tiny
    assert derivative_of_ratio(tensor, 3).item() == pytest.approx(float(derivative), rel=1e-12, abs=tiny)
    unit = tensor.clamp_min(1)
    square = (tensor / unit).square()
    assert bessel.log_sphere_partition(square, 3, unit).item() == pytest.approx(float(value), rel=1e-14, abs=tiny)
    assert bessel.sphere_entropy(square, 3, unit).item() == pytest.approx(float(entropy), rel=1e-13, abs=tiny)
    assert bessel.sphere_slopes(square, 3, unit).bend.item() == pytest.approx(float(bend), rel=1e-12)


@every_row("dimension", [2, 3, 40])
def test_at_zero(dimension):
    zero = torch.zeros((), dtype=torch.float64)
    assert bessel.log_sphere_partition(zero, dimension).item() == 0
    assert bessel.sphere_entropy(zero, dimension).item() == 0
    assert ratio_of(zero, dimension).item() == 0
    assert derivative_of_ratio(zero, dimension).item() == pytest.approx(1 / dimension, rel=1e-15)
    assert torch.func.grad(ratio_of)(zero, dimension).item() == pytest.approx(1 / dimension, rel=1e-15)
    # Λ = 1 + s/(2d) + s²/(8d(d+2)) + …
    slope = torch.func.grad(bessel.log_sphere_partition)
    curvature = torch.func.grad(slope)(zero, dimension).item()
    assert slope(zero, dimension).item() == pytest.approx(1 / (2 * dimension), rel=1e-15)
    assert curvature == pytest.approx(1 / (4 * dimension * (dimension + 2)) - 1 / (4 * dimension**2), rel=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize(("dimension", "kappa", "count"), [(2, 1.5, 3), (2, 0.0, 4), (64, 20.0, 5)])
def test_nested_forward_derivatives(dimension, kappa, count):
    def along(k: Tensor, count: int) -> Tensor:
        if count == 0:
            return bessel.log_sphere_partition(k.square(), dimension)
        return torch.func.jvp(lambda x: along(x, count - 1), (k,), (torch.ones_like(k),))[1]

    def value(x: Any) -> Any:
        return mpmath.log(mpmath.hyp0f1(mpmath.mpf(dimension) / 2, x**2 / 4))

    expected = float(mpmath.diff(value, kappa, count))
    # Derivatives are of the size of κ over powers of the distance to the nearest singularity.
    size = math.factorial(count) * (1 + kappa) / math.hypot(kappa, dimension / 2 + 1) ** count
    assert along(torch.tensor(kappa, dtype=torch.float64), count).item() == pytest.approx(expected, abs=1e-11 * size)


@pytest.mark.medium
@one_in(2, {"dimension": [2, 5], "name": ["log_sphere_partition", "sphere_entropy", "sphere_chord", "sphere_slopes"]})
def test_derivatives_by_finite_differences(dimension, name):
    square = torch.tensor([0.0, 0.3, 2.0, 900.0], dtype=torch.float64, requires_grad=True)
    check_derivatives(lambda s: getattr(bessel, name)(s, dimension), (square,))


@pytest.mark.slow
def test_vmap_and_compile():
    square = torch.tensor([0.0, 0.3, 900.0], dtype=torch.float64)

    def all_of_it(s: Tensor) -> tuple[Tensor, ...]:
        gradient = torch.func.grad(lambda x: bessel.log_sphere_partition(x, 64).sum())(s)
        return gradient, bessel.log_sphere_partition(s, 64), *bessel.sphere_slopes(s, 64)

    eager = all_of_it(square)
    mapped = torch.func.vmap(all_of_it)(square)
    compiled = torch.compile(all_of_it, backend="aot_eager", fullgraph=True)(square)
    torch.testing.assert_close(mapped, eager, rtol=1e-15, atol=0)
    torch.testing.assert_close(compiled, eager, rtol=1e-15, atol=0)


def test_one_dimension_is_refused():
    for function in (bessel.log_sphere_partition, ratio_of, derivative_of_ratio):
        with pytest.raises(ValueError, match="at least 2, got 1"):
            function(torch.tensor(1.0), 1)
