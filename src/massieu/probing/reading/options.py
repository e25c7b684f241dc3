"""What a reading measures, and how much of the text it samples."""

from dataclasses import dataclass

from massieu.probing.replaced.replacement import Replacement
from massieu.probing.statistics.catalogue import PACKAGE, Catalogue
from massieu.probing.sums.units import Units


@dataclass(frozen=True)
class Options:
    """What a reading measures and how much of the text it samples.

    Attributes:
        groups: groups of statistics to compute.
        max_length: length of a full window, for the position bins.
        query_sample: at most this many queries per sequence for the per-query statistics; None is all.
        climb_queries: sampled queries per sampled window.
        statistics: names of the statistics to compute; None is all of them.
        per_token: statistics whose value at every query is written down.
        replace: what is to be put in the place of attention, beside the reading.
        new_tokens: the rows are prompts, and the model writes at most so many tokens after each, whose queries are measured.
        examples: whether example windows are kept.
        draws: so many re-initialised models are drawn; 0 is no control.
        catalogue: all statistics that the run knows.
    """

    groups: frozenset[str]
    units: Units
    max_length: int
    query_sample: int | None = None
    climb_queries: int = 64
    seed: int = 0
    statistics: frozenset[str] | None = None
    examples: bool = True
    new_tokens: int | None = None
    replace: tuple[Replacement, ...] = ()
    per_token: tuple[str, ...] = ()
    draws: int = 8
    catalogue: Catalogue = PACKAGE
