"""The changes if attention is replaced, in words: for the page and the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass

from massieu.foundation.numbers import counted, number
from massieu.storage.record import ReplacementRecord

MEASURES = {
    "loss": (
        "nats a token",
        "The change of the next-token loss, in nats per token; above 0 the model predicts worse.",
    ),
    "output": (
        "of the output's spread",
        "How far the last hidden states move: ‖Δ‖² relative to their mean squared distance from their window's mean.",
    ),
}
SHOWN = 40


@dataclass(frozen=True)
class ReplacementRow:
    """One replacement: the rule, its place, the change and its interval."""

    rule: str
    where: str
    value: str
    low: str
    high: str

    def __str__(self) -> str:
        return f"{self.rule}, {self.where}: {self.value} (95 % between {self.low} and {self.high})"


@dataclass(frozen=True)
class ReplacementTable:
    """Replacements with the words around them. Of many, those with the largest changes come first."""

    rows: list[ReplacementRow]
    unit: str
    measure: str
    windows: str
    left_out: str | None


def replacement_table(records: Sequence[ReplacementRecord], shown: int = SHOWN) -> ReplacementTable | None:
    """The rows to show; None if nothing was replaced."""
    if not records:
        return None
    chosen = list(records)
    if len(chosen) > shown:
        chosen = sorted(chosen, key=lambda record: -abs(record.value or 0.0))[:shown]
    unit, measure = MEASURES.get(records[0].measure, (records[0].measure, ""))
    left_out = None
    if len(records) > shown:
        left_out = f"These {shown} of {len(records)} change most; run.json has all."
    rows = [_row(record) for record in chosen]
    return ReplacementTable(rows, unit, measure, counted(records[0].windows, "window"), left_out)


def _row(record: ReplacementRecord) -> ReplacementRow:
    where = "everywhere"
    if record.site is not None:
        where = f"layer {record.layer}" + (", all heads" if record.head is None else f", head {record.head}")
    error = record.standard_error
    return ReplacementRow(
        record.rule,
        where,
        value=number(record.value, error),
        low=number(record.low, error),
        high=number(record.high, error),
    )
