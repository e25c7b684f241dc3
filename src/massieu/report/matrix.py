"""One statistic of all heads as an array, layers by heads."""

import difflib
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float64

from massieu.errors import InputError, require_extra
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
