"""What a layer multiplies a small perturbation of its equilibrium by."""

import math

import pytest

from massieu.papers.theory import cumulant_growth, harmonic_growth, measured_cumulant_growth


def test_numbers_are_read_in_float64():
    # 1 + 3·0.5·0.4²/1.2; float32 would hold 0.4 to 1e-8.
    assert cumulant_growth(3, 0.5, 0.4).item() == pytest.approx(1.2, rel=1e-15)


@pytest.mark.parametrize("order", [3, 4, 5, 6])
def test_the_formula_is_what_quadrature_measures(order):
    formula = cumulant_growth(order, 0.5, 0.4).item()
    assert measured_cumulant_growth(order, 0.5, 0.4).item() == pytest.approx(formula, rel=1e-8)


def test_the_first_two_harmonics_in_three_dimensions():
    # I_{3/2}/I_{1/2} = coth s − 1/s, and I_{5/2} = I_{1/2} − (3/s)·I_{3/2}.
    scale, step = 1.7, 0.6
    first = 1 / math.tanh(scale) - 1 / scale
    for order, ratio in ((1, first), (2, 1 - 3 * first / scale)):
        expected = 1 + step * order * (order + 1) * ratio / (scale * (1 + step * first))
        assert harmonic_growth(order, step, scale, dim=3).item() == pytest.approx(expected, rel=1e-13)
