"""Alarms against the user's own reference run: a factor of three at the same step, in two calls running."""

import math
import os
import warnings
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from massieu.errors import InputError
from massieu.report.record_lines import TrainingRun, differing, read_run

FACTOR = 3.0
CALLS = 2
WATCHED = {
    "selective_log_partition_mean": (True, True),
    "selective_log_partition_max": (True, True),
    "largest_logit_max": (True, True),
    "entropy_min": (True, False),
    "gradient_norm": (True, True),
    "loss": (True, True),
}
"""The model's quantities that are compared: whether too small, and whether too large, is an alarm."""
_WIDEST = 2.0
"""Records of the reference that are more than so many times their usual distance apart have nothing known between them."""


class Alarm(NamedTuple):
    """One quantity far from the reference's value at the same step."""

    key: str
    value: float
    reference: float
    step: int

    def __str__(self) -> str:
        return f"{self.key} is {self.value:.4g} at step {self.step}, where the reference run had {self.reference:.4g}"


class Alarms:
    """Compares each record of a run with a reference run, and warns once for each quantity until it returns.

    The quantities are those of `WATCHED`, of the model as a whole. A number is outside where it is more than three times
    the reference's or less than a third of it, NaN or infinite; the least entropy is outside only below. It is in alarm
    from the second call running. Between two steps of the reference its value is on the straight line between them; before
    the first and after the last one it is theirs, as far as records are usually apart. A quantity is not compared where
    the reference has no finite positive value: a ratio has no meaning there.

    Args:
        reference: JSON lines of a run that went well, or what was read of them.
        prefix: What the keys of this run begin with.
        settings: This run's own; a warning names those in which the reference differs.

    Raises:
        InputError: the reference cannot be read.
    """

    def __init__(
        self,
        reference: str | os.PathLike[str] | TrainingRun,
        prefix: str = "massieu",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(reference, str | os.PathLike | TrainingRun):
            raise InputError(f"reference must be the path of a run's JSON lines, got {reference!r:.60}")
        run = reference if isinstance(reference, TrainingRun) else read_run(reference)
        self._prefix = prefix
        self._curves = {name: curve for name in WATCHED if (curve := run.curve(name))}
        if not self._curves:
            raise InputError(
                f"the reference run {run.name} has none of the quantities that are compared: {', '.join(WATCHED)}"
            )
        steps = sorted(run.records)
        self._usual = median([b - a for a, b in pairwise(steps)] or [1])
        self._outside = dict.fromkeys(WATCHED, 0)
        self._said = False
        self._warn_of_settings(run, settings or {})

    def __call__(self, record: Mapping[str, float], step: int) -> list[Alarm]:
        """The alarms of a record, which are warned of where they are new."""
        alarms, unknown = [], True
        for name, curve in self._curves.items():
            key = f"{self._prefix}/{name}" if self._prefix else name
            expected = self._expected(curve, step)
            unknown &= expected is None
            if (value := record.get(key)) is None or expected is None or not 0 < expected < math.inf:
                continue
            below, above = WATCHED[name]
            far = (
                not math.isfinite(value)
                or (below and FACTOR * value < expected)
                or (above and value > FACTOR * expected)
            )
            self._outside[name] = self._outside[name] + 1 if far else 0
            if self._outside[name] >= CALLS:
                alarms.append(Alarm(key, value, expected, step))
                if self._outside[name] == CALLS:
                    self._warn(f"{alarms[-1]}: outside a factor of {FACTOR:g} in {CALLS} calls running")
        if unknown:
            self._warn_once(f"the reference run has no record near step {step}; nothing is compared there")
        return alarms

    def _expected(self, curve: Mapping[int, float], step: int) -> float | None:
        """The reference's number at a step; None where it is not known."""
        if step in curve:
            return curve[step]
        before = max((known for known in curve if known < step), default=None)
        after = min((known for known in curve if known > step), default=None)
        if before is None or after is None:
            end = after if before is None else before
            return curve[end] if end is not None and abs(end - step) <= self._usual else None
        if after - before > _WIDEST * self._usual:
            return None
        share = (step - before) / (after - before)
        return (1 - share) * curve[before] + share * curve[after]

    def _warn_of_settings(self, run: TrainingRun, settings: Mapping[str, Any]) -> None:
        if other := differing(run.settings, settings):
            self._warn_once(f"the reference run {run.name} was another: {other}")

    def _warn_once(self, sentence: str) -> None:
        if not self._said:
            self._warn(sentence)
        self._said = True

    @staticmethod
    def _warn(sentence: str) -> None:
        warnings.warn(f"massieu.Monitor: {sentence}", stacklevel=5)
