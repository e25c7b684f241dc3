"""Do the fast tests notice a wrong formula? Mutants of `src`, drawn at random from all rooms, each tried by the tests.

    python scripts/mutants.py                      # 40 mutants, drawn with the commit's hash as the seed
    python scripts/mutants.py --seed abc --only 7  # one of them again
    python scripts/mutants.py --rooms ops nn       # of these rooms alone; a folder of a room is papers/claims
    python scripts/mutants.py --list ops           # all that there are in a room, without running any

A mutant is one change of one expression: another sign, a factor or a term left out, another axis, an argument forgotten.
It is made in a copy of `src`, which the tests import in place of the original. The tests of its file run first (those of
its claims, in papers/claims), then the fast tests of its folder, those of its room, and all fast tests, unless
`--room-only`; the first failure ends the run. A mutant that no test notices is printed with its line: it is equivalent,
or a test is missing.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "massieu"
TESTS_OF_ROOM = {
    "interruption": ["tests/test_cli_endings.py", "tests/papers/experiments/test_study.py"],
    "__init__": ["tests/test_imports.py", "tests/test_house.py"],
    "__main__": ["tests/test_cli.py"],
    "errors": ["tests/foundation"],
    "duality": ["tests/test_duality.py", "tests/test_duality_boundary.py"],
    "sklearn": ["tests/estimators"],
    "testing": ["tests/test_testing.py", "tests/test_suites.py"],
    "cli": ["tests/test_cli.py", "tests/test_cli_compare.py", "tests/test_cli_devices.py", "tests/test_cli_endings.py",
            "tests/test_cli_experiment.py", "tests/test_cli_monitor.py"],
}  # fmt: skip
"""Where a room's tests are not in the folder of its name."""
REDUCTIONS = {"sum", "mean", "amax", "amin", "softmax", "log_softmax", "logsumexp", "cumsum", "norm", "argmax", "prod"}
"""Methods whose first argument, if it is a whole number, is an axis."""
LONGEST_RUN = 900
"""Seconds for the tests of one mutant; one that makes them hang is noticed."""


@dataclass(frozen=True)
class Mutant:
    """One change of one expression."""

    path: Path
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str

    @property
    def room(self) -> str:
        return self.path.relative_to(SOURCE).parts[0].removesuffix(".py")

    def __str__(self) -> str:
        place = f"{self.path.relative_to(ROOT)}:{self.line}"
        return f"{place} ({self.kind}): {_one_line(self.before)} -> {_one_line(self.after)}"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:100]


class _Expressions(ast.NodeVisitor):
    """The expressions that compute: no messages, annotations, decorators, defaults of signatures or texts."""

    def __init__(self) -> None:
        self.nodes: list[ast.expr] = []

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Call)):
            self.nodes.append(node)
        super().generic_visit(node)


def _is_text(node: ast.expr) -> bool:
    return any(isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
               for part in ast.walk(node))  # fmt: skip


def _changes(node: ast.expr) -> Iterator[tuple[str, str]]:
    """The kind of each change of an expression, and the expression after it."""
    if isinstance(node, ast.BinOp) and not _is_text(node):
        left, right = ast.unparse(node.left), ast.unparse(node.right)
        if isinstance(node.op, (ast.Add, ast.Sub)):
            sign = "-" if isinstance(node.op, ast.Add) else "+"
            yield "sign", f"(({left}) {sign} ({right}))"
            yield "dropped term", f"({left})"
        elif isinstance(node.op, (ast.Mult, ast.Div)):
            yield "factor", f"({left})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield "sign", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Call):
        yield from _changed_calls(node)


def _changed_calls(node: ast.Call) -> Iterator[tuple[str, str]]:
    function = ast.unparse(node.func)
    arguments = [ast.unparse(argument) for argument in node.args]
    keywords = [ast.unparse(keyword) for keyword in node.keywords]
    for place, keyword in enumerate(node.keywords):
        others = keywords[:place] + keywords[place + 1 :]
        if keyword.arg is not None:
            yield "forgotten argument", f"{function}({', '.join(arguments + others)})"
        if keyword.arg == "dim" and (axis := _whole_number(keyword.value)) is not None:
            yield "axis", f"{function}({', '.join([*arguments, *others, f'dim={_other_axis(axis)}'])})"
    is_reduction = isinstance(node.func, ast.Attribute) and node.func.attr in REDUCTIONS
    if is_reduction and node.args and (axis := _whole_number(node.args[0])) is not None:
        yield "axis", f"{function}({', '.join([str(_other_axis(axis)), *arguments[1:], *keywords])})"


def _whole_number(node: ast.expr) -> int | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if type(value) is int else None


def _other_axis(axis: int) -> int:
    return axis - 1 if axis < 0 else axis + 1


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant of a file, in the order of its lines."""
    text = path.read_text(encoding="utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    encoded = text.encode()
    expressions = _Expressions()
    expressions.visit(ast.parse(text))
    mutants = []
    for node in expressions.nodes:
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        before = encoded[start:end].decode()
        mutants += [Mutant(path, node.lineno, kind, start, end, before, after) for kind, after in _changes(node)]
    return mutants


def all_mutants() -> dict[str, list[Mutant]]:
    """By room; the package's own files are rooms of their own."""
    rooms: dict[str, list[Mutant]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for mutant in mutants_of(path):
            rooms.setdefault(mutant.room, []).append(mutant)
    return rooms


def drawn(count: int, seed: str, rooms: Sequence[str] = ()) -> list[Mutant]:
    """So many, one room after the other in a random order, and again from the first; of all rooms if none is named."""
    by_room = all_mutants()
    for folder in rooms:
        if "/" in folder:
            everywhere = by_room[folder.partition("/")[0]]
            by_room[folder] = [mutant for mutant in everywhere if mutant.path.is_relative_to(SOURCE / folder)]
    generator = random.Random(seed)
    order = sorted(rooms or by_room)
    generator.shuffle(order)
    return [generator.choice(by_room[order[place % len(order)]]) for place in range(count)]


def _source_with(mutant: Mutant, folder: Path) -> Path:
    copy = folder / "src"
    shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
    target = copy / mutant.path.relative_to(ROOT / "src")
    encoded = target.read_bytes()
    target.write_bytes(encoded[: mutant.start] + mutant.after.encode() + encoded[mutant.end :])
    return copy


def _run_tests(source: Path, tests: Sequence[str]) -> tuple[bool, str]:
    """Whether they fail, and the last line that says so."""
    environment = os.environ | {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONGEST_RUN, check=False
        )
    except subprocess.TimeoutExpired:
        return True, "the tests do not end"
    # A failure, or a file that cannot be collected. Any other end is no answer of the tests: a path that is none, say.
    if ended.returncode not in (0, 1, 2):
        raise RuntimeError(f"pytest {' '.join(tests)} ended with {ended.returncode}: {ended.stdout[-500:]}")
    failures = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return ended.returncode != 0, failures[0] if failures else ended.stdout[-200:]


def _tests_of_file(mutant: Mutant) -> list[str]:
    """The files named after it, or the tests of the claims that it states."""
    claims = re.findall(r'^@claim\(\s*"(\w+)"', mutant.path.read_text(encoding="utf-8"), re.MULTILINE)
    if claims:
        names = [f"[{claim}{end}" for claim in claims for end in "]:-"]
        return ["tests/papers/claims/test_claims.py", "-k", " or ".join(names)]
    return [str(path.relative_to(ROOT)) for path in ROOT.glob(f"tests/{mutant.room}/**/test_{mutant.path.stem}*.py")]


def _tests_of_folder(mutant: Mutant) -> list[str]:
    """Of the first folder below its room, if the tests have one of that name."""
    folder = Path("tests", *mutant.path.relative_to(SOURCE).parts[:-1][:2])
    return [str(folder)] if len(folder.parts) == 3 and (ROOT / folder).is_dir() else []


def noticed_by(mutant: Mutant, room_only: bool) -> str | None:
    """The first test that fails; None if all pass."""
    own = TESTS_OF_ROOM.get(mutant.room, [f"tests/{mutant.room}"])
    with tempfile.TemporaryDirectory() as folder:
        source = _source_with(mutant, Path(folder))
        for tests in filter(
            None, [_tests_of_file(mutant), _tests_of_folder(mutant), own, [] if room_only else ["tests"]]
        ):
            failed, reason = _run_tests(source, tests)
            if failed:
                return reason
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", help="of the draw; the commit's hash by default")
    parser.add_argument("--rooms", nargs="+", default=[], metavar="ROOM", help="draw from these rooms or their folders")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the draw")
    parser.add_argument("--room-only", action="store_true", help="run the tests of the mutant's room alone")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--list", metavar="ROOM", help="print the mutants of a room, or of `all`, and run none")
    arguments = parser.parse_args()
    if arguments.list:
        rooms = all_mutants()
        for room, mutants in rooms.items():
            if arguments.list in (room, "all"):
                print(*mutants, f"{room}: {len(mutants)} mutants", sep="\n")
        return
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    seed = arguments.seed or head.strip()
    mutants = drawn(arguments.count, seed, arguments.rooms)
    numbers = arguments.only or range(len(mutants))
    tried = partial(noticed_by, room_only=arguments.room_only)
    survivors = []
    with ThreadPoolExecutor(arguments.workers) as pool:
        for number, reason in zip(numbers, pool.map(tried, [mutants[each] for each in numbers]), strict=True):
            print(f"{number:3d} {'noticed' if reason else 'SURVIVES'}  {mutants[number]}", flush=True)
            if reason is None:
                survivors.append(mutants[number])
            else:
                print(f"      {reason[:160]}", flush=True)
    print(f"seed {seed}: {len(numbers) - len(survivors)} of {len(numbers)} noticed")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
