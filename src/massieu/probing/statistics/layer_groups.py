"""What the groups about layers have in common: their rows of the layers' table, each beside a control of its own."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from massieu.probing.accumulate import Ratio
from massieu.probing.statistics.registry import STATISTICS

Row = tuple[str, float, float, float]
"""Name, value, standard error and count."""


class LayerGroup(Protocol):
    """Running results of a group whose statistics are of sublayers."""

    def rows(self, index: int, part: str) -> Iterator[Row]:
        """The rows of a sublayer, of all (``estimate``) or half the text (``first_half``, ``second_half``)."""
        ...


def rows_beside_control(ratio: Ratio, names: Sequence[str], tokens: float, part: str) -> Iterator[Row]:
    """Rows of sums of shape (statistics, 2), own and control; of half the text without the controls.

    Where the control is the re-initialised model, its rows are of another reading.
    """
    found = getattr(ratio, part)()
    for place, name in enumerate(names):
        beside = has_own_control(name) and part == "estimate"
        for which, suffix in enumerate(("", f"/{STATISTICS[name].control}") if beside else ("",)):
            if found.count[place, which] > 0:
                cell = float(found.value[place, which]), float(found.standard_error[place, which])
                yield (name + suffix, *cell, tokens)


def has_own_control(name: str) -> bool:
    """Whether a statistic is measured on a control of its own, which is not the re-initialised model."""
    return STATISTICS[name].control not in (None, "reinitialised")
