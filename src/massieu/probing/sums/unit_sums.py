"""Sums over each error unit, kept with a result: what pairs it with another result of the same text."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from jaxtyping import Float64, Int64

from massieu.errors import InputError

VERSION = "1"
Key = tuple[str, str, str]
"""Scope ("head" or "layer"), site (or sublayer), statistic."""


@dataclass(frozen=True, eq=False)
class SiteSums:
    """Of one statistic at one site: the sums of its values and their counts, unit by unit.

    A unit is a block of consecutive rows of the text; ``rows`` says how many are in each. Of a sublayer there is one
    column in the place of the heads.
    """

    totals: Float64[np.ndarray, "units heads"]
    counts: Float64[np.ndarray, "units heads"]
    rows: Int64[np.ndarray, " units"]


@dataclass(frozen=True, eq=False)
class UnitSums:
    """The sums of every statistic that is a mean over the text, and which text that was.

    Attributes:
        text: Digest of what was read, row by row in its order; None where a batch held something that has no digest.
        tokenizer: Digest of the vocabulary; None where there was no tokenizer.
        sums: By scope, site and statistic.
    """

    text: str | None
    tokenizer: str | None
    sums: Mapping[Key, SiteSums] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """As a file of safetensors; sites with the same units lie in one array."""
        tensors: dict[str, np.ndarray] = {}
        places: list[dict[str, Any]] = []
        for number, ((scope, statistic, _), sums_of_sites) in enumerate(self._by_units().items()):
            of_all_sites = list(sums_of_sites.values())
            counts = np.concatenate([sums.counts for sums in of_all_sites], axis=1)
            # Most statistics count the same entries in all heads: one column then says it.
            if (counts == counts[:, :1]).all():
                counts = counts[:, :1].copy()
            tensors[f"{number}.totals"] = np.concatenate([sums.totals for sums in of_all_sites], axis=1)
            tensors[f"{number}.counts"] = counts
            tensors[f"{number}.rows"] = of_all_sites[0].rows
            sites = [[site, sums.totals.shape[1]] for site, sums in sums_of_sites.items()]
            places.append({"scope": scope, "statistic": statistic, "sites": sites})
        header = {"version": VERSION, "text": self.text, "tokenizer": self.tokenizer, "places": places}
        return safetensors.numpy.save(tensors, {"massieu": json.dumps(header)})

    def _by_units(self) -> dict[tuple[str, str, bytes], dict[str, SiteSums]]:
        """The sums of sites that have the same units, by scope, statistic and the units' rows."""
        groups: dict[tuple[str, str, bytes], dict[str, SiteSums]] = {}
        for (scope, site, statistic), sums in self.sums.items():
            groups.setdefault((scope, statistic, sums.rows.tobytes()), {})[site] = sums
        return groups

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> "UnitSums":
        """What `to_bytes` wrote.

        Raises:
            InputError: it is something else; ``where`` is the file's name.
        """
        try:
            header = _header(content)
            if header["version"] != VERSION:
                raise InputError(f"{where} has version {header['version']}; this version of massieu reads {VERSION}")
            tensors = safetensors.numpy.load(content)
            return cls(header["text"], header["tokenizer"], dict(_by_site(header["places"], tensors)))
        except InputError:
            raise
        except (safetensors.SafetensorError, ValueError, LookupError, TypeError) as error:
            raise InputError(f"{where} does not hold the sums of a result ({type(error).__name__}: {error})") from error


def _header(content: bytes) -> dict[str, Any]:
    """The entry of a safetensors file that `UnitSums.to_bytes` has written beside the arrays."""
    size = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + size])["__metadata__"]
    return json.loads(metadata["massieu"])


def _by_site(places: list[dict[str, Any]], tensors: dict[str, np.ndarray]) -> Iterator[tuple[Key, SiteSums]]:
    """The arrays of all sites together, cut into those of each.

    Raises:
        ValueError: they are not the sums of these places.
    """
    for number, place in enumerate(places):
        totals = tensors[f"{number}.totals"]
        counts = tensors[f"{number}.counts"]
        rows = tensors[f"{number}.rows"]
        counts = np.broadcast_to(counts, totals.shape)
        if totals.dtype != np.float64 or not (counts >= 0).all() or not (rows >= 0).all():
            raise ValueError(f"the sums of {place['statistic']} are not numbers of their kind")
        if rows.shape != totals.shape[:1] or sum(heads for _, heads in place["sites"]) != totals.shape[1]:
            raise ValueError(f"the sums of {place['statistic']} have other shapes than they should")
        start = 0
        for site, heads in place["sites"]:
            columns = slice(start, start + heads)
            yield (place["scope"], site, place["statistic"]), SiteSums(totals[:, columns], counts[:, columns], rows)
            start += heads
