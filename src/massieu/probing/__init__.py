"""Reading a real model. What is shown here is for authors of statistics: what a function of your own is given.

`massieu.statistic` makes a statistic of a function; `massieu.Group` is the base of a measurement that is more than one.
"""

from typing import TYPE_CHECKING

from massieu.foundation.lazy_names import lazy_names

if TYPE_CHECKING:
    from massieu.probing.statistics.group import Event, RatioParts, RowPlace, rows_of
    from massieu.probing.statistics.head_window import HeadWindow, mean_over_queries
    from massieu.probing.statistics.query_reading import QueryReading
    from massieu.probing.sums.accumulate import Ratio
    from massieu.storage.record import Statistic

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

__getattr__, __dir__ = lazy_names(
    __name__,
    __all__,
    {
        "Event": "massieu.probing.statistics.group:Event",
        "HeadWindow": "massieu.probing.statistics.head_window:HeadWindow",
        "QueryReading": "massieu.probing.statistics.query_reading:QueryReading",
        "Ratio": "massieu.probing.sums.accumulate:Ratio",
        "RatioParts": "massieu.probing.statistics.group:RatioParts",
        "RowPlace": "massieu.probing.statistics.group:RowPlace",
        "Statistic": "massieu.storage.record:Statistic",
        "mean_over_queries": "massieu.probing.statistics.head_window:mean_over_queries",
        "rows_of": "massieu.probing.statistics.group:rows_of",
    },
)
