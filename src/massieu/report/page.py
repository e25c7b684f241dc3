"""The page of a result: one HTML file that needs nothing but a browser."""

import base64
import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from massieu.errors import require_extra
from massieu.foundation.numbers import bound, counted, number, whole, with_error
from massieu.report import colours
from massieu.report.encode import Payload, encodable, encode, gzipped, script_json
from massieu.report.overview import overview_of
from massieu.report.questions import questions
from massieu.report.replacements import replacement_table
from massieu.report.tables import (
    CONTROLS,
    Column,
    MapRow,
    catalogue_of,
    head_columns,
    layer_columns,
    sites_of,
    sublayers_of,
)
from massieu.report.terms import explained

if TYPE_CHECKING:
    import jinja2
    import polars

    from massieu.storage.record import RunRecord

PAGE_BYTES = 7_700_000
"""The largest page."""
DRAWING_LIBRARY_LEVEL = 5
"""Of gzip, for plotly.js: one hundredth larger than at level 9, in less than half the time."""
SCRIPTS = (
    "shared.js",
    "data.js",
    "drawing.js",
    "cells.js",
    "map.js",
    "keys.js",
    "text.js",
    "head.js",
    "sublayers.js",
    "link.js",
    "page.js",
)
"""Parts of the page's script, in their order."""
WARNINGS_SHOWN = 8


def template(name: str) -> "jinja2.Template":
    """A template of this package, with every inserted value escaped."""
    jinja2 = require_extra("jinja2", "probe")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("massieu.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"words": _words, "opening": _opening, "fact": _fact, "explained": explained}
    environment.filters |= {function.__name__: function for function in (number, bound, whole, counted, with_error)}
    return environment.get_template(name)


def asset(name: str) -> str:
    """A style sheet or script of this package, as text."""
    return (files("massieu.report") / "templates" / name).read_text(encoding="utf-8")


def _words(name: Any) -> str:
    return str(name).replace("_", " ")


def _opening(text: str) -> str:
    return text[:1].upper() + text[1:]


def _fact(value: Any) -> str:
    """A setting or a fact of the run, as text."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, int):
        return whole(value)
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_fact(item)}" for name, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_fact, value)) or "none"
    return str(value)


def hashed(script: str) -> str:
    """The hash by which a content security policy names a script."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"


def plotly_script() -> tuple[str, str]:
    """The drawing library, compressed, and the hash by which a content security policy names it.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    return _packed_script(require_extra("plotly.offline", "probe").get_plotlyjs())


@lru_cache(maxsize=1)
def _packed_script(script: str) -> tuple[str, str]:
    return gzipped(script.encode(), DRAWING_LIBRARY_LEVEL), hashed(script)


def _layer_payload(sublayers: list[dict[str, Any]], columns: dict[str, Column]) -> dict[str, Any]:
    def rounded(values: Any) -> list[float]:
        return [float(f"{value:.6g}") for value in values]

    numbers = {
        name: {"value": rounded(column.value), "error": rounded(column.error), "count": column.count.tolist()}
        for name, column in columns.items()
    }
    return {"sublayers": sublayers, "columns": numbers}


def _findings(run: "RunRecord", sites: list[MapRow]) -> list[dict[str, Any]]:
    """The findings with the site of each head that they name, unless several sites of a layer have that head."""
    findings = []
    for finding in run.findings:
        cells = []
        for layer, head in finding.heads:
            candidates = [site.index for site in sites if site.layer == layer and head < site.heads]
            if len(candidates) == 1:
                cells.append({"site": candidates[0], "head": head})
        announced = finding.value is not None
        findings.append({**vars(finding), "cells": cells if announced else [], "announced": announced})
    return findings


def _unavailable(sites: list[MapRow]) -> list[dict[str, Any]]:
    """The reasons why statistics are missing, each with its sites."""
    places: dict[tuple[str, str], list[str]] = {}
    for site in sites:
        for statistic, reason in site.unavailable.items():
            places.setdefault((statistic, reason), []).append(site.name)
    everywhere = "every site"
    return [
        {"statistic": name, "reason": why, "where": everywhere if len(names) == len(sites) else ", ".join(names)}
        for (name, why), names in places.items()
    ]


def _grouped(statistics: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in statistics:
        groups.setdefault(entry["group_title"], []).append(entry)
    return groups


def _terms(entry: dict[str, Any]) -> list[dict[str, str]]:
    return explained(entry[name] for name in ("title", "question", "caveat", "unit"))


def _date(text: str | None) -> str:
    if not text:
        return "unknown"
    try:
        date = datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):  # A year that no calendar has.
        return text
    return f"{date.day} {date:%B %Y, %H:%M} UTC"


def render(run: "RunRecord", details: dict[str, Any], heads: "polars.DataFrame", layers: "polars.DataFrame") -> str:
    """Draw a result as one self-contained HTML page.

    The page loads nothing from outside: plotly.js, styles, scripts and numbers are in it, and a content security policy
    forbids every request and every script but its own. Every string from the model or the text is escaped. The page stays
    under 8 MB; parts that do not fit are left out and named on it.

    Args:
        run: ``run.json``: model, text, settings, statistics, findings, warnings.
        details: ``details.json``: histograms and example windows; may be empty.
        heads: Long table of the heads (site, layer, head, statistic, value, standard_error, count).
        layers: Long table of the sublayers, ``head`` null; may be empty.

    Returns:
        The HTML text, to be written as UTF-8.

    Raises:
        MissingExtraError: plotly, jinja2 or polars is not installed.
    """
    plotly, plotly_hash = plotly_script()
    facts = encodable(run.to_dict())
    run = encodable(run)
    sites = sites_of(run, heads)
    sublayers = sublayers_of(run, layers)
    of_heads = head_columns(sites, heads)
    of_layers = layer_columns(sublayers, layers)
    head_statistics = catalogue_of(run, of_heads, "head")
    layer_statistics = catalogue_of(run, of_layers, "layer")
    findings = _findings(run, sites)
    style = asset("page.css")
    script = script_of(SCRIPTS)
    data = {
        "statistics": [entry | {"terms": _terms(entry)} for entry in head_statistics],
        "layers": _layer_payload(sublayers, of_layers) | {"statistics": layer_statistics},
        "findings": [{key: entry[key] for key in ("id", "statistic", "cells")} for entry in findings],
        "scales": {"sequential": colours.SEQUENTIAL, "diverging": colours.DIVERGING},
        "kinds": colours.KINDS | {"other": colours.OTHER_KIND},
        "controls": CONTROLS,
    }
    context = {
        "run": run,
        "facts_of": facts,
        **{part: getattr(run, part) for part in ("model", "text", "error_unit", "self_check", "capture", "sample")},
        "sites": sites,
        "findings": findings,
        "overview": overview_of(sites, of_heads, head_statistics, findings),
        "questions": questions(of_heads, of_layers, (head_statistics, layer_statistics), run.statistics),
        "groups": _grouped(head_statistics + layer_statistics),
        "unavailable": _unavailable(sites),
        "replacements": replacement_table(run.replacements),
        "measured_on": _date(run.date),
        "kinds": colours.KINDS,
        "warnings_shown": WARNINGS_SHOWN,
        "style": style,
        "script": script,
        "plotly": plotly,
        "script_sources": f"{plotly_hash} {hashed(script)}",
    }
    page = template("page.html.j2")
    # The page without its data says how many bytes are left for them.
    size_without_data = len(page.render(context | {"payload": Payload({}), "data_json": "{}"}).encode())
    payload = encode(data, sites, of_heads, details, PAGE_BYTES - size_without_data)
    return page.render(context | {"payload": payload, "data_json": script_json(payload.data)})


def script_of(names: Iterable[str]) -> str:
    """Scripts of this package as one, in a function of its own, so that its names are not global."""
    parts = "\n".join(asset(name) for name in names)
    return f'(function () {{\n"use strict";\n{parts}\n}})();\n'
