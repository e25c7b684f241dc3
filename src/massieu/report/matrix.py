"""One statistic of all heads as an array, layers by heads, and as a drawing."""

import difflib
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64

from massieu.errors import InputError, require_extra
from massieu.report import colours
from massieu.report.tables import MapRow, sites_of

if TYPE_CHECKING:
    import polars

    from massieu.storage.record import RunRecord


def rows_of(run: "RunRecord", heads: "polars.DataFrame", attention: str | None) -> list[MapRow]:
    """The sites of one kind of attention in one stack, layer by layer.

    Raises:
        InputError: there are several kinds and `attention` is None, or there is none of that name.
    """
    sites = sites_of(run, heads)
    groups = list(dict.fromkeys(site.group for site in sites))
    if attention is None and len(groups) == 1:
        return sites
    chosen = [site for site in sites if site.group == attention]
    if not chosen:
        problem = "none was named" if attention is None else f"got {attention!r}"
        raise InputError(f"attention must be one of {', '.join(map(repr, groups))}; {problem}")
    return chosen


def sites_with(run: "RunRecord", heads: "polars.DataFrame", layer: int, head: int, attention: str | None) -> list[int]:
    """The indices of the sites of one kind in a layer that have a head of this number.

    Raises:
        InputError: there is none, and the message names those that there are; also raised as by `rows_of`.
    """
    rows = rows_of(run, heads, attention)
    for name, number in (("layer", layer), ("head", head)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise InputError(f"{name} must be a whole number, got {number!r}")
    of_layer = [row for row in rows if row.layer == layer]
    if not of_layer:
        layers = sorted({row.layer for row in rows})
        raise InputError(f"the result has no attention in layer {layer}; its layers are {layers[0]} to {layers[-1]}")
    chosen = [row.index for row in of_layer if 0 <= head < row.heads]
    if not chosen:
        most = max(row.heads for row in of_layer)
        raise InputError(f"layer {layer} has no head {head}; its heads are 0 to {most - 1}")
    return chosen


def matrix_of(
    run: "RunRecord", heads: "polars.DataFrame", statistic: str, *, error: bool = False, attention: str | None = None
) -> Float64[np.ndarray, "layers heads"]:
    """A statistic, or its standard error, of every head; NaN if there is no head or no number.

    Raises:
        InputError: the result has no such statistic, and the message names similar ones; also raised as by `rows_of`.
    """
    rows = rows_of(run, heads, attention)
    polars = require_extra("polars", "probe")
    names = heads["statistic"].unique(maintain_order=True).to_list()
    if statistic not in names:
        suggestions = difflib.get_close_matches(statistic, names, n=3) or [name for name in names if "/" not in name]
        raise InputError(f"the result has no statistic {statistic!r}; it has {', '.join(suggestions)}")
    row_of_site = {row.name: place for place, row in enumerate(rows)}
    values = np.full((len(rows), max(row.heads for row in rows)), np.nan)
    of_statistic = heads.filter(polars.col("statistic") == statistic)
    column = "standard_error" if error else "value"
    for site, head, value in of_statistic.select("site", "head", column).iter_rows():
        if site in row_of_site and value is not None:
            values[row_of_site[site], head] = value
    return values


def figure_of(run: "RunRecord", heads: "polars.DataFrame", statistic: str, attention: str | None) -> Any:
    """The array as a plotly figure, which shows the standard error of the head under the pointer.

    Raises:
        InputError: as `matrix_of`.
        MissingExtraError: plotly is not installed.
    """
    plotly = require_extra("plotly.graph_objects", "probe")
    values = matrix_of(run, heads, statistic, attention=attention)
    errors = matrix_of(run, heads, statistic, error=True, attention=attention)
    name, _, qualifier = statistic.partition("/")
    record = {entry.name: entry for entry in run.statistics}.get(name)
    signed = record is not None and record.signed
    reach = float(np.nanmax(np.abs(values))) if signed and np.isfinite(values).any() else None
    shades = colours.DIVERGING["light"] if signed else colours.SEQUENTIAL
    text = "layer %{y}, head %{x}: %{z:.4g} ± %{customdata:.2g}<extra></extra>"
    heatmap = plotly.Heatmap(
        z=values,
        customdata=errors,
        x=list(range(values.shape[1])),
        y=[row.label for row in rows_of(run, heads, attention)],
        colorscale=[[i / (len(shades) - 1), shade] for i, shade in enumerate(shades)],
        zmin=None if reach is None else -reach,
        zmax=reach,
        hovertemplate=text,
        colorbar={"title": record.unit if record is not None else ""},
    )
    title = statistic
    if record is not None:
        title = f"{record.title} ({qualifier})" if "/" in statistic else record.title
    axes: dict[str, Any] = {"xaxis": {"title": "head", "dtick": 1}, "yaxis": {"title": "layer", "type": "category"}}
    return plotly.Figure(heatmap, layout={"title": title, **axes, "yaxis_autorange": "reversed"})
