"""The numbers of heads in a monitor's record, and whose they are."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from massieu.probing.monitor.quantities import LARGEST
from massieu.probing.monitor.site_numbers import SiteNumbers

_WITH_MAXIMA = "selective_log_partition"
"""Of this quantity ``_max`` is over all queries, and not over the means of heads."""


@dataclass(frozen=True)
class _HeadNumber:
    """One quantity of one head."""

    site: SiteNumbers
    head: int
    value: float

    @property
    def place(self) -> str:
        return f"{self.site.place}/head{self.head}"


def head_values(sites: Sequence[SiteNumbers], quantities: Iterable[str], per_head: bool) -> dict[str, float]:
    """Mean, least and largest over the heads of each site, and then over those of the model.

    Args:
        per_head: also each head's own number.
    """
    values: dict[str, float] = {}
    for site in sites:
        for name in site.names:
            if not site.has(name):
                continue
            values |= _over_heads(f"{site.place}/{name}", name, [site])
            if per_head:
                values |= {f"{number.place}/{name}": number.value for number in _numbers_of_heads([site], name)}
    for name in quantities:
        having = [site for site in sites if site.has(name)]
        if having:
            values |= _over_heads(name, name, having)
    return values


def _over_heads(key: str, name: str, sites: Sequence[SiteNumbers]) -> dict[str, float]:
    values = np.concatenate([site.values(name) for site in sites])
    largest = np.concatenate([site.maxima(name) for site in sites]) if name == _WITH_MAXIMA else values
    return {f"{key}_mean": float(values.mean()), f"{key}_min": float(values.min()), f"{key}_max": float(largest.max())}


def extreme_entropies(sites: Sequence[SiteNumbers], number_of_heads: int) -> dict[str, float]:
    """The entropies of so many least and so many most entropic heads, by name."""
    if not number_of_heads:
        return {}
    numbers = [(number.value, f"{number.place}/entropy") for number in _numbers_of_heads(sites, "entropy")]
    ordered = sorted(entry for entry in numbers if not math.isnan(entry[0]))
    return {name: value for value, name in (*ordered[:number_of_heads], *ordered[-number_of_heads:])}


def place_of_largest_logit(sites: Sequence[SiteNumbers]) -> dict[str, float]:
    """Layer and head of the largest logit, as numbers; of the first NaN, where there is one."""
    numbers = _numbers_of_heads(sites, LARGEST)
    if not numbers:
        return {}
    largest = max(numbers, key=lambda number: _or_infinity(number.value))
    return {"largest_logit_layer": float(largest.site.layer), "largest_logit_head": float(largest.head)}


def heads_of_extremes(sites: Sequence[SiteNumbers]) -> dict[str, str]:
    """The heads of the largest logit and of the least entropy, by name; the first whose number is NaN, where there is one."""
    heads: dict[str, str] = {}
    logits = _numbers_of_heads(sites, LARGEST)
    if logits:
        heads["largest_logit_max"] = max(logits, key=lambda number: _or_infinity(number.value)).place
    entropies = _numbers_of_heads(sites, "entropy")
    if entropies:
        heads["entropy_min"] = max(entropies, key=lambda number: _or_infinity(-number.value)).place
    return heads


def largest_logits_by_module(sites: Sequence[SiteNumbers]) -> dict[str, Tensor]:
    """The largest logit of each head of an attention module, over all its sites."""
    largest: dict[str, Tensor] = {}
    for site in sites:
        if not site.has(LARGEST):
            continue
        values = torch.from_numpy(site.values(LARGEST))
        before = largest.get(site.module)
        largest[site.module] = values if before is None else torch.maximum(before, values)
    return largest


def _numbers_of_heads(sites: Iterable[SiteNumbers], name: str) -> list[_HeadNumber]:
    """A quantity of all heads of the sites that have it."""
    return [
        _HeadNumber(site, head, float(value))
        for site in sites
        if site.has(name)
        for head, value in enumerate(site.values(name))
    ]


def _or_infinity(value: float) -> float:
    return math.inf if math.isnan(value) else value
