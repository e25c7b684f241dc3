"""Every public class and verb shows itself at work: an example in its docstring, run here, with the output that it prints."""

import doctest
import importlib
import inspect
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.test_house import ROOMS, _public

import massieu

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
RUNNER = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False)


def shown(module: ModuleType) -> dict[str, Any]:
    """What a room's users call or construct: its public classes and functions, by their dotted names."""
    found = {}
    for name in _public(module):
        value: Any = module
        for part in name.split(".")[0 if module is massieu else 1 :]:
            value = getattr(value, part)
        if inspect.isclass(value) or inspect.isroutine(value):
            found[name] = value
    return found


def failures(name: str, value: Any) -> list[str]:
    """What is wrong with the examples of one name: none is there, or one prints something else."""
    text = inspect.getdoc(value) or ""
    if ">>>" not in text:
        return [f"{name}: no example"]
    example = doctest.DocTestParser().get_doctest(text, {"__name__": "__main__"}, name, None, 0)
    said: list[str] = []
    with torch.random.fork_rng():
        RUNNER.run(example, out=said.append)
    return ["".join(said)] if said else []


@pytest.mark.parametrize("room", [pytest.param("massieu", marks=pytest.mark.medium), *ROOMS])
def test_examples_print_what_they_say(room):
    found = shown(massieu if room == "massieu" else importlib.import_module(f"massieu.{room}"))
    wrong = [line for name, value in found.items() for line in failures(name, value)]
    assert not wrong, "\n".join(wrong)


def test_a_wrong_output_and_a_missing_example_are_seen():
    def wrong() -> None:
        """
        >>> 1 + 1
        3
        """

    def none() -> None:
        """Nothing."""

    def right() -> None:
        """
        >>> 1 + 1
        2
        """

    assert "Expected" in failures("wrong", wrong)[0]
    assert failures("none", none) == ["none: no example"]
    assert failures("right", right) == []
