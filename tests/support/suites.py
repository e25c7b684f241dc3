"""Conformance suites as pytest's rows, and the registry: which final classes of a contract have a case."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from _pytest.mark import ParameterSet

import massieu


def every_check(
    suite: Callable[[Any], Any], cases: Mapping[str, Any], medium: Collection[str] = (), slow: Collection[str] = ()
) -> pytest.MarkDecorator:
    """One test for each check of each case, "case: check"; what is named, a case or one of its checks, is medium or slow."""
    rows = []
    for name, case in cases.items():
        for law, check in suite(case):
            names = {name, f"{name}: {law}"}
            marks = [pytest.mark.slow] if names & set(slow) else [pytest.mark.medium] if names & set(medium) else []
            rows.append(pytest.param(check, marks=marks, id=f"{name}: {law}"))
    return pytest.mark.parametrize("check", rows)


def compiled(suite: Callable[[Any], Any], cases: Mapping[str, Any]) -> list[ParameterSet]:
    """The check that compiled is eager, of each case that promises it: for slow tests."""
    suites = {name: suite(replace(case, compile_backend="aot_eager")) for name, case in cases.items()}
    return [pytest.param(checks["compiled"], id=name) for name, checks in suites.items() if "compiled" in checks]


def final_classes(base: type) -> set[type]:
    """Those of the package that derive from `base`, its private ones too."""
    for module in pkgutil.walk_packages(massieu.__path__, "massieu."):
        if module.name.split(".")[1] not in ("cli", "probing", "verification", "report"):
            importlib.import_module(module.name)
    found, queue = set(), [base]
    while queue:
        queue += (cls := queue.pop()).__subclasses__()
        if not inspect.isabstract(cls) and cls.__module__.startswith("massieu."):
            found.add(cls)
    return found


def without_a_case(base: type, values: Iterable[object]) -> set[str]:
    """The names of final classes of which no value is given."""
    return {cls.__name__ for cls in final_classes(base) - {type(value) for value in values}}
