"""Where the documents of a packed row begin and end."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from massieu.foundation.arguments import choice, described, floating, instance, integers, whole_number
from massieu.foundation.doors import sequence

WholeNumbers = Int[Tensor, "_"] | Sequence[int]


@dataclass(frozen=True)
class Documents:
    """Several documents in one row: queries of a document see the keys of that document only.

    Make one by `of_lengths` or `of_boundaries`. It holds for every item of a batch; if the rows of a batch are packed
    differently, join them to one longer row. A document may have no queries, or no keys, or neither. Boundaries are Python
    numbers: a tensor is copied to the host when they are made, and other boundaries make the compiler compile anew.

    Example:
        >>> import torch
        >>> from massieu import ops
        >>> documents = ops.Documents.of_lengths([2, 1])
        >>> zeros = torch.zeros(1, 1, 3, 4)
        >>> ops.log_partition(zeros, zeros, documents=documents).exp().flatten().round().tolist()  # keys of its own
        [2.0, 2.0, 1.0]
        >>> documents.sums(torch.tensor([1.0, 2.0, 4.0])).tolist()
        [3.0, 4.0]
    """

    query_boundaries: tuple[int, ...]
    """Document i has the queries query_boundaries[i] … query_boundaries[i + 1] − 1."""
    key_boundaries: tuple[int, ...]
    """The same for the keys."""
    query_offsets: tuple[int, ...] = ()
    """Query j of document i stands at position j + query_offsets[i] for causality and windows; empty for zeros."""
    text: str = field(init=False, repr=False, compare=False)
    """All three as text, which `torch.compile` takes as a constant; numbers that change between calls would become symbols."""

    def __post_init__(self) -> None:
        sequence("query_boundaries", self.query_boundaries)
        sequence("key_boundaries", self.key_boundaries)
        sequence("query_offsets", self.query_offsets)
        if self.query_offsets and len(self.query_offsets) != len(self):
            raise ValueError(
                f"query_offsets must be one a document, got {len(self.query_offsets)} for {len(self)} documents"
            )
        numbers = (self.query_boundaries, self.key_boundaries, self.query_offsets)
        texts = [",".join(map(str, each)) for each in numbers]
        object.__setattr__(self, "text", ";".join(texts))

    def constant(self) -> "Documents":
        """The same documents; in compiled code with boundaries that are constants."""
        if not torch.compiler.is_compiling():
            return self
        query, key, offsets = (
            tuple(int(number) for number in numbers.split(",") if number) for numbers in self.text.split(";")
        )
        return Documents(query, key, offsets)

    @classmethod
    def of_lengths(
        cls,
        lengths: WholeNumbers,
        key_lengths: WholeNumbers | None = None,
        *,
        query_offsets: WholeNumbers | Literal["lower_right"] | None = None,
    ) -> "Documents":
        """Documents with these numbers of queries, and of keys, by default the same.

        Args:
            query_offsets: positions of each document's first query, beside the ``query_offset`` of a call; None is 0 for all,
                the upper left alignment. "lower_right" aligns each document's last query with its last key, as
                flash-attention does for rows of variable length.

        Raises:
            TypeError: not whole numbers.
            ValueError: a negative length, no document, or different numbers of documents for queries, keys and offsets.
        """
        query_boundaries = _boundaries("lengths", lengths)
        key_boundaries = query_boundaries if key_lengths is None else _boundaries("key_lengths", key_lengths)
        return cls._of(query_boundaries, key_boundaries, query_offsets)

    @classmethod
    def of_boundaries(
        cls,
        boundaries: WholeNumbers,
        key_boundaries: WholeNumbers | None = None,
        *,
        query_offsets: WholeNumbers | Literal["lower_right"] | None = None,
    ) -> "Documents":
        """Documents between the boundaries that FlashAttention calls `cu_seqlens`: first 0, last the row's length.

        Args:
            query_offsets: as for `of_lengths`.

        Raises:
            TypeError: not whole numbers.
            ValueError: boundaries that do not start at 0 or that fall, fewer than two, or different numbers of documents for
                queries, keys and offsets.
        """
        query = _checked_boundaries("boundaries", boundaries)
        key = query if key_boundaries is None else _checked_boundaries("key_boundaries", key_boundaries)
        return cls._of(query, key, query_offsets)

    @classmethod
    def _of(
        cls,
        query: tuple[int, ...],
        key: tuple[int, ...],
        query_offsets: WholeNumbers | Literal["lower_right"] | None,
    ) -> "Documents":
        if len(query) != len(key):
            raise ValueError(
                f"queries and keys must have the same number of documents, got {len(query) - 1} and {len(key) - 1}"
            )
        documents = cls(query, key)
        if query_offsets is None:
            return documents
        if isinstance(query_offsets, str):
            choice("query_offsets", query_offsets, "lower_right")
            pairs = zip(documents.lengths, documents.key_lengths, strict=True)
            offsets = tuple(keys - queries for queries, keys in pairs)
        else:
            offsets = _whole_numbers("query_offsets", query_offsets)
        with_offsets = cls(query, key, offsets)
        # Zeros are left out, so that documents that mean the same are equal.
        return with_offsets if any(offsets) else documents

    def __len__(self) -> int:
        """How many documents there are."""
        return len(self.query_boundaries) - 1

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of queries of each document."""
        return tuple(end - start for start, end in pairwise(self.query_boundaries))

    @property
    def key_lengths(self) -> tuple[int, ...]:
        """The number of keys of each document."""
        return tuple(end - start for start, end in pairwise(self.key_boundaries))

    def query_offset(self, document: int) -> int:
        """The position of a document's first query, without the offset of the call."""
        return self.query_offsets[document] if self.query_offsets else 0

    def check_fits(self, queries: int, keys: int) -> None:
        """Raise a ValueError unless the documents end at these lengths."""
        whole_number("queries", queries)
        whole_number("keys", keys)
        for name, last, length in (
            ("queries", self.query_boundaries[-1], queries),
            ("keys", self.key_boundaries[-1], keys),
        ):
            if last != length:
                raise ValueError(f"documents must end where the row of {name} does, got {last} for {length} {name}")

    def seen(self, device: torch.device) -> tuple[Bool[Tensor, "L N"], Int[Tensor, "L N"]]:
        """Whether each key is in the query's document, and the query's position in its document minus the key's."""
        query_document, query_place = _places(self.query_boundaries, self.lengths, device)
        if self.query_offsets:
            query_place = query_place + torch.tensor(self.query_offsets, device=device)[query_document]
        key_document, key_place = _places(self.key_boundaries, self.key_lengths, device)
        return query_document.unsqueeze(1) == key_document, query_place.unsqueeze(1) - key_place

    def sums(self, per_token: Float[Tensor, "*batch L"]) -> Float[Tensor, "*batch documents"]:
        """The sum over each document of a number per query; 0 for a document without queries. Differentiable.

        Raises:
            TypeError: not a floating-point tensor.
            ValueError: a last dimension of another length than the row's.
        """
        shape = tuple(floating("per_token", per_token).shape)
        length = self.query_boundaries[-1]
        if shape[-1:] != (length,):
            raise ValueError(f"per_token must have a last dimension of {length}, the row's length, got shape {shape}")
        lengths = torch.tensor(self.lengths, device=per_token.device)
        document = torch.arange(len(self), device=per_token.device).repeat_interleave(lengths, output_size=length)
        return per_token.new_zeros(*shape[:-1], len(self)).index_add(-1, document, per_token)


def check_documents(documents: object, queries: int, keys: int) -> None:
    """Raise a TypeError unless these are `Documents`, and a ValueError unless they end where the row does."""
    words = "what Documents.of_lengths or Documents.of_boundaries makes"
    instance("documents", documents, Documents, words).check_fits(queries, keys)


def _boundaries(name: str, lengths: object) -> tuple[int, ...]:
    """The boundaries of documents with these lengths."""
    numbers = _whole_numbers(name, lengths)
    if not numbers or min(numbers) < 0:
        raise ValueError(f"{name} must be one or more numbers of at least 0, got {_shortened(numbers)}")
    return (0, *accumulate(numbers))


def _checked_boundaries(name: str, boundaries: object) -> tuple[int, ...]:
    """Boundaries that start at 0 and do not fall."""
    numbers = _whole_numbers(name, boundaries)
    if len(numbers) < 2 or numbers[0] != 0:
        raise ValueError(f"{name} must be two or more, the first 0 and the last the length, got {_shortened(numbers)}")
    for before, after in pairwise(numbers):
        if before > after:
            raise ValueError(f"{name} must not fall, got {before} before {after}")
    return numbers


def _places(boundaries: tuple[int, ...], lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """For each token of a row the number of its document, and its place in the document."""
    fields = torch.tensor([range(len(lengths)), boundaries[:-1]], device=device)
    document, first = fields.repeat_interleave(torch.tensor(lengths, device=device), 1, output_size=boundaries[-1])
    return document, torch.arange(boundaries[-1], device=device) - first


def _whole_numbers(name: str, values: object) -> tuple[int, ...]:
    """Whole numbers in a sequence, an array or a tensor of one dimension."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        values = torch.from_numpy(values)
    if isinstance(values, Tensor):
        if integers(name, values).ndim != 1:
            raise ValueError(f"{name} must have one dimension, got shape {tuple(values.shape)}")
        if values.is_meta:
            raise ValueError(f"{name} is on meta, where tensors have no values")
        return tuple(values.tolist())
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise TypeError(f"{name} must be whole numbers, in a sequence or a tensor, got {described(values)}")
    for number in values:
        if isinstance(number, bool) or not isinstance(number, int | np.integer):
            raise TypeError(f"{name} must be whole numbers, got {described(number)} among them")
    return tuple(int(number) for number in values)


def _shortened(numbers: tuple[int, ...]) -> str:
    """At most eight numbers of a list, for an error message."""
    if len(numbers) <= 8:
        return str(list(numbers))
    return f"{str(list(numbers[:8]))[:-1]}, …]"
