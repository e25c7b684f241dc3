"""The options and arguments of commands: models and how they are loaded, texts, names of claims and statistics."""

import os
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand

if TYPE_CHECKING:
    from massieu.probing.statistics.catalogue import Named

DEFAULT_NAME = "all-MiniLM-L6-v2"


# The headings under which a command's help shows its options; those without one are shown last, under "Options".
MODEL = "Model"
DATA = "What is read"
MEASURED = "What is measured"
OUTPUT = "Output"


class Command(TyperCommand):
    """A command whose help names arguments by their words, and shows options under the headings of this file."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = [self.options_metavar] if self.options_metavar else []
        for parameter in self.get_params(ctx):
            if isinstance(parameter, TyperArgument):
                word = _word(parameter)
                pieces.append(word if parameter.required else f"[{word}]")
        return pieces

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], MODEL: [], DATA: [], MEASURED: [], OUTPUT: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            name, help = record
            if isinstance(parameter, TyperArgument):
                sections["Arguments"].append((_word(parameter), help))
            else:
                heading = getattr(parameter, "rich_help_panel", None) or "Options"
                sections.setdefault(heading, []).append((name, help))
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def _word(argument: TyperArgument) -> str:
    """What stands for an argument in the help, such as MODEL."""
    return argument.metavar or (argument.name or "").upper()


class TextCommand(Command):
    """A command whose ``--text`` takes several paths, as a shell passes them for ``*.md``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(_one_path_each(args)))


def _one_path_each(arguments: Iterable[str]) -> Iterator[str]:
    """``--text A B`` as ``--text A --text B``; an option ends the paths, while ``-`` alone is a path."""
    num_paths = None  # Number of paths after the latest --text; None outside of them.
    for argument in arguments:
        if argument == "--text":
            num_paths = 0
        elif argument.startswith("-") and argument != "-":
            num_paths = None
        elif num_paths is not None:
            if num_paths:
                yield "--text"
            num_paths += 1
        yield argument


def option(metavar: str | None, help: str, *names: str, heading: str | None = None) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=heading)


_MODEL = "Folder of a model, a .gguf file, or a name on the Hugging Face hub. [default: the MiniLM sentence encoder]"
Model = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL)]
Device = Annotated[
    str | None, option("D", "cpu, gpu, cuda:1 and so on. [default: a GPU if there is one]", heading=MODEL)
]
Dtype = Annotated[
    str | None,
    option(
        "T",
        "Precision: float32, bfloat16, float16 or float64, or fp32, bf16 and so on. [default: float32]",
        heading=MODEL,
    ),
]
Revision = Annotated[str | None, option("R", "Branch, tag or commit of the model on the hub.", heading=MODEL)]
DeviceMap = Annotated[
    str | None,
    option("MAP", "auto spreads a large model's layers over devices; use it without --device.", heading=MODEL),
]
TrustRemoteCode = Annotated[
    bool, option(None, "Run the Python code that comes with the model.", "--trust-remote-code", heading=MODEL)
]

# --- a probe's measurements --------------------------------------------------------------------------------------------


class TableFormat(StrEnum):
    """How the tables of a result are stored."""

    PARQUET = "parquet"
    CSV = "csv"


class Per(StrEnum):
    """How much of the attention is replaced at a time."""

    ALL = "all"
    SITE = "site"
    HEAD = "head"


_SAMPLE = "Measure only N queries of each window; saves time on long windows. [default: all]"
_RULES = "Replace the attention and measure how the output changes, for example 'top_k(8)' or 'off(mean)'; repeatable."
_PER_TOKEN = "Also write these statistics for every token to DIR/tokens; 'all' for all attention statistics."
_BOS = "Begin each window with the BOS token, or without it. [default: as the tokenizer is set]"
_RESUME = "Continue an interrupted run from what it stored in DIR."
QuerySample = Annotated[int | None, option("N", _SAMPLE, heading=MEASURED)]
NoPacking = Annotated[
    bool, option(None, "One document per window instead of filling windows with several.", "--no-packing", heading=DATA)
]
Tokenizer = Annotated[
    str | None, option("NAME", "Tokenizer: a folder or a name on the hub. [default: the model's own]", heading=MODEL)
]
Bos = Annotated[bool | None, option(None, _BOS, "--bos/--no-bos", heading=DATA)]
Generate = Annotated[
    int | None, option("N", "Let the model generate N tokens after each document, and measure those.", heading=DATA)
]
_FILES = "Text to read: files (.txt .md .rst .py .jsonl .json .csv .tsv .parquet, also .gz), folders, or - for standard input."
Text = Annotated[list[str] | None, option("PATH ...", _FILES, heading=DATA)]
MaxLength = Annotated[
    int | None, option("N", "Tokens per window. [default: 256, or the model's positions if fewer]", heading=DATA)
]
MaxTokens = Annotated[int | None, option("N", "Stop after this many tokens.", heading=DATA)]
BatchSize = Annotated[int, option("N", "Windows per batch.", heading=DATA)]
Images = Annotated[
    list[str] | None, option("PATH", "For image models: an image file or a folder of images; repeatable.", heading=DATA)
]
Column = Annotated[
    str | None, option("NAME", "Table column or JSON field that holds the text. [default: text]", heading=DATA)
]
Source = Annotated[
    str | None, option("NAME", "For encoder–decoder models: column that the encoder reads.", heading=DATA)
]
Target = Annotated[
    str | None, option("NAME", "For encoder–decoder models: column that the decoder reads.", heading=DATA)
]
Replace = Annotated[list[str] | None, option("RULE", _RULES, heading=MEASURED)]
ReplacePer = Annotated[
    Per, option(None, "Replace all attention at once, or one layer's (site) or one head at a time.", heading=MEASURED)
]
ReplaceWindows = Annotated[int, option("N", "Number of sampled windows for --replace.", heading=MEASURED)]
Quick = Annotated[
    bool,
    option(None, "No controls; the attention statistics only, or those that are named.", "--quick", heading=MEASURED),
]
Draws = Annotated[
    int | None,
    option("N", "Re-initialised models that heads are compared with; 0 for none. [default: 8]", heading=MEASURED),
]
Statistics = Annotated[
    list[str] | None,
    option(
        "NAME,...",
        "Only these: names or groups that 'massieu statistics' lists, or your own, FILE.py:NAME. "
        "[default: the groups attention, values, climb, maps and expansion]",
        heading=MEASURED,
    ),
]
PerToken = Annotated[str | None, option("NAME,...", _PER_TOKEN, heading=MEASURED)]
Resume = Annotated[bool, option(None, _RESUME, "--resume", heading=OUTPUT)]
StoreEvery = Annotated[float, option("MINUTES", "How often intermediate results are stored in DIR.", heading=OUTPUT)]

# --- options of single commands -------------------------------------------------------------------------------------

_FAIL_ABOVE = "Exit with status 1 if a head's statistic differs significantly and by more than X."
_RUNS = "File that massieu.Monitor wrote; further files share the plots."
_REFERENCE = "A run that went well: it shares the plots, in grey."
_EVERY_ROW = "Show every check of the named claims, not only the worst of each kind."
_CLAIMS = "Claims to show in detail, such as S7. [default: a list of all]"
_NAMES = "Statistics or groups to explain. [default: a list of all]"
FailAbove = Annotated[str | None, option("NAME=X,...", _FAIL_ABOVE, heading=OUTPUT)]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN.jsonl ...", help=_RUNS)]
Reference = Annotated[Path | None, option("PATH", _REFERENCE)]
Claims = Annotated[list[str] | None, typer.Argument(metavar="ID ...", help=_CLAIMS)]
Names = Annotated[list[str] | None, typer.Argument(metavar="NAME ...", help=_NAMES)]
_PROMPT = (
    "Text to read by itself, in place of --text: prints the largest numbers of this one prompt, and writes nothing."
)
_CHAT = "Read the prompt as a user's message, written by the tokenizer's chat template."
_HEAD = "Layer and head, counted from 0, such as 5.1."
_SITE = "Attention module, where a layer has several; 'massieu describe' lists them."
_TOP = "How many of the head's largest weights are printed."
OnePrompt = Annotated[str | None, typer.Argument(metavar="PROMPT", help=_PROMPT, show_default=False)]
ModelOrPrompt = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL)]
ThePrompt = Annotated[str | None, typer.Argument(metavar="PROMPT", help="The text to read.", show_default=False)]
Head = Annotated[str, option("LAYER.HEAD", _HEAD, "--head", heading=MEASURED)]
Site = Annotated[str | None, option("NAME", _SITE, heading=MEASURED)]
Top = Annotated[int, option("N", _TOP, heading=OUTPUT)]
Chat = Annotated[bool, option(None, _CHAT, "--chat", heading=DATA)]
JsonOutput = Annotated[bool, option(None, "Print a JSON object instead.", "--json", heading=OUTPUT)]
EveryRow = Annotated[bool, option(None, _EVERY_ROW, "--all")]


def names_in(*values: str) -> list[str] | None:
    """The names in the values of a repeatable option, separated by commas; None if the option was not set."""
    if not values:
        return None
    return [name.strip() for value in values for name in value.split(",") if name.strip()]


def statistics_in(names: list[str] | None) -> "list[Named] | None":
    """The statistics of these names; a name such as ``heads.py:nearby`` is loaded from the file."""
    from massieu.probing.statistics.own_files import named

    return None if names is None else named(names)


def per_token(value: str | None) -> bool | list[str]:
    """The value of ``--per-token`` as the probe takes it."""
    if value is None:
        return False
    if value.strip() == "all":
        return True
    return names_in(value) or []


def short_name(model: str | None) -> str:
    """A model's name as a part of a folder's name."""
    if model is None:
        return DEFAULT_NAME
    path = Path(model).resolve() if os.path.exists(model) else Path(model)
    return path.stem if path.suffix.lower() == ".gguf" else path.name
