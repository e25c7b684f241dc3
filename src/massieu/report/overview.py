"""The picture at the top of a page: one statistic of every head, as a small drawing that needs no script."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from massieu.report import colours
from massieu.report.tables import Column, MapRow

SHADES = 24
"""How many colours are told apart: each is one path of the drawing."""


@dataclass(frozen=True)
class Overview:
    """A row per attention site, a column per head; cells of one colour are one path."""

    title: str
    unit: str
    meaning: str
    low: float
    high: float
    width: int
    height: int
    paths: dict[str, str]


def overview_of(
    sites: list[MapRow], columns: dict[str, Column], catalogue: list[dict[str, Any]], findings: list[dict[str, Any]]
) -> Overview | None:
    """Draw the statistic that the map shows first: that of the first finding, else the first one. None if it has no number."""
    entries = {entry["name"]: entry for entry in catalogue if entry["name"] in columns}
    names = [finding["statistic"] for finding in findings if finding["statistic"] in entries]
    names += list(entries)
    if not names:
        return None
    entry = entries[names[0]]
    values = columns[names[0]].value
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        return None
    centre = _centre(columns, entry)
    scale, low, high = colours.scale_of(values, entry["signed"], centre)
    return Overview(
        title=entry["title"],
        unit=entry["unit"] or "",
        meaning=colours.meaning(entry["signed"], centre),
        low=float(finite.min()),
        high=float(finite.max()),
        width=max(site.heads for site in sites),
        height=len(sites),
        paths=_paths(sites, (values - low) / (high - low), scale),
    )


def _centre(columns: dict[str, Column], entry: dict[str, Any]) -> float:
    """The middle of the colours of a signed statistic: the median of its control, if it has one."""
    null = columns.get(f"{entry['name']}/{entry['control']}")
    if null is None or not np.isfinite(null.value).any():
        return 0.0
    return float(np.nanmedian(null.value))


def _paths(sites: list[MapRow], positions: np.ndarray, scale: list[str]) -> dict[str, str]:
    """For each colour the squares of the heads that have it."""
    paths: dict[str, str] = {}
    for row, site in enumerate(sites):
        for head in range(site.heads):
            position = positions[site.first + head]
            if np.isfinite(position):
                colour = colours.mix(scale, round(float(position) * (SHADES - 1)) / (SHADES - 1))
                paths[colour] = paths.get(colour, "") + f"M{head} {row}h1v1h-1z"
    return paths
