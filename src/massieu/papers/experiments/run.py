"""Running an experiment seed by seed, and storing its numbers."""

import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

import massieu
from massieu.errors import InputError
from massieu.foundation.threads import one_thread
from massieu.papers.experiments.page import page_of
from massieu.papers.experiments.processes import is_rank_zero
from massieu.papers.experiments.study import Numbers, Study, experiments, find
from massieu.report.encode import encodable
from massieu.storage.folder import tried
from massieu.storage.writing import write_whole

SEEDS = (5, 6, 7, 8, 9)
"""The seeds of a verdict; settings were chosen on seeds 0 to 4."""
_ROOM = 1 << 16
"""Bytes that must fit before the work begins."""
RESULTS = Path(__file__).parent / "results"
"""The latest results at default size."""


def save(study: Study, folder: Path) -> tuple[Path, Path]:
    """Write NAME.json and NAME.html; each replaces an earlier file in one step.

    Raises:
        InputError: they cannot be written there.
        MissingExtraError: jinja2 is not installed.
    """
    numbers_path = folder / f"{study.stem}.json"
    page_path = folder / f"{study.stem}.html"
    write_json(numbers_path, study.to_dict(), "the experiment's numbers")
    write_whole(page_path, page_of(study), "the experiment's page")
    return numbers_path, page_path


def write_json(path: Path, content: object, description: str) -> None:
    """Write JSON that a reader can look through; NaN becomes null.

    Raises:
        InputError: it cannot be written there.
    """
    text = json.dumps(encodable(content), indent=1, ensure_ascii=False, allow_nan=False)
    write_whole(path, text + "\n", description)


def _check_can_save(study: Study, folder: Path) -> None:
    """Check before the work that the study can be written, without touching the files that are there.

    Raises:
        InputError: nothing can be written there.
        MissingExtraError: jinja2 is not installed.
    """
    page_of(study)
    for ending in ("json", "html"):
        name = f"{study.stem}.{ending}"
        with tried(folder, _ROOM, name):
            if (folder / name).is_dir():
                raise InputError(f"{folder / name} is a folder, where a file is to be written")


def load(path: Path) -> Study:
    """Read a study from its JSON.

    Raises:
        InputError: there is no file, or it holds no study.
    """
    try:
        return _study_of(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} holds no experiment: {type(error).__name__}: {error}") from error


def _study_of(stored: dict[str, Any]) -> Study:
    """The study whose `to_dict` was stored."""
    runs = {}
    seconds = {}
    for seed, entry in stored["seeds"].items():
        runs[int(seed)] = {
            name: math.nan if value is None else float(value) for name, value in entry["numbers"].items()
        }
        seconds[int(seed)] = float(entry["seconds"] or 0.0)
    quick = bool(stored["quick"])
    large = bool(stored.get("large", False))
    return Study(find(stored["experiment"]), quick, runs, seconds, dict(stored["made"]), large)


def run(
    name: str,
    *,
    seeds: Sequence[int] = SEEDS,
    quick: bool = False,
    large: bool = False,
    out: Path | None = None,
    resume: bool = False,
    progress: Callable[[int, int, int, float], None] | None = None,
) -> tuple[Study, bool]:
    """Run an experiment seed by seed; after each one everything is stored.

    Args:
        seeds: The random seeds, one run each; the verdict needs `FEWEST`.
        quick: Small sizes and the first seed alone, as a trial.
        large: The sizes of the literature. In several processes, with a process group, each draws its share of the contexts
            and PyTorch's DistributedDataParallel joins them; the first writes.
        out: A folder for NAME.json and NAME.html; None stores nothing.
        resume: Continue after the seeds that are stored there. Without it, a folder that has seeds of this experiment is
            refused, unless they are of a quick run.
        progress: Called after each seed with the seed, how many are done, how many there are, and its processor time.

    Returns:
        The study, and whether it is complete: after Ctrl-C it has the finished seeds.

    Raises:
        InputError: there is no such experiment, or it has no large size; the folder has seeds of it and `resume` is off, or
            they are of another experiment, of other versions or of another machine; it cannot be written to.

    Example:
        >>> from massieu.papers.experiments.run import run
        >>> study, complete = run("temperature", quick=True)
        >>> study.verdict, complete  # quick runs decide nothing
        ('undecided', True)
    """
    experiment = find(name)
    measure = experiment.large if large else experiment.measure
    if measure is None:
        raise InputError(f"{name} has no large size; {_experiments_with('large')}")
    study = Study(experiment, quick, large=large)
    if out is not None:
        # In every process, so that all go through the same seeds.
        study = _with_stored_seeds(study, out, resume)
    if not is_rank_zero():
        out = None
    study.made = _made() | dict(experiment.registration)
    if out is not None:
        _check_can_save(study, out)
    seeds_to_run = list(seeds)[:1] if quick else list(seeds)
    for num_done, seed in enumerate(seeds_to_run, start=1):
        if seed not in study.runs:
            started = time.process_time()
            try:
                with one_thread():
                    numbers = measure(seed, quick)
            except KeyboardInterrupt:
                return study, False
            study.runs[seed] = numbers
            study.seconds[seed] = time.process_time() - started
            if out is not None:
                save(study, out)
        if progress is not None:
            progress(seed, num_done, len(seeds_to_run), study.seconds[seed])
    return study, True


def tune(name: str, *, seed: int = 0, quick: bool = False, out: Path | None = None) -> Numbers:
    """The losses by which an experiment's settings were chosen, on a seed that no verdict uses; lower is better.

    Args:
        out: A folder for NAME.tuning.json; None stores nothing.

    Raises:
        InputError: there is no such experiment, or its settings are not tuned by a command; the seed is one of a verdict;
            the folder cannot be written to.
    """
    experiment = find(name)
    if experiment.tune is None:
        raise InputError(f"{name} has no settings to tune; {_experiments_with('tune')}")
    if seed in SEEDS:
        raise InputError(f"seed {seed} is used for verdicts; tune on another seed, such as 0")
    with nullcontext() if out is None else tried(out, _ROOM), one_thread():
        losses = experiment.tune(seed, quick)
    if out is not None:
        content = {"experiment": name, "seed": seed, "quick": quick, "losses": losses, "made": _made()}
        write_json(out / f"{name}.tuning.json", content, "the losses of tuning")
    return losses


def _experiments_with(attribute: Literal["large", "tune"]) -> str:
    """The names of the experiments that have a large size, or settings to tune, for an error message."""
    names = [name for name, experiment in experiments().items() if getattr(experiment, attribute)]
    return f"of experiments {', '.join(names)} can be asked for it"


def _with_stored_seeds(study: Study, out: Path, resume: bool) -> Study:
    """The study with the seeds that the folder has of it.

    Raises:
        InputError: seeds would be overwritten, or joined with those of another experiment, version or machine.
    """
    path = out / f"{study.stem}.json"
    if not path.exists() or (study.quick and not resume):
        return study
    stored = load(path)
    if (stored.experiment, stored.stem) != (study.experiment, study.stem):
        raise InputError(f"{path} is of another experiment; choose another --out")
    if not stored.runs:
        return study
    if not resume:
        raise InputError(
            f"{path} holds {len(stored.runs)} seeds already; continue with --resume, or choose another --out"
        )
    now = _made() | dict(study.experiment.registration)
    differences = [
        f"{name} {stored.made.get(name)} and now {now[name]}"
        for name in now
        if name != "date" and stored.made.get(name) != now[name]
    ]
    if differences:
        raise InputError(
            f"{path} was made with {', '.join(differences)}; a verdict needs one version for all seeds, so choose "
            "another --out"
        )
    return stored


def _made() -> dict[str, str]:
    """Versions, the kind of machine, and the date."""
    return {
        "massieu": massieu.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }
