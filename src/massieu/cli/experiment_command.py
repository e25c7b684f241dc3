"""The command `massieu experiment`; torch is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from massieu.cli.options import JsonOutput, option
from massieu.cli.output import show_json
from massieu.cli.processes import is_rank_zero, process_group
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
    json: JsonOutput = False,
) -> None:
    """Train small models whose best prediction is known; test it."""
    seed_list = None if seeds is None else seeds_in(seeds)
    if sum((tune, large, model is not None)) > 1:
        raise InputError("--tune, --large and --model exclude each other; give at most one")
    # A task other than a run of seeds.
    other_task = None
    if name == LIST:
        other_task = LIST
    elif model is not None:
        other_task = "--model"
    elif tune:
        other_task = "--tune"
    if other_task is not None and resume:
        raise InputError(f"--resume continues a run of seeds; it does not go with {other_task}")
    if other_task in (LIST, "--model") and seed_list is not None:
        raise InputError(f"--seeds chooses the seeds of a run; it does not go with {other_task}")
    folder = FOLDER if out is None else out
    if name == LIST:
        with context.obj.loading():
            from massieu.cli import experiment as output
        if json:
            show_json(output.entries())
        else:
            output.show_all()
    elif model is not None:
        _prompts(context, name, model, quick, folder, json)
    elif tune:
        _tune(context, name, [0] if seed_list is None else seed_list, quick, folder, json)
    else:
        _run(context, name, seed_list, quick, large, folder, resume, json)


def _run(
    context: typer.Context,
    name: str,
    seeds: list[int] | None,
    quick: bool,
    large: bool,
    folder: Path,
    resume: bool,
    as_json: bool,
) -> None:
    with context.obj.loading():
        from massieu.cli import experiment as output
        from massieu.papers.experiments.run import SEEDS, run
        from massieu.papers.experiments.study import find

    plan = find(name).plan
    progress = output.say_seed if is_rank_zero() else None
    with process_group():
        if plan is not None and is_rank_zero():
            output.say_plan(plan())
        study, complete = run(
            name, seeds=seeds or SEEDS, quick=quick, large=large, out=folder, resume=resume, progress=progress
        )
    if is_rank_zero() and as_json:
        show_json(study.to_dict())
    elif is_rank_zero():
        output.show(study)
        if study.runs:
            show(f"page: {folder / f'{study.stem}.html'}\nnumbers: {folder / f'{study.stem}.json'}")
    if not complete:
        say("interrupted: finished seeds are stored; run the same command with --resume to continue")
        raise typer.Exit(context.obj.status)


def _tune(context: typer.Context, name: str, seeds: list[int], quick: bool, folder: Path, as_json: bool) -> None:
    with context.obj.loading():
        from massieu.cli import experiment as output
        from massieu.papers.experiments.run import tune

    if len(seeds) != 1:
        raise InputError(f"--tune takes one seed, got {len(seeds)}")
    losses = tune(name, seed=seeds[0], quick=quick, out=folder)
    if as_json:
        show_json(losses)
        return
    output.show_tuning(losses)
    show(f"numbers: {folder / f'{name}.tuning.json'}")


def _prompts(context: typer.Context, name: str, model: str, quick: bool, folder: Path, as_json: bool) -> None:
    if name != _WITH_PROMPTS:
        raise InputError(f"--model works with the experiment {_WITH_PROMPTS} only, got {name}")
    with context.obj.loading():
        from massieu.cli import experiment as output
        from massieu.cli.language_model import next_word
        from massieu.papers.experiments.prompts import PROMPTS, content_of, read_prompts, save_readings
        from massieu.storage.folder import tried

    with tried(folder, 1 << 16):  # The folder is tested before the model is loaded.
        predictor, tokenizer, model_name = next_word(model)
        readings = read_prompts(predictor, tokenizer, seeds=range(5 if quick else PROMPTS), progress=output.say_prompt)
        path = save_readings(readings, model_name, folder)
    if as_json:
        show_json(content_of(readings, model_name))
        return
    output.show_readings(readings, model_name)
    show(f"numbers: {path}")


def seeds_in(text: str) -> list[int]:
    """Seeds from a list separated by commas.

    Raises:
        InputError: an entry is no whole number from 0 on, or comes twice.
    """
    entries = [entry.strip() for entry in text.split(",")]
    if not all(entry.isascii() and entry.isdigit() for entry in entries) or len({*entries}) < len(entries):
        raise InputError(f"--seeds needs different whole numbers, 0 or more, separated by commas, got {text!r}")
    return [int(entry) for entry in entries]
