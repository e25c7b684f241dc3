"""The command line: it parses, calls, says what came out; torch is imported when a command runs."""

import os
import signal
from collections.abc import Iterable, Iterator
from enum import StrEnum
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import massieu
from massieu.cli import terminal
from massieu.cli.output import check_page, kept, result_folder
from massieu.cli.streams import OutputLost, say
from massieu.errors import InputError
from massieu.interruption import ENDINGS, Interruption, interruptible

if TYPE_CHECKING:
    from massieu.probing.result import ProbeResult

# How a command ends, beside 0 and 128 + the number of the signal that interrupted it.
FAILED = 1
BAD_INPUT = 2
NOT_FINITE = 3
RESULTS = Path("massieu-results")
DEFAULT_NAME = "all-MiniLM-L6-v2"


class TableFormat(StrEnum):
    """How the tables of a result are stored."""

    PARQUET = "parquet"
    CSV = "csv"


class _Commands(TyperGroup):
    """Bad input is one line without a traceback, an interruption too; any other error keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        with interruptible(ENDINGS) as interruption:
            ctx.obj = interruption
            try:
                return super().invoke(ctx)
            except typer.Exit:
                raise
            except (KeyboardInterrupt, Exception) as error:
                _end(error, interruption)
                raise


def _end(error: BaseException, interruption: Interruption) -> None:
    """Say what ended a command and end it; returns where the error needs its traceback."""
    asked = interruption.asked.is_set()
    if isinstance(error, OutputLost) and asked:  # a terminal that was closed asked for the end
        raise typer.Exit(interruption.status) from error
    # Libraries turn an interruption while they are loaded into errors of their own.
    if isinstance(error, KeyboardInterrupt) or (asked and not interruption.held):
        say(_interrupted(interruption))
        raise typer.Exit(interruption.status) from error
    if isinstance(error, InputError):
        say(" ".join(" ".join((str(error), *getattr(error, "__notes__", ()))).split()))
        raise typer.Exit(BAD_INPUT) from error


def _interrupted(interruption: Interruption) -> str:
    by = interruption.number
    return "interrupted" if by in (None, signal.SIGINT) else f"interrupted by {signal.Signals(by).name}"


class _ProbeCommand(TyperCommand):
    """Lets ``--text`` take several paths, as a shell makes them of ``*.md``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(_one_path_each(args)))


def _one_path_each(arguments: Iterable[str]) -> Iterator[str]:
    """``--text A B`` as ``--text A --text B``; an argument that begins with a dash ends the paths, ``-`` is one."""
    following = None  # how many arguments have followed the latest --text
    for argument in arguments:
        if argument == "--text":
            following = 0
        elif argument.startswith("-") and argument != "-":
            following = None
        elif following is not None:
            if following:
                yield "--text"
            following += 1
        yield argument


app = typer.Typer(
    cls=_Commands,
    help="See, build and check transformers as probability.",
    epilog="massieu COMMAND --help shows a command's options and examples.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _option(metavar: str | None, help: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=help)


_MODEL = "Model folder, .gguf file or hub name; the default is the MiniLM sentence encoder."
Model = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL)]
Device = Annotated[str | None, _option("D", "Such as cpu or cuda:0 [a GPU where there is one].")]
Dtype = Annotated[str | None, _option("T", "float32, bfloat16, float16 or float64 [float32].")]
Revision = Annotated[str | None, _option("R", "Branch, tag or commit of a model on the hub.")]
TrustRemoteCode = Annotated[bool, _option(None, "Run the code that comes with the model.", "--trust-remote-code")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"massieu {massieu.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(
    cls=_ProbeCommand,
    epilog="\b\nExamples:\n"
    "  massieu probe\n"
    "  massieu probe gpt2 --text notes/ README.md --max-tokens 100000\n"
    "  massieu probe ./checkpoint --text data.jsonl --column body --no-packing\n"
    "  massieu probe model.Q4_K_M.gguf --max-tokens 20000\n"
    "  cat book.txt | massieu probe gpt2 --text - --out book",
)
def probe(
    context: typer.Context,
    model: Model = None,
    text: Annotated[
        list[str] | None,
        _option("PATH ...", "Files, folders, or - for standard input (.txt .md .rst .py .jsonl .parquet)."),
    ] = None,
    column: Annotated[str | None, _option("NAME", "Field of .jsonl and .parquet that holds the text [text].")] = None,
    out: Annotated[Path | None, _option("DIR", f"Folder for the page and the tables [{RESULTS}/<model name>].")] = None,
    max_length: Annotated[int, _option("N", "Tokens in a window.")] = 256,
    max_tokens: Annotated[int | None, _option("N", "Stop after this many tokens.")] = None,
    batch_size: Annotated[int, _option("N", "Windows in a batch.")] = 8,
    query_sample: Annotated[
        int | None, _option("N", "Queries per window that are measured [all]; for long windows.")
    ] = None,
    no_packing: Annotated[
        bool, _option(None, "One document per row, in place of full windows.", "--no-packing")
    ] = False,
    device: Device = None,
    dtype: Dtype = None,
    statistics: Annotated[
        str | None, _option("NAME,...", "Only these, as massieu statistics lists them [all].")
    ] = None,
    seed: Annotated[int, _option("N", "Seed of samples and random controls.")] = 0,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    format: Annotated[TableFormat, _option(None, "How the tables are stored.")] = TableFormat.PARQUET,
) -> None:
    """Measure a model on text: an HTML page and tables."""
    if model is None and text is not None and len(text) > 1 and os.path.isfile(Path(text[-1], "config.json")):
        raise InputError(f"{text[-1]} is a model; MODEL goes before --text")
    folder = RESULTS / _short_name(model) if out is None else out
    chosen = None if statistics is None else [name.strip() for name in statistics.split(",") if name.strip()]
    with result_folder(folder):
        with context.obj.loading():
            from massieu.probing.run import probe as run_probe

        with terminal.progress_shown() as show:
            result = run_probe(
                model,
                text=text,
                column=column,
                statistics=chosen,
                max_length=max_length,
                max_tokens=max_tokens,
                batch_size=batch_size,
                packing=not no_packing,
                query_sample=query_sample,
                device=device,
                dtype=dtype,
                seed=seed,
                revision=revision,
                trust_remote_code=trust_remote_code,
                progress=show,
            )
        kept(lambda place: result.save(place, format=format.value), folder)
    terminal.summarise(result, folder)
    _end_probe(result, context.obj)


def _end_probe(result: "ProbeResult", interruption: Interruption) -> None:
    """The exit status of a probe whose result was saved."""
    if not result.complete:
        say(f"{_interrupted(interruption)}: the result holds what was measured until then and is marked incomplete")
    elif interruption.asked.is_set():
        say(f"{_interrupted(interruption)} when all was measured: the result is complete")
    elif result.trouble:
        raise typer.Exit(NOT_FINITE)
    else:
        return
    raise typer.Exit(interruption.status)


@app.command(epilog="\b\nExamples:\n  massieu describe gpt2\n  massieu describe ./checkpoint")
def describe(
    context: typer.Context,
    model: Model = None,
    device: Device = None,
    dtype: Dtype = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Show a model's attention sites, heads and wiring."""
    with context.obj.loading():
        from massieu.probing.run import describe as run_describe

    found = run_describe(model, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
    terminal.show_description(found.to_dict())


@app.command(epilog=f"\b\nExample:\n  massieu report {RESULTS}/gpt2")
def report(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="A folder that massieu probe has written.")],
) -> None:
    """Draw the page again from stored results."""
    from massieu.probing.result import ProbeResult

    typer.echo(f"page: {ProbeResult.redraw(results)}")


@app.command(
    epilog="\b\nExamples:\n"
    "  massieu monitor run.jsonl\n"
    "  massieu monitor run.jsonl other.jsonl --reference healthy.jsonl"
)
def monitor(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN.jsonl", help="What a monitor recorded; more: beside it.")],
    reference: Annotated[Path | None, _option("PATH", "A healthy run: drawn beside, alarms against it.")] = None,
    out: Annotated[Path | None, _option("PATH", "The page [RUN.html].")] = None,
) -> None:
    """Draw a training run's curves and alarms as a page."""
    from massieu.cli.monitor import draw

    typer.echo(f"page: {draw(runs, out, reference)}")


@app.command(
    epilog="\b\nExamples:\n"
    "  massieu statistics\n"
    "  massieu statistics entropy maps\n"
    "  massieu probe gpt2 --statistics entropy,maps"
)
def statistics(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Statistics or groups, in full [all, a line each].")
    ] = None,
) -> None:
    """List the statistics; with names: formula, claim, control, cost."""
    from massieu.probing.statistics.registry import STATISTICS, select

    if not names:
        terminal.list_statistics(STATISTICS.values())
        return
    wanted, _ = select(names)
    for statistic in STATISTICS.values():
        if statistic.name in wanted:
            terminal.show_statistic(statistic)


@app.command(
    epilog="\b\nExamples:\n"
    "  massieu verify\n"
    "  massieu verify S7 B3\n"
    "  massieu verify S15 --set N=1024 --seed 3\n"
    "  massieu verify --html claims.html"
)
def verify(
    context: typer.Context,
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="ID", help="Claims such as S7, in full [all, one line each].")
    ] = None,
    set: Annotated[
        list[str] | None, _option("NAME=VALUE", "Another value for a parameter of the claims named.")
    ] = None,
    seed: Annotated[int | None, _option("N", "Seed of every claim that draws something [0].")] = None,
    every_row: Annotated[
        bool, _option(None, "Every row of the claims named, not the worst of each kind alone.", "--all")
    ] = False,
    json: Annotated[bool, _option(None, "Print a JSON list instead.", "--json")] = False,
    html: Annotated[Path | None, _option("PATH", "Write a page with every number.")] = None,
) -> None:
    """Check the papers' claims with numbers; ends with 1 if one fails."""
    if html is not None:
        check_page(html)
    with context.obj.loading():
        from massieu.verification import terminal as claims
        from massieu.verification.registry import read_settings
        from massieu.verification.run import verify as run_verify

    result = run_verify(ids or None, seed=seed, settings=read_settings(set or ()), progress=claims.say_progress)
    if html is not None:
        kept(result.report, html)
    if json:
        typer.echo(result.to_json())
    else:
        claims.show(result, in_full=bool(ids), every_row=every_row)
    if html is not None:
        typer.echo(f"page: {html}", err=json)
    if not result.complete:
        say(f"{_interrupted(context.obj)}: what is missing was not checked")
        raise typer.Exit(context.obj.status)
    if not result.ok:
        raise typer.Exit(FAILED)


@app.command(
    epilog="\b\nExamples:\n  massieu devices\n  massieu devices --device cuda:1 --quick\n  massieu devices --json"
)
def devices(
    context: typer.Context,
    device: Device = None,
    quick: Annotated[bool, _option(None, "Small sizes: what is right, in seconds.", "--quick")] = False,
    json: Annotated[bool, _option(None, "Print a JSON object instead.", "--json")] = False,
) -> None:
    """Show which attention kernels run here, and how well."""
    with context.obj.loading():
        from massieu.cli import devices as shown
        from massieu.ops.survey import survey
        from massieu.report.encode import plain

    found = survey(device, quick, progress=say)
    if json:
        typer.echo(dumps(plain(found.to_dict()), indent=1, ensure_ascii=False, allow_nan=False))
    else:
        shown.show(found)
    if not found.complete:
        say(f"{_interrupted(context.obj)}: what is missing was not measured")
        raise typer.Exit(context.obj.status)
    if not found.ok:
        raise typer.Exit(FAILED)


def _short_name(model: str | None) -> str:
    if model is None:
        return DEFAULT_NAME
    path = Path(model).resolve() if os.path.exists(model) else Path(model)
    return path.stem if path.suffix.lower() == ".gguf" else path.name
