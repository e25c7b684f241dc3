"""The long tables turned into arrays: one number per head (or sublayer) and statistic."""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int, Int64

from massieu.errors import require_extra
from massieu.foundation.numbers import with_error

if TYPE_CHECKING:
    import polars

    from massieu.storage.record import RunRecord, Statistic

GROUP_TITLES = {
    "attention": "Attention: weights and scores",
    "values": "Values and writes",
    "climb": "Does a step sharpen the head's attention?",
    "maps": "The weight matrices",
    "expansion": "Expansion and contraction",
    "replacement": "The model without this head",
    "repeated": "Attention on repeated random tokens",
    "memory": "The head as a memory",
    "feed_forward": "Feed-forward layers",
    "metric": "The metric in which a head compares tokens",
    "flow": "The distribution of tokens through the depth",
    "residual": "The residual connection",
    "tap": "The feed-forward layer as an Onsager reaction",
    "conditional_mean": "The head as a conditional mean",
    "key_density": "The distribution of the keys",
    "joint": "The heads as one mixture",
    "uncertainty": "Sensitivity of a head's output",
    "response": "How a token responds to other tokens",
    "symmetry": "Tokens in another order",
    "sufficiency": "Contexts with equal counts",
}
CONTROLS = {
    "mismatched": "mismatched heads",
    "rotation": "random rotation",
    "random": "random direction",
    "mismatched_keys": "keys of another head",
    "shuffled_values": "shuffled values",
    "shuffled_tokens": "shuffled tokens",
    "shuffled_coordinates": "shuffled coordinates of the keys",
    "permuted_couplings": "couplings of other tokens",
    "gaussian": "as many Gaussian tokens",
    "moved_positions": "position numbers moved with their tokens",
    "shuffled_positions": "weights of other positions",
    "permuted_heads": "heads at other queries",
    "reinitialised": "re-initialised model",
}
"""Every control in words, in the order in which they are listed."""


@dataclass(frozen=True)
class Column:
    """One statistic: value, standard error (both NaN if undefined) and count of each cell."""

    value: Float[np.ndarray, " cells"]
    error: Float[np.ndarray, " cells"]
    count: Int[np.ndarray, " cells"]

    def text(self, cell: int) -> str:
        """Value ± standard error of a cell, as text."""
        return with_error(float(self.value[cell]), float(self.error[cell]))


@dataclass(frozen=True)
class MapRow:
    """An attention site: a row of the map. Its heads are the cells ``first`` to ``first + heads − 1``.

    Sites of one ``group`` have the same stack and kind of attention, and share a colour scale.
    """

    index: int
    name: str
    label: str
    layer: int
    kind: str
    heads: int
    first: int
    query_tokens: str
    key_tokens: str
    unavailable: dict[str, str]
    route: str
    grade: str
    group: str


_KINDS = {"self": "self-attention", "causal": "causal self-attention", "cross": "cross-attention"}


def _stack(name: str) -> str:
    return next((stack for stack in ("encoder", "decoder") if stack in name.lower().split(".")), "")


def sites_of(run: "RunRecord", heads: "polars.DataFrame") -> list[MapRow]:
    """The sites that ``run.json`` lists, then those that only the table has, with short unique labels.

    A label is the layer's number; if some layer has several sites, also the stack and the kind of attention.
    """
    entries = [vars(entry) for entry in run.sites]
    listed_names = {entry["name"] for entry in entries}
    polars = require_extra("polars", "probe")
    last_heads = heads.group_by("site", "layer", maintain_order=True).agg(polars.col("head").max())
    # Number of heads and layer of each site of the table.
    sizes = {name: (0 if head is None else head + 1, layer) for name, layer, head in last_heads.iter_rows()}
    entries += [{"name": name, "layer": layer} for name, (_, layer) in sizes.items() if name not in listed_names]
    has_shared_layer = max(Counter(entry["layer"] for entry in entries).values(), default=1) > 1
    sites_per_stack = Counter((_stack(entry["name"]), entry["layer"]) for entry in entries)
    sites: list[MapRow] = []
    labels: Counter[str] = Counter()
    for place, entry in enumerate(entries):
        name = entry["name"]
        layer = entry["layer"]
        words = [str(layer)]
        if has_shared_layer:
            words.insert(0, _stack(name)[:3])
            if sites_per_stack[_stack(name), layer] > 1:
                words.append(entry.get("kind") or "")
        label = " ".join(filter(None, words))
        labels[label] += 1
        if labels[label] > 1:
            label = f"{label} #{labels[label]}"
        kind = entry.get("kind") or ""
        site = MapRow(
            index=place if entry.get("index") is None else entry["index"],
            name=name,
            label=label,
            layer=layer,
            kind=kind,
            heads=entry.get("heads") or sizes.get(name, (0, 0))[0],
            first=sites[-1].first + sites[-1].heads if sites else 0,
            query_tokens=entry.get("query_tokens") or "text",
            key_tokens=entry.get("key_tokens") or "text",
            unavailable=entry.get("unavailable") or {},
            route=entry.get("route") or "interface",
            grade=entry.get("grade") or "full",
            group=f"{_stack(name)} {_KINDS.get(kind, kind)}".strip(),
        )
        sites.append(site)
    return sites


def columns_of(frame: "polars.DataFrame", cells: dict[tuple[str, int | None], int], size: int) -> dict[str, Column]:
    """One `Column` per statistic of a long table.

    Args:
        frame: A long table with site, head, statistic, value, standard_error and count.
        cells: The cell of each (site, head); rows of other heads are not drawn.
        size: Number of cells.

    Returns:
        Columns by statistic's name, in the order of the table.
    """
    places = _cells_of_rows(frame, cells)
    numbered = frame.select("statistic", "value", "standard_error", "count").with_columns(
        require_extra("polars", "probe").Series("cell", places)
    )
    columns = {}
    for (statistic,), part in numbered.partition_by("statistic", as_dict=True, maintain_order=True).items():
        cell = part["cell"].to_numpy()
        has_cell = cell >= 0
        value = np.full(size, np.nan)
        error = np.full(size, np.nan)
        count = np.zeros(size, dtype=np.int64)
        value[cell[has_cell]] = part["value"].to_numpy()[has_cell]
        error[cell[has_cell]] = part["standard_error"].to_numpy()[has_cell]
        count[cell[has_cell]] = part["count"].fill_null(0).to_numpy()[has_cell]
        columns[str(statistic)] = Column(value, error, count)
    return columns


def _cells_of_rows(frame: "polars.DataFrame", cells: dict[tuple[str, int | None], int]) -> Int64[np.ndarray, " rows"]:
    """The cell of each row's site and head; −1 for a row that has none."""
    polars = require_extra("polars", "probe")
    names = frame["site"].unique(maintain_order=True)
    site = frame["site"].cast(polars.Enum(names)).to_physical().to_numpy()
    most_heads = max((head + 1 for _, head in cells if head is not None), default=0)
    # (sites, heads and two): the last but one column is of rows without a head, the last one of heads that nobody knows.
    cell_of = np.full((len(names), most_heads + 2), -1, dtype=np.int64)
    number_of = {name: number for number, name in enumerate(names)}
    for (name, head), cell in cells.items():
        if name in number_of:
            cell_of[number_of[name], most_heads if head is None else head] = cell
    heads = frame["head"].cast(polars.Int64)
    unknown = (heads < 0) | (heads >= most_heads)
    column = heads.set(unknown.fill_null(False), most_heads + 1).fill_null(most_heads).to_numpy()
    return cell_of[site, column]


def head_columns(sites: list[MapRow], heads: "polars.DataFrame") -> dict[str, Column]:
    """The heads table as arrays over all heads of all sites."""
    cells: dict[tuple[str, int | None], int] = {
        (site.name, head): site.first + head for site in sites for head in range(site.heads)
    }
    return columns_of(heads, cells, len(cells))


def sublayers_of(run: "RunRecord", layers: "polars.DataFrame") -> list[dict[str, Any]]:
    """The sublayers in the order of the forward pass: those of ``run.json``, then those that only the table has."""
    entries = [vars(entry) for entry in sorted(run.sublayers, key=lambda entry: entry.index)]
    listed_names = {entry["name"] for entry in entries}
    of_table = layers.select("site", "layer").unique(maintain_order=True).iter_rows()
    others = [{"name": name, "layer": layer, "kind": "other"} for name, layer in of_table if name not in listed_names]
    return [{"name": entry["name"], "layer": entry["layer"], "kind": entry["kind"]} for entry in [*entries, *others]]


def layer_columns(sublayers: list[dict[str, Any]], layers: "polars.DataFrame") -> dict[str, Column]:
    """The layers table as arrays over all sublayers."""
    cells: dict[tuple[str, int | None], int] = {(entry["name"], None): place for place, entry in enumerate(sublayers)}
    return columns_of(layers, cells, len(sublayers))


def _group_title(group: str) -> str:
    words = group.replace("_", " ")
    return GROUP_TITLES.get(group, words[:1].upper() + words[1:])


def _defaults(name: str, scope: str) -> dict[str, Any]:
    """The entries of a statistic of which only the name is known."""
    texts = {"name": name, "title": name.replace("_", " "), "scope": scope, "group": "other", "unit": ""}
    missing = dict.fromkeys(("formula", "claim", "paper", "control", "question", "caveat", "cost", "smallest_in_words"))
    return {**texts, **missing, "headline": False, "gauge_dependent": False, "signed": False}


def _entries(statistic: "Statistic") -> dict[str, Any]:
    """The entries of a statistic's record that are not empty."""
    entries = {name: value for name, value in vars(statistic).items() if name != "others" and value not in (None, "")}
    if statistic.smallest:
        entries["smallest_in_words"] = statistic.smallest_in_words
    return entries


def catalogue_of(run: "RunRecord", columns: dict[str, Column], scope: str) -> list[dict[str, Any]]:
    """The entries of each statistic that the columns hold, in the order of ``run.json``.

    A statistic without a record comes last, with its name as its title. A statistic of heads needs a column of its own; for
    one of sublayers, ``before`` and ``after`` are enough.
    """
    entries = {entry.name: _entries(entry) for entry in run.statistics if entry.scope == scope}
    bases = dict.fromkeys(name.partition("/")[0] for name in columns)
    drawn = [name for name in {**entries, **bases} if name in columns or (scope == "layer" and name in bases)]
    described = [_defaults(name, scope) | entries.get(name, {}) for name in drawn]
    return [entry | {"group_title": _group_title(entry["group"] or "other")} for entry in described]
