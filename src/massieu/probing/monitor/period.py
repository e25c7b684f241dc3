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
_ROUND = (1, 2, 5, 10)
"""A period is one of these times a power of ten."""


@dataclass(frozen=True)
class PeriodProposal:
    """The period that a process proposes when a record is made, or on which all of them agree.

    Attributes:
        every: steps until the next record.
        share: of all time that records take; None where it is not known, or nothing follows from it.
    """

    every: int
    share: float | None = None

    def numbers(self) -> dict[str, float]:
        """For the record, where the budget decides."""
        if self.share is None:
            return {}
        return {"monitor_every": float(self.every), "monitor_share": self.share}


def agreed(proposals: Sequence[PeriodProposal]) -> PeriodProposal:
    """On what several processes agree: the longest period, so that none is above its budget."""
    shares = [proposal.share for proposal in proposals if proposal.share is not None]
    return PeriodProposal(max(proposal.every for proposal in proposals), max(shares, default=None))


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
        self.fixed = every is not None
        self.every = FIRST if every is None else every
        self.budget = budget
        self._clock = clock
        self._costs: deque[float] = deque(maxlen=REMEMBERED)  # seconds of the latest records
        # Seconds of training steps: since the last record, and of the latest whether there was a record between or not.
        self._step_times: list[float] = []
        self._recent_step_times: deque[float] = deque(maxlen=10 * REMEMBERED)
        self._watched = False  # whether the step under way holds a record
        self._last_step: int | None = None
        self._last_time = 0.0  # at which that step began, or its record was made

    def is_due(self, step: int) -> bool:
        """Whether the step is one to measure at."""
        return step % self.every == 0

    def arrive(self, step: int) -> None:
        """Training has come to this step."""
        if self.fixed:
            return
        now = self._clock()
        if self._last_step is not None and step > self._last_step:
            steps = step - self._last_step
            self._add_steps(steps, (now - self._last_time) / steps)
        self._last_step = step
        self._last_time = now

    def _add_steps(self, steps: int, seconds: float) -> None:
        """So many steps took so long each; if the first of them was watched, what it took more is the record's cost."""
        if not self._watched:
            self._step_times.append(seconds)
            self._recent_step_times.append(seconds)
        elif self._recent_step_times:
            self._costs.append(max(seconds - median(self._recent_step_times), 0.0) * steps)
        self._watched = False

    def add_record(self, step: int, seconds: float) -> None:
        """A record was made, which took so long, and training goes on."""
        self._costs.append(seconds)
        self._step_times.clear()
        self._last_step = step
        self._last_time = self._clock()

    def add_watched_record(self) -> None:
        """The step that is under way was measured in its own forward pass."""
        self._step_times.clear()
        self._watched = True

    def proposal(self) -> PeriodProposal:
        """What this process proposes when it makes a record."""
        return PeriodProposal(self.affordable(), None if self.fixed else self.share)

    def adopt(self, proposal: PeriodProposal) -> None:
        """Go on with the period on which all processes have agreed."""
        self.every = proposal.every

    @property
    def seconds_a_step(self) -> float | None:
        """Of training, since the last record; without the longest step, in which something may have been compiled."""
        if not self._step_times:
            return None
        counted = sorted(self._step_times)[:-1] or self._step_times
        return sum(counted) / len(counted)

    @property
    def share(self) -> float | None:
        """The share of all time that records take; None before it is known."""
        seconds = self.seconds_a_step
        if seconds is None or not self._costs:
            return None
        cost = median(self._costs)
        return cost / (cost + self.every * seconds)

    def affordable(self) -> int:
        """The period that this process's times ask for."""
        seconds = self.seconds_a_step
        if self.fixed or seconds is None or not self._costs:
            return self.every
        needed = self.needed(seconds)
        if needed > self.every:
            return needed
        return min(self.every, self.needed(seconds / 2))

    def needed(self, seconds: float) -> int:
        """The shortest period within the budget for training steps of so many seconds, and the records so far."""
        return _rounded_up(median(self._costs) * (1 / self.budget - 1) / max(seconds, 1e-9))


def _rounded_up(period: float) -> int:
    """To 1, 2 or 5 times a power of ten, at most `LONGEST`."""
    if period >= LONGEST:
        return LONGEST
    power = 10 ** max(math.floor(math.log10(max(period, 1))), 0)
    return next(factor * power for factor in _ROUND if factor * power >= period)
