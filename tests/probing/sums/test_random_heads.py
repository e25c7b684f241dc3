"""The law of a random head against SciPy's tests and explicit sums of squares, and what it names where nothing was learned."""

import itertools

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rows import every_row

from massieu.probing.sums.comparisons import AT_ONCE, Arrangement, BesideRandom, both, with_their_tails
from massieu.probing.sums.random_heads import (
    RandomHeads,
    Scale,
    each_against_the_others,
    scaled,
    scaled_error,
    tail_factor,
    unscaled,
    with_tails,
)
from massieu.probing.sums.units import Estimate
from massieu.storage.record import Statistic

SHARE = Statistic("asked", scale="number", smallest=0.05)


@given(st.sampled_from(["share", "positive", "number"]), st.floats(2e-6, 1 - 2e-6))
def test_scales_and_their_errors(scale: Scale, number: float):
    """Near the centre of the law, and where the error is small, the slope is that of the scale."""
    value, step = np.array(number), 1e-5 * number * (1 - number)
    whole = {"share": scipy.special.logit, "positive": np.log, "number": np.array}[scale](value)
    np.testing.assert_allclose(scaled(value, scale), whole, rtol=1e-9, atol=1e-12)
    slope = (scaled(value + step, scale) - scaled(value - step, scale)) / (2 * step)
    np.testing.assert_allclose(scaled_error(value, np.array(0.01), law_of(whole, 0.3), scale), 0.01 * slope, rtol=1e-4)
    np.testing.assert_allclose(unscaled(whole, scale), value, rtol=1e-9)


def law_of(centre: float | np.ndarray, deviation: float) -> RandomHeads:
    """A law with such a mean and standard deviation on its scale."""
    return RandomHeads(np.asarray(centre), np.asarray([deviation**2]), np.array([7.0]))


SLOPES = {"share": scipy.special.logit, "positive": np.log}


@given(
    st.sampled_from(list(SLOPES)),
    st.floats(1e-5, 1 - 1e-5),
    st.floats(1e-3, 1 - 1e-3),
    st.floats(-6, -0.5),
    st.floats(-3, 1),
)
def test_the_error_on_a_scale_makes_the_way_to_the_head_least_surprising(scale, number, centre, error, deviation):
    """Beside SciPy's search for the place up to which the law explains the distance, and from which the error does."""
    error, deviation, middle = 10**error, 10**deviation, float(SLOPES[scale](centre))
    distance = float(SLOPES[scale](number)) - middle
    inverse = {"share": scipy.special.expit, "positive": np.exp}[scale]

    def surprise(part: float) -> float:
        return (part * distance / deviation) ** 2 + ((number - inverse(middle + part * distance)) / error) ** 2

    parts = itertools.pairwise(np.linspace(0, 1, 41))
    searched = [scipy.optimize.minimize_scalar(surprise, bounds=part, method="bounded").fun for part in parts]
    least = min(*searched, surprise(0.0), surprise(1.0))
    found = scaled_error(np.array(number), np.array(error), law_of(middle, deviation), scale)
    if least > 1e-4:
        # The search goes in steps of 1/256: what lies between two of them adds a part of this size to each term.
        np.testing.assert_allclose(distance**2 / (deviation**2 + found**2), least, rtol=0.02)


@every_row(
    "scale, value", [("share", 0.99999), ("share", 1e-5), ("positive", 1e-5), ("positive", 40.0), ("number", 3.0)]
)
def test_at_the_ends_of_a_scale_the_text_s_error_is_that_of_the_numbers(scale, value):
    """Random heads do not differ: the test is Student's of the numbers, however steep the scale is at the value."""
    statistic, error = Statistic("asked", scale=scale, smallest=0.05), 0.02
    own = Estimate(np.full(3, value), np.full(3, error), np.ones(3), np.full(3, 4.0))
    (found,) = BesideRandom.of([own], [np.full((8, 3), 0.2)], statistic, Arrangement(3))
    np.testing.assert_allclose(found.p_value, 2 * scipy.stats.t.sf(abs(value - 0.2) / error, 4), rtol=1e-6)


def test_a_head_that_saturates_is_far_from_heads_that_attend_alike():
    """A weight of 0.99999 ± 0.00002 beside random ones of 0.157 ± 0.001: no error reaches from one to the others."""
    draws = np.random.default_rng(7).normal(0.157, 0.001, (8, 4))
    own = Estimate(np.full(4, 0.99999), np.full(4, 2e-5), np.ones(4), np.full(4, 4.0))
    share = Statistic("asked", scale="share", smallest=0.05)
    (compared,) = BesideRandom.of([own], [draws], share, Arrangement(4))
    # Half of the distance on the scale, 6.5, is 700 deviations of 0.0075 and more, and the other half 300 errors of the text.
    assert (compared.p_value < 2 * scipy.stats.t.sf(300, 4)).all()


def test_numbers_at_the_ends_of_their_scale_stay_finite():
    ends = np.array([0.0, 1.0])
    assert np.isfinite(scaled(ends, "share")).all() and np.isfinite(scaled(ends, "positive")).all()
    assert np.isfinite(scaled_error(ends, np.zeros(2), law_of(0.0, 0.1), "share")).all()


@every_row("draws, clusters, heads", [(8, 1, 1), (8, 12, 1), (2, 3, 4), (5, 1, 6)])
def test_the_variance_is_that_of_the_components(draws, clusters, heads):
    """With components estimated by explicit sums, V = a + c + e + (a + c/K + e/(KG))/D, whatever sign they have."""
    x = np.random.default_rng(0).standard_normal((draws, clusters, heads))
    law = RandomHeads.of(x)
    e = x.var(2, ddof=1).mean() if heads > 1 else 0.0
    c = x.mean(2).var(1, ddof=1).mean() - e / heads if clusters > 1 else 0.0
    a = x.mean((1, 2)).var(ddof=1) - c / clusters - e / (clusters * heads)
    expected = a + c + e + (a + c / clusters + e / (clusters * heads)) / draws
    np.testing.assert_allclose(law.variances.sum(), expected, rtol=1e-12)
    np.testing.assert_allclose(law.centre, x.mean(), rtol=1e-12, atol=1e-15)


def test_one_head_a_draw_is_a_students_prediction_interval():
    x = np.random.default_rng(1).standard_normal(8)
    p = RandomHeads.of(x[:, None, None]).p_value(np.array(2.0), np.array(0.0), 3.0)
    t = (2.0 - x.mean()) / (x.std(ddof=1) * np.sqrt(1 + 1 / 8))
    np.testing.assert_allclose(p, 2 * scipy.stats.t.sf(abs(t), 7), rtol=1e-10)


def test_where_random_heads_do_not_differ_the_text_decides():
    law = RandomHeads.of(np.full((8, 4, 1), 0.5))
    p = law.p_value(np.array([0.5, 0.7, 0.7]), np.array([0.1, 0.1, 0.1]), np.array([5.0, 5.0, 0.0]))
    np.testing.assert_allclose(p[:2], [1.0, 2 * scipy.stats.t.sf(2.0, 5)], rtol=1e-10)
    assert np.isnan(p[2])  # an error without a degree of freedom


def test_satterthwaites_degrees_lie_between_those_of_the_parts():
    x = np.random.default_rng(2).standard_normal((8, 12, 1))
    law = RandomHeads.of(x)
    value, error = np.array(law.centre + 3.0), np.array(0.3)
    parts, degrees = np.append(law.variances[:2], 0.09), np.array([7, 88, 5])
    freedom = parts.sum() ** 2 / (parts**2 / degrees).sum()
    expected = 2 * scipy.stats.t.sf(3.0 / np.sqrt(parts.sum()), freedom)
    np.testing.assert_allclose(law.p_value(value, error, 5.0), expected, rtol=1e-9)


def test_each_draw_is_held_against_the_others():
    x = np.random.default_rng(3).standard_normal((4, 3, 2))
    found = each_against_the_others(x, np.zeros_like(x))
    alone = RandomHeads.of(np.delete(x, 2, 0)).p_value(x[2, 1, 0], np.array(0.0), 1.0)
    np.testing.assert_allclose(found[2, 1, 0], alone, rtol=1e-12)


def test_a_law_needs_two_draws():
    with pytest.raises(ValueError, match="at least 2 draws, got 1"):
        RandomHeads.of(np.ones((1, 2, 1)))


def test_tails_as_of_a_normal_law_change_little_and_heavy_ones_much():
    rng = np.random.default_rng(4)
    normal, heavy = (
        np.median([tail_factor(2 * scipy.stats.norm.sf(np.abs(law(size=(8, 100))))) for _ in range(200)])
        for law in (rng.standard_normal, lambda size: rng.standard_t(3, size))
    )
    assert 1.0 <= normal < 1.35
    assert heavy > 1.8
    assert tail_factor(np.full((3, 5), 0.5)) == 2.0  # of three draws the tails cannot be seen
    four = np.array(2 * scipy.stats.norm.sf(4.0))
    np.testing.assert_allclose(with_tails(four, 2.0), 2 * scipy.stats.norm.sf(2.0))
    np.testing.assert_allclose(with_tails(four, 2.0, 0.25), 2 * scipy.stats.norm.sf(4 / np.sqrt(1.75)))
    np.testing.assert_allclose(with_tails(four, 2.0, 0.0), four)


def test_heavy_tails_of_random_heads_widen_their_part_of_the_variance_alone():
    """The text's error is most of a head's variance: its law's tails, whatever they are, change the p-value little."""
    draws = 0.001 * np.random.default_rng(8).standard_t(2, (8, 6))
    own = Estimate(np.full(6, 3.0), np.full(6, 0.5), np.ones(6), np.full(6, 9.0))
    (found,) = with_their_tails(BesideRandom.of([own], [draws], SHARE, Arrangement(6)))
    np.testing.assert_allclose(found, 2 * scipy.stats.t.sf(6, 9), rtol=0.01)


@every_row(
    "value, centres, p_values, expected",
    [
        (1.0, [0.0, 0.5], [0.01, 0.02], 0.02),
        (1.0, [0.0, 2.0], [0.01, 0.02], 1.0),
        (1.0, [0.0], [0.3], 0.3),
        (1.0, [0.0, 2.0], [0.01, np.nan], np.nan),
    ],
)
def test_a_head_has_to_differ_from_every_null_in_one_direction(value, centres, p_values, expected):
    nulls = [(np.array([centre]), np.array([p])) for centre, p in zip(centres, p_values, strict=True)]
    np.testing.assert_equal(both(np.array([value]), nulls), [expected])


def test_under_alibi_a_head_is_compared_with_itself():
    """Heads of means 0, 5, 10 in all draws: pooled, the law is wide and no head stands out; alone, each one does."""
    draws = np.random.default_rng(5).normal([0.0, 5.0, 10.0], 0.1, (8, 3))
    own = Estimate(np.array([5.0, 10.0, 0.0]), np.full(3, 0.01), np.ones(3), np.full(3, 9.0))
    (pooled,) = BesideRandom.of([own], [draws], SHARE, Arrangement(3))
    (alone,) = BesideRandom.of([own], [draws], SHARE, Arrangement(3, alone=True))
    assert (pooled.p_value > 0.2).all()
    assert (alone.p_value < 1e-6).all()
    np.testing.assert_allclose(alone.centre, draws.mean(0), rtol=1e-12)
    np.testing.assert_allclose(alone.deviation, draws.std(0, ddof=1) * np.sqrt(9 / 8), rtol=1e-12)


@pytest.mark.parametrize("scale", ["share", "positive", "number"])
@pytest.mark.parametrize(
    "arrangement", [Arrangement(6), Arrangement(2), Arrangement(1), Arrangement(6, alone=True)], ids=str
)
def test_sites_that_are_compared_at_once_are_as_each_alone(scale, arrangement):
    """More sites than are done at once, some of whose numbers are at the end of their scale or not finite."""
    rng = np.random.default_rng(12)
    draws = list(rng.uniform(0.05, 0.95, (100, 8, 6)))
    values = rng.uniform(0.0, 1.0, (100, 6)).round(1)
    values[3, 2] = np.nan
    errors = np.where(rng.random((100, 6)) < 0.1, np.nan, rng.uniform(0.0, 0.1, (100, 6)))
    own = [
        Estimate(value, error, np.ones(6), np.full((6,) if site % 2 else (), site % 5))
        for site, (value, error) in enumerate(zip(values, errors, strict=True))
    ]
    statistic = Statistic("asked", scale=scale)
    assert len(own) * draws[0].size > AT_ONCE
    together = BesideRandom.of(own, draws, statistic, arrangement)
    for site, compared in enumerate(together):
        (alone,) = BesideRandom.of([own[site]], [draws[site]], statistic, arrangement)
        for name in ("p_value", "share", "others", "centre", "deviation"):
            np.testing.assert_allclose(
                getattr(compared, name), getattr(alone, name), rtol=1e-9, err_msg=f"{site} {name}"
            )


NOISE = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "heavy tails": lambda rng, shape: rng.standard_t(4, shape) / np.sqrt(2),
    "skew": lambda rng, shape: (np.exp(0.5 * rng.standard_normal(shape)) - np.exp(0.125)) / 0.604,
}
DESIGNS = [(8, 12, 1), (8, 2, 1), (8, 1, 1), (8, 3, 3), (2, 12, 1), (2, 2, 1)]


def families(noise: str, design: tuple[int, int, int], runs: int) -> float:
    """How often any head of a random model is named at 5 %: heads of random models, all components of one kind of noise."""
    draws, clusters, heads = design
    rng = np.random.default_rng(draws + clusters)
    own, random_models = [], []
    for _ in range(runs):
        model = 0.5 * NOISE[noise](rng, (draws + 1, 1, 1)) + NOISE[noise](rng, (draws + 1, clusters, 1))
        model = (model + 0.5 * NOISE[noise](rng, (draws + 1, clusters, heads))).reshape(draws + 1, -1)
        error = 0.2 * np.sqrt(rng.chisquare(5, model.shape[1]) / 5)
        value = model[0] + 0.2 * rng.standard_normal(model.shape[1])
        own.append(Estimate(value, error, np.ones_like(value), np.full(value.shape, 5.0)))
        random_models.append(model[1:])
    compared = BesideRandom.of(own, random_models, SHARE, Arrangement(clusters))
    smallest = [with_their_tails([model])[0].min() for model in compared]
    return float(np.mean(np.array(smallest) * clusters * heads < 0.05))


@pytest.mark.medium
@pytest.mark.parametrize("noise", NOISE)
def test_a_random_model_is_named_in_a_twentieth_of_cases_at_most(noise):
    """300 random models for two designs; `make slow` draws 1,000 for all."""
    for design in ((8, 12, 1), (2, 2, 1)):
        assert families(noise, design, 300) < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 300), design


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("design", DESIGNS, ids=str)
def test_a_random_model_is_named_in_a_twentieth_of_many_cases_at_most(noise, design):
    assert families(noise, design, 1_000) < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 1_000)


def test_a_head_far_from_random_ones_is_named():
    """One of twelve heads lies ten standard deviations away: found, and alone, in 19 of 20 runs or more."""
    rng, found = np.random.default_rng(6), 0
    for _ in range(100):
        model = 0.5 * rng.standard_normal((9, 1)) + rng.standard_normal((9, 12))
        model[0, 3] += 10 * np.sqrt(1.25)
        own = Estimate(model[0], np.full(12, 0.1), np.ones(12), np.full(12, 5.0))
        (p,) = with_their_tails(BesideRandom.of([own], [model[1:]], SHARE, Arrangement(12)))
        found += np.flatnonzero(p * 12 < 0.0125).tolist() == [3]
    assert found >= 95
