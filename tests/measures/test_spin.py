"""Spin: log cosh and its derivatives from 0 to the largest finite number."""

import math

import mpmath
import pytest
import torch
from tests.support.rows import every_row

from massieu.measures import Spin

LARGEST = {torch.float32: torch.finfo(torch.float32).max, torch.float64: torch.finfo(torch.float64).max}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_cosh_and_two_derivatives_are_finite_and_right_everywhere(dtype):
    largest = LARGEST[dtype]
    values = [0.0, 1e-30, 1e-4, 1.0, 15.0, 100.0, 1e4, largest / 2, largest]
    eta = torch.tensor([sign * value for value in values for sign in (1, -1)], dtype=dtype).requires_grad_()
    measure = Spin.create(torch.zeros(1, dtype=dtype))
    log_cosh = measure.log_partition(eta[:, None])
    (first,) = torch.autograd.grad(log_cosh.sum(), eta, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), eta)
    eps = torch.finfo(dtype).eps
    for i, value in enumerate(eta.tolist()):
        exact = (
            math.log(math.cosh(value))
            if abs(value) < 1
            else abs(value) - math.log(2) + math.log1p(math.exp(-2 * abs(value)))
        )
        assert log_cosh[i].item() == pytest.approx(exact, rel=4 * eps, abs=4 * eps)
        assert first[i].item() == pytest.approx(math.tanh(value), abs=4 * eps)
        assert second[i].item() == pytest.approx(1 - math.tanh(value) ** 2, abs=8 * eps)
    closed = measure.mean(eta[:, None]).detach()[:, 0], measure.fisher(eta[:, None]).detach()[:, 0, 0]
    torch.testing.assert_close(closed[0], torch.tanh(eta.detach()))
    torch.testing.assert_close(closed[1], second, atol=8 * eps, rtol=0)
    assert all(number.isfinite().all() for number in (log_cosh, first, second, *closed))


@every_row("field", [0.0, 1e-3, -0.7, 20.0, -60.0])
@every_row("eta", [0.0, 1e-3, 1.5, -40.0, 100.0])
def test_field_against_mpmath(field, eta):
    mpmath.mp.dps = 60
    exact = mpmath.log(mpmath.cosh(mpmath.mpf(eta) + field)) - mpmath.log(mpmath.cosh(mpmath.mpf(field)))
    tensors = [torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in (field, eta)]
    value = Spin(tensors[0]).log_partition(tensors[1])
    assert value.item() == pytest.approx(float(exact), rel=1e-14, abs=4e-16)
    slope = torch.autograd.grad(value, tensors)
    assert slope[0].item() == pytest.approx(math.tanh(field + eta) - math.tanh(field), abs=1e-15)
    assert slope[1].item() == pytest.approx(math.tanh(field + eta), abs=1e-15)


@every_row("distance", [1e-6, 1e-3, 1.0, 50.0])
@every_row("eta", [0.0, 0.5, -3.0, 15.0, 40.0])
def test_kl_keeps_its_digits_in_float32(eta, distance):
    mpmath.mp.dps = 80
    for sign in (1, -1):
        p = torch.tensor([eta])
        q = p + sign * distance
        a = mpmath.mpf(p.item())
        b = mpmath.mpf(q.item())
        exact = mpmath.log(mpmath.cosh(b)) - mpmath.log(mpmath.cosh(a)) - mpmath.tanh(a) * (b - a)
        assert Spin.create(dim=1).kl(p, q).item() == pytest.approx(float(exact), rel=1e-5, abs=1e-44)


def test_samples_are_signs():
    draws = Spin.create(torch.tensor([0.5, -30.0])).sample(torch.zeros(2), (1000,))
    assert set(draws.unique().tolist()) == {-1.0, 1.0}
    assert (draws[:, 1] == -1).all()


def test_bad_fields_are_refused():
    for field, message in (
        (torch.zeros(2, 0), r"\(\*batch, d\)"),
        (torch.tensor([math.nan]), "finite"),
    ):
        with pytest.raises(ValueError, match=message):
            Spin.create(field)
    with pytest.raises(ValueError, match="dim must be a whole number, at least 1, got 0"):
        Spin.create(dim=0)
    with pytest.raises(TypeError, match="field must be real"):
        Spin.create(torch.zeros(2, dtype=torch.complex64))


@every_row(("start", "end"), [(1.0, 15.0), (-3.0, 12.0), (0.0, 11.0), (0.0, 200.0)])
def test_divergence_of_far_fields_keeps_its_digits(start, end):
    """Where 2·field is between 20 and 40, e^(−2·field) still counts."""
    with mpmath.workdps(40):
        a = mpmath.mpf(start)
        b = mpmath.mpf(end)
        expected = float(mpmath.log(mpmath.cosh(b) / mpmath.cosh(a)) - mpmath.tanh(a) * (b - a))
    spin = Spin.create(torch.zeros(1, dtype=torch.float64))
    result = spin.kl(torch.tensor([start], dtype=torch.float64), torch.tensor([end], dtype=torch.float64))
    assert float(result) == pytest.approx(expected, rel=1e-14)
