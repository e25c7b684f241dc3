"""Ctrl-C, and the signals of a scheduler or a lost terminal: a run stops early and keeps what it has measured."""

import gc
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

CONTROL_C = (signal.SIGINT,)
ENDINGS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""What asks a command to end: Ctrl-C, a scheduler, a terminal that was closed."""


class Interruption:
    """Who asked a run to end, and whether there is something to keep.

    Before `hold`, a signal raises KeyboardInterrupt at once. After it, the first one only sets ``asked``; a second Ctrl-C
    raises. Schedulers and terminals may send a signal twice, so that a repeated one of theirs does nothing.

    Attributes:
        asked: Set by the first signal.
        number: Which signal that was; None before it.
        held: Whether there is something to keep.
        owns_process: Whether the process was started for this run alone, and ends with it.
    """

    def __init__(self) -> None:
        self.owns_process = False
        self.asked = threading.Event()
        self.number: int | None = None
        self.held = False
        self._loading = False

    @property
    def status(self) -> int:
        """How a command that was interrupted ends: 128 and the signal's number, as shells say it."""
        return 128 + (signal.SIGINT if self.number is None else self.number)

    def hold(self) -> None:
        """From here on there is something to keep: what asks for the end waits for it."""
        self.held = True

    @contextmanager
    def loading(self) -> Iterator[None]:
        """While libraries are imported: an exception in the midst of some of them, torch among them, aborts the process.

        In a process of its own, the garbage collector neither runs meanwhile nor ever visits what is there at the end. The
        modules, classes and functions stay in any case, and to visit them again and again took a fifth of the start.

        Raises:
            KeyboardInterrupt: at the end, where a signal has come.
        """
        self._loading = True
        try:
            with _imports_kept() if self.owns_process else nullcontext():
                yield
        finally:
            self._loading = False
        if self.asked.is_set():
            raise KeyboardInterrupt

    def receive(self, number: int, frame: Any = None) -> None:
        """What to do with a signal."""
        again = self.number is not None
        if not again:
            self.number = number
            self.asked.set()
        if again and number != signal.SIGINT:
            return
        if again or not (self.held or self._loading):
            raise KeyboardInterrupt


@contextmanager
def _imports_kept() -> Iterator[None]:
    """The garbage collector rests, and passes over everything that was made before the end."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


_current: Interruption | None = None


@contextmanager
def interruptible(signals: tuple[int, ...] = CONTROL_C) -> Iterator[Interruption]:
    """Signals go to the `Interruption` that is yielded; inside another such block they go to that one.

    A signal that is ignored stays ignored, as `nohup` means it. Threads other than the main one get no signals.
    """
    global _current
    if threading.current_thread() is not threading.main_thread():
        yield Interruption()
        return
    if _current is not None:
        yield _current
        return
    before, hook = {number: signal.getsignal(number) for number in signals}, sys.unraisablehook
    mine = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]
    _current = Interruption()
    # Raised in a finaliser, it ends nothing and only prints a traceback; that the run is to end is noted all the same.
    sys.unraisablehook = lambda lost: None if issubclass(lost.exc_type, KeyboardInterrupt) else hook(lost)
    try:
        for number in mine:
            signal.signal(number, _current.receive)
        yield _current
    finally:
        _current = None
        sys.unraisablehook = hook
        for number in mine:
            signal.signal(number, before[number])
