"""Tables of calls as tests: many rows as one test, and rows of which only some belong to the fast tests."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def every_row(
    names: str | Sequence[str], values: Iterable[Any], ids: Iterable[Any] | Callable[[Any], object] | None = None
) -> Callable[[Callable], Callable]:
    """As `pytest.mark.parametrize`, but one test: cheap where the rows are many and a row takes milliseconds.

    Fixtures are shared by the rows: none may be changed by one. A row that fails does not hide the next; the error
    is a group with one error for each row that failed, which names it.
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = list(values)
    if ids is None or callable(ids):
        labels = [_label(row, number, ids) for number, row in enumerate(table)]
    else:
        labels = [str(each) for each in ids]
    assert table, f"no row for {names}"
    assert len(labels) == len(table), f"{len(labels)} ids for {len(table)} rows"

    def decorate(test: Callable) -> Callable:
        signature = inspect.signature(test)
        unknown = set(arguments) - set(signature.parameters)
        assert not unknown, f"{test.__name__} takes no {', '.join(sorted(unknown))}"

        @functools.wraps(test)
        def run(*given: Any, **fixtures: Any) -> None:
            failed = []
            for label, row in zip(labels, table, strict=True):
                chosen = dict(zip(arguments, _numbers(row, len(arguments)), strict=True))
                try:
                    test(*given, **fixtures, **chosen)
                except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
                    error.add_note(f"row: {label}")
                    failed.append(error)
            if failed:
                raise BaseExceptionGroup(f"{len(failed)} of {len(table)} rows fail", failed)

        kept = [parameter for name, parameter in signature.parameters.items() if name not in arguments]
        run.__signature__ = signature.replace(parameters=kept)  # pyright: ignore[reportAttributeAccessIssue]
        return run

    return decorate


def _numbers(row: Any, count: int) -> tuple[Any, ...]:
    if isinstance(row, ParameterSet):
        assert not row.marks, "a row has no marks of its own: use pytest.mark.parametrize"
        return tuple(row.values)
    return (row,) if count == 1 else tuple(row)


def _label(row: Any, number: int, name: Callable[[Any], object] | None) -> str:
    if isinstance(row, ParameterSet) and row.id:
        return str(row.id)
    value = row.values if isinstance(row, ParameterSet) else row
    return f"{number}: {value!r:.200}" if name is None else f"{number}: {name(value)}"


def some_slow(
    names: str | Sequence[str], values: Iterable[Any], quick: int, ids: Iterable[Any] | Callable | None = None
) -> pytest.MarkDecorator:
    """As `pytest.mark.parametrize`; all values but the first so many are slow tests."""
    several = not isinstance(names, str) or "," in names
    table = list(values)
    given = list(ids) if ids is not None and not callable(ids) else None
    marked = []
    for place, row in enumerate(table):
        marks = [*(row.marks if isinstance(row, ParameterSet) else ()), *([pytest.mark.slow] if place >= quick else [])]
        chosen = row.values if isinstance(row, ParameterSet) else tuple(row) if several else (row,)
        label = row.id if isinstance(row, ParameterSet) else None
        marked.append(pytest.param(*chosen, marks=marks, id=str(given[place]) if given else label))
    return pytest.mark.parametrize(names, marked, ids=ids if callable(ids) else None)


def one_in(quick: int, columns: Mapping[str, Iterable[Any]]) -> pytest.MarkDecorator:
    """As `pytest.mark.parametrize` with all combinations of some values, of which one in so many is no slow test.

    Quick are those whose places in their columns add up to a multiple of `quick`: the values of a column then meet those
    of the others in turn, and each must occur. A column may be of several names: "length, keys".
    """
    groups = [[name.strip() for name in names.split(",")] for names in columns]
    tables = [list(values) for values in columns.values()]
    rows, tried = [], set()
    for places in itertools.product(*(range(len(table)) for table in tables)):
        cells = zip(groups, tables, places, strict=True)
        row = [number for names, table, place in cells for number in _numbers(table[place], len(names))]
        is_slow = sum(places) % quick > 0
        rows.append(pytest.param(*row, marks=[pytest.mark.slow] if is_slow else []))
        tried.update(() if is_slow else enumerate(places))
    assert len(tried) == sum(map(len, tables)), f"one in {quick} leaves out a value altogether: try more of them"
    return pytest.mark.parametrize(list(itertools.chain.from_iterable(groups)), rows)
