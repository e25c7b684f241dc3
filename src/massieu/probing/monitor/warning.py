"""Warnings of a monitor, which name the line of the program that has called it."""

import sys
import warnings

from massieu.foundation.printable import visible

_PASSED_OVER = ("massieu", "contextlib")
"""Packages whose lines say nothing to the user; the second runs the ends of `Monitor.watch` and `Monitor.clip`."""


def warn(sentence: str) -> None:
    """Warn, at the line outside this package."""
    warnings.warn(visible(f"massieu.Monitor: {sentence}"), stacklevel=_level_of_the_program())


def _level_of_the_program() -> int:
    """The `stacklevel` of the first frame outside, for a warning of this function's caller."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_OVER:
        frame = frame.f_back
        level += 1
    return level
