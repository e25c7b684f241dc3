"""The command that draws the records of a monitor."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from massieu.cli.output import check_page
from massieu.cli.streams import say
from massieu.errors import InputError, require_extra
from massieu.storage.record_lines import TrainingRun, read_run
from massieu.storage.writing import write_whole


def draw(runs: Sequence[Path], out: Path | None, reference: Path | None) -> tuple[Path, list[TrainingRun]]:
    """Read runs and draw them as a page; lines that were left out, and the first alarm, are printed.

    Returns:
        The path of the page, and the records of the runs.

    Raises:
        InputError: a run cannot be read, or the page cannot be written.
    """
    from massieu.report.curves import render

    page = runs[0].with_suffix(".html") if out is None else out
    if os.path.exists(page) and any(_is_same_file(page, run) for run in (*runs, reference) if run is not None):
        raise InputError(f"the page cannot be written to {page}, which is one of the recorded runs")
    require_extra("plotly.offline", "probe")
    check_page(page)
    records = [read_run(run) for run in runs]
    reference_record = None if reference is None else read_run(reference)
    for record in (*records, reference_record):
        for note in record.notes if record is not None else ():
            say(note)
    alarms = records[0].alarms
    if alarms:
        step, keys = next(iter(alarms.items()))
        say(f"in alarm from step {step}: {', '.join(keys)}")
    write_whole(page, render(records, reference_record), "the page")
    return page, records


def summary_of(page: Path, runs: Sequence[TrainingRun]) -> dict[str, Any]:
    """The page, and for each run its settings, its latest numbers and its alarms, as an object for JSON."""
    return {"page": str(page), "runs": [_entry(run) for run in runs]}


def _entry(run: TrainingRun) -> dict[str, Any]:
    steps = list(run.records)
    return {
        "name": run.name,
        "settings": run.settings,
        "records": len(steps),
        "first_step": steps[0],
        "last_step": steps[-1],
        "latest": run.records[steps[-1]],
        "alarms": [{"step": step, "keys": keys} for step, keys in run.alarms.items()],
        "notes": run.notes,
    }


def _is_same_file(page: Path, run: Path) -> bool:
    """Whether two paths lead to one file."""
    return os.path.exists(run) and os.path.samefile(page, run)
