"""Derivatives of the KL divergence where one of them is tiny beside the other: beside closed forms in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rows import every_row

from massieu.measures import Bernoulli, Measure, Poisson, Spin, product

LOGITS = st.floats(-40, 40, width=32)
DTYPES = [torch.float32, torch.float64]


def gradients(measure: Measure, first: torch.Tensor, second: torch.Tensor) -> tuple[float, float]:
    """In the first coordinate of either parameter."""
    first = first.clone().requires_grad_()
    second = second.clone().requires_grad_()
    found = torch.autograd.grad(measure.kl(first, second), (first, second))
    return found[0][0].item(), found[1][0].item()


def of_bits(p: float, q: float) -> tuple[float, float]:
    """KL(p ‖ q) of logits: −(q − p)·σ′(p) in p, and σ(q) − σ(p) in q, as a product that does not cancel."""
    variance = 0.25 / np.cosh(0.5 * p) ** 2
    return (p - q) * variance, np.sinh(0.5 * (q - p)) / (2 * np.cosh(0.5 * p) * np.cosh(0.5 * q))


def close(found: tuple[float, float], wanted: tuple[float, float], dtype: torch.dtype) -> None:
    """To some dozens of roundings, each relative to the number itself."""
    np.testing.assert_allclose(found, wanted, rtol=64 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@given(p=LOGITS, q=LOGITS)
def test_bits_and_spins(dtype: torch.dtype, p: float, q: float):
    first, second = torch.tensor([p], dtype=dtype), torch.tensor([q], dtype=dtype)
    wanted = of_bits(p, q)
    close(gradients(Bernoulli(torch.zeros(1, dtype=dtype)), first, second), wanted, dtype)
    # Spins of half the logits as fields.
    halved = gradients(Spin(torch.zeros(1, dtype=dtype)), 0.5 * first, 0.5 * second)
    close(halved, (2 * wanted[0], 2 * wanted[1]), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@given(p=st.floats(-20, 20, width=32), q=st.floats(-20, 20, width=32))
def test_counts(dtype: torch.dtype, p: float, q: float):
    """KL of Poisson laws of means eᵖ and e^q: (p − q)·eᵖ in p, and e^q − eᵖ in q."""
    found = gradients(
        Poisson(torch.ones(1, dtype=dtype)), torch.tensor([p], dtype=dtype), torch.tensor([q], dtype=dtype)
    )
    close(found, ((p - q) * np.exp(p), np.exp(p) * np.expm1(q - p)), dtype)


@every_row("p, q", [(30.0, 0.0), (-30.0, -10.0), (30.0, -30.0), (5.0, 5.0), (-40.0, 40.0)])
def test_through_products_and_the_measure_s_own_logit(p: float, q: float):
    bits = Bernoulli(torch.zeros(1))
    both = product(bits, bits)
    first, second = torch.tensor([p, 1.0]), torch.tensor([q, 1.0])
    close(gradients(both, first, second), of_bits(p, q), torch.float32)
    logit = torch.tensor([p], requires_grad=True)
    # A common field moves both laws: the derivatives add up.
    (found,) = torch.autograd.grad(Bernoulli(logit).kl(torch.zeros(1), torch.tensor([q - p])), logit)
    wanted = of_bits(p, q)
    assert abs(found.item() - sum(wanted)) <= 64 * torch.finfo(torch.float32).eps * max(map(abs, wanted))


def test_what_was_wrong():
    found, _ = gradients(Bernoulli(torch.zeros(1)), torch.tensor([30.0]), torch.tensor([0.0]))
    assert found == pytest.approx(30 * np.exp(-30.0), rel=1e-5)
