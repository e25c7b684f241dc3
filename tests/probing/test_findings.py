"""The findings: what is picked on one half of the text is printed from the other."""

import numpy as np
import pytest
from tests.support.rows import every_row

from massieu.foundation.numbers import number, with_error
from massieu.probing.findings import _Lookup, findings, stands_out
from massieu.probing.long_table import TableBuilder


def _lookup(first: np.ndarray, second: np.ndarray | None, whole: np.ndarray) -> _Lookup:
    table = TableBuilder()
    table.add("site", 0, "entropy", whole, 0.1, 7)
    table.add("site", 0, "entropy/first_half", first, 0.1, 4)
    if second is not None:
        table.add("site", 0, "entropy/second_half", second, 0.2, 3)
    return _Lookup(table.frame())


def test_a_head_is_picked_on_the_first_half_and_reported_from_the_second():
    first, second, whole = np.array([3.0, np.nan, 5.0, 5.0, -1.0]), np.array([1.0, 2.0, 30.0, 4.0, 6.0]), np.zeros(5)
    heads = _lookup(first, second, whole)
    assert heads.extreme("entropy", largest=True) == (("site", 2), (30.0, 0.2, 3))
    assert heads.extreme("entropy", largest=False) == (("site", 4), (6.0, 0.2, 3))
    assert heads.extreme("log_partition", largest=True) is None
    assert _lookup(first, None, whole + 9).extreme("entropy", largest=True) == (("site", 2), (9.0, 0.1, 7))


def test_the_winners_curse_is_lifted():
    """100 families of 50 heads of value 0: the largest is about 2.25 on its own half and 0 on the other."""
    halves = np.random.default_rng(2).standard_normal((100, 2, 50))
    found = [_lookup(first, second, first).extreme("entropy", largest=True) for first, second in halves]
    reported = [best[1][0] for best in found if best is not None]
    assert len(reported) == 100
    assert abs(np.mean(reported)) < 5 / np.sqrt(100)
    assert halves[:, 0].max(1).mean() > 2


def test_without_its_statistic_a_finding_says_what_it_needs():
    empty = TableBuilder().frame()
    cards = findings(empty, empty)
    assert [card.id for card in cards] == ["sink", "sharpness", "climb", "collapse"]
    assert {card.sentence for card in cards} == {"Not measured in this run."}
    assert cards[0].caveat == "It needs the statistic weight_first."


def test_a_sink_is_counted_and_named():
    table = TableBuilder()
    for suffix, weight in (
        ("", [0.9, 0.2, np.nan]),
        ("/first_half", [0.8, 0.3, np.nan]),
        ("/second_half", [1.0, 0.1, np.nan]),
    ):
        table.add("block.1", 1, f"weight_first{suffix}", np.array(weight), 0.01, 10)
    card = findings(table.frame(), TableBuilder().frame())[0]
    said = "1 of 2 heads (1 head without a number) put more than half of their attention on the first token."
    assert card.sentence.startswith(said)
    assert "The strongest, layer 1 head 0, puts 1.000 ± 0.010 there (0.900 over the whole text)." in card.sentence
    assert (card.value, card.standard_error, card.count, card.heads) == (1.0, 0.01, 10, [(1, 0)])
    assert card.control == "No control."


def _change(first: float, second: float, error: float, fresh: float | None = None, statistic: str = "entropy"):
    """A table of one sublayer or head whose number, from the second half, is `second` ± `error`."""
    table = TableBuilder()
    for suffix, value in (("", second), ("/first_half", first), ("/second_half", second)):
        table.add("block.1", 1, f"{statistic}{suffix}", np.array([value]), error, 10)
    if fresh is not None:
        table.add("block.1", 1, f"{statistic}/reinitialised", np.array([fresh]), 0.0, 3)
    return table.frame()


@every_row(
    "value, error, null, null_error, told",
    [
        (2.01, 1.0, 0.0, 0.0, True),
        (1.99, 1.0, 0.0, 0.0, False),
        (-2.01, 1.0, 0.0, 0.0, True),
        (-20.0, 20.0, 0.0, 0.0, False),
        (5.0, 1.0, 4.0, 0.0, False),
        (5.0, 1.0, 0.0, 2.0, True),
        (5.0, 1.0, 0.0, 3.0, False),
        (5.0, 0.0, 5.0, 0.0, False),
        (5.0, np.nan, 0.0, 0.0, False),
        (np.nan, 1.0, 0.0, 0.0, False),
        (np.inf, 1.0, 0.0, 0.0, False),
        (5.0, 1.0, np.nan, np.nan, True),
        (5.0, 1.0, 0.0, np.nan, True),
    ],
)
def test_a_number_stands_out_beyond_two_errors_of_the_difference(value, error, null, null_error, told):
    assert stands_out((value, error, 7), (null, null_error, 3)) is told


def test_a_change_within_its_own_error_is_not_announced():
    card = findings(TableBuilder().frame(), _change(-30.0, -20.0, 20.0, statistic="effective_rank_change"))[3]
    assert (card.value, card.standard_error, card.heads) == (None, None, [])
    assert "Nothing significant." in card.sentence
    assert "−20 ± 20 (−20 over the whole text): it is within two standard errors of 0." in card.sentence
    card = findings(TableBuilder().frame(), _change(-30.0, -20.0, 9.0, statistic="effective_rank_change"))[3]
    assert (card.value, card.standard_error) == (-20.0, 9.0)


def test_a_change_that_the_fresh_copy_has_too_is_not_announced():
    told = [
        findings(TableBuilder().frame(), _change(-30.0, -20.0, 5.0, fresh, "effective_rank_change"))[3].value
        for fresh in (-11.0, -9.0)
    ]
    assert told == [None, -20.0]


def test_a_sink_or_a_sharp_head_like_that_of_the_fresh_copy_is_not_announced():
    for place, name, near, far in ((0, "weight_first", 0.41, 0.2), (1, "entropy_fraction", 0.48, 0.9)):
        values = [
            findings(_change(0.4, 0.45, 0.05, fresh, name), TableBuilder().frame())[place].value
            for fresh in (near, far)
        ]
        assert values == [None, 0.45]
    card = findings(_change(0.4, 0.45, 0.05, 0.41, "weight_first"), TableBuilder().frame())[0]
    assert card.sentence.endswith("it is within two standard errors of its control, 0.410.")


def test_without_a_standard_error_nothing_is_announced():
    card = findings(_change(0.4, 0.45, np.nan, 0.1, "weight_first"), TableBuilder().frame())[0]
    assert card.value is None
    assert "its standard error is not known" in card.sentence


def test_a_head_that_its_write_does_not_sharpen_beyond_the_error_is_not_announced():
    def card(error: float, q_value: float | None = None):
        table = TableBuilder()
        name = "own_write_step_selective"
        for suffix, values in (("", [0.3, 0.1]), ("/first_half", [0.4, 0.1]), ("/second_half", [0.2, 0.1])):
            table.add("block.1", 1, f"{name}{suffix}", np.array(values), error, 10)
        table.add("block.1", 1, f"{name}/mismatched", np.array([0.1, 0.1]), 0.0, 10)
        if q_value is not None:
            table.add("block.1", 1, f"{name}/q_value", np.array([q_value, 1.0]), np.nan, 10)
        return findings(table.frame(), TableBuilder().frame())[2]

    assert card(0.049).value == 0.2
    assert card(0.051).value is None
    assert (
        "layer 1 head 0, 0.20 ± 0.05 (0.300 over the whole text): it is within two standard errors of its control"
        in card(0.051).sentence
    )
    # Where there is a test, paired by window, it decides in place of the two errors.
    assert card(0.051, 0.04).value == 0.2
    assert card(0.049, 0.06).value is None
    assert "its own test finds no difference from its control" in card(0.049, 0.06).sentence
    assert card(0.11, 0.04).value is None


def test_where_no_head_is_sharpened_the_one_that_is_flattened_is_announced():
    table, name = TableBuilder(), "own_write_step_selective"
    for suffix, values in (("", [0.1, -0.8]), ("/first_half", [0.1, -0.7]), ("/second_half", [0.1, -0.9])):
        table.add("block.1", 1, f"{name}{suffix}", np.array(values), 0.1, 10)
    table.add("block.1", 1, f"{name}/mismatched", np.array([0.0, 0.0]), 0.0, 10)
    table.add("block.1", 1, f"{name}/q_value", np.array([0.9, 0.001]), np.nan, 10)
    card = findings(table.frame(), TableBuilder().frame())[2]
    assert (card.value, card.heads) == (-0.9, [(1, 1)])
    assert "0 of 2 heads sharpen their own attention more than other heads' writes do, 1 less" in card.sentence
    assert "Least: layer 1 head 1, −0.90 ± 0.10 nats" in card.sentence
    assert "Most" not in card.sentence


def test_a_volume_that_shrinks_is_announced_where_the_rank_is_not():
    def card(volume_error: float):
        table = TableBuilder()
        for name, value, error in (
            ("effective_rank_change", -20.0, 20.0),
            ("log_determinant_change", -2.0, volume_error),
        ):
            for suffix in ("", "/first_half", "/second_half"):
                table.add("block.1", 1, f"{name}{suffix}", np.array([value]), error, 10)
        return findings(TableBuilder().frame(), table.frame())[3]

    assert (card(0.1).value, card(0.1).unit, card(0.1).statistic) == (
        -2.0,
        "nats per direction",
        "log_determinant_change",
    )
    assert "Effective rank" not in card(0.1).sentence
    assert card(1.1).value is None


def test_next_to_no_entropy_leaves_the_number_to_the_flattest_head():
    for error, shown, unit in ((0.004, 0.9, "of log n, the flattest head"), (0.001, 0.004, "of log n")):
        table = TableBuilder()
        for suffix in ("", "/first_half", "/second_half"):
            table.add("block.1", 1, f"entropy_fraction{suffix}", np.array([0.004, 0.9]), error, 10)
        card = findings(table.frame(), TableBuilder().frame())[1]
        assert (card.value, card.unit) == (shown, unit)
        assert "The sharpest head, layer 1 head 0, has 0.004" in card.sentence


# Numbers of one place each: the statistic, the whole text's number, and that of the half from which a card prints it.
_PRINTED = [
    ("weight_first", 0, 0.8125, 0.875),
    ("entropy_fraction", 1, 0.3125, 0.25),
    ("own_write_step_selective", 2, 0.5625, 0.625),
    ("update_step_selective", 2, 0.5625, 0.625),
    ("effective_rank_change", 3, -7.125, -7.625),
    ("log_determinant_change", 3, -1.125, -1.625),
]


@every_row("statistic, card, whole, second", _PRINTED)
@pytest.mark.parametrize("error", [0.01, 9.0], ids=["announced", "not announced"])
def test_beside_a_number_from_half_of_the_text_stands_the_one_that_the_map_shows(error, statistic, card, whole, second):
    table = TableBuilder()
    for suffix, value in (("", whole), ("/first_half", second), ("/second_half", second)):
        table.add("block.1", 1, f"{statistic}{suffix}", np.array([value]), error, 10)
        if statistic == "log_determinant_change":
            table.add("block.1", 1, f"effective_rank_change{suffix}", np.array([9 * value]), 99.0, 10)
    heads, layers = (table.frame(), TableBuilder().frame()) if card < 3 else (TableBuilder().frame(), table.frame())
    sentence = findings(heads, layers)[card].sentence
    if error < 1 or statistic != "log_determinant_change":
        assert f"{number(whole)} over the whole text" in sentence
    if error < 1:
        assert with_error(second, error) in sentence


def test_without_halves_the_number_is_the_whole_texts_and_stands_alone():
    table = TableBuilder()
    for suffix in ("", "/first_half"):
        table.add("block.1", 1, f"weight_first{suffix}", np.array([0.9]), 0.01, 10)
    assert "puts 0.900 ± 0.010 there." in findings(table.frame(), TableBuilder().frame())[0].sentence


def test_of_random_steps_the_card_says_what_was_measured():
    """No law makes them sharpen: behind a norm these, of SmolLM2, lower S on average and sharpen fewer than half."""
    table, name = TableBuilder(), "own_write_step_selective"
    for suffix in ("", "/first_half", "/second_half"):
        table.add("block.1", 1, f"{name}{suffix}", np.array([0.9, 0.1]), 0.01, 10)
    table.add("block.1", 1, f"{name}/mismatched", np.array([0.0, 0.0]), 0.0, 10)
    table.add("block.1", 1, f"{name}/random", np.array([-0.012, -0.010]), 0.0, 10)
    table.add("block.1", 1, "own_write_step_sharpens/random", np.array([0.40, 0.42]), 0.0, 10)
    control = findings(table.frame(), TableBuilder().frame())[2].control
    assert control is not None
    assert control.endswith("A random step of equal length: −0.011 nats; it sharpens 41 % of queries.")
    assert "convex" not in control


def _stack(*steps: tuple[str, float, float, float]):
    """A table of sublayers, each with its effective rank before and after, and the error of the change."""
    table = TableBuilder()
    for name, before, after, error in steps:
        table.add(name, 1, "effective_rank/before", np.array([before]), 0.1, 10)
        table.add(name, 1, "effective_rank/after", np.array([after]), 0.1, 10)
        for suffix in ("", "/first_half", "/second_half"):
            table.add(name, 1, f"effective_rank_change{suffix}", np.array([after - before]), error, 10)
    return table.frame()


@every_row(
    "what, following, told",
    [
        ("a norm restores the directions", ("norm", 4.0, 33.0, 0.5), True),
        ("it restores fewer than half", ("norm", 4.0, 18.0, 0.5), False),
        ("within its error", ("norm", 4.0, 33.0, 15.0), False),
        ("it takes more away", ("norm", 4.0, 3.0, 0.5), False),
        ("another stream begins", ("norm", 5.0, 33.0, 0.5), False),
    ],
)
def test_a_fall_that_the_step_behind_it_takes_back_is_told_with_it(what, following, told):
    """As the LayerNorm behind a feed-forward layer of MiniLM does, a post-norm model."""
    frame = _stack(("attention", 33.0, 32.0, 0.5), ("feed-forward", 32.0, 4.0, 0.5), following)
    sentence = findings(TableBuilder().frame(), frame)[3].sentence
    assert "Effective rank falls most at feed-forward: −28.0 ± 0.5 directions" in sentence
    assert ("The step behind it, norm, gives back 29.0 ± 0.5 directions." in sentence) is told, what


def test_a_norm_in_front_of_attention_gives_nothing_back_to_the_stream():
    """As in SmolLM2, a pre-norm model: the attention step begins where the feed-forward one ended, beside the norm."""
    frame = _stack(("feed-forward", 32.0, 4.0, 0.5), ("norm", 4.0, 33.0, 0.5), ("attention", 4.0, 4.5, 0.5))
    assert "gives back" not in findings(TableBuilder().frame(), frame)[3].sentence


def test_a_fall_at_the_last_step_stands_alone():
    sentence = findings(TableBuilder().frame(), _stack(("feed-forward", 32.0, 4.0, 0.5)))[3].sentence
    assert sentence.endswith("(−28 over the whole text, from 32 to 4).")
