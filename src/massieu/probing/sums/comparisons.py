"""What heads and sublayers are compared with: their own control, and the law of random models; p-values of both."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Float64

from massieu.probing.sums.random_heads import (
    RandomHeads,
    each_against_the_others,
    scaled,
    scaled_error,
    tail_factor,
    with_tails,
)
from massieu.probing.sums.units import Estimate
from massieu.storage.record import Statistic

AT_ONCE = 1 << 11
"""Numbers of draws that are compared at once. If all errors are searched for, 257 places of each take 4 MiB."""


class RandomModels(Protocol):
    """What several random models have shown, as `massieu.probing.session.draws` keeps it."""

    def of_head(self, site: str, statistic: str) -> Float64[np.ndarray, "draws heads"] | None:
        """The numbers of a site's heads; None where fewer than two models have any."""
        ...

    def of_layer(self, sublayer: str, statistic: str) -> Float64[np.ndarray, "draws 1"] | None:
        """The numbers of a sublayer; None where fewer than two models have any."""
        ...


@dataclass(frozen=True)
class Arrangement:
    """Which heads of a layer may be exchanged for each other.

    Attributes:
        clusters: sets of heads that share keys, all of one size, in the order of the heads.
        alone: each head is compared with itself alone, since the heads' log-weights differ.
    """

    clusters: int
    alone: bool = False

    def of(
        self, numbers: Float64[np.ndarray, "draws heads *batch"]
    ) -> Float64[np.ndarray, "draws clusters group *batch"]:
        """The heads' numbers in the form that `RandomHeads` takes."""
        if self.alone:
            # One cluster of one head; the heads stand behind it as a batch of their own laws.
            return numbers[:, None, None]
        draws, heads, *batch = numbers.shape
        return numbers.reshape(draws, self.clusters, heads // self.clusters, *batch)


@dataclass(frozen=True, eq=False)
class BesideRandom:
    """The heads of one site (or one sublayer) beside random ones.

    Attributes:
        p_value: of each head; NaN where it was not counted in units of text enough.
        share: of the variance behind it that is the random heads'; the rest is the error over the text.
        others: p-values of each draw's heads against the other draws, which have learned nothing; None of two draws.
        centre, deviation: mean and standard deviation of one more random head's number.
    """

    p_value: Float64[np.ndarray, " heads"]
    share: Float64[np.ndarray, " heads"]
    others: Float64[np.ndarray, "draws heads"] | None
    centre: Float64[np.ndarray, " heads"]
    deviation: Float64[np.ndarray, " heads"]

    @classmethod
    def of(
        cls,
        own: Sequence[Estimate],
        draws: Sequence[Float64[np.ndarray, "draws heads"]],
        statistic: Statistic,
        arrangement: Arrangement,
    ) -> list["BesideRandom"]:
        """The model's numbers beside those of the draws, on the statistic's scale, site by site.

        Args:
            own, draws: of each site; all sites have as many heads, draws and clusters, and are computed together.
        """
        sites_at_once = max(1, AT_ONCE // draws[0].size)
        parts = (slice(start, start + sites_at_once) for start in range(0, len(own), sites_at_once))
        return [site for part in parts for site in cls._at_once(own[part], draws[part], statistic, arrangement)]

    @classmethod
    def _at_once(
        cls,
        own: Sequence[Estimate],
        draws: Sequence[Float64[np.ndarray, "draws heads"]],
        statistic: Statistic,
        arrangement: Arrangement,
    ) -> Iterator["BesideRandom"]:
        scale = statistic.scale
        # (draws, heads, sites), and (heads, sites) for the model's own: the sites are a batch of laws.
        of_draws = np.stack(draws, -1)
        values, errors, degrees = (
            np.stack([np.broadcast_to(getattr(site, name), len(of_draws[0])) for site in own], -1)
            for name in ("value", "standard_error", "degrees")
        )
        numbers = scaled(of_draws, scale)
        law = RandomHeads.of(arrangement.of(numbers))
        error = scaled_error(values, errors, law, scale)
        others = None
        if len(of_draws) > 2:
            rounding = scaled_error(of_draws, np.zeros_like(of_draws), law, scale)
            others = each_against_the_others(arrangement.of(numbers), arrangement.of(rounding)).reshape(of_draws.shape)
        # The table shows mean and deviation as they are, not on the scale on which heads are compared.
        raw_law = RandomHeads.of(arrangement.of(of_draws))
        p_value = law.p_value(scaled(values, scale), error, degrees)
        share = law.share(error)
        centre = np.broadcast_to(raw_law.centre, values.shape)
        deviation = np.broadcast_to(raw_law.deviation, values.shape)
        for site in range(len(own)):
            yield cls(
                p_value=p_value[:, site],
                share=share[:, site],
                others=None if others is None else others[..., site],
                centre=centre[:, site],
                deviation=deviation[:, site],
            )


def with_their_tails(family: Sequence[BesideRandom]) -> list[Float64[np.ndarray, " heads"]]:
    """The p-values of all heads of one statistic, under a law whose tails are as heavy as those of the draws."""
    draw_p_values = [site.others for site in family if site.others is not None]
    # Only draws that all sites have: one that lacks a site's heads would have a smaller maximum for want of heads.
    draws = min(map(len, draw_p_values), default=2)
    if draw_p_values:
        of_all_sites = np.concatenate([p_values[:draws] for p_values in draw_p_values], 1)
    else:
        of_all_sites = np.ones((draws, 1))
    factor = tail_factor(of_all_sites)
    return [with_tails(site.p_value, factor, site.share) for site in family]


def both(
    value: Float64[np.ndarray, " heads"],
    nulls: Sequence[tuple[Float64[np.ndarray, " heads"], Float64[np.ndarray, " heads"]]],
) -> Float64[np.ndarray, " heads"]:
    """The p-value of differing from every null, in the same direction: the largest, or 1 where the directions differ.

    Args:
        nulls: of each its mean and the p-value against it; where one is NaN the result is NaN.
    """
    signs = np.stack([np.sign(value - centre) for centre, _ in nulls])
    p_values = np.stack([p for _, p in nulls])
    same_direction = (signs == signs[0]).all(0)
    # A NaN among the p-values is their maximum, and must not be hidden by the 1.
    undefined = np.isnan(p_values).any(0)
    return np.where(same_direction | undefined, p_values.max(0), 1.0)
