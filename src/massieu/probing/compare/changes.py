"""The heads that changed most between two models, and what both attend to in an example window."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from massieu.errors import require_extra
from massieu.foundation.numbers import number, with_error
from massieu.probing.result.result import ProbeResult

if TYPE_CHECKING:
    import polars

QUERIES = 96
"""Tokens of an example window that are stored."""
SHADES = ("entropy", "selective_log_partition")
"""Statistics by which the tokens of an example can be shaded; the first that both models have is used."""


@dataclass(frozen=True)
class Change:
    """A head, the statistic in which it changed most, and by how much.

    Attributes:
        size: the difference in standard deviations of the statistic over the first model's heads.
    """

    site: str
    layer: int
    head: int
    statistic: str
    first: float
    second: float
    difference: float
    standard_error: float
    q_value: float
    size: float

    def sentence(self, model: str) -> str:
        """The change in words."""
        values = f"{number(self.first)} → {number(self.second)}"
        change = with_error(self.difference, self.standard_error)
        return f"{model}, layer {self.layer} head {self.head}: {self.statistic} {values} ({change})"


def changes_of(table: "polars.DataFrame", headline: set[str]) -> list[Change]:
    """The named heads, in the order of how much they changed, each with its largest change.

    Args:
        table: differences between two models, with a column "named".
        headline: the statistics that count.
    """
    polars = require_extra("polars", "probe")
    heads = table.filter((polars.col("scope") == "head") & polars.col("statistic").is_in(sorted(headline)))
    spread = polars.col("first").std().over("statistic")
    sized = heads.with_columns((polars.col("difference").abs() / spread).alias("size"))
    named = sized.filter(polars.col("named") & polars.col("size").is_finite())
    order = named.sort("size", descending=True, maintain_order=True).unique(
        ["site", "head"], keep="first", maintain_order=True
    )
    return [Change(**row) for row in order.select(*Change.__dataclass_fields__).rows(named=True)]


def examples_of(changes: list[Change], first: ProbeResult, second: ProbeResult) -> list[dict[str, Any]]:
    """For each change, the first example window that both results have: its tokens, and each model's numbers of the head."""
    examples = []
    sites = {site.name: site for site in first.run.sites}
    # Examples hold sites by index, which may differ between models whose sites have the same names.
    first_index = {site.name: str(site.index) for site in first.run.sites}
    second_index = {site.name: str(site.index) for site in second.run.sites}
    first_examples = first.details.get("examples") or []
    second_examples = second.details.get("examples") or []
    for change in changes:
        site = sites[change.site]
        for first_example, second_example in zip(first_examples, second_examples, strict=False):
            entries = [
                first_example["sites"].get(first_index.get(change.site), {}),
                second_example["sites"].get(second_index.get(change.site), {}),
            ]
            shade = next((name for name in SHADES if all(name in entry for entry in entries)), None)
            tokens = first_example["tokens"]
            if shade is None or tokens != second_example["tokens"]:
                continue
            examples.append(
                {
                    "site": change.site,
                    "layer": change.layer,
                    "head": change.head,
                    "title": first_example.get("title"),
                    "shade": shade,
                    "queries": tokens.get(site.query_tokens or "text", [])[:QUERIES],
                    "keys": tokens.get(site.key_tokens or "text", []),
                    "models": [_head_numbers(entry, shade, change.head) for entry in entries],
                }
            )
            break
    return examples


def _head_numbers(entry: dict[str, Any], shade: str, head: int) -> dict[str, Any]:
    """One model's numbers of a head in a window."""
    parts = {"values": shade, "top_keys": "top_keys", "top_weights": "top_weights"}
    return {name: entry[part][head][:QUERIES] for name, part in parts.items() if part in entry}
