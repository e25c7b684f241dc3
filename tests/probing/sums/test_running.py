"""Running sums that are split, stored, merged and gone on from: always those of one reading without a break."""

import copy
import json
import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.fft
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.probing.sums.test_accumulate import DOCUMENTS, MODES, WINDOWS, assert_same, made_up_rows, textbook
from tests.support.rows import every_row

from massieu.errors import InputError
from massieu.probing.capture.tokens import is_sampled, sampled_before
from massieu.probing.checks.nonfinite import FirstTrouble
from massieu.probing.reading.examples import ExampleWindow, ExampleWindows
from massieu.probing.statistics.expansion import ExpansionStatistics
from massieu.probing.sums.accumulate import Histogram, Ratio, Spread, Tally
from massieu.probing.sums.running import Running, RunningParts, add, packed, unpacked
from massieu.probing.sums.units import Units
from massieu.storage.record import Trouble

# --- rows with numbers -----------------------------------------------------------------------------------------------


def numbered(total: np.ndarray, count: np.ndarray, numbers: np.ndarray, units: Units, batch: int = 7) -> Ratio:
    ratio = Ratio(total.shape[1:], units)
    for start in range(0, len(numbers), batch):
        some = numbers[start : start + batch]
        ratio.update(total[some], count[some], some)
    return ratio


def by_block(total: np.ndarray, count: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Ratio and its error over blocks of rows by their number, from all of them at once, by SciPy's cosine transform."""
    blocks = -(-len(total) // size)
    place = np.arange(len(total)) // size
    s, n = (np.stack([x[place == block].sum(0) for block in range(blocks)]) for x in (total, count))
    value = s.sum(0) / n.sum(0)
    cosines = scipy.fft.dct((s - value * n) / n.sum(0), type=2, norm="ortho", axis=0)
    rows = count.reshape(len(count), -1).any(1).sum()
    return value, np.sqrt(blocks * (cosines[1 : int(0.35 * rows ** (2 / 3)) + 1] ** 2).mean(0))


FOUR_BLOCKS = Units("window", 4)


@every_row("units", [*MODES, FOUR_BLOCKS])
def test_shares_of_the_windows_merge_to_the_whole(units):
    owner = np.random.default_rng(12).integers(0, 3, 150)
    check_split(units, 0, owner.tolist(), random.Random(0))


@pytest.mark.medium
@given(
    units=st.sampled_from([WINDOWS, DOCUMENTS, FOUR_BLOCKS]), seed=st.integers(0, 9),
    owner=st.lists(st.integers(0, 3), min_size=150, max_size=150), shuffle=st.randoms(),
)  # fmt: skip
def test_any_split_of_the_windows_in_any_order_merges_to_the_whole(units, seed, owner, shuffle):
    check_split(units, seed, owner, shuffle)


def check_split(units: Units, seed: int, owner: list[int], shuffle: random.Random) -> None:
    total, count = made_up_rows(seed, 150)
    whole = numbered(total, count, np.arange(150), units)
    shares = [[i for i in range(150) if owner[i] == rank] for rank in range(4)]
    for share in shares:
        shuffle.shuffle(share)
    parts = [
        numbered(total, count, np.array(share, dtype=int), units, batch=shuffle.randint(1, 20)) for share in shares
    ]
    shuffle.shuffle(parts)
    first, *others = parts
    for part in others:
        first.merge(part)
    assert_same(first, whole)
    assert first.error_unit() == whole.error_unit()
    for half in ("first_half", "second_half"):
        merged, expected = getattr(first, half)(), getattr(whole, half)()
        np.testing.assert_allclose(merged.value, expected.value, rtol=1e-12)
        np.testing.assert_allclose(merged.standard_error, expected.standard_error, rtol=1e-8, atol=1e-12)


def test_a_row_belongs_to_the_block_of_its_number():
    total, count = made_up_rows(1, 300)
    ratio = numbered(total, count, np.random.default_rng(0).permutation(300), WINDOWS)
    value, error = by_block(total, count, 8)  # 300 windows fit into 38 of 64 blocks of 8, not into blocks of 4
    np.testing.assert_allclose(ratio.value(), value, rtol=1e-13)
    np.testing.assert_allclose(ratio.estimate().standard_error, error, rtol=1e-10)
    assert ratio.error_unit() == ("block of 8 consecutive windows", 38)


def test_rows_in_order_are_blocks_with_numbers_and_without():
    total, count = made_up_rows(2, 200)
    count[:, 0] = 1.0  # every row counts: one that counts nowhere keeps its number, but no place in an order
    plain = Ratio((3,))
    plain.update(total, count)
    assert_same(numbered(total, count, np.arange(200), WINDOWS), plain)


@pytest.mark.parametrize("units", MODES)
def test_a_far_number_makes_blocks_larger_and_loses_nothing(units):
    ratio = Ratio((), units)
    ratio.update(np.array([1.0, 2.0]), np.ones(2), [0, 10**9])
    ratio.update(np.array([6.0]), np.ones(1), [3])
    assert ratio.value() == 3.0
    assert ratio.estimate().count == 3


@every_row(
    ("numbers", "message"),
    [([0, 1], "one for each of 3 rows"), ([0, 1, -1], "≥ 0"), (None, "either all rows or none")],
)
def test_wrong_numbers_are_refused(numbers, message):
    ratio = Ratio((2,))
    ratio.update(np.ones((1, 2)), np.ones((1, 2)), [5])
    with pytest.raises(ValueError, match=message):
        ratio.update(np.ones((3, 2)), np.ones((3, 2)), numbers)


@pytest.mark.parametrize("units", MODES)
def test_rows_with_numbers_are_not_merged_with_rows_without(units):
    with_numbers, without = Ratio((1,), units), Ratio((1,), units)
    with_numbers.update(np.ones((2, 1)), np.ones((2, 1)), [0, 1])
    without.update(np.ones((2, 1)), np.ones((2, 1)))
    for first, second in ((with_numbers, without), (without, with_numbers)):
        with pytest.raises(ValueError, match="have numbers with rows that have none"):
            first.merge(second)
    with_numbers.merge(Ratio((1,), units))  # of which nothing is known
    assert with_numbers.value() == 1.0


def test_places_among_the_sampled_windows_are_their_counts():
    sampled = [window for window in range(5000) if is_sampled(window)]
    assert [sampled_before(window) for window in sampled] == list(range(len(sampled)))


# --- states ----------------------------------------------------------------------------------------------------------


def ratio(units: Units) -> Ratio:
    total, count = made_up_rows(3, 150, (2, 3))
    count[:, 1, 1] = 0  # never counted
    if units.mode == "window":
        total[4, 0, 0], count[4, 0, 0] = np.inf, 1.0
    return numbered(total, count, np.arange(150), units)


def histogram() -> Histogram:
    found = Histogram(np.linspace(0, 1, 5), 2)
    found.update(np.random.default_rng(4).random((3, 2, 9)), np.ones((3, 1, 9), dtype=bool))
    return found


def spread() -> Spread:
    found = Spread((2,))
    found.update(1e6 + np.random.default_rng(5).standard_normal((3, 2, 9)), np.ones((3, 1, 9), dtype=bool))
    return found


def tally() -> Tally:
    found = Tally((3,))
    found.update(np.array([1, 2**40, 0]))
    return found


def expansion() -> ExpansionStatistics:
    found = ExpansionStatistics(WINDOWS)
    torch.manual_seed(6)
    for number in (3, 0):
        before, after = torch.randn(2, 1, 20, 4)
        step: Any = SimpleNamespace(before=before, after=after, sublayer=SimpleNamespace(index=number))
        found.collect(step, 0, torch.arange(20), number)
        found.finish()
    return found


def examples() -> ExampleWindows:
    found = ExampleWindows()
    found.append(
        ExampleWindow("window 9 · é", {"text": ["▁a", "\ud800"]}, 2, 1, 9, {"0": {"entropy": [[np.nan, 0.5]]}})
    )
    return found


MADE = {
    "windows": lambda: ratio(WINDOWS),
    "documents": lambda: ratio(DOCUMENTS),
    "no rows": lambda: Ratio((2,)),
    "a single number": lambda: ratio_of_one(),
    "histogram": histogram,
    "spread": spread,
    "tally": tally,
    "expansion": expansion,
    "examples": examples,
    "trouble": lambda: FirstTrouble(Trouble("NaN in window 3", "NaN", "attention"), 3),
    "no trouble": FirstTrouble,
}


def ratio_of_one() -> Ratio:
    found = Ratio(())
    found.update(np.array([0.1, 0.2]), np.array([1.0, 1.0]), [1, 0])
    return found


@pytest.mark.parametrize("made", MADE)
def test_a_state_survives_a_file_to_the_last_bit(made):
    running = MADE[made]()
    assert isinstance(running, Running)
    content = packed(running.state())
    again = copy.deepcopy(running) if made in ("windows", "documents", "histogram") else MADE[made]()
    again.restore(unpacked(content, "there"))
    assert packed(again.state()) == content
    fresh = {"windows": Ratio((2, 3)), "documents": Ratio((2, 3), DOCUMENTS), "tally": Tally((3,))}.get(made)
    if fresh is not None:
        fresh.restore(unpacked(content, "there"))
        assert packed(fresh.state()) == content


@pytest.mark.parametrize("made", MADE)
def test_a_state_is_a_copy(made):
    running = MADE[made]()
    state = running.state()
    before = packed(state)
    for _ in range(2):
        running.merge(MADE[made]())
    assert packed(state) == before


def test_what_is_merged_from_states_is_what_is_merged():
    total, count = made_up_rows(8, 60)
    for units in (WINDOWS, DOCUMENTS):
        one, other = (numbered(total, count, np.arange(start, 60, 2), units) for start in (0, 1))
        add(one, unpacked(packed(other.state()), "there"))
        assert_same(one, numbered(total, count, np.arange(60), units))


def test_a_state_of_another_shape_is_refused():
    for running, other in ((Ratio((2,)), Ratio((3,))), (Tally((2,)), Tally((3,))), (Spread((2,)), Spread((3,)))):
        with pytest.raises(ValueError, match="must have shape"):
            running.restore(other.state())


def test_the_first_trouble_of_the_text_is_kept():
    later, earlier = (FirstTrouble(Trouble(f"in {window}"), window) for window in (7, 2))
    for first, second in pairwise([later, earlier, later]):
        both = copy.deepcopy(first)
        both.merge(second)
        assert both.trouble == Trouble("in 2")
    nothing = FirstTrouble()
    nothing.merge(later)
    assert nothing.trouble == Trouble("in 7")


# --- parts -----------------------------------------------------------------------------------------------------------


class _Some(RunningParts):
    NOTES = ("seconds", "reasons", "names", "number")

    def __init__(self) -> None:
        self.total = Tally(())
        self.of_each = [Tally(()), Tally(())]
        self.named = {"a": Tally(())}
        self.seconds = {"x": 1.5}
        self.reasons = {"g": "why"}
        self.names = {"n"}
        self.number = 4
        self.beside = object()


def test_parts_are_found_wherever_they_are_and_notes_are_united():
    one, other = _Some(), _Some()
    for place, part in enumerate((other.total, *other.of_each, other.named["a"]), start=1):
        part.update(np.array(place))
    other.seconds["y"] = 2.0
    other.reasons = {"g": "another", "h": "new"}
    other.names.add("m")
    state = unpacked(packed(other.state()), "there")
    add(one, state)
    one.merge(other)
    assert [int(part.counts) for part in (one.total, *one.of_each, one.named["a"])] == [2, 4, 6, 8]
    assert (one.seconds, one.number) == ({"x": 4.5, "y": 4.0}, 12)
    assert (one.reasons, one.names) == ({"g": "why", "h": "new"}, {"n", "m"})
    one.restore(state)
    assert packed(one.state()) == packed(other.state())
    assert isinstance(one.names, set)


def test_parts_of_others_are_refused():
    one, other = _Some(), _Some()
    other.more = Tally(())  # pyright: ignore[reportAttributeAccessIssue]
    for act in (one.restore, one.add):
        with pytest.raises(ValueError, match="of other statistics: more"):
            act(other.state())


# --- files -----------------------------------------------------------------------------------------------------------


def test_what_is_no_state_is_refused_in_one_sentence():
    content = packed(ratio(WINDOWS).state())
    for broken in (b"", b"x", content[:100], content[:-8], content[8:], json.dumps({"a": 1}).encode()):
        with pytest.raises(InputError, match="there") as error:
            unpacked(broken, "there")
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="format 7, and this version of massieu reads 4; begin without resume"):
        unpacked(content.replace(b'format\\":4', b'format\\":7'), "there")


@pytest.mark.medium
def test_a_bit_that_was_flipped_is_noticed():
    """Anywhere in the file. Only what means the same may pass, as a letter of an escaped character."""
    content = packed(ratio(WINDOWS).state() | {"name": "é"})
    generator = random.Random(0)
    places = [(place, generator.randrange(8)) for place in range(len(content))]
    noticed = 0
    for place, bit in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << bit
        try:
            state = unpacked(bytes(flipped), "there")
        except InputError as error:
            assert str(error).startswith("there")  # noqa: PT017
            noticed += 1
        else:
            assert packed(state) == content
    assert noticed > 0.98 * len(places)


@given(place=st.integers(0, 400), value=st.integers(0, 255))
def test_a_header_that_was_changed_is_read_or_refused(place, value):
    content = bytearray(packed(tally().state()))
    content[place % len(content)] = value
    try:
        unpacked(bytes(content), "there")
    except InputError as error:
        assert str(error).startswith("there")  # noqa: PT017


def test_textbook_and_blocks_agree_where_every_row_is_a_block():
    """The oracle of this file beside the one of test_accumulate.py."""
    total, count = made_up_rows(9, 40)
    count += 1
    np.testing.assert_allclose(by_block(total, count, 1)[1], textbook(total, count)[1], rtol=1e-12)
