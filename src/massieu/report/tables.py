"""The long tables turned into arrays: one number per head (or sublayer) and statistic."""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

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
    """One statistic: value and standard error (NaN where undefined) and count, one entry per cell."""

    value: Float[np.ndarray, " cells"]
    error: Float[np.ndarray, " cells"]
    count: Int[np.ndarray, " cells"]

    def text(self, cell: int) -> str:
        """Value ± standard error of a cell."""
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
    """The sites that ``run.json`` lists, then any that only the table knows, with short unique labels.

    A label is the layer's number; where a layer has several sites it also says the stack and the kind of attention.
    """
    entries = [vars(entry) for entry in run.sites]
    known = {entry["name"] for entry in entries}
    size = heads.group_by("site", "layer", maintain_order=True).agg(require_extra("polars", "probe").col("head").max())
    sizes = {name: (0 if head is None else head + 1, layer) for name, layer, head in size.iter_rows()}
    entries += [{"name": name, "layer": layer} for name, (_, layer) in sizes.items() if name not in known]
    several = max(Counter(entry["layer"] for entry in entries).values(), default=1) > 1
    kinds = Counter((_stack(entry["name"]), entry["layer"]) for entry in entries)
    sites: list[MapRow] = []
    labels: Counter[str] = Counter()
    for place, entry in enumerate(entries):
        name, layer = entry["name"], entry["layer"]
        words = [str(layer)]
        if several:
            words.insert(0, _stack(name)[:3])
            words += [entry.get("kind") or ""] if kinds[_stack(name), layer] > 1 else []
        label = " ".join(filter(None, words))
        labels[label] += 1
        label = label if labels[label] == 1 else f"{label} #{labels[label]}"
        site = MapRow(
            index=place if entry.get("index") is None else entry["index"],
            name=name,
            label=label,
            layer=layer,
            kind=entry.get("kind") or "",
            heads=entry.get("heads") or sizes.get(name, (0, 0))[0],
            first=sites[-1].first + sites[-1].heads if sites else 0,
            query_tokens=entry.get("query_tokens") or "text",
            key_tokens=entry.get("key_tokens") or "text",
            unavailable=entry.get("unavailable") or {},
            route=entry.get("route") or "interface",
            grade=entry.get("grade") or "full",
            group=f"{_stack(name)} {_KINDS.get(kind := entry.get('kind') or '', kind)}".strip(),
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
    places = np.array([cells.get(key, -1) for key in zip(frame["site"], frame["head"], strict=True)], dtype=np.int64)
    numbered = frame.select("statistic", "value", "standard_error", "count").with_columns(
        require_extra("polars", "probe").Series("cell", places)
    )
    columns = {}
    for (statistic,), part in numbered.partition_by("statistic", as_dict=True, maintain_order=True).items():
        cell = part["cell"].to_numpy()
        kept = cell >= 0
        value, error = np.full(size, np.nan), np.full(size, np.nan)
        count = np.zeros(size, dtype=np.int64)
        value[cell[kept]] = part["value"].to_numpy()[kept]
        error[cell[kept]] = part["standard_error"].to_numpy()[kept]
        count[cell[kept]] = part["count"].fill_null(0).to_numpy()[kept]
        columns[str(statistic)] = Column(value, error, count)
    return columns


def head_columns(sites: list[MapRow], heads: "polars.DataFrame") -> dict[str, Column]:
    """The heads table as arrays over all heads of all sites."""
    cells: dict[tuple[str, int | None], int] = {
        (site.name, head): site.first + head for site in sites for head in range(site.heads)
    }
    return columns_of(heads, cells, len(cells))


def sublayers_of(run: "RunRecord", layers: "polars.DataFrame") -> list[dict[str, Any]]:
    """The sublayers in the order of the forward pass: those of ``run.json``, then any that only the table knows."""
    entries = [vars(entry) for entry in sorted(run.sublayers, key=lambda entry: entry.index)]
    known = {entry["name"] for entry in entries}
    found = layers.select("site", "layer").unique(maintain_order=True).iter_rows()
    others = [{"name": name, "layer": layer, "kind": "other"} for name, layer in found if name not in known]
    return [{"name": entry["name"], "layer": entry["layer"], "kind": entry["kind"]} for entry in [*entries, *others]]


def layer_columns(sublayers: list[dict[str, Any]], layers: "polars.DataFrame") -> dict[str, Column]:
    """The layers table as arrays over all sublayers."""
    cells: dict[tuple[str, int | None], int] = {(entry["name"], None): place for place, entry in enumerate(sublayers)}
    return columns_of(layers, cells, len(sublayers))


def _group_title(group: str) -> str:
    words = group.replace("_", " ")
    return GROUP_TITLES.get(group, words[:1].upper() + words[1:])


def _blank(name: str, scope: str) -> dict[str, Any]:
    known = {"name": name, "title": name.replace("_", " "), "scope": scope, "group": "other", "unit": ""}
    said = dict.fromkeys(("formula", "claim", "paper", "control", "question", "caveat", "cost", "smallest_in_words"))
    return {**known, **said, "headline": False, "gauge_dependent": False, "signed": False}


def _said(entry: "Statistic") -> dict[str, Any]:
    known = {name: value for name, value in vars(entry).items() if name != "others" and value not in (None, "")}
    return known | ({"smallest_in_words": entry.smallest_in_words} if entry.smallest else {})


def catalogue_of(run: "RunRecord", columns: dict[str, Column], scope: str) -> list[dict[str, Any]]:
    """What is known of each statistic that the columns hold, in the order of ``run.json``.

    A statistic without an entry comes last, with its name as title. A head's statistic needs a column of its own; of a
    sublayer's, ``before`` and ``after`` are enough.
    """
    entries = {entry.name: _said(entry) for entry in run.statistics if entry.scope == scope}
    bases = dict.fromkeys(name.partition("/")[0] for name in columns)
    drawn = [name for name in {**entries, **bases} if name in columns or (scope == "layer" and name in bases)]
    described = [_blank(name, scope) | entries.get(name, {}) for name in drawn]
    return [entry | {"group_title": _group_title(entry["group"] or "other")} for entry in described]
