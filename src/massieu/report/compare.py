"""The page of a comparison: heads that differ, maps of both models and of the difference, and curves over many models."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from massieu.errors import require_extra
from massieu.foundation.numbers import counted, number, with_error
from massieu.report import colours
from massieu.report.encode import encodable, script_json
from massieu.report.page import asset, hashed, script_of, template
from massieu.report.tables import MapRow, catalogue_of, head_columns, sites_of
from massieu.report.tokens import readable

if TYPE_CHECKING:
    import polars

    from massieu.storage.record import RunRecord

SCRIPTS = ("shared.js", "drawing.js", "compare.js")
MOST_NUMBERS = 400_000
"""Numbers of all maps of a page; if there are more, the models compared last are drawn."""
_DIGITS = 4
SUBLAYERS_SHOWN = 12
STATISTICS_SHOWN = 6
_CELL_NUMBERS = ("second", "difference", "standard_error", "q_value", "named")


@dataclass(frozen=True, eq=False)
class Compared:
    """The content of the page, as in `massieu.Comparison`.

    ``changed`` are the heads that changed most. ``differences`` has a last column, ``named``: whether it is announced.
    """

    models: Sequence[str]
    steps: Sequence[float]
    runs: Sequence["RunRecord"]
    differences: "polars.DataFrame"
    values: "polars.DataFrame"
    pairings: Sequence[str]
    notes: Sequence[str]
    examples: Sequence[dict[str, Any]]
    changed: Sequence[dict[str, Any]]
    level: float
    date: str


def render(comparison: Compared) -> str:
    """Draw a comparison as one HTML page, which loads nothing from outside and escapes every string.

    Raises:
        MissingExtraError: plotly, jinja2 or polars is not installed.
    """
    plotly = require_extra("plotly.offline", "probe").get_plotlyjs()
    polars = require_extra("polars", "probe")
    run = encodable(comparison.runs[0])
    first_values = comparison.values.filter(
        (polars.col("model") == comparison.models[0]) & (polars.col("scope") == "head")
    )
    sites = sites_of(run, first_values)
    heads = comparison.differences.filter(polars.col("scope") == "head")
    columns = {name: column for name, column in head_columns(sites, first_values).items() if "/" not in name}
    catalogue = catalogue_of(run, columns, "head")
    drawn = _drawn(comparison, sum(site.heads for site in sites) * len(catalogue))
    data = {
        "models": comparison.models,
        "drawn": drawn,
        "sites": [{"label": site.label, "heads": site.heads, "first": site.first} for site in sites],
        "statistics": [
            {name: entry[name] for name in ("name", "title", "unit", "question", "signed", "gauge_dependent")}
            for entry in catalogue
        ],
        "first": {name: _short(column.value) for name, column in columns.items()},
        "pairs": {
            model: _cells(heads.filter(polars.col("model") == model), sites)
            for model in (comparison.models[place] for place in drawn)
        },
        "course": _course(comparison, sites, [entry["name"] for entry in catalogue])
        if len(comparison.models) > 2
        else None,
        "level": comparison.level,
        "lead": _lead(comparison),
        "scales": {"sequential": colours.SEQUENTIAL, "diverging": colours.DIVERGING},
    }
    script = script_of(SCRIPTS)
    titles = {entry["name"]: entry["title"] for entry in catalogue}
    return template("compare.html.j2").render(
        models=encodable(list(comparison.models)),
        run=run,
        runs=encodable(list(comparison.runs)),
        statistics=_counted(comparison, titles),
        shown=STATISTICS_SHOWN,
        opening_sentence=_opening_sentence(comparison, titles),
        changed=_cards(comparison, sites, titles),
        sublayers=_sublayers(comparison),
        pairings=encodable(list(comparison.pairings)),
        notes=encodable(list(comparison.notes)),
        left_out=len(comparison.models) - 1 - len(drawn),
        level=f"{100 * comparison.level:g} %",
        date=comparison.date,
        style=asset("page.css") + asset("compare.css"),
        script=script,
        plotly=plotly,
        script_sources=f"{hashed(plotly)} {hashed(script)}",
        data_json=script_json(data),
    )


def _short(values: Float[np.ndarray, " cells"]) -> list[float | None]:
    return [float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None for value in values]


def _drawn(comparison: Compared, size: int) -> list[int]:
    """Positions of the models whose maps the page holds: the last ones, as many as fit, at least one."""
    room = max(1, MOST_NUMBERS // max(1, size * len(_CELL_NUMBERS)))
    return list(range(1, len(comparison.models)))[-room:]


def _cells(table: "polars.DataFrame", sites: list[MapRow]) -> dict[str, dict[str, list[float | None]]]:
    """For each statistic the numbers of a model's heads, in the order of the map."""
    cells = {(site.name, head): site.first + head for site in sites for head in range(site.heads)}
    numbers: dict[str, dict[str, list[float | None]]] = {}
    for (statistic,), part in table.partition_by("statistic", as_dict=True, maintain_order=True).items():
        places = [cells.get(key, -1) for key in zip(part["site"], part["head"], strict=True)]
        numbers[str(statistic)] = {}
        for name in _CELL_NUMBERS:
            column = np.full(len(cells) + 1, np.nan)  # The last cell takes heads that are not on the map.
            column[places] = part[name].cast(float).fill_null(np.nan).to_numpy()
            numbers[str(statistic)][name] = _short(column[:-1])
    return numbers


def _course(comparison: Compared, sites: list[MapRow], names: list[str]) -> dict[str, Any]:
    """For each statistic and site the mean over heads, model by model in the order of their steps."""
    polars = require_extra("polars", "probe")
    of_heads = comparison.values.filter((polars.col("scope") == "head") & polars.col("statistic").is_in(names))
    means = of_heads.group_by("model", "site", "statistic").agg(polars.col("value").mean())
    mean_of = {(model, site, name): value for model, site, name, value in means.iter_rows()}
    order = sorted(range(len(comparison.models)), key=lambda place: comparison.steps[place])
    models = [comparison.models[place] for place in order]
    steps = [comparison.steps[place] for place in order]

    def line(site: MapRow, name: str) -> list[float | None]:
        return _short(np.array([mean_of.get((model, site.name, name)) for model in models], dtype=float))

    return {
        "steps": steps,
        "models": models,
        "lines": {name: [line(site, name) for site in sites] for name in names},
        "logarithmic": steps[0] > 0 and steps[-1] > 100 * steps[0],
    }


def _lead(comparison: Compared) -> str | None:
    """The statistic that the maps show at first."""
    return comparison.changed[0]["statistic"] if comparison.changed else None


def _counted(comparison: Compared, titles: dict[str, str]) -> list[dict[str, Any]]:
    """For each tested statistic: how many heads are announced in the last model, and where the difference is largest."""
    polars = require_extra("polars", "probe")
    of_heads = comparison.differences.filter(
        (polars.col("model") == comparison.models[-1]) & (polars.col("scope") == "head")
    )
    rows = []
    for (name,), part in of_heads.partition_by("statistic", as_dict=True, maintain_order=True).items():
        tested = part.drop_nulls("q_value")
        if tested.is_empty():
            continue
        largest = tested.row(int(tested["difference"].abs().arg_max() or 0), named=True)
        rows.append(
            {
                "name": name,
                "title": titles.get(str(name), str(name)),
                "named": int(tested["named"].sum()),
                "tested": len(tested),
                "where": f"layer {largest['layer']}, head {largest['head']}",
                "largest": with_error(largest["difference"], largest["standard_error"] or math.nan),
            }
        )
    return encodable(sorted(rows, key=lambda row: -row["named"] / row["tested"]))


def _opening_sentence(comparison: Compared, titles: dict[str, str]) -> str:
    """A sentence that says how many heads differ, and which one most."""
    polars = require_extra("polars", "probe")
    of_heads = comparison.differences.filter(
        (polars.col("model") == comparison.models[-1]) & (polars.col("scope") == "head")
    )
    named = of_heads.filter("named").select("site", "head").n_unique()
    heads = of_heads.select("site", "head").n_unique()
    if not named or not comparison.changed:
        return (
            f"No head of {comparison.models[-1]} differs by an effect that matters in a statistic that may be compared between "
            "heads."
        )
    most = comparison.changed[0]
    where = f"layer {most['layer']}, head {most['head']}"
    title = titles.get(most["statistic"], most["statistic"])
    values = f"{number(most['first'], most['standard_error'])} to {number(most['second'], most['standard_error'])}"
    return (
        f"The largest change is in {where}: {title}, from {values}. {named} of {counted(heads, 'head')} "
        f"{'differs' if named == 1 else 'differ'} by an effect that matters in some statistic, at a false discovery rate of "
        f"{comparison.level:.0%} over all of them."
    )


def _sublayers(comparison: Compared) -> list[dict[str, Any]]:
    polars = require_extra("polars", "probe")
    announced = comparison.differences.filter(
        (polars.col("model") == comparison.models[-1]) & (polars.col("scope") == "layer") & polars.col("named")
    )
    titles = {entry.name: entry.title or entry.name for entry in comparison.runs[0].statistics}
    rows = announced.sort("q_value", maintain_order=True).head(SUBLAYERS_SHOWN).rows(named=True)
    return [
        encodable(
            {
                "site": row["site"],
                "title": titles.get(row["statistic"], row["statistic"]),
                "values": f"{number(row['first'])} → {number(row['second'])}",
                "difference": with_error(row["difference"], row["standard_error"]),
                "q": number(row["q_value"]),
            }
        )
        for row in rows
    ]


def _cards(comparison: Compared, sites: list[MapRow], titles: dict[str, str]) -> list[dict[str, Any]]:
    """The heads that changed most, in words, each with its example if it has one."""
    labels = {site.name: site.label for site in sites}
    examples = {(example["site"], example["head"]): example for example in comparison.examples}
    cards = []
    for change in comparison.changed:
        example = examples.get((change["site"], change["head"]))
        cards.append(
            {
                "place": f"Layer {labels.get(change['site'], change['layer'])}, head {change['head']}",
                "title": titles.get(change["statistic"], change["statistic"]),
                "first": number(change["first"], change["standard_error"]),
                "second": number(change["second"], change["standard_error"]),
                "difference": with_error(change["difference"], change["standard_error"]),
                "size": number(change["size"]),
                "example": None
                if example is None
                else _example(example, (comparison.models[0], comparison.models[-1])),
            }
        )
    return encodable(cards)


def _example(example: dict[str, Any], models: tuple[str, str]) -> dict[str, Any]:
    """A window in both models, shaded on one scale."""
    queries = readable([str(token) for token in example["queries"]])
    keys = [token["text"] for token in readable([str(token) for token in example["keys"]])]
    rows = [np.array(reading["values"], dtype=float)[: len(queries)] for reading in example["models"]]
    finite = np.concatenate(rows)
    finite = finite[np.isfinite(finite)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    texts = []
    for name, reading, values in zip(models, example["models"], rows, strict=True):
        tokens = []
        for place, (token, value) in enumerate(zip(queries, values, strict=False)):
            shade = (value - low) / (high - low) if high > low and math.isfinite(value) else 0.0
            title = f"position {place}: {number(float(value))} nats{_strongest(reading, place, keys)}"
            tokens.append({**token, "shade": round(float(shade), 3), "title": title})
        texts.append({"model": name, "tokens": tokens})
    quantity = str(example["shade"]).replace("_", " ").replace("log partition", "log Z")
    return {"title": example.get("title"), "shade": quantity, "low": number(low), "high": number(high), "models": texts}


def _strongest(reading: dict[str, Any], place: int, keys: list[str]) -> str:
    """The strongest keys of a query and their weights, as the end of a sentence."""
    no_entries: list[list[Any]] = [[]] * (place + 1)
    top_keys = reading.get("top_keys", no_entries)[place]
    top_weights = reading.get("top_weights", no_entries)[place]
    pairs = zip(top_keys, top_weights, strict=False)
    parts = [f"{keys[key]}: {100 * weight:.1f} %" for key, weight in pairs if key is not None and 0 <= key < len(keys)]
    return f"; strongest keys {', '.join(parts)}" if parts else ""
