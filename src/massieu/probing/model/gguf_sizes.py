"""Whether the counts and lengths in a GGUF file fit into it, before a reader takes its word for them.

The format begins with its name, a version and two counts: of tensors and of settings. Settings follow, each a name, a type and
a value, then the tensors' names, shapes, types and places. Readers build lists as long as the file says.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path

_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a number, by the code of its type."""
_STRING = 8
_ARRAY = 9
_DEEPEST = 8
"""Arrays in arrays; the format allows one level, and readers recurse."""
_MOST_DIMENSIONS = 16


def check_sizes(file: Path, tensor_bytes: Mapping[int, tuple[int, int]]) -> None:
    """Walk through everything that stands before the tensors' numbers, without keeping any of it.

    Args:
        file: A GGUF file of either byte order.
        tensor_bytes: Numbers in a block and bytes of a block, by the code of a tensor's type.

    Raises:
        ValueError: it claims more than it has bytes for.
    """
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        _Walk(content).whole(tensor_bytes)


class _Walk:
    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._place = 4  # behind the name of the format
        self._order = "<"
        if self._number("I", "version") & 0xFFFF == 0:  # written in the other byte order
            self._order = ">"

    def whole(self, tensor_bytes: Mapping[int, tuple[int, int]]) -> None:
        num_tensors = self._number("Q", "number of tensors")
        num_settings = self._number("Q", "number of settings")
        for _ in range(num_settings):
            name = self._string("name of a setting")
            kind = self._number("I", "type of a setting")
            self._value(kind, name, depth=0)
        for _ in range(num_tensors):
            self._tensor(tensor_bytes)

    def _value(self, kind: int, name: str, depth: int) -> None:
        if kind == _STRING:
            self._string(name)
        elif kind == _ARRAY:
            self._array(name, depth + 1)
        elif kind in _BYTES:
            self._skip(_BYTES[kind], name)
        else:
            raise ValueError(f"its setting {name!r} is of the unknown type {kind}")

    def _array(self, name: str, depth: int) -> None:
        if depth > _DEEPEST:
            raise ValueError(f"its setting {name!r} holds arrays in arrays, more than {_DEEPEST} deep")
        kind = self._number("I", name)
        count = self._number("Q", name)
        if kind in _BYTES:
            self._skip(_BYTES[kind] * count, name)
            return
        self._check_room(8 * count, name)  # the length of each string, or the type and length of each array
        for _ in range(count):
            self._value(kind, name, depth)

    def _tensor(self, tensor_bytes: Mapping[int, tuple[int, int]]) -> None:
        name = self._string("name of a tensor")
        dimensions = self._number("I", name)
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"its tensor {name!r} has {dimensions:,} dimensions")
        numbers = math.prod(self._number("Q", name) for _ in range(dimensions))
        kind = self._number("I", name)
        place = self._number("Q", name)
        numbers_in_block, bytes_of_block = tensor_bytes.get(kind, (1, 0))
        num_blocks = -(-numbers // numbers_in_block)  # rounded up
        end = place + num_blocks * bytes_of_block
        if end > len(self._content):
            raise ValueError(f"its tensor {name!r} of {numbers:,} numbers ends behind the end of the file")

    def _number(self, kind: str, name: str) -> int:
        start = self._place
        self._skip(struct.calcsize(f"<{kind}"), name)
        return struct.unpack_from(f"{self._order}{kind}", self._content, start)[0]

    def _string(self, name: str) -> str:
        length = self._number("Q", name)
        start = self._place
        self._skip(length, name)
        return self._content[start : start + min(length, 80)].decode("utf-8", "replace")

    def _skip(self, size: int, name: str) -> None:
        self._check_room(size, name)
        self._place += size

    def _check_room(self, size: int, name: str) -> None:
        left = len(self._content) - self._place
        if size > left:
            raise ValueError(f"{name!r} needs {size:,} bytes or more, and {left:,} are left in the file")
