"""The residual stream behind a layer, as numbers that can be added up over batches and processes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from massieu.population import observables
from massieu.probing.model.precision import ONE_POINT_RANK, Cloud, is_one_point

STREAM = ("effective_rank", "spread")


@dataclass(frozen=True)
class StreamNumbers:
    """Sums over the clouds behind one layer, each of which is tokens of one window.

    Attributes:
        totals: of effective rank and of spread, the mean pairwise distance; as `STREAM` names them.
        clouds: how many they are of.
        collapsed: how many of these are one point up to rounding.
        extreme, tokens: how many tokens have an extreme activation, of how many; 0 where that is not asked for.
    """

    totals: tuple[float, float] = (0.0, 0.0)
    clouds: int = 0
    collapsed: int = 0
    extreme: int = 0
    tokens: int = 0

    def __add__(self, other: "StreamNumbers") -> "StreamNumbers":
        return StreamNumbers(
            (self.totals[0] + other.totals[0], self.totals[1] + other.totals[1]),
            self.clouds + other.clouds,
            self.collapsed + other.collapsed,
            self.extreme + other.extreme,
            self.tokens + other.tokens,
        )

    def means(self) -> dict[str, float]:
        """Effective rank and spread, means over the clouds; and ``extreme_activations``, a share of the tokens."""
        values: dict[str, float] = {}
        if self.clouds:
            for name, total in zip(STREAM, self.totals, strict=True):
                values[name] = total / self.clouds
        if self.tokens:
            values["extreme_activations"] = self.extreme / self.tokens
        return values


def stream_numbers(clouds: Sequence[Cloud]) -> StreamNumbers:
    """The sums over some clouds."""
    numbers = StreamNumbers()
    for cloud in clouds:
        points = cloud.points.double().cpu()
        is_collapsed = bool(is_one_point(points, cloud.dtype))
        if is_collapsed:
            rank = ONE_POINT_RANK
        elif bool(points.isfinite().all()):
            rank = float(observables.effective_rank(observables.covariance_spectrum(points)))
        else:
            rank = np.nan
        spread = float(observables.pairwise_distance(points))
        numbers += StreamNumbers((rank, spread), clouds=1, collapsed=int(is_collapsed))
    return numbers
