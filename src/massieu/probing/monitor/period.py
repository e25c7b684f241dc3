"""How often a monitor measures: at fixed steps, or as often as a share of training's time allows."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

BUDGET = 0.01
"""The share of training's time that records may take."""
FIRST = 100
"""Steps between the first two records, before it is known what they cost."""
LONGEST = 1000
"""A longer period is not chosen, whatever a record costs."""
REMEMBERED = 3
"""Records whose cost is known; the median of theirs counts, so that one that was held up does not."""
_ROUND = (1, 2, 5)


@dataclass(frozen=True)
class ToldPeriod:
    """What a process, or all of them together, say of the period when a record is made.

    Attributes:
        every: steps until the next record.
        share: of all time that records take; None where it is not known, or nothing follows from it.
    """

    every: int
    share: float | None = None

    def numbers(self) -> dict[str, float]:
        """For the record, where the budget decides."""
        return {} if self.share is None else {"monitor_every": float(self.every), "monitor_share": self.share}


def together(parts: Sequence[ToldPeriod]) -> ToldPeriod:
    """What several processes agree on: the longest period, so that none is above its budget."""
    shares = [part.share for part in parts if part.share is not None]
    return ToldPeriod(max(part.every for part in parts), max(shares, default=None))


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

    def __init__(
        self, every: int | None, budget: float = BUDGET, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.fixed, self.budget, self.every = every is not None, budget, FIRST if every is None else every
        self._clock = clock
        self._costs: deque[float] = deque(maxlen=REMEMBERED)
        self._steps: list[float] = []
        self._usual: deque[float] = deque(maxlen=10 * REMEMBERED)
        self._watched = False
        self._last: tuple[int, float] | None = None

    def is_due(self, step: int) -> bool:
        """Whether the step is one to measure at."""
        return step % self.every == 0

    def arrived(self, step: int) -> None:
        """Training has come to this step."""
        if self.fixed:
            return
        now = self._clock()
        if self._last is not None and step > self._last[0]:
            self._took((now - self._last[1]) / (step - self._last[0]), step - self._last[0])
        self._last = step, now

    def _took(self, seconds: float, steps: int) -> None:
        """So many steps took so long each; if the first of them was watched, what it took more is the record's cost."""
        watched, self._watched = self._watched, False
        if not watched:
            self._steps.append(seconds)
            self._usual.append(seconds)
        elif self._usual:
            self._costs.append(max(seconds - median(self._usual), 0.0) * steps)

    def measured(self, step: int, seconds: float) -> None:
        """A record was made, which took so long, and training goes on."""
        self._costs.append(seconds)
        self._steps.clear()
        self._last = step, self._clock()

    def watched(self) -> None:
        """The step that is under way was measured in its own forward pass."""
        self._steps.clear()
        self._watched = True

    def told(self) -> ToldPeriod:
        """What this process says when it makes a record."""
        return ToldPeriod(self.proposal(), None if self.fixed else self.share)

    def agree(self, told: ToldPeriod) -> None:
        """All processes go on with one period."""
        self.every = told.every

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
        least, calm = self.needed(seconds), self.needed(seconds / 2)
        return least if least > self.every else min(self.every, calm)

    def needed(self, seconds: float) -> int:
        """The shortest period within the budget for training steps of so many seconds, and the records so far."""
        return _rounded_up(median(self._costs) * (1 / self.budget - 1) / max(seconds, 1e-9))


def _rounded_up(period: float) -> int:
    """To 1, 2 or 5 times a power of ten, at most `LONGEST`."""
    if period >= LONGEST:
        return LONGEST
    power = 10 ** max(math.floor(math.log10(max(period, 1))), 0)
    return next(factor * power for factor in (*_ROUND, 10) if factor * power >= period)
