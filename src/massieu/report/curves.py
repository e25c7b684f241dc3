"""The page of a training run: curves of what a monitor recorded, and maps of its layers. It needs nothing but a browser."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from massieu.errors import InputError
from massieu.foundation.numbers import number
from massieu.report import colours
from massieu.report.encode import encodable, script_json
from massieu.report.page import asset, hashed, plotly_script, script_of, template
from massieu.storage.record_lines import TrainingRun, differing

SCRIPTS = ("shared.js", "drawing.js", "curves.js")
MOST_POINTS = 1_500
"""Steps of a drawn curve; of more, the least and the largest of each interval are drawn."""
MOST_COLUMNS = 400
MOST_CELLS = 400_000
_FEWEST_COLUMNS = 20
_LOGARITHMIC = 100.0
"""Positive numbers that span more than this are drawn on a logarithmic axis."""
PARTS = ("mean", "max", "min")
_HEAD = re.compile(r"(?:^|/)head\d+$")
_PLACES = ("largest_logit_layer", "largest_logit_head")


class _Title(NamedTuple):
    title: str
    unit: str = ""
    note: str = ""


TITLES = {
    "loss": _Title("Loss"),
    "gradient_norm": _Title("Gradient norm"),
    "unchanged_weights": _Title("Share of weights that a step leaves as they were"),
    "learning_rate": _Title("Learning rate"),
    "weight_norm": _Title("Weight norm"),
    "selective_log_partition": _Title(
        "Selective log Z", "nats", "KL(h‖p): how far the attention is from uniform over the visible keys."
    ),
    "largest_logit": _Title("Largest logit", "nats", "Depends on the key origin; attention does not."),
    "largest_logit_above_mean": _Title("Largest score above the mean", "nats", "Does not depend on the key origin."),
    "entropy": _Title("Entropy", "nats", "Low where a query attends to few keys."),
    "entropy_fraction": _Title("Entropy as a share of log n"),
    "weight_first": _Title("Weight on the first token"),
    "effective_rank": _Title("Effective rank of the hidden states"),
    "spread": _Title("Spread of the hidden states"),
    "extreme_activations": _Title("Share of tokens with an extreme activation"),
}
"""What is drawn, in this order; other quantities follow with their names."""
FIRST = ("loss", "gradient_norm")
"""What stands on top, over the page's width."""


def render(runs: Sequence[TrainingRun], reference: TrainingRun | None = None) -> str:
    """Draw runs as one HTML page: the first with its alarms, the others and the reference beside it.

    The page asks for nothing from outside, and every string of it is escaped. Of long runs it draws the extremes of
    intervals, so that its size is bounded.

    Raises:
        InputError: there is no run.
        MissingExtraError: plotly or jinja2 is not installed.
    """
    if not runs:
        raise InputError("there is nothing to draw: no run was given")
    plotly, plotly_hash = plotly_script()
    drawn = [*runs, *([reference] if reference else [])]
    names = _distinct([run.name for run in drawn])
    script = script_of(SCRIPTS)
    data = {
        "runs": [{"name": name, "reference": run is reference} for name, run in zip(names, drawn, strict=True)],
        "panels": [_panel(name, drawn) for name in _bases(drawn)],
        "maps": _maps(drawn),
        "scales": {"sequential": colours.SEQUENTIAL},
        "palette": [*colours.KINDS.values(), colours.OTHER_KIND],
    }
    return template("curves.html.j2").render(
        names=encodable(names),
        run=encodable(runs[0]),
        reference=names[-1] if reference else None,
        records=list(runs[0].records),
        alarms=_episodes(runs[0]),
        lost=_lost(runs[0]),
        notes=encodable([note for run in drawn for note in run.notes] + _others(names, drawn)),
        thinned=max(len(run.records) for run in drawn) > MOST_POINTS,
        style=asset("page.css"),
        script=script,
        plotly=plotly,
        script_sources=f"{plotly_hash} {hashed(script)}",
        data_json=script_json(data),
    )


def _distinct(names: Iterable[str]) -> list[str]:
    """Each name, with a number where it is taken already."""
    known: list[str] = []
    for name in names:
        shown, number = name, 1
        while shown in known:
            number += 1
            shown = f"{name} ({number})"
        known.append(shown)
    return known


def _others(names: Sequence[str], drawn: Sequence[TrainingRun]) -> list[str]:
    pairs = [(name, differing(run.settings, drawn[0].settings)) for name, run in zip(names[1:], drawn[1:], strict=True)]
    return [f"{name} cannot be compared with {names[0]}: it had {other}" for name, other in pairs if other]


# --- what there is ---------------------------------------------------------------------------------------------------


def _split(quantity: str) -> tuple[str, str]:
    """A quantity's own name, and which of its numbers over the heads it is."""
    base, _, part = quantity.rpartition("_")
    return (base, part) if part in PARTS and base else (quantity, "")


def _bases(drawn: Sequence[TrainingRun]) -> list[str]:
    """The quantities of the model as a whole, known ones first."""
    present = dict.fromkeys(
        _split(name)[0] for run in drawn for name in run.quantities() if "/" not in name and name not in _PLACES
    )
    return [*(name for name in TITLES if name in present), *(name for name in present if name not in TITLES)]


def _lost(run: TrainingRun) -> dict[str, Any] | None:
    """Where numbers that are none begin."""
    for step, record in run.records.items():
        if keys := [key for key, value in record.items() if not math.isfinite(value)]:
            shown = ", ".join(encodable(key) for key in keys[:4]) + (
                f" and {len(keys) - 4} more" if len(keys) > 4 else ""
            )
            return {"step": step, "keys": shown}
    return None


def _episodes(run: TrainingRun) -> list[dict[str, Any]]:
    """From which step to which step a key was in alarm without a pause."""
    steps = list(run.records)
    found: list[dict[str, Any]] = []
    open_now: dict[str, dict[str, Any]] = {}
    for step in steps:
        ringing = run.alarms.get(step, [])
        open_now = {key: episode for key, episode in open_now.items() if key in ringing}
        for key in ringing:
            if key not in open_now:
                open_now[key] = {"key": encodable(key), "first": step, "count": 0}
                found.append(open_now[key])
            open_now[key] |= {
                "last": step,
                "count": open_now[key]["count"] + 1,
                "value": _written(run.records[step].get(key)),
            }
    return found


# --- curves ----------------------------------------------------------------------------------------------------------


def _panel(base: str, drawn: Sequence[TrainingRun]) -> dict[str, Any]:
    title = TITLES.get(base, _Title(base.replace("_", " ")))
    curves = {
        (place, part): curve
        for place, run in enumerate(drawn)
        for part in ("", *PARTS)
        if (curve := run.curve(f"{base}_{part}" if part else base))
    }
    known = [value for curve in curves.values() for value in curve.values() if math.isfinite(value)]
    lines = []
    for (place, part), curve in curves.items():
        steps = _extremes(curve)
        line = {"run": place, "part": part, "steps": steps, "values": [_short(curve[step]) for step in steps]}
        if base == "largest_logit" and part == "max":
            line["where"] = _where(drawn[place], steps)
        lines.append(line)
    return {
        "name": base,
        **title._asdict(),
        "first": base in FIRST,
        "logarithmic": _logarithmic(known),
        "lines": lines,
        "lost": [entry for (place, part), curve in curves.items() for entry in _lost_of(place, part, curve)],
        "alarms": _alarms(drawn[0], base),
    }


def _logarithmic(known: Sequence[float]) -> bool:
    return bool(known) and min(known) > 0 and max(known) > _LOGARITHMIC * min(known)


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _extremes(curve: Mapping[int, float]) -> list[int]:
    """The steps that are drawn: all, or of each interval those of its least and its largest number and one that is none."""
    steps = list(curve)
    if len(steps) <= MOST_POINTS:
        return steps
    chosen: set[int] = {steps[0], steps[-1]}
    for part in _intervals(steps, MOST_POINTS // 2):
        finite = [step for step in part if math.isfinite(curve[step])]
        chosen |= {min(finite, key=curve.__getitem__), max(finite, key=curve.__getitem__)} if finite else set()
        chosen |= set([step for step in part if not math.isfinite(curve[step])][:1])
    return sorted(chosen)


def _intervals(steps: Sequence[int], count: int) -> list[Sequence[int]]:
    ends = [round(place * len(steps) / count) for place in range(count + 1)]
    return [steps[begin:end] for begin, end in pairwise(ends) if end > begin]


def _where(run: TrainingRun, steps: Sequence[int]) -> list[str]:
    layers, heads = (run.curve(name) for name in _PLACES)
    known = (step in layers and step in heads and math.isfinite(layers[step] + heads[step]) for step in steps)
    pairs = zip(steps, known, strict=True)
    return [f"layer {layers[step]:g}, head {heads[step]:g}" if both else "" for step, both in pairs]


def _lost_of(place: int, part: str, curve: Mapping[int, float]) -> list[dict[str, Any]]:
    lost = [step for step, value in curve.items() if not math.isfinite(value)]
    if not lost:
        return []
    steps = [part[0] for part in _intervals(lost, min(len(lost), MOST_POINTS))]
    return [{"run": place, "part": part, "steps": steps, "values": [_what(curve[step]) for step in steps]}]


def _written(value: float | None) -> str:
    return number(value) if value is None or math.isfinite(value) else _what(value)


def _what(value: float) -> str:
    return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"


def _alarms(run: TrainingRun, base: str) -> list[dict[str, Any]]:
    found = []
    for part in ("", *PARTS):
        curve = run.curve(quantity := f"{base}_{part}" if part else base)
        # An alarm of a layer is drawn on the model's curve.
        ringing = {step for step, keys in run.alarms.items() for key in keys if f"/{key}".endswith(f"/{quantity}")}
        steps = [step for step in run.alarms if step in ringing and step in curve]
        if steps:
            steps = [each[0] for each in _intervals(steps, min(len(steps), MOST_POINTS))]
            found.append({"part": part, "steps": steps, "values": [_short(curve[step]) for step in steps]})
    return found


# --- maps ------------------------------------------------------------------------------------------------------------


def _maps(drawn: Sequence[TrainingRun]) -> list[dict[str, Any]]:
    """For each run and quantity of a layer (or of a head, where heads were recorded) its numbers by place and step."""
    rows: dict[tuple[int, str, bool], list[str]] = {}
    for place, run in enumerate(drawn):
        for name in run.quantities():
            row, slash, quantity = name.rpartition("/")
            if slash:
                rows.setdefault((place, quantity, bool(_HEAD.search(row))), []).append(row)
    columns = min(MOST_COLUMNS, max(_FEWEST_COLUMNS, MOST_CELLS // max(1, sum(map(len, rows.values())))))
    return [_map(place, drawn[place], name, heads, found, columns) for (place, name, heads), found in rows.items()]


def _map(place: int, run: TrainingRun, quantity: str, heads: bool, rows: list[str], columns: int) -> dict[str, Any]:
    curves = [run.curve(f"{row}/{quantity}") for row in rows]
    steps = sorted(set().union(*curves))
    parts = _intervals(steps, min(columns, len(steps)))
    pick = _picked(quantity)
    cells = [[pick([curve[step] for step in part if step in curve]) for part in parts] for curve in curves]
    base, part = _split(quantity)
    title = TITLES.get(base, _Title(base.replace("_", " ")))
    return {
        "run": place,
        "quantity": f"{quantity}{'/head' if heads else ''}",
        "title": f"{title.title}{f', {part} over heads' if part else ''}{' of each head' if heads else ''}",
        "unit": title.unit,
        "rows": rows,
        "steps": [part[0] for part in parts],
        "interval": len(parts) < len(steps),
        "logarithmic": _logarithmic(
            [value for row in cells for value in row if value is not None and math.isfinite(value)]
        ),
        "values": [[None if value is None else _short(value) for value in row] for row in cells],
        "lost": [
            [row, column, _what(value)]
            for row, line in enumerate(cells)
            for column, value in enumerate(line)
            if value is not None and not math.isfinite(value)
        ],
    }


def _picked(quantity: str) -> Callable[[Sequence[float]], float | None]:
    """One number for an interval: the mean of means, the least of least ones, else the largest; what is none if one is."""

    def pick(values: Sequence[float]) -> float | None:
        if lost := [value for value in values if not math.isfinite(value)]:
            return lost[0]
        if not values:
            return None
        part = _split(quantity)[1]
        return sum(values) / len(values) if part == "mean" else min(values) if part == "min" else max(values)

    return pick
