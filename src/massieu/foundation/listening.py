"""Listeners of attention calls: the probe, while it reads a model. At all other times there is none.

A room that computes attention asks for the `listeners` at each call. Each of them is told the inputs and the output, and
may put another output in its place. A call that consists of other calls, as a window does of chunks, is told as a whole:
inside `as_one_call` nobody listens.

The listeners are a context variable, so each thread has its own. Compiled and exported code does not ask.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class Listener(Protocol):
    """An observer of attention calls."""

    def listens(self) -> bool:
        """Whether the next call is to be told; False inside a call that is told as a whole."""
        ...

    def hear(self, call: Any, /) -> Tensor | None:
        """Receive a finished call. A tensor that is returned replaces the call's output."""
        ...

    def claiming(self) -> AbstractContextManager[None]:
        """A context inside which no call is told, because all are parts of one that is told as a whole."""
        ...

    def refusing(self, reason: str) -> AbstractContextManager[None]:
        """A context inside which attention cannot be read, for this reason."""
        ...

    def refuse(self, reason: str) -> None:
        """Receive the reason why an attention call cannot be read."""
        ...


Listeners = tuple[Listener, ...]

_LISTENERS: ContextVar[Listeners] = ContextVar("massieu_listeners", default=())


def listeners() -> Listeners:
    """The listeners to tell of the attention call that is about to be computed, the outermost first."""
    if torch.compiler.is_compiling():
        return ()
    registered = _LISTENERS.get()
    if not registered:
        return ()
    return tuple(listener for listener in registered if listener.listens())


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """A context in which the listener is told of this thread's attention calls, after those who listen already."""
    token = _LISTENERS.set((*_LISTENERS.get(), listener))
    try:
        yield
    finally:
        _LISTENERS.reset(token)


@contextmanager
def as_one_call(present: Sequence[Listener]) -> Iterator[None]:
    """A context in which the listeners present are told of no call: its caller tells them of all calls as one."""
    with ExitStack() as claims:
        for listener in present:
            claims.enter_context(listener.claiming())
        yield


def in_one_call(
    present: Sequence[Listener],
    function: Callable[_Parameters, _Result],
    *args: _Parameters.args,
    **kwargs: _Parameters.kwargs,
) -> _Result:
    """``function(*args, **kwargs)`` inside `as_one_call`."""
    if not present:
        return function(*args, **kwargs)
    with as_one_call(present):
        return function(*args, **kwargs)


def unreadable(
    reason: str, *, attends: bool
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """A decorator of functions whose attention cannot be read: listeners receive the reason instead.

    Args:
        reason: Completes "it cannot be read: …".
        attends: True for a function that is attention itself, False for one that may call such functions.
    """

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        @wraps(function)
        def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            present = listeners()
            if not present:
                return function(*args, **kwargs)
            with ExitStack() as refusals:
                for listener in present:
                    if attends:
                        listener.refuse(reason)
                        refusals.enter_context(listener.claiming())
                    else:
                        refusals.enter_context(listener.refusing(reason))
                return function(*args, **kwargs)

        return call

    return decorate
