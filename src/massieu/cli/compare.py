"""The command that compares models: its options, its output, and how it ends."""

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
"""Heads, and statistics, that are listed for each model."""


@dataclass(frozen=True)
class ComparisonRequest:
    """The options of the command; those of `massieu.compare` that were not set are left out of ``options``."""

    models: list[Any]
    names: list[str] | None
    options: dict[str, Any]
    folder: Path
    limits: dict[str, float]
    as_json: bool


def limits_of(fail_above: str | None, chosen: "Sequence[Named] | None") -> dict[str, float]:
    """The largest differences that are allowed, by statistic, from ``NAME=X,...``.

    Raises:
        InputError: a name is no statistic of heads, or of one that is not measured; a limit is no number, or below 0.
    """
    from massieu.probing.statistics.catalogue import Selection

    selection = Selection.of(chosen)
    limits: dict[str, float] = {}
    for part in (fail_above or "").split(","):
        if not part.strip():
            continue
        name, _, text = (word.strip() for word in part.partition("="))
        statistic = selection.catalogue.statistics.get(name)
        is_of_heads = statistic is not None and statistic.scope != "layer"
        if not is_of_heads or name not in selection.names:
            problem = "is not one; 'massieu statistics' lists them"
            if is_of_heads:
                problem = "is not measured, because --statistics leaves it out"
            raise InputError(f"--fail-above needs NAME=X where NAME is a statistic of heads, and {name!r} {problem}")
        try:
            limits[name] = float(text)
        except ValueError as error:
            raise InputError(f"--fail-above needs a number, as in {name}=0.1, got {part.strip()!r}") from error
        if not (math.isfinite(limits[name]) and limits[name] >= 0):
            raise InputError(f"--fail-above needs a number that is 0 or more, got {part.strip()!r}")
    if fail_above is not None and not limits:
        raise InputError(f"--fail-above needs NAME=X, as in entropy=0.1, got {fail_above!r}")
    return limits


def run(request: ComparisonRequest, interruption: "Interruption") -> "tuple[Comparison, bool]":
    """Compare, store and print; returns the comparison, and whether a difference is above its limit.

    Raises:
        InputError: as `massieu.compare`; also if the folder cannot be written to.
        KeyboardInterrupt: interrupted before all models were read.
    """
    for module in ("polars", "jinja2", "plotly.offline", "scipy"):
        require_extra(module, "probe")
    with interruption.loading():
        from massieu.probing.compare.run import compare
        from massieu.probing.result.result_files import ROOM
        from massieu.storage.folder import reserved
        from massieu.storage.record_files import COMPARISON_FILES, COMPARISON_RECORD

    with reserved(request.folder, COMPARISON_RECORD, COMPARISON_FILES, ROOM):
        with terminal.progress_shown() as progress:
            try:
                comparison = compare(
                    *request.models, names=request.names, out=request.folder, progress=progress, **request.options
                )
            except KeyboardInterrupt:
                _say_stored(request.folder)
                raise
        save_or_elsewhere(comparison.save, request.folder)
    above = comparison.above(request.limits)
    if request.as_json:
        entries = comparison.to_dict() | {"above": above.to_dicts()}
        show(dumps(entries, indent=1, ensure_ascii=False, allow_nan=False))
    else:
        _show(comparison, request.folder)
    for model, layer, head, statistic, difference in (
        above.select("model", "layer", "head", "statistic", "difference").head(SHOWN).rows()
    ):
        say(f"above the limit: {model}, layer {layer} head {head}, {statistic} differs by {difference:.4g}")
    return comparison, not above.is_empty()


def _say_stored(folder: Path) -> None:
    from massieu.probing.compare.stored_results import FOLDER

    stored = folder / FOLDER
    num_results = len(list(stored.glob("*/run.json")))
    if num_results:
        say(f"{num_results} results of models are stored in {stored}; run the same command again to continue")


def _show(comparison: "Comparison", folder: Path) -> None:
    for pairing in comparison.pairings:
        show(pairing.sentence)
    for note in comparison.notes:
        say(f"warning: {note}")
    for model in comparison.models[1:]:
        counts = [
            row for row in comparison.counts() if row["model"] == model and row["scope"] == "head" and row["tested"]
        ]
        show()
        show(bold=f"{comparison.models[0]} → {model}")
        for row in sorted(counts, key=lambda row: -row["named"])[:SHOWN]:
            show(f"  {row['statistic']}: {row['named']} of {row['tested']} heads differ by an effect that matters")
        changed = comparison.changed(SHOWN, model)
        show("  the heads that changed most:" if changed else "  no head differs by an effect that matters")
        for change in changed:
            show(f"    {change.sentence(model).partition(', ')[2]}")
    show(f"\npage: {folder / 'report.html'}")
