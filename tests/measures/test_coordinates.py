"""Independent coordinates against closed forms in mpmath, sums, integrals and SciPy's laws."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from tests.support.rows import every_row
from torch import Tensor

from massieu.measures import Bernoulli, Exponential, Gamma, Laplace, Measure, Poisson, Spin, Uniform

MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Family:
    """One coordinate of a measure, told twice."""

    make: Callable[..., Measure]
    parameters: tuple[float, ...]
    log_partition: Callable[..., Any]  # in mpmath
    tilted: Callable[[float], Any]  # SciPy's law under p_eta
    inside: tuple[float, ...]
    far: tuple[float, ...]  # the ends of the domain and the largest numbers
    outside: tuple[float, ...] = ()
    discrete: bool = False
    off_support: tuple[float, ...] = ()
    mean_range: tuple[float, float] = (-math.inf, math.inf)

    def measure(self, dtype: torch.dtype = torch.float64) -> Any:
        return self.make(*(torch.tensor([value], dtype=dtype) for value in self.parameters))


def below(bound: float) -> float:
    return float(np.nextafter(np.float32(bound), np.float32(0)))


def log_mean_sinh(low: float, high: float, eta: Any) -> Any:
    if eta == 0:
        return mpmath.mpf(0)
    width = mpmath.mpf(high) - low
    return (mpmath.mpf(high) + low) / 2 * eta + mpmath.log(mpmath.sinh(width * eta / 2) / (width * eta / 2))


def truncated(low: float, high: float, eta: float) -> Any:
    if eta == 0:
        return stats.uniform(low, high - low)
    law = stats.truncexpon((high - low) * abs(eta), scale=1 / abs(eta))

    class Reflected:
        """x = low + y, or high − y."""

        def logpdf(self, x):
            return law.logpdf(x - low if eta < 0 else high - x)

        def mean(self):
            return low + law.mean() if eta < 0 else high - law.mean()

        def var(self):
            return law.var()

    return Reflected()


def asymmetric_laplace(scale: float, eta: float) -> Any:
    right = 1 / scale - eta
    left = 1 / scale + eta
    return stats.laplace_asymmetric(math.sqrt(right / left), scale=1 / math.sqrt(right * left))


def signs(local: float) -> Any:
    return stats.rv_discrete(values=([-1, 1], [1 / (1 + math.exp(2 * local)), 1 / (1 + math.exp(-2 * local))]))


log = mpmath.log
exp = mpmath.exp
cosh = mpmath.cosh
WHOLE = (0.0, 1e-4, -1e-4, 1.0, -1.0, 15.0, -15.0)
LARGE = (100.0, -100.0, MAX, -MAX)

FAMILIES = {
    "spin": Family(
        Spin.create,
        (0.375,),
        lambda t: log(cosh(t + 0.375) / cosh(mpmath.mpf(0.375))),
        lambda t: signs(t + 0.375),
        WHOLE,
        LARGE,
        discrete=True,
        off_support=(0.0, 0.5, 3.0),
        mean_range=(-1, 1),
    ),
    "bernoulli": Family(
        Bernoulli.create,
        (0.25,),
        lambda t: log(0.75 + 0.25 * exp(t)),
        lambda t: stats.bernoulli(1 / (1 + 3 * math.exp(-t))),
        WHOLE,
        LARGE,
        discrete=True,
        off_support=(-1.0, 0.5, 2.0),
        mean_range=(0, 1),
    ),
    "bernoulli, likely": Family(
        Bernoulli.create,
        (0.875,),
        lambda t: log(0.125 + 0.875 * exp(t)),
        lambda t: stats.bernoulli(1 / (1 + math.exp(-t) / 7)),
        WHOLE,
        LARGE,
        discrete=True,
        off_support=(-1.0, 0.5, 2.0),
        mean_range=(0, 1),
    ),
    "poisson": Family(
        Poisson.create,
        (2.5,),
        lambda t: 2.5 * mpmath.expm1(t),
        lambda t: stats.poisson(2.5 * math.exp(t)),
        (0.0, 1e-4, -1e-4, 1.0, -1.0, 3.0, -15.0),
        (15.0, 87.0, -100.0, -MAX),
        discrete=True,
        off_support=(-1.0, 0.5, math.inf),
        mean_range=(0, math.inf),
    ),
    "exponential": Family(
        Exponential.create,
        (2.5,),
        lambda t: -log(1 - mpmath.mpf(t) / 2.5),
        lambda t: stats.expon(scale=1 / (2.5 - t)),
        (0.0, 1e-4, -1e-4, 1.0, -1.0, 2.25, -15.0),
        (below(2.5), -100.0, -MAX),
        outside=(2.5, 3.0, math.nan),
        off_support=(-1.0,),
        mean_range=(0, math.inf),
    ),
    "gamma": Family(
        Gamma.create,
        (0.75, 0.25),
        lambda t: -0.75 * log(1 - mpmath.mpf(t) / 4),
        lambda t: stats.gamma(0.75, scale=0.25 / (1 - 0.25 * t)),
        (0.0, 1e-4, -1e-4, 1.0, -1.0, 3.5, -15.0),
        (below(4.0), -100.0, -MAX),
        outside=(4.0, 5.0, math.nan),
        off_support=(-1.0,),
        mean_range=(0, math.inf),
    ),
    "laplace": Family(
        Laplace.create,
        (0.5,),
        lambda t: -log(1 - mpmath.mpf(t) ** 2 / 4),
        lambda t: asymmetric_laplace(0.5, t),
        (0.0, 1e-4, -1e-4, 1.0, -1.0, 1.75, -1.75),
        (below(2.0), -below(2.0)),
        outside=(2.0, -2.0, 3.0, math.nan),
    ),
    "uniform": Family(
        Uniform.create,
        (-1.0, 1.5),
        lambda t: log_mean_sinh(-1.0, 1.5, t),
        lambda t: truncated(-1.0, 1.5, t),
        (*WHOLE, 0.79, -0.81),
        (100.0, -100.0, MAX / 2, -MAX),
        off_support=(-1.1, 2.0),
        mean_range=(-1.0, 1.5),
    ),
    "uniform, from zero": Family(
        Uniform.create,
        (0.0, 0.5),
        lambda t: log_mean_sinh(0.0, 0.5, t),
        lambda t: truncated(0.0, 0.5, t),
        (*WHOLE, 3.99, -4.01),
        LARGE,
        off_support=(-0.1, 0.6),
        mean_range=(0.0, 0.5),
    ),
}
CASES = pytest.mark.parametrize("name", FAMILIES)


def some_points(family: Family) -> list[float]:
    """Zero, a point next to it, one on each side, and the last."""
    return [family.inside[place] for place in (0, 1, 3, -1)]


def column(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers as eta: queries of one coordinate."""
    return torch.tensor(list(values), dtype=dtype)[:, None]


def exact(function: Callable[..., Any], point: float, order: int) -> Any:
    """A derivative in mpmath, in enough digits to see the small ones far out."""
    with mpmath.workdps(60 if abs(point) < 1e6 else 400):
        return mpmath.diff(function, mpmath.mpf(point), order, h=mpmath.mpf(10) ** (-20 if abs(point) < 1e6 else -40))


@pytest.mark.medium
@CASES
def test_log_partition_is_the_log_of_the_sum_or_integral(name):
    family = FAMILIES[name]
    measure = FAMILIES[name].measure()
    law, (low, high) = family.tilted(0.0), family.mean_range
    if family.discrete:
        support = {"spin": [-1.0, 1.0], "poisson": np.arange(400.0)}.get(name, [0.0, 1.0])
    for eta in some_points(family):
        if family.discrete:
            total = special.logsumexp(np.asarray(support) * eta + law.logpmf(support))
        else:
            edges = np.array([-200, -10, -1, 0, 1, 10, 200.0])
            edges = np.unique(np.clip(edges, max(low, -200), min(high, 200)))
            # A power of x removes the gamma density's singularity at 0.
            power = 4 if (low, high) == (0, math.inf) else 1

            def integrand(t, eta=eta, power=power):
                return power * t ** (power - 1) * np.exp(t**power * eta + law.logpdf(t**power))

            edges = edges ** (1 / power) if power > 1 else edges
            parts = [
                integrate.quad(integrand, a, b, epsabs=0, epsrel=1e-12, limit=200)[0]
                for a, b in itertools.pairwise(edges)
            ]
            total = math.log(sum(parts))
        assert measure.log_partition(column([eta])).item() == pytest.approx(total, rel=1e-9, abs=1e-9)


@pytest.mark.medium
@CASES
def test_first_six_cumulants_are_derivatives(name):
    family = FAMILIES[name]
    measure = FAMILIES[name].measure()
    zeros = 0 if name.startswith("uniform") else 1  # where mpmath has no Taylor series of the quotient
    points = [0.0] * zeros + [family.inside[3]]
    cumulants = measure.cumulants(column(points), torch.full((len(points), 1), -1.5, dtype=torch.float64), 6)
    for i, eta in enumerate(points):
        with mpmath.workdps(250):
            taylor = mpmath.taylor(family.log_partition, mpmath.mpf(eta), 6, h=mpmath.mpf(10) ** -30)
        for n in range(1, 7):
            expected = float(taylor[n] * mpmath.factorial(n) * (-1.5) ** n)
            assert cumulants[i, n - 1].item() == pytest.approx(expected, rel=1e-8, abs=1e-9)


@pytest.mark.medium
@CASES
def test_float32_is_right_with_two_derivatives_everywhere(name):
    family = FAMILIES[name]
    measure = FAMILIES[name].measure(torch.float32)
    points = [*family.inside, *family.far]
    eta = column(points, torch.float32).requires_grad_()
    value = measure.log_partition(eta)
    (first,) = torch.autograd.grad(value.sum(), eta, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), eta)
    closed = value, first[:, 0], second[:, 0], measure.mean(eta)[:, 0], measure.fisher(eta)[:, 0, 0]
    for i, point in enumerate(eta[:, 0].tolist()):
        if math.isinf(closed[0][i].item()):
            assert abs(exact(family.log_partition, point, 0)) > MAX
            continue
        if name.startswith("uniform") and point == 0:
            low, high = family.parameters
            derivatives = [0.0, (low + high) / 2, (high - low) ** 2 / 12]
        else:
            derivatives = [float(exact(family.log_partition, point, order)) for order in range(3)]
        for numbers, order in zip(closed, (0, 1, 2, 1, 2), strict=True):
            expected = derivatives[order]
            got = numbers[i].item()
            assert got == pytest.approx(expected, rel=3e-6, abs=3e-7 if order < 2 else 1e-6), (name, point, order)


@CASES
def test_closed_mean_and_variance_keep_relative_accuracy_in_the_tails(name):
    family = FAMILIES[name]
    measure = FAMILIES[name].measure(torch.float32)
    for eta in (point for point in (*family.inside, *family.far) if point < 0 and abs(point) < 80):
        point = column([eta], torch.float32)
        with mpmath.workdps(60):
            variance = float(exact(family.log_partition, point.item(), 2))
        assert measure.fisher(point).item() == pytest.approx(variance, rel=1e-5)


@pytest.mark.medium
@CASES
def test_kl_keeps_its_digits_in_float32(name):
    family = FAMILIES[name]
    measure = FAMILIES[name].measure(torch.float32)
    steps = torch.tensor([1e-6, -1e-6, 1e-3, 0.1, -0.7, 30.0, -30.0], dtype=torch.float64)
    for eta in some_points(family):
        q = (eta + steps).float()[:, None]
        if family.outside:
            q = q[measure._in_domain(q)]
        p = torch.full_like(q, eta)
        with mpmath.workdps(120):
            a = mpmath.mpf(p[0].item())
            slope = mpmath.diff(family.log_partition, a, h=mpmath.mpf(10) ** -50)
            if a == 0 and name.startswith("uniform"):
                slope = mpmath.mpf(sum(family.parameters)) / 2
            ends = [mpmath.mpf(end) for end in q[:, 0].tolist()]
            start = family.log_partition(a)
            expected = [float(family.log_partition(end) - start - slope * (end - a)) for end in ends]
        assert measure.kl(p, q).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-37), (name, eta)


@CASES
def test_density_of_the_tilted_law(name):
    family = FAMILIES[name]
    measure = FAMILIES[name].measure()
    if name == "spin":
        points = [-1.0, 1.0]
    elif name.startswith("bernoulli"):
        points = [0.0, 1.0]
    elif name == "poisson":
        points = [0.0, 1.0, 2.0, 7.0]
    else:
        points = [0.1, 0.25, 0.4]
    inside = [eta for eta in family.inside if abs(eta) < 15]
    eta = column(inside)
    for point in points:
        density = measure._log_density(column([point] * len(inside))) + eta[:, 0] * point - measure.log_partition(eta)
        for i, value in enumerate(inside):
            law = family.tilted(value)
            expected = law.logpmf(point) if family.discrete else law.logpdf(point)
            assert density[i].item() == pytest.approx(float(expected), rel=1e-10, abs=1e-11)
    for point in family.off_support:
        assert measure._log_density(column([point])).item() == -math.inf
    leaf = column([*points[:1], *family.off_support]).requires_grad_()
    (slope,) = torch.autograd.grad((measure._log_density(leaf) + leaf[:, 0])[0], leaf)
    assert slope.isfinite().all()


@CASES
def test_samples_have_the_mean_and_variance_of_the_tilted_law(name):
    family = FAMILIES[name]
    measure = FAMILIES[name].measure()
    count = 10_000
    inside = [eta for eta in family.inside if abs(eta) < 15 or not family.discrete]
    generator = torch.Generator().manual_seed(0)
    draws = measure.sample(column(inside), (count,), generator=generator)[..., 0].numpy()
    assert draws.shape == (count, len(inside))
    for i, eta in enumerate(inside):
        law = family.tilted(eta)
        drawn = draws[:, i]
        assert abs(drawn.mean() - law.mean()) <= 5 * math.sqrt(law.var() / count)
        square = (drawn - law.mean()) ** 2
        assert abs(square.mean() - law.var()) <= 5 * max(square.std(), law.var()) / math.sqrt(count)
        assert np.isfinite(measure._log_density(torch.from_numpy(drawn)[:, None]).numpy()).all()
    again = measure.sample(column(inside), (count,), generator=torch.Generator().manual_seed(0))[..., 0].numpy()
    np.testing.assert_array_equal(draws, again)


@CASES
def test_natural_inverts_the_mean_with_two_derivatives(name):
    family = FAMILIES[name]
    measure = FAMILIES[name].measure()
    eta = column(eta for eta in family.inside if abs(eta) < 15)
    mu = measure.mean(eta)
    torch.testing.assert_close(measure._natural(mu), eta, rtol=1e-10, atol=1e-10)
    leaf = mu.detach().requires_grad_()
    result = measure._natural(leaf)
    (first,) = torch.autograd.grad(result.sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    # Of an inverse function: 1/A'' and −A'''/A''³.
    _, variance, third = measure.cumulants(eta, torch.ones_like(eta), 3).unbind(-1)
    torch.testing.assert_close(first[:, 0], 1 / variance, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(second[:, 0], -third / variance**3, rtol=1e-6, atol=1e-8)


@CASES
def test_natural_at_the_boundary_and_outside(name):
    low, high = FAMILIES[name].mean_range
    measure = FAMILIES[name].measure()
    for bound, sign in ((low, -1), (high, 1)):
        mu = column([bound, bound + sign, math.nan])
        result = measure._natural(mu)[:, 0]
        expected = [sign * math.inf if math.isfinite(bound) else math.nan, math.nan, math.nan]
        np.testing.assert_array_equal(result.numpy(), expected)
    centre = measure.mean(column([0.0]))[0].item()
    mu = column([centre, low if math.isfinite(low) else math.nan]).requires_grad_()
    (slope,) = torch.autograd.grad(measure._natural(mu)[0].sum(), mu)
    assert slope.isfinite().all()


@CASES
def test_support_function(name):
    low, high = FAMILIES[name].mean_range
    direction = column([2.0, -3.0, 0.0])
    result = FAMILIES[name].measure()._support(direction)
    np.testing.assert_array_equal(result.numpy(), [2 * high, -3 * low, 0.0])


@CASES
def test_eta_outside_the_domain_names_the_bound(name):
    measure = FAMILIES[name].measure()
    for eta in FAMILIES[name].outside:
        with pytest.raises(ValueError, match=r"eta.* < .*= (2\.5|4|2) in every coordinate"):
            measure.log_partition(column([eta]))


@pytest.mark.medium
@CASES
def test_derivatives_in_the_parameters(name):
    family = FAMILIES[name]
    parameters = [torch.tensor([[value], [0.9 * value]], dtype=torch.float64) for value in family.parameters]
    if name == "uniform, from zero":
        parameters[0] = parameters[0] - 0.1
    parameters = [parameter.requires_grad_() for parameter in parameters]
    eta = torch.tensor([[[0.3], [-0.7]], [[0.6], [0.1]]], dtype=torch.float64, requires_grad=True)

    def both(eta: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        measure = family.make(*parameters)
        return measure.log_partition(eta), measure.mean(eta), measure.kl(eta, 0.5 * eta)

    assert torch.autograd.gradcheck(both, (eta, *parameters), fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *leaves: both(*leaves)[0], (eta, *parameters), fast_mode=True)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["mapped", "compiled"])
@every_row("name", ["spin", "gamma", "uniform"])
def test_transforms_and_compilation(name, compiled):
    measure = FAMILIES[name].measure()
    eta = torch.tensor([[0.3], [-0.7], [0.0]], dtype=torch.float64)
    point = measure.mean(eta)

    def everything(eta: Tensor) -> tuple[Tensor, ...]:
        direction = torch.ones_like(eta)
        return measure.cumulants(eta, direction, 3), measure._natural(measure.mean(eta)), measure._support(eta)

    torch.compiler.reset()
    variant = (
        torch.compile(everything, fullgraph=True, backend="aot_eager") if compiled else torch.func.vmap(everything)
    )
    torch.testing.assert_close(variant(eta), everything(eta))
    tangent = torch.func.jvp(lambda mu: measure._natural(mu), (point,), (torch.ones_like(point),))[1]
    torch.testing.assert_close(tangent[:, 0], 1 / measure.fisher(eta)[:, 0, 0])


def test_everything_is_a_sum_over_coordinates():
    rate = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)
    eta = torch.tensor([[0.5, -1.0, 4.0], [-0.5, 2.0, 0.0]], dtype=torch.float64)
    direction = torch.tensor([[1.0, -2.0, 0.5], [0.0, 1.0, 3.0]], dtype=torch.float64)
    whole = Exponential.create(rate)
    parts = [Exponential.create(one[None]) for one in rate]
    for name in ("log_partition", "entropy"):
        total = sum(getattr(part, name)(eta[:, i : i + 1]) for i, part in enumerate(parts))
        torch.testing.assert_close(getattr(whole, name)(eta), total)
    total = sum(part.cumulants(eta[:, i : i + 1], direction[:, i : i + 1], 6) for i, part in enumerate(parts))
    torch.testing.assert_close(whole.cumulants(eta, direction, 6), total)
    torch.testing.assert_close(whole.fisher(eta), torch.diag_embed(1 / (rate - eta) ** 2))
