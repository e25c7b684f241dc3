"""The command line: it parses, calls, says what came out; torch is imported when a command runs."""

import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import massieu
from massieu.errors import InputError, require_extra

if TYPE_CHECKING:
    from massieu.probing.result import ProbeResult
    from massieu.probing.run import ProbeProgress

FAILED = 1
BAD_INPUT = 2
NOT_FINITE = 3
INTERRUPTED = 130
RESULTS = Path("massieu-results")
PAGE = "report.html"
DEFAULT_NAME = "all-MiniLM-L6-v2"


class TableFormat(StrEnum):
    """How the tables of a result are stored."""

    PARQUET = "parquet"
    CSV = "csv"


class _Commands(TyperGroup):
    """Bad input is one line without a traceback; any other error keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except InputError as error:
            _say(" ".join(str(error).split()))
            raise typer.Exit(BAD_INPUT) from error
        except KeyboardInterrupt as error:
            _say("interrupted")
            raise typer.Exit(INTERRUPTED) from error


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

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="Model folder, .gguf file or hub name; the default is the MiniLM sentence encoder."
    ),
]
Revision = Annotated[str | None, typer.Option(metavar="R", help="Branch, tag or commit of a model on the hub.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run the code that comes with the model.")]


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
    model: Model = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH ...", help="Files, folders, or - for standard input (.txt .md .rst .py .jsonl .parquet)."
        ),
    ] = None,
    column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Field of .jsonl and .parquet that holds the text [text].")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help=f"Folder for the page and the tables [{RESULTS}/<model name>].")
    ] = None,
    max_length: Annotated[int, typer.Option(metavar="N", help="Tokens in a window.")] = 256,
    max_tokens: Annotated[int | None, typer.Option(metavar="N", help="Stop after this many tokens.")] = None,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Windows in a batch.")] = 8,
    query_sample: Annotated[
        int | None, typer.Option(metavar="N", help="Queries per window that are measured [all]; for long windows.")
    ] = None,
    no_packing: Annotated[
        bool, typer.Option("--no-packing", help="One document per row, in place of full windows.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(metavar="D", help="Such as cpu or cuda:0 [a GPU where there is one].")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="T", help="float32, bfloat16, float16 or float64 [float32].")
    ] = None,
    statistics: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Only these, as massieu statistics lists them [all].")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of samples and random controls.")] = 0,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    format: Annotated[TableFormat, typer.Option(help="How the tables are stored.")] = TableFormat.PARQUET,
) -> None:
    """Measure a model on text: an HTML page and tables."""
    if model is None and text is not None and len(text) > 1 and os.path.isfile(os.path.join(text[-1], "config.json")):
        raise InputError(f"{text[-1]} is a model; MODEL goes before --text")
    folder = RESULTS / _short_name(model) if out is None else out
    _check_folder(folder)
    from massieu.probing.run import probe as run_probe

    with _progress() as progress:
        result = run_probe(
            model,
            text=text,
            column=column,
            statistics=None if statistics is None else [name.strip() for name in statistics.split(",") if name.strip()],
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
            progress=progress,
        )
    result.save(folder, format=format.value)
    _summarise(result, folder)
    if not result.complete:
        _say("interrupted: the result holds what was measured until then and is marked incomplete")
        raise typer.Exit(INTERRUPTED)
    if result.trouble:
        raise typer.Exit(NOT_FINITE)


@app.command(epilog="\b\nExamples:\n  massieu describe gpt2\n  massieu describe ./checkpoint")
def describe(
    model: Model = None,
    device: Annotated[str | None, typer.Option(metavar="D", help="Such as cpu or cuda:0.")] = None,
    dtype: Annotated[str | None, typer.Option(metavar="T", help="float32, bfloat16, float16 or float64.")] = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Show a model's attention sites, heads and wiring."""
    from massieu.probing.run import describe as run_describe

    found = run_describe(model, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
    _show_description(found.to_dict())


@app.command(epilog=f"\b\nExample:\n  massieu report {RESULTS}/gpt2")
def report(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="A folder that massieu probe has written.")],
) -> None:
    """Draw the page again from stored results."""
    from massieu.probing.result import ProbeResult

    typer.echo(f"page: {ProbeResult.load(results).report(results / PAGE)}")


@app.command(epilog="\b\nExample:\n  massieu probe gpt2 --statistics entropy,weight_first")
def statistics() -> None:
    """List the statistics: formula, claim, control, cost."""
    from massieu.probing.statistics.registry import STATISTICS

    group = None
    for statistic in STATISTICS.values():
        if statistic.group != group:
            group = statistic.group
            typer.echo(f"{typer.style(group.upper(), bold=True)}  cost: {statistic.cost}\n")
        facts = [f"per {statistic.scope}", statistic.unit, "headline" if statistic.headline else ""]
        if statistic.gauge_dependent:
            facts.append("depends on the key origin")
        typer.echo(f"{typer.style(statistic.name, bold=True)}  {statistic.title} ({', '.join(filter(None, facts))})")
        typer.echo(f"  {statistic.formula}")
        typer.echo(f"  {statistic.question}")
        typer.echo(f"  {statistic.caveat}")
        typer.echo(f"  claim {statistic.claim}; {statistic.paper}; control: {statistic.control or 'none'}\n")


@app.command(
    epilog="\b\nExamples:\n"
    "  massieu verify\n"
    "  massieu verify S7 B3\n"
    "  massieu verify S15 --set N=1024 --seed 3\n"
    "  massieu verify --html claims.html"
)
def verify(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="ID", help="Claims such as S7, in full [all, one line each].")
    ] = None,
    set: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Another value for a parameter of the claims named.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of every claim that draws something [0].")] = None,
    every_row: Annotated[
        bool, typer.Option("--all", help="Every row of the claims named, not the worst of each kind alone.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="PATH", help="Write a page with every number.")] = None,
) -> None:
    """Check the papers' claims with numbers; ends with 1 if one fails."""
    if html is not None:
        _check_page(html)
    from massieu.verification import terminal
    from massieu.verification.registry import read_settings
    from massieu.verification.run import verify as run_verify

    result = run_verify(ids or None, seed=seed, settings=read_settings(set or ()), progress=terminal.say_progress)
    if json:
        typer.echo(result.to_json())
    else:
        terminal.show(result, in_full=bool(ids), every_row=every_row)
    if html is not None:
        typer.echo(f"page: {result.report(html)}", err=json)
    if not result.complete:
        _say("interrupted: what is missing was not checked")
        raise typer.Exit(INTERRUPTED)
    if not result.ok:
        raise typer.Exit(FAILED)


def main() -> None:
    """Run the command line."""
    # Threads that wait for each other soon sleep: where other processes have the cores, one that looped would keep the one
    # that it waits for from running. GNU's OpenMP reads this when torch is loaded, which is later.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # not every terminal can show the formulas
    app()


# --- saying ----------------------------------------------------------------------------------------------------------


def _say(message: str) -> None:
    typer.echo(f"massieu: {message}", err=True)


def _summarise(result: "ProbeResult", folder: Path) -> None:
    if result.trouble:
        _say(result.trouble)
    text = result.run["text"]
    model, unknown = result.run["model"], text.get("unknown_share")
    strange = "" if unknown is None else f", {100 * unknown:.3g} % of them unknown to the tokenizer"
    typer.echo(
        f"{model['name']}: {text['tokens']:,} tokens in {text['windows']:,} windows of {text['source']}{strange}"
    )
    for note in (text["dropped"], model.get("missing_weights"), model.get("unexpected_weights")):
        if note not in (None, "none"):
            typer.echo(f"note: {note}")
    for finding in result.findings:
        typer.echo(f"\n{typer.style(finding['title'], bold=True)}\n  {finding['sentence']}")
    typer.echo()
    for warning in result.run["warnings"]:
        _say(f"warning: {warning}")
    typer.echo(f"page: {folder / PAGE}")


def _show_description(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)

    def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        drawn = Table(*columns, title=title, title_justify="left", show_header=any(columns))
        for row in rows:
            drawn.add_row(*("–" if cell is None else escape(str(cell)) for cell in row))
        console.print(drawn)

    table("Model", ("", ""), [(name.replace("_", " "), value) for name, value in found["model"].items()])
    console.print(f"capture route: {found['route']}\n", markup=False)
    columns = ("layer", "name", "kind", "heads", "key_heads", "head_size")
    rows = [[site[name] for name in columns] for site in found["sites"]]
    table("Attention sites", [name.replace("_", " ") for name in columns], rows)
    table("Residual steps", ("layer", "name", "kind"), [(s["layer"], s["name"], s["kind"]) for s in found["sublayers"]])
    for reason in found["unavailable"]:
        console.print(f"not available: {reason}", markup=False)
    for warning in found.get("warnings", ()):
        _say(f"warning: {warning}")


@contextmanager
def _progress() -> "Iterator[Callable[[ProbeProgress], None]]":
    """A progress bar with tokens per second; where standard error is no terminal, one line for each stage."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    rate = _Rate()
    if not console.is_terminal:
        yield _Stages(rate)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None, count="")

        def show(state: "ProbeProgress") -> None:
            count = f"{state.tokens:,} tokens{rate.after(state.tokens)}" if state.tokens else ""
            bar.update(task, description=state.stage, total=state.total_tokens, completed=state.tokens, count=count)

        yield show


class _Stages:
    def __init__(self, rate: "_Rate") -> None:
        self._stage, self._rate = "", rate

    def __call__(self, state: "ProbeProgress") -> None:
        counted = self._rate.after(state.tokens)
        if state.stage != self._stage:
            self._stage = state.stage
            _say(f"{state.stage}{f' ({state.tokens:,} tokens{counted})' if state.tokens else ''}")


class _Rate:
    """Tokens per second since the first batch, whose time goes into looking at the model."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def after(self, tokens: int) -> str:
        now = time.monotonic()
        if self._first is None:
            self._first = (tokens, now) if tokens else None
            return ""
        new, seconds = tokens - self._first[0], now - self._first[1]
        return f", {new / seconds:,.0f} per second" if new and seconds else ""


# --- the output folder -----------------------------------------------------------------------------------------------


def _short_name(model: str | None) -> str:
    if model is None:
        return DEFAULT_NAME
    path = Path(model).resolve() if os.path.exists(model) else Path(model)
    return path.stem if path.suffix.lower() == ".gguf" else path.name


def _check_folder(folder: Path) -> None:
    """That results can be written there, found out before a model is loaded."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
    if not place.is_dir():
        raise InputError(f"the output folder {folder} cannot be made: {place} is a file")
    if not os.access(place, os.W_OK | os.X_OK):
        raise InputError(f"the output folder {folder} cannot be written to")


def _check_page(path: Path) -> None:
    """That the page can be drawn and written there."""
    require_extra("jinja2", "probe")
    if path.is_dir():
        raise InputError(f"{path} is a folder; the page needs the name of a file")
    _check_folder(path.parent)


if __name__ == "__main__":
    main()
