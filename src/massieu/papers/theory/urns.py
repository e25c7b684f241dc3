"""De Finetti's theorem with finitely many tokens (Z1)."""

import itertools
import math
from collections.abc import Iterator, Sequence

from massieu.foundation.arguments import whole_number
from massieu.foundation.doors import count, door, sequence

_MOST_OUTCOMES = 1_000_000


@door(k=count, n=count)
def finite_extension_bound(k: int, n: int) -> float:
    """Bound k(k − 1)/(2n) on the total variation between k of n exchangeable tokens and a mixture of independent ones (Z1).

    Total variation is sup |P − Q| over events. With n = ∞ the law is a mixture (de Finetti); with n = k nothing is said:
    two draws without replacement from {0, 1} have covariance −¼, which no mixture has.

    Raises:
        ValueError: k is not between 1 and n.

    Example:
        >>> from massieu.papers.theory import finite_extension_bound
        >>> finite_extension_bound(2, 10)
        0.1
    """
    _check_sizes(k, n)
    return k * (k - 1) / (2 * n)


@door(counts=sequence, k=count)
def urn_total_variation(counts: Sequence[int], k: int) -> float:
    """Exact total variation between k draws without and with replacement from an urn of coloured balls.

    Both laws are exchangeable, so that it is the distance of the laws of the counts: every composition of k is visited. An
    urn of n different balls, ``[1] * n``, has the largest, 1 − n!/((n − k)! nᵏ), and needs no visits.

    Raises:
        ValueError: a negative count, k not between 1 and the number of balls, more compositions than a million.
        TypeError: counts that are not whole numbers.

    Example:
        >>> from massieu.papers.theory import urn_total_variation
        >>> round(urn_total_variation([1, 1], k=2), 3)  # two balls: with replacement half of the draws agree
        0.5
    """
    balls = [count for count in counts if whole_number("each of counts", count, least=0)]
    total = sum(balls)
    _check_sizes(k, total)
    if len(balls) == total:
        # 1 − n!/((n − k)! nᵏ), a product of the factors 1 − i/n, without cancellation.
        return -math.expm1(sum(math.log1p(-num_drawn / total) for num_drawn in range(k)))
    num_outcomes = math.comb(k + len(balls) - 1, k)
    if num_outcomes > _MOST_OUTCOMES:
        raise ValueError(f"the urn has {num_outcomes} outcomes, more than the {_MOST_OUTCOMES} that are visited")
    distance = 0.0
    for draws in _compositions(k, len(balls)):
        # Whole numbers, divided once: each factor of a probability can be beyond floating point.
        sets = math.prod(math.comb(count, num) for count, num in zip(balls, draws, strict=True))
        without_replacement = sets / math.comb(total, k)
        orders = math.factorial(k) // math.prod(math.factorial(num) for num in draws)
        sequences = orders * math.prod(count**num for count, num in zip(balls, draws, strict=True))
        with_replacement = sequences / total**k
        distance += abs(without_replacement - with_replacement)
    return 0.5 * distance


def _compositions(total: int, parts: int) -> Iterator[list[int]]:
    """All lists of this number of parts, at least 0, with this sum."""
    # Bars among stars: the parts are the gaps between the bars.
    length = total + parts - 1
    for bars in itertools.combinations(range(length), parts - 1):
        yield [right - left - 1 for left, right in itertools.pairwise((-1, *bars, length))]


def _check_sizes(k: int, n: int) -> None:
    whole_number("k", k)
    whole_number("n", n)
    if not 1 <= k <= n:
        raise ValueError(f"k must lie between 1 and n = {n}, got {k}")
