"""Who is told of an attention call: almost always nobody, and the probe while it reads a model.

A room that computes attention asks for the `listeners` at each call. Each of them is told what attention was given and
what came of it, and may put another output in its place. A call that is made of others, as a window is of chunks, is told
as a whole: inside `as_one_call` nobody listens.

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
    """Somebody who is told of attention calls."""

    def listens(self) -> bool:
        """Whether the call that comes is to be told; not inside another call."""
        ...

    def hear(self, call: Any, /) -> Tensor | None:
        """Be told of a call. What is returned, if anything, takes the place of its output."""
        ...

    def claiming(self) -> AbstractContextManager[None]:
        """Inside, nothing is told: it is part of a call that is told as a whole."""
        ...

    def refusing(self, reason: str) -> AbstractContextManager[None]:
        """Inside, attention that is told cannot be read, for this reason."""
        ...

    def refuse(self, reason: str) -> None:
        """Be told of attention that cannot be read, for this reason."""
        ...


Listeners = tuple[Listener, ...]

_LISTENERS: ContextVar[Listeners] = ContextVar("massieu_listeners", default=())


def listeners() -> Listeners:
    """Those who are to be told of the attention call that is about to be computed, the outermost first."""
    if torch.compiler.is_compiling():
        return ()
    known = _LISTENERS.get()
    return tuple(listener for listener in known if listener.listens()) if known else known


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Inside, and in this thread, the listener is told of attention calls, after those who listen already."""
    token = _LISTENERS.set((*_LISTENERS.get(), listener))
    try:
        yield
    finally:
        _LISTENERS.reset(token)


@contextmanager
def as_one_call(told: Sequence[Listener]) -> Iterator[None]:
    """Inside, these listeners are told nothing."""
    with ExitStack() as claims:
        for listener in told:
            claims.enter_context(listener.claiming())
        yield


def in_one_call(
    told: Sequence[Listener],
    function: Callable[_Parameters, _Result],
    *args: _Parameters.args,
    **kwargs: _Parameters.kwargs,
) -> _Result:
    """``function(*args, **kwargs)``, of which these listeners are told nothing."""
    if not told:
        return function(*args, **kwargs)
    with as_one_call(told):
        return function(*args, **kwargs)


def unreadable(
    reason: str, *, attends: bool
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """A decorator of functions whose attention cannot be told: listeners get the reason in its place.

    Args:
        reason: why, as the end of "it cannot be read: …".
        attends: the function is attention itself; else it may call functions that are.
    """

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        @wraps(function)
        def told(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
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

        return told

    return decorate
