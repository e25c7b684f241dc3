"""Running results that can be stored, gone on from, and added to those of other windows of the same text.

A running result keeps sums. Its *state* is all of them: a nested dictionary of arrays and plain values, without code, that
fits into a file. Whatever is kept as an attribute of `RunningParts` and has the three verbs of `Running` is stored and
merged with the rest.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from massieu.errors import InputError

State = dict[str, Any]
"""Arrays, numbers, texts, lists and None, by name, in dictionaries of the same; keys are strings."""

FORMAT = 4
"""Of stored states; another one is refused."""
_HEADER = "plain"
_CHECKSUM = "sha256"
_NOTES = "notes"
_LENGTH_BYTES = 8
"""At the beginning of a safetensors file: the length of its header."""


@runtime_checkable
class Running(Protocol):
    """A running result."""

    def state(self) -> State:
        """All that it has summed, in copies."""
        ...

    def restore(self, state: State) -> None:
        """Go on from such a state in place of its own."""
        ...

    def merge(self, other: Self) -> None:
        """Add what the other has summed over other windows of the text; the other is not changed."""
        ...


class RunningParts:
    """A running result made of others: its attributes that are running results, and lists and dictionaries of them.

    Attributes:
        NOTES: names of attributes that belong to it as well and are no running results. Numbers are added, also those in
            a dictionary; sets and other dictionaries are united.
    """

    NOTES: ClassVar[tuple[str, ...]] = ()

    def state(self) -> State:
        """Those of all parts, by name, and the notes."""
        state: State = {name: part.state() for name, part in self._parts()}
        state[_NOTES] = {name: _storable(vars(self)[name]) for name in self.NOTES}
        return state

    def restore(self, state: State) -> None:
        """Go on from such states in place of the parts' own.

        Raises:
            ValueError: the state is of other parts.
        """
        for name, part in self._parts_of(state):
            part.restore(state[name])
        for name in self.NOTES:
            self._set_note(name, state[_NOTES][name])

    def merge(self, other: Self) -> None:
        """Merge each part with the other's, and take over its notes."""
        self.add(other.state())

    def add(self, state: State) -> None:
        """Merge each part with another's whose state this is.

        Raises:
            ValueError: the state is of other parts.
        """
        for name, part in self._parts_of(state):
            add(part, state[name])
        for name in self.NOTES:
            self._set_note(name, _united(vars(self)[name], state[_NOTES][name]))

    def _parts_of(self, state: State) -> list[tuple[str, Running]]:
        """The parts, all of which a state has, and no others."""
        parts = dict(self._parts())
        differing = parts.keys() ^ (state.keys() - {_NOTES})
        if differing:
            raise ValueError(f"the sums are of other statistics: {', '.join(sorted(differing))}")
        return list(parts.items())

    def _set_note(self, name: str, value: Any) -> None:
        note = vars(self)[name]
        # Sets and dictionaries are filled anew and not replaced, so that each keeps its kind, such as a Counter.
        if isinstance(note, set):
            values = list(value)  # a copy, since the value may be the note itself
            note.clear()
            note.update(values)
        elif isinstance(note, dict):
            entries = dict(value)
            note.clear()
            note.update(entries)
        else:
            setattr(self, name, value)

    def _parts(self) -> Iterator[tuple[str, Running]]:
        """The running results among the attributes, by name; those in lists and dictionaries as ``attribute.key``."""
        for name, value in vars(self).items():
            if isinstance(value, Running):
                yield name, value
                continue
            if isinstance(value, list | tuple):
                entries: Iterable[tuple[object, object]] = enumerate(value)
            elif isinstance(value, dict):
                entries = value.items()
            else:
                continue
            for key, part in entries:
                if isinstance(part, Running):
                    yield f"{name}.{key}", part


def add(part: Running, state: State) -> None:
    """Merge a running result with the state of another that is like it."""
    if isinstance(part, RunningParts):
        part.add(state)
    else:
        other = deepcopy(part)
        other.restore(state)
        part.merge(other)


def _storable(note: Any) -> Any:
    """A copy of a note as JSON can hold it, and in one order."""
    if isinstance(note, set):
        return sorted(note)
    if isinstance(note, dict):
        return dict(note)
    return note


def _united(note: Any, other: Any) -> Any:
    if isinstance(note, set):
        return note | set(other)
    if not isinstance(note, dict):
        return note + other
    united = dict(note)
    for key, value in other.items():
        # Numbers are added; of anything else the first stays.
        united[key] = note.get(key, 0) + value if isinstance(value, int | float) else note.get(key, value)
    return united


def fitting(array: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A copy of a stored array, which must have this shape.

    Raises:
        ValueError: it has another.
    """
    if not isinstance(array, np.ndarray) or array.shape != shape:
        raise ValueError(f"stored sums must have shape {shape}, got {getattr(array, 'shape', type(array).__name__)}")
    return array.copy()


# --- in a file -------------------------------------------------------------------------------------------------------


def packed(state: Mapping[str, Any]) -> bytes:
    """A state as the bytes of a safetensors file: its arrays, and in its header the rest as JSON, and a checksum of both."""
    arrays: dict[str, np.ndarray] = {}

    def without_arrays(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            name = str(len(arrays))
            arrays[name] = np.ascontiguousarray(value)
            return {"array": name, "shape": list(value.shape)}
        if isinstance(value, Mapping):
            return {"of": {key: without_arrays(item) for key, item in value.items()}}
        return {"is": value}

    rest = without_arrays(state)
    header = {"format": FORMAT, _CHECKSUM: _checksum(arrays, rest), "state": rest}
    # One entry alone: the order of several would differ from call to call.
    return save(arrays, {_HEADER: json.dumps(header, separators=(",", ":"))})


def _checksum(arrays: Mapping[str, np.ndarray], rest: Any) -> str:
    """A hash of everything that a state is made from again: its arrays, and the rest as JSON can hold it."""
    digest = hashlib.sha256(json.dumps(rest).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"\n{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def is_packed(path: Path) -> bool:
    """Whether a file's header is that of a stored state, of this format or another."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > path.stat().st_size:
                return False
            return _HEADER in json.loads(file.read(length))["__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def unpacked(content: bytes, where: str) -> State:
    """The state that `packed` has made such bytes of.

    Raises:
        InputError: it has not, or a bit of them was changed since; ``where`` is the file's name.
    """
    try:
        arrays = load(content)
        length = int.from_bytes(content[:_LENGTH_BYTES], "little")
        metadata = json.loads(content[_LENGTH_BYTES : _LENGTH_BYTES + length])["__metadata__"]
        header = json.loads(metadata[_HEADER])
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{where} cannot be read: it holds no running sums ({error})") from error
    if header.get("format") != FORMAT:
        raise InputError(
            f"{where} has format {header.get('format')}, and this version of massieu reads {FORMAT}; begin without resume"
        )
    rest = header.get("state")
    if header.get(_CHECKSUM) != _checksum(arrays, rest):
        raise InputError(f"{where} is damaged: its checksum is not that of its content; begin without resume")

    def with_arrays(value: dict[str, Any]) -> Any:
        if "array" in value:
            return arrays[value["array"]].reshape(value["shape"])
        if "of" in value:
            return {key: with_arrays(item) for key, item in value["of"].items()}
        return value["is"]

    try:
        return with_arrays(header["state"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where} cannot be read: it does not hold the sums that it names") from error
