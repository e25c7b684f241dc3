"""Small multiples of a flow: observables of a cloud of tokens, layer by layer. HTML and SVG without a script."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from massieu.errors import InputError
from massieu.foundation.arguments import of_class
from massieu.foundation.doors import input_door
from massieu.foundation.numbers import bound, number, with_error
from massieu.report.encode import encodable
from massieu.report.page import asset, template
from massieu.storage.writing import write_whole

if TYPE_CHECKING:
    from massieu.population.flow_result import FlowResult

WIDTH = 300
HEIGHT = 170
LEFT = 62
RIGHT = 12
TOP = 10
BOTTOM = 26
"""Size and margins of a panel, in pixels."""
_TICKS = 4
_QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
_LOGARITHMIC = 100.0
"""Vectors whose positive numbers span more than this are drawn on a logarithmic axis."""

Numbers = Sequence[float]


class Panel(NamedTuple):
    """One observable: a row of numbers for each layer, NaN for missing ones."""

    name: str
    value: Sequence[Numbers]
    standard_error: Sequence[Numbers]
    null: Sequence[Numbers]


@dataclass(frozen=True)
class Drawing:
    """A drawing that a notebook shows.

    Attributes:
        html: The fragment; it has no script and loads nothing from outside.
        title: Its title.
    """

    html: str
    title: str

    def _repr_html_(self) -> str:
        return self.html

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the drawing as one page that needs nothing but a browser; it replaces an earlier one in one step.

        Raises:
            InputError: the file cannot be written.
        """
        path = Path(path)
        page = template("flow_page.html.j2").render(title=self.title, style=asset("page.css"), drawing=self.html)
        write_whole(path, page, "the drawing")
        return path


@input_door(flow=partial(of_class, kind="FlowResult"))
def draw_flow(
    flow: "FlowResult", observables: Sequence[str] | None = None, *, title: str = "A flow of tokens"
) -> Drawing:
    """Small multiples of a flow: layers from left to right, a panel for each observable.

    A number is drawn as a line, with a band of two standard errors if it has them and a dashed line for its null. A vector is
    drawn as its median, with bands from quartile to quartile and from the smallest to the largest entry. In a notebook the
    drawing shows itself; its `save` writes a page that needs nothing but a browser.

    Args:
        flow: The result of a `massieu.population.Flow`.
        observables: Names of those to draw, in this order; None: all.
        title: The heading above the panels.

    Raises:
        InputError: `flow` is no result of a flow, it recorded no observable, or none of one of the names.
        MissingExtraError: jinja2 is not installed.

    Example:
        >>> import torch
        >>> from massieu import population, report
        >>> flow = population.Flow(torch.tanh, depth=3, observables=[population.CloudMoments()])
        >>> drawing = report.draw_flow(flow.run(torch.eye(4), progress=False), ["log_determinant"])
        >>> drawing.html.count("<svg")
        1
    """
    panels = []
    for name in flow.observables if observables is None else observables:
        columns = (flow.values(name), flow.standard_errors(name), flow.nulls(name))
        panels.append(Panel(name, *(column.reshape(len(column), -1).tolist() for column in columns)))
    return draw(panels, title)


def draw(panels: Sequence[Panel], title: str) -> Drawing:
    """Draw panels side by side; every string is escaped.

    Raises:
        InputError: there is no panel.
        MissingExtraError: jinja2 is not installed.
    """
    if not panels:
        raise InputError("there is nothing to draw: the flow recorded no observable")
    drawn = [_panel(panel) for panel in panels]
    size = {
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "bottom": HEIGHT - BOTTOM,
        "top": TOP,
    }
    html = template("flow.html.j2").render(panels=drawn, title=encodable(title), size=size)
    return Drawing(html, str(encodable(title)))


def _panel(panel: Panel) -> dict[str, Any]:
    is_vector = len(panel.value[0]) > 1 if panel.value else False
    bands, line, errors = _bands(panel) if is_vector else _number(panel)
    null = [] if is_vector else [row[0] for row in panel.null]
    finite = [value for numbers in (*bands, line, null) for value in numbers if math.isfinite(value)]
    logarithmic = is_vector and bool(finite) and min(finite) > 0 and max(finite) > _LOGARITHMIC * min(finite)
    ticks = _logarithmic_ticks(finite) if logarithmic else _ticks(finite)
    low = min([*finite, *ticks])
    high = max([*finite, *ticks])

    def down(value: float) -> float:
        """The vertical coordinate of a value."""
        bottom, top = (math.log(low), math.log(high)) if logarithmic else (low, high)
        place = ((math.log(value) if logarithmic else value) - bottom) / (top - bottom)
        return round(HEIGHT - BOTTOM - place * (HEIGHT - BOTTOM - TOP), 1)

    layers = len(panel.value) - 1

    def across(layer: int) -> float:
        """The horizontal coordinate of a layer."""
        return round(LEFT + (WIDTH - RIGHT - LEFT) * (layer / layers if layers else 0.5), 1)

    def path(values: Numbers) -> str:
        """A line through the finite values, interrupted at the others."""
        text = ""
        pen = "M"
        for layer, value in enumerate(values):
            if not math.isfinite(value):
                pen = "M"
                continue
            text += f"{pen}{across(layer)} {down(value)}"
            pen = "L"
        return text

    def area(lower: Numbers, upper: Numbers) -> str:
        """The area between two lines: there along the upper one, back along the lower one."""
        ends = enumerate(zip(lower, upper, strict=True))
        points = [(across(layer), down(a), down(b)) for layer, (a, b) in ends if math.isfinite(a + b)]
        there = "L".join(f"{x} {top}" for x, _, top in points)
        back = "L".join(f"{x} {bottom}" for x, bottom, _ in reversed(points))
        return f"M{there}L{back}Z" if len(points) > 1 else ""

    half = len(bands) // 2
    return {
        "name": str(encodable(panel.name)).replace("_", " "),
        "line": path(line),
        "null": path(null),
        "areas": [area(bands[place], bands[-1 - place]) for place in range(half)],
        "points": [
            {"x": across(layer), "y": down(value), "title": _hint(layer, value, errors, null)}
            for layer, value in enumerate(line)
            if math.isfinite(value)
        ],
        "ticks": [{"y": down(value), "text": bound(value)} for value in ticks],
        "layers": [{"x": across(layer), "text": str(layer)} for layer in _layer_ticks(layers)],
        "entries": len(panel.value[0]) if is_vector else 0,
        "logarithmic": logarithmic,
    }


def _hint(layer: int, value: float, errors: Numbers, null: Numbers) -> str:
    text = f"layer {layer}: {with_error(value, errors[layer]) if errors else number(value)}"
    if null and math.isfinite(null[layer]):
        text += f"; null: {number(null[layer])}"
    return text


def _number(panel: Panel) -> tuple[list[Numbers], Numbers, Numbers]:
    """Both ends of the band (none without errors), the line, and its standard errors."""
    line = [row[0] for row in panel.value]
    errors = [row[0] for row in panel.standard_error]
    if not any(map(math.isfinite, errors)):
        return [], line, []
    bands: list[Numbers] = [
        [value + side * error for value, error in zip(line, errors, strict=True)] for side in (-2, 2)
    ]
    return bands, line, errors


def _bands(panel: Panel) -> tuple[list[Numbers], Numbers, Numbers]:
    """Smallest entry, both quartiles and largest entry of a vector; its median; and no errors."""
    finite = [[value for value in row if math.isfinite(value)] or [math.nan] for row in panel.value]
    smallest, low, median, high, largest = np.array([np.quantile(row, _QUANTILES) for row in finite]).T.tolist()
    return [smallest, low, high, largest], median, []


def _ticks(values: Numbers) -> list[float]:
    """Round numbers in equal steps that enclose the values."""
    if not values:
        return [0.0, 1.0]
    low = min(values)
    high = max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        reach = max(abs(low), abs(high)) / 2 or 1.0
        low = low - reach
        high = high + reach
    least_step = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(least_step))
    step = next(power * unit for unit in (1, 2, 2.5, 5, 10) if power * unit >= least_step * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.10g}") for index in range(first, last + 1)]


def _logarithmic_ticks(values: Numbers) -> list[float]:
    """Powers of ten that enclose the values."""
    first = math.floor(math.log10(min(values)))
    last = math.ceil(math.log10(max(values)))
    spacing = max(1, math.ceil((last - first) / (_TICKS + 1)))
    return [10.0**power for power in range(first, last + spacing, spacing)]


def _layer_ticks(layers: int) -> range:
    spacing = max(1, math.ceil(layers / 8))
    return range(0, layers + 1, spacing)
