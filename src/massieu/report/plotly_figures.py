"""Figures of plotly, for a notebook or a file of HTML."""

from collections.abc import Sequence
from html import escape
from typing import Any

from massieu.errors import require_extra
from massieu.foundation.numbers import whole
from massieu.report.colours import SEQUENTIAL
from massieu.report.plot_data import Depth, Distribution, HeadMap, tint_of

_BAR_COLOUR = SEQUENTIAL[3]
_CONTROL_COLOUR = "#777777"


def map_figure(heads: HeadMap) -> Any:
    """Layers from top to bottom, heads from left to right.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    plotly = require_extra("plotly.graph_objects", "probe")
    reach = heads.reach
    heatmap = plotly.Heatmap(
        z=heads.values,
        customdata=heads.errors,
        x=list(range(heads.values.shape[1])),
        y=_written(heads.labels),
        colorscale=[[place / (len(heads.shades) - 1), shade] for place, shade in enumerate(heads.shades)],
        zmin=None if reach is None else -reach,
        zmax=reach,
        hovertemplate="layer %{y}, head %{x}: %{z:.4g} ± %{customdata:.2g}<extra></extra>",
        colorbar={"title": heads.unit},
    )
    axes: dict[str, Any] = {"xaxis": {"title": "head", "dtick": 1}, "yaxis": {"title": "layer", "type": "category"}}
    return plotly.Figure(heatmap, layout={"title": escape(heads.title), **axes, "yaxis_autorange": "reversed"})


def distribution_figure(distributions: Sequence[Distribution], title: str) -> Any:
    """Histograms, one below the other.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    plotly = require_extra("plotly.graph_objects", "probe")
    subplots = require_extra("plotly.subplots", "probe")
    titles = [f"{escape(each.title)}, {whole(each.total)} tokens" for each in distributions]
    figure = subplots.make_subplots(rows=len(distributions), cols=1, subplot_titles=titles)
    for row, each in enumerate(distributions, start=1):
        bars = plotly.Bar(
            x=each.middles, y=each.percent, width=each.widths, hovertext=each.hints, hoverinfo="text",
            marker={"color": _BAR_COLOUR},
        )  # fmt: skip
        figure.add_trace(bars, row=row, col=1)
        figure.update_xaxes(title=escape(each.unit), row=row, col=1)
        figure.update_yaxes(title="% of tokens", rangemode="tozero", row=row, col=1)
    return figure.update_layout(title=title, showlegend=False, height=120 + 240 * len(distributions), bargap=0.08)


def depth_figure(depth: Depth) -> Any:
    """The level above, from before to after each sublayer; the change below, with its control as grey crosses.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    plotly = require_extra("plotly.graph_objects", "probe")
    subplots = require_extra("plotly.subplots", "probe")
    figure = subplots.make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06)
    hints = ["<br>".join(_written(depth.hint(place))) for place in range(len(depth.names))]

    def points(column: Any, places: Sequence[int], shift: float, **style: Any) -> Any:
        """Markers with error bars, moved to the right by `shift` sublayers."""
        error_bars = {"type": "data", "array": [column.error[place] for place in places], "thickness": 1, "width": 2}
        return plotly.Scatter(
            x=[place + shift for place in places], y=[column.value[place] for place in places], mode="markers",
            error_y=error_bars, hovertext=[hints[place] for place in places], hoverinfo="text", **style,
        )  # fmt: skip

    for kind, places in depth.places().items():
        tint = tint_of(kind)
        horizontal, vertical = depth.segments(places)
        # A norm beside the residual stream is a side branch.
        line = {"color": tint["light"], "width": 1.5, "dash": "dot" if kind == "norm" else "solid"}
        figure.add_trace(
            plotly.Scatter(
                x=horizontal, y=vertical, mode="lines", line=line, legendgroup=kind, showlegend=False, hoverinfo="skip"
            ),
            row=1, col=1,
        )  # fmt: skip
        marker = {"symbol": tint["symbol"], "size": 8, "color": tint["light"]}
        name = kind.replace("_", " ")
        level = points(depth.after, places, 0.5, marker=marker, name=name, legendgroup=kind)
        figure.add_trace(level, row=1, col=1)
        change = points(depth.change, places, 0.0, marker=marker, name=name, legendgroup=kind, showlegend=False)
        figure.add_trace(change, row=2, col=1)
    cross = {"symbol": "x-thin", "size": 8, "line": {"width": 1.6, "color": _CONTROL_COLOUR}}
    control = points(depth.control, range(len(depth.names)), 0.25, marker=cross, name="re-initialised model")
    figure.add_trace(control, row=2, col=1)
    ticks = depth.ticks()
    figure.update_xaxes(tickvals=list(ticks), ticktext=list(ticks.values()), showgrid=False)
    figure.update_xaxes(title="layer", row=2, col=1)
    figure.update_yaxes(title=depth.title, row=1, col=1)
    figure.update_yaxes(title=escape(depth.change_title), row=2, col=1)
    return figure.update_layout(height=520)


def _written(texts: Sequence[str]) -> list[str]:
    """Texts as plotly shows them: it reads tags."""
    return [escape(each) for each in texts]
