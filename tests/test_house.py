"""The house as its source shows it: every public name in a page, one meaning for each word."""

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import massieu

ROOT = Path(__file__).parent.parent
SOURCE = Path(massieu.__file__).parent  # of the package that is tested, which mutants change in a copy
ROOMS = sorted(set(massieu.__all__) & {path.name for path in SOURCE.iterdir() if path.is_dir()})


def _files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def _module(path: Path) -> str:
    parts = ("massieu", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# --- public names ----------------------------------------------------------------------------------------------------


def _listing(module: ModuleType) -> list[str]:
    """`__all__`; without one, what the module defines itself."""
    if (listed := getattr(module, "__all__", None)) is not None:
        return listed
    own = {name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
    return sorted(name for name in own if not name.startswith("_"))


def _public(module: ModuleType) -> Iterator[str]:
    """Dotted names below the package that a room shows, those of its public submodules among them; no modules."""
    room = module.__name__.removeprefix("massieu").lstrip(".")
    for name in _listing(module):
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            if room:  # the package's own list names the rooms, which are counted by themselves
                yield from _public(value)
        else:
            yield f"{room}.{name}".lstrip(".")


def _public_names() -> list[str]:
    modules = [massieu, *(importlib.import_module(f"massieu.{room}") for room in ROOMS)]
    return [name for module in modules for name in _public(module)]


def _in_backticks(pages: Iterable[str]) -> set[str]:
    """Every identifier that stands in code on a page: between backticks, or in a block of code."""
    words: set[str] = set()
    for page in pages:
        blocks = re.findall(r"^```.*?^```", page, flags=re.DOTALL | re.MULTILINE)
        rest = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
        for code in [*blocks, *re.findall(r"`+[^`]+`+", rest)]:
            words |= set(re.findall(r"[^\W\d]\w*", code))
    return words


def test_every_public_name_is_in_a_page():
    known = _in_backticks(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    missing = [name for name in _public_names() if name.rpartition(".")[2] not in known]
    assert not missing


def test_names_in_code_are_found_and_names_in_prose_are_not():
    page = "An `Atoms` of ``ops.attention(q)`` and a mixture:\n\n```python\nx = tilt(1)\n```\n\nThe end `of`\n"
    assert _in_backticks([page]) == {"Atoms", "ops", "attention", "q", "python", "x", "tilt", "of"}


def _shown(module: ModuleType) -> Iterator[ModuleType]:
    """A room and its public submodules."""
    yield module
    for name in _listing(module):
        if isinstance(value := getattr(module, name), ModuleType):
            yield from _shown(value)


def test_dir_shows_the_public_names_and_nothing_else():
    more = []
    for room in ROOMS:
        for module in _shown(importlib.import_module(f"massieu.{room}")):
            listed = _listing(module)
            assert sorted(set(listed)) == sorted(listed), f"{module.__name__} lists a name twice"
            if dir(module) != sorted(getattr(module, "__all__", ())):
                more.append(module.__name__)
    assert not more


# --- one meaning for each word ---------------------------------------------------------------------------------------


TWICE = {"Activation"}
"""Names of two classes, both of the plan: what maps x to ∇L(x), and the module that owns its parameters."""


@cache
def _definitions(kind: str) -> dict[str, set[str]]:
    """Where each public class (``"class"``) or function (``"def"``) of a module is defined."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in _files():
        for name in re.findall(rf"^{kind} ([^\W_]\w*)", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            found[name].add(_module(path))
    return found


def _alike(name: str) -> str:
    return name.replace("_", "").lower()


def test_no_two_classes_share_a_name():
    by_word: dict[str, list[str]] = defaultdict(list)
    for name, places in _definitions("class").items():
        by_word[_alike(name)] += [f"{place}.{name}" for place in places]
    assert not [places for word, places in by_word.items() if len(places) > 1 and word not in map(_alike, TWICE)]


def test_what_a_function_returns_is_not_called_as_the_function_is():
    """A result ends in `Result`; a value or module may share its word with the verb that makes it, `Mixture` with `mixture`."""
    verbs = {_alike(name) for name in _definitions("def") if name in _listed()}
    assert not sorted(_results() & {name for name in _definitions("class") if _alike(name) in verbs})


def _results() -> set[str]:
    """Classes of results: the NamedTuples."""
    named_tuple = re.compile(r"^class (\w+)\(NamedTuple\)", flags=re.MULTILINE)
    return {name for path in _files() for name in named_tuple.findall(path.read_text(encoding="utf-8"))}


@cache
def _listed() -> frozenset[str]:
    return frozenset(name.rpartition(".")[2] for name in _public_names())


# --- what PyTorch gets wrong, and one function of ours gets right ---------------------------------------------------


def test_the_command_line_prints_through_what_makes_control_characters_visible():
    assert _callers("typer.echo(") == {"massieu.cli.streams"}
    assert {name for name in _callers(" print(") if name.startswith("massieu.cli")} == {"massieu.cli.streams"}


def test_least_squares_are_solved_in_one_place():
    """The default driver of `torch.linalg.lstsq` reads memory that nobody wrote."""
    assert _callers("torch.linalg.lstsq(") == {"massieu.foundation.matrices"}


def test_eigenvalues_are_asked_for_in_one_place():
    """`torch.linalg.eigvals` and `eig` end the process at a NaN; the second caller replaces what is not finite."""
    assert _callers("torch.linalg.eigvals(") == {"massieu.foundation.matrices"}
    assert _callers("torch.linalg.eig(") == {"massieu.solve.attraction"}


NUMERICS = ("duality", "energy", "foundation", "inference", "measures", "ops", "regression", "solve")
FACTORIES = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn",
             "randperm", "tensor", "tril_indices", "triu_indices", "zeros"}  # fmt: skip
ON_THE_CPU = {
    "energy/entropy.py": "numbers without dimensions",
    "energy/sites.py": "nodes of a rule, moved when it is made",
    "energy/transformer.py": "a tensor, or a number without dimensions",
    "ops/cuda/packed_flash.py": "boundaries, read as lists or moved afterwards",
    "regression/transfer.py": "the argument of a function that has no other implementation",
}
"""Files that make tensors without a device, and why that is right."""


@pytest.mark.medium
def test_tensors_of_numerics_are_made_on_a_named_device():
    """A `device` that was forgotten shows on an accelerator only."""
    named = [_without_device(path) for room in NUMERICS for path in sorted((SOURCE / room).rglob("*.py"))]
    calls = [call for calls in named for call in calls]
    assert not [call for call in calls if call.partition(":")[0] not in ON_THE_CPU]
    assert {call.partition(":")[0] for call in calls} == set(ON_THE_CPU)


def _without_device(path: Path) -> list[str]:
    """Calls that make a tensor of some dimensions, neither on a device nor by a generator, which has one."""
    calls = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if ast.unparse(node.func.value) != "torch" or node.func.attr not in FACTORIES:
            continue
        has_device = any(keyword.arg in ("device", "generator", None) for keyword in node.keywords)
        has_no_dimension = bool(node.args) and ast.unparse(node.args[0]) == "()"
        if not has_device and not has_no_dimension:
            calls.append(f"{path.relative_to(SOURCE).as_posix()}:{node.lineno}: {ast.unparse(node)}")
    return calls


def _callers(call: str) -> set[str]:
    return {_module(path) for path in _files() if call in path.read_text(encoding="utf-8")}


# --- where a newcomer is sent ----------------------------------------------------------------------------------------


def _where_to_look() -> Iterator[tuple[str, str]]:
    """The tasks of ARCHITECTURE.md's table, and what stands beside each."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = page.partition("Where to look first:\n\n")[2].partition("\n\n")[0]
    for row in table.splitlines()[2:]:
        _, task, answer, _ = row.split("|")
        yield task.strip(), answer


def test_where_a_newcomer_is_sent_there_is_what_is_named():
    """Files that are named are in the probe (or are `report/…`), and one of them, or its room, has the names beside them."""
    tasks = dict(_where_to_look())
    assert len(tasks) >= 6
    for task, answer in tasks.items():
        code = re.findall(r"`([^`]+)`", answer)
        named = [word for word in code if word.endswith(".py")]
        assert named, task
        found = []
        for name in named:
            places = [SOURCE / name, SOURCE / "probing" / name, *(SOURCE / "probing").rglob(Path(name).name)]
            assert any(place.is_file() for place in places), f"{task}: there is no {name}"
            found.append(next(place for place in places if place.is_file()).read_text(encoding="utf-8"))
        for word in code:
            for part in (
                re.findall(r"[^\W\d]\w*", word) if word not in named and " " not in word and "." not in word else ()
            ):
                assert any(re.search(rf"\b{part}\b", text) for text in found), f"{task}: {part} is in none of {named}"
