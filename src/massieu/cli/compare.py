"""The command that compares models: what it was asked, what came out, and how it ends."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from massieu.cli import terminal
from massieu.cli.streams import say, show
from massieu.errors import InputError, require_extra
from massieu.storage.folder import save_or_elsewhere

if TYPE_CHECKING:
    from massieu.interruption import Interruption
    from massieu.probing.compare.comparison import Comparison
    from massieu.probing.statistics.catalogue import Named

SHOWN = 6
"""Heads that are listed for each model."""


@dataclass(frozen=True)
class Asked:
    """What the command was asked: options that were not given are left out of ``options``."""

    models: list[Any]
    names: list[str] | None
    options: dict[str, Any]
    folder: Path
    limits: dict[str, float]
    as_json: bool


def limits_of(given: str | None, chosen: "Sequence[Named] | None") -> dict[str, float]:
    """The largest differences that are let pass, by statistic, from ``NAME=X,...``.

    Raises:
        InputError: no such statistic of heads, or one that is not measured; a limit that is no number, or below 0.
    """
    from massieu.probing.statistics.catalogue import Selection

    selection = Selection.of(chosen)
    known, wanted = selection.catalogue.statistics, selection.names
    limits: dict[str, float] = {}
    for part in (given or "").split(","):
        if not part.strip():
            continue
        name, _, text = (word.strip() for word in part.partition("="))
        statistic = known.get(name)
        if statistic is None or statistic.scope == "layer" or name not in wanted:
            why = (
                "is not measured, because --statistics leaves it out"
                if statistic and statistic.scope != "layer"
                else "is not one; 'massieu statistics' lists them"
            )
            raise InputError(f"--fail-above needs NAME=X where NAME is a statistic of heads, and {name!r} {why}")
        try:
            limits[name] = float(text)
        except ValueError as error:
            raise InputError(f"--fail-above needs a number, as in {name}=0.1, got {part.strip()!r}") from error
        if not (math.isfinite(limits[name]) and limits[name] >= 0):
            raise InputError(f"--fail-above needs a number that is 0 or more, got {part.strip()!r}")
    if given is not None and not limits:
        raise InputError(f"--fail-above needs NAME=X, as in entropy=0.1, got {given!r}")
    return limits


def run(asked: Asked, interruption: "Interruption") -> "tuple[Comparison, bool]":
    """Compare, store and print; also whether a difference is above its limit.

    Raises:
        InputError: as `massieu.compare`; also where the folder cannot be written to.
        KeyboardInterrupt: interrupted before all models were read.
    """
    for module in ("polars", "jinja2", "plotly.offline", "scipy"):
        require_extra(module, "probe")
    with interruption.loading():
        from massieu.probing.compare.run import compare
        from massieu.probing.result.result_files import ROOM
        from massieu.storage.folder import reserved
        from massieu.storage.record_files import COMPARISON_FILES, COMPARISON_RECORD

    with reserved(asked.folder, COMPARISON_RECORD, COMPARISON_FILES, ROOM):
        with terminal.progress_shown() as progress:
            try:
                found = compare(*asked.models, names=asked.names, out=asked.folder, progress=progress, **asked.options)
            except KeyboardInterrupt:
                _say_stored(asked)
                raise
        save_or_elsewhere(found.save, asked.folder)
    above = found.above(asked.limits)
    if asked.as_json:
        show(dumps(found.to_dict() | {"above": above.to_dicts()}, indent=1, ensure_ascii=False, allow_nan=False))
    else:
        _show(found, asked)
    for model, layer, head, statistic, difference in (
        above.select("model", "layer", "head", "statistic", "difference").head(SHOWN).rows()
    ):
        say(f"above the limit: {model}, layer {layer} head {head}, {statistic} differs by {difference:.4g}")
    return found, not above.is_empty()


def _say_stored(asked: Asked) -> None:
    from massieu.probing.compare.stored_results import FOLDER

    stored = asked.folder / FOLDER
    if number := sum(1 for each in stored.glob("*/run.json")):
        say(f"{number} results of models are stored in {stored}; run the same command again to continue")


def _show(found: "Comparison", asked: Asked) -> None:
    for each in found.pairings:
        show(each.sentence)
    for note in found.notes:
        say(f"warning: {note}")
    for model in found.models[1:]:
        counts = [
            each for each in found.counts() if each["model"] == model and each["scope"] == "head" and each["tested"]
        ]
        show()
        show(bold=f"{found.models[0]} → {model}")
        for each in sorted(counts, key=lambda each: -each["named"])[:SHOWN]:
            show(f"  {each['statistic']}: {each['named']} of {each['tested']} heads differ by an effect that matters")
        changed = found.changed(SHOWN, model)
        show("  the heads that changed most:" if changed else "  no head differs by an effect that matters")
        for change in changed:
            show(f"    {change.sentence(model).partition(', ')[2]}")
    show(f"\npage: {asked.folder / 'report.html'}")
