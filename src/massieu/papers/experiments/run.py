"""Running an experiment seed by seed, and keeping what came out."""

import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

import torch

import massieu
from massieu.errors import InputError
from massieu.foundation.threads import one_thread
from massieu.papers.experiments.page import page_of
from massieu.papers.experiments.processes import leads
from massieu.papers.experiments.study import Numbers, Study, experiments, find
from massieu.report.encode import encodable
from massieu.storage.folder import tried
from massieu.storage.writing import write_whole

SEEDS = (5, 6, 7, 8, 9)
"""Of a verdict; settings were chosen on seeds 0 to 4."""
_ROOM = 1 << 16
"""Bytes that must fit before the work begins."""
RESULTS = Path(__file__).parent / "results"
"""What was found last, at default size."""


def save(study: Study, folder: Path) -> tuple[Path, Path]:
    """Write NAME.json and NAME.html; each replaces an earlier one at once.

    Raises:
        InputError: they cannot be written there.
        MissingExtraError: jinja2 is not installed.
    """
    text = json.dumps(encodable(study.to_dict()), indent=1, ensure_ascii=False, allow_nan=False)
    paths = folder / f"{study.stem}.json", folder / f"{study.stem}.html"
    write_whole(paths[0], text + "\n", "the experiment's numbers")
    write_whole(paths[1], page_of(study), "the experiment's page")
    return paths


def _check_can_save(study: Study, folder: Path) -> None:
    """What is in the way is found before the work, and without touching what is there.

    Raises:
        InputError: nothing can be written there.
        MissingExtraError: jinja2 is not installed.
    """
    page_of(study)
    for kind in ("json", "html"):
        with tried(folder, _ROOM, f"{study.stem}.{kind}"):
            if (folder / f"{study.stem}.{kind}").is_dir():
                raise InputError(f"{folder / f'{study.stem}.{kind}'} is a folder, where a file is to be written")


def load(path: Path) -> Study:
    """A study from its JSON.

    Raises:
        InputError: there is none, or it is none.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        seeds = {int(seed): entry for seed, entry in stored["seeds"].items()}
        numbers = {
            seed: {name: math.nan if value is None else float(value) for name, value in entry["numbers"].items()}
            for seed, entry in seeds.items()
        }
        seconds = {seed: float(entry["seconds"] or 0.0) for seed, entry in seeds.items()}
        quick, large = bool(stored["quick"]), bool(stored.get("large", False))
        return Study(find(stored["experiment"]), quick, numbers, seconds, dict(stored["made"]), large)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} holds no experiment: {type(error).__name__}: {error}") from error


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
        seeds: What is drawn belongs to them; the verdict needs `FEWEST`.
        quick: Small sizes and the first seed alone, to see it work.
        large: The sizes of the literature. In several processes, with a process group, each draws its share of the contexts
            and PyTorch's DistributedDataParallel joins them; the first writes.
        out: A folder for NAME.json and NAME.html; None keeps nothing.
        resume: Go on from the seeds that are stored there. Without it, a folder that has seeds of this experiment is
            refused, unless they are of a quick run.
        progress: Called after each seed with it, how many are done, how many there are, and its seconds of one core.

    Returns:
        The study, and whether it came to its end: Ctrl-C keeps the seeds that were done.

    Raises:
        InputError: there is no such experiment, or it has no large size; the folder has seeds of it and `resume` is off, or
            they are of another experiment, of other versions or of another machine; it cannot be written to.

    Example:
        >>> from massieu.papers.experiments.run import run
        >>> study, complete = run("temperature", quick=True)
        >>> study.verdict, complete  # quick runs decide nothing
        ('undecided', True)
    """
    asked = find(name)
    measure = asked.large if large else asked.measure
    if measure is None:
        raise InputError(f"{name} has no large size; {_those_with('large')}")
    study = Study(asked, quick, large=large)
    study = study if out is None else _begun(study, out, resume)  # every process has the same seeds to go through
    if not leads():
        out = None
    wanted = list(seeds)[:1] if quick else list(seeds)
    study.made = _made()
    if out is not None:
        _check_can_save(study, out)
    for place, seed in enumerate(wanted):
        if seed not in study.runs:
            started = time.process_time()
            try:
                with one_thread():
                    numbers = measure(seed, quick)
            except KeyboardInterrupt:
                return study, False
            study.runs[seed], study.seconds[seed] = numbers, time.process_time() - started
            if out is not None:
                save(study, out)
        if progress is not None:
            progress(seed, place + 1, len(wanted), study.seconds[seed])
    return study, True


def tune(name: str, *, seed: int = 0, quick: bool = False, out: Path | None = None) -> Numbers:
    """The losses that an experiment's settings were chosen by, on a seed that no verdict uses; lower is better.

    Args:
        out: A folder for NAME.tuning.json; None keeps nothing.

    Raises:
        InputError: there is no such experiment, or its settings are not tuned by a command; the seed is one of a verdict;
            the folder cannot be written to.
    """
    asked = find(name)
    if asked.tune is None:
        raise InputError(f"{name} has no settings to tune; {_those_with('tune')}")
    if seed in SEEDS:
        raise InputError(f"seed {seed} is used for verdicts; tune on another seed, such as 0")
    with nullcontext() if out is None else tried(out, _ROOM), one_thread():
        found = asked.tune(seed, quick)
    if out is not None:
        stored = {"experiment": name, "seed": seed, "quick": quick, "losses": found, "made": _made()}
        text = json.dumps(encodable(stored), indent=1, ensure_ascii=False, allow_nan=False)
        write_whole(out / f"{name}.tuning.json", text + "\n", "the losses of tuning")
    return found


def _those_with(what: str) -> str:
    return f"of experiments {', '.join(n for n, asked in experiments().items() if getattr(asked, what))} can be asked for it"


def _begun(study: Study, out: Path, resume: bool) -> Study:
    """What the folder has of this study: seeds are neither overwritten nor joined with those of other versions."""
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
    now = _made()
    differing = [name for name in now if name != "date" and stored.made.get(name) != now[name]]
    if differing:
        told = ", ".join(f"{name} {stored.made.get(name)} and now {now[name]}" for name in differing)
        raise InputError(
            f"{path} was made with {told}; a verdict needs one version for all seeds, so choose another --out"
        )
    return stored


def _made() -> dict[str, str]:
    return {
        "massieu": massieu.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }
