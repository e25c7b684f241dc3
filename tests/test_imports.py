"""The house: which room may import which. Every import of the package is parsed, lazy ones inside functions too."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support.rows import every_row

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
    "theory": MODELS,
    "probing": {"report", "interruption", "__init__"} | MODELS - {"posteriors"},
    "report": GROUND,
    "testing": MODELS,
    "sklearn": MODELS - {"population", "posteriors"},
    "verification": {"theory", "report", "__init__"} | MODELS,
    "experiments": {"theory", "report", "__init__"} | MODELS,
    "cli": {"probing", "verification", "experiments", "report", "interruption", "ops", "__init__"} | GROUND,
    "__main__": {"cli"},
    "__init__": {"theory", "testing", "sklearn", "probing", "verification"} | MODELS,
}
# The rooms of the probe, the highest first: a room may import itself and what is listed here, always rooms below it.
# ARCHITECTURE.md shows this table (`python -m scripts.rooms_table`).
PROBE = {
    "compare": ("run", "session", "result", "statistics", "data", "model", "sums"),
    "monitor": ("statistics", "checks", "capture", "data", "model"),
    "population_layers": ("checks", "stream", "capture", "model"),
    "run": ("session", "result", "reading", "replaced", "statistics", "model", "sums"),
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


def _imported(path: Path) -> set[str]:
    """Dotted names below `massieu` that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError(f"{path}: relative import; write the full name")
        else:
            continue
        found |= {name for name in names if name.split(".")[0] == "massieu"}
    return found


def _room(name: str) -> str:
    parts = name.split(".")[1:]
    return parts[0] if parts else "__init__"


def _files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def test_every_file_is_in_a_known_room():
    for path in _files():
        relative = path.relative_to(SOURCE)
        assert relative.parts[0].removesuffix(".py") in ALLOWED, f"{relative} is in no room of the house"


@pytest.mark.medium
@every_row("path", _files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_downwards(path: Path):
    relative = path.relative_to(SOURCE)
    room = relative.parts[0].removesuffix(".py")
    for name in _imported(path):
        target = _room(name)
        if target == room or (target == "__init__" and "__init__" in ALLOWED[room]):
            continue
        allowed = ALLOWED[room]
        fits = target in allowed or any("." in a and name.removeprefix("massieu.").startswith(a) for a in allowed)
        package = any(a.startswith(f"{target}.") for a in allowed) and name == f"massieu.{target}"
        # `from massieu import ops` also names the package itself
        assert fits or package or name == "massieu", f"{relative} imports {name}: {room} may import {sorted(allowed)}"
        if target in ONLY and room in ("probing", "population") and not name.startswith("massieu.report.record"):
            assert str(relative) in ONLY[target], f"only {ONLY[target]} may import massieu.{target}, not {relative}"


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
        used[parts[0]] |= {name.split(".")[2] for name in _imported(path) if name.startswith("massieu.probing.")}
    for room, targets in used.items():
        assert targets - {room} == set(PROBE[room]), f"{room} imports {sorted(targets - {room})}"


def test_the_architecture_shows_the_rooms_of_the_probe():
    from scripts.rooms_table import with_table

    page = (SOURCE.parents[1] / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert "rooms of the probe, by" in page
    assert with_table(page) == page


def test_the_rule_can_fail(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from massieu.report import page\n")
    assert "massieu.report" in _imported(bad)
    assert "report" not in ALLOWED["ops"]


def test_importing_massieu_loads_no_torch():
    code = "import sys, massieu; print([m for m in ('torch', 'transformers', 'polars', 'sklearn') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == "[]"


def test_a_kernel_is_run_without_the_compiler():
    """`torch._dynamo` takes seconds to import, and only compiled code needs it."""
    call = "massieu.ops.attention(*torch.randn(3, 1, 1, 2, 4))"
    code = f"import sys, torch, massieu; {call}; print('torch._dynamo' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == "False"


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
