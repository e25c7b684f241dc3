"""What one run measures: the statistics that it knows, the package's and the user's own, and those of them that are wanted."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from massieu.errors import InputError
from massieu.probing.statistics.attention import REGISTER
from massieu.probing.statistics.code_digest import digest_of
from massieu.probing.statistics.group import Event, Group
from massieu.probing.statistics.own import OwnStatistic, as_own
from massieu.probing.statistics.query_means import QueryFunction
from massieu.probing.statistics.registry import (
    ATTENTION,
    GROUPS,
    NEEDS_SCORES,
    OPT_IN,
    STATISTICS,
    moments_of,
)
from massieu.storage.record import Statistic

Named = str | OwnStatistic | Callable[..., Any] | type[Group]
"""How a statistic is asked for: by the name of it or of its group, or as a function or a `Group` of the user's own."""


@dataclass(frozen=True)
class Catalogue:
    """The statistics that a run knows. What one run is given is not known to another.

    Attributes:
        own: functions of the user's own, by their names.
        groups: groups of the user's own, by their names.
    """

    own: Mapping[str, OwnStatistic] = field(default_factory=dict)
    groups: Mapping[str, type[Group]] = field(default_factory=dict)

    @property
    def statistics(self) -> Mapping[str, Statistic]:
        """All of them, by name: the package's first."""
        own = {name: each.said for name, each in self.own.items()}
        return STATISTICS | own | {each.name: each for group in self.groups.values() for each in group.statistics}

    @property
    def query_functions(self) -> dict[str, QueryFunction]:
        """The statistics of queries, by name."""
        found = {
            name: QueryFunction(measure, moments_of([name]), name in NEEDS_SCORES)
            for name, measure in REGISTER.functions.items()
        }
        for name, each in self.own.items():
            if each.of == "queries":
                control = None if each.control is None else (each.control.__name__, each.control)
                share = each.said.scale == "share"
                found[name] = QueryFunction(each.function, each.moments, each.needs_scores, control, True, share)
        return found

    def digests(self) -> dict[str, str]:
        """Of the code of all that is the user's own, by name."""
        own = {name: each.digest() for name, each in self.own.items()}
        return own | {name: digest_of([group], repr(group.statistics)) for name, group in self.groups.items()}


PACKAGE = Catalogue()
"""The package's own statistics."""


@dataclass(frozen=True, eq=False)
class Selection:
    """What a run is to measure.

    Attributes:
        names: the statistics to report.
        groups: the groups to compute.
        asked: the names that were given; None where none were.
    """

    catalogue: Catalogue
    names: frozenset[str]
    groups: frozenset[str]
    asked: list[str] | None

    @property
    def named(self) -> bool:
        """Whether they were named; else they are all that is not `OPT_IN`."""
        return self.asked is not None

    @classmethod
    def of(cls, asked: Iterable[Named] | None) -> "Selection":
        """What was asked for. A group's name selects all of it; None selects all groups that are not `OPT_IN`.

        Raises:
            InputError: a name is neither a statistic nor a group (the message lists the known ones), nothing was named, or
                two statistics have one name.
        """
        if asked is None:
            groups = frozenset(GROUPS) - OPT_IN
            names = frozenset(name for name, each in STATISTICS.items() if each.group in groups)
            return cls(PACKAGE, names, groups, None)
        if isinstance(asked, str) or not isinstance(asked, Iterable):
            raise InputError(f"statistics must be a list of names and functions, got {asked!r}")
        asked = list(asked)
        catalogue = _catalogue_of([each for each in asked if not isinstance(each, str)])
        wanted = {name for each in asked if isinstance(each, str) for name in _members(each)}
        wanted |= catalogue.own.keys() | {said.name for group in catalogue.groups.values() for said in group.statistics}
        if not wanted:
            raise InputError("no statistic was named; leave the option out to compute all of them")
        groups = frozenset(catalogue.statistics[name].group for name in wanted)
        return cls(
            catalogue, frozenset(wanted), groups, [each if isinstance(each, str) else _name_of(each) for each in asked]
        )

    def others(self) -> frozenset[str]:
        """The statistics that are not of queries."""
        known = self.catalogue.statistics
        return frozenset(name for name in self.names if known[name].group != ATTENTION)


def _members(name: str) -> list[str]:
    """The statistics of the package that have this name, or the name of whose group it is."""
    members = [each.name for each in STATISTICS.values() if name in (each.name, each.group)]
    if not members:
        known = ", ".join([*GROUPS, *STATISTICS])
        raise InputError(
            f"unknown statistic {name!r}; known are the groups and statistics: {known}; one of your own is given as a "
            "function, on the command line as FILE.py:NAME"
        )
    return members


def _catalogue_of(given: Sequence[object]) -> Catalogue:
    own: dict[str, OwnStatistic] = {}
    groups: dict[str, type[Group]] = {}
    for each in given:
        if isinstance(each, type) and issubclass(each, Group):
            _check_group(each)
            _check_free(each.name, groups)
            groups[each.name] = each
        else:
            one = as_own(each)
            _check_free(one.name, own)
            own[one.name] = one
    taken: dict[str, object] = dict(own)
    for group in groups.values():
        for said in group.statistics:
            _check_free(said.name, taken)
            taken[said.name] = said
    return Catalogue(own, groups)


def _name_of(given: Any) -> str:
    return given.name if isinstance(given, OwnStatistic | type) else as_own(given).name


def _check_free(name: str, taken: Mapping[str, object]) -> None:
    if name in taken:
        raise InputError(f"two statistics are called {name}; give one of them another name, by name=")


def _check_group(group: type[Group]) -> None:
    called = group.__name__
    if not isinstance(getattr(group, "name", None), str) or not group.name.isidentifier():
        raise InputError(f'the group {called} needs a name, one word: name = "…" in its class')
    if group.name in (*GROUPS, *STATISTICS):
        raise InputError(f"{group.name} is the name of one of the package's own; give the group {called} another one")
    if not group.statistics or not all(isinstance(each, Statistic) for each in group.statistics):
        raise InputError(f"the group {called} needs statistics, a tuple of massieu.probing.Statistic")
    if not isinstance(group.events, frozenset) or not all(isinstance(each, Event) for each in group.events):
        raise InputError(f"the group {called} needs events, a frozenset of massieu.probing.Event, got {group.events!r}")
    for each in group.statistics:
        if each.name in STATISTICS or each.name in GROUPS:
            raise InputError(f"{each.name} is the name of one of the package's own statistics; give another one")
        if each.group != group.name:
            raise InputError(f"the statistic {each.name} says that its group is {each.group!r}, and not {group.name!r}")
