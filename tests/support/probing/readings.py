"""What a `Reading` holds of a group, typed, for tests that look behind the rows."""

from massieu.probing.reading.reading import Reading
from massieu.probing.statistics.attention import AttentionGroup
from massieu.probing.statistics.climb import ClimbGroup, ClimbStatistics
from massieu.probing.statistics.expansion import ExpansionGroup, ExpansionStatistics
from massieu.probing.statistics.maps import MapsGroup, MapStatistics
from massieu.probing.statistics.query_means import AttentionStatistics
from massieu.probing.statistics.registry import ATTENTION, CLIMB, EXPANSION, MAPS


def attention_of(reading: Reading) -> list[AttentionStatistics]:
    """The per-query statistics, site by site."""
    group = reading.groups[ATTENTION]
    assert isinstance(group, AttentionGroup)
    return group.sites


def climb_of(reading: Reading) -> list[ClimbStatistics]:
    """The climb, site by site."""
    group = reading.groups[CLIMB]
    assert isinstance(group, ClimbGroup)
    return group.sites


def maps_of(reading: Reading) -> dict[int, MapStatistics]:
    """The maps by the sites' numbers, where there are any."""
    group = reading.groups[MAPS]
    assert isinstance(group, MapsGroup)
    return group.by_site


def expansion_of(reading: Reading) -> ExpansionStatistics:
    """The clouds along the stream."""
    group = reading.groups[EXPANSION]
    assert isinstance(group, ExpansionGroup)
    return group.clouds
