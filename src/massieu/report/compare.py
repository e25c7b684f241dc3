"""The page of a comparison: which heads differ, maps of both models and of the difference, and the course over many models."""

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
"""Numbers of the maps that a page holds; of more models, those compared last are drawn."""
_DIGITS = 4
SUBLAYERS_SHOWN = 12
STATISTICS_SHOWN = 6
_CELL_NUMBERS = ("second", "difference", "standard_error", "q_value", "named")


@dataclass(frozen=True, eq=False)
class Compared:
    """What the page is drawn from, as `massieu.Comparison` has it; ``changed`` are the heads that changed most.

    ``differences`` has a last column, ``named``.
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


def render(found: Compared) -> str:
    """Draw a comparison as one HTML page, which asks for nothing from outside and escapes every string.

    Raises:
        MissingExtraError: plotly, jinja2 or polars is not installed.
    """
    plotly = require_extra("plotly.offline", "probe").get_plotlyjs()
    polars = require_extra("polars", "probe")
    run = encodable(found.runs[0])
    own = found.values.filter((polars.col("model") == found.models[0]) & (polars.col("scope") == "head"))
    sites = sites_of(run, own)
    heads = found.differences.filter(polars.col("scope") == "head")
    columns = {name: each for name, each in head_columns(sites, own).items() if "/" not in name}
    catalogue = catalogue_of(run, columns, "head")
    drawn = _drawn(found, sum(site.heads for site in sites) * len(catalogue))
    data = {
        "models": found.models,
        "drawn": drawn,
        "sites": [{"label": site.label, "heads": site.heads, "first": site.first} for site in sites],
        "statistics": [
            {name: entry[name] for name in ("name", "title", "unit", "question", "signed", "gauge_dependent")}
            for entry in catalogue
        ],
        "first": {name: _short(column.value) for name, column in columns.items()},
        "pairs": {
            model: _cells(heads.filter(polars.col("model") == model), sites)
            for model in (found.models[place] for place in drawn)
        },
        "course": _course(found, sites, [entry["name"] for entry in catalogue]) if len(found.models) > 2 else None,
        "level": found.level,
        "lead": _lead(found),
        "scales": {"sequential": colours.SEQUENTIAL, "diverging": colours.DIVERGING},
    }
    script = script_of(SCRIPTS)
    titles = {entry["name"]: entry["title"] for entry in catalogue}
    return template("compare.html.j2").render(
        models=encodable(list(found.models)),
        run=run,
        runs=encodable(list(found.runs)),
        statistics=_counted(found, titles),
        shown=STATISTICS_SHOWN,
        opening_sentence=_opening_sentence(found, titles),
        changed=_cards(found, sites, titles),
        sublayers=_sublayers(found),
        pairings=encodable(list(found.pairings)),
        notes=encodable(list(found.notes)),
        left_out=len(found.models) - 1 - len(drawn),
        level=f"{100 * found.level:g} %",
        date=found.date,
        style=asset("page.css") + asset("compare.css"),
        script=script,
        plotly=plotly,
        script_sources=f"{hashed(plotly)} {hashed(script)}",
        data_json=script_json(data),
    )


def _short(values: Float[np.ndarray, " cells"]) -> list[float | None]:
    return [float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None for value in values]


def _drawn(found: Compared, size: int) -> list[int]:
    """Places of the models whose maps the page holds: the last ones, as many as fit and one at least."""
    room = max(1, MOST_NUMBERS // max(1, size * len(_CELL_NUMBERS)))
    return list(range(1, len(found.models)))[-room:]


def _cells(table: "polars.DataFrame", sites: list[MapRow]) -> dict[str, dict[str, list[float | None]]]:
    """For each statistic the numbers of a model's heads, in the order of the map."""
    cells = {(site.name, head): site.first + head for site in sites for head in range(site.heads)}
    found: dict[str, dict[str, list[float | None]]] = {}
    for (statistic,), part in table.partition_by("statistic", as_dict=True, maintain_order=True).items():
        places = [cells.get(key, -1) for key in zip(part["site"], part["head"], strict=True)]
        found[str(statistic)] = {}
        for name in _CELL_NUMBERS:
            column = np.full(len(cells) + 1, np.nan)  # the last cell takes what has no place
            column[places] = part[name].cast(float).fill_null(np.nan).to_numpy()
            found[str(statistic)][name] = _short(column[:-1])
    return found


def _course(found: Compared, sites: list[MapRow], names: list[str]) -> dict[str, Any]:
    """For each statistic and site the mean over heads, model by model."""
    polars = require_extra("polars", "probe")
    own = found.values.filter((polars.col("scope") == "head") & polars.col("statistic").is_in(names))
    means = own.group_by("model", "site", "statistic").agg(polars.col("value").mean())
    known = {(model, site, name): value for model, site, name, value in means.iter_rows()}
    order = sorted(range(len(found.models)), key=lambda place: found.steps[place])
    lines = {
        name: [
            _short(np.array([known.get((found.models[i], s.name, name)) for i in order], dtype=float)) for s in sites
        ]
        for name in names
    }
    numbers = [found.steps[place] for place in order]
    logarithmic = numbers[0] > 0 and numbers[-1] > 100 * numbers[0]
    return {
        "steps": numbers,
        "models": [found.models[place] for place in order],
        "lines": lines,
        "logarithmic": logarithmic,
    }


def _lead(found: Compared) -> str | None:
    """The statistic that the maps show at first."""
    return found.changed[0]["statistic"] if found.changed else None


def _counted(found: Compared, titles: dict[str, str]) -> list[dict[str, Any]]:
    """For each tested statistic of heads: how many are named in the last model, and where the difference is largest."""
    polars = require_extra("polars", "probe")
    own = found.differences.filter((polars.col("model") == found.models[-1]) & (polars.col("scope") == "head"))
    rows = []
    for (name,), part in own.partition_by("statistic", as_dict=True, maintain_order=True).items():
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


def _opening_sentence(found: Compared, titles: dict[str, str]) -> str:
    """How many heads differ at all, and which one most."""
    polars = require_extra("polars", "probe")
    own = found.differences.filter((polars.col("model") == found.models[-1]) & (polars.col("scope") == "head"))
    named = own.filter("named").select("site", "head").n_unique()
    heads = own.select("site", "head").n_unique()
    if not named or not found.changed:
        said = "differs by an effect that matters in a statistic that may be compared between heads"
        return f"No head of {found.models[-1]} {said}."
    most = found.changed[0]
    where = f"layer {most['layer']}, head {most['head']}"
    title = titles.get(most["statistic"], most["statistic"])
    values = f"{number(most['first'], most['standard_error'])} to {number(most['second'], most['standard_error'])}"
    return (
        f"The largest change is in {where}: {title}, from {values}. {named} of {counted(heads, 'head')} "
        f"{'differs' if named == 1 else 'differ'} by an effect that matters in some statistic, at a false discovery rate of "
        f"{found.level:.0%} over all of them."
    )


def _sublayers(found: Compared) -> list[dict[str, Any]]:
    polars = require_extra("polars", "probe")
    own = found.differences.filter(
        (polars.col("model") == found.models[-1]) & (polars.col("scope") == "layer") & polars.col("named")
    )
    titles = {entry.name: entry.title or entry.name for entry in found.runs[0].statistics}
    rows = own.sort("q_value", maintain_order=True).head(SUBLAYERS_SHOWN).rows(named=True)
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


def _cards(found: Compared, sites: list[MapRow], titles: dict[str, str]) -> list[dict[str, Any]]:
    """The heads that changed most, in words, with an example where there is one."""
    labels = {site.name: site.label for site in sites}
    examples = {(each["site"], each["head"]): each for each in found.examples}
    cards = []
    for change in found.changed:
        example = examples.get((change["site"], change["head"]))
        cards.append(
            {
                "place": f"Layer {labels.get(change['site'], change['layer'])}, head {change['head']}",
                "title": titles.get(change["statistic"], change["statistic"]),
                "first": number(change["first"], change["standard_error"]),
                "second": number(change["second"], change["standard_error"]),
                "difference": with_error(change["difference"], change["standard_error"]),
                "size": number(change["size"]),
                "example": None if example is None else _example(example, (found.models[0], found.models[-1])),
            }
        )
    return encodable(cards)


def _example(example: dict[str, Any], models: tuple[str, str]) -> dict[str, Any]:
    """A window in both models, shaded by one scale."""
    queries = readable([str(token) for token in example["queries"]])
    keys = [token["text"] for token in readable([str(token) for token in example["keys"]])]
    rows = [np.array(seen["values"], dtype=float)[: len(queries)] for seen in example["models"]]
    known = np.concatenate(rows)
    known = known[np.isfinite(known)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    shown = []
    for name, seen, values in zip(models, example["models"], rows, strict=True):
        tokens = []
        for place, (token, value) in enumerate(zip(queries, values, strict=False)):
            shade = (value - low) / (high - low) if high > low and math.isfinite(value) else 0.0
            title = f"position {place}: {number(float(value))} nats{_strongest(seen, place, keys)}"
            tokens.append({**token, "shade": round(float(shade), 3), "title": title})
        shown.append({"model": name, "tokens": tokens})
    shade = str(example["shade"]).replace("_", " ").replace("log partition", "log Z")
    return {"title": example.get("title"), "shade": shade, "low": number(low), "high": number(high), "models": shown}


def _strongest(seen: dict[str, Any], place: int, keys: list[str]) -> str:
    pairs = zip(*(seen.get(name, [[]] * (place + 1))[place] for name in ("top_keys", "top_weights")), strict=False)
    parts = [f"{keys[key]}: {100 * weight:.1f} %" for key, weight in pairs if key is not None and 0 <= key < len(keys)]
    return f"; strongest keys {', '.join(parts)}" if parts else ""
