"""The law of a random head: what one more head that has learned nothing would show, from several draws of random weights.

A trained head is compared with this law, not with the mean of one draw: the error of a mean shrinks with the text, and in a
long text the heads of two random models differ "significantly" from each other. Under the null hypothesis the head is one
more random head, so what decides is a prediction interval.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float64

from massieu.errors import require_extra
from massieu.probing.sums.significance import student_p

Scale = Literal["share", "positive", "number"]
"""On which scale a statistic's numbers are compared: by their logit, by their logarithm, or as they are."""
RESOLUTION = 2.0**-22
"""Relative difference that float32 arithmetic in another order can make."""
FEWEST_FOR_TAILS = 4
UNSEEN_TAILS = 2.0
_TAIL = 0.0125  # the first step of Holm's procedure over four cards at 5 %
_LEAST = 1e-6
_STEPS = 257  # of a search along the way from random heads to a head
_SMALL_SHARE = 1e-6  # of the law's variance, which an error's square may be without being searched for


def scaled(values: Float64[np.ndarray, "*shape"], scale: str) -> Float64[np.ndarray, "*shape"]:
    """The numbers on their scale; shares are kept 1e-6 away from 0 and 1, and positive numbers above 1e-12."""
    if scale == "share":
        inside = np.clip(values, _LEAST, 1 - _LEAST)
        return np.log(inside) - np.log1p(-inside)
    if scale == "positive":
        return np.log(np.maximum(values, _LEAST**2))
    return np.asarray(values, dtype=np.float64)


def unscaled(numbers: Float64[np.ndarray, "*shape"], scale: str) -> Float64[np.ndarray, "*shape"]:
    """The inverse of `scaled`."""
    if scale == "share":
        return 1 / (1 + np.exp(-numbers))
    if scale == "positive":
        return np.exp(numbers)
    return numbers


@dataclass(frozen=True, eq=False)
class RandomHeads:
    """What one more random head would show, on a scale.

    Attributes:
        centre: its mean.
        variances, degrees: the parts of its variance about the estimated mean, each a mean square times its factor, and
            their degrees of freedom.
    """

    centre: Float64[np.ndarray, "*batch"]
    variances: Float64[np.ndarray, "parts *batch"]
    degrees: Float64[np.ndarray, " parts"]

    @classmethod
    def of(cls, numbers: Float64[np.ndarray, "draws clusters heads *batch"]) -> "RandomHeads":
        """From the heads of several random models.

        With D draws of K clusters of G heads (heads that share keys are one cluster) and the mean squares between draws,
        between clusters within a draw and between heads within a cluster, the variance of a new head about the grand mean is

            MS_draws (1 + 1/D)/(K G) + MS_clusters (1 − 1/K)/G + MS_heads (1 − 1/G),

        each part with D − 1, D (K − 1) and D K (G − 1) degrees of freedom. Heads that share nothing are clusters of one;
        a head that is not comparable with the others of its layer, as under ALiBi, is one cluster of one head.

        Source: the analysis of variance of a nested design (Searle, Casella and McCulloch, *Variance Components*, 1992,
        chapter 3), and the prediction of a new observation.

        Raises:
            ValueError: fewer than two draws.
        """
        draws, clusters, heads = numbers.shape[:3]
        if draws < 2:
            raise ValueError(f"the law of random heads needs at least 2 draws, got {draws}")
        cluster_means = numbers.mean(2)
        draw_means = numbers.mean((1, 2))
        centre = draw_means.mean(0)
        # Between draws, between clusters within a draw, between heads within a cluster.
        squares = [
            clusters * heads * ((draw_means - centre) ** 2).sum(0),
            heads * ((cluster_means - draw_means[:, None]) ** 2).sum((0, 1)),
            ((numbers - cluster_means[:, :, None]) ** 2).sum((0, 1, 2)),
        ]
        degrees = np.array([draws - 1, draws * (clusters - 1), draws * clusters * (heads - 1)], dtype=np.float64)
        factors = [(1 + 1 / draws) / (clusters * heads), (1 - 1 / clusters) / heads, 1 - 1 / heads]
        # A part without a degree of freedom has no squares either.
        variances = [
            part_squares * factor / max(part_degrees, 1.0)
            for part_squares, part_degrees, factor in zip(squares, degrees, factors, strict=True)
        ]
        return cls(centre, np.stack(variances), degrees)

    @property
    def deviation(self) -> Float64[np.ndarray, "*batch"]:
        """Standard deviation of one more random head about the centre."""
        return np.sqrt(self.variances.sum(0))

    def share(self, error: Float64[np.ndarray, "*#batch"]) -> Float64[np.ndarray, "*#batch"]:
        """How much of the variance of a head's distance from the centre is that of random heads; the rest is the text's."""
        of_law = self.variances.sum(0)
        total = of_law + np.asarray(error) ** 2
        with np.errstate(invalid="ignore"):
            return np.where(total > 0, of_law / total, 1.0)

    def p_value(
        self,
        value: Float64[np.ndarray, "*#batch"],
        error: Float64[np.ndarray, "*#batch"],
        degrees: Float64[np.ndarray, "*#batch"] | float,
    ) -> Float64[np.ndarray, "*#batch"]:
        """Two-sided p-value of "this head is one more random head", by Student's t with Satterthwaite's degrees of freedom.

        Args:
            value: of the head, on the law's scale.
            error, degrees: its standard error over the text there, and the degrees of freedom of that; with none the
                result is NaN.

        Source: Satterthwaite, "An approximate distribution of estimates of variance components" (Biometrics Bulletin 2,
            110, 1946).
        """
        of_text = np.asarray(error) ** 2
        degrees_of_text = np.where(np.asarray(degrees) > 0, degrees, np.nan)
        total = self.variances.sum(0) + of_text
        # (parts, 1, …), to divide the parts of every entry.
        degrees_of_parts = np.maximum(self.degrees, 1.0).reshape(-1, *(1,) * np.ndim(self.centre))
        divisor = (self.variances**2 / degrees_of_parts).sum(0) + of_text**2 / degrees_of_text
        with np.errstate(divide="ignore", invalid="ignore"):
            degrees_of_total = np.where(total > 0, total**2 / divisor, degrees_of_text)
        return student_p(value - self.centre, np.sqrt(total), np.nan_to_num(degrees_of_total))


def scaled_error(
    values: Float64[np.ndarray, "*shape"], errors: Float64[np.ndarray, "*shape"], law: RandomHeads, scale: str
) -> Float64[np.ndarray, "*shape"]:
    """Standard errors over the text on the law's scale, with what rounding alone can make.

    A scale g is steep at its ends: with the slope at a weight of 0.99999, an error of 1e-6 would span the whole distance to
    heads of weight 0.2. So the way from the law's centre c to the number x is divided at the place that makes it least
    surprising. The law explains the part up to there, and the error s over the text the rest,

        z² = min over y of (g(y) − c)²/V + (x − y)²/s²,

    and the error e on the scale is the one that gives the same, (g(x) − c)²/(V + e²) = z². Where random heads do not differ,
    this is the distance of the numbers themselves over s; where the error is small it is s times the slope at x.

    Args:
        values, errors: as they are, not scaled.
    """
    if scale == "number":
        return np.hypot(errors, RESOLUTION * np.abs(values))
    inside = unscaled(scaled(values, scale), scale)  # kept away from the ends of the scale
    rounded_errors = np.hypot(errors, RESOLUTION * inside)  # s
    # The derivative of the logit is 1/(x (1 − x)), that of the logarithm 1/x.
    by_slope = np.array(rounded_errors / (inside * (1 - inside) if scale == "share" else inside))
    variances = np.broadcast_to(law.variances.sum(0), by_slope.shape)
    # An error far below the law's deviation reaches nowhere near the centre, and one slope is the scale's all along its way.
    reaches_far = by_slope**2 > _SMALL_SHARE * variances
    if reaches_far.any():
        parts = (inside, rounded_errors, by_slope, law.centre, variances)
        searched = np.stack([np.broadcast_to(part, by_slope.shape)[reaches_far] for part in parts])
        by_slope[reaches_far] = _along_the_way(searched, scale)
    return by_slope


def _along_the_way(searched: Float64[np.ndarray, "5 n"], scale: str) -> Float64[np.ndarray, " n"]:
    """The errors e of `scaled_error`, by trying places along the way.

    Args:
        searched: numbers x, their errors s, these by the slope at x, centres c and variances V.
    """
    inside, errors, by_slope, centre, variance = searched
    distance = scaled(inside, scale) - centre
    # Places y along the way: (steps, 1), as shares of the distance.
    part = np.linspace(0.0, 1.0, _STEPS)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        of_law = np.where(part > 0, (part * distance) ** 2 / variance, 0.0)
        of_text = ((inside - unscaled(centre + part * distance, scale)) / errors) ** 2
        least = (of_law + of_text).min(0)  # z²
        # So near to the centre, both slopes are one, and the distances have lost their digits.
        is_near = (distance == 0) | (least < 1e-6)
        by_least = np.sqrt(np.maximum(distance**2 / least - variance, 0.0))
        return np.where(is_near, by_slope, by_least)


def each_against_the_others(
    numbers: Float64[np.ndarray, "draws clusters heads *batch"],
    errors: Float64[np.ndarray, "draws clusters heads *batch"],
) -> Float64[np.ndarray, "draws clusters heads *batch"]:
    """The p-values that the heads of each draw have against the other draws: those of heads that have learned nothing."""
    # (draws − 1, clusters, heads, draws, *batch): which draw is left out is a batch of laws.
    draws = range(len(numbers))
    others = [[other for other in draws if other != draw] for draw in draws]
    other_draws = np.ascontiguousarray(np.moveaxis(numbers[others], 0, 3))
    law = RandomHeads.of(other_draws)
    # (clusters, heads, draws, *batch), as the laws broadcast.
    p_values = law.p_value(np.moveaxis(numbers, 0, 2), np.moveaxis(errors, 0, 2), 1.0)
    return np.moveaxis(p_values, 2, 0)


def tail_factor(p_values: Float64[np.ndarray, "draws tests"]) -> float:
    """By how much the law of random heads has heavier tails than the normal one, at the level of the largest of all heads.

    Of each draw the smallest p-value of its heads against the other draws, adjusted for their number, becomes a normal
    score: were the law normal, these scores would be too. Their mean and deviation predict, by Student's t with D − 1
    degrees of freedom, what the score of one more random model exceeds with probability 0.0125. The factor is how much
    farther out that is than it would be without heavy tails, and at least 1. The surprises of the trained model's heads
    are divided by it.

    With fewer than four draws the tails cannot be seen, and the factor is 2.
    """
    special = require_extra("scipy.special", "probe")
    draws, tests = p_values.shape
    if draws < FEWEST_FOR_TAILS:
        return UNSEEN_TAILS
    # The smallest of n independent p-values is at most p with probability 1 − (1 − p)ⁿ.
    with np.errstate(divide="ignore"):
        smallest = -np.expm1(tests * np.log1p(-p_values.min(1)))
    scores = -special.ndtri(np.clip(smallest, 1e-300, 1 - 1e-15))
    deviation = scores.std(ddof=1) * np.sqrt(1 + 1 / draws)  # of one more draw
    highest_score = scores.mean() + special.stdtrit(draws - 1, 1 - _TAIL) * deviation
    reached = surprise(np.array(special.ndtr(-highest_score) / tests))
    reached_without_tails = surprise(np.array(_TAIL / tests))
    return max(1.0, float(reached / reached_without_tails))


def surprise(p_values: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """How many standard deviations of a normal law a two-sided p-value stands for."""
    return -require_extra("scipy.special", "probe").ndtri(np.maximum(p_values, 1e-300) / 2)


def with_tails(
    p_values: Float64[np.ndarray, "*shape"], factor: float, share: Float64[np.ndarray, "*#shape"] | float = 1.0
) -> Float64[np.ndarray, "*shape"]:
    """P-values under a law whose tails reach so many times farther than the normal one's.

    Args:
        share: of the variance that is the law's, as `RandomHeads.share` has it. The rest is the error over the text, whose
            tails Student's law knows.
    """
    widening = np.sqrt(factor**2 * share + 1 - share)
    return 2 * require_extra("scipy.special", "probe").ndtr(-surprise(p_values) / widening)
