"""Finite exchangeability: against enumeration, SciPy's laws, and what must fail."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
from scipy import stats
from tests.support.rows import every_row

from massieu.papers.theory import finite_extension_bound, urn_total_variation


def test_two_draws_without_replacement_are_no_mixture():
    """Trap 22: exchangeable, but of covariance −¼; a mixture's is a variance. The bound says nothing at n = k = 2."""
    pairs = [(0, 1), (1, 0)]
    left, right = np.array(pairs).T
    assert np.mean(left * right) - left.mean() * right.mean() == -0.25
    assert finite_extension_bound(2, 2) == urn_total_variation([1, 1], 2) == 0.5


def test_the_urns_distance_and_its_bound():
    assert urn_total_variation([1] * 10, 3) == pytest.approx(0.28, abs=1e-14)
    assert finite_extension_bound(3, 10) == pytest.approx(0.3, abs=1e-14)
    for counts in ([3, 4], [2, 2, 5], [1, 0, 6, 2]):
        n = sum(counts)
        for k in range(1, 5):
            sequences = list(itertools.product(range(len(counts)), repeat=k))
            distance = 0.0
            for sequence in sequences:
                without, left = 1.0, list(counts)
                for drawn in sequence:
                    without *= left[drawn] / sum(left)
                    left[drawn] -= 1
                distance += abs(without - math.prod(counts[drawn] / n for drawn in sequence)) / 2
            assert urn_total_variation(counts, k) == pytest.approx(distance, abs=1e-13)
            assert distance <= finite_extension_bound(k, n) + 1e-15
    two = urn_total_variation([40, 60], 10)
    points = np.arange(11)
    expected = 0.5 * np.abs(stats.hypergeom(100, 40, 10).pmf(points) - stats.binom(10, 0.4).pmf(points)).sum()
    assert two == pytest.approx(expected, abs=1e-12)


@every_row(
    ("call", "message"),
    [
        (lambda: finite_extension_bound(4, 3), "between 1 and n = 3, got 4"),
        (lambda: urn_total_variation([], 1), "k must lie between 1 and n = 0"),
        (lambda: urn_total_variation([1, -1], 1), "at least 0"),
        (lambda: urn_total_variation([50] * 40, 30), "outcomes, more than"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_urn_beyond_floating_point():
    """1100 draws have 1e330 orders. By SciPy's laws of the counts."""
    counts = range(1101)
    without = scipy.stats.hypergeom(2200, 1100, 1100).pmf(counts)
    replaced = scipy.stats.binom(1100, 0.5).pmf(counts)
    assert urn_total_variation([1100, 1100], 1100) == pytest.approx(0.5 * abs(without - replaced).sum(), rel=1e-9)
