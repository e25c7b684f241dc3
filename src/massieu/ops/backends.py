"""The choice of what computes a function of this package: backends in order of preference, each of which may refuse."""

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
        """The name by which callers choose it."""
        ...

    @property
    def bands(self) -> bool:
        """Whether it takes windows; otherwise a window is cut into chunks for it (`massieu.ops.band`)."""
        ...

    def refuses(self, problem: AttentionProblem, *others: Tensor) -> str | None:
        """The reason why it cannot take this problem, with the function's other tensors; None if it can."""
        ...

    def forward(self, problem: AttentionProblem, *others: Tensor) -> tuple[Tensor, ...]:
        """The results in the common layout, ``(B, Hk, G, L, ...)``; their backward pass is this backend's too."""
        ...


def check_name(name: str, registry: Sequence[Backend]) -> None:
    """Raise a ValueError unless the name is "auto" or that of a backend."""
    choice("backend", name, "auto", *(backend.name for backend in registry))


def choose(name: str, registry: Sequence[Backend], problem: AttentionProblem, *others: Tensor) -> Backend:
    """The backend of that name, or for "auto" the first that takes the problem.

    Raises:
        ValueError: there is no such backend, or it refuses; the message gives its reason.
    """
    if type(name) is not str or name != "auto":
        check_name(name, registry)
    for backend in registry:
        if name not in ("auto", backend.name):
            continue
        reason = backend.refuses(problem, *others)
        if reason is None:
            return backend
        if name != "auto":
            raise ValueError(f"backend {name!r} cannot be used here: {reason}; 'reference' can")
    raise AssertionError("a registry ends in a reference")
