"""A dictionary whose keys are tensors themselves, not their numbers; an entry lives as long as its tensor."""

import weakref
from typing import Generic, TypeVar

from torch import Tensor

V = TypeVar("V")


class _Reference(weakref.ref[Tensor]):
    """A weak reference that knows under which number its entry is."""

    __slots__ = ("number",)
    number: int


class WhileAlive(Generic[V]):
    """A value of each of some tensors.

    `torch.utils.weak.WeakIdKeyDictionary` makes an object whenever a tensor is looked up. A followed pass asks several times
    for each of its functions: with this class following takes an eighth less time.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[_Reference, V]] = {}

    def get(self, tensor: Tensor) -> V | None:
        """The value of a tensor; None where it has none."""
        entry = self._entries.get(id(tensor))
        # Another tensor may have had this number.
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def keep(self, tensor: Tensor, value: V) -> None:
        """From now on this is the tensor's value."""
        reference = _Reference(tensor, self._removed)
        reference.number = id(tensor)
        self._entries[reference.number] = (reference, value)

    def forget(self, tensor: Tensor) -> None:
        """The tensor has no value from now on."""
        if self.get(tensor) is not None:
            del self._entries[id(tensor)]

    def clear(self) -> None:
        """No tensor has a value from now on."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def _removed(self, reference: "weakref.ref[Tensor]") -> None:
        """A tensor is gone. Its number may belong to another one by now."""
        assert isinstance(reference, _Reference)
        entry = self._entries.get(reference.number)
        if entry is not None and entry[0] is reference:
            del self._entries[reference.number]
