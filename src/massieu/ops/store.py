"""Atoms on disk: keys, values and log-weights that need not fit in memory, in memory-mapped safetensors files."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from massieu.foundation.arguments import check_values, floating, instance, whole_number
from massieu.foundation.doors import path as check_path
from massieu.foundation.files import replacing


class AtomBlock(NamedTuple):
    """A block of atoms: points, with or without values and log-weights, for each of Hk key heads.

    Example:
        >>> import torch
        >>> from massieu.ops import AtomBlock
        >>> AtomBlock(torch.zeros(2, 10, 3), log_weight=torch.zeros(2, 10)).points.shape  # 2 heads, 10 atoms
        torch.Size([2, 10, 3])
    """

    points: Float[Tensor, "Hk N D"]
    values: Float[Tensor, "Hk N E"] | None = None
    """None: the points are the values."""
    log_weight: Float[Tensor, "Hk N"] | None = None
    """Natural logarithms, −inf hides an atom; None: weight 1."""


@dataclass(frozen=True)
class AtomStore:
    """Atoms in safetensors files, read block by block.

    A file holds `points` (Hk, n, D) and, if any, `values` (Hk, n, E) and `log_weight` (Hk, n), in any floating dtype;
    files of one directory follow each other in the order of their names. Nothing else is in it, so that any tool that
    writes safetensors can make one. Make a store by `write` or `open`.

    Example:
        >>> import tempfile, torch
        >>> from massieu.ops import AtomBlock, AtomStore
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = AtomStore.write(f"{folder}/atoms", [AtomBlock(torch.zeros(1, n, 2)) for n in (3, 2)])
        ...     len(store), [block.points.shape[1] for block in store.blocks(2)]
        (5, [2, 1, 2])
    """

    files: tuple[Path, ...]
    counts: tuple[int, ...]
    """Atoms a head in each file."""
    heads: int
    size: int
    """D, of a point."""
    value_size: int
    """E, of a value."""
    has_values: bool
    has_log_weight: bool

    def __len__(self) -> int:
        """Atoms of one head."""
        return sum(self.counts)

    @staticmethod
    def write(path: str | os.PathLike[str], blocks: Iterable[AtomBlock]) -> "AtomStore":
        """Write blocks of atoms as they come, one file each, and open the result.

        Everything is written beside `path` and renamed when it is complete: after an error, or Ctrl-C, there is no
        store at `path` and nothing is left beside it. A process that is killed leaves a directory `.massieu-…`.

        Args:
            path: the directory to make; it must not exist, or be empty.
            blocks: of equal shapes except for their number of atoms; a generator if all of them do not fit in memory.

        Raises:
            TypeError: a block is not an `AtomBlock` of floating-point tensors.
            ValueError: shapes do not fit each other or the first block, there are no blocks, or `path` exists.
        """
        path = Path(check_path("path", path))
        if isinstance(blocks, AtomBlock | str | Tensor) or not isinstance(blocks, Iterable):
            raise TypeError(f"blocks must be a list or generator of AtomBlock, got {type(blocks).__name__}")
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise ValueError(f"a store is written to a new directory, and {path} is already there")
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, folder=True, durable=False) as folder:
            first = None
            for index, block in enumerate(blocks):
                _check_block(block, first)
                if first is None:
                    first = block
                save_file(_savable(block), folder / f"{index:08d}.safetensors")
            if first is None:
                raise ValueError("blocks must hold at least one block of atoms, got none")
        return AtomStore.open(path)

    @staticmethod
    def open(path: str | os.PathLike[str]) -> "AtomStore":
        """Open a directory of safetensors files, or one file. Only their headers are read.

        Raises:
            ValueError: there is no such file or directory, it holds no safetensors file, one cannot be read, or the
                tensors of one do not fit each other or those of the first.
        """
        path = Path(check_path("path", path))
        files = tuple(sorted(path.glob("*.safetensors"))) if path.is_dir() else (path,)
        if not path.exists():
            raise ValueError(f"path must be that of a store of atoms, and there is none at {path}")
        if not files:
            raise ValueError(
                f"path must be that of a store of atoms, a directory of .safetensors files, and {path} holds none"
            )
        headers = [_read_header(file) for file in files]
        layout, _ = headers[0]
        for file, (file_layout, _) in zip(files, headers, strict=True):
            if file_layout != layout:
                raise ValueError(
                    f"all files of a store must be alike: {files[0].name} has {layout.described()}, "
                    f"{file.name} has {file_layout.described()}"
                )
        return AtomStore(
            files=files,
            counts=tuple(count for _, count in headers),
            heads=layout.heads,
            size=layout.size,
            value_size=layout.value_size,
            has_values=layout.has_values,
            has_log_weight=layout.has_log_weight,
        )

    def blocks(self, size: int = 1 << 16) -> Iterator[AtomBlock]:
        """The atoms in order, at most `size` a head at a time.

        Tensors are views of the file: they are read from disk when they are used, and unmapped when they are dropped. Changing
        one does not change the file.

        Raises:
            ValueError: size is below 1, or a file has changed since the store was opened.
        """
        whole_number("size", size, least=1)
        for file, count in zip(self.files, self.counts, strict=True):
            for first in range(0, count, size):
                yield self._read(file, count, slice(first, min(count, first + size)))

    def _read(self, file: Path, count: int, atoms: slice) -> AtomBlock:
        """Some atoms of a file that had `count` of them when the store was opened."""
        # Mapped anew for each block: pages once read would else count as this process's memory until the file is done.
        with _opened(file) as content:
            points = content.get_slice("points")
            if points.get_shape() != [self.heads, count, self.size]:
                raise ValueError(f"{file} has changed since the store was opened")
            values = content.get_slice("values")[:, atoms] if self.has_values else None
            log_weight = content.get_slice("log_weight")[:, atoms] if self.has_log_weight else None
            return AtomBlock(points[:, atoms], values, log_weight)


class _Layout(NamedTuple):
    """The shapes that all files of a store share."""

    heads: int
    size: int
    value_size: int
    has_values: bool
    has_log_weight: bool

    def described(self) -> str:
        """In words, for an error message."""
        values = f"values of size {self.value_size}" if self.has_values else "no values"
        log_weights = "log-weights" if self.has_log_weight else "no log-weights"
        return f"{self.heads} heads, points of size {self.size}, {values}, {log_weights}"


def _opened(file: Path) -> safe_open:
    """The open file; a ValueError if it is not a safetensors file."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a safetensors file that can be read: {error}") from error


def _read_header(file: Path) -> tuple[_Layout, int]:
    """The layout of a file, and its number of atoms."""
    with _opened(file) as content:
        shapes = {name: tuple(content.get_slice(name).get_shape()) for name in content.keys()}  # noqa: SIM118
        types = {name: content.get_slice(name).get_dtype() for name in shapes}
    if "points" not in shapes:
        raise ValueError(f"{file} must hold a tensor named points, got {sorted(shapes)}")
    for name in shapes:
        if name not in AtomBlock._fields:
            raise ValueError(f"{file} must hold points, values and log_weight alone, got {sorted(shapes)}")
        if types[name] not in ("F64", "F32", "F16", "BF16"):
            raise ValueError(f"{name} of {file} must be float64, float32, float16 or bfloat16, got {types[name]}")
    try:
        _check_shapes(shapes)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    heads, count, size = shapes["points"]
    layout = _Layout(
        heads=heads,
        size=size,
        value_size=shapes["values"][2] if "values" in shapes else size,
        has_values="values" in shapes,
        has_log_weight="log_weight" in shapes,
    )
    return layout, count


def _check_block(block: AtomBlock, first: AtomBlock | None) -> None:
    """Raise a TypeError or ValueError unless a block is right by itself and like the first one."""
    instance("a block of atoms", block, AtomBlock, "an AtomBlock")
    shapes: dict[str, tuple[int, ...]] = {}
    for name, part in block._asdict().items():
        if part is None and name != "points":
            continue
        shapes[name] = tuple(floating(name, part).shape)
        check_values(**{name: part})
    _check_shapes(shapes)
    if first is None:
        return
    first_shapes = {name: tuple(part.shape) for name, part in first._asdict().items() if part is not None}
    if _without_count(shapes) != _without_count(first_shapes):
        raise ValueError(f"blocks must be alike but for their number of atoms, got {first_shapes} and {shapes}")


def _savable(block: AtomBlock) -> dict[str, Tensor]:
    """The block's tensors, contiguous and in memory of their own: safetensors refuses others, or saves wrong numbers."""
    tensors: dict[str, Tensor] = {}
    for name, part in block._asdict().items():
        if part is None:
            continue
        part = part.detach().contiguous().resolve_neg()
        memory = part.untyped_storage().data_ptr()
        is_shared = any(other.untyped_storage().data_ptr() == memory for other in tensors.values())
        tensors[name] = part.clone() if is_shared else part
    return tensors


def _without_count(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes without their second size, the number of atoms."""
    return {name: (shape[0], *shape[2:]) for name, shape in shapes.items()}


def _check_shapes(shapes: dict[str, tuple[int, ...]]) -> None:
    points = shapes["points"]
    if len(points) != 3 or points[0] == 0 or points[2] == 0:
        raise ValueError(f"points must have shape (Hk, N, D) with at least one head and dimension, got {points}")
    values = shapes.get("values", points)
    if len(values) != 3 or values[:2] != points[:2] or values[2] == 0:
        raise ValueError(f"values must have shape {(*points[:2], 'E')} for points {points}, got {values}")
    if shapes.get("log_weight", points[:2]) != points[:2]:
        raise ValueError(f"log_weight must have shape {points[:2]} for points {points}, got {shapes['log_weight']}")
