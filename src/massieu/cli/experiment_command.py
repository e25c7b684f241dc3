"""The command `massieu experiment`; torch is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from massieu.cli.options import option
from massieu.cli.processes import joined, leads
from massieu.cli.streams import say, show
from massieu.errors import InputError

LIST = "list"
FOLDER = Path("massieu-experiments")
_WITH_PROMPTS = "wind-tunnel"


def experiment(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of an experiment, or 'list' for all of them.")],
    quick: Annotated[bool, option(None, "Small sizes and one seed, as a trial; gives no verdict.", "--quick")] = False,
    seeds: Annotated[
        str | None, option("LIST", "Random seeds; settings were chosen on 0 to 4. [default: 5,6,7,8,9]")
    ] = None,
    out: Annotated[
        Path | None, option("DIR", "Folder for NAME.json and NAME.html. [default: massieu-experiments]")
    ] = None,
    resume: Annotated[bool, option(None, "Continue: keep the seeds that are stored in DIR.", "--resume")] = False,
    tune: Annotated[
        bool, option(None, "Show the validation losses used to choose the settings (seed 0), then stop.", "--tune")
    ] = False,
    large: Annotated[bool, option(None, "Sizes of the literature; torchrun shares the work.", "--large")] = False,
    model: Annotated[
        str | None, option("MODEL", "wind-tunnel only: compare a language model with exact laws on prompts.")
    ] = None,
) -> None:
    """Train small models whose best prediction is known; test it."""
    chosen = None if seeds is None else seeds_in(seeds)
    if sum((tune, large, model is not None)) > 1:
        raise InputError("--tune, --large and --model exclude each other; give at most one")
    alone = LIST if name == LIST else "--model" if model is not None else "--tune" if tune else None
    if alone is not None and resume:
        raise InputError(f"--resume continues a run of seeds; it does not go with {alone}")
    if alone in (LIST, "--model") and chosen is not None:
        raise InputError(f"--seeds chooses the seeds of a run; it does not go with {alone}")
    if name == LIST:
        with context.obj.loading():
            from massieu.cli import experiment as shown
        shown.show_all()
    elif model is not None:
        _prompts(context, name, model, quick, FOLDER if out is None else out)
    elif tune:
        _tune(context, name, [0] if chosen is None else chosen, quick, FOLDER if out is None else out)
    else:
        _run(context, name, chosen, quick, large, FOLDER if out is None else out, resume)


def _run(
    context: typer.Context, name: str, seeds: list[int] | None, quick: bool, large: bool, folder: Path, resume: bool
) -> None:
    with context.obj.loading():
        from massieu.cli import experiment as shown
        from massieu.papers.experiments.run import SEEDS, run

    told = shown.say_seed if leads() else None
    with joined():
        study, complete = run(
            name, seeds=seeds or SEEDS, quick=quick, large=large, out=folder, resume=resume, progress=told
        )
    if leads():
        shown.show(study)
        page, numbers = (folder / f"{study.stem}.{kind}" for kind in ("html", "json"))
        if study.runs:
            show(f"page: {page}\nnumbers: {numbers}")
    if not complete:
        say("interrupted: finished seeds are stored; run the same command with --resume to continue")
        raise typer.Exit(context.obj.status)


def _tune(context: typer.Context, name: str, seeds: list[int], quick: bool, folder: Path) -> None:
    with context.obj.loading():
        from massieu.cli import experiment as shown
        from massieu.papers.experiments.run import tune

    if len(seeds) != 1:
        raise InputError(f"--tune takes one seed, got {len(seeds)}")
    shown.show_tuning(tune(name, seed=seeds[0], quick=quick, out=folder))
    show(f"numbers: {folder / f'{name}.tuning.json'}")


def _prompts(context: typer.Context, name: str, model: str, quick: bool, folder: Path) -> None:
    if name != _WITH_PROMPTS:
        raise InputError(f"--model works with the experiment {_WITH_PROMPTS} only, got {name}")
    with context.obj.loading():
        from massieu.cli import experiment as shown
        from massieu.cli.language_model import next_word
        from massieu.papers.experiments.prompts import PROMPTS, read_prompts, save_readings
        from massieu.storage.folder import tried

    with tried(folder, 1 << 16):  # what is in the way of writing is found before the model is loaded
        predictor, tokenizer, shown_name = next_word(model)
        found = read_prompts(predictor, tokenizer, seeds=range(5 if quick else PROMPTS), progress=shown.say_prompt)
        written = save_readings(found, shown_name, folder)
    shown.show_readings(found, shown_name)
    show(f"numbers: {written}")


def seeds_in(given: str) -> list[int]:
    """Seeds from a list with commas.

    Raises:
        InputError: an entry is no whole number from 0 on, or comes twice.
    """
    entries = [entry.strip() for entry in given.split(",")]
    if not all(entry.isascii() and entry.isdigit() for entry in entries) or len({*entries}) < len(entries):
        raise InputError(f"--seeds needs different whole numbers, 0 or more, separated by commas, got {given!r}")
    return [int(entry) for entry in entries]
