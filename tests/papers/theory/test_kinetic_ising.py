"""Kinetic spins of ±1 against enumeration and the textbook's equation (B16)."""

import itertools
import math

import numpy as np
import pytest
import torch

from massieu.papers.theory import KineticIsing


def mean_after_step(model, means):
    """E tanh(x + Jσ) over independent σ of these means."""
    total = torch.zeros_like(model.drive)
    for signs in itertools.product((-1.0, 1.0), repeat=len(means)):
        sigma = torch.tensor(signs).double()
        total = total + (0.5 * (1 + sigma * means)).prod() * torch.tanh(model.drive + model.coupling @ sigma)
    return total


def test_one_step_of_binary_spins_by_enumeration():
    generator = torch.Generator().manual_seed(0)
    drive = 0.5 * torch.randn(8, generator=generator, dtype=torch.float64)
    drawn = torch.randn(8, 8, generator=generator, dtype=torch.float64) / math.sqrt(8)
    errors = {"first": [], "second": []}
    for strength in (0.1, 0.05, 0.025):
        model = KineticIsing.create(drive, strength * drawn)
        expected = mean_after_step(model, torch.tanh(drive))
        for order, differences in errors.items():
            differences.append((model.mean(model.step(drive, order)) - expected).abs().max().item())
    slopes = {order: np.diff(np.log2(differences)) for order, differences in errors.items()}
    assert np.all(np.abs(slopes["first"] + 2) < 0.3)
    assert np.all(slopes["second"] < -2.7)


def test_the_binary_echo_is_the_textbooks():
    generator = torch.Generator().manual_seed(0)
    drive, drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 6), (5, 6, 6)))
    model = KineticIsing.create(drive, 0.4 * drawn)
    m = model.mean(model.stationary("second").value)
    reaction = m * (model.coupling.square() @ (1 - m.square()).unsqueeze(-1)).squeeze(-1)
    expected = torch.tanh(drive + (model.coupling @ m.unsqueeze(-1)).squeeze(-1) - reaction)
    torch.testing.assert_close(m, expected, rtol=0, atol=1e-9)


def test_a_step_contracts_by_its_constant():
    generator = torch.Generator().manual_seed(0)
    model = KineticIsing.create(torch.zeros(30, 4).double(), torch.randn(30, 4, 4, generator=generator).double())
    first, second = torch.randn(2, 30, 4, generator=generator).double()
    after = (model.step(first) - model.step(second)).abs().amax(-1)
    assert bool((after <= model.lipschitz * (first - second).abs().amax(-1)).all())
    # Near 0 and for couplings of equal signs the constant is attained.
    tiny = torch.full((30, 4), 1e-6).double()
    attained = KineticIsing.create(model.drive, model.coupling.abs())
    moved = (attained.step(tiny) - attained.step(0 * tiny)).abs().amax(-1)
    torch.testing.assert_close(moved, attained.lipschitz * 1e-6, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("drive", "message"),
    [
        (torch.tensor(1.0), r"shape \(\*batch, N\)"),
        ("x", "drive must be a floating-point tensor, got 'x'"),
    ],
    ids=["no dimension", "no tensor"],
)
def test_wrong_inputs(drive, message):
    with pytest.raises((ValueError, TypeError), match=message):
        KineticIsing.create(drive, torch.zeros(3, 3))
