"""The rooms of the package: their wings, which room may import which, and what each file imports."""

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "massieu"

# --- the rules -------------------------------------------------------------------------------------------------------

WINGS = {
    "core": (
        *("testing", "sklearn", "nn", "population", "posteriors", "regression", "energy", "inference", "duality"),
        *("solve", "measures", "ops", "foundation", "interruption", "errors"),
    ),
    "probe": ("probing", "report", "storage"),
    "papers": ("papers", "papers.experiments", "papers.claims", "papers.theory"),
}
"""The core imports neither of the other wings; `cli` and the package's own list of names stand above all three."""

GROUND = {"foundation", "errors"}
LAWS = {"duality", "measures", "ops", "solve"} | GROUND
WORKSHOP = {"energy", "inference"} | LAWS
MODELS = {"population", "posteriors", "regression", "nn"} | WORKSHOP
OF_THE_PROBE = {"storage", "interruption", "testing", "__init__"} | MODELS - {"posteriors"}
"""What each room of `probing` may import outside of it; which of them draw (`report`), and their order, says `PROBE`."""

PROBE = {
    "statistic_checks": ("statistics", "capture", "model", "sums"),
    "compare": ("run", "session", "result", "replaced", "statistics", "data", "model", "sums", "report"),
    "monitor": ("statistics", "checks", "capture", "data", "model"),
    "population_layers": ("checks", "stream", "capture", "model"),
    "weights": ("checks", "capture", "data", "model", "report"),
    "run": ("session", "result", "reading", "replaced", "statistics", "data", "model", "sums"),
    "session": ("result", "reading", "replaced", "statistics", "checks", "capture", "data", "model", "sums"),
    "result": ("reading", "statistics", "capture", "sums", "report"),
    "reading": ("replaced", "statistics", "checks", "stream", "capture", "data", "model", "sums"),
    "replaced": ("statistics", "checks", "capture", "data", "model", "sums"),
    "statistics": ("stream", "capture", "model", "sums"),
    "checks": ("stream", "capture", "model", "sums"),
    "stream": ("capture", "model"),
    "capture": ("model", "sums"),
    "data": ("model",),
    "model": (),
    "sums": (),
}
"""The rooms of `probing`, the highest first: what each imports of them, always rooms below it, and whether it draws.
docs/decisions/rooms.md shows this table and the next (`python -m scripts.rooms_table`)."""


def _of_the_probe(name: str) -> str:
    """The full name of a room in a row of `PROBE`."""
    return f"probing.{name}" if name in PROBE else name


ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "interruption": set(),
    "foundation": {"errors"},
    "ops": GROUND,
    "solve": GROUND,
    "inference": GROUND,
    "measures": {"ops"} | GROUND,
    "duality": {"measures", "solve"} | GROUND,
    "energy": {"inference"} | LAWS,
    "population": WORKSHOP,
    "posteriors": WORKSHOP,
    "regression": WORKSHOP,
    "nn": MODELS,
    "testing": MODELS,
    "sklearn": MODELS - {"population", "posteriors"},
    "storage": GROUND,
    "report": {"storage", "population"} | GROUND,
    "probing": {*map(_of_the_probe, PROBE), "storage"} | GROUND,
    **{_of_the_probe(room): {*map(_of_the_probe, others)} | OF_THE_PROBE for room, others in PROBE.items()},
    "papers": {"papers.theory", "papers.claims"} | GROUND,
    "papers.theory": MODELS,
    "papers.claims": {"papers.theory", "report", "storage", "__init__"} | MODELS,
    "papers.experiments": {"papers.theory", "report", "storage", "__init__"} | MODELS,
    "cli": {
        *("probing", *map(_of_the_probe, PROBE), "papers.claims", "papers.experiments", "report", "storage"),
        *("interruption", "ops", "__init__"),
    }
    | GROUND,
    "__main__": {"cli"},
    "__init__": {
        *("testing", "sklearn", "probing", *map(_of_the_probe, PROBE), "report", "papers"),
    }
    | MODELS,
}
"""A room may import itself and what is listed here; of rooms within rooms the innermost counts."""


# --- what is imported ------------------------------------------------------------------------------------------------


def innermost_room(parts: Sequence[str]) -> str | None:
    """The innermost room among dotted names below the package: of `papers`, `theory`, `urns` it is `papers.theory`."""
    for count in (2, 1):
        room = ".".join(parts[:count])
        if room in ALLOWED:
            return room
    return None


def files() -> list[Path]:
    """Every file of the package."""
    return sorted(SOURCE.rglob("*.py"))


def room_of_file(path: Path) -> str:
    """The innermost room that a file of the package lies in."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return innermost_room(parts) or parts[0]


def wing_of(room: str) -> str | None:
    """The wing that a room belongs to; None of what stands above them."""
    for wing, rooms in WINGS.items():
        if room in rooms or room.partition(".")[0] in rooms:
            return wing
    return None


@dataclass(frozen=True)
class Import:
    """One name that a file imports from the package, lazily or not: `from module import name`, or `import module`."""

    module: str
    name: str | None

    @property
    def room(self) -> str:
        """The room that is imported: of `from massieu import ops` it is `ops`."""
        return innermost_room([*self.module.split(".")[1:], self.name or ""]) or "__init__"


@cache
def imports(path: Path) -> frozenset[Import]:
    """What a file imports from the package, at its head or inside of functions; no name that `lazy_names` is told as text."""
    found = set()
    for statement in _statements(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(statement, ast.Import):
            found |= {Import(alias.name, None) for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            assert statement.module is not None and statement.level == 0, (
                f"{path}: relative import; write the full name"
            )
            found |= {Import(statement.module, alias.name) for alias in statement.names}
    return frozenset(each for each in found if each.module.split(".")[0] == "massieu")


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Each statement, those inside of others too; imports are never inside of an expression."""
    for statement in body:
        yield statement
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _statements(getattr(statement, part, ()))
