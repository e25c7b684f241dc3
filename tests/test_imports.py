"""The house: which room may import which, and no circle of files. Every import is parsed, lazy ones inside functions too."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parent.parent / "src" / "massieu"

# A room may import itself and what is listed here. `errors` is a leaf that any room may import;
# `interruption` is one for what runs long.
GROUND = {"foundation", "errors"}
LAWS = {"duality", "measures", "ops", "solve"} | GROUND
WORKSHOP = {"energy", "inference"} | LAWS
MODELS = {"population", "posteriors", "regression", "nn"} | WORKSHOP
ALLOWED = {
    "errors": set(),
    "interruption": set(),
    "foundation": {"errors"},
    "ops": GROUND,
    "solve": GROUND,
    "inference": GROUND,
    "measures": {"ops"} | GROUND,
    "duality": {"measures", "solve"} | GROUND,
    "energy": {"inference"} | LAWS,
    "population": {"report"} | WORKSHOP,
    "posteriors": WORKSHOP,
    "regression": WORKSHOP,
    "nn": MODELS,
    "probing": {"report", "interruption", "testing", "__init__"} | MODELS - {"posteriors"},
    "report": GROUND,
    "testing": MODELS,
    "sklearn": MODELS - {"population", "posteriors"},
    "papers": {"papers.theory", "papers.claims", "foundation"},
    "papers.theory": MODELS,
    "papers.claims": {"papers.theory", "report", "__init__"} | MODELS,
    "papers.experiments": {"papers.theory", "report", "__init__"} | MODELS,
    "cli": {"probing", "papers.claims", "papers.experiments", "report", "interruption", "ops", "__init__"} | GROUND,
    "__main__": {"cli"},
    "__init__": {"testing", "sklearn", "probing", "papers"} | MODELS,
}
# The rooms of the probe, the highest first: a room may import itself and what is listed here, always rooms below it.
# ARCHITECTURE.md shows this table (`python -m scripts.rooms_table`).
PROBE = {
    "statistic_checks": ("statistics", "capture", "model", "sums"),
    "compare": ("run", "session", "result", "replaced", "statistics", "data", "model", "sums"),
    "monitor": ("statistics", "checks", "capture", "data", "model"),
    "population_layers": ("checks", "stream", "capture", "model"),
    "run": ("session", "result", "reading", "replaced", "statistics", "data", "model", "sums"),
    "session": ("result", "reading", "replaced", "statistics", "checks", "capture", "data", "model", "sums"),
    "result": ("reading", "statistics", "capture", "sums"),
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
# Result objects draw themselves, and a monitor's records and running sums are written as results are. Nothing else of
# probing and population knows the report, but for the records it draws from.
ONLY = {
    "report": {
        *("probing/result/result.py", "probing/monitor/writers.py", "population/flow_result.py"),
        *(
            "probing/reading/per_token.py",
            "probing/session/course.py",
            "probing/compare/comparison.py",
            "probing/compare/files.py",
            "probing/compare/kept.py",
        ),
    }
}


def _room(parts: Sequence[str]) -> str | None:
    """The innermost room among dotted names below the package: of `papers`, `theory`, `urns` it is `papers.theory`."""
    for count in (2, 1):
        if (room := ".".join(parts[:count])) in ALLOWED:
            return room
    return None


@dataclass(frozen=True)
class Import:
    """One name that a file imports from the package, lazily or not: `from module import name`, or `import module`."""

    module: str
    name: str | None

    @property
    def room(self) -> str:
        """The room that is imported: of `from massieu import ops` it is `ops`."""
        parts = [*self.module.split(".")[1:], self.name or ""]
        return _room(parts) or "__init__"


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Each statement, those inside of others too; imports are never inside of an expression."""
    for statement in body:
        yield statement
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _statements(getattr(statement, part, ()))


@cache
def _imports(path: Path) -> frozenset[Import]:
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


def _files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def _room_of_file(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return _room(parts) or parts[0]


# --- directions ------------------------------------------------------------------------------------------------------


def test_every_file_is_in_a_known_room():
    assert not [str(path) for path in _files() if _room_of_file(path) not in ALLOWED]


def _upwards(room: str, path: Path, imports: Iterable[Import]) -> list[str]:
    """What a file of this room imports though it may not."""
    wrong = []
    for each in imports:
        if each.room not in {room} | ALLOWED[room]:
            wrong.append(f"{path} imports {each.module}: {room} may import {sorted(ALLOWED[room])}")
        record = each.module.startswith("massieu.report.record")
        if (
            each.room == "report"
            and room in ("probing", "population")
            and not record
            and str(path) not in ONLY["report"]
        ):
            wrong.append(f"{path} imports {each.module}: only {sorted(ONLY['report'])} may")
    return wrong


@pytest.mark.medium
def test_imports_point_downwards():
    wrong = []
    for path in _files():
        wrong += _upwards(_room_of_file(path), path.relative_to(SOURCE), _imports(path))
    assert not wrong, "\n".join(wrong)


def test_rooms_of_the_probe_import_rooms_below_them():
    order = list(PROBE)
    for room, below in PROBE.items():
        assert all(order.index(each) > order.index(room) for each in below), f"{room} stands below one of {below}"
    used = {room: set[str]() for room in PROBE}
    for path in sorted((SOURCE / "probing").rglob("*.py")):
        parts = path.relative_to(SOURCE / "probing").with_suffix("").parts
        if parts == ("__init__",):
            continue
        assert parts[0] in PROBE, f"{path} is in no room of the probe"
        names = {f"{each.module}.{each.name}" for each in _imports(path)}
        used[parts[0]] |= {name.split(".")[2] for name in names if name.startswith("massieu.probing.")}
    for room, targets in used.items():
        assert targets - {room} == set(PROBE[room]), f"{room} imports {sorted(targets - {room})}"


def test_the_architecture_shows_the_rooms_of_the_probe():
    from scripts.rooms_table import with_table

    page = (SOURCE.parents[1] / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert "rooms of the probe, by" in page
    assert with_table(page) == page


def test_an_import_that_points_upwards_would_be_seen(tmp_path: Path):
    bad = tmp_path / "bad.py"
    bad.write_text(
        "def f():\n    try:\n        from massieu import cli, ops\n    finally:\n        import massieu.report.page\n"
    )
    wrong = {line.partition(":")[0] for line in _upwards("ops", Path("ops/bad.py"), _imports(bad))}
    assert wrong == {"ops/bad.py imports massieu", "ops/bad.py imports massieu.report.page"}
    assert len(_upwards("population", Path("population/bad.py"), _imports(bad))) == 2
    assert _upwards("population", Path("population/flow_result.py"), [Import("massieu.report.page", "render")]) == []


# --- circles ---------------------------------------------------------------------------------------------------------


def _module(path: Path) -> str:
    parts = ("massieu", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_modules(path: Path, modules: set[str]) -> set[str]:
    """Modules of the package that a file imports, lazily too. A package stands for what its `__init__` holds."""
    found = set()
    for each in _imports(path):
        inner = f"{each.module}.{each.name}"
        found.add(inner if inner in modules else each.module)
    return (found & modules) - {"massieu", _module(path)}


def _circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected groups of more than one file (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(imports[name]):
            if other not in order:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == order[name]:
            place = stack.index(name)
            group, stack[place:] = stack[place:], []
            if len(group) > 1:
                circles.append(sorted(group))

    for name in sorted(imports):
        if name not in order:
            visit(name)
    return sorted(circles)


@pytest.mark.medium
def test_no_file_circle():
    modules = {_module(path) for path in _files()}
    files = [path for path in _files() if path != SOURCE / "__init__.py"]
    circles = _circles({_module(path): _imported_modules(path, modules) for path in files})
    assert not circles, "\n".join(" ⇄ ".join(circle) for circle in circles)


def test_a_circle_would_be_seen():
    assert _circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]
    assert _circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


# --- what is loaded --------------------------------------------------------------------------------------------------


@pytest.mark.medium
def test_importing_massieu_loads_no_torch_and_a_kernel_is_run_without_the_compiler():
    """`torch._dynamo` takes seconds to import, and only compiled code needs it."""
    code = (
        "import sys, massieu\n"
        "print([name for name in ('torch', 'transformers', 'polars', 'sklearn') if name in sys.modules])\n"
        "import torch\n"
        "massieu.ops.attention(*torch.randn(3, 1, 1, 2, 4))\n"
        "print('torch._dynamo' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["[]", "False"]


def test_a_proof_is_marked_as_pytorch_would():
    from massieu.ops.cuda.proof import _failure

    def marked() -> None: ...

    before = set(vars(marked))
    torch.compiler.assume_constant_result(marked)
    added = {name: value for name, value in vars(marked).items() if name not in before}
    assert added
    assert added.items() <= vars(_failure).items()


def test_public_names_resolve():
    import massieu

    for name in massieu.__all__:
        assert getattr(massieu, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = massieu.nothing
