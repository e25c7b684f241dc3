"""Reading a real model. What is shown here is for authors of statistics: what a function of your own is given.

`massieu.statistic` makes a statistic of a function; `massieu.Group` is the base of a measurement that is more than one.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from massieu.probing.capture.attention_call import AttentionCall
    from massieu.probing.capture.tokens import Tokens
    from massieu.probing.statistics.group import (
        CallTokens,
        Event,
        ModelReading,
        RatioParts,
        Row,
        RowPlace,
        RunningRatio,
        SampledWindow,
        rows_of,
    )
    from massieu.probing.statistics.head_window import HeadWindow, mean_over_queries
    from massieu.probing.statistics.query_reading import QueryReading
    from massieu.probing.stream.wiring import Step
    from massieu.probing.sums.accumulate import Ratio
    from massieu.report.record import Statistic

# Public name -> where it lives; loaded when it is first used.
_GROUP = "massieu.probing.statistics.group"
_EXPORTS = {
    "AttentionCall": "massieu.probing.capture.attention_call",
    "CallTokens": _GROUP,
    "Event": _GROUP,
    "HeadWindow": "massieu.probing.statistics.head_window",
    "ModelReading": _GROUP,
    "QueryReading": "massieu.probing.statistics.query_reading",
    "Ratio": "massieu.probing.sums.accumulate",
    "RatioParts": _GROUP,
    "Row": _GROUP,
    "RowPlace": _GROUP,
    "RunningRatio": _GROUP,
    "SampledWindow": _GROUP,
    "Statistic": "massieu.report.record",
    "Step": "massieu.probing.stream.wiring",
    "Tokens": "massieu.probing.capture.tokens",
    "mean_over_queries": "massieu.probing.statistics.head_window",
    "rows_of": _GROUP,
}

__all__ = [
    "AttentionCall",
    "CallTokens",
    "Event",
    "HeadWindow",
    "ModelReading",
    "QueryReading",
    "Ratio",
    "RatioParts",
    "Row",
    "RowPlace",
    "RunningRatio",
    "SampledWindow",
    "Statistic",
    "Step",
    "Tokens",
    "mean_over_queries",
    "rows_of",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'massieu.probing' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
