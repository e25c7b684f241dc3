"""P-values and q-values against mpmath and their definitions."""

import mpmath
import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from massieu.probing.significance import (
    benjamini_hochberg,
    difference_p,
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


@given(st.floats(-50, 50), st.floats(0, 10), st.floats(-50, 50), st.floats(1e-3, 10))
def test_difference_is_the_normal_test(a, se_a, b, se_b):
    expected = 2 * scipy.stats.norm.sf(abs(a - b) / np.hypot(se_a, se_b))
    np.testing.assert_allclose(difference_p(*map(np.array, (a, se_a, b, se_b))), expected, rtol=1e-10, atol=1e-300)


@pytest.mark.medium
@given(
    t=st.floats(1e-3, 1e6) | st.sampled_from([0.0, 1e30]),
    count=st.integers(2, 130) | st.sampled_from([1000, 10_000]),
    se=st.floats(0, 10),
)
def test_prediction_interval_is_students_t(t, count, se):
    deviation, mean = 1.5, 0.25
    scale = np.sqrt(se**2 + deviation**2 * (1 + 1 / count))
    own = mean + t * scale
    with mpmath.workdps(40):
        degrees, distance = mpmath.mpf(count - 1), mpmath.mpf(own - mean) / mpmath.mpf(scale)
        expected = float(mpmath.betainc(degrees / 2, 0.5, 0, degrees / (degrees + distance**2), regularized=True))
    p = two_sided_p(*map(np.array, (own, se, mean, deviation, count)))
    np.testing.assert_allclose(p, expected, rtol=1e-10, atol=1e-290)
    np.testing.assert_allclose(two_sided_p(*map(np.array, (-own, se, -mean, deviation, count))), p, rtol=1e-12)


def test_small_t_with_one_degree_of_freedom_is_the_arc_tangent():
    t = np.array([0.0, 1e-12, 1e-9, 1e-4, 1.0, 1e4])
    p = two_sided_p(t * np.sqrt(1.5), np.zeros(6), np.zeros(6), np.ones(6), np.full(6, 2))
    np.testing.assert_allclose(p, 1 - 2 / np.pi * np.arctan(t), rtol=1e-13, atol=1e-16)


def test_one_more_draw_of_the_null_is_rejected_at_its_level():
    """Own number and five nulls from one normal law: p is uniform."""
    draws = np.random.default_rng(1).standard_normal((4000, 6))
    null = draws[:, 1:]
    p = two_sided_p(draws[:, 0], np.zeros(4000), null.mean(1), null.std(1, ddof=1), np.full(4000, 5))
    assert scipy.stats.kstest(p, "uniform").pvalue > 1e-4


def test_undefined_and_degenerate_cases():
    p = two_sided_p(
        np.array([1.0, 1.0, np.nan, 1.0, 1.0, 1.0]),
        np.array([0.1, 0.1, 0.1, np.nan, 0.0, 0.0]),
        np.array([0.0, 0.0, 0.0, 0.0, 0.0, 1.0]),
        np.array([0.1, 0.1, 0.1, 0.1, 0.0, 0.0]),
        np.array([1, 0, 5, 5, 5, 5]),
    )
    np.testing.assert_array_equal(p, [np.nan, np.nan, np.nan, np.nan, 0.0, 1.0])
    zeros = np.zeros(3)
    p = difference_p(np.array([1.0, 1.0, np.nan]), zeros, np.array([1.0, 2.0, 2.0]), zeros)
    np.testing.assert_array_equal(p, [1.0, 0.0, np.nan])
    with pytest.raises(ValueError, match="0 or more"):
        difference_p(zeros, zeros - 1, zeros, zeros)
    with pytest.raises(ValueError, match="0 or more"):
        two_sided_p(zeros, zeros, zeros, zeros - 1, zeros + 3)


def test_other_heads_leave_the_own_one_out():
    matrix = np.random.default_rng(0).normal(size=(5, 5))
    mean, deviation, number = other_heads(matrix)
    for h in range(5):
        others = [matrix[g, h] for g in range(5) if g != h]
        assert np.isclose(mean[h], np.mean(others))
        assert np.isclose(deviation[h], np.std(others, ddof=1))
    assert number == 4
    assert np.isnan(other_heads(matrix[:2, :2])[0]).all()
