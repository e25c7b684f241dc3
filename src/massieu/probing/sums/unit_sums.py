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
        groups: dict[tuple[str, str, bytes], list[tuple[str, SiteSums]]] = {}
        for (scope, site, statistic), sums in self.sums.items():
            groups.setdefault((scope, statistic, sums.rows.tobytes()), []).append((site, sums))
        for number, ((scope, statistic, _), members) in enumerate(groups.items()):
            counts = np.concatenate([sums.counts for _, sums in members], axis=1)
            tensors[f"{number}.totals"] = np.concatenate([sums.totals for _, sums in members], axis=1)
            tensors[f"{number}.counts"] = counts[:, :1].copy() if (counts == counts[:, :1]).all() else counts
            tensors[f"{number}.rows"] = members[0][1].rows
            sites = [[site, sums.totals.shape[1]] for site, sums in members]
            places.append({"scope": scope, "statistic": statistic, "sites": sites})
        said = {"version": VERSION, "text": self.text, "tokenizer": self.tokenizer, "places": places}
        return safetensors.numpy.save(tensors, {"massieu": json.dumps(said)})

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> "UnitSums":
        """What `to_bytes` wrote.

        Raises:
            InputError: it is something else; ``where`` is the file's name.
        """
        try:
            size = int.from_bytes(content[:8], "little")
            said = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["massieu"])
            if said["version"] != VERSION:
                raise InputError(f"{where} has version {said['version']}; this version of massieu reads {VERSION}")
            tensors = safetensors.numpy.load(content)
            return cls(said["text"], said["tokenizer"], dict(_apart(said["places"], tensors)))
        except (safetensors.SafetensorError, ValueError, LookupError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{where} does not hold the sums of a result ({type(error).__name__}: {error})") from error


def _apart(places: list[dict[str, Any]], tensors: dict[str, np.ndarray]) -> Iterator[tuple[Key, SiteSums]]:
    for number, place in enumerate(places):
        totals, counts, rows = (tensors[f"{number}.{part}"] for part in ("totals", "counts", "rows"))
        counts = np.broadcast_to(counts, totals.shape)
        if totals.dtype != np.float64 or not all((part >= 0).all() for part in (counts, rows)):
            raise ValueError(f"the sums of {place['statistic']} are not numbers of their kind")
        if rows.shape != totals.shape[:1] or sum(heads for _, heads in place["sites"]) != totals.shape[1]:
            raise ValueError(f"the sums of {place['statistic']} have other shapes than they should")
        start = 0
        for site, heads in place["sites"]:
            part = slice(start, start := start + heads)
            yield (place["scope"], site, place["statistic"]), SiteSums(totals[:, part], counts[:, part], rows)
