"""Statistics of the user's own as the command line names them: ``heads.py:nearby``, a function of a Python file."""

import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from massieu.errors import InputError
from massieu.probing.model.unexpected import OwnFunctionError, calling_own
from massieu.probing.statistics.catalogue import Named
from massieu.probing.statistics.group import Group
from massieu.probing.statistics.own import OwnStatistic, as_own

_SUFFIX = ".py"


def named(names: Iterable[str]) -> list[Named]:
    """The statistics of these names; ``FILE.py:NAME`` is what the file calls so, and running the file makes it.

    Raises:
        InputError: there is no such file, it cannot be run, or it has no statistic of that name.
    """
    return [_of_file(*_parts(name)) if f"{_SUFFIX}:" in name or name.endswith(_SUFFIX) else name for name in names]


def _parts(given: str) -> tuple[Path, str]:
    file, _, name = given.rpartition(":")
    if not file.endswith(_SUFFIX) or not name.isidentifier():
        raise InputError(f"a statistic of a file is named FILE.py:NAME, got {given!r}")
    return Path(file).expanduser(), name


def _of_file(file: Path, name: str) -> Named:
    module = _run(file)
    found = vars(module).get(name)
    if isinstance(found, OwnStatistic) or (isinstance(found, type) and issubclass(found, Group)):
        return found
    if found is not None:
        return as_own(found)
    here = sorted(known for known, each in vars(module).items() if isinstance(each, OwnStatistic))
    said = f"its statistics are {', '.join(here)}" if here else "and no function marked by @massieu.statistic either"
    raise InputError(f"{file} has nothing called {name}; {said}")


def _run(file: Path) -> ModuleType:
    """The file as a module; run once, however many of its statistics are named."""
    if not file.is_file():
        raise InputError(f"there is no file {file} to take a statistic from")
    whole = file.resolve()
    called = f"massieu_own_{hashlib.sha256(str(whole).encode()).hexdigest()[:16]}"
    if called in sys.modules:
        return sys.modules[called]
    spec: Any = importlib.util.spec_from_file_location(called, whole)
    module = importlib.util.module_from_spec(spec)
    sys.modules[called] = module  # dataclasses in it look themselves up there
    sys.path.insert(0, str(whole.parent))  # what stands beside it may be imported
    try:
        with calling_own():
            spec.loader.exec_module(module)
    except OwnFunctionError as error:
        del sys.modules[called]
        raise InputError(f"{file} cannot be run: {str(error).removeprefix('it raised ')}") from error
    finally:
        sys.path.remove(str(whole.parent))
    return module
