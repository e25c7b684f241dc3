"""What a monitor measures of each attention call: quantities of a head, which are statistics of the probe."""

from collections.abc import Iterable
from dataclasses import replace

from massieu.errors import InputError
from massieu.probing.monitor.stream_numbers import STREAM
from massieu.probing.statistics import attention as of_query
from massieu.probing.statistics.catalogue import Named, Selection
from massieu.probing.statistics.query_means import Functions, QueryFunction
from massieu.probing.statistics.query_reading import QueryMeasure
from massieu.probing.statistics.registry import moments_of

QUANTITIES: dict[str, QueryMeasure] = {
    "selective_log_partition": of_query.selective_log_partition,
    "largest_logit": of_query.largest_score,
    "largest_logit_above_mean": of_query.largest_score_above_mean,
    "entropy": of_query.entropy,
    "entropy_fraction": of_query.entropy_fraction,
    "weight_first": of_query.weight_first,
    "sink_weight": of_query.sink_weight,
}
"""Each quantity's function, a statistic of the probe. A head's number is its mean over the queries, but for `LARGEST`."""
LARGEST = "largest_logit"
"""Of this quantity a head's number is the largest over its queries, those that see a single key too."""
NEED_SCORES = ("selective_log_partition", "largest_logit", "largest_logit_above_mean")
"""They have no meaning where scores are known, but not apart from log-weights."""


def quantities(statistics: Iterable[Named] | None) -> Functions:
    """What is measured of each attention call, by name: `QUANTITIES`, and the statistics for which the user asks.

    Args:
        statistics: names of the attention's statistics, and functions of the user's own.

    Raises:
        InputError: one is no statistic of queries.
    """
    functions = {
        name: QueryFunction(measure, moments_of([measure.__name__]), name in NEED_SCORES)
        for name, measure in QUANTITIES.items()
    }
    if statistics is None:
        return functions
    selection = Selection.of(statistics)
    others = sorted(selection.others())
    if others:
        raise InputError(
            f"a monitor measures statistics of queries, and {', '.join(others)} is none; massieu.probe measures it"
        )
    taken_names = sorted(selection.catalogue.own.keys() & {*QUANTITIES, *STREAM})
    if taken_names:
        raise InputError(
            f"{taken_names[0]} is the name of one of the monitor's own quantities; give another one by name="
        )
    wanted = selection.names - set(functions)
    for name, function in selection.catalogue.query_functions.items():
        if name in wanted:
            functions[name] = replace(function, control=None)
    return functions
