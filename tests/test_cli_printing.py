"""What the command line prints of others' strings steers no terminal, and its lines fit one."""

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.report.synthetic_results import HOSTILE, hostile

from massieu.cli import terminal
from massieu.probing.result.result import ProbeResult
from massieu.probing.result.stored import run_of
from massieu.probing.run import ProbeProgress

ESCAPES = "\x1b[31m\x1b]0;title\x07\x9b2J\u202e"


def _with_escapes(value: Any) -> Any:
    """The value, with escapes in every string that an attacker has already chosen."""
    if isinstance(value, str):
        return value.replace(HOSTILE[0], HOSTILE[0] + ESCAPES)
    if isinstance(value, list):
        return [_with_escapes(each) for each in value]
    if isinstance(value, dict):
        return {_with_escapes(key): _with_escapes(each) for key, each in value.items()}
    return value


@pytest.fixture(scope="module")
def result() -> ProbeResult:
    made = hostile()
    run = run_of(_with_escapes(made.run), "made up")
    return ProbeResult(run, _with_escapes(made.details), made.heads, made.layers)


def _check(printed: str) -> None:
    assert r"\u001b[31m" in printed
    assert not set(ESCAPES[:1] + "\x07\x9b\u202e") & set(printed)


def test_the_summary_of_a_result(result, capsys):
    terminal.summarise(result, Path("folder"))
    printed = capsys.readouterr()
    _check(printed.out)
    _check(printed.err)


def test_the_representation_of_a_result(result):
    _check(repr(result))


def test_the_description_of_a_model(capsys):
    name = f"model {ESCAPES}"
    site = {"layer": 0, "name": name, "kind": "self", "heads": 1, "key_heads": 1, "head_size": 1, "route": name}
    found: dict[str, Any] = {"model": {"name": name}, "route": name, "sites": [site | {"grade": "full"}]}
    terminal.show_description(found | {"sublayers": [], "unavailable": [name], "warnings": [name]})
    printed = capsys.readouterr()
    _check(printed.out)
    _check(printed.err)


def test_progress_with_a_models_name(capsys):
    with terminal.progress_shown() as show:
        show(ProbeProgress(f"{ESCAPES}: reading", 0, None, 0))
    _check(capsys.readouterr().err)


@pytest.mark.parametrize(("narrower", "lines"), [(0, 1), (1, 2)], ids=["just wide enough", "a column too narrow"])
def test_the_meaning_of_a_statistic_goes_below_where_its_line_would_not_fit(narrower, lines, monkeypatch, capsys):
    rows = [
        SimpleNamespace(name="long_name", group="g", question="Is it?"),
        SimpleNamespace(name="n", group="group", question="So?"),
    ]
    columns = len("long_name") + 2 + len("group") + 2 + len("Is it?") - narrower
    monkeypatch.setattr(terminal.shutil, "get_terminal_size", lambda: os.terminal_size((columns, 24)))
    monkeypatch.setattr(terminal.sys.stdout, "isatty", lambda: True)
    terminal.list_statistics(rows)
    *printed, _, _ = re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out).splitlines()
    assert len(printed) == len(rows) * lines
    assert max(map(len, printed)) <= columns
