"""What computes a function of this package: backends in order of preference, each of which may refuse a problem."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from massieu.foundation.arguments import choice
from massieu.ops.shapes import AttentionProblem


class Backend(Protocol):
    """One way to compute a function of an attention problem.

    A fused kernel, on the CPU or on CUDA, is a `massieu.ops.fused_kernel.FusedKernel`, of which `massieu.ops.fused.Fused`
    makes a backend. Every registry ends in a reference, which refuses nothing.
    """

    @property
    def name(self) -> str:
        """How a caller asks for it."""
        ...

    @property
    def bands(self) -> bool:
        """Whether it takes a window as it is; else it gets one of chunks (`massieu.ops.band`)."""
        ...

    def refuses(self, problem: AttentionProblem, *others: Tensor) -> str | None:
        """Why it cannot take this problem, and the tensors that go in beside it; None where it is right."""
        ...

    def forward(self, problem: AttentionProblem, *others: Tensor) -> tuple[Tensor, ...]:
        """The results in the common layout, ``(B, Hk, G, L, ...)``; their backward pass is this backend's too."""
        ...


def check_name(asked: str, registry: Sequence[Backend]) -> None:
    """Raise a ValueError unless there is a backend of that name, or it is "auto"."""
    choice("backend", asked, "auto", *(backend.name for backend in registry))


def choose(asked: str, registry: Sequence[Backend], problem: AttentionProblem, *others: Tensor) -> Backend:
    """The backend of that name, or for "auto" the first that takes the problem.

    Raises:
        ValueError: there is no such backend, or it refuses; the message has its reason.
    """
    check_name(asked, registry)
    for backend in registry:
        if asked not in ("auto", backend.name):
            continue
        reason = backend.refuses(problem, *others)
        if reason is None:
            return backend
        if asked != "auto":
            raise ValueError(f"backend {asked!r} cannot be used here: {reason}; 'reference' can")
    raise AssertionError("a registry ends in a reference")
