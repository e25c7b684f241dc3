"""An active reading of one model: where its attention calls go, how they are numbered, and which thread they belong to.

Calls are found in three ways: transformers' attention interface (`interface`), what this package's own attention tells
(`own_calls`), and following scores to their softmax in any PyTorch code (`follow`). All hand an `AttentionCall` to the
observer of the `Capture`, which keeps nothing after it returns.
`routes.capturing` puts them together.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from massieu.errors import InputError
from massieu.probing.capture.attention_call import AttentionCall, AttentionSite
from massieu.probing.model.watching import TensorIdentity


def recomputing() -> bool:
    """Whether a backward pass is under way in this thread: what is computed in it was computed before (checkpointing)."""
    return torch._C._current_graph_task_id() != -1


class StopAfterQuery(Exception):  # noqa: N818 - a signal, not an error
    """Ends a replayed attention module once its query, key and value are known."""


@dataclass
class Capture:
    """An active reading of one model: which sites fired, and who listens.

    Attributes:
        observer: called with each `AttentionCall`, in order. What it returns, if anything, takes the place of the output,
            (B, L, H, Dv), on the way to the rest of the model.
        names: each module's name in the model.
        fired: how often each module was called in the forward pass under way; it numbers the calls.
        unexplained: keyword arguments that reached an attention function and whose meaning is not known.
        projections: query, key and value of each call while a module is replayed; None at all other times.
        refused: modules that attend in a way that cannot be read, by name, with the reason.
        claimed: the attention that is being computed was read already, so that the tap is to leave it alone.
        thread: the thread whose calls are read.
        finish: ends a forward pass: what was begun and came to no end is then refused.
        disturbed: another thread called the model, or changed its attention implementation, in the meantime.
    """

    names: dict[nn.Module, str]
    observer: Callable[[AttentionCall], Tensor | None]
    fired: dict[str, int] = field(default_factory=dict)
    unexplained: set[str] = field(default_factory=set)
    projections: list[tuple[Tensor, Tensor, Tensor]] | None = None
    refused: dict[str, str] = field(default_factory=dict)
    claimed: bool = False
    thread: int = field(default_factory=threading.get_ident)
    disturbed: bool = False
    finish: Callable[[], None] = lambda: None
    _latest: "_LatestCall | None" = None

    def next_site(self, module: nn.Module, query: Tensor, key: Tensor) -> tuple[AttentionSite, bool]:
        """The site of the next call, and whether it repeats the one before with the same queries and keys."""
        name = self.names.get(module)
        if name is None:
            raise InputError(f"an attention module of class {type(module).__name__} is not part of the probed model")
        if self.projections is not None:  # a replay is no call of the forward pass
            return AttentionSite(name), False
        ordinal = self.fired.get(name, 0)
        call = _LatestCall(module, TensorIdentity(query), TensorIdentity(key), AttentionSite(name, ordinal))
        if self._latest is not None and self._latest.is_repeated_by(call):
            return self._latest.site, True
        self.fired[name] = ordinal + 1
        self._latest = call
        return call.site, False

    def begin_pass(self) -> None:
        """Another forward pass of the model begins."""
        self.finish()
        self.fired.clear()
        self._latest = None

    def check_undisturbed(self) -> None:
        """Raises:
        InputError: another thread used the model while it was read.
        """
        if self.disturbed:
            raise InputError(
                "another thread used the model while it was probed, so what was read is not one thing; "
                "let the other thread wait, or give each a copy of the model"
            )

    def observe(self, call: AttentionCall) -> Tensor | None:
        """Hand a call to the observer, whose own attention is not read; what it returns replaces the output."""
        self.check_undisturbed()
        with self.claiming():
            return self.observer(call)

    @contextmanager
    def claiming(self) -> Iterator[None]:
        """Inside, the tap leaves attention alone, since another route reads it."""
        outer = self.claimed
        self.claimed = True
        try:
            yield
        finally:
            self.claimed = outer

    @contextmanager
    def replaying(self) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
        """Inside, an attention call only records (query, key, value) and raises `StopAfterQuery`."""
        self.projections = []
        outer = self.claimed
        self.claimed = False
        try:
            with torch._C._EnableTorchFunction():  # the tap listens, wherever this is called from
                yield self.projections
        finally:
            self.projections = None
            self.claimed = outer


@dataclass(frozen=True, eq=False)
class _LatestCall:
    """The call before, by which one that repeats it is known: whose queries and keys are the same tensors."""

    module: nn.Module
    query: TensorIdentity
    key: TensorIdentity
    site: AttentionSite

    def is_repeated_by(self, call: "_LatestCall") -> bool:
        return self.module is call.module and self.query == call.query and self.key == call.key


def replayed(
    capture: Capture, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of an attention module's first call, run until they are known.

    Raises:
        Exception: of any class, from the module; RuntimeError where it computes no attention.
    """
    with capture.replaying() as recorded:
        try:
            module.forward(*arguments, **keywords)
        except StopAfterQuery:
            return recorded[0]
    raise RuntimeError(f"{type(module).__name__} did not compute attention when it was replayed")


_ACTIVE: ContextVar[Capture | None] = ContextVar("massieu_capture", default=None)
_CAPTURES: list[Capture] = []  # of all threads
LOCK = threading.Lock()


def own_capture(module: nn.Module) -> Capture | None:
    """The capture that this call belongs to; a call from another thread belongs to none, and disturbs.

    A recomputation belongs to none, and on CUDA it runs in a thread of autograd's.
    """
    if recomputing():
        return None
    capture = _ACTIVE.get()
    if capture is not None and capture.thread == threading.get_ident():
        return capture
    with LOCK:
        for other in _CAPTURES:
            if module in other.names:
                other.disturbed = True
    return None


@contextmanager
def active(capture: Capture) -> Iterator[None]:
    """Make a capture the one that this thread's attention calls belong to; another thread's calls then disturb it.

    Raises:
        InputError: at the end, another thread used the model in the meantime.
    """
    with LOCK:
        _CAPTURES.append(capture)
    token = _ACTIVE.set(capture)
    try:
        yield
    finally:
        with LOCK:
            _CAPTURES.remove(capture)
        _ACTIVE.reset(token)
        capture._latest = None  # gives its memory back
    capture.check_undisturbed()
