"""How far something is, for a person who watches: a bar on a terminal, one line that is overwritten in a notebook."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from massieu.foundation.printable import visible

Item = TypeVar("Item")
Report = Callable[[str, int, int | None, str], None]
"""Told what is done now, how much of it is done, of how much (None: unknown), and a count in words."""
_SECONDS_BETWEEN = 0.2
"""Between two changes of a notebook's line; what begins, and the end, is shown at once."""


def watched() -> Literal["terminal", "notebook"] | None:
    """Where a person sees what happens: standard error is a terminal, or a notebook's kernel runs the code.

    Example:
        >>> from massieu.foundation.watching import watched
        >>> watched() in ("terminal", "notebook", None)
        True
    """
    if _notebook() is not None:
        return "notebook"
    return "terminal" if sys.stderr is not None and sys.stderr.isatty() else None


def _notebook() -> Any:
    """IPython, if its shell has a kernel, as in Jupyter, Colab and VS Code; else None. It is not imported for this."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return ipython if getattr(shell, "kernel", None) is not None else None


@contextmanager
def progress_line() -> Iterator[Report]:
    """Show how far something is, where a person watches; elsewhere nothing is written."""
    place = watched()
    if place == "terminal":
        with _bar() as report:
            yield report
    elif place == "notebook":
        line = _NotebookLine(_notebook().display.display)
        try:
            yield line
        finally:
            line.close()
    else:
        yield lambda stage, done, total, count: None


@contextmanager
def _bar() -> Iterator[Report]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None, count="")

        def report(stage: str, done: int, total: int | None, count: str) -> None:
            bar.update(task, description=escape(visible(stage)), total=total, completed=done, count=count)

        yield report


class _NotebookLine:
    """One output of a notebook's cell, which each report overwrites; it keeps the last one and the seconds."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display = display
        self._handle: Any = None
        self._begun = time.monotonic()
        self._last = ("", 0.0)
        self._text = ""
        self._shown = ""

    def __call__(self, stage: str, done: int, total: int | None, count: str) -> None:
        share = f" {min(100 * done // total, 100)} %" if total else ""
        self._text = visible(f"{stage}{share}{f', {count}' if count else ''}")
        last_stage, last_time = self._last
        now = time.monotonic()
        if stage != last_stage or now - last_time >= _SECONDS_BETWEEN:
            self._last = (stage, now)
            self._show(self._text)

    def _show(self, text: str) -> None:
        if text == self._shown:
            return
        self._shown = text
        output = {"text/plain": text}
        if self._handle is None:
            self._handle = self._display(output, raw=True, display_id=True)
        else:
            self._handle.update(output, raw=True)

    def close(self) -> None:
        if self._text:
            self._show(f"{self._text}, {time.monotonic() - self._begun:.0f} s")


def track(items: Sequence[Item], stage: str, *, shown: bool = True) -> Iterable[Item]:
    """The items, with a bar or line of how many of them are done, if it is wanted and a person watches.

    Example:
        >>> from massieu.foundation.watching import track
        >>> sum(track(range(4), "adding"))
        6
    """
    return _tracked(items, stage) if shown and watched() is not None else items


def _tracked(items: Sequence[Item], stage: str) -> Iterator[Item]:
    total = len(items)
    with progress_line() as report:
        report(stage, 0, total, f"0 of {total:,}")
        for done, item in enumerate(items, 1):
            yield item
            report(stage, done, total, f"{done:,} of {total:,}")
