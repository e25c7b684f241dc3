"""The house: which room may import which, and no circle of files. Every import is parsed, lazy ones inside functions too."""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from scripts import import_graph, rooms_table
from tests.support.rooms import ALLOWED, PROBE, SOURCE, WINGS, Import, files, imports, room_of_file, wing_of

# --- directions ------------------------------------------------------------------------------------------------------


def test_every_file_is_in_a_known_room():
    assert not [str(path) for path in files() if room_of_file(path) not in ALLOWED]


def _upwards(room: str, path: Path, imported: Iterable[Import]) -> list[str]:
    """What a file of this room imports though it may not."""
    return [
        f"{path} imports {each.module}: {room} may import {sorted(ALLOWED[room])}"
        for each in imported
        if each.room not in {room} | ALLOWED[room]
    ]


@pytest.mark.medium
def test_imports_point_downwards():
    wrong = []
    for path in files():
        wrong += _upwards(room_of_file(path), path.relative_to(SOURCE), imports(path))
    assert not wrong, "\n".join(wrong)


def test_the_core_may_import_neither_of_the_other_wings():
    for room in WINGS["core"]:
        assert {wing_of(other) for other in ALLOWED[room]} <= {"core"}, room


def test_what_stands_above_the_wings_is_imported_by_none_of_them():
    """But for the package itself, which tells its version."""
    above = {room for room in ALLOWED if wing_of(room) is None}
    assert above == {"cli", "__main__", "__init__"}
    for room in set(ALLOWED) - above:
        assert not ALLOWED[room] & (above - {"__init__"}), room


def test_rooms_of_the_probe_import_rooms_below_them():
    """And every import that the table allows between them is there."""
    order = [*PROBE, "report"]
    for room, below in PROBE.items():
        assert all(order.index(each) > order.index(room) for each in below), f"{room} stands below one of {below}"
    used = {room: set[str]() for room in PROBE}
    for path in sorted((SOURCE / "probing").rglob("*.py")):
        room = path.relative_to(SOURCE / "probing").with_suffix("").parts[0]
        if room == "__init__":
            continue
        assert room in PROBE, f"{path} is in no room of the probe"
        used[room] |= {each.room.removeprefix("probing.") for each in imports(path)}
    for room, targets in used.items():
        among_them = targets & set(order) - {room}
        assert among_them == set(PROBE[room]), f"{room} imports {sorted(among_them)}"


def test_the_page_of_rooms_shows_the_rules():
    page = rooms_table.PAGE.read_text(encoding="utf-8")
    assert page.count("by scripts/rooms_table.py -->") == 2
    assert rooms_table.with_tables(page) == page, "python -m scripts.rooms_table writes it anew"


def test_an_import_that_points_upwards_would_be_seen(tmp_path: Path):
    bad = tmp_path / "bad.py"
    bad.write_text(
        "def f():\n    try:\n        from massieu import cli, ops\n    finally:\n        import massieu.report.page\n"
    )
    wrong = {line.partition(":")[0] for line in _upwards("ops", Path("ops/bad.py"), imports(bad))}
    assert wrong == {"ops/bad.py imports massieu", "ops/bad.py imports massieu.report.page"}
    assert len(_upwards("population", Path("population/bad.py"), imports(bad))) == 2
    assert len(_upwards("probing.statistics", Path("probing/statistics/bad.py"), imports(bad))) == 2
    assert len(_upwards("probing.result", Path("probing/result/bad.py"), imports(bad))) == 1


@pytest.mark.parametrize(
    ("imported", "room"),
    [
        (Import("massieu", "ops"), "ops"),
        (Import("massieu", "__version__"), "__init__"),
        (Import("massieu", None), "__init__"),
        (Import("massieu.papers", "theory"), "papers.theory"),
        (Import("massieu.papers.theory.urns", "urn_total_variation"), "papers.theory"),
        (Import("massieu.papers", "verify"), "papers"),
        (Import("massieu.probing.result.result", "ProbeResult"), "probing.result"),
        (Import("massieu.report.record_of_nobody", None), "report"),
    ],
    ids=lambda value: f"{value.module} {value.name}" if isinstance(value, Import) else value,
)
def test_the_room_of_an_import(imported, room):
    assert imported.room == room


# --- the picture -----------------------------------------------------------------------------------------------------

RIGHT = {"a": {"b", "c", "d"}, "b": {"c"}, "c": {"d"}, "d": set[str]()}


@pytest.mark.medium
def test_the_stored_picture_shows_the_imports_of_the_code():
    """Every line is an import, and each import is a line or follows from lines."""
    page = import_graph.PICTURE.read_text(encoding="utf-8")
    drawn: dict[str, set[str]] = {room: set() for room in import_graph.room_imports()}
    for room, other in re.findall(r"<title>(\S+) imports (\S+)</title>", page):
        drawn[room].add(other)
    imported = import_graph.room_imports()
    assert all(others <= imported[room] for room, others in drawn.items())
    assert import_graph.reachable(drawn) == import_graph.reachable(imported)
    assert page == import_graph.picture(imported), "python -m scripts.import_graph draws it anew"


def test_lines_that_follow_from_others_are_left_out_and_each_room_is_above_what_it_imports():
    assert import_graph.without_shortcuts(RIGHT) == {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": set()}
    assert import_graph.heights(RIGHT) == {"a": 3, "b": 2, "c": 1, "d": 0}


def test_a_line_from_the_core_to_another_wing_is_red():
    right = {"report": {"population"}, "population": {"foundation"}, "foundation": set[str]()}
    assert import_graph.UPWARDS not in import_graph.picture(right)
    wrong = {"population": {"report"}, "report": {"foundation"}, "foundation": set[str]()}
    assert import_graph.picture(wrong).count(import_graph.UPWARDS) == 1


# --- circles ---------------------------------------------------------------------------------------------------------


def _module(path: Path) -> str:
    parts = ("massieu", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_modules(path: Path, modules: set[str]) -> set[str]:
    """Modules of the package that a file imports, lazily too. A package stands for what its `__init__` holds."""
    found = set()
    for each in imports(path):
        inner = f"{each.module}.{each.name}"
        found.add(inner if inner in modules else each.module)
    return (found & modules) - {"massieu", _module(path)}


def _circles(imported: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected groups of more than one file (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(imported[name]):
            if other not in order:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == order[name]:
            place = stack.index(name)
            group, stack[place:] = stack[place:], []
            if len(group) > 1:
                circles.append(sorted(group))

    for name in sorted(imported):
        if name not in order:
            visit(name)
    return sorted(circles)


@pytest.mark.medium
def test_no_file_circle():
    modules = {_module(path) for path in files()}
    circles = _circles(
        {_module(path): _imported_modules(path, modules) for path in files() if path != SOURCE / "__init__.py"}
    )
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


@pytest.mark.medium
def test_a_probe_that_replaces_nothing_loads_little_of_the_core():
    """Seconds of every start: rooms that only rules of replacement or layers of populations need, and optional libraries."""
    code = (
        "import sys, massieu, massieu.probing.run, massieu.cli.commands\n"
        "rooms = ('energy', 'regression', 'solve', 'nn', 'duality', 'measures', 'inference')\n"
        "others = ('torch._dynamo', 'scipy.stats', 'pandas', 'polars', 'plotly', 'matplotlib')\n"
        "print([name for name in (*(f'massieu.{room}' for room in rooms), *others) if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["[]"]


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
