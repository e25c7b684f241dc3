"""Sphere: against mpmath, SciPy's von Mises–Fisher density, quadrature and elementary moments."""

import functools
import math
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tests.support.rows import every_row, one_in, some_slow
from torch import Tensor

from massieu.measures.sphere import Sphere


@functools.cache
def gauss_legendre() -> tuple[np.ndarray, np.ndarray]:
    """Nodes on [−1, 1] and weights."""
    return np.polynomial.legendre.leggauss(200)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def direction(dim: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    vector = torch.randn(dim, dtype=torch.float64, generator=generator(seed))
    return (vector / vector.norm()).to(dtype)


@pytest.mark.medium
@given(st.floats(-8, 6), st.sampled_from([2, 3, 8, 64, 512]), st.integers(0, 100))
def test_fisher_keeps_its_digits_along_eta_and_across(exponent, dim, seed):
    kappa = 10.0**exponent
    eta = torch.zeros(dim, dtype=torch.float64)
    eta[seed % dim] = kappa
    basis = torch.eye(dim, dtype=torch.float64)
    with mpmath.workdps(60):
        k = mpmath.mpf(kappa)
        order = mpmath.mpf(dim) / 2 - 1
        ratio = mpmath.besseli(order + 1, k, maxterms=10**6) / mpmath.besseli(order, k, maxterms=10**6)
        along = float(1 - ratio**2 - (dim - 1) * ratio / k)
        across = float(ratio / k)
    measure = Sphere.create(2.0, dim=dim)
    both = torch.stack([eta / 2, -eta / 2])
    for axis, variance, relative in ((seed % dim, along, 1e-11), (seed % dim - 1, across, 1e-6)):
        image = measure.fisher_vp(both, basis[axis].expand(2, -1))[:, axis]
        assert image.tolist() == pytest.approx([4 * variance] * 2, rel=relative)
    assert measure.mean(both).norm(dim=-1).tolist() == pytest.approx([2 * float(ratio)] * 2, rel=1e-13)


@pytest.mark.medium
@every_row(("dim", "dtype"), [(2, torch.float32), (5, torch.float64)])
def test_zero_and_the_largest_finite_eta(dim, dtype):
    measure = Sphere.create(dim=dim)
    eps = torch.finfo(dtype).eps
    zero = torch.zeros(dim, dtype=dtype)
    assert measure.log_partition(zero).item() == 0
    assert (torch.func.grad(measure.log_partition)(zero) == 0).all()
    assert (measure.mean(zero) == 0).all()
    identity = torch.eye(dim, dtype=dtype) / dim
    torch.testing.assert_close(measure.fisher(zero), identity, rtol=4 * eps, atol=0)
    torch.testing.assert_close(torch.func.hessian(measure.log_partition)(zero), identity, rtol=4 * eps, atol=0)

    largest = torch.finfo(dtype).max
    for eta in (torch.zeros(dim, dtype=dtype), direction(dim, dtype=dtype) * largest * 0.99):
        if not eta.any():
            eta[-1] = -largest
        kappa = mpmath.mpf(0)
        unit = eta.double() / largest
        kappa = mpmath.mpf(largest) * mpmath.mpf(unit.norm().item())
        axis = (unit / unit.norm()).to(dtype)
        assert measure.log_partition(eta).item() == pytest.approx(float(kappa), rel=4 * eps)
        entropy = float(mpmath.loggamma(dim / 2) + (dim - 1) / 2 * (1 - mpmath.log(kappa)))
        entropy += (dim / 2 - 1) * math.log(2) - 0.5 * math.log(2 * math.pi)
        assert measure.entropy(eta).item() == pytest.approx(entropy, rel=1e-6)
        for mean in (measure.mean(eta), torch.func.grad(measure.log_partition)(eta)):
            torch.testing.assert_close(mean, axis, rtol=0, atol=8 * eps)
        for fisher in (measure.fisher(eta), torch.func.hessian(measure.log_partition)(eta)):
            assert fisher.isfinite().all() and fisher.abs().max() < 2 / float(kappa)


@pytest.mark.medium
@some_slow("dim", [3, 2, 9], 1)
def test_derivatives(dim):
    measure = Sphere.create(torch.tensor(1.3, dtype=torch.float64), dim=dim)
    eta = torch.stack([torch.zeros(dim), 0.3 * torch.ones(dim), 4 * direction(dim).float()]).double().requires_grad_()
    assert torch.autograd.gradcheck(measure.log_partition, (eta,), fast_mode=True)
    assert torch.autograd.gradgradcheck(measure.log_partition, (eta,), fast_mode=True)
    assert torch.autograd.gradcheck(measure.fisher, (eta,), fast_mode=True)
    radius = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r: Sphere(r, dim).log_partition(eta.detach()), (radius,))
    assert torch.autograd.gradcheck(lambda r: Sphere(r, dim)._natural(0.3 * eta.detach()), (radius,))


@pytest.mark.medium
def test_cumulants_on_the_circle_by_quadrature():
    """The projection on a direction of an angle's law exp(κ cos θ)/2π I₀: trapezoidal sums are exact to rounding."""
    measure = Sphere.create(torch.tensor(1.5, dtype=torch.float64), dim=2)
    eta = torch.tensor([[0.0, 0.0], [1.0, -0.4], [7.0, 3.0]], dtype=torch.float64)
    vector = torch.tensor([0.3, 0.8], dtype=torch.float64).expand(3, 2)
    angle = 2 * math.pi * torch.arange(400, dtype=torch.float64) / 400
    points = 1.5 * torch.stack([angle.cos(), angle.sin()], -1)
    weight = torch.softmax(eta @ points.T, -1)
    projection = points @ vector[0]
    mean = weight @ projection
    moments = {n: (weight * (projection - mean[:, None]) ** n).sum(-1) for n in range(2, 7)}
    expected = torch.stack(
        [
            mean,
            moments[2],
            moments[3],
            moments[4] - 3 * moments[2] ** 2,
            moments[5] - 10 * moments[3] * moments[2],
            moments[6] - 15 * moments[4] * moments[2] - 10 * moments[3] ** 2 + 30 * moments[2] ** 3,
        ],
        -1,
    )
    torch.testing.assert_close(measure.cumulants(eta, vector, 6), expected, rtol=1e-11, atol=1e-13)


@pytest.mark.medium
@one_in(2, {"dim": [2, 3, 64], "kappa": [0.0, 1e-3, 1.0, 30.0, 1e4, 1e6]})
def test_kl_keeps_its_digits_in_float32(dim, kappa):
    """Close and far, along and across, through 0 and shrinking by orders of magnitude."""
    measure = Sphere.create(dim=dim)
    axis = torch.eye(dim)[0]
    side = torch.eye(dim)[1]
    eta_p = kappa * axis
    steps = [step * way for step in (1e-6, 1e-3, 0.3, 3.0) for way in (axis, side, (axis - side) / 2)]
    steps += [(factor - 1) * kappa * axis for factor in (1e-3, 0.4, 1.6, 50.0, -1.0)]
    with mpmath.workdps(60):

        def value(eta: Tensor) -> tuple[Any, Any]:
            """A(eta), R/κ."""
            square = sum((mpmath.mpf(x) ** 2 for x in eta.tolist()), mpmath.mpf(0))
            order = mpmath.mpf(dim) / 2
            low, high = (mpmath.hyp0f1(order + i, square / 4, maxterms=10**6) for i in (0, 1))
            return mpmath.log(low), high / low / dim

        others = eta_p + torch.stack(steps)
        result = measure.kl(eta_p.expand_as(others), others)
        start, chord = value(eta_p)
        for eta_q, divergence in zip(others, result.tolist(), strict=True):
            pairs = zip(eta_p.tolist(), eta_q.tolist(), strict=True)
            slope = sum(mpmath.mpf(p) * (mpmath.mpf(q) - mpmath.mpf(p)) for p, q in pairs)
            expected = float(value(eta_q)[0] - start - chord * slope)
            assert divergence == pytest.approx(expected, rel=1e-5, abs=1e-44), eta_q


@every_row("dim", [2, 3, 8, 300])
def test_natural_undoes_the_mean(dim):
    measure = Sphere.create(torch.tensor(2.5, dtype=torch.float64), dim=dim)
    kappa = torch.tensor([0.0, 1e-9, 1e-3, 0.1, 1.0, 3.0, 10.0, 100.0, 1e4, 1e6, 1e9], dtype=torch.float64)
    eta = kappa[:, None] / 2.5 * direction(dim)
    # A rounding of the mean's length moves κ by κ/(κR') ≈ 2κ/(d−1) roundings.
    tolerance = (2e-15 + 4e-15 * kappa / (dim - 1)) * (kappa + 1e-300)
    assert ((measure._natural(measure.mean(eta)) - eta).norm(dim=-1) <= tolerance).all()


@pytest.mark.medium
@given(st.floats(-12, 0), st.sampled_from([2, 3, 8, 64, 4096]), st.sampled_from([torch.float32, torch.float64]))
def test_the_mean_undoes_natural(exponent, dim, dtype):
    measure = Sphere.create(dim=dim)
    eps = torch.finfo(dtype).eps
    lengths = torch.tensor([10.0**exponent, 1 - 10.0**exponent], dtype=torch.float64)
    mu = (lengths[:, None] * direction(dim)).to(dtype)
    mu = mu[mu.double().norm(dim=-1) < 1 - 4 * torch.finfo(torch.float64).eps]
    # Both ways: a norm, a ratio or its inverse, and a scaled direction, of two roundings each.
    torch.testing.assert_close(measure.mean(measure._natural(mu)), mu, rtol=12 * eps, atol=0)


def test_natural_on_the_boundary_and_beyond():
    measure = Sphere.create(torch.tensor([2.0, 0.5]), dim=3)
    mu = torch.tensor([[[0.0, 0.0, 2.0], [-1.2, 0.0, 1.6], [2.1, 0.0, 0.0], [0.0, 0.0, 0.0]]]).repeat(2, 1, 1)
    mu[1] /= 4
    inf = math.inf
    nan = math.nan
    expected = torch.tensor([[0.0, 0.0, inf], [-inf, 0.0, inf], [nan, nan, nan], [0.0, 0.0, 0.0]]).expand(2, 4, 3)
    torch.testing.assert_close(measure._natural(mu), expected, equal_nan=True)


@pytest.mark.medium
def test_natural_has_two_derivatives():
    measure = Sphere.create(torch.tensor(1.5, dtype=torch.float64), dim=3)
    mu = torch.tensor([[0.0, 0.0, 0.0], [0.5, 0.1, -0.3], [1.1, -0.2, 0.9]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(measure._natural, (mu,), fast_mode=True)
    assert torch.autograd.gradgradcheck(measure._natural, (mu,), fast_mode=True)
    fisher = measure.fisher(measure._natural(mu.detach()))
    jacobian = torch.func.vmap(torch.func.jacrev(measure._natural))(mu.detach())
    torch.testing.assert_close(jacobian @ fisher, torch.eye(3, dtype=torch.float64).expand(3, 3, 3))


@every_row("dim", [2, 3, 10])
def test_density_of_the_tilted_sphere(dim):
    kappa = 3.0
    axis = direction(dim)
    draws = Sphere.create(dim=dim).sample(kappa * axis, (50,), generator=generator())
    expected = stats.vonmises_fisher(axis.numpy(), kappa).logpdf(draws.numpy())
    assert Sphere.create(dim=dim).log_prob(kappa * axis, draws).numpy() == pytest.approx(expected, rel=1e-12)
    # Scaling the sphere by r divides the density by r^(d−1).
    shrunk = Sphere.create(0.25, dim=dim).log_prob(4 * kappa * axis, draws / 4)
    assert shrunk.numpy() == pytest.approx(expected + (dim - 1) * math.log(4), rel=1e-12)
    assert (Sphere.create(dim=dim).log_prob(kappa * axis, draws * (1 + 1e-12)) == -math.inf).all()


def test_support():
    measure = Sphere.create(torch.tensor([1.0, 3.0], dtype=torch.float64), dim=2)
    vector = torch.tensor([[3.0, -4.0], [0.0, 0.0]], dtype=torch.float64).expand(2, 2, 2)
    torch.testing.assert_close(
        measure._support(vector), torch.tensor([[5.0, 0.0], [15.0, 0.0]], dtype=torch.float64), rtol=1e-15, atol=0
    )
    assert measure._reference == "surface"


@pytest.mark.medium
@every_row(
    ("dim", "kappa"),
    [(2, 0.0), (3, 1e-6), (5, 0.5), (2, 5.0), (3, 5.0), (64, 5.0), (5, 200.0), (64, 200.0), (2, 1e5), (64, 1e12)],
)
def test_samples_have_the_right_moments(dim, kappa):
    count = 10_000
    radius = 1.7
    axis = direction(dim, seed=3)
    draws = Sphere.create(radius, dim=dim).sample(kappa / radius * axis, (count,), generator=generator(1))
    assert draws.dtype == torch.float64
    torch.testing.assert_close(
        draws.norm(dim=-1), torch.tensor(1.7).double().expand(count).float().double(), rtol=1e-7, atol=0
    )
    points = draws / draws.norm(dim=-1, keepdim=True)
    # 1 − x·axis = ‖x − axis‖²/2 keeps its digits; its mean is 1 − R and its variance R'.
    drop = (points - axis).square().sum(-1) / 2
    if kappa > 1e4:  # κ(1 − x·axis) is a Gamma variate of shape (d−1)/2, but for terms of order d/κ
        mean = (dim - 1) / (2 * kappa)
        variance = (dim - 1) / (2 * kappa**2)
        fourth = 3 * variance**2 + 6 * (dim - 1) / (2 * kappa**4)
    else:
        nodes, weights = gauss_legendre()
        theta = (nodes + 1) * math.pi / 2
        log_weight = kappa * (np.cos(theta) - 1) + (dim - 2) * np.log(np.sin(theta)) + np.log(weights)
        weight = np.exp(log_weight - log_weight.max())
        weight /= weight.sum()
        mean = (weight * (1 - np.cos(theta))).sum()
        variance = (weight * (1 - np.cos(theta) - mean) ** 2).sum()
        fourth = (weight * (1 - np.cos(theta) - mean) ** 4).sum()
    assert drop.mean().item() == pytest.approx(mean, abs=5 * math.sqrt(variance / count) + 1e-4 * mean * (kappa > 1e4))
    error = 5 * math.sqrt((fourth - variance**2) / count)
    assert drop.var().item() == pytest.approx(variance, abs=error + 1e-3 * variance * (kappa > 1e4))
    # Uniform around the axis: no mean across it, and the same second moment in every direction.
    across = points - (points @ axis)[:, None] * axis
    second = across.square().sum(-1).mean().item()
    assert across.mean(0).norm().item() < 5 * math.sqrt(second / count)
    if dim > 2:
        covariance = across.T @ across / count / second * (dim - 1)
        ideal = torch.eye(dim, dtype=torch.float64) - torch.outer(axis, axis)
        assert (covariance - ideal).abs().max().item() < 6 * math.sqrt(3 * (dim + 1) / (dim - 1) / count) + 1e-9


@every_row("dim", [2, 3, 6])
def test_samples_without_tilt_are_uniform(dim):
    """The square of a coordinate of a uniform point is Beta(1/2, (d−1)/2)."""
    draws = Sphere.create(dim=dim).sample(torch.zeros(dim, dtype=torch.float64), (20_000,), generator=generator(5))
    for coordinate in draws.unbind(-1):
        assert stats.kstest(coordinate.square().numpy(), stats.beta(0.5, (dim - 1) / 2).cdf).pvalue > 1e-6
        assert abs(coordinate.sign().mean().item()) < 5 / math.sqrt(20_000)


def test_sampling_repeats_with_the_generator_and_handles_batches():
    measure = Sphere.create(torch.tensor([1.0, 2.0]), dim=3)
    eta = torch.tensor([0.0, 1e-30, 3.0, 1e30])[:, None] * torch.ones(2, 4, 3)
    draws = [measure.sample(eta, (7, 2), generator=generator(2)) for _ in range(2)]
    assert draws[0].shape == (7, 2, 2, 4, 3) and draws[0].dtype == torch.float32
    assert torch.equal(draws[0], draws[1])
    torch.testing.assert_close(draws[0].norm(dim=-1), measure.radius[:, None].expand(7, 2, 2, 4))
    assert measure.log_prob(eta, draws[0]).isfinite().all()


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"at least 2, got 1.*Spin"):
        Sphere.create(dim=1)
    with pytest.raises(ValueError, match="at least 2, got 0"):
        Sphere.create(dim=0)
    with pytest.raises(TypeError, match=r"dim must be a whole number, got 2\.0"):
        Sphere.create(dim=2.0)  # pyright: ignore[reportArgumentType]
    for radius in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="positive and finite"):
            Sphere.create(radius, dim=3)
    with pytest.raises(TypeError, match="radius must be real"):
        Sphere.create(torch.tensor([1j, 2]), dim=3)
    with pytest.raises(ValueError, match="eta of shape"):
        Sphere.create(dim=3).log_partition(torch.zeros(2))
