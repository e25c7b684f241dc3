"""Calls every public name with wrong arguments and counts how many end clearly: `python scripts/fuzz_calls.py --calls 20000`.

What a right call is comes from the examples in the docstrings: they are run, and the arguments of every public function, method
and constructor are recorded on the way. A hostile call is such a call with one argument replaced by a value that is no use, or
left out, or with one too many. Each runs under a limit of time and memory in a process of its own, which is started again after
a call that does not end. What stands behind other doors is left out: the constructors of values, which check nothing because
transforms call them (`create` does), those of estimators (`fit` does, by scikit-learn's rules) and of what only holds; and the
methods that heads and methods of solution have for the modules that use them.

A call is clear if it ends in one of these ways:

- with a result, unless the value is of a kind that the annotation of the argument rules out: then it was taken in silence;
- with a `TypeError` or `ValueError` that a line of this package raises on purpose, and that names an argument or quotes the
  text that was given for it;
- with an error of a class of this package, of what no argument shows before it is computed, such as `ConvergenceError`;
- with Python's own sentence about arguments that are missing or too many, or scikit-learn's about a table.

All else is internal text, a value that was taken, or a hang. The seed is the commit's, so that a run can be repeated.
"""

import argparse
import contextlib
import copy
import dis
import doctest
import importlib
import inspect
import io
import json
import multiprocessing
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import types
import typing
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.base import BaseEstimator
from torch import Tensor, nn

import massieu
from massieu.errors import InputError
from massieu.foundation.values import Value
from massieu.nn.strategy import Heads
from massieu.solve.linear import LinearSolver
from massieu.solve.methods import Method

PACKAGE = Path(massieu.__file__).parent
SECONDS = 10.0
"""The time that a call may take."""
MEMORY = 4 << 30
"""Bytes that a process may have beside those that it begins with."""
CALLS_OF_A_NAME = 4
"""Recorded calls of one function, at most."""
HOLDERS = ("AtomStore", "Case", "Claim", "Comparison", "ProbeResult")
"""Classes that are not made by calling them, or hold what a suite is to try, right or wrong."""
CLEAR = ("result", "explained")
"""The outcomes of a call that a user can work with."""
LEGAL = {("massieu.papers.verify", "ids"), ("massieu.probe", "model")}
"""Arguments that are not left out, and not None: that is a right call, which runs every claim, or loads a model, for long."""


class Call(NamedTuple):
    """A right call: a public function, method or constructor, and its arguments by name."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]


class Hostile(NamedTuple):
    """A right call with something wrong: the number of the call, the argument, and the number of the value."""

    call: int
    argument: str
    value: int


LEFT_OUT, ONE_TOO_MANY, NONE = -1, -2, 0
"""In place of a value: the argument is not given; an argument is given that does not exist; the first of the values."""


# --- what is public, and how it is called ------------------------------------------------------------------------------


def rooms() -> list[str]:
    """The rooms that are public, the package's own list of names first."""
    return ["massieu", *(f"massieu.{name}" for name in massieu.__all__ if inspect.ismodule(getattr(massieu, name)))]


def public_objects(module_name: str) -> Iterator[tuple[str, Any]]:
    """Every public class and function of a room with its dotted name."""
    module = importlib.import_module(module_name)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.ismodule(value) and module_name != "massieu":
            yield from public_objects(f"{module_name}.{name}")
        elif inspect.isclass(value) or inspect.isroutine(value):
            yield f"{module_name}.{name}", value


def _functions_of(name: str, value: Any) -> Iterator[tuple[types.CodeType, str, Callable[..., Any]]]:
    """The code of everything that can be called of a public object, its name, and what to call."""
    if not inspect.isclass(value):
        inner = inspect.unwrap(value)
        if inspect.isfunction(inner):
            yield inner.__code__, name, value
        return
    for attribute in dir(value):
        if attribute.startswith("_") and attribute not in ("__init__", "__call__"):
            continue
        function = inspect.unwrap(getattr(value, attribute))
        function = getattr(function, "__func__", function)
        if not inspect.isfunction(function) or not _is_ours(function.__code__, value) or _is_hook(value, attribute):
            continue
        if attribute == "__init__":
            yield function.__code__, name, value
        else:
            yield function.__code__, f"{name}.{attribute}", getattr(value, attribute)


def _is_ours(code: types.CodeType, owner: type) -> bool:
    generated = code.co_filename == "<string>"  # the constructor of a dataclass
    return code.co_filename.startswith(str(PACKAGE)) or (generated and owner.__module__.startswith("massieu"))


def _is_hook(owner: type, attribute: str) -> bool:
    """Whether a method is for other classes of the package, which have checked what they give it."""
    if attribute == "__init__":
        return owner.__name__.endswith(HOLDERS) or issubclass(owner, Value | BaseEstimator | BaseException)
    by_class = isinstance(inspect.getattr_static(owner, attribute), classmethod | staticmethod)
    return issubclass(owner, Heads | Method | LinearSolver) and not by_class


def record_calls(room: str) -> list[Call]:
    """The right calls of every public name of a room, from the examples in the docstrings."""
    known: dict[types.CodeType, list[tuple[str, Callable[..., Any]]]] = {}
    objects = list(public_objects(room))
    for name, value in objects:
        for code, called, function in _functions_of(name, value):
            known.setdefault(code, []).append((called, function))
    calls: dict[str, list[Call]] = {}

    def watch(frame: types.FrameType, event: str, argument: object) -> None:
        if event != "call" or frame.f_code not in known:
            return
        for called, function in known[frame.f_code]:
            arguments = _arguments(frame, function)
            if arguments is not None and len(calls.setdefault(called, [])) < CALLS_OF_A_NAME:
                calls[called].append(Call(called, function, arguments))

    for name, value in objects:
        _run_example(name, value, watch)
    return [call for found in calls.values() for call in found]


def _arguments(frame: types.FrameType, function: Callable[..., Any]) -> dict[str, Any] | None:
    """The arguments that a frame was called with; None where a class is made by one that is derived from it."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    names = code.co_varnames[:count]
    arguments = {name: frame.f_locals[name] for name in names}
    if code.co_flags & inspect.CO_VARARGS or code.co_flags & inspect.CO_VARKEYWORDS:
        extra = code.co_varnames[count : count + 2]
        if any(frame.f_locals.get(name) for name in extra):
            return None
    if inspect.isclass(function):
        made = arguments.pop(names[0])
        return arguments if type(made) is function else None
    if inspect.ismethod(function):
        arguments.pop(names[0])
    return {name: _kept(value) for name, value in arguments.items()}


def _kept(value: Any) -> Any:
    """A copy as far as one can be made: examples change their modules and use their generators up."""
    try:
        return copy.deepcopy(value)
    except Exception:  # files, modules of Python, what refuses to be copied
        return value


def _run_example(name: str, value: Any, watch: Callable[..., None]) -> None:
    text = inspect.getdoc(value) or ""
    example = doctest.DocTestParser().get_doctest(text, {"__name__": "__main__"}, name, None, 0)
    runner = doctest.DocTestRunner(verbose=False)
    sys.settrace(watch)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runner.run(example, out=lambda _: None, clear_globs=False)
    finally:
        sys.settrace(None)


# --- what is wrong -----------------------------------------------------------------------------------------------------


def hostile_values() -> list[Any]:
    """Values that are no use to most arguments."""
    sparse = torch.eye(2).to_sparse()
    return [
        None,
        True,
        False,
        0,
        -1,
        7,
        1 << 63,
        10**30,
        1.5,
        -2.5,
        1e30,
        float("nan"),
        float("inf"),
        1j,
        "x",
        "64",
        "",
        b"",
        object(),
        int,
        print,
        [],
        [1, 2],
        ["x"],
        {},
        {"x": 1},
        (),
        (3, -1),
        range(3),
        Path("nowhere"),
        np.float64(2.0),
        np.array(["x"]),
        np.zeros((2, 3)),
        torch.tensor(0.5),
        torch.tensor(float("nan")),
        torch.zeros(0),
        torch.zeros(2, 3),
        torch.zeros(2, 3, dtype=torch.float64),
        torch.full((3,), float("inf")),
        torch.ones(2, 3, dtype=torch.int64),
        torch.ones(3, dtype=torch.bool),
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3).to(torch.float8_e4m3fn),
        torch.zeros(3, dtype=torch.float16),
        torch.zeros(2, 3, device="meta"),
        torch.zeros(1, 1, 1, 1, 1, 1),
        sparse,
        torch.float32,
        torch.int64,
        torch.device("meta"),
        torch.Generator(),
        nn.Linear(2, 2),
    ]


def plans(calls: Sequence[Call], values: int, count: int, seed: int) -> list[Hostile]:
    """Hostile calls: each name as often, each of its arguments as often."""
    draw = random.Random(seed)
    by_name: dict[str, list[int]] = {}
    for number, call in enumerate(calls):
        by_name.setdefault(call.name, []).append(number)
    names = sorted(by_name)
    planned = []
    while len(planned) < count:
        number = draw.choice(by_name[draw.choice(names)])
        arguments = [name for name in calls[number].arguments if name != "self"]
        argument = draw.choice([*arguments, ""])
        value = draw.choice([LEFT_OUT, *range(values)])
        if (calls[number].name, argument) in LEGAL and value in (LEFT_OUT, NONE):
            continue
        if not argument:
            planned.append(Hostile(number, "nonsense", ONE_TOO_MANY))
        else:
            planned.append(Hostile(number, argument, value))
    return planned


# --- one call ----------------------------------------------------------------------------------------------------------


def outcome_of(call: Call, hostile: Hostile, value: Any) -> tuple[str, str]:
    """How a hostile call ends, and what it says."""
    arguments = {name: _kept(each) for name, each in call.arguments.items()}
    if hostile.value == LEFT_OUT:
        del arguments[hostile.argument]
    else:
        arguments[hostile.argument] = value
    placed, named = _by_place(call.function, arguments)
    try:
        result = call.function(*placed, **named)
        if inspect.isgenerator(result):
            next(result, None)
    except Exception as error:
        kind = "explained" if _is_explained(error, call, hostile.argument, value) else "internal"
        return kind, f"{type(error).__name__}: {str(error)[:300]} [{_place(error)}]"
    annotation = _annotation(call.function, hostile.argument)
    if hostile.value >= 0 and not fits(value, annotation):
        return "taken", f"{value!r:.60} for {annotation}"
    return "result", ""


def _by_place(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments, those that cannot be named by their place."""
    named = dict(arguments)
    placed = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY or parameter.name == "self":
            if parameter.name not in named:
                break
            placed.append(named.pop(parameter.name))
    return placed, named


def _is_explained(error: Exception, call: Call, argument: str, value: Any) -> bool:
    """Whether a user can work with an error: it is meant, and says which argument."""
    ours = type(error).__module__.startswith("massieu.") and not isinstance(error, InputError)
    if not (ours or isinstance(error, TypeError | ValueError)):
        return False
    frames = list(_traceback(error))
    last = frames[-1]
    message = str(error)
    file = last.tb_frame.f_code.co_filename
    if any(each.tb_frame.f_code.co_filename.endswith("sklearn/utils/validation.py") for each in frames):
        return True
    if not file.startswith(str(PACKAGE)) or not _raises(last):
        return _is_about_binding(message, call)
    if ours or (isinstance(value, str) and value and repr(value) in message):
        return True
    words = set(re.findall(r"\w+", message))
    return bool(words & (_known_names(frames, call) | {argument})) and "\n" not in message.strip()


def _is_about_binding(message: str, call: Call) -> bool:
    """Whether Python could not bind the arguments of the call itself."""
    if "unexpected keyword argument 'nonsense'" in message:  # handed on to another function
        return True
    words = r"missing \d+ required|got an unexpected keyword argument|takes .* positional arguments? but"
    function = call.name.rpartition(".")[2]
    return re.search(rf"\b({function}|{function}\.__init__|__init__)\(\) ({words})", message) is not None


def _known_names(frames: Iterable[types.TracebackType], call: Call) -> set[str]:
    """The arguments of the call and of the functions of ours that it went through, and their parts in words."""
    names: set[str] = set()
    for each in frames:
        code = each.tb_frame.f_code
        if code.co_filename.startswith(str(PACKAGE)):
            names |= set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    names -= {"self", "cls", "name", "value", "error", "message"}  # of the functions that check
    names |= set(call.arguments)
    if isinstance(told := call.arguments.get("name"), str):  # what the error is to call another argument
        names.add(told)
    return names | {f"{name}s" for name in names}


def _traceback(error: BaseException) -> Iterator[types.TracebackType]:
    entry = error.__traceback__
    while entry is not None:
        yield entry
        entry = entry.tb_next


def _raises(entry: types.TracebackType) -> bool:
    """Whether a frame ends in a ``raise`` of its own, and not in an operation that failed."""
    code = entry.tb_frame.f_code.co_code
    return dis.opname[code[entry.tb_lasti]] == "RAISE_VARARGS"


def _place(error: BaseException) -> str:
    """The last line of this package that an error went through."""
    ours = [each for each in _traceback(error) if each.tb_frame.f_code.co_filename.startswith(str(PACKAGE))]
    if not ours:
        return "outside"
    file = Path(ours[-1].tb_frame.f_code.co_filename).relative_to(PACKAGE)
    return f"{file}:{ours[-1].tb_lineno}"


# --- what an annotation rules out --------------------------------------------------------------------------------------


def _annotation(function: Callable[..., Any], argument: str) -> Any:
    target = function.__init__ if inspect.isclass(function) else function
    try:
        return typing.get_type_hints(inspect.unwrap(target)).get(argument, Any)
    except (NameError, TypeError, AttributeError):  # names that are imported for the type checker alone
        return Any


def fits(value: Any, annotation: Any) -> bool:
    """Whether a value may be of an annotated kind. Numbers and lists are taken for tensors, as `real_tensor` does."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is None or annotation is type(None):
        return value is None
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if origin is typing.Annotated:
        return fits(value, parts[0])
    if origin is typing.Literal:
        return any(value is part or (isinstance(value, str) and value == part) for part in parts)
    kind = origin or annotation
    if not inspect.isclass(kind):
        return True  # Any, type variables and names: nothing is known
    if issubclass(kind, Tensor) or hasattr(kind, "array_type"):
        return _is_numbers(value)
    if kind in (object, Any):
        return True
    if kind is bool:
        return isinstance(value, bool)
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if issubclass(kind, os.PathLike):
        return isinstance(value, str | bytes | os.PathLike)
    if issubclass(kind, Mapping):
        return isinstance(value, Mapping)
    if kind in (Sequence, list, tuple) or issubclass(kind, Iterable):
        return isinstance(value, Iterable) or callable(getattr(value, "__getitem__", None))
    return typing.is_typeddict(kind) or getattr(kind, "_is_protocol", False) or isinstance(value, kind)


def _is_numbers(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_complex() and value.layout == torch.strided and value.dtype != torch.float8_e4m3fn
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "fiub"
    if isinstance(value, list | tuple | range):
        return all(_is_numbers(each) for each in value)
    return isinstance(value, Real)


# --- many calls --------------------------------------------------------------------------------------------------------


def _work(room: str, count: int, seed: int, done: int, pipe: Connection) -> None:
    """Record a room's calls, then make so many hostile ones but the first, and report each."""
    os.setpgrp()
    _be_quiet()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        calls, values = record_calls(room), hostile_values()
        pipe.send(len({call.name for call in calls}))
        resource.setrlimit(resource.RLIMIT_AS, (_memory_in_use() + MEMORY,) * 2)
        for hostile in plans(calls, len(values), count, seed)[done:]:
            value = None if hostile.value < 0 else _kept(values[hostile.value])
            given = {LEFT_OUT: "left out", ONE_TOO_MANY: "1"}.get(hostile.value) or f"{value!r:.60}"
            row = {"name": calls[hostile.call].name, "argument": hostile.argument, "given": given}
            pipe.send(row)
            torch.manual_seed(0)
            outcome, said = outcome_of(calls[hostile.call], hostile, value)
            pipe.send({"outcome": outcome, "said": said})


def _be_quiet() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    warnings.simplefilter("ignore")


def _memory_in_use() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def outcomes(room: str, count: int, seed: int) -> Iterator[dict[str, str]]:
    """How each hostile call of a room ends; behind one that does not, another process goes on."""
    forking = multiprocessing.get_context("fork")
    done = 0
    row: dict[str, str] | None = None
    while done < count:
        ours, theirs = forking.Pipe(duplex=False)
        process = forking.Process(target=_work, args=(room, count, seed, done, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            ours.recv()  # the examples may take long
            while done < count:
                row = ours.recv()
                done += 1
                if not ours.poll(SECONDS):
                    yield row | {"outcome": "hang", "said": f"no end after {SECONDS:g} s"}
                    break
                yield row | ours.recv()
        except EOFError:
            if row is None:
                raise RuntimeError(f"the examples of {room} cannot be run") from None
            yield row | {"outcome": "crash", "said": "the process ended"}
        process.kill()
        process.join()
        ours.close()


def seed_of_commit() -> int:
    """A seed that is the commit's."""
    told = subprocess.run(["git", "rev-parse", "HEAD"], cwd=PACKAGE, capture_output=True, text=True, check=True)
    return int(told.stdout[:8], 16)


def run(count: int, seed: int) -> list[dict[str, str]]:
    """So many hostile calls, in each room as many as it has public names, and how each ended."""
    sizes = {room: sum(1 for _ in public_objects(room)) for room in rooms()}
    # PyTorch imports much for the first tensor on meta: here, and not in the process of each room.
    torch.linalg.eigvalsh(torch.eye(2, device="meta"))
    shares = {room: -(-count * size // sum(sizes.values())) for room, size in sizes.items() if size}
    return [row for room, share in shares.items() for row in outcomes(room, share, seed)]


def main() -> None:
    """Run the calls, and print how many were clear."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=20_000, help="how many hostile calls [20000]")
    parser.add_argument("--seed", type=int, default=None, help="of the draws [the commit's]")
    parser.add_argument(
        "--out", type=Path, default=None, help="a file for the calls that were not clear, as JSON lines"
    )
    asked = parser.parse_args()
    seed = seed_of_commit() if asked.seed is None else asked.seed
    rows = run(asked.calls, seed)
    counts = Counter(row["outcome"] for row in rows)
    unclear = [row for row in rows if row["outcome"] not in CLEAR]
    if asked.out is not None:
        asked.out.write_text("".join(json.dumps(row) + "\n" for row in unclear))
    print(f"{len(rows):,} calls of {len({row['name'] for row in rows}):,} public callables, seed {seed}")
    print(", ".join(f"{name} {number:,}" for name, number in sorted(counts.items())))
    print(f"clear: {1 - len(unclear) / len(rows):.2%}")


if __name__ == "__main__":
    main()
