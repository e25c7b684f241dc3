"""The commands: they parse options, call the library and print results; torch is imported when a command runs."""

import os
import signal
from contextlib import nullcontext
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

import massieu
from massieu.cli import inputs, terminal
from massieu.cli import options as take
from massieu.cli.experiment_command import experiment
from massieu.cli.options import (
    MEASURED,
    OUTPUT,
    Command,
    Device,
    DeviceMap,
    Dtype,
    Model,
    Revision,
    TextCommand,
    TrustRemoteCode,
    option,
    short_name,
)
from massieu.cli.output import check_page, result_folder, show_json
from massieu.cli.processes import is_distributed, is_rank_zero, process_group, say_first, say_once
from massieu.cli.streams import OutputLost, say, show
from massieu.errors import InputError, ProcessLostError
from massieu.interruption import ENDINGS, Interruption, interruptible
from massieu.storage.folder import save_or_elsewhere

if TYPE_CHECKING:
    from massieu.probing.result.result import ProbeResult

# Exit statuses, besides 0 and 128 + the number of the signal that interrupted a command.
FAILED = 1
BAD_INPUT = 2
NOT_FINITE = 3
RESULTS = Path("massieu-results")
OWN_PROCESS = object()
"""What the context holds at first where the process was started for the command alone."""


class _Commands(TyperGroup):
    """Bad input and interruptions end in one line without a traceback; any other error keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        with interruptible(ENDINGS) as interruption:
            interruption.owns_process = ctx.obj is OWN_PROCESS
            ctx.obj = interruption
            try:
                return super().invoke(ctx)
            except typer.Exit:
                raise
            except (KeyboardInterrupt, Exception) as error:
                _end(error, interruption)
                raise


def _end(error: BaseException, interruption: Interruption) -> None:
    """Print why a command ends, and exit; returns if the error needs its traceback."""
    was_interrupted = interruption.asked.is_set()
    if isinstance(error, OutputLost) and was_interrupted:  # By a terminal that was closed.
        raise typer.Exit(interruption.status) from error
    # Libraries that are interrupted while they are loaded raise errors of their own.
    if isinstance(error, KeyboardInterrupt) or (was_interrupted and not interruption.held):
        say_once(_interrupted(interruption))
        raise typer.Exit(interruption.status) from error
    if isinstance(error, InputError | ProcessLostError):
        say_once(" ".join(" ".join((str(error), *getattr(error, "__notes__", ()))).split()))
        raise typer.Exit(BAD_INPUT if isinstance(error, InputError) else FAILED) from error


def _interrupted(interruption: Interruption) -> str:
    number = interruption.number
    return "interrupted" if number in (None, signal.SIGINT) else f"interrupted by {signal.Signals(number).name}"


app = typer.Typer(
    cls=_Commands,
    help="Look into transformers, watch them train, and check the theory of attention as probability.",
    epilog="'massieu COMMAND --help' shows the options and examples of a command.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(is_requested: bool) -> None:
    if is_requested:
        show(f"massieu {massieu.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(
    cls=TextCommand,
    epilog="\b\nExamples:\n"
    "  massieu probe\n"
    "  massieu probe gpt2 'The cat sat on the mat'\n"
    "  massieu probe gpt2 --text notes/ README.md --max-tokens 100000\n"
    "  massieu probe ./checkpoint --text data.jsonl --column body --no-packing\n"
    "  massieu probe t5-small --text pairs.csv --source en --target de\n"
    "  massieu probe model.Q4_K_M.gguf --max-tokens 20000\n"
    "  massieu probe gpt2 --replace 'off(mean)' --replace-per head\n"
    "  torchrun --nproc-per-node=4 -m massieu probe gpt2 --text notes/\n"
    "  cat book.txt | massieu probe gpt2 --text - --out book",
)
def probe(
    context: typer.Context,
    model: Model = None,
    prompt: take.OnePrompt = None,
    text: take.Text = None,
    column: take.Column = None,
    images: take.Images = None,
    source: take.Source = None,
    target: take.Target = None,
    out: Annotated[
        Path | None, option("DIR", f"Folder for the page and the tables. [default: {RESULTS}/<model>]", heading=OUTPUT)
    ] = None,
    max_length: take.MaxLength = None,
    max_tokens: take.MaxTokens = None,
    batch_size: take.BatchSize = 8,
    query_sample: take.QuerySample = None,
    no_packing: take.NoPacking = False,
    bos: take.Bos = None,
    generate: take.Generate = None,
    replace: take.Replace = None,
    replace_per: take.ReplacePer = take.Per.ALL,
    replace_windows: take.ReplaceWindows = 16,
    device: Device = None,
    device_map: DeviceMap = None,
    dtype: Dtype = None,
    statistics: take.Statistics = None,
    quick: take.Quick = False,
    draws: take.Draws = None,
    per_token: take.PerToken = None,
    seed: Annotated[int, option("N", "Random seed of samples and controls.", heading=MEASURED)] = 0,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    tokenizer: take.Tokenizer = None,
    format: Annotated[
        take.TableFormat, option(None, "File format of the tables.", heading=OUTPUT)
    ] = take.TableFormat.PARQUET,
    resume: take.Resume = False,
    store_every: take.StoreEvery = 5.0,
    chat: take.Chat = False,
    json: take.JsonOutput = False,
) -> None:
    """Measure a model's attention on text; writes an HTML page. With a PROMPT, print its largest numbers."""
    loading: dict[str, Any] = {"device": device, "device_map": device_map, "dtype": dtype, "revision": revision}
    if prompt is not None or chat:
        of_text = {"--text": text, "--column": column, "--images": images, "--source": source, "--target": target}
        of_text |= {"--max-length": max_length, "--max-tokens": max_tokens, "--bos": bos, "--generate": generate}
        of_a_run = {"--out": out, "--query-sample": query_sample, "--replace": replace, "--statistics": statistics}
        of_a_run |= {"--draws": draws, "--per-token": per_token, "--quick": quick or None, "--resume": resume or None}
        of_a_run |= {"--no-packing": no_packing or None}
        inputs.check_prompt(prompt, of_text | of_a_run)
        with context.obj.loading():
            from massieu.cli.attention import show_summary
            from massieu.probing.model.given import Checkpoint
            from massieu.probing.weights.prompt_summary import summarise_prompt
            from massieu.report.encode import encodable

        checkpoint = Checkpoint(model, trust_remote_code=trust_remote_code, **loading)
        summary = summarise_prompt(checkpoint, inputs.given_prompt(prompt, chat), tokenizer)
        if json:
            show(dumps(encodable(asdict(summary)), indent=1, ensure_ascii=False, allow_nan=False))
        else:
            show_summary(summary)
        return
    if is_distributed() and text is not None and "-" in text:
        raise InputError("--text - works with one process only, but torchrun started several; give files instead")
    if model is None and text is not None and len(text) > 1 and os.path.isfile(Path(text[-1], "config.json")):
        raise InputError(f"{text[-1]}, given after --text, is a model; put MODEL before --text")
    folder = RESULTS / short_name(model) if out is None else out
    names = take.names_in(*statistics or ())
    with result_folder(folder, format.value, per_token is not None) if is_rank_zero() else nullcontext():
        with context.obj.loading():
            from massieu.probing.model.given import Checkpoint
            from massieu.probing.run import probe as run_probe
            from massieu.probing.session.course import forget, running_in
            from massieu.probing.session.run import Run

        running = running_in(folder)
        chosen = take.statistics_in(names)
        data = inputs.data_of(
            text,
            tokenizer,
            images=images,
            column=column,
            source=source,
            target=target,
            max_length=max_length,
            max_tokens=max_tokens,
            no_packing=no_packing,
            bos=bos,
            generate=generate,
        )
        with process_group(), terminal.progress_shown() if is_rank_zero() else nullcontext(False) as progress:
            result = run_probe(
                Checkpoint(model, trust_remote_code=trust_remote_code, **loading),
                data,
                **inputs.statistics_options(chosen, quick, draws),
                replace=inputs.replacements_of(replace, replace_per.value, replace_windows, chosen),
                per_token=take.per_token(per_token),
                query_sample=query_sample,
                batch_size=batch_size,
                seed=seed,
                run=Run(
                    running, resume=resume, store_every=store_every, distributed=is_distributed(), progress=progress
                ),
            )
        if is_rank_zero():
            save_or_elsewhere(lambda place: result.save(place, format=format.value), folder)
        if is_rank_zero() and result.complete:
            forget(running)
    if is_rank_zero() and json:
        show(dumps(terminal.summary_of(result, folder), indent=1, ensure_ascii=False, allow_nan=False))
    elif is_rank_zero():
        terminal.summarise(result, folder)
    _end_probe(result, context.obj, resumable=not replace)


def _end_probe(result: "ProbeResult", interruption: Interruption, resumable: bool) -> None:
    """Exit with the status of a probe whose result was saved; returns if that is 0."""
    if not result.complete:
        advice = "with --resume to continue" if resumable else "to begin again: with --replace, no run is continued"
        say_first(
            f"{_interrupted(interruption)}: the result holds what was measured so far and is marked incomplete; "
            f"run the same command {advice}"
        )
    elif interruption.asked.is_set():
        say_first(f"{_interrupted(interruption)} after the last measurement: the result is complete")
    elif result.trouble and is_rank_zero():
        raise typer.Exit(NOT_FINITE)
    else:
        return
    raise typer.Exit(interruption.status)


@app.command(
    cls=TextCommand,
    epilog="\b\nExamples:\n"
    "  massieu compare gpt2 ./tuned --text notes/\n"
    "  massieu compare gpt2 ./tuned --statistics attention --fail-above entropy=0.1\n"
    "  massieu compare step100 step200 step400 --out course\n"
    "  massieu compare EleutherAI/pythia-70m --revisions step0,step512,step143000\n"
    "  massieu compare massieu-results/one massieu-results/other --json",
)
def compare(
    context: typer.Context,
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL ...", help="Two or more models, or folders of stored results.")
    ],
    revisions: Annotated[
        str | None, option("R,...", "Compare revisions of one MODEL from the hub.", heading=take.MODEL)
    ] = None,
    text: Annotated[
        list[str] | None, option("PATH ...", "Files or folders, as for 'massieu probe'.", heading=take.DATA)
    ] = None,
    column: take.Column = None,
    source: take.Source = None,
    target: take.Target = None,
    out: Annotated[
        Path | None,
        option(
            "DIR",
            f"Folder for the page, the tables and the results. [default: {RESULTS}/<first>-<last>]",
            heading=OUTPUT,
        ),
    ] = None,
    max_length: take.MaxLength = None,
    max_tokens: take.MaxTokens = None,
    batch_size: Annotated[int | None, option("N", "Windows per batch. [default: 8]", heading=take.DATA)] = None,
    no_packing: take.NoPacking = False,
    bos: take.Bos = None,
    device: Device = None,
    dtype: Dtype = None,
    statistics: take.Statistics = None,
    quick: take.Quick = False,
    draws: take.Draws = None,
    seed: Annotated[
        int | None, option("N", "Random seed of samples and controls. [default: 0]", heading=MEASURED)
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    tokenizer: take.Tokenizer = None,
    fail_above: take.FailAbove = None,
    json: take.JsonOutput = False,
) -> None:
    """Compare models on the same text, head by head."""
    from massieu.cli.compare import ComparisonRequest, limits_of, run

    names = take.names_in(*() if revisions is None else (revisions,))
    with context.obj.loading():
        chosen = take.statistics_in(take.names_in(*statistics or ()))
        limits = limits_of(fail_above, chosen)
    loading: dict[str, Any] = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    with context.obj.loading():
        to_compare = inputs.models_of(models, names, loading)
        data = inputs.data_of(
            text,
            tokenizer,
            column=column,
            source=source,
            target=target,
            max_length=max_length,
            max_tokens=max_tokens,
            no_packing=no_packing,
            bos=bos,
        )
    chosen_options = {"seed": seed, "batch_size": batch_size} | inputs.statistics_options(chosen, quick, draws)
    options = {"data": data} | {name: value for name, value in chosen_options.items() if value is not None}
    ends = [short_name(name) if names is None else name for name in ((names or models)[0], (names or models)[-1])]
    folder = RESULTS / "-".join(ends) if out is None else out
    request = ComparisonRequest(to_compare, names, options, folder, limits, json)
    comparison, is_above_limit = run(request, context.obj)
    if context.obj.asked.is_set():
        say(f"{_interrupted(context.obj)} after the last measurement: the comparison is complete")
        raise typer.Exit(context.obj.status)
    if any(run_record.trouble for run_record in comparison.runs):
        raise typer.Exit(NOT_FINITE)
    if is_above_limit:
        raise typer.Exit(FAILED)


@app.command(
    cls=Command,
    epilog="\b\nExamples:\n"
    "  massieu attention 'The cat sat on the mat' --head 5.1\n"
    "  massieu attention gpt2 'The cat sat on the mat' --head 5.1\n"
    "  massieu attention ./checkpoint 'Why is the sky blue?' --chat --head 3.0 --out sky.svg",
)
def attention(
    context: typer.Context,
    model_or_prompt: take.ModelOrPrompt = None,
    prompt: take.ThePrompt = None,
    *,
    head: take.Head,
    site: take.Site = None,
    out: Annotated[
        Path | None,
        option(
            "PATH",
            f"File of the picture: .png, .svg or .pdf. [default: {RESULTS}/<model>/attention-<head>.png]",
            heading=OUTPUT,
        ),
    ] = None,
    top: take.Top = 10,
    chat: take.Chat = False,
    device: Device = None,
    device_map: DeviceMap = None,
    dtype: Dtype = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    tokenizer: take.Tokenizer = None,
    json: take.JsonOutput = False,
) -> None:
    """Draw the attention weights of one head on a prompt."""
    from massieu.cli.attention import HeadPicture, head_of

    layer, number = head_of(head)
    model, prompt = inputs.model_and_prompt(model_or_prompt, prompt)
    inputs.check_prompt(prompt, {})
    if top < 1:
        raise InputError(f"--top must be at least 1, got {top}")
    path = RESULTS / short_name(model) / f"attention-{layer}.{number}.png" if out is None else out
    with context.obj.loading():
        from massieu.probing.model.given import Checkpoint

    loading: dict[str, Any] = {"device": device, "device_map": device_map, "dtype": dtype, "revision": revision}
    checkpoint = Checkpoint(model, trust_remote_code=trust_remote_code, **loading)
    HeadPicture(layer, number, site, path, top, json).make(checkpoint, inputs.given_prompt(prompt, chat), tokenizer)


@app.command(cls=Command, epilog="\b\nExamples:\n  massieu describe gpt2\n  massieu describe ./checkpoint")
def describe(
    context: typer.Context,
    model: Model = None,
    device: Device = None,
    device_map: DeviceMap = None,
    dtype: Dtype = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    json: take.JsonOutput = False,
) -> None:
    """List the attention layers of a model and its heads."""
    with context.obj.loading():
        from massieu.probing.model.given import Checkpoint
        from massieu.probing.run import describe as run_describe

    loading: dict[str, Any] = {"device": device, "device_map": device_map, "dtype": dtype, "revision": revision}
    description = run_describe(Checkpoint(model, trust_remote_code=trust_remote_code, **loading)).to_dict()
    if json:
        show(dumps(description, indent=1, ensure_ascii=False, allow_nan=False))
    else:
        terminal.show_description(description)


@app.command(cls=Command, epilog=f"\b\nExample:\n  massieu report {RESULTS}/gpt2")
def report(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="A folder that 'massieu probe' has written.")],
) -> None:
    """Draw the page of a stored result again."""
    from massieu.probing.result.result import ProbeResult

    show(f"page: {ProbeResult.redraw(results)}")


@app.command(
    cls=Command,
    epilog="\b\nExamples:\n"
    "  massieu monitor run.jsonl\n"
    "  massieu monitor run.jsonl other.jsonl --reference healthy.jsonl\n"
    "  massieu monitor run.jsonl --json",
)
def monitor(
    runs: take.Runs,
    reference: take.Reference = None,
    out: Annotated[Path | None, option("PATH", "File of the page. [default: RUN.html]", heading=OUTPUT)] = None,
    json: take.JsonOutput = False,
) -> None:
    """Draw the curves and alarms of a training run."""
    from massieu.cli.monitor import draw, summary_of

    page, records = draw(runs, out, reference)
    if json:
        show_json(summary_of(page, records))
    else:
        show(f"page: {page}")


@app.command(
    cls=Command,
    epilog="\b\nExamples:\n"
    "  massieu statistics\n"
    "  massieu statistics entropy maps\n"
    "  massieu probe gpt2 --statistics entropy,maps",
)
def statistics(
    names: take.Names = None,
) -> None:
    """List the statistics, or explain the ones you name."""
    from massieu.probing.statistics.catalogue import PACKAGE, Selection

    if not names:
        terminal.list_statistics(PACKAGE.statistics.values())
        return
    selection = Selection.of(take.statistics_in(names))
    for statistic in selection.catalogue.statistics.values():
        if statistic.name in selection.names:
            terminal.show_statistic(statistic)


@app.command(
    cls=Command,
    epilog="\b\nExamples:\n"
    "  massieu verify\n"
    "  massieu verify S7 B3\n"
    "  massieu verify S15 --set N=1024 --seed 3\n"
    "  massieu verify --html claims.html",
)
def verify(
    context: typer.Context,
    ids: take.Claims = None,
    set: Annotated[list[str] | None, option("NAME=VALUE", "Set a parameter of the named claims; repeatable.")] = None,
    seed: Annotated[int | None, option("N", "Random seed of all claims. [default: 0]")] = None,
    every_row: take.EveryRow = False,
    json: Annotated[bool, option(None, "Print a JSON list instead.", "--json")] = False,
    html: Annotated[Path | None, option("PATH", "Also write a page with every number.")] = None,
) -> None:
    """Check the claims of the papers; exits with 1 unless all hold."""
    if html is not None:
        check_page(html)
    with context.obj.loading():
        from massieu.papers.claims import terminal as claims
        from massieu.papers.claims.registry import read_settings
        from massieu.papers.claims.run import verify as run_verify

    result = run_verify(ids or None, seed=seed, settings=read_settings(set or ()), progress=claims.say_progress)
    if html is not None:
        save_or_elsewhere(result.report, html)
    if json:
        show(result.to_json())
    else:
        claims.show(result, in_full=bool(ids), every_row=every_row)
    if html is not None:
        show(f"page: {html}", err=json)
    if not result.complete:
        say(f"{_interrupted(context.obj)}: the remaining claims were not checked")
        raise typer.Exit(context.obj.status)
    if not result.ok:
        raise typer.Exit(FAILED)


@app.command(
    cls=Command,
    epilog="\b\nExamples:\n  massieu devices\n  massieu devices --device cuda:1 --quick\n  massieu devices --json",
)
def devices(
    context: typer.Context,
    device: Device = None,
    quick: Annotated[
        bool, option(None, "Small sizes: checks the errors within seconds; timings mean little.", "--quick")
    ] = False,
    json: take.JsonOutput = False,
) -> None:
    """Test which attention kernels run here, and how fast."""
    with context.obj.loading():
        from massieu.cli.devices import show_survey
        from massieu.ops.survey import survey
        from massieu.report.encode import encodable

    result = survey(device, quick, progress=say)
    if json:
        show(dumps(encodable(result.to_dict()), indent=1, ensure_ascii=False, allow_nan=False))
    else:
        show_survey(result)
    if not result.complete:
        say(f"{_interrupted(context.obj)}: the remaining backends were not measured")
        raise typer.Exit(context.obj.status)
    if not result.ok:
        raise typer.Exit(FAILED)


app.command(
    cls=Command,
    epilog="\b\nExamples:\n"
    "  massieu experiment list\n"
    "  massieu experiment precision\n"
    "  massieu experiment sink --quick\n"
    "  massieu experiment list --json",
)(experiment)
