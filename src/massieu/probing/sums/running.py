"""Running results that can be stored, gone on from, and added to those of other windows of the same text.

A running result keeps sums. Its *state* is all of them: a nested dictionary of arrays and plain values, without code, that
fits into a file. Whatever is kept as an attribute of `RunningParts` and has the three verbs of `Running` is stored and
merged with the rest.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
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
_HEADER, _CHECKSUM, _NOTES = "plain", "sha256", "notes"
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
        NOTES: names of plain attributes that belong to it as well. Numbers are added, also those in a dictionary; sets
            and other dictionaries are united.
    """

    NOTES: ClassVar[tuple[str, ...]] = ()

    def state(self) -> State:
        """Those of all parts, by name, and the notes."""
        notes = {name: _copied(vars(self)[name]) for name in self.NOTES}
        return {name: part.state() for name, part in self._parts()} | {_NOTES: notes}

    def restore(self, state: State) -> None:
        """Go on from such states in place of the parts' own.

        Raises:
            ValueError: the state is of other parts.
        """
        for name, part in self._alike(state):
            part.restore(state[name])
        for name in self.NOTES:
            self._note(name, state[_NOTES][name])

    def merge(self, other: Self) -> None:
        """Merge each part with the other's, and take over its notes."""
        self.add(other.state())

    def add(self, state: State) -> None:
        """Merge each part with another's whose state this is.

        Raises:
            ValueError: the state is of other parts.
        """
        for name, part in self._alike(state):
            add(part, state[name])
        for name in self.NOTES:
            self._note(name, _united(vars(self)[name], state[_NOTES][name]))

    def _alike(self, state: State) -> list[tuple[str, Running]]:
        parts = dict(self._parts())
        if differing := sorted(parts.keys() ^ (state.keys() - {_NOTES})):
            raise ValueError(f"the sums are of other statistics: {', '.join(differing)}")
        return list(parts.items())

    def _note(self, name: str, value: Any) -> None:
        mine = vars(self)[name]
        if isinstance(mine, set | dict):  # keeps its kind, as a Counter
            value = list(value) if isinstance(mine, set) else dict(value)
            mine.clear()
            mine.update(value)
        else:
            setattr(self, name, value)

    def _parts(self) -> Iterator[tuple[str, Running]]:
        for name, value in vars(self).items():
            if isinstance(value, Running):
                yield name, value
            elif isinstance(value, list | tuple):
                yield from ((f"{name}.{i}", part) for i, part in enumerate(value) if isinstance(part, Running))
            elif isinstance(value, dict):
                yield from ((f"{name}.{key}", part) for key, part in value.items() if isinstance(part, Running))


def add(part: Running, state: State) -> None:
    """Merge a running result with the state of another that is like it."""
    if isinstance(part, RunningParts):
        part.add(state)
    else:
        other = deepcopy(part)
        other.restore(state)
        part.merge(other)


def _copied(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else dict(value) if isinstance(value, dict) else value


def _united(mine: Any, other: Any) -> Any:
    if isinstance(mine, set):
        return mine | set(other)
    if isinstance(mine, dict):
        return dict(mine) | {
            k: mine.get(k, 0) + v if isinstance(v, int | float) else mine.get(k, v) for k, v in other.items()
        }
    return mine + other


def fitting(array: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A copy of a stored array, if it has this shape.

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

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            name = str(len(arrays))
            arrays[name] = np.ascontiguousarray(value)
            return {"array": name, "shape": list(value.shape)}
        if isinstance(value, Mapping):
            return {"of": {key: plain(item) for key, item in value.items()}}
        return {"is": value}

    rest = plain(state)
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
        header = json.loads(json.loads(content[_LENGTH_BYTES : _LENGTH_BYTES + length])["__metadata__"][_HEADER])
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{where} cannot be read: it holds no running sums ({error})") from error
    if header.get("format") != FORMAT:
        raise InputError(
            f"{where} has format {header.get('format')}, and this version of massieu reads {FORMAT}; begin without resume"
        )
    if header.get(_CHECKSUM) != _checksum(arrays, header.get("state")):
        raise InputError(f"{where} is damaged: its checksum is not that of its content; begin without resume")

    def original(value: dict[str, Any]) -> Any:
        if "array" in value:
            return arrays[value["array"]].reshape(value["shape"])
        if "of" in value:
            return {key: original(item) for key, item in value["of"].items()}
        return value["is"]

    try:
        return original(header["state"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where} cannot be read: it does not hold the sums that it names") from error
