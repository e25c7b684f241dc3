"""The findings: what is picked on one half of the text is printed from the other, and what may be announced."""

import numpy as np
import polars
import pytest
from tests.support.rows import every_row

from massieu.foundation.numbers import number, with_error
from massieu.probing.result.findings import _Lookup, findings
from massieu.probing.result.long_table import TableBuilder

EMPTY = TableBuilder().frame()
MANY = (30.0, 30.0)


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
    cards = findings(EMPTY, EMPTY)
    assert [card.id for card in cards] == ["sink", "sharpness", "climb", "collapse"]
    assert {card.sentence for card in cards} == {"Not measured in this run."}
    assert cards[0].caveat == "It needs the statistic weight_first."


def _table(
    name: str,
    values: list[float],
    *,
    error: float = 0.01,
    random: float | None = None,
    p: float | list[float] | None = 1e-9,
    q: float | list[float] | None = None,
    **controls: float,
) -> TableBuilder:
    """The rows of one statistic in one layer of as many heads, or of one sublayer, the same in both halves."""
    table, heads = TableBuilder(), np.array(values)
    for suffix in ("", "/first_half", "/second_half"):
        table.add("block.1", 1, f"{name}{suffix}", heads, error, 10)
    rows = {"reinitialised": random, **controls, "p_value": p, "q_value": p if q is None else q}
    for suffix, each in rows.items():
        if each is not None:
            table.add("block.1", 1, f"{name}/{suffix}", np.broadcast_to(each, heads.shape), 0.001, 10)
    return table


def _layer(name: str, value: float, **said: float | None) -> polars.DataFrame:
    """The same of one sublayer."""
    return _table(name, [value], **said).frame().with_columns(polars.lit(None, dtype=polars.Int32).alias("head"))


def test_a_sink_is_named_and_counted():
    table = _table("weight_first", [0.9, 0.2, np.nan], random=0.05)
    card = findings(table.frame(), EMPTY, MANY)[0]
    assert card.sentence.startswith(
        "The strongest, layer 1 head 0, puts 0.900 ± 0.010 there (0.900 over the whole text). 1 of 2 heads (1 head without"
    )
    assert (card.value, card.standard_error, card.count, card.heads) == (0.9, 0.01, 10, [(1, 0)])
    assert card.control is not None and "0.0500 on average (standard deviation 0.00100)" in card.control


def test_a_card_counts_all_heads_that_were_looked_at():
    """Eight heads and four cards at 5 %: the smallest p-value has to be 0.05/32 at most."""
    values = [0.9, *[0.1] * 7]
    for p, told in ((0.0015, 0.9), (0.0016, None)):
        assert findings(_table("weight_first", values, random=0.05, p=p).frame(), EMPTY, MANY)[0].value == told


def test_cards_are_announced_jointly():
    """Once one card is sure, three are left: Holm's second level is 0.05/3."""
    heads = polars.concat(
        [
            _table("weight_first", [0.9], random=0.05, p=p).frame()
            if name == "weight_first"
            else _table(name, [0.1], random=0.9, p=0.005).frame()
            for name, p in (("weight_first", 0.012), ("entropy_fraction", 0.0))
        ]
    )
    # Sharpest and flattest are two parts: 0.005 becomes 0.01; the first token's weight has 0.012 beside 0.05/3.
    assert [card.value for card in findings(heads, EMPTY, MANY)[:2]] == [0.9, 0.1]
    alone = _table("weight_first", [0.9], random=0.05, p=0.013).frame()
    assert findings(alone, EMPTY, MANY)[0].value is None


@every_row(
    "said, reason",
    [
        ({"random": None}, "it was not compared with an untrained model"),
        ({"error": np.nan}, "it comes from one window, so that it has no error"),
        ({"p": None}, "nothing is announced from fewer than 4 windows or documents"),
        ({"random": 0.86}, "it differs from its control, 0.8600 ± 0.0010, by less than 0.05"),
        ({"p": 0.2}, "this text does not tell it from heads that have learned nothing, 0.0500 on average"),
    ],
)
def test_what_is_not_announced_says_why(said, reason):
    card = findings(_table("weight_first", [0.9, 0.1], **{"random": 0.05} | said).frame(), EMPTY, MANY)[0]
    assert (card.value, card.heads) == (None, [])
    assert card.sentence.startswith(
        "Nothing to announce. Of 2 heads, the most extreme is the weight of layer 1 head 0, 0.9"
    )
    assert f". {reason[0].upper()}{reason[1:]}" in card.sentence


def test_a_change_has_to_be_clear_of_0():
    for error, told in ((9.0, -20.0), (11.0, None)):
        card = findings(EMPTY, _layer("effective_rank_change", -20.0, error=error, random=30.0), MANY)[3]
        assert card.value == told
    assert "Its error is too large to tell it from 0" in card.sentence
    # With one degree of freedom an interval is 12.7 errors wide to either side.
    assert findings(EMPTY, _layer("effective_rank_change", -20.0, error=1.7, random=30.0), (1.0, 1.0))[3].value is None


def test_a_change_smaller_than_anybody_cares_about_is_not_announced():
    card = findings(EMPTY, _layer("effective_rank_change", -0.9, random=-3.0), MANY)[3]
    assert card.value is None
    assert "differs from 0 by less than 1 direction." in card.sentence


NAME = "own_write_step_selective"


def test_a_write_has_to_sharpen_more_than_others_and_than_random_ones():
    rows = {"random": 0.02, "mismatched": 0.1}
    card = findings(_table(NAME, [0.4, 0.1, 0.1], q=[1e-3, 1.0, 1.0], **rows).frame(), EMPTY, MANY)[2]
    assert (card.value, card.heads) == (0.4, [(1, 0)])
    assert "1 of 3 heads sharpens its own attention more than other heads' writes do, 0 less" in card.sentence
    assert "Most: layer 1 head 0, 0.400 ± 0.010 nats" in card.sentence
    assert findings(_table(NAME, [0.4, 0.1], **rows | {"random": 0.38}).frame(), EMPTY, MANY)[2].value is None


def test_where_the_control_has_no_number_nothing_is_announced():
    """As of a layer of one or two heads, which has no other heads to be compared with."""
    card = findings(_table(NAME, [0.4, 0.1], p=np.nan, random=0.02, mismatched=np.nan).frame(), EMPTY, MANY)[2]
    assert card.value is None
    assert "Its layer has too few heads to compare it with" in card.sentence


def test_where_no_head_is_sharpened_the_one_that_is_flattened_is_announced():
    table = _table(NAME, [0.05, -0.8], p=[0.9, 1e-9], random=0.02, mismatched=0.0)
    card = findings(table.frame(), EMPTY, MANY)[2]
    assert (card.value, card.heads) == (-0.8, [(1, 1)])
    assert "0 of 2 heads sharpen their own attention more than other heads' writes do, 1 less" in card.sentence
    assert "Least: layer 1 head 1, −0.800 ± 0.010 nats" in card.sentence
    assert "Most" not in card.sentence


def test_a_volume_that_shrinks_is_announced_where_the_rank_is_not():
    rank = _layer("effective_rank_change", -20.0, error=20.0, random=0.0)
    card = findings(EMPTY, polars.concat([rank, _layer("log_determinant_change", -2.0, random=0.0)]), MANY)[3]
    assert (card.value, card.unit, card.statistic) == (-2.0, "nats per direction", "log_determinant_change")
    assert "Effective rank" not in card.sentence


def test_the_flattest_head_is_announced_where_the_sharpest_is_not():
    for p, shown, unit in (([1.0, 1e-9], 0.9, "of log n, the flattest head"), (1e-9, 0.004, "of log n")):
        card = findings(_table("entropy_fraction", [0.004, 0.9], p=p, random=0.5).frame(), EMPTY, MANY)[1]
        assert (card.value, card.unit) == (shown, unit)


@pytest.mark.medium
def test_models_that_have_learned_nothing_are_announced_in_a_twentieth_of_cases():
    """200 tables whose p-values are uniform, for 12 heads of all statistics: any card in at most 5 %, within five errors."""
    rng, announced = np.random.default_rng(4), 0
    for _ in range(200):
        heads = polars.concat(
            _table(
                name, list(rng.uniform(0.3, 0.9, 12)), random=0.05, p=list(rng.uniform(size=12)), mismatched=0.0
            ).frame()
            for name in ("weight_first", "entropy_fraction", NAME)
        )
        layers = _layer("effective_rank_change", -5.0, random=0.0, p=rng.uniform())
        announced += any(card.value is not None for card in findings(heads, layers, MANY))
    assert announced / 200 < 0.05 + 5 * np.sqrt(0.05 * 0.95 / 200)


# Numbers of one place each: the statistic, the whole text's number, and that of the half from which a card prints it.
_PRINTED = [
    ("weight_first", 0, 0.8125, 0.875),
    ("entropy_fraction", 1, 0.3125, 0.25),
    ("own_write_step_selective", 2, 0.5625, 0.625),
    ("update_step_selective", 2, 0.5625, 0.625),
    ("effective_rank_change", 3, -7.125, -7.625),
]


@every_row("statistic, card, whole, second", _PRINTED)
@pytest.mark.parametrize("error", [0.01, 9.0], ids=["announced", "not announced"])
def test_beside_a_number_from_half_of_the_text_stands_the_one_that_the_map_shows(error, statistic, card, whole, second):
    table = TableBuilder()
    for suffix, value in (("", whole), ("/first_half", second), ("/second_half", second)):
        table.add("block.1", 1, f"{statistic}{suffix}", np.array([value]), error, 10)
    for suffix, value in (("reinitialised", 0.0), ("mismatched", 0.0), ("random", 0.0), ("p_value", error / 1e7)):
        table.add("block.1", 1, f"{statistic}/{suffix}", np.array([value]), 0.001, 10)
    frame = table.frame()
    if card == 3:
        frame = frame.with_columns(polars.lit(None, dtype=polars.Int32).alias("head"))
    sentence = findings(*((frame, EMPTY) if card < 3 else (EMPTY, frame)), MANY)[card].sentence
    assert f"{number(whole)} over the whole text" in sentence
    assert with_error(second, error) in sentence


def test_without_halves_the_number_is_the_whole_texts_and_stands_alone():
    table = TableBuilder()
    for suffix in ("", "/first_half"):
        table.add("block.1", 1, f"weight_first{suffix}", np.array([0.9]), 0.01, 10)
    table.add("block.1", 1, "weight_first/reinitialised", np.array([0.1]), 0.01, 10)
    table.add("block.1", 1, "weight_first/p_value", np.array([1e-9]), np.nan, 10)
    assert "puts 0.900 ± 0.010 there." in findings(table.frame(), EMPTY, MANY)[0].sentence


def test_of_random_steps_the_card_says_what_was_measured():
    """No law makes them sharpen: behind a norm these, of SmolLM2, lower S on average and sharpen fewer than half."""
    table = _table(NAME, [0.9, 0.1], random=0.0, mismatched=0.0)
    table.add("block.1", 1, f"{NAME}/random", np.array([-0.012, -0.010]), 0.0, 10)
    table.add("block.1", 1, "own_write_step_sharpens/random", np.array([0.40, 0.42]), 0.0, 10)
    control = findings(table.frame(), EMPTY, MANY)[2].control
    assert control is not None
    assert "A random step of equal length: −0.011 nats; it sharpens 41 % of queries." in control
    assert "convex" not in control


def _stack(*steps: tuple[str, float, float, float]) -> polars.DataFrame:
    """A table of sublayers, each with its effective rank before and after, and the error of the change."""
    table = TableBuilder()
    for name, before, after, error in steps:
        table.add(name, 1, "effective_rank/before", np.array([before]), 0.1, 10)
        table.add(name, 1, "effective_rank/after", np.array([after]), 0.1, 10)
        for suffix in ("", "/first_half", "/second_half"):
            table.add(name, 1, f"effective_rank_change{suffix}", np.array([after - before]), error, 10)
        table.add(name, 1, "effective_rank_change/reinitialised", np.array([0.0]), 0.1, 10)
        table.add(name, 1, "effective_rank_change/p_value", np.array([1e-9]), np.nan, 10)
    return table.frame().with_columns(polars.lit(None, dtype=polars.Int32).alias("head"))


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
    sentence = findings(EMPTY, frame, MANY)[3].sentence
    assert "Effective rank falls most at feed-forward: −28.0 ± 0.5 directions" in sentence
    assert ("The step behind it, norm, gives back 29.0 ± 0.5 directions." in sentence) is told, what


def test_a_norm_in_front_of_attention_gives_nothing_back_to_the_stream():
    """As in SmolLM2, a pre-norm model: the attention step begins where the feed-forward one ended, beside the norm."""
    frame = _stack(("feed-forward", 32.0, 4.0, 0.5), ("norm", 4.0, 33.0, 0.5), ("attention", 4.0, 4.5, 0.5))
    assert "gives back" not in findings(EMPTY, frame, MANY)[3].sentence


def test_a_fall_at_the_last_step_stands_alone():
    sentence = findings(EMPTY, _stack(("feed-forward", 32.0, 4.0, 0.5)), MANY)[3].sentence
    assert sentence.endswith("(−28 over the whole text, from 32 to 4).")
