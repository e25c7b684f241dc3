"""Softmax attention on the sphere against mpmath, quadrature, regular grids of the circle and simulation."""

import math
from typing import Any

import mpmath
import pytest
import torch
from scipy import optimize, special
from tests.support.rows import every_row, some_slow
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close as close

from massieu import ops
from massieu.ops.bessel import bessel_ratios
from massieu.papers.theory import (
    asymptotic_scale,
    deconvolution,
    harmonic_count,
    optimal_scale,
    ridge_multipliers,
    smoothing_error,
    smoothing_floor,
    sphere_multipliers,
    spherical_kernel,
    zonal_harmonics,
)


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def circle(count: int) -> tuple[Tensor, Tensor]:
    """Angles and points of a regular grid: averages over it are exact for frequencies below `count`."""
    angle = 2 * math.pi * torch.arange(count, dtype=torch.float64) / count
    return angle, torch.stack([angle.cos(), angle.sin()], -1)


def exact(dimension: int, scale: float, degree: int) -> Any:
    """(κ/2)ⁿ Γ(d/2)/Γ(d/2+n) times a ratio of ₀F₁, or of I itself where their series is long."""
    order, kappa = mpmath.mpf(dimension) / 2 - 1, mpmath.mpf(scale)
    if scale > 50 + dimension + degree:
        up, down = (mpmath.besseli(order + n, kappa, maxterms=10**6) for n in (degree, 0))
        return up / down
    up, down = (mpmath.hyp0f1(order + 1 + n, kappa**2 / 4) for n in (degree, 0))
    return (kappa / 2) ** degree * mpmath.gammaprod([order + 1], [order + 1 + degree]) * up / down


@every_row("dimension", [2, 3, 4, 64, 512, 4096])
def test_multipliers_are_ratios_of_bessel_functions(dimension):
    with mpmath.workdps(60):
        for scale in (1.0, 4e3) if dimension > 512 else (1e-6, 0.03, 1.0, 7.0, 40.0, 300.0, 4e4, 1e6):
            result = sphere_multipliers(60, dimension, scale)
            for degree in (0, 1, 7, 60):
                expected = exact(dimension, scale, degree)
                if expected < 1e-300:
                    assert result[degree] < 1e-299
                else:
                    error = abs(mpmath.mpf(result[degree].item()) / expected - 1)
                    assert error < 1e-14 * (degree + 1), (scale, degree)


def test_ratios_of_one_recurrence_are_those_of_each_dimension():
    concentration = double(0.0, 1e-3, 2.0, 50.0, 1e5)
    result = bessel_ratios(concentration, 5, 40)
    for j in (0, 1, 17, 39):
        close(result[:, j], bessel_ratios(concentration, 5 + 2 * j, 1)[:, 0], rtol=1e-14, atol=0)
    with pytest.raises(ValueError, match="count must be a whole number, at least 1"):
        bessel_ratios(concentration, 5, 0)


@every_row("dimension", [2, 3, 4, 9])
def test_funk_hecke_by_quadrature(dimension):
    # Averages over the sphere of functions of t have the density (1 − t²)^{(d−3)/2}.
    nodes, weights = (torch.from_numpy(x) for x in special.roots_jacobi(160, (dimension - 3) / 2, (dimension - 3) / 2))
    weights = weights / weights.sum()
    harmonics = zonal_harmonics(nodes, 6, dimension)
    tilted = weights * torch.exp(5.0 * (nodes - 1))
    close(sphere_multipliers(6, dimension, 5.0), tilted @ harmonics / tilted.sum(), rtol=0, atol=1e-13)
    gram = (weights[:, None] * harmonics).mT @ harmonics
    close(gram, torch.diag(double(*(1 / harmonic_count(n, dimension) for n in range(7)))), rtol=0, atol=1e-12)


def test_harmonics_are_gegenbauers_chebyshevs_and_counted():
    cosine = torch.linspace(-1, 1, 21, dtype=torch.float64)
    for dimension in (3, 4, 11):
        result = zonal_harmonics(cosine, 8, dimension)
        for n in range(9):
            expected = special.eval_gegenbauer(n, dimension / 2 - 1, cosine.numpy())
            expected = torch.from_numpy(expected / special.eval_gegenbauer(n, dimension / 2 - 1, 1.0))
            close(result[:, n], expected, rtol=0, atol=1e-13)
    close(zonal_harmonics(cosine, 8, 2)[:, 8], torch.from_numpy(special.eval_chebyt(8, cosine.numpy())))
    assert zonal_harmonics(cosine, 0, 3).shape == (21, 1)
    assert [harmonic_count(n, 2) for n in range(4)] == [1, 2, 2, 2]
    assert [harmonic_count(n, 3) for n in range(4)] == [1, 3, 5, 7]
    assert [harmonic_count(n, 4) for n in range(4)] == [1, 4, 9, 16]


@every_row("dimension", [2, 3, 7])
def test_softmaxs_weight_is_the_kernel_of_its_multipliers(dimension):
    cosine, scale = torch.linspace(-1, 1, 33, dtype=torch.float64), 3.0
    half = dimension / 2
    mass = special.gamma(half) * (2 / scale) ** (half - 1) * special.iv(half - 1, scale)
    result = spherical_kernel(cosine, sphere_multipliers(40, dimension, scale), dimension)
    close(result, torch.exp(scale * cosine) / mass, rtol=1e-12, atol=0)


def test_the_limit_the_ridge_and_the_deconvolution_on_a_grid_of_the_circle():
    angle, keys = circle(128)
    parts = torch.stack([0.3 + 0 * angle, angle.cos(), (2 * angle + 1).sin(), 0 * angle, 0.5 * (4 * angle).cos()], -1)
    value, scale = parts.sum(-1, keepdim=True), 3.0
    result = ops.attention(keys[None, None], keys[None, None], value[None, None], scale=scale).output.reshape(-1)
    close((sphere_multipliers(4, 2, scale) * parts).sum(-1), result, rtol=0, atol=1e-13)
    limit = sphere_multipliers(4, 2, scale)
    close((limit * deconvolution(limit, 4))[:5], torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-15)

    ridge, gram = 0.02, torch.exp(scale * keys @ keys.T)
    regression = gram @ torch.linalg.solve(gram + 128 * ridge * torch.eye(128, dtype=torch.float64), value)
    close((ridge_multipliers(4, 2, scale, ridge) * parts).sum(-1), regression[:, 0], rtol=0, atol=1e-12)
    assert ridge_multipliers(2, 3, 2000.0, ridge).tolist() == [1, 1, 1]  # Λ is no float64 there
    assert ridge_multipliers(2, 3, 0.0, 1.0).tolist() == [0.5, 0, 0]

    spectrum = limit * deconvolution(limit, 2)
    deconvolved = spherical_kernel(keys @ keys.T, spectrum, 2) @ value[:, 0] / 128
    close(deconvolved, parts[:, :3].sum(-1), rtol=0, atol=1e-12)
    assert deconvolution(limit, 2)[3:].tolist() == [0, 0]


def test_trap_19_the_operators_ridge_is_the_gram_matrixs_over_the_number_of_keys():
    """Z4: the same Gram ridge on twice the keys is another estimator, the same operator ridge is not."""
    scale, ridge, value_of = 2.0, 3.0, torch.cos
    result = {}
    for count in (64, 128):
        angle, keys = circle(count)
        gram = torch.exp(scale * keys @ keys.T)
        for name, own in (("gram", ridge), ("operator", count * ridge / 64)):
            system = gram + own * torch.eye(count, dtype=torch.float64)
            result[name, count] = (gram @ torch.linalg.solve(system, value_of(angle)))[0]
    close(result["operator", 64], result["operator", 128], rtol=1e-12, atol=0)
    close(result["operator", 64], ridge_multipliers(1, 2, scale, ridge / 64)[1], rtol=1e-12, atol=0)
    assert (1 - result["gram", 128]) < 0.6 * (1 - result["gram", 64])


def test_trap_20_no_constant_relates_softmax_to_the_conditional_mean():
    """Z7: the factor that is right for one degree is wrong for the next, and for their sum no factor is right."""
    first, second = (smoothing_floor(double(*power), 4, 2.0) for power in ((0, 1, 0), (0, 0, 1)))
    assert first.factor_error < 1e-15
    assert second.factor_error < 1e-15
    assert second.factor > 3 * first.factor
    power = double(0, 0.25, 4 / 24)  # of q₁ + 2 q₁q₂ for d = 4
    both = smoothing_floor(power, 4, 2.0)
    assert both.factor_error / power.sum().sqrt() > 0.4
    # By averages over the sphere itself.
    normal = torch.randn(200_000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    query = normal / normal.norm(dim=-1, keepdim=True)
    f = query[:, 0] + 2 * query[:, 0] * query[:, 1]
    rho = sphere_multipliers(2, 4, 2.0)
    output = rho[1] * query[:, 0] + 2 * rho[2] * query[:, 0] * query[:, 1]
    assert ((f - output).square().mean().sqrt() - both.error).abs() < 5e-3
    factor = (f @ output) / (output @ output)
    assert (factor - both.factor).abs() < 0.03
    assert smoothing_floor(power, 4, 1e9).error < 1e-7


def simulated_sampling(keys: int, scale: float, noise: float, repetitions: int) -> tuple[float, float]:
    """Mean squared error less the limit's own, with its standard error: f = P₁ + P₂ of one axis, d = 3, fresh queries."""
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(repetitions, keys + 1, 3, dtype=torch.float64, generator=generator)
    points = normal / normal.norm(dim=-1, keepdim=True)
    parts = zonal_harmonics(points[..., 0], 2, 3) * double(0, 1, 1)
    f = parts.sum(-1, keepdim=True)
    value = f[:, 1:] + noise * torch.randn(repetitions, keys, 1, dtype=torch.float64, generator=generator)
    shape = (repetitions, 1)
    query, key = points[:, :1].unflatten(0, shape), points[:, 1:].unflatten(0, shape)
    output = ops.attention(query, key, value.unflatten(0, shape), scale=scale).output
    limit = (sphere_multipliers(2, 3, scale) * parts[:, 0]).sum(-1)
    error, floor = ((x - f[:, 0, 0]).square() for x in (output.reshape(-1), limit))
    return (error - floor).mean().item(), ((error - floor).std() / math.sqrt(repetitions)).item()


@pytest.mark.slow
def test_what_finitely_many_keys_add_is_what_simulations_add():
    power = double(0, 1 / 3, 1 / 5)
    for keys, scale, repetitions in ((200, 4.0, 11_000),):
        mean, error = simulated_sampling(keys, scale, 0.4, repetitions)
        result = float(smoothing_error(keys, power, 0.16, 3, scale).sampling)
        remainder = 5 * scale / keys  # the next order is smaller by E w²/L, about β/L for d = 3
        assert abs(mean / result - 1) < 5 * error / result + remainder
        assert 5 * error / result + remainder < 0.5


@every_row("scale", [0.3, 1.5, 4.0])
@every_row("noise", [0.0, 0.3])
def test_the_error_of_finitely_many_keys_on_the_circle_to_its_last_digit(scale, noise):
    """L·sampling = E_q[E w²(v − m)² − 2(m − f)·E w²(v − m)] by sums over a grid, which are exact for these functions:
    variance, and the product of the bias of infinitely many keys with that of finitely many."""
    angle, _ = circle(512)
    f = 0.7 * angle.cos() - 0.4 * (2 * angle + 0.3).cos() + 0.5 * (5 * angle - 1.0).cos() + 0.2
    weight = (scale * (angle[:, None] - angle).cos()).exp()
    weight = weight / weight.mean(-1, keepdim=True)
    m = (weight * f).mean(-1)
    variance = (weight.square() * ((f - m[:, None]).square() + noise)).mean(-1)
    bias = -(weight.square() * (f - m[:, None])).mean(-1)
    power = double(0.2**2, 0.7**2 / 2, 0.4**2 / 2, 0, 0, 0.5**2 / 2)
    result = smoothing_error(50, power, noise, 2, scale)
    assert float(result.sampling) * 50 == pytest.approx((variance + 2 * (m - f) * bias).mean().item(), rel=1e-11)
    assert float(result.smoothing) == pytest.approx((m - f).square().mean().item(), rel=1e-11)


@pytest.mark.medium
@some_slow(("keys", "dimension", "noise"), [(64, 2, 0.25), (10**5, 3, 0.1), (64, 8, 1.0)], 1)
def test_the_optimal_scale_is_the_minimum(keys, dimension, noise):
    power = double(0.5, 0.3, 0.0, 0.1)
    result = optimal_scale(keys, power, noise, dimension).item()
    expected = optimize.minimize_scalar(
        lambda log_scale: smoothing_error(keys, power, noise, dimension, math.exp(log_scale)).total.item(),
        bracket=(math.log(result) - 1, math.log(result), math.log(result) + 1),
        options={"xtol": 1e-9},
    )
    assert abs(math.log(result) - expected.x) < 2e-5


def test_optimal_scales_of_several_powers_are_those_of_each():
    powers = torch.stack([double(0.5, 0.3, 0.0, 0.1), double(0.2, 0.0, 0.6, 0.0)])
    result = optimal_scale(64, powers[:, None], 0.25, 2)
    alone = [optimal_scale(64, power, 0.25, 2).item() for power in powers]
    assert result.shape == (2, 1) and result.flatten().tolist() == pytest.approx(alone, rel=1e-9)


def test_the_optimal_scale_grows_as_theory_says():
    power = double(0, 0.3, 0.2)
    many = double(1e9, 1e10)
    for dimension in (2, 3, 4):
        result = optimal_scale(many, power, 0.3, dimension)
        close(result, asymptotic_scale(many, power, 0.3, dimension), rtol=0.05, atol=0)
        slope = (result[1] / result[0]).log10().item()
        assert abs(slope - 2 / (dimension + 3)) < 0.005
    # With next to no noise the scale stops where one key is left: Λ(β)² = Λ(2β)·L^{-1}, for d = 3 β coth β = L.
    edge = optimal_scale(100, power, 1e-9, 3).item()
    assert edge / math.tanh(edge) == pytest.approx(100, rel=1e-4)


def test_both_limits_of_the_spectrum():
    degree = torch.arange(5, dtype=torch.float64)
    large = sphere_multipliers(4, 6, 1e6)
    close((1 - large) * 1e6, degree * (degree + 4) / 2, rtol=1e-4, atol=1e-4)
    small = sphere_multipliers(4, 6, 1e-4)
    leading = (0.5e-4) ** degree * special.gamma(3) / torch.from_numpy(special.gamma(3 + degree.numpy()))
    close(small, leading, rtol=1e-8, atol=0)


@every_row("scale", [0.0, 0.4, 9.0])
def test_derivatives_in_the_scale(scale):
    point = double(scale).requires_grad_()

    def function(x: Tensor) -> Tensor:
        # An even or odd function of β goes on below 0, where differences step.
        return torch.where(x < 0, parity, 1) * sphere_multipliers(5, 3, x.abs() if scale == 0 else x)

    parity = double(1, -1, 1, -1, 1, -1)
    if scale:
        assert gradcheck(function, point, fast_mode=True)
        assert gradgradcheck(function, point, fast_mode=True)
    else:
        (first,) = torch.autograd.grad(sphere_multipliers(5, 3, point)[0, 1], point, create_graph=True)
        close(first.detach(), double(1 / 3), rtol=1e-14, atol=0)
        second = torch.func.hessian(lambda x: sphere_multipliers(5, 3, x)[2])(torch.zeros((), dtype=torch.float64))
        close(second, torch.tensor(2 / 15, dtype=torch.float64), rtol=1e-14, atol=0)


@pytest.mark.slow
def test_transforms_and_compilation():
    scales = double(0.0, 0.3, 5.0)
    result = sphere_multipliers(3, 3, scales)
    close(torch.func.vmap(lambda s: sphere_multipliers(3, 3, s))(scales), result, rtol=0, atol=1e-15)
    compiled = torch.compile(lambda s: sphere_multipliers(3, 3, s), fullgraph=True, backend="aot_eager")
    close(compiled(scales), result, rtol=0, atol=1e-15)


@every_row(
    ("call", "message"),
    [
        (lambda: sphere_multipliers(-1, 3, 1.0), "degree must be a whole number, at least 0"),
        (lambda: sphere_multipliers(2, 1, 1.0), "dimension must be a whole number, at least 2"),
        (lambda: sphere_multipliers(2, 3, -1.0), "scale must be finite and at least 0"),
        (lambda: sphere_multipliers(2, 3, math.nan), "scale must be finite"),
        (lambda: ridge_multipliers(2, 3, 1.0, 0.0), "operator_ridge must be positive"),
        (lambda: deconvolution(torch.ones(3), 3), "cut_off must be a whole number, at least 0 and at most 2"),
        (lambda: spherical_kernel(torch.ones(3), torch.ones(2, 2), 3), "spectrum must have shape"),
        (lambda: smoothing_floor(double(-1.0), 3, 1.0), "power must be finite and at least 0"),
        (lambda: smoothing_floor(torch.tensor(1.0), 3, 1.0), "power must have shape"),
        (lambda: smoothing_error(10, double(1.0), -1.0, 3, 1.0), "noise_variance must be finite"),
        (lambda: optimal_scale(10, double(1.0), 0.0, 3), "noise_variance must be positive"),
        (lambda: asymptotic_scale(10, double(1.0), 0.0, 3), "noise_variance must be positive"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_where_the_output_is_zero_no_factor_helps():
    """At β = 0 nothing of degree 1 is left; at β = 1e-200 its square is below floating point, and its factor is not."""
    power = torch.tensor([0.0, 4.0])
    floor = smoothing_floor(power, 3, 0.0)
    assert (floor.error.item(), floor.factor.item(), floor.factor_error.item()) == (2.0, 0.0, 2.0)
    tiny = smoothing_floor(power, 3, 1e-200)
    assert tiny.factor.item() == pytest.approx(3e200, rel=1e-12) and tiny.factor_error.item() < 1e-12
    with pytest.raises(ValueError, match="multipliers up to degree 1 must be positive and finite, got 0"):
        deconvolution(sphere_multipliers(2, 3, 0.0), 1)
