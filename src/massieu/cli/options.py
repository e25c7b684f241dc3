"""What several commands take: the model and how it is loaded, text in several paths."""

import os
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

DEFAULT_NAME = "all-MiniLM-L6-v2"


class TextCommand(TyperCommand):
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


def option(metavar: str | None, help: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=help)


_MODEL = "Model folder, .gguf file or hub name; the default is the MiniLM sentence encoder."
Model = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL)]
Device = Annotated[str | None, option("D", "Such as cpu or cuda:0 [a GPU where there is one].")]
Dtype = Annotated[str | None, option("T", "float32, bfloat16, float16 or float64 [float32].")]
Revision = Annotated[str | None, option("R", "Branch, tag or commit of a model on the hub.")]
DeviceMap = Annotated[str | None, option("MAP", "In place of a device, for large models: auto spreads the layers.")]
TrustRemoteCode = Annotated[bool, option(None, "Run the code that comes with the model.", "--trust-remote-code")]

# --- what a probe measures ---------------------------------------------------------------------------------------------


class TableFormat(StrEnum):
    """How the tables of a result are stored."""

    PARQUET = "parquet"
    CSV = "csv"


class Per(StrEnum):
    """How much of the attention is replaced at a time."""

    ALL = "all"
    SITE = "site"
    HEAD = "head"


_SAMPLE = "Queries per window that are measured [all]; for long windows."
_RULES = "What changes with another attention, as 'top_k(8)' or 'off(mean)'; repeatable."
_PER_TOKEN = "Write these statistics at every token into DIR/tokens; all for every one of the attention."
_RESUME = "Go on from the running sums that a run that was ended has left in DIR."
QuerySample = Annotated[int | None, option("N", _SAMPLE)]
NoPacking = Annotated[bool, option(None, "One document per row, in place of full windows.", "--no-packing")]
Generate = Annotated[int | None, option("N", "Let the model write N tokens after each document, and measure those.")]
_FILES = "Files (.txt .md .rst .py .jsonl .json .csv .tsv .parquet, also .gz), folders, - for standard input."
Text = Annotated[list[str] | None, option("PATH ...", _FILES)]
MaxLength = Annotated[int, option("N", "Tokens in a window.")]
MaxTokens = Annotated[int | None, option("N", "Stop after this many tokens.")]
BatchSize = Annotated[int, option("N", "Windows in a batch.")]
Images = Annotated[list[str] | None, option("PATH", "In place of text: image files and folders of them; repeatable.")]
Column = Annotated[str | None, option("NAME", "Column of a table, or field of JSON, that holds the text [text].")]
Source = Annotated[str | None, option("NAME", "For encoder–decoders: column of the text that the encoder reads.")]
Target = Annotated[str | None, option("NAME", "For encoder–decoders: column of the text that the decoder reads.")]
Replace = Annotated[list[str] | None, option("RULE", _RULES)]
ReplacePer = Annotated[Per, option(None, "Everywhere at once, or one site or head at a time.")]
ReplaceWindows = Annotated[int, option("N", "Sampled windows on which attention is replaced.")]
Quick = Annotated[bool, option(None, "Attention statistics alone, without controls and examples.", "--quick")]
Statistics = Annotated[list[str] | None, option("NAME,...", "Only these, as massieu statistics lists them [all].")]
PerToken = Annotated[str | None, option("NAME,...", _PER_TOKEN)]
Resume = Annotated[bool, option(None, _RESUME, "--resume")]
StoreEvery = Annotated[float, option("MINUTES", "How often running sums are stored in DIR.")]


def names_in(*listed: str) -> list[str] | None:
    """The names of an option that takes several, separated by commas, however often it is given; None where it is not."""
    return [name.strip() for each in listed for name in each.split(",") if name.strip()] if listed else None


def per_token(given: str | None) -> bool | list[str]:
    """``--per-token`` as the probe takes it."""
    return given is not None if given is None or given.strip() == "all" else names_in(given) or []


def short_name(model: str | None) -> str:
    """What a model is called in the name of a folder."""
    if model is None:
        return DEFAULT_NAME
    path = Path(model).resolve() if os.path.exists(model) else Path(model)
    return path.stem if path.suffix.lower() == ".gguf" else path.name
