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
        InputError: there are several kinds and none was named, or there is none of that name.
    """
    sites = sites_of(run, heads)
    groups = list(dict.fromkeys(site.group for site in sites))
    if attention is None and len(groups) == 1:
        return sites
    chosen = [site for site in sites if site.group == attention]
    if not chosen:
        given = "none was named" if attention is None else f"got {attention!r}"
        raise InputError(f"attention must be one of {', '.join(map(repr, groups))}; {given}")
    return chosen


def sites_with(run: "RunRecord", heads: "polars.DataFrame", layer: int, head: int, attention: str | None) -> list[int]:
    """The indices of the sites of one kind in a layer that have a head of this number.

    Raises:
        InputError: there is none; the message says what there is. As `rows_of`.
    """
    rows = rows_of(run, heads, attention)
    for name, number in (("layer", layer), ("head", head)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise InputError(f"{name} must be a whole number, got {number!r}")
    here = [row for row in rows if row.layer == layer]
    if not here:
        layers = sorted({row.layer for row in rows})
        raise InputError(f"the result has no attention in layer {layer}; its layers are {layers[0]} to {layers[-1]}")
    chosen = [row.index for row in here if 0 <= head < row.heads]
    if not chosen:
        most = max(row.heads for row in here)
        raise InputError(f"layer {layer} has no head {head}; its heads are 0 to {most - 1}")
    return chosen


def matrix_of(
    run: "RunRecord", heads: "polars.DataFrame", statistic: str, *, error: bool = False, attention: str | None = None
) -> Float64[np.ndarray, "layers heads"]:
    """A statistic, or its standard error, of every head; NaN where there is no head or no number.

    Raises:
        InputError: the result has no such statistic; the message names those of nearly that name. As `rows_of`.
    """
    rows = rows_of(run, heads, attention)
    polars = require_extra("polars", "probe")
    known = heads["statistic"].unique(maintain_order=True).to_list()
    if statistic not in known:
        near = difflib.get_close_matches(statistic, known, n=3) or [name for name in known if "/" not in name]
        raise InputError(f"the result has no statistic {statistic!r}; it has {', '.join(near)}")
    place = {row.name: i for i, row in enumerate(rows)}
    found = np.full((len(rows), max(row.heads for row in rows)), np.nan)
    chosen = heads.filter(polars.col("statistic") == statistic)
    column = "standard_error" if error else "value"
    for site, head, value in chosen.select("site", "head", column).iter_rows():
        if site in place and value is not None:
            found[place[site], head] = value
    return found


def figure_of(run: "RunRecord", heads: "polars.DataFrame", statistic: str, attention: str | None) -> Any:
    """The array as a plotly figure, with errors where the pointer is.

    Raises:
        InputError: as `matrix_of`.
        MissingExtraError: plotly is not installed.
    """
    plotly = require_extra("plotly.graph_objects", "probe")
    values = matrix_of(run, heads, statistic, attention=attention)
    errors = matrix_of(run, heads, statistic, error=True, attention=attention)
    said = {entry.name: entry for entry in run.statistics}.get(statistic.partition("/")[0])
    signed = said is not None and said.signed
    reach = float(np.nanmax(np.abs(values))) if signed and np.isfinite(values).any() else None
    shades = colours.DIVERGING["light"] if signed else colours.SEQUENTIAL
    text = "layer %{y}, head %{x}: %{z:.4g} ± %{customdata:.2g}<extra></extra>"
    drawn = plotly.Heatmap(
        z=values,
        customdata=errors,
        x=list(range(values.shape[1])),
        y=[row.label for row in rows_of(run, heads, attention)],
        colorscale=[[i / (len(shades) - 1), shade] for i, shade in enumerate(shades)],
        zmin=None if reach is None else -reach,
        zmax=reach,
        hovertemplate=text,
        colorbar={"title": said.unit if said is not None else ""},
    )
    title = (
        statistic if said is None else said.title + (f" ({statistic.partition('/')[2]})" if "/" in statistic else "")
    )
    axes: dict[str, Any] = {"xaxis": {"title": "head", "dtick": 1}, "yaxis": {"title": "layer", "type": "category"}}
    return plotly.Figure(drawn, layout={"title": title, **axes, "yaxis_autorange": "reversed"})
