"""P-values and q-values against mpmath and their definitions."""

import mpmath
import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rows import every_row

from massieu.probing.sums.significance import (
    benjamini_hochberg,
    difference_p,
    holm,
    other_heads,
    two_sided_p,
)


@pytest.mark.medium
@given(st.lists(st.floats(0, 1) | st.just(float("nan")), max_size=40))
def test_q_values_are_the_definitions_with_nan_passed_through(p_values):
    """q of a test: the least p·m/rank over all tests whose p is no smaller."""
    p = np.array(p_values)
    q = benjamini_hochberg(p)
    tested = ~np.isnan(p)
    np.testing.assert_array_equal(np.isnan(q), ~tested)
    known = p[tested]
    expected = [min([1.0, *(p * len(known) / (known <= p).sum() for p in known[known >= own])]) for own in known]
    np.testing.assert_allclose(q[tested], expected, rtol=1e-14, atol=1e-300)


def test_q_values_keep_the_shape_and_refuse_what_is_no_p_value():
    p = np.array([[0.01, 0.04], [0.03, 0.5]])
    np.testing.assert_allclose(benjamini_hochberg(p), [[0.04, 0.04 * 4 / 3], [0.04 * 4 / 3, 0.5]])
    for wrong in (-0.1, 1.1, np.inf):
        with pytest.raises(ValueError, match=r"\[0, 1\]"):
            benjamini_hochberg(np.array([0.5, wrong]))


def test_false_discoveries_are_controlled():
    """100 families of 50 heads, 40 of them null: the mean share of false calls at q ≤ 0.1 is at most 0.1·40/50."""
    rng = np.random.default_rng(0)
    shares = []
    for _ in range(100):
        z = rng.standard_normal(50) + np.where(np.arange(50) < 40, 0.0, 3.0)
        called = benjamini_hochberg(2 * scipy.stats.norm.sf(np.abs(z))) <= 0.1
        shares.append(called[:40].sum() / max(called.sum(), 1))
    assert np.mean(shares) < 0.08 + 5 * np.std(shares) / 10


@given(st.floats(-50, 50), st.floats(1e-3, 10), st.floats(-50, 50), st.floats(1e-3, 10), st.integers(1, 60))
def test_difference_is_students_test_with_the_fewer_degrees(a, se_a, b, se_b, degrees):
    expected = 2 * scipy.stats.t.sf(abs(a - b) / np.hypot(se_a, se_b), min(degrees, 5))
    found = difference_p(*map(np.array, (a, se_a, float(degrees), b, se_b, 5.0)))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-300)


def test_five_windows_against_two_are_rejected_at_their_level():
    """Two means of independent normal numbers; by the normal law 16 % of such differences had p < 0.05."""
    drawn = np.random.default_rng(0).standard_normal((7, 20_000))
    parts = [(part.mean(0), part.std(0, ddof=1) / np.sqrt(len(part))) for part in (drawn[:5], drawn[5:])]
    degrees = [np.full(20_000, 4.0), np.full(20_000, 1.0)]
    p = difference_p(*parts[0], degrees[0], *parts[1], degrees[1])
    assert (p < 0.05).mean() < 0.05 + 5 * np.sqrt(0.05 * 0.95 / 20_000)


@every_row(
    "p_values, levels",
    [
        ([0.001, 0.2, 0.01, 0.03], [0.0125, 0.0, 0.05 / 3, 0.0]),
        ([0.001, 0.02, 0.01, 0.03], [0.0125, 0.025, 0.05 / 3, 0.05]),
        ([0.02, 0.02, 0.02, 0.02], [0.0] * 4),
        ([np.nan, 0.01], [0.0, 0.025]),
    ],
)
def test_holm_goes_on_until_one_fails(p_values, levels):
    np.testing.assert_allclose(holm(p_values, 0.05), levels)


@pytest.mark.medium
@given(
    t=st.floats(1e-3, 1e6) | st.sampled_from([0.0, 1e30]),
    count=st.integers(2, 130) | st.sampled_from([1000, 10_000]),
    se=st.floats(0, 10),
)
def test_prediction_interval_is_students_t(t, count, se):
    deviation, mean = 1.5, 0.25
    null = deviation**2 * (1 + 1 / count)
    scale = np.sqrt(se**2 + null)
    own = mean + t * scale
    with mpmath.workdps(40):
        freedom = mpmath.mpf(se**2 + null) ** 2 / (mpmath.mpf(null) ** 2 / (count - 1) + mpmath.mpf(se**2) ** 2 / 9)
        degrees, distance = freedom, mpmath.mpf(own - mean) / mpmath.mpf(scale)
        expected = float(mpmath.betainc(degrees / 2, 0.5, 0, degrees / (degrees + distance**2), regularized=True))
    p = two_sided_p(*map(np.array, (own, se, mean, deviation, count, 9.0)))
    np.testing.assert_allclose(p, expected, rtol=1e-10, atol=1e-290)
    np.testing.assert_allclose(two_sided_p(*map(np.array, (-own, se, -mean, deviation, count, 9.0))), p, rtol=1e-12)


def test_small_t_with_one_degree_of_freedom_is_the_arc_tangent():
    t = np.array([0.0, 1e-12, 1e-9, 1e-4, 1.0, 1e4])
    p = two_sided_p(t * np.sqrt(1.5), np.zeros(6), np.zeros(6), np.ones(6), np.full(6, 2), np.full(6, np.inf))
    np.testing.assert_allclose(p, 1 - 2 / np.pi * np.arctan(t), rtol=1e-13, atol=1e-16)


def test_one_more_draw_of_the_null_is_rejected_at_its_level():
    """Own number and five nulls from one normal law: p is uniform."""
    draws = np.random.default_rng(1).standard_normal((4000, 6))
    null = draws[:, 1:]
    p = two_sided_p(
        draws[:, 0], np.zeros(4000), null.mean(1), null.std(1, ddof=1), np.full(4000, 5), np.full(4000, np.inf)
    )
    assert scipy.stats.kstest(p, "uniform").pvalue > 1e-4


def test_undefined_and_degenerate_cases():
    p = two_sided_p(
        np.array([1.0, 1.0, np.nan, 1.0, 1.0, 1.0]),
        np.array([0.1, 0.1, 0.1, np.nan, 0.0, 0.0]),
        np.array([0.0, 0.0, 0.0, 0.0, 0.0, 1.0]),
        np.array([0.1, 0.1, 0.1, 0.1, 0.0, 0.0]),
        np.array([1, 0, 5, 5, 5, 5]),
        np.full(6, np.inf),
    )
    np.testing.assert_array_equal(p, [np.nan, np.nan, np.nan, np.nan, 0.0, 1.0])
    zeros, few = np.zeros(3), np.ones(3)
    p = difference_p(np.array([1.0, 1.0, np.nan]), zeros, few, np.array([1.0, 2.0, 2.0]), zeros, few)
    np.testing.assert_array_equal(p, [1.0, 0.0, np.nan])
    assert np.isnan(difference_p(few, few, zeros, zeros, few, few)).all()  # of one unit: no degree of freedom
    with pytest.raises(ValueError, match="0 or more"):
        difference_p(zeros, zeros - 1, few, zeros, zeros, few)
    with pytest.raises(ValueError, match="0 or more"):
        two_sided_p(zeros, zeros, zeros, zeros - 1, zeros + 3, few)


def test_other_heads_leave_the_own_one_out():
    matrix = np.random.default_rng(0).normal(size=(5, 5))
    mean, deviation, number = other_heads(matrix)
    for h in range(5):
        others = [matrix[g, h] for g in range(5) if g != h]
        assert np.isclose(mean[h], np.mean(others))
        assert np.isclose(deviation[h], np.std(others, ddof=1))
    assert number == 4
    assert np.isnan(other_heads(matrix[:2, :2])[0]).all()
