"""How often a monitor measures: at fixed steps, or as often as a share of training's time allows."""

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median

FIRST = 10
"""Steps between the first two records, before it is known what they cost."""
LONGEST = 1000
"""A longer period is not chosen, whatever a record costs."""
REMEMBERED = 3
"""Records whose cost is known; the median of theirs counts, so that one that was held up does not."""
_ROUND = (1, 2, 5)


class Period:
    """The steps at which a monitor measures: the multiples of `every`.

    With a budget, `every` is the smallest of 1, 2, 5, 10, 20, 50, … for which the time of a record is at most that share of
    the time between two. It grows as soon as it is too small. It shrinks only to twice what is needed, so that it does not go
    to and fro. Several processes agree on the largest that one of them proposes.

    Args:
        every: fixed; None where the budget decides.
        budget: The share of training's time that records may take.
        clock: seconds.
    """

    def __init__(self, every: int | None, budget: float = 0.01, clock: Callable[[], float] = time.perf_counter) -> None:
        self.fixed, self.budget, self.every = every is not None, budget, FIRST if every is None else every
        self._clock = clock
        self._costs: deque[float] = deque(maxlen=REMEMBERED)
        self._steps: list[float] = []
        self._last: tuple[int, float] | None = None

    def is_due(self, step: int) -> bool:
        """Whether the step is one to measure at."""
        return step % self.every == 0

    def arrived(self, step: int) -> None:
        """Training has come to this step."""
        if self._last is not None and step > self._last[0]:
            self._steps.append((self._clock() - self._last[1]) / (step - self._last[0]))
        self._last = step, self._clock()

    def measured(self, step: int, seconds: float) -> None:
        """A record was made, which took so long, and training goes on."""
        self._costs.append(seconds)
        self._steps.clear()
        self._last = step, self._clock()

    @property
    def seconds_a_step(self) -> float | None:
        """Of training, since the last record; without the longest step, in which something may have been compiled."""
        if not self._steps:
            return None
        counted = sorted(self._steps)[:-1] or self._steps
        return sum(counted) / len(counted)

    @property
    def share(self) -> float | None:
        """The share of all time that records take; None before it is known."""
        seconds = self.seconds_a_step
        if seconds is None or not self._costs:
            return None
        cost = median(self._costs)
        return cost / (cost + self.every * seconds)

    def proposal(self) -> int:
        """The period that this process's times ask for."""
        seconds = self.seconds_a_step
        if self.fixed or seconds is None or not self._costs:
            return self.every
        needed = median(self._costs) * (1 / self.budget - 1) / max(seconds, 1e-9)
        least, calm = _rounded_up(needed), _rounded_up(2 * needed)
        return least if least > self.every else min(self.every, calm)


def _rounded_up(period: float) -> int:
    """To 1, 2 or 5 times a power of ten, at most `LONGEST`."""
    if period >= LONGEST:
        return LONGEST
    power = 10 ** max(math.floor(math.log10(max(period, 1))), 0)
    return next(factor * power for factor in (*_ROUND, 10) if factor * power >= period)
