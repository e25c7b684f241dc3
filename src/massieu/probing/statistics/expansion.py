"""Does a step along the residual stream move a window's tokens apart or together? (claim S12, experiment E3)"""

from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.population.observables import covariance_spectrum, effective_rank, log_determinant, pairwise_distance
from massieu.probing.accumulate import Ratio, Units
from massieu.probing.wiring import Step

LEVELS = ("pairwise_distance", "log_determinant", "effective_rank")
_BEFORE, _AFTER, _CHANGE = 0, 1, 2
CHANGES = ("pairwise_distance_log_ratio", "log_determinant_change", "effective_rank_change")
FEWEST = 8  # tokens; fewer say nothing about a covariance


def distinct_positions(
    tokens: Int[Tensor, " L"] | None, real: Tensor, most: int, generator: torch.Generator
) -> Int[Tensor, " S"]:
    """Up to ``most`` random real positions of one sequence, no two with the same token.

    Two equal tokens start as the same point in models without position vectors, and a covariance would be singular.
    """
    places = real.nonzero()[:, 0]
    places = places[torch.randperm(len(places), generator=generator).to(places.device)]
    if tokens is not None:
        seen: dict[int, int] = {}
        for place in places.tolist():
            seen.setdefault(int(tokens[place]), place)
        places = torch.tensor(list(seen.values()), dtype=torch.long, device=real.device)
    return places[:most].sort().values


class ExpansionStatistics:
    """Running results along the depth: for each sublayer the cloud's levels before and after, and their change."""

    def __init__(self, units: Units) -> None:
        self.units = units
        self.sublayers: dict[int, Ratio] = {}
        self._last: dict[int, tuple[int, Float[Tensor, " 3"]]] = {}

    def update(self, step: Step, row: int, positions: Int[Tensor, " S"]) -> None:
        """Add one window (item ``row`` of the batch) at one step."""
        ratio = self.sublayers.setdefault(step.sublayer.index, Ratio((len(LEVELS), 3), self.units))
        if len(positions) < FEWEST:
            ratio.update(np.zeros((1, len(LEVELS), 3)), np.zeros((1, 1, 1)))
            return
        before = self._levels(step.before, row, positions)
        after = self._levels(step.after, row, positions)
        change = after - before
        change[0] = torch.log(after[0] / before[0])
        values = torch.stack([before, after, change], dim=1)[None]
        finite = values.isfinite()
        ratio.update(torch.where(finite, values, 0.0), finite.double())

    def _levels(self, points: Tensor, row: int, positions: Tensor) -> Float[Tensor, " 3"]:
        """Distance, log-determinant and effective rank; each row's latest result is kept, since steps share points."""
        if row in self._last and self._last[row][0] == points.data_ptr():
            return self._last[row][1]
        cloud = points[row, positions].cpu()
        spectrum = covariance_spectrum(cloud)
        levels = torch.stack([pairwise_distance(cloud), log_determinant(spectrum), effective_rank(spectrum)])
        self._last[row] = (points.data_ptr(), levels)
        return levels

    def forget(self) -> None:
        """To be called after each forward pass: the memory of the last point is then reused by other tensors."""
        self._last.clear()

    def results(
        self, sublayer: int, part: Literal["estimate", "first_half", "second_half"] = "estimate"
    ) -> list[tuple[str, float, float, float]]:
        """Name, value, standard error and count of every row of the table for a sublayer, from all or half the text."""
        found = getattr(self.sublayers[sublayer], part)()
        rows = []
        for index, (level, change) in enumerate(zip(LEVELS, CHANGES, strict=True)):
            for name, which in ((f"{level}/before", _BEFORE), (f"{level}/after", _AFTER), (change, _CHANGE)):
                cell = (found.value[index, which], found.standard_error[index, which], found.count[index, which])
                rows.append((name, *map(float, cell)))
        return rows
