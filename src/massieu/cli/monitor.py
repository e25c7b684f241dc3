"""The command that draws what a monitor recorded."""

import os
from collections.abc import Sequence
from pathlib import Path

from massieu.cli.output import check_page
from massieu.cli.streams import say
from massieu.errors import InputError, require_extra
from massieu.storage.record_lines import read_run
from massieu.storage.writing import write_whole


def draw(runs: Sequence[Path], out: Path | None, reference: Path | None) -> Path:
    """Read runs, draw them as a page, and say in one line each what was left out or is in alarm.

    Raises:
        InputError: a run cannot be read, or the page not be written.
    """
    from massieu.report.curves import render

    page = runs[0].with_suffix(".html") if out is None else out
    if os.path.exists(page) and any(_same(page, each) for each in (*runs, reference) if each is not None):
        raise InputError(f"the page cannot be written to {page}, which is one of the recorded runs")
    require_extra("plotly.offline", "probe")
    check_page(page)
    read = [read_run(run) for run in runs]
    healthy = None if reference is None else read_run(reference)
    first = read[0]
    for run in (*read, *([healthy] if healthy else [])):
        for note in run.notes:
            say(note)
    if first.alarms:
        step, keys = next(iter(first.alarms.items()))
        say(f"in alarm from step {step}: {', '.join(keys)}")
    write_whole(page, render(read, healthy), "the page")
    return page


def _same(page: Path, run: Path) -> bool:
    """Whether two paths, however they are written, lead to one file."""
    return os.path.exists(run) and os.path.samefile(page, run)
