"""Watching a model's forward pass: hooks of one thread, and which tensors are one in memory."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

Place = tuple[int, int]
Note = TypeVar("Note")


@contextmanager
def hooked(
    modules: Iterable[nn.Module],
    *,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
    elsewhere: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Call ``before(module, arguments, keywords)`` and ``after(module, arguments, keywords, output)`` around each forward.

    Calls that other threads make of the modules are not shown, but ``elsewhere`` is called before they begin. Scripted
    and traced parts of a model take no hooks, and are left alone.
    """
    thread = threading.get_ident()

    def of_this_thread(look: Callable[..., None]) -> Callable[..., None]:
        def hook(*call: Any) -> None:
            if threading.get_ident() == thread:
                look(*call)
            elif elsewhere is not None and look is before:
                elsewhere()

        return hook

    handles = []
    try:
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                continue
            if before is not None:
                handles.append(module.register_forward_pre_hook(of_this_thread(before), with_kwargs=True))
            if after is not None:
                handles.append(module.register_forward_hook(of_this_thread(after), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def memory(value: Any) -> Place | None:
    """Where a tensor's numbers lie, whatever its views; None for an empty tensor, or what is none."""
    if isinstance(value, Tensor) and value.numel():
        return value.data_ptr(), value.numel()
    return None


def same_tensor(left: Tensor, right: Tensor) -> bool:
    """One tensor in memory, in the same view."""
    return left.data_ptr() == right.data_ptr() and left.shape == right.shape and left.stride() == right.stride()


class TensorIdentity:
    """Which memory a tensor lies in, and in which view. It does not hold the memory, which is known again all the same."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())  # its number is given to no other while this lives
        self._view = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorIdentity):
            return NotImplemented
        return self._storage == other._storage and self._view == other._view

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class LatestTensors(Generic[Note]):
    """A note on each of the latest tensors, by their places in memory, for as long as the memory lives.

    It does not hold the memory. A note whose memory was given back is gone, whatever lies in its place by then.
    """

    def __init__(self, most: int) -> None:
        """Keep no more than ``most`` notes."""
        self._most = most
        self._notes: OrderedDict[Place, tuple[StorageWeakRef, Note]] = OrderedDict()

    def add(self, tensor: Tensor, note: Note) -> None:
        """Note something of a tensor, in the place of what was noted; of an empty one nothing."""
        place = memory(tensor)
        if place is None:
            return
        self._forget_dead()
        self._notes.pop(place, None)
        self._notes[place] = StorageWeakRef(tensor.untyped_storage()), note
        while len(self._notes) > self._most:
            self._notes.popitem(last=False)

    def get(self, place: Place | None) -> Note | None:
        """What was noted of the tensor in this place; None where it is unknown."""
        self._forget_dead()
        if place is None or place not in self._notes:
            return None
        _, note = self._notes[place]
        return note

    def __contains__(self, place: Place | None) -> bool:
        """Whether the tensor in this place has a note."""
        self._forget_dead()
        return place in self._notes

    def clear(self) -> None:
        """Forget all."""
        self._notes.clear()

    def _forget_dead(self) -> None:
        dead = [place for place, (storage, _) in self._notes.items() if storage.expired()]
        for place in dead:
            del self._notes[place]


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A value with ``change`` applied to it where it is a tensor, and to the tensors in tuples, lists and dictionaries."""
    if isinstance(value, tuple | list):
        return type(value)(mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {name: mapped(item, change) for name, item in value.items()}
    return change(value) if isinstance(value, Tensor) else value
