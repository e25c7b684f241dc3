"""Drawings in axes of matplotlib that a user has made."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from massieu.errors import require_extra
from massieu.foundation.numbers import whole
from massieu.report.colours import SEQUENTIAL
from massieu.report.plot_data import Depth, Distribution, HeadMap, tint_of

MARKERS = {"circle": "o", "square": "s", "diamond": "D", "cross": "P", "star": "*"}
"""matplotlib's name of each marker in `colours.KINDS`."""
_LABELS = 16
_CONTROL_COLOUR = "#777777"


def draw_map(ax: Any, heads: HeadMap) -> Any:
    """Layers from top to bottom, heads from left to right, with a bar of the colours.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    matplotlib_colours = require_extra("matplotlib.colors", "probe")
    shades = matplotlib_colours.LinearSegmentedColormap.from_list("heads", heads.shades)
    reach = heads.reach
    # What is not finite has no colour.
    values = np.ma.masked_invalid(heads.values)
    low = None if reach is None else -reach
    image = ax.imshow(values, cmap=shades, vmin=low, vmax=reach, aspect="auto", interpolation="nearest")
    places = range(0, len(heads.labels), -(-len(heads.labels) // _LABELS))
    whole_numbers = require_extra("matplotlib.ticker", "probe").MaxNLocator(integer=True)
    ax.xaxis.set_major_locator(whole_numbers)
    ax.set_yticks(list(places), [_written(heads.labels[place]) for place in places])
    ax.set(title=_written(heads.title), xlabel="head", ylabel="layer")
    ax.figure.colorbar(image, ax=ax, label=_written(heads.unit))
    return ax


def draw_distribution(ax: Any, distribution: Distribution, title: str) -> Any:
    """A histogram over tokens."""
    ax.bar(
        distribution.middles, distribution.percent, width=np.multiply(0.92, distribution.widths), color=SEQUENTIAL[3]
    )
    tokens = f"{title}, {whole(distribution.total)} tokens"
    ax.set(title=tokens, ylabel="% of tokens")
    unit = f" ({distribution.unit})" if distribution.unit else ""
    ax.set_xlabel(_written(distribution.title + unit))
    return ax


def draw_depth(panels: Sequence[Any], depth: Depth) -> None:
    """The level in the first axes; in the second, if there are any, the change with its control as grey crosses."""
    for kind, places in depth.places().items():
        tint = tint_of(kind)
        style = {"color": tint["light"], "marker": MARKERS[tint["symbol"]], "linestyle": "none", "markersize": 5}
        horizontal, vertical = depth.segments(places)
        # A norm beside the residual stream is a side branch.
        panels[0].plot(
            horizontal, vertical, color=tint["light"], linewidth=1.2, linestyle=":" if kind == "norm" else "-"
        )
        level = depth.after
        panels[0].errorbar(
            np.add(places, 0.5), level.value[places], level.error[places], label=kind.replace("_", " "), **style
        )
        if len(panels) == 2:
            panels[1].errorbar(places, depth.change.value[places], depth.change.error[places], **style)
    panels[0].set_ylabel(depth.title)
    panels[0].legend()
    if len(panels) == 2:
        control = depth.control
        places = np.arange(len(depth.names)) + 0.25
        panels[1].errorbar(
            places, control.value, control.error, color=_CONTROL_COLOUR, marker="x", linestyle="none",
            label="re-initialised model",
        )  # fmt: skip
        panels[1].set_ylabel(_written(depth.change_title))
        panels[1].legend()
    ticks = depth.ticks()
    for ax in panels:
        ax.set_xticks(list(ticks), list(ticks.values()))
    panels[-1].set_xlabel("layer")


def _written(label: str) -> str:
    """A text as matplotlib shows it: a dollar sign would begin a formula."""
    return label.replace("$", r"\$")
