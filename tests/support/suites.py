"""Conformance suites as pytest's rows, and the registry: which final classes of a contract have a case."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
from _pytest.mark import ParameterSet

import massieu

SHARED_LAWS = frozenset(
    {
        "structure",
        "one by one",
        "vmap",
        "no query",
        "meta",
        # as they are called for measures
        "shapes",
        "batching",
        "empty",
        "lists and arrays",
    }
)
"""Laws of what the classes of a contract inherit: batches, vmap, pytrees, shapes, devices, kinds of input.

They call a class's own formula as every law does, but what they alone can find wrong is mostly in the base class.
"""

ROOMS_OF_APPLICATIONS = ("cli", "papers.claims", "papers.experiments", "probing", "report", "sklearn", "storage")
"""Where no contract is implemented, and what is imported takes long."""

REPRESENTATIVES = 3
"""How many cases of a suite keep those laws in the fast tier."""


def every_check(
    suite: Callable[[Any], Iterable[tuple[str, Callable[[], None]]]],
    cases: Mapping[str, Any],
    medium: Collection[str] = (),
    slow: Collection[str] = (),
    representatives: Collection[str] = (),
) -> pytest.MarkDecorator:
    """One test for each check of each case, "case: check"; what is named, a case or one of its checks, is medium or slow.

    `SHARED_LAWS` are slow tests except for the representatives: if none are named, the first case of each of the first
    three classes.
    """
    quick = {name: case for name, case in cases.items() if name not in slow}
    representatives = representatives or first_of_each_class(quick)[:REPRESENTATIVES]
    rows = []
    for name, case in cases.items():
        for law, check in suite(case):
            row = f"{name}: {law}"
            marks = []
            if name in slow or row in slow or (law in SHARED_LAWS and name not in representatives):
                marks = [pytest.mark.slow]
            elif name in medium or row in medium:
                marks = [pytest.mark.medium]
            rows.append(pytest.param(check, marks=marks, id=row))
    return pytest.mark.parametrize("check", rows)


def first_of_each_class(cases: Mapping[str, Any]) -> list[str]:
    """The names of the first cases of different classes. What a case checks is its first positional field."""
    names: dict[type, str] = {}
    for name, case in cases.items():
        subject = next(entry.name for entry in fields(case) if not entry.kw_only)
        names.setdefault(type(getattr(case, subject)), name)
    return list(names.values())


def compiled(suite: Callable[[Any], Any], cases: Mapping[str, Any]) -> list[ParameterSet]:
    """The check that compiled is eager, of one case of each class that promises it: for slow tests."""
    promising = {name: case for name, case in cases.items() if "compiled" not in case.exempt}
    return [pytest.param(_compiled_check(suite, cases[name]), id=name) for name in first_of_each_class(promising)]


def _compiled_check(suite: Callable[[Any], Any], case: Any) -> Callable[[], None]:
    """The suite's checks are made when the test runs: collection stays cheap."""
    return lambda: suite(replace(case, compile_backend="aot_eager"))["compiled"]()


IN_TRITON = {"massieu.ops.cuda.row_kernels", "massieu.ops.cuda.moment_kernel"}
"""They hold kernels and no class, and need a package that only installations for CUDA have."""


def final_classes(base: type) -> set[type]:
    """Those of the package that derive from `base`, its private ones too."""
    for module in pkgutil.walk_packages(massieu.__path__, "massieu."):
        of_an_application = f"{module.name}.".startswith(tuple(f"massieu.{room}." for room in ROOMS_OF_APPLICATIONS))
        if not of_an_application and module.name not in IN_TRITON:
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
