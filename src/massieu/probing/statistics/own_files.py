"""Statistics of the user's own, named on the command line as ``heads.py:nearby``: a function of a Python file."""

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
    """The statistics of these names; for ``FILE.py:NAME`` the file is run, and its object of that name taken.

    Raises:
        InputError: there is no such file, it cannot be run, or it has no statistic of that name.
    """
    return [_of_file(*_parts(name)) if f"{_SUFFIX}:" in name or name.endswith(_SUFFIX) else name for name in names]


def _parts(file_and_name: str) -> tuple[Path, str]:
    file, _, name = file_and_name.rpartition(":")
    if not file.endswith(_SUFFIX) or not name.isidentifier():
        raise InputError(f"a statistic of a file is named FILE.py:NAME, got {file_and_name!r}")
    return Path(file).expanduser(), name


def _of_file(file: Path, name: str) -> Named:
    module = _run(file)
    value = vars(module).get(name)
    if isinstance(value, OwnStatistic) or (isinstance(value, type) and issubclass(value, Group)):
        return value
    if value is not None:
        return as_own(value)
    names = sorted(name for name, value in vars(module).items() if isinstance(value, OwnStatistic))
    hint = f"its statistics are {', '.join(names)}" if names else "and no function marked by @massieu.statistic either"
    raise InputError(f"{file} has nothing called {name}; {hint}")


def _run(file: Path) -> ModuleType:
    """The file as a module; run once, however many of its statistics are named."""
    if not file.is_file():
        raise InputError(f"there is no file {file} to take a statistic from")
    path = file.resolve()
    module_name = f"massieu_own_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec: Any = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses in it look themselves up there
    sys.path.insert(0, str(path.parent))  # the file may import its neighbours
    try:
        with calling_own():
            spec.loader.exec_module(module)
    except OwnFunctionError as error:
        del sys.modules[module_name]
        raise InputError(f"{file} cannot be run: {str(error).removeprefix('it raised ')}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module
