"""FlashAttention for packed rows: documents of any lengths in one call, in time and memory of the documents.

The operator takes all rows one after the other, ``(T, H, D)``, and where each document begins; its log Z is ``(H, T)``.
PyTorch's own function for packed rows takes a cotangent of log Z and ignores it, so these are the two operators below it.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from massieu.foundation.transforms import in_functorch
from massieu.ops.cuda import kernel
from massieu.ops.cuda.flash import FlashKernel
from massieu.ops.documents import Documents
from massieu.ops.fused import Fused
from massieu.ops.fused_kernel import by_reference
from massieu.ops.shapes import AttentionProblem


class PackedFlashKernel(FlashKernel):
    """A `massieu.ops.fused_kernel.FusedKernel` whose mask is the boundaries of queries and of keys, integers on the CPU."""

    def refuses(self, problem: AttentionProblem) -> str | None:
        """Why it refuses what FlashAttention refuses, bands over unequal documents, transforms and compiled code."""
        documents = problem.documents
        if documents is None:
            return "it takes packed rows"
        if in_functorch() or torch.compiler.is_compiling():
            return "it is called by itself, not in a transform and not in compiled code"
        if problem.band is not None and documents.query_boundaries != documents.key_boundaries:
            return "positions count from the ends of its documents, which must have as many queries as keys"
        if problem.band is not None and (documents.query_offsets or problem.band[1] < 0):
            return "its documents take no query_offset of their own, and no negative one"
        return super().refuses(replace(problem, documents=None, window=None, is_causal=False))

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, low: int | None, high: int | None
    ) -> tuple[Tensor, ...]:
        """Output and log Z."""
        assert mask is not None
        tensors = (_joined(tensor) for tensor in (query, key, value))
        output, log_z, *_ = kernel.operators._flash_attention_forward(
            *tensors, *_places(mask, query), 0.0, False, False, scale=scale, **_window(low, high)
        )
        return kernel.with_missing(_apart(output, query), log_z.unflatten(1, (len(query), -1)).transpose(0, 1))

    @staticmethod
    def backward(grad: Tensor, *saved: Any) -> tuple[Tensor, ...]:
        """Gradients of query, key and value."""
        query, key, value, output, log_z, mask, scale, low, high = saved
        tensors = (_joined(tensor) for tensor in (grad, query, key, value, output))
        gradients = kernel.operators._flash_attention_backward(
            *tensors,
            kernel.finite(log_z).transpose(0, 1).flatten(1).contiguous(),
            *_places(mask, query),
            0.0,
            False,
            *kernel.no_random_state(query),
            scale=scale,
            **_window(low, high),
        )
        return tuple(_apart(gradient, query) for gradient in gradients)

    @staticmethod
    def by_reference(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        low: int | None,
        high: int | None,
        value_is_key: bool,
    ) -> tuple[Tensor, ...]:
        """Both results by the reference."""
        assert mask is not None
        documents = Documents.of_boundaries(*mask.tolist())
        return by_reference(query, key, value, None, scale, low, high, value_is_key, documents)


class PackedFlash(Fused):
    """The backend of packed rows on CUDA."""

    def _run(
        self, problem: AttentionProblem, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        documents = problem.documents
        assert documents is not None
        boundaries = torch.tensor([documents.query_boundaries, documents.key_boundaries], dtype=torch.int32)
        return super()._run(problem, query, key, value, boundaries, scale)


def _joined(tensor: Tensor) -> Tensor:
    """All rows of a batch ``(B, H, L, D)`` one after the other, ``(B·L, H, D)``."""
    (joined,) = kernel.aligned(tensor.transpose(1, 2).flatten(0, 1))
    return joined


def _apart(joined: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_joined`, for the batch of `like`."""
    return joined.unflatten(0, (len(like), -1)).transpose(1, 2)


def _places(boundaries: Tensor, query: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Where each document of each item begins, for queries and keys; and the longest document of either."""
    query_boundaries, key_boundaries = boundaries.tolist()
    batch = len(query)
    return (
        _batch_boundaries(query_boundaries, batch).to(query.device),
        _batch_boundaries(key_boundaries, batch).to(query.device),
        _longest(query_boundaries),
        _longest(key_boundaries),
    )


def _batch_boundaries(boundaries: list[int], batch: int) -> Tensor:
    """Boundaries of all documents of all items, whose rows are joined."""
    length = boundaries[-1]
    begins = [item * length + place for item in range(batch) for place in boundaries[:-1]]
    return torch.tensor([*begins, batch * length], dtype=torch.int32)


def _longest(boundaries: list[int]) -> int:
    """The length of the longest document."""
    return max(end - begin for begin, end in pairwise(boundaries))


def _window(low: int | None, high: int | None) -> dict[str, int]:
    """The sides of a window, in documents with as many queries as keys; −1 is no end."""
    return {"window_size_left": -1 if low is None else -low, "window_size_right": -1 if high is None else high}


PACKED_FLASH = PackedFlash(PackedFlashKernel())
"""FlashAttention for packed rows on CUDA."""
