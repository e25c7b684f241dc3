"""The page of a training run: curves of a monitor's records, and maps of its layers. It needs nothing but a browser."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
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
"""Steps of a drawn curve; of a longer one the smallest and the largest number of each interval are drawn."""
MOST_COLUMNS = 400
"""Columns of a map."""
MOST_CELLS = 400_000
"""Cells of all maps together."""
_FEWEST_COLUMNS = 20
_LOGARITHMIC = 100.0
"""Positive numbers that span more than this are drawn on a logarithmic axis."""
PARTS = ("mean", "max", "min")
"""How a quantity's numbers of all heads are pooled: the ending of its name."""
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
    "sink_weight": _Title("Weight on the learned sink"),
    "effective_rank": _Title("Effective rank of the hidden states"),
    "spread": _Title("Spread of the hidden states"),
    "extreme_activations": _Title("Share of tokens with an extreme activation"),
}
"""Quantities in the order in which they are drawn; others follow, titled by their names."""
FIRST = ("loss", "gradient_norm")
"""Quantities at the top, over the page's whole width."""


def render(runs: Sequence[TrainingRun], reference: TrainingRun | None = None) -> str:
    """Draw runs as one HTML page: the first with its alarms, the others and the reference for comparison.

    The page loads nothing from outside, and every string in it is escaped. For long runs it draws the extremes of intervals,
    so that its size is bounded.

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
        lost=_first_nonfinite(runs[0]),
        notes=encodable([note for run in drawn for note in run.notes] + _incomparable(names, drawn)),
        thinned=max(len(run.records) for run in drawn) > MOST_POINTS,
        style=asset("page.css"),
        script=script,
        plotly=plotly,
        script_sources=f"{plotly_hash} {hashed(script)}",
        data_json=script_json(data),
    )


def _distinct(names: Iterable[str]) -> list[str]:
    """The names, with a number appended to those that are taken already."""
    taken: list[str] = []
    for name in names:
        unique_name = name
        number = 1
        while unique_name in taken:
            number += 1
            unique_name = f"{name} ({number})"
        taken.append(unique_name)
    return taken


def _incomparable(names: Sequence[str], drawn: Sequence[TrainingRun]) -> list[str]:
    """A sentence for each run whose settings differ from those of the first."""
    sentences = []
    for name, run in zip(names[1:], drawn[1:], strict=True):
        differences = differing(run.settings, drawn[0].settings)
        if differences:
            sentences.append(f"{name} cannot be compared with {names[0]}: it had {differences}")
    return sentences


# --- quantities and alarms -------------------------------------------------------------------------------------------


def _split(quantity: str) -> tuple[str, str]:
    """A quantity's name without its pooling over heads, and that pooling, one of `PARTS` or ""."""
    base, _, part = quantity.rpartition("_")
    return (base, part) if part in PARTS and base else (quantity, "")


def _bases(drawn: Sequence[TrainingRun]) -> list[str]:
    """The quantities of the model as a whole, those with a title first."""
    present = dict.fromkeys(
        _split(name)[0] for run in drawn for name in run.quantities() if "/" not in name and name not in _PLACES
    )
    return [*(name for name in TITLES if name in present), *(name for name in present if name not in TITLES)]


def _first_nonfinite(run: TrainingRun) -> dict[str, Any] | None:
    """The first step with numbers that are not finite, and their keys; None if there is none."""
    for step, record in run.records.items():
        keys = [key for key, value in record.items() if not math.isfinite(value)]
        if keys:
            shown = ", ".join(encodable(key) for key in keys[:4])
            if len(keys) > 4:
                shown += f" and {len(keys) - 4} more"
            return {"step": step, "keys": shown}
    return None


def _episodes(run: TrainingRun) -> list[dict[str, Any]]:
    """The first and the last step of each uninterrupted alarm of a key."""
    episodes: list[dict[str, Any]] = []
    # The episodes that go on at the present step, by key.
    ongoing: dict[str, dict[str, Any]] = {}
    for step, record in run.records.items():
        ringing = run.alarms.get(step, [])
        ongoing = {key: episode for key, episode in ongoing.items() if key in ringing}
        for key in ringing:
            if key not in ongoing:
                ongoing[key] = {"key": encodable(key), "first": step, "count": 0}
                episodes.append(ongoing[key])
            ongoing[key] |= {
                "last": step,
                "count": ongoing[key]["count"] + 1,
                "value": _in_words(record.get(key)),
            }
    return episodes


# --- curves ----------------------------------------------------------------------------------------------------------


def _panel(base: str, drawn: Sequence[TrainingRun]) -> dict[str, Any]:
    title = TITLES.get(base, _Title(base.replace("_", " ")))
    curves = {
        (place, part): curve
        for place, run in enumerate(drawn)
        for part in ("", *PARTS)
        if (curve := run.curve(f"{base}_{part}" if part else base))
    }
    finite_values = [value for curve in curves.values() for value in curve.values() if math.isfinite(value)]
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
        "logarithmic": _is_logarithmic(finite_values),
        "lines": lines,
        "lost": [entry for (place, part), curve in curves.items() for entry in _nonfinite_marks(place, part, curve)],
        "alarms": _alarms(drawn[0], base),
    }


def _is_logarithmic(values: Sequence[float]) -> bool:
    """Whether finite values are drawn on a logarithmic axis."""
    return bool(values) and min(values) > 0 and max(values) > _LOGARITHMIC * min(values)


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _extremes(curve: Mapping[int, float]) -> list[int]:
    """The steps that are drawn: all, or for each interval those of its smallest, its largest and a non-finite number."""
    steps = list(curve)
    if len(steps) <= MOST_POINTS:
        return steps
    chosen: set[int] = {steps[0], steps[-1]}
    for part in _intervals(steps, MOST_POINTS // 2):
        finite = [step for step in part if math.isfinite(curve[step])]
        nonfinite = [step for step in part if not math.isfinite(curve[step])]
        if finite:
            chosen |= {min(finite, key=curve.__getitem__), max(finite, key=curve.__getitem__)}
        chosen |= set(nonfinite[:1])
    return sorted(chosen)


def _intervals(steps: Sequence[int], count: int) -> list[Sequence[int]]:
    """The steps in this many groups of neighbours, of sizes that differ by one at most."""
    ends = [round(place * len(steps) / count) for place in range(count + 1)]
    return [steps[begin:end] for begin, end in pairwise(ends) if end > begin]


def _where(run: TrainingRun, steps: Sequence[int]) -> list[str]:
    """The place of the largest logit at each step, in words; "" for a step that does not name one."""
    layers, heads = (run.curve(name) for name in _PLACES)
    places = []
    for step in steps:
        is_named = step in layers and step in heads and math.isfinite(layers[step] + heads[step])
        places.append(f"layer {layers[step]:g}, head {heads[step]:g}" if is_named else "")
    return places


def _nonfinite_marks(place: int, part: str, curve: Mapping[int, float]) -> list[dict[str, Any]]:
    """The steps of a curve whose numbers are not finite, and what these are: one entry, or none."""
    nonfinite = [step for step, value in curve.items() if not math.isfinite(value)]
    if not nonfinite:
        return []
    steps = [interval[0] for interval in _intervals(nonfinite, min(len(nonfinite), MOST_POINTS))]
    return [{"run": place, "part": part, "steps": steps, "values": [_nonfinite_name(curve[step]) for step in steps]}]


def _in_words(value: float | None) -> str:
    return number(value) if value is None or math.isfinite(value) else _nonfinite_name(value)


def _nonfinite_name(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "∞" if value > 0 else "−∞"


def _alarms(run: TrainingRun, base: str) -> list[dict[str, Any]]:
    """The marks of alarms on each curve of a quantity."""
    marks = []
    for part in ("", *PARTS):
        quantity = f"{base}_{part}" if part else base
        curve = run.curve(quantity)
        # An alarm of a layer is drawn on the model's curve.
        ringing = {step for step, keys in run.alarms.items() for key in keys if f"/{key}".endswith(f"/{quantity}")}
        steps = [step for step in run.alarms if step in ringing and step in curve]
        if steps:
            steps = [interval[0] for interval in _intervals(steps, min(len(steps), MOST_POINTS))]
            marks.append({"part": part, "steps": steps, "values": [_short(curve[step]) for step in steps]})
    return marks


# --- maps ------------------------------------------------------------------------------------------------------------


def _maps(drawn: Sequence[TrainingRun]) -> list[dict[str, Any]]:
    """A map for each run and quantity of layers, and for each of heads: its numbers by place and step."""
    rows_of_map: dict[tuple[int, str, bool], list[str]] = {}
    for place, run in enumerate(drawn):
        for name in run.quantities():
            row, slash, quantity = name.rpartition("/")
            if slash:
                rows_of_map.setdefault((place, quantity, bool(_HEAD.search(row))), []).append(row)
    num_rows = sum(map(len, rows_of_map.values()))
    columns = min(MOST_COLUMNS, max(_FEWEST_COLUMNS, MOST_CELLS // max(1, num_rows)))
    return [
        _map(place, drawn[place], quantity, of_heads, rows, columns)
        for (place, quantity, of_heads), rows in rows_of_map.items()
    ]


def _map(place: int, run: TrainingRun, quantity: str, of_heads: bool, rows: list[str], columns: int) -> dict[str, Any]:
    curves = [run.curve(f"{row}/{quantity}") for row in rows]
    steps = sorted(set().union(*curves))
    intervals = _intervals(steps, min(columns, len(steps)))
    base, part = _split(quantity)
    cells = [
        [_pooled([curve[step] for step in interval if step in curve], part) for interval in intervals]
        for curve in curves
    ]
    title = TITLES.get(base, _Title(base.replace("_", " ")))
    finite_values = [value for row in cells for value in row if value is not None and math.isfinite(value)]
    return {
        "run": place,
        "quantity": f"{quantity}{'/head' if of_heads else ''}",
        "title": f"{title.title}{f', {part} over heads' if part else ''}{' of each head' if of_heads else ''}",
        "unit": title.unit,
        "rows": rows,
        "steps": [interval[0] for interval in intervals],
        "interval": len(intervals) < len(steps),
        "logarithmic": _is_logarithmic(finite_values),
        "values": [[None if value is None else _short(value) for value in row] for row in cells],
        "lost": [
            [row, column, _nonfinite_name(value)]
            for row, line in enumerate(cells)
            for column, value in enumerate(line)
            if value is not None and not math.isfinite(value)
        ],
    }


def _pooled(values: Sequence[float], part: str) -> float | None:
    """One number for an interval of steps: the mean of means, the smallest of minima, else the largest.

    A number that is not finite wins, so that it shows; without a number the result is None.
    """
    nonfinite = [value for value in values if not math.isfinite(value)]
    if nonfinite:
        return nonfinite[0]
    if not values:
        return None
    if part == "mean":
        return sum(values) / len(values)
    if part == "min":
        return min(values)
    return max(values)
