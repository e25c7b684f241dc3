"""What one run measures: the statistics that it knows, the package's and the user's own, and the selected ones."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from massieu.errors import InputError
from massieu.probing.statistics.attention import REGISTER
from massieu.probing.statistics.code_digest import digest_of
from massieu.probing.statistics.group import Event, Group
from massieu.probing.statistics.own import OwnStatistic, as_own
from massieu.probing.statistics.query_means import Functions, QueryFunction
from massieu.probing.statistics.registry import (
    ATTENTION,
    GROUPS,
    MOMENTS,
    NEEDS_SCORES,
    OPT_IN,
    STATISTICS,
)
from massieu.storage.record import Statistic

Named = str | OwnStatistic | Callable[..., Any] | type[Group]
"""How a user names statistics: by the name of one or of its group, or as a function or a `Group` of their own."""


@dataclass(frozen=True)
class Catalogue:
    """The statistics that a run knows. Those of the user's own are known to the run that they were passed to alone.

    Attributes:
        own: functions of the user's own, by their names.
        groups: groups of the user's own, by their names.
    """

    own: Mapping[str, OwnStatistic] = field(default_factory=dict)
    groups: Mapping[str, type[Group]] = field(default_factory=dict)

    @property
    def statistics(self) -> Mapping[str, Statistic]:
        """All statistics, by name: the package's first."""
        if not self.own and not self.groups:
            return STATISTICS
        own = {name: statistic.metadata for name, statistic in self.own.items()}
        of_groups = {statistic.name: statistic for group in self.groups.values() for statistic in group.statistics}
        return STATISTICS | own | of_groups

    @property
    def query_functions(self) -> Functions:
        """The statistics of queries, by name."""
        functions = {
            name: QueryFunction(measure, MOMENTS[name], name in NEEDS_SCORES)
            for name, measure in REGISTER.functions.items()
        }
        for name, statistic in self.own.items():
            if statistic.of == "queries":
                control = None if statistic.control is None else (statistic.control.__name__, statistic.control)
                functions[name] = QueryFunction(
                    statistic.function,
                    statistic.moments,
                    statistic.needs_scores,
                    control,
                    own=True,
                    share=statistic.metadata.scale == "share",
                )
        return functions

    def digests(self) -> dict[str, str]:
        """Digests of the code of all statistics and groups of the user's own, by name."""
        own = {name: statistic.digest() for name, statistic in self.own.items()}
        return own | {name: digest_of([group], repr(group.statistics)) for name, group in self.groups.items()}


PACKAGE = Catalogue()
"""The package's own statistics."""


@dataclass(frozen=True, eq=False)
class Selection:
    """What a run is to measure.

    Attributes:
        names: the statistics to report.
        groups: the groups to compute.
        requested: the names that the user gave; None if the user named none.
    """

    catalogue: Catalogue
    names: frozenset[str]
    groups: frozenset[str]
    requested: list[str] | None

    @property
    def named(self) -> bool:
        """Whether the user named statistics; else the selection is every group that is not `OPT_IN`."""
        return self.requested is not None

    @classmethod
    def of(cls, requested: Iterable[Named] | None) -> "Selection":
        """Select statistics. A group's name selects all of it; None selects every group that is not `OPT_IN`.

        Raises:
            InputError: a name is neither a statistic nor a group (the message lists the known ones), nothing was named, or
                two statistics have one name.
        """
        if requested is None:
            groups = frozenset(GROUPS) - OPT_IN
            names = frozenset(name for name, statistic in STATISTICS.items() if statistic.group in groups)
            return cls(PACKAGE, names, groups, None)
        if isinstance(requested, str) or not isinstance(requested, Iterable):
            raise InputError(f"statistics must be a list of names and functions, got {requested!r}")
        requested = list(requested)
        catalogue = _catalogue_of([item for item in requested if not isinstance(item, str)])
        selected = {name for item in requested if isinstance(item, str) for name in _members(item)}
        selected |= catalogue.own.keys()
        selected |= {statistic.name for group in catalogue.groups.values() for statistic in group.statistics}
        if not selected:
            raise InputError("no statistic was named; leave the option out to compute all of them")
        groups = frozenset(catalogue.statistics[name].group for name in selected)
        names_requested = [item if isinstance(item, str) else _name_of(item) for item in requested]
        return cls(catalogue, frozenset(selected), groups, names_requested)

    def others(self) -> frozenset[str]:
        """The statistics that are not of queries."""
        statistics = self.catalogue.statistics
        return frozenset(name for name in self.names if statistics[name].group != ATTENTION)


def _members(name: str) -> list[str]:
    """The package's statistics with this name, or of the group with this name."""
    members = [statistic.name for statistic in STATISTICS.values() if name in (statistic.name, statistic.group)]
    if not members:
        near = get_close_matches(name, [*GROUPS, *STATISTICS], n=3)
        suggestion = f"did you mean {' or '.join(near)}? " if near else ""
        raise InputError(
            f"unknown statistic {name!r}; {suggestion}'massieu statistics' lists them, and one of your own is given as a "
            "function, on the command line as FILE.py:NAME"
        )
    return members


def _catalogue_of(items: Sequence[object]) -> Catalogue:
    """The catalogue with these functions and groups of the user's own."""
    if not items:
        return PACKAGE
    own: dict[str, OwnStatistic] = {}
    groups: dict[str, type[Group]] = {}
    for item in items:
        if isinstance(item, type) and issubclass(item, Group):
            _check_group(item)
            _check_free(item.name, groups)
            groups[item.name] = item
        else:
            own_statistic = as_own(item)
            _check_free(own_statistic.name, own)
            own[own_statistic.name] = own_statistic
    used: dict[str, object] = dict(own)
    for group in groups.values():
        for statistic in group.statistics:
            _check_free(statistic.name, used)
            used[statistic.name] = statistic
    return Catalogue(own, groups)


def _name_of(item: Any) -> str:
    return item.name if isinstance(item, OwnStatistic | type) else as_own(item).name


def _check_free(name: str, used: Mapping[str, object]) -> None:
    if name in used:
        raise InputError(f"two statistics are called {name}; give one of them another name, by name=")


def _check_group(group: type[Group]) -> None:
    """Check the class attributes of a group of the user's own."""
    class_name = group.__name__
    if not isinstance(getattr(group, "name", None), str) or not group.name.isidentifier():
        raise InputError(f'the group {class_name} needs a name, one word: name = "…" in its class')
    if group.name in (*GROUPS, *STATISTICS):
        raise InputError(
            f"{group.name} is the name of one of the package's own; give the group {class_name} another one"
        )
    if not group.statistics or not all(isinstance(statistic, Statistic) for statistic in group.statistics):
        raise InputError(f"the group {class_name} needs statistics, a tuple of massieu.probing.Statistic")
    if not isinstance(group.events, frozenset) or not all(isinstance(event, Event) for event in group.events):
        raise InputError(
            f"the group {class_name} needs events, a frozenset of massieu.probing.Event, got {group.events!r}"
        )
    for statistic in group.statistics:
        name = statistic.name
        if name in STATISTICS or name in GROUPS:
            raise InputError(f"{name} is the name of one of the package's own statistics; give another one")
        if statistic.group != group.name:
            raise InputError(f"the statistic {name} says that its group is {statistic.group!r}, and not {group.name!r}")
