"""The findings: what is picked on one half of the text is printed from the other."""

import numpy as np

from massieu.probing.findings import _Lookup, findings
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
    """400 families of 50 heads of value 0: the largest is about 2.25 on its own half and 0 on the other."""
    halves = np.random.default_rng(2).standard_normal((400, 2, 50))
    found = [_lookup(first, second, first).extreme("entropy", largest=True) for first, second in halves]
    reported = [best[1][0] for best in found if best is not None]
    assert len(reported) == 400
    assert abs(np.mean(reported)) < 5 / np.sqrt(400)
    assert halves[:, 0].max(1).mean() > 2


def test_without_its_statistic_a_finding_says_what_it_needs():
    empty = TableBuilder().frame()
    cards = findings(empty, empty)
    assert [card.id for card in cards] == ["sink", "sharpness", "climb", "collapse"]
    assert {card.sentence for card in cards} == {"No number in this run."}
    assert cards[0].caveat == "Needs the statistic weight_first."


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
    assert "The strongest, layer 1 head 0, puts 1.000 ± 0.010 there." in card.sentence
    assert (card.value, card.standard_error, card.count, card.heads) == (1.0, 0.01, 10, [(1, 0)])
    assert card.control == "No control."
