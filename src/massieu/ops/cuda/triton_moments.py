"""The moments of attention's weights by a kernel in Triton, without gradient: the CUDA counterpart of tiles.

Its first call compiles it, which takes seconds. It is tested as PyTorch's kernels are: against float64, once per process,
device, dtype and layout.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from torch import Tensor

from massieu.ops import moment_blocks, tiles
from massieu.ops.cuda import proof
from massieu.ops.moment_blocks import Names
from massieu.ops.shapes import AttentionProblem

MOST_SIZE = 256
"""Largest head size."""
MOST_REACH = 2**31
"""Numbers of a head must lie closer together in memory than this, as the kernel counts with 32 bits."""


class TritonMoments:
    """The backend of some moments."""

    name = "triton"
    bands = True
    device_type = "cuda"

    def __init__(self, names: Names) -> None:
        self._names = names

    def refuses(self, problem: AttentionProblem, *others: Tensor) -> str | None:
        """Why it cannot take this problem.

        It refuses other devices, float64, float log-weights, heads of more than 256 numbers, and what tiles refuse.
        """
        query = problem.query
        value = problem.value
        if query.device.type != self.device_type:
            return f"it runs on {self.device_type.upper()}, got {query.device}"
        if find_spec("triton") is None:
            return "it needs Triton, which is not installed"
        if query.dtype == torch.float64:
            return "it has no float64"
        if not moment_blocks.counts_keys(problem):
            return "it has no log_weight but booleans"
        size = max(query.shape[4], 0 if value is None else value.shape[3])
        if size > MOST_SIZE:
            return f"it has heads of at most {MOST_SIZE} numbers, got {size}"
        if _reach(problem) >= MOST_REACH:
            return f"it counts the numbers of a head with 32 bits, which here lie {_reach(problem):,} apart"
        reason = tiles.Blocks(self.forward).refuses(problem, *others)
        if reason is not None:
            return reason
        return self._failure(problem)

    def forward(self, problem: AttentionProblem, *others: Tensor) -> tuple[Tensor, ...]:
        """The moments ``(B, Hk, G, L)``, and the output where there are values."""
        from massieu.ops.cuda import moment_kernel

        with torch.no_grad(), torch.cuda.device_of(problem.query):
            results = moment_kernel.moments(_laid_out(problem), self._names)
        return tuple(results.values())

    def _failure(self, problem: AttentionProblem) -> str | None:
        """Why it is not right for problems of this layout on this device; None if it is."""
        # The kernel never sees documents: they are done one after the other, or padded to one length.
        layout = proof.Layout.of(replace(problem, documents=None))
        device = problem.query.device
        dtype = problem.query.dtype
        name = f"{self.name}: {', '.join(self._names)}"
        return proof.proved(name, device, dtype, layout, lambda: self._errors(device, dtype, layout))

    def _errors(self, device: torch.device, dtype: torch.dtype, layout: proof.Layout) -> "MomentErrors":
        """The errors on the small problem of a layout."""
        problem = layout.problem(device, dtype)
        exact = moment_blocks.moments(self._names, proof.wide(problem))
        results = self.forward(problem)
        labels = self._names if problem.value is None else (*self._names, "output")
        return MomentErrors({name: _error(*pair) for name, *pair in zip(labels, results, exact, strict=True)})


@dataclass(frozen=True)
class MomentErrors:
    """Errors against float64: of each moment the largest, relative to its largest number; of the output in root mean square."""

    errors: dict[str, float]

    def beyond(self, dtype: torch.dtype) -> str | None:
        """A phrase about the first error that is larger than the dtype explains; None if there is none."""
        single = 64 * torch.finfo(torch.float32).eps
        for name, error in self.errors.items():
            bar = single + 4 * torch.finfo(dtype).eps if name == "output" else single
            if not error <= bar:
                return f"its {name} is off by {error:.1e} of its size, of which rounding explains {bar:.1e}"
        return None


def _reach(problem: AttentionProblem) -> int:
    """How far apart in memory two numbers of one head can be, at the most."""
    parts = [part for part in (problem.query, problem.key, problem.value, problem.log_weight) if part is not None]
    return max(
        sum((size - 1) * step for size, step in zip(part.shape[-2:], part.stride()[-2:], strict=True)) for part in parts
    )


def _laid_out(problem: AttentionProblem) -> AttentionProblem:
    """Rows of adjacent numbers, and a scale that is a positive number."""
    query = problem.query
    key = problem.key
    value = problem.value
    scale = problem.scale
    if isinstance(scale, Tensor):
        query = query.to(problem.dtype) * scale
        scale = 1.0
        key = key.to(problem.dtype)
        value = None if value is None else value.to(problem.dtype)
    elif scale <= 0:
        # A negative scale's sign, or 0, goes to the query.
        query = query * (-1 if scale < 0 else 0)
        scale = -scale or 1.0
    query, key, value = (
        part if part is None or part.stride(-1) == 1 else part.contiguous() for part in (query, key, value)
    )
    assert query is not None and key is not None
    return replace(problem, query=query, key=key, value=value, scale=scale)


def _error(computed: Tensor, exact: Tensor) -> float:
    """The error of a result; infinite if numbers that are not finite differ."""
    computed = computed.double()
    is_finite = exact.isfinite()
    if not torch.equal(torch.where(is_finite, 0.0, computed), torch.where(is_finite, 0.0, exact)):
        return float("inf")
    error = torch.where(is_finite, computed - exact, 0.0)
    exact = torch.where(is_finite, exact, 0.0)
    if error.ndim > 4:
        return float(error.norm() / exact.norm())
    return float(error.abs().amax() / exact.abs().amax().clamp_min(1e-30))
