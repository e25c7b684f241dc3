"""Every statistic of the probe: name, formula, claim, which question it answers, what it does not say, what it costs.

What is said of each is in ``statistics.toml`` beside this file. The command ``massieu statistics`` prints that table and the
page's methods section is made from it. Statistics of one group are computed together; naming any of them switches the
group on.
"""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from massieu.errors import InputError

GROUPS = ATTENTION, VALUES, CLIMB, MAPS, EXPANSION = ("attention", "values", "climb", "maps", "expansion")
_TABLE: dict[str, Any] = tomllib.loads(
    (files("massieu.probing.statistics") / "statistics.toml").read_text(encoding="utf-8")
)


@dataclass(frozen=True)
class Statistic:
    """One number the probe reports, and all that a reader must know about it.

    Attributes:
        headline: may be compared between heads; invariant under a constant added to a head's keys.
        gauge_dependent: changes with that constant, which softmax cannot see; never a headline.
        signed: zero or the control is the natural centre of its scale.
        control: the control its map is compared with (a qualifier of the result table), or None.
    """

    name: str
    title: str
    formula: str
    claim: str
    paper: str
    group: str
    question: str
    caveat: str
    unit: str = ""
    scope: str = "head"
    headline: bool = False
    gauge_dependent: bool = False
    signed: bool = False
    control: str | None = "reinitialised"

    @property
    def cost(self) -> str:
        return _TABLE["costs"][self.group]


def _statistics() -> Iterator[Statistic]:
    """Those of the table, in its order; those of the climb once for each mover."""
    for group in GROUPS:
        for mover in _TABLE["movers"] if group == CLIMB else [{}]:
            words = mover | {"step": mover.get("who", "").lower()}
            for name, entry in _TABLE[group].items():
                said = {"name": name, "group": group} | entry
                if mover:
                    said = {
                        key: text.format_map(words) if isinstance(text, str) else text for key, text in said.items()
                    }
                said["paper"] = _TABLE["papers"][said["paper"]]
                said["caveat"] = _TABLE["caveats"].get(said["caveat"], said["caveat"])
                yield Statistic(**said | ({"control": None} if said.get("control") == "none" else {}))


STATISTICS: dict[str, Statistic] = {statistic.name: statistic for statistic in _statistics()}


def select(names: Sequence[str] | None) -> tuple[frozenset[str], frozenset[str]]:
    """The statistics to report and the groups to compute. None selects everything; a group's name selects the group.

    Raises:
        InputError: a name is neither a statistic nor a group; the message lists the known ones.
    """
    if names is None:
        return frozenset(STATISTICS), frozenset(GROUPS)
    wanted: set[str] = set()
    for name in names:
        members = [s.name for s in STATISTICS.values() if name in (s.name, s.group)]
        if not members:
            known = ", ".join([*GROUPS, *STATISTICS])
            raise InputError(f"unknown statistic {name!r}; known are the groups and statistics: {known}")
        wanted.update(members)
    if not wanted:
        raise InputError("no statistic was named; leave the option out to compute all of them")
    return frozenset(wanted), frozenset(STATISTICS[name].group for name in wanted)
