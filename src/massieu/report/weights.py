"""The weights of one head as a picture of matplotlib: queries from top to bottom, keys from left to right."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from massieu.errors import require_extra
from massieu.report import colours
from massieu.report.tokens import readable

LABELS = 60
"""Tokens of a side that are written out; of more, every so many is."""


def draw_weights(
    weights: Float[np.ndarray, "L N"],
    query_tokens: Sequence[str] | None,
    key_tokens: Sequence[str] | None,
    title: str,
    ax: Any = None,
) -> Any:
    """Draw weights in axes of matplotlib, or in those of a new figure, and return the axes.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    matplotlib_colours = require_extra("matplotlib.colors", "probe")
    if ax is None:
        # A figure of its own, which no window or global list of figures holds.
        figure = require_extra("matplotlib.figure", "probe").Figure(figsize=_size(weights.shape), layout="constrained")
        require_extra("matplotlib.backends.backend_agg", "probe").FigureCanvasAgg(figure)
        ax = figure.subplots()
    shades = matplotlib_colours.LinearSegmentedColormap.from_list("weights", colours.SEQUENTIAL)
    signed = bool((weights < 0).any())
    if signed:
        shades = matplotlib_colours.LinearSegmentedColormap.from_list("weights", colours.DIVERGING["light"])
    largest = float(np.nanmax(np.abs(weights))) if np.isfinite(weights).any() else 1.0
    image = ax.imshow(weights, cmap=shades, vmin=-largest if signed else 0.0, vmax=largest, interpolation="nearest")
    _label(ax.xaxis, key_tokens, weights.shape[1])
    _label(ax.yaxis, query_tokens, weights.shape[0])
    ax.tick_params(axis="x", labelrotation=90)
    ax.set(title=title, xlabel="key", ylabel="query")
    ax.figure.colorbar(image, ax=ax, label="weight")
    return ax


def _size(shape: tuple[int, ...]) -> tuple[float, float]:
    """Inches: a fifth for each token that is written out."""
    height, width = (3.0 + 0.2 * min(number, LABELS) for number in shape)
    return width + 0.8, height


def _label(axis: Any, tokens: Sequence[str] | None, number: int) -> None:
    step = -(-number // LABELS)
    places = list(range(0, number, step))
    shown = list(map(str, range(number))) if tokens is None else [each["text"] for each in readable(list(tokens))]
    # A dollar sign would begin a formula.
    axis.set_ticks(places, [shown[place].replace("$", r"\$") for place in places])
