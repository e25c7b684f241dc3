"""Where the documents of a packed row begin and end."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from massieu.foundation.arguments import described, floating, instance, integers, whole_number
from massieu.foundation.doors import sequence

Whole = Int[Tensor, "_"] | Sequence[int]
"""Whole numbers."""


@dataclass(frozen=True)
class Documents:
    """Several documents in one row: queries of a document see the keys of that document only.

    Make one by `of_lengths` or `of_boundaries`. It is the same for every item of a batch; a batch whose rows are packed
    differently is one longer row. A document may have no queries, or no keys, or neither. Boundaries are plain numbers, so a
    tensor of them is copied to the host once, when they are made, and compiled code is compiled anew for other ones.

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
    """Document i has the queries from number i up to number i + 1 of these, without the last."""
    key_boundaries: tuple[int, ...]
    """The same of the keys."""
    text: str = field(init=False, repr=False, compare=False)
    """Both, in words that `torch.compile` takes as constants, as it does not take numbers that change between calls."""

    def __post_init__(self) -> None:
        sequence("query_boundaries", self.query_boundaries)
        sequence("key_boundaries", self.key_boundaries)
        both = self.query_boundaries, self.key_boundaries
        object.__setattr__(self, "text", ";".join(",".join(map(str, one)) for one in both))

    def constant(self) -> "Documents":
        """The same, of constants, in compiled code."""
        if not torch.compiler.is_compiling():
            return self
        query, key = ([int(number) for number in one.split(",")] for one in self.text.split(";"))
        return Documents(tuple(query), tuple(key))

    @classmethod
    def of_lengths(cls, lengths: Whole, key_lengths: Whole | None = None) -> "Documents":
        """Documents of so many queries each, and of so many keys, by default as many.

        Raises:
            TypeError: something else than whole numbers.
            ValueError: a negative length, no document, or lengths of queries and keys of different numbers of documents.
        """
        boundaries = []
        for name, given in (("lengths", lengths), ("key_lengths", lengths if key_lengths is None else key_lengths)):
            numbers = _whole_numbers(name, given)
            if not numbers or min(numbers) < 0:
                raise ValueError(f"{name} must be one or more numbers of at least 0, got {_told(numbers)}")
            boundaries.append((0, *accumulate(numbers)))
        return cls._of(*boundaries)

    @classmethod
    def of_boundaries(cls, boundaries: Whole, key_boundaries: Whole | None = None) -> "Documents":
        """Documents between the boundaries that FlashAttention calls `cu_seqlens`: first 0, last the row's length.

        Raises:
            TypeError: something else than whole numbers.
            ValueError: boundaries that do not start at 0 or that fall, fewer than two, or of queries and keys not as many.
        """
        both = []
        given = (
            ("boundaries", boundaries),
            ("key_boundaries", boundaries if key_boundaries is None else key_boundaries),
        )
        for name, numbers in given:
            numbers = _whole_numbers(name, numbers)
            if len(numbers) < 2 or numbers[0] != 0:
                raise ValueError(
                    f"{name} must be two or more, the first 0 and the last the length, got {_told(numbers)}"
                )
            fall = next((place for place, (a, b) in enumerate(pairwise(numbers)) if a > b), None)
            if fall is not None:
                raise ValueError(f"{name} must not fall, got {numbers[fall]} before {numbers[fall + 1]}")
            both.append(numbers)
        return cls._of(*both)

    @classmethod
    def _of(cls, query: tuple[int, ...], key: tuple[int, ...]) -> "Documents":
        if len(query) != len(key):
            raise ValueError(f"queries and keys must be of as many documents, got {len(query) - 1} and {len(key) - 1}")
        return cls(query, key)

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

    def check_fits(self, queries: int, keys: int) -> None:
        """Raise a ValueError if the last boundaries are not those lengths."""
        whole_number("queries", queries)
        whole_number("keys", keys)
        for name, last, length in (
            ("queries", self.query_boundaries[-1], queries),
            ("keys", self.key_boundaries[-1], keys),
        ):
            if last != length:
                raise ValueError(f"documents must end where the row of {name} does, got {last} for {length} {name}")

    def seen(self, device: torch.device) -> tuple[Bool[Tensor, "L N"], Int[Tensor, "L N"]]:
        """Which keys are in a query's document, and how far each is behind it there: matrices over the row."""
        fields = []
        for boundaries, lengths in (
            (self.query_boundaries, self.lengths),
            (self.key_boundaries, self.key_lengths),
        ):
            both = torch.tensor([range(len(self)), boundaries[:-1]], device=device)
            own = both.repeat_interleave(torch.tensor(lengths, device=device), 1, output_size=boundaries[-1])
            fields.append((own[0], torch.arange(boundaries[-1], device=device) - own[1]))
        (query, row), (key, place) = fields
        return query.unsqueeze(1) == key, row.unsqueeze(1) - place

    def sums(self, per_token: Float[Tensor, "*batch L"]) -> Float[Tensor, "*batch documents"]:
        """The sum of a number a query over each document; 0 for one without queries. Differentiable.

        Raises:
            TypeError: not a floating-point tensor.
            ValueError: a last dimension of another length than the row's.
        """
        shape, length = tuple(floating("per_token", per_token).shape), self.query_boundaries[-1]
        if shape[-1:] != (length,):
            raise ValueError(f"per_token must have a last dimension of {length}, the row's length, got shape {shape}")
        lengths = torch.tensor(self.lengths, device=per_token.device)
        place = torch.arange(len(self), device=per_token.device).repeat_interleave(lengths, output_size=length)
        return per_token.new_zeros(*shape[:-1], len(self)).index_add(-1, place, per_token)


def check_documents(documents: object, queries: int, keys: int) -> None:
    """Raise a TypeError unless these are documents, and a ValueError unless they end where the row does."""
    words = "what Documents.of_lengths or Documents.of_boundaries makes"
    instance("documents", documents, Documents, words).check_fits(queries, keys)


def _whole_numbers(name: str, given: object) -> tuple[int, ...]:
    if isinstance(given, np.ndarray):
        given = torch.from_numpy(given) if given.dtype.kind in "iu" else given
    if isinstance(given, Tensor):
        if integers(name, given).ndim != 1:
            raise ValueError(f"{name} must have one dimension, got shape {tuple(given.shape)}")
        if given.is_meta:
            raise ValueError(f"{name} is on meta, where tensors have no values")
        return tuple(given.tolist())
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise TypeError(f"{name} must be whole numbers, in a sequence or a tensor, got {described(given)}")
    for number in given:
        if isinstance(number, bool) or not isinstance(number, int | np.integer):
            raise TypeError(f"{name} must be whole numbers, got {described(number)} among them")
    return tuple(int(number) for number in given)


def _told(numbers: tuple[int, ...]) -> str:
    """A few of them."""
    return str(list(numbers)) if len(numbers) <= 8 else f"{str(list(numbers[:8]))[:-1]}, …]"
