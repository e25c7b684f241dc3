"""Progress: a bar on a terminal, one line that is overwritten in a notebook, and nothing in a file."""

import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from massieu.foundation import watching
from massieu.foundation.watching import progress_line, track


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Handle:
    def __init__(self, outputs: list[str]) -> None:
        self.outputs = outputs

    def update(self, output: dict[str, str], raw: bool) -> None:
        assert raw
        self.outputs[-1] += f"\n{output['text/plain']}"


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The outputs of a cell; what is written over one stands in further lines of it."""
    outputs: list[str] = []

    def display(output: dict[str, str], raw: bool, display_id: bool) -> _Handle:
        assert raw and display_id
        outputs.append(output["text/plain"])
        return _Handle(outputs)

    shell = SimpleNamespace(kernel=object())
    ipython: Any = SimpleNamespace(get_ipython=lambda: shell, display=SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return outputs


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the line sees: the last of these numbers."""
    times = [0.0]
    monkeypatch.setattr(watching.time, "monotonic", lambda: times[-1])
    return times


def test_in_a_file_or_pipe_nothing_is_written(capsys):
    assert watching.watched() is None
    assert list(track(range(3), "counting")) == [0, 1, 2]
    with progress_line() as report:
        report("reading", 1, 2, "1 token")
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_a_bar_is_shown_and_then_removed(monkeypatch):
    terminal = _Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    assert watching.watched() == "terminal"
    assert sum(track(range(3), "counting [red]")) == 3
    written = terminal.getvalue()
    assert "counting [red]" in written and "3 of 3" in written
    assert written.endswith("\x1b[2K")  # the line is empty again


def test_ipython_in_a_terminal_is_no_notebook(monkeypatch):
    ipython: Any = SimpleNamespace(get_ipython=lambda: SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert watching.watched() is None
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert watching.watched() is None


def test_in_a_notebook_one_line_is_overwritten(notebook, seconds):
    with progress_line() as report:
        report("loading", 0, None, "")
        report("reading", 0, 100, "0 tokens")
        seconds.append(0.1)
        report("reading", 10, 100, "10 tokens")  # too soon after the last one
        seconds.append(0.3)
        report("reading", 30, 100, "30 tokens")
        seconds.append(0.4)
        report("writing\x1b[2J", 120, 100, "")
        seconds.append(12.3)
    (line,) = notebook
    assert line.split("\n") == [
        "loading",
        "reading 0 %, 0 tokens",
        "reading 30 %, 30 tokens",
        "writing\\u001b[2J 100 %",
        "writing\\u001b[2J 100 %, 12 s",
    ]


def test_the_line_ends_with_the_last_count_after_an_error(notebook, seconds):
    def failing() -> None:
        for number in track(range(4), "counting"):
            seconds.append(0.1 * number)
            if number == 2:
                raise RuntimeError("two")

    with pytest.raises(RuntimeError, match="two"):
        failing()
    (line,) = notebook
    assert line.startswith("counting 0 %, 0 of 4\n")


def test_no_items_and_no_wish_show_nothing(notebook):
    assert list(track([1, 2], "counting", shown=False)) == [1, 2]
    assert notebook == []
    assert list(track([], "counting")) == []
    assert len(notebook) == 1  # 0 of 0
