"""How far a probe is, and who is told of it: a function, or a person at a terminal or a notebook."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from massieu.foundation.arguments import described
from massieu.foundation.watching import progress_line


@dataclass(frozen=True)
class ProbeProgress:
    """How far a probe is."""

    stage: str
    tokens: int = 0
    total_tokens: int | None = None
    windows: int = 0


Tell = Callable[[ProbeProgress], None]
Progress = bool | Tell
"""True shows a bar or line where a person watches, False shows nothing, and a function is called."""


def check_progress(name: str, value: Any) -> Progress:
    """The value, if it is True, False or a function; else a TypeError."""
    if isinstance(value, bool) or callable(value):
        return cast(Progress, value)
    raise TypeError(f"{name} must be True, False or a function of a ProbeProgress, got {described(value)}")


@contextmanager
def telling(progress: Progress, *, silent: bool = False) -> Iterator[Tell]:
    """The function to call with how far a probe is.

    Args:
        silent: show nothing to a person, as in all processes of a run but one.
    """
    if callable(progress):
        yield progress
    elif progress and not silent:
        with shown_progress() as tell:
            yield tell
    else:
        yield lambda state: None


@contextmanager
def shown_progress() -> Iterator[Tell]:
    """Show stage, tokens and tokens per second where a person watches."""
    rate = TokenRate()
    with progress_line() as report:

        def tell(state: ProbeProgress) -> None:
            count = f"{state.tokens:,} tokens{rate.after(state.tokens)}" if state.tokens else ""
            report(state.stage, state.tokens, state.total_tokens, count)

        yield tell


class TokenRate:
    """Tokens per second since the first batch, during which the model is inspected."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def after(self, tokens: int) -> str:
        """The rate after this many tokens, as the end of a phrase; "" if it is not known yet."""
        now = time.monotonic()
        if self._first is None:
            self._first = (tokens, now) if tokens else None
            return ""
        first_tokens, first_time = self._first
        new_tokens = tokens - first_tokens
        seconds = now - first_time
        return f", {new_tokens / seconds:,.0f} per second" if new_tokens and seconds else ""
