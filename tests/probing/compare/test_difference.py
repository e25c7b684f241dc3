"""The paired difference of two ratios, against SciPy's t-tests and against derivatives by units."""

import numpy as np
import pytest
import scipy.fft
from scipy import stats
from tests.support.rows import every_row

from massieu.probing.compare.difference import RESOLUTION, Difference, alone, independent, paired
from massieu.probing.sums.accumulate import Ratio, block_sums
from massieu.probing.sums.significance import student_p
from massieu.probing.sums.unit_sums import SiteSums, UnitSums
from massieu.probing.sums.units import WINDOWS, Units

UNITS, HEADS = 11, 3
DOCUMENTS = Units("document")


def drawn(seed: int, units: int = UNITS, even: bool = True) -> SiteSums:
    generator = np.random.default_rng(seed)
    counts = np.full((units, HEADS), 8.0) if even else generator.integers(1, 9, (units, HEADS)).astype(float)
    return SiteSums(counts * generator.normal(2.0, 1.0, (units, HEADS)), counts, np.ones(units, dtype=np.int64))


def test_units_of_one_size_are_a_paired_t_test():
    first, second = drawn(0), drawn(1)
    second.totals[:] += 0.7 * first.totals
    difference = paired(first, second, DOCUMENTS)
    expected = stats.ttest_rel(second.totals / second.counts, first.totals / first.counts)
    assert np.allclose(difference.value / difference.standard_error, expected.statistic, rtol=1e-12)
    assert np.allclose(difference.p_value(), expected.pvalue, rtol=1e-9)
    np.testing.assert_allclose(difference.degrees, UNITS - 1, rtol=1e-12)


def test_independent_estimates_are_a_t_test_with_the_fewer_degrees():
    first, second = drawn(0), drawn(1, units=7)
    difference = independent(alone(first, DOCUMENTS), alone(second, DOCUMENTS))
    expected = stats.ttest_ind(second.totals / second.counts, first.totals / first.counts, equal_var=False)
    assert np.allclose(difference.value / difference.standard_error, expected.statistic, rtol=1e-12)
    np.testing.assert_allclose(difference.p_value(), 2 * stats.t.sf(np.abs(expected.statistic), 6), rtol=1e-9)


def test_a_unit_moves_the_difference_as_its_weight_does():
    first, second = drawn(2, even=False), drawn(3, even=False)
    first.counts[4, 0] = first.totals[4, 0] = 0.0  # no unit of one model, but of the other

    def difference(weights: np.ndarray) -> np.ndarray:
        ratios = [(weights[:, None] * s.totals).sum(0) / (weights[:, None] * s.counts).sum(0) for s in (first, second)]
        return ratios[1] - ratios[0]

    # By complex steps: exact to rounding.
    moved = np.stack([difference(np.ones(UNITS) + 1e-30j * (np.arange(UNITS) == u)).imag / 1e-30 for u in range(UNITS)])
    lowest = np.asarray(scipy.fft.dct(moved, type=2, norm="ortho", axis=0))[
        1
    ]  # the one cosine that eleven windows have
    assert np.allclose(paired(first, second).standard_error, np.sqrt(UNITS) * np.abs(lowest), rtol=1e-12)


def test_the_same_sums_do_not_differ():
    sums = drawn(0, even=False)
    difference = paired(sums, sums)
    assert (difference.value == 0).all()
    assert (difference.standard_error == 0).all()
    assert (difference.p_value() == 1).all()


@pytest.mark.medium
@every_row(
    "correlated, units, spread", [(True, n, 0.0) for n in (4, 16, 64)] + [(False, n, 1.0) for n in (4, 5, 16, 64)]
)
def test_models_that_do_not_differ_are_named_on_a_twentieth_of_texts(correlated, units, spread):
    """4,000 texts: windows with a correlation of 0.3, or documents of lognormal lengths with a mean each."""
    generator = np.random.default_rng(units)
    noise = generator.standard_normal((2, units, 4_000))
    for place in range(1, units if correlated else 0):
        noise[:, place] = 0.3 * noise[:, place - 1] + np.sqrt(1 - 0.09) * noise[:, place]
    lengths = np.exp(spread * generator.standard_normal((units, 4_000)))
    rows = np.ones(units, dtype=np.int64)
    p = paired(
        *(SiteSums(lengths * each, lengths, rows) for each in noise), WINDOWS if correlated else DOCUMENTS
    ).p_value()
    assert (p < 0.05).mean() < 0.06 + 5 * np.sqrt(0.06 * 0.94 / 4_000)


def test_differences_of_rounding_alone_are_not_significant():
    size = np.array([3.0, 3.0])
    difference = Difference(size * np.array([RESOLUTION / 4, 100 * RESOLUTION]), np.zeros(2), np.full(2, 30.0), size)
    assert difference.p_value()[0] > 0.5
    assert difference.p_value()[1] < 1e-6


def test_one_unit_has_no_error_and_other_units_are_refused():
    difference = paired(drawn(0, units=1), drawn(1, units=1))
    assert np.isnan(difference.standard_error).all()
    assert np.isnan(difference.p_value()).all()
    one_side = independent(alone(drawn(0)), alone(drawn(1, units=1)))
    assert np.isnan(one_side.p_value()).all()
    with pytest.raises(ValueError, match="different units"):
        paired(drawn(0), drawn(1, units=7))


def test_nan_totals_make_their_head_undefined_and_no_other():
    first, second = drawn(0), drawn(1)
    second.totals[3, 1] = np.nan
    p = paired(first, second).p_value()
    assert np.isnan(p[1])
    assert np.isfinite(p[[0, 2]]).all()
    first.counts[:, 2] = first.totals[:, 2] = 0.0  # never counted
    assert np.isnan(paired(first, second).value[2])


def test_student_p_at_its_limits():
    p_values = student_p(np.array([0.0, 1.0, 2.0, 2.0]), np.array([0.0, 0.0, 1.0, 1.0]), np.array([3.0, 3.0, 5.0, 0.0]))
    assert p_values[:2].tolist() == [1.0, 0.0]
    assert np.isclose(p_values[2], 2 * stats.t.sf(2.0, 5), rtol=1e-10)
    assert np.isnan(p_values[3])
    with pytest.raises(ValueError, match="0 or more"):
        student_p(np.ones(1), -np.ones(1), np.ones(1))


def test_documents_are_summed_in_blocks_too():
    generator = np.random.default_rng(0)
    totals, counts = generator.normal(size=(150, 2)), generator.integers(1, 5, (150, 2)).astype(float)
    whole, begun, ended = (Ratio((2,), Units("document", capacity=8)) for _ in range(3))
    whole.update(totals, counts)
    begun.update(totals[:64], counts[:64])
    ended.update(totals[64:], counts[64:])
    begun.merge(ended)
    for ratio in (whole, begun):
        sums, numbers, rows = block_sums(ratio)
        ends = np.cumsum(rows)
        assert ends[-1] == 150
        assert len(rows) <= 8
        expected = [totals[end - size : end].sum(0) for end, size in zip(ends, rows, strict=True)]
        assert np.allclose(sums, expected, rtol=0, atol=1e-12)
        assert numbers.sum(0).tolist() == counts.sum(0).tolist()


def test_sums_survive_storage_exactly():
    wide = drawn(4, even=False)
    sums = {("head", "a", "entropy"): drawn(0), ("head", "b", "entropy"): wide}
    sums["layer", "a attention", "effective_rank_change"] = drawn(5, units=2)
    stored = UnitSums("text", None, sums)
    read = UnitSums.from_bytes(stored.to_bytes(), "here")
    assert (read.text, read.tokenizer, set(read.sums)) == ("text", None, set(stored.sums))
    for key, sums in stored.sums.items():
        for part in ("totals", "counts", "rows"):
            assert np.array_equal(getattr(read.sums[key], part), getattr(sums, part)), (key, part)


def test_invalid_sums_are_refused():
    from massieu.errors import InputError

    whole = UnitSums("text", None, {("head", "a", "entropy"): drawn(0)}).to_bytes()
    broken = (b"", b"\0" * 64, whole[:-9], whole.replace(b'\\"version\\": \\"1\\"', b'\\"version\\": \\"9\\"'))
    for content in (*broken, whole.replace(b'\\"a\\", 3', b'\\"a\\", 4')):
        with pytest.raises(InputError, match="here"):
            UnitSums.from_bytes(content, "here")
