"""Running results against numpy on the whole data at once, and the coverage of their error bars."""

import copy
import pickle

import numpy as np
import pytest
import scipy.fft
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rows import every_row

from massieu.errors import InputError
from massieu.probing.sums.accumulate import Histogram, Ratio, Spread
from massieu.probing.sums.units import Units

DOCUMENTS = Units("document")
WINDOWS = Units("window")
MODES = [pytest.param(WINDOWS, id="window"), pytest.param(DOCUMENTS, id="document")]


def made_up_rows(seed: int, rows: int, shape: tuple[int, ...] = (3,)) -> tuple[np.ndarray, np.ndarray]:
    """Totals and counts with a large common ratio and some rows that count nowhere or only for some entries."""
    rng = np.random.default_rng(seed)
    count = rng.integers(0, 5, size=(rows, *shape)) * (rng.random((rows, *([1] * len(shape)))) < 0.8)
    return 7.0 * count + rng.standard_normal((rows, *shape)) * np.sqrt(count), count.astype(float)


def ratio_of(total: np.ndarray, count: np.ndarray, units: Units = WINDOWS, cuts: tuple[int, ...] = ()) -> Ratio:
    ratio = Ratio(total.shape[1:], units)
    for part in zip(np.split(total, cuts), np.split(count, cuts), strict=True):
        ratio.update(*part)
    return ratio


def textbook(
    total: np.ndarray, count: np.ndarray, block: int = 1, units: Units = WINDOWS
) -> tuple[np.ndarray, np.ndarray]:
    """Ratio and its error, entry by entry, from all units at once: by SciPy's cosine transform, or by explicit matrices."""
    kept = count.reshape(len(count), -1).any(1)
    total, count = total[kept], count[kept]
    value, error = np.full(total.shape[1:], np.nan), np.full(total.shape[1:], np.nan)
    for entry in np.ndindex(value.shape):
        s, n = (
            np.array([x[(slice(i, i + block), *entry)].sum() for i in range(0, len(x), block)]) for x in (total, count)
        )
        if n.sum() > 0:
            value[entry] = s.sum() / n.sum()
        if (n > 0).sum() > 1:
            one = of_windows if units.mode == "window" else of_documents
            error[entry] = one((s - value[entry] * n) / n.sum(), n / n.sum(), len(total))[0]
    return value, error


def of_windows(moved: np.ndarray, weights: np.ndarray, windows: int) -> tuple[float, float]:
    used = min(max(int(0.35 * windows ** (2 / 3)), 1), len(moved) - 1)
    lowest = scipy.fft.dct(moved, type=2, norm="ortho")[1 : used + 1]
    counted = (weights > 0).sum()
    correction = (counted / (counted - 1)) / (len(moved) / (len(moved) - 1))
    return np.sqrt(correction * len(moved) * (lowest**2).mean()), min(used, counted - 1)


def of_documents(moved: np.ndarray, weights: np.ndarray, windows: int = 0) -> tuple[float, float]:
    """CR2: residuals are (I − 1wᵀ) y; their expected squares and the trace of the form's square, by matrices."""
    moved, weights = moved[weights > 0], weights[weights > 0]
    residual = np.eye(len(weights)) - weights
    left = np.diag(residual @ residual.T)
    form = residual.T @ np.diag(weights**2 / left) @ residual
    return np.sqrt((moved**2 / left).sum()), np.trace(form) ** 2 / np.trace(form @ form)


def assert_same(first: Ratio, second: Ratio, errors: bool = True) -> None:
    np.testing.assert_allclose(first.value(), second.value(), rtol=1e-12)
    np.testing.assert_array_equal(first.estimate().count, second.estimate().count)
    if errors:
        np.testing.assert_allclose(
            first.estimate().standard_error, second.estimate().standard_error, rtol=1e-8, atol=1e-12
        )


# --- Ratio: value and error --------------------------------------------------------------------------------------


@every_row("units", MODES)
@every_row("shape", [(), (3,), (2, 4)])
def test_ratio_of_few_rows_is_the_textbook_estimator(units, shape):
    total, count = made_up_rows(0, 40, shape)
    ratio = ratio_of(total, count, units, cuts=(1, 5, 5, 17))
    value, error = textbook(total, count, units=units)
    np.testing.assert_allclose(ratio.value(), value, rtol=1e-13)
    np.testing.assert_allclose(ratio.estimate().standard_error, error, rtol=1e-10)
    np.testing.assert_array_equal(ratio.estimate().count, count.sum(0))


def test_blocks_are_of_the_smallest_power_of_two_that_fits():
    total, count = made_up_rows(1, 1500)
    kept = count.any(1).sum()
    block = 2 ** int(np.ceil(np.log2(kept / 64)))
    ratio = ratio_of(total, count)
    value, error = textbook(total, count, block)
    np.testing.assert_allclose(ratio.value(), value, rtol=1e-13)
    np.testing.assert_allclose(ratio.estimate().standard_error, error, rtol=1e-10)
    assert ratio.error_unit() == (f"block of {block} consecutive windows", -(-kept // block))


@every_row("lengths", [[1, 1, 1, 1], [1, 2, 3, 4, 5], [1, 1, 1, 90], [0, 3, 0, 4], list(range(1, 41))])
def test_degrees_of_freedom_of_unequal_documents_are_satterthwaites(lengths):
    count = np.array(lengths, dtype=float)[:, None]
    ratio = ratio_of(count * np.random.default_rng(1).standard_normal(count.shape), count, DOCUMENTS)
    moved, weights = np.zeros(len(count)), count[:, 0] / count.sum()
    np.testing.assert_allclose(ratio.estimate().degrees, of_documents(moved, weights)[1], rtol=1e-9)
    if len(set(lengths)) == 1:
        np.testing.assert_allclose(ratio.estimate().degrees, len(lengths) - 1, rtol=1e-12)


@every_row("rows, degrees", [(1, 0), (2, 1), (4, 1), (16, 2), (64, 5), (300, 15), (3000, 46)])
def test_degrees_of_freedom_of_windows_grow_with_the_text(rows, degrees):
    ratio = ratio_of(np.ones((rows, 1)), np.ones((rows, 1)))
    np.testing.assert_array_equal(ratio.estimate().degrees, degrees)


@every_row("rows, windows", [(3, 3), (4, 4), (7, 30), (36, 320)])
def test_sampled_windows_stand_for_the_text_they_are_taken_from(rows, windows):
    """The first four and then every tenth: an error has the degrees of freedom of a text so long, or one less than rows."""
    assert Units(sampled=True).windows(rows) == windows
    ratio = ratio_of(np.ones((rows, 1)), np.ones((rows, 1)), Units(sampled=True))
    expected = min(max(int(0.35 * windows ** (2 / 3)), 1), rows - 1)
    np.testing.assert_array_equal(ratio.estimate().degrees, expected)


@given(rows=st.integers(1, 400), capacity=st.sampled_from([2, 4, 64]))
def test_number_of_blocks_stays_between_half_the_capacity_and_the_capacity(rows, capacity):
    ratio = Ratio((), Units("window", capacity))
    ratio.update(np.ones(rows), np.ones(rows))
    assert min(rows, capacity // 2) <= ratio.error_unit()[1] <= capacity


def test_few_documents_are_called_windows():
    total, count = np.ones((29, 1)), np.ones((29, 1))
    ratio = ratio_of(total, count, DOCUMENTS)
    assert ratio.error_unit() == ("window", 29)
    ratio.update(total[:1], count[:1])
    assert ratio.error_unit() == ("document", 30)


@pytest.mark.parametrize("units", MODES)
def test_a_small_spread_around_a_large_ratio_keeps_its_digits(units):
    count = np.random.default_rng(3).integers(1, 100, size=(50, 1)).astype(float)
    residual = np.random.default_rng(4).standard_normal((50, 1))
    # Powers of two: the totals are exact up to rounding of 2^30·100 ~ 1e11 by 1e-5, far below the residuals.
    ratio = ratio_of(2.0**30 * count + residual, count, units)
    _, error = textbook(residual, count, units=units)
    np.testing.assert_allclose(ratio.estimate().standard_error, error, rtol=1e-3)


@pytest.mark.parametrize("units", MODES)
def test_what_is_not_counted_is_ignored_and_nothing_counted_is_nan(units):
    total = np.array([[np.nan, 3.0], [np.inf, 5.0], [np.nan, 100.0]])
    ratio = ratio_of(total, np.array([[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]]), units)
    np.testing.assert_array_equal(ratio.value(), [np.nan, 4.0])
    np.testing.assert_allclose(ratio.estimate().standard_error, [np.nan, 1.0])
    np.testing.assert_array_equal(ratio.estimate().count, [0.0, 2.0])
    empty = Ratio((2,), units)
    assert np.isnan(empty.value()).all()
    assert np.isnan(empty.estimate().standard_error).all()
    assert empty.error_unit()[1] == 0
    one = ratio_of(np.ones((1, 2)), np.ones((1, 2)), units)
    assert np.isnan(one.estimate().standard_error).all()


def test_counts_broadcast_and_tensors_are_taken():
    total = torch.arange(24, dtype=torch.bfloat16).reshape(4, 2, 3).requires_grad_()
    count = torch.tensor([1, 2, 3, 4]).reshape(4, 1, 1)
    ratio = Ratio((2, 3))
    ratio.update(total, count)
    np.testing.assert_allclose(ratio.value(), np.arange(24.0).reshape(4, 2, 3).sum(0) / 10)


@every_row(
    ("total", "count", "message"),
    [
        (np.ones((4, 2)), np.ones((4, 2)), "total must have shape"),
        (np.float64(1), np.ones(4), "total must have shape"),
        (np.ones((4, 3)), np.ones((3, 3)), "must broadcast"),
        (np.ones((4, 3)), np.ones((1, 3)), "a row for each"),
        (np.ones((4, 3)), np.ones(4), "must broadcast"),
        (np.ones((4, 3)), -np.ones((4, 3)), "≥ 0"),
        (np.ones((4, 3)), np.full((4, 3), np.nan), "≥ 0"),
        (torch.eye(3).to_sparse(), np.ones((3, 3)), "total must be a dense tensor"),
        (torch.ones((3, 3), device="meta"), np.ones((3, 3)), "total must have values"),
        (np.ones((3, 3)), {"x": 1}, "count must be an array or a tensor of numbers, got dict"),
        (np.array([["x"] * 3]), np.ones((1, 3)), "total must be an array or a tensor of numbers"),
        (np.ones((3, 3)) * 1j, np.ones((3, 3)), "total must be real"),
    ],
)
def test_wrong_updates_are_refused(total, count, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Ratio((3,)).update(total, count)


@every_row("numbers", [{}, object(), ["x"], 1e30])
def test_wrong_numbers_of_rows_are_refused(numbers):
    with pytest.raises((ValueError, TypeError), match="numbers must"):
        Ratio((3,)).update(np.ones((1, 3)), np.ones((1, 3)), numbers)


@every_row(
    ("arguments", "message"),
    [
        ((int,), "shape must be a list or another iterable, got type"),
        ((3,), "shape must be a list or another iterable, got 3"),
        (((3, -1),), "shape must be a whole number, at least 0, got -1"),
        (((3,), {}), "units must be the units of a group's model, got dict"),
    ],
)
def test_what_no_ratio_can_be_of_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        Ratio(*arguments)


def test_wrong_units_are_refused():
    with pytest.raises(ValueError, match="'token'"):
        Units("token")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="even"):
        Units(capacity=5)


# --- Ratio: splits, merging, memory ------------------------------------------------------------------------------

cuts = st.lists(st.integers(0, 200), max_size=6).map(lambda places: tuple(sorted(places)))


@pytest.mark.parametrize("units", MODES)
@given(cuts=cuts, seed=st.integers(0, 9))
def test_batches_do_not_matter(units, cuts, seed):
    total, count = made_up_rows(seed, 200)
    assert_same(ratio_of(total, count, units, cuts), ratio_of(total, count, units))


def joined(*parts: Ratio) -> Ratio:
    first = copy.deepcopy(parts[0])
    for part in parts[1:]:
        first.merge(part)
    return first


@pytest.mark.medium
@pytest.mark.parametrize("units", MODES)
@given(cuts=st.tuples(st.integers(0, 300), st.integers(0, 300)), seed=st.integers(0, 9))
def test_merging_is_associative_commutative_and_exact(units, cuts, seed):
    total, count = made_up_rows(seed, 300)
    bounds = sorted(cuts)
    a, b, c = (ratio_of(*part, units) for part in zip(np.split(total, bounds), np.split(count, bounds), strict=True))
    left, right = joined(joined(a, b), c), joined(a, joined(b, c))
    # Blocks may be joined in another order: the value is exact, the error another estimate.
    assert_same(left, ratio_of(total, count, units), errors=False)
    assert_same(left, right, errors=False)
    assert_same(left, joined(c, b, a), errors=False)
    assert 32 <= left.error_unit()[1] <= 64


def test_merged_blocks_are_the_union_of_both_sets_of_units():
    total, count = made_up_rows(5, 40), np.ones((40, 3))
    total = total[0]
    merged = joined(ratio_of(total[:15], count[:15]), ratio_of(total[15:], count[15:]))
    np.testing.assert_allclose(merged.estimate().standard_error, textbook(total, count)[1], rtol=1e-10)
    # 100 rows are blocks of 2; the 7 rows that follow are joined to 3 such blocks and a partial one.
    long, short = np.random.default_rng(6).standard_normal((2, 100, 1))
    merged = joined(ratio_of(long, np.ones((100, 1))), ratio_of(short[:7], np.ones((7, 1))))
    assert merged.error_unit() == ("block of 2 consecutive windows", 54)
    both = np.concatenate([long, short[:7]])
    np.testing.assert_allclose(merged.estimate().standard_error, textbook(both, np.ones((107, 1)), 2)[1], rtol=1e-10)
    # In the other order the partial block lies in the middle, and the text that follows starts a block of its own.
    merged = joined(ratio_of(short[:7], np.ones((7, 1))), ratio_of(long, np.ones((100, 1))))
    padded = np.concatenate([short[:7], np.zeros((1, 1)), long])
    counts = np.concatenate([np.ones((7, 1)), np.zeros((1, 1)), np.ones((100, 1))])
    s, n = (x.reshape(-1, 2).sum(1) for x in (padded, counts))
    expected = of_windows((s - s.sum() / n.sum() * n) / n.sum(), n / n.sum(), 107)[0]
    np.testing.assert_allclose(merged.estimate().standard_error, [expected], rtol=1e-10)


@pytest.mark.parametrize("units", MODES)
def test_merging_leaves_the_other_alone_and_goes_on(units):
    total, count = made_up_rows(7, 300)
    first, second = ratio_of(total[:90], count[:90], units), ratio_of(total[90:200], count[90:200], units)
    before = pickle.dumps(second)
    first.merge(second)
    first.update(total[200:], count[200:])
    assert pickle.dumps(second) == before
    assert_same(first, ratio_of(total, count, units), errors=False)
    with pytest.raises(ValueError, match="cannot merge"):
        first.merge(Ratio((4,), units))
    with pytest.raises(ValueError, match="cannot merge"):
        first.merge(Ratio((3,), Units("window", 2)))


@pytest.mark.parametrize("units", MODES)
def test_memory_does_not_grow_with_the_text(units):
    sizes = []
    for rows in (100, 1600, 6400):
        ratio = Ratio((3,), units)
        for _ in range(rows // 50):
            ratio.update(np.ones((50, 3)), np.ones((50, 3)))
        sizes.append(len(pickle.dumps(ratio)))
    assert max(sizes) - min(sizes) < 200  # bytes: the number of blocks in use varies between 32 and 64
    assert max(sizes) < 64 * 2 * 3 * 8 + 1500


# --- Ratio: halves -----------------------------------------------------------------------------------------------


@every_row(
    "units, rows, halves",
    [
        (DOCUMENTS, 48, (slice(0, None, 2), slice(1, None, 2))),
        (WINDOWS, 48, (slice(0, 21), slice(27, None))),
        (WINDOWS, 9, (slice(0, 4), slice(5, None))),
        (WINDOWS, 3, (slice(0, 2), slice(2, None))),
    ],
)
def test_halves_are_alternate_documents_or_both_ends_of_a_text(units, rows, halves):
    total, count = made_up_rows(8, rows)
    count += 1.0
    ratio = ratio_of(total, count, units, cuts=(7, 20, 41))
    for half, part in zip((ratio.first_half(), ratio.second_half()), halves, strict=True):
        value, error = textbook(total[part], count[part], units=units)
        np.testing.assert_allclose(half.value, value, rtol=1e-12)
        np.testing.assert_allclose(half.standard_error, error, rtol=1e-8)
        np.testing.assert_array_equal(half.count, count[part].sum(0))


def test_what_is_picked_on_one_half_is_printed_without_bias():
    """The best of 20 series by their first half: neighbouring windows are alike (0.8), and 500 texts are drawn."""
    series = autoregressive(np.random.default_rng(3), 0.8, 500 * 20, 32).reshape(500, 20, 32).transpose(2, 0, 1)
    ratio = ratio_of(series, np.ones_like(series))
    first, second = ratio.first_half().value, ratio.second_half()
    printed = np.take_along_axis(second.value, first.argmax(1)[:, None], 1)
    # The gap of four windows leaves the halves, of 14 each, so much correlation; the best of 20 is 1.87 errors high.
    places = np.arange(14)
    law = 0.8 ** np.abs(places[:, None] - places)
    correlation = (0.8 ** np.abs(places[:, None] - places - 18)).sum() / law.sum()
    true_error = second.value.std()
    assert abs(printed.mean()) < (correlation * 1.87 + 5 / np.sqrt(500)) * true_error
    assert first.max(1).mean() > 1.7 * true_error


# --- Ratio: coverage ---------------------------------------------------------------------------------------------


def autoregressive(rng: np.random.Generator, correlation: float, runs: int, length: int) -> np.ndarray:
    """Stationary AR(1) series of unit variance, one a row."""
    series = np.empty((runs, length))
    series[:, 0] = rng.standard_normal(runs)
    noise = np.sqrt(1 - correlation**2) * rng.standard_normal((runs, length))
    for time in range(1, length):
        series[:, time] = correlation * series[:, time - 1] + noise[:, time]
    return series


@pytest.mark.medium
def test_blocked_errors_cover_and_errors_over_tokens_do_not():
    """600 correlated windows of 8 tokens: the error over windows covers, the one over tokens does not."""
    rng = np.random.default_rng(9)
    runs, windows, tokens = 400, 600, 8
    centres = autoregressive(rng, 0.6, runs, windows)
    noise = rng.standard_normal((runs, windows, tokens))
    counts = rng.integers(2, tokens + 1, size=(runs, windows))
    valid = np.arange(tokens) < counts[..., None]
    values = np.where(valid, centres[..., None] + noise, 0.0)
    totals = values.sum(-1)
    ratio = Ratio((runs,))
    for start in range(0, windows, 100):
        ratio.update(totals.T[start : start + 100], counts.T[start : start + 100])
    n = counts.sum(1)
    naive = np.sqrt(((values - np.where(valid, ratio.value()[:, None, None], 0.0)) ** 2).sum((1, 2)) / n / (n - 1))
    # Each run's counts are independent of its values: the true mean is 0.
    covered = covers(ratio, 0.0)
    covered_naively = (np.abs(ratio.value()) < 1.96 * naive).mean()
    assert 0.9 <= covered <= 0.98
    assert covered_naively < 0.6


def test_document_errors_cover_when_the_length_goes_with_the_value():
    """The ratio estimator: long documents have higher values, so that value and count are correlated."""
    rng = np.random.default_rng(10)
    runs, documents = 400, 200
    counts = rng.integers(1, 40, size=(documents, runs)).astype(float)
    totals = counts * (0.05 * counts + rng.standard_normal((documents, runs)))
    ratio = ratio_of(totals, counts, DOCUMENTS)
    lengths = np.arange(1, 40)
    truth = 0.05 * (lengths**2).sum() / lengths.sum()
    assert 0.9 <= covers(ratio, truth) <= 0.98


@every_row("correlation, windows", [(r, n) for r in (0.0, 0.3, 0.5) for n in (4, 16, 64)] + [(0.8, 64), (0.8, 300)])
def test_intervals_cover_at_the_correlations_of_texts(correlation, windows):
    """90 % or more of 4,000 series, within five Monte Carlo errors of 0.5 %; of 95 % that are meant."""
    series = autoregressive(np.random.default_rng(windows), correlation, 4_000, windows).T
    assert 0.9 - 0.015 < covers(ratio_of(series, np.ones_like(series)), 0.0) < 0.97


@every_row("documents", [4, 5, 16, 64])
def test_intervals_cover_with_documents_of_lognormal_lengths(documents):
    """Each document has a mean of its own, and the long ones weigh most."""
    rng = np.random.default_rng(documents)
    lengths = np.exp(rng.standard_normal((documents, 4_000)))
    assert covers(ratio_of(lengths * rng.standard_normal(lengths.shape), lengths, DOCUMENTS), 0.0) > 0.94 - 0.015


def covers(ratio: Ratio, truth: float) -> float:
    """In what share of its entries a 95 % interval holds the truth."""
    found = ratio.estimate()
    return float((np.abs(found.value - truth) < scipy.stats.t.ppf(0.975, found.degrees) * found.standard_error).mean())


# --- Histogram ---------------------------------------------------------------------------------------------------


def numpy_histogram(values: np.ndarray, valid: np.ndarray, edges: np.ndarray) -> np.ndarray:
    inside = np.clip(values, edges[0], np.nextafter(edges[-1], -np.inf))
    mask = np.broadcast_to(valid, values.shape)
    heads = range(values.shape[1])
    return np.stack([np.histogram(inside[:, h][mask[:, h]], edges)[0] for h in heads])


@given(seed=st.integers(0, 99), bins=st.integers(1, 6), heads=st.integers(1, 4))
def test_histogram_counts_as_numpy_does_with_the_ends_clipped(seed, bins, heads):
    rng = np.random.default_rng(seed)
    edges = rng.integers(-8, 5) / 4.0 + np.arange(bins + 1) * rng.choice([0.25, 0.5, 2.0])
    values = np.round(rng.standard_normal((3, heads, 50)) * 4) / 4  # many exactly on an edge
    values[0, 0, :3] = -np.inf, np.inf, 1e300
    valid = rng.random((3, 1, 50)) < 0.7
    histogram = Histogram(edges, heads)
    histogram.update(values[:1], valid[:1])
    histogram.update(torch.from_numpy(values[1:]), torch.from_numpy(valid[1:]))
    np.testing.assert_array_equal(histogram.counts, numpy_histogram(values, valid, edges))


def test_histogram_leaves_nan_out_and_merges():
    edges = np.linspace(0, 1, 4)
    values = np.array([[[0.1, np.nan, 0.9]], [[2.0, -1.0, 0.5]]])
    valid = np.ones((1, 1, 3), dtype=bool)
    whole, first, second = Histogram(edges, 1), Histogram(edges, 1), Histogram(edges, 1)
    whole.update(values, np.broadcast_to(valid, values.shape))
    first.update(values[:1], valid)
    second.update(values[1:], valid)
    first.merge(second)
    np.testing.assert_array_equal(whole.counts, [[2, 1, 2]])
    np.testing.assert_array_equal(first.counts, whole.counts)
    assert second.counts.sum() == 3
    with pytest.raises(ValueError, match="cannot merge"):
        first.merge(Histogram(edges + 1, 1))


@every_row("edges", [[0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0, 3.0], [0.0, np.nan], [[0.0, 1.0]]])
def test_histogram_refuses_edges_that_are_none(edges):
    with pytest.raises(ValueError, match="edges"):
        Histogram(np.array(edges), 1)


# --- Spread ------------------------------------------------------------------------------------------------------


@given(cuts=st.lists(st.integers(0, 20), max_size=3).map(sorted), offset=st.sampled_from([0.0, 1e6]))
def test_spread_is_the_standard_deviation_of_all_tokens_however_they_come(cuts, offset):
    rng = np.random.default_rng(11)
    values = offset + rng.standard_normal((20, 3, 7))
    valid = rng.random((20, 1, 7)) < 0.6
    expected = [values[:, h][valid[:, 0]].std(ddof=1) for h in range(3)]
    streamed, merged = Spread((3,)), Spread((3,))
    for part, mask in zip(np.split(values, cuts), np.split(valid, cuts), strict=True):
        streamed.update(part, mask)
        piece = Spread((3,))
        piece.update(torch.from_numpy(part), torch.from_numpy(mask))
        piece.merge(merged)
        merged = piece
    for spread in (streamed, merged):
        # Deviations of size 1 are known to 1e6·2^-53 ≈ 1e-10.
        np.testing.assert_allclose(spread.value(), expected, rtol=1e-13 if offset == 0 else 1e-9)


def test_spread_of_one_token_or_none_is_nan_and_of_equal_tokens_zero():
    spread = Spread((3,))
    valid = torch.tensor([[[False, False], [True, False], [True, True]]])
    spread.update(torch.tensor([[[np.nan, 1.0], [0.1, np.nan], [0.1, 0.1]]]), valid)
    np.testing.assert_array_equal(spread.value(), [np.nan, np.nan, 0.0])
    with pytest.raises(ValueError, match="cannot merge"):
        spread.merge(Spread((2,)))


@every_row("accumulator", [Spread((2,)), Histogram(np.array([0.0, 1.0]), 2)])
@every_row(
    ("values", "valid", "message"),
    [
        (torch.ones(4, 3, 5), torch.ones(4, 3, 5, dtype=torch.bool), "values must have shape"),
        (torch.ones(4, 2), torch.ones(4, 2, dtype=torch.bool), "values must have shape"),
        (torch.ones(4, 2, 5), torch.ones(4, 2, 4, dtype=torch.bool), "must broadcast"),
        (torch.ones(4, 2, 5), torch.ones(4, 5, dtype=torch.bool), "must broadcast"),
        (torch.ones(4, 2, 5), torch.ones(4, 2, 5), "boolean"),
    ],
)
def test_tokens_of_wrong_shape_are_refused(accumulator, values, valid, message):
    with pytest.raises(TypeError if message == "boolean" else ValueError, match=message):
        accumulator.update(values, valid)
