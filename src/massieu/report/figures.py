"""Small drawings for a notebook: HTML and SVG without a script, readable on light and dark backgrounds.

Their input is that of a page (`massieu.report.page.render`), of which every string is escaped.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from massieu.errors import InputError
from massieu.foundation.numbers import number, whole
from massieu.report import colours
from massieu.report.encode import EXAMPLE_SHADES, encodable
from massieu.report.page import template
from massieu.report.tables import CONTROLS, Column, MapRow, catalogue_of, head_columns, sites_of
from massieu.report.tokens import readable

if TYPE_CHECKING:
    import polars

    from massieu.storage.record import RunRecord

INSIDE_NULL = 0.05
"""A head does not differ from its control if its q-value is at least this."""
_ALIKE = "does not differ"
CELL = 26
"""Pixels of a cell of the map."""
BAR_HEIGHT = 60
"""Pixels of the highest bar of a histogram."""


def _control(columns: dict[str, Column], entry: dict[str, Any]) -> str | None:
    control = entry["control"]
    return control if control and f"{entry['name']}/{control}" in columns else None


def _verdict(columns: dict[str, Column], name: str, cell: int) -> str:
    q_values = columns.get(f"{name}/q_value")
    q_value = math.nan if q_values is None else float(q_values.value[cell])
    if math.isnan(q_value):
        return "not tested"
    relation = _ALIKE if q_value >= INSIDE_NULL else "differs"
    return f"{relation} from its control (q = {number(q_value)})"


def _cells(sites: list[MapRow], columns: dict[str, Column], entry: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """One rectangle per head (place, colour, hatching, the text that a pointer shows), and the meaning of the colours."""
    name = entry["name"]
    column = columns[name]
    control = _control(columns, entry)
    null = columns[f"{name}/{control}"] if control else None
    centre = 0.0
    if null is not None and np.isfinite(null.value).any():
        centre = float(np.nanmedian(null.value))
    scale, low, high = colours.scale_of(column.value, entry["signed"], centre)
    cells = []
    for row, site in enumerate(sites):
        for head in range(site.heads):
            cell = site.first + head
            value = float(column.value[cell])
            verdict = _verdict(columns, name, cell) if control else "no control"
            lines = [f"layer {site.label}, head {head}", f"{column.text(cell)} {entry['unit'] or ''}"]
            if null is not None:
                lines.append(f"control ({control}): {null.text(cell)}")
            lines += [f"n = {whole(int(column.count[cell]))}", verdict]
            fill = colours.mix(scale, (value - low) / (high - low)) if math.isfinite(value) else None
            hatched = verdict.startswith(_ALIKE) and fill is not None
            place = {"x": head * CELL, "y": row * CELL}
            cells.append({**place, "fill": fill, "hatched": hatched, "title": "\n".join(lines)})
    return cells, colours.meaning(entry["signed"], centre)


def head_map_html(run: "RunRecord", heads: "polars.DataFrame", statistic: str) -> str:
    """The findings as sentences, and one layer × head map of a statistic such as ``"selective_log_partition"``.

    Raises:
        InputError: The table does not hold this statistic.
        MissingExtraError: jinja2 or polars is not installed.
    """
    run = encodable(run)
    sites = sites_of(run, heads)
    columns = head_columns(sites, heads)
    catalogue = {entry["name"]: entry for entry in catalogue_of(run, columns, "head")}
    if statistic not in columns or statistic not in catalogue:
        names = ", ".join(catalogue) or "none"
        raise InputError(f"no statistic named {statistic!r} in this result; it has: {names}")
    entry = catalogue[statistic]
    cells, meaning = _cells(sites, columns, entry)
    values = columns[statistic].value
    finite = values[np.isfinite(values)]
    return template("map.html.j2").render(
        run=run,
        model=run.model,
        text=run.text,
        findings=run.findings,
        entry=entry,
        cells=cells,
        meaning=meaning,
        rows=[(site.label, row) for row, site in enumerate(sites)],
        heads=range(max((site.heads for site in sites), default=0)),
        size=CELL,
        margin=14 + 7 * max((len(site.label) for site in sites), default=1),
        step=max(1, math.ceil(len(sites) / 34)),
        low=float(finite.min()) if finite.size else None,
        high=float(finite.max()) if finite.size else None,
        control=_control(columns, entry),
    )


def _statistic_rows(columns: dict[str, Column], catalogue: list[dict[str, Any]], cell: int) -> list[dict[str, Any]]:
    rows = []
    for entry in catalogue:
        name = entry["name"]
        if name not in columns:
            continue
        column = columns[name]
        nulls = {control: columns.get(f"{name}/{control}") for control in CONTROLS}
        controls = [f"{null.text(cell)} {control}" for control, null in nulls.items() if null is not None]
        rows.append(
            {
                "entry": entry,
                "value": column.text(cell),
                "controls": "; ".join(controls) or "none",
                "verdict": _verdict(columns, name, cell) if _control(columns, entry) else "no control",
                "count": int(column.count[cell]),
            }
        )
    return rows


def _histograms(details: dict[str, Any], site: MapRow, head: int, titles: dict[str, str]) -> list[dict[str, Any]]:
    drawn = []
    for name, histogram in (details.get("histograms") or {}).items():
        counts = histogram["counts"].get(str(site.index))
        if not counts or not sum(counts[head]):
            continue
        top = max(counts[head])
        edges = histogram["edges"]
        bars = [
            {
                "height": round(BAR_HEIGHT * count / top, 1),
                "title": f"{bin_in_words(edges, place)}: {whole(count)} tokens",
            }
            for place, count in enumerate(counts[head])
        ]
        drawn.append(
            {"title": titles.get(name, name.replace("_", " ")), "bars": bars, "low": edges[0], "high": edges[-1]}
        )
    return drawn


def bin_in_words(edges: list[float], place: int) -> str:
    """A bin in words; those at both ends hold all that lies beyond them too."""
    if place == len(edges) - 2:
        return f"{number(edges[place])} or more"
    if place == 0:
        return f"{number(edges[1])} or less"
    return f"{number(edges[place])} to {number(edges[place + 1])}"


def _strongest(entry: dict[str, Any], head: int, place: int, keys: list[str]) -> str:
    if not entry.get("top_keys"):
        return ""
    pairs = zip(entry["top_keys"][head][place], entry["top_weights"][head][place], strict=True)
    parts = [
        f"{keys[key]} at {key}: {100 * weight:.1f} %"
        for key, weight in pairs
        if key is not None and 0 <= key < len(keys) and weight
    ]
    return "\nstrongest keys: " + "; ".join(parts) if parts else ""


def _example(details: dict[str, Any], site: MapRow, head: int) -> dict[str, Any] | None:
    """The first example of this site: its tokens, each with a shade in [0, 1] and the text of its strongest keys."""
    for example in details.get("examples") or []:
        entry = example["sites"].get(str(site.index))
        shade = next((name for name in EXAMPLE_SHADES if entry and entry.get(name)), None)
        if not entry or shade is None:
            continue
        queries = readable([str(token) for token in example["tokens"].get(site.query_tokens, [])])
        attended = readable([str(token) for token in example["tokens"].get(site.key_tokens, [])])
        keys = [token["text"] for token in attended]
        values = np.array(entry[shade][head], dtype=float)
        low, high = (np.nanmin(values), np.nanmax(values)) if np.isfinite(values).any() else (0.0, 1.0)
        tokens = []
        for place, (token, value) in enumerate(zip(queries, values, strict=False)):
            position = (value - low) / (high - low) if high > low and math.isfinite(value) else 0.0
            title = f"position {place}: {number(value)} nats{_strongest(entry, head, place, keys)}"
            tokens.append({**token, "shade": round(float(position), 3), "title": title})
        return {
            "title": example.get("title"),
            "shade": shade.replace("_", " ").replace("log partition", "log Z"),
            "tokens": tokens,
            "low": low,
            "high": high,
        }
    return None


def head_html(run: "RunRecord", details: dict[str, Any], heads: "polars.DataFrame", layer: int, head: int) -> str:
    """One head of a layer: example text, distributions, every statistic.

    If a layer has several attention sites, each that has this head is shown.

    Raises:
        InputError: The result has no such layer, or the layer no such head.
        MissingExtraError: jinja2 or polars is not installed.
    """
    run = encodable(run)
    sites = sites_of(run, heads)
    at_layer = [site for site in sites if site.layer == layer]
    if not at_layer:
        layers = ", ".join(str(number) for number in sorted({site.layer for site in sites})) or "none"
        raise InputError(f"no layer {layer} in this result; its layers are: {layers}")
    chosen = [site for site in at_layer if 0 <= head < site.heads]
    if not chosen:
        raise InputError(f"layer {layer} has heads 0 to {max(site.heads for site in at_layer) - 1}, not {head}")
    columns = head_columns(sites, heads)
    catalogue = catalogue_of(run, columns, "head")
    titles = {entry["name"]: entry["title"] for entry in catalogue}
    panels = [
        {
            "site": site,
            "rows": _statistic_rows(columns, catalogue, site.first + head),
            "histograms": _histograms(details, site, head, titles),
            "example": _example(details, site, head),
        }
        for site in chosen
    ]
    return template("head.html.j2").render(layer=layer, head=head, panels=panels, bar_height=BAR_HEIGHT)
