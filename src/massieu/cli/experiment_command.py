"""The command `massieu experiment`; torch is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from massieu.cli.options import option
from massieu.cli.streams import say
from massieu.errors import InputError

LIST = "list"
FOLDER = Path("massieu-experiments")


def experiment(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="One of massieu experiment list.")],
    quick: Annotated[bool, option(None, "Small sizes and one seed, to see it work; no verdict.", "--quick")] = False,
    seeds: Annotated[str | None, option("LIST", "Other seeds [5,6,7,8,9]; settings were chosen on 0 to 4.")] = None,
    out: Annotated[Path | None, option("DIR", "Where NAME.json and NAME.html go [massieu-experiments].")] = None,
    resume: Annotated[bool, option(None, "Keep the seeds that DIR has, and go on.", "--resume")] = False,
) -> None:
    """Train small models whose truth is known, and judge them."""
    chosen = None if seeds is None else seeds_in(seeds)
    with context.obj.loading():
        from massieu.cli import experiment as shown
        from massieu.experiments.run import SEEDS, run

    if name == LIST:
        shown.show_all()
        return
    folder = FOLDER if out is None else out
    study, complete = run(name, seeds=chosen or SEEDS, quick=quick, out=folder, resume=resume, progress=shown.say_seed)
    shown.show(study)
    page, numbers = (folder / f"{study.stem}.{kind}" for kind in ("html", "json"))
    typer.echo(f"page: {page}\nnumbers: {numbers}")
    if not complete:
        say("interrupted: the seeds that were done are stored; go on with --resume")
        raise typer.Exit(context.obj.status)


def seeds_in(given: str) -> list[int]:
    """Seeds from a list with commas.

    Raises:
        InputError: an entry is no whole number from 0 on, or comes twice.
    """
    entries = [entry.strip() for entry in given.split(",")]
    if not all(entry.isascii() and entry.isdigit() for entry in entries) or len({*entries}) < len(entries):
        raise InputError(f"--seeds takes different whole numbers from 0 on, apart by commas, got {given!r}")
    return [int(entry) for entry in entries]
