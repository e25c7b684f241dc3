"""Replaced attention in words."""

from massieu.report.replacements import replacement_table
from massieu.storage.record import ReplacementRecord


def record(value: float | None, head: int | None = None, measure: str = "loss") -> ReplacementRecord:
    site = None if head is None else "layers.1.attention"
    low, high = (None, None) if value is None else (value - 0.1, value + 0.1)
    where = {"site": site, "layer": None if head is None else 1, "head": head}
    return ReplacementRecord("off", measure, **where, value=value, standard_error=0.04, low=low, high=high, windows=1)


def test_a_row_says_rule_place_change_and_interval():
    table = replacement_table([record(0.25), record(-0.5, head=3)])
    assert table is not None and (table.unit, table.windows, table.left_out) == ("nats a token", "1 window", None)
    assert [str(row) for row in table.rows] == [
        "off, everywhere: 0.25 (95 % between 0.15 and 0.35)",
        "off, layer 1, head 3: −0.50 (95 % between −0.60 and −0.40)",
    ]


def test_of_many_those_that_change_most():
    table = replacement_table([record(value, head) for head, value in enumerate([0.1, -0.9, 0.4])], shown=2)
    assert table is not None and [row.where for row in table.rows] == ["layer 1, head 1", "layer 1, head 2"]
    assert table.left_out == "These 2 of 3 change most; run.json has all."


def test_nothing_to_say():
    assert replacement_table([]) is None
    table = replacement_table([record(None, measure="output")])
    assert table is not None and "undefined" in str(table.rows[0]) and table.unit == "of the output's spread"
