"""Reading a real model. What is shown here is for authors of statistics: what a function of your own is given.

`massieu.statistic` makes a statistic of a function; `massieu.Group` is the base of a measurement that is more than one.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from massieu.probing.statistics.group import Event, RatioParts, RowPlace, rows_of
    from massieu.probing.statistics.head_window import HeadWindow, mean_over_queries
    from massieu.probing.statistics.query_reading import QueryReading
    from massieu.probing.sums.accumulate import Ratio
    from massieu.report.record import Statistic

# Public name -> where it lives; loaded when it is first used.
_GROUP = "massieu.probing.statistics.group"
_EXPORTS = {
    "Event": _GROUP,
    "HeadWindow": "massieu.probing.statistics.head_window",
    "QueryReading": "massieu.probing.statistics.query_reading",
    "Ratio": "massieu.probing.sums.accumulate",
    "RatioParts": _GROUP,
    "RowPlace": _GROUP,
    "Statistic": "massieu.report.record",
    "mean_over_queries": "massieu.probing.statistics.head_window",
    "rows_of": _GROUP,
}

__all__ = [
    "Event",
    "HeadWindow",
    "QueryReading",
    "Ratio",
    "RatioParts",
    "RowPlace",
    "Statistic",
    "mean_over_queries",
    "rows_of",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'massieu.probing' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
