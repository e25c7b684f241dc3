"""Attention and log Z from a fused kernel: where it is right, and what it wants."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from massieu.foundation.transforms import (
    in_functorch,
    in_nested_forward_mode,
    may_be_differentiated,
    some,
    values_are_readable,
)
from massieu.ops import reference
from massieu.ops.cpu_kernel import CpuKernel
from massieu.ops.cuda import proof
from massieu.ops.fused_kernel import FusedKernel, with_log_partition
from massieu.ops.shapes import AttentionProblem, hidden_by_position, working_dtype


class Fused:
    """The backend of a kernel, with the derivatives that it lacks."""

    def __init__(self, kernel: FusedKernel) -> None:
        self.name, self.bands, self._kernel = kernel.name, kernel.bands, kernel
        self._function = with_log_partition(kernel)

    def refuses(self, problem: AttentionProblem, *others: Tensor) -> str | None:
        """Why the kernel cannot take this problem."""
        weight = problem.log_weight
        if torch.compiler.is_compiling() and in_functorch():
            return "inside a compiled torch.func transform its gradient would be lost"
        if in_nested_forward_mode():
            return "it has no forward mode within forward mode"
        if problem.pairs == 0:
            return "it needs at least one query and one key"
        if weight is not None and may_be_differentiated(weight) and weight.shape[3] > 1:
            return "it has no gradient for a log_weight per query and key"
        reason = self._kernel.refuses(problem)
        return proof.failure(self, problem) if reason is None and self._kernel.proof else reason

    def forward(self, problem: AttentionProblem, *others: Tensor) -> tuple[Tensor, ...]:
        """Output ``(B, Hk, G, L, E)``, where there are values, and log-partition ``(B, Hk, G, L)``."""
        if problem.offset and not self.bands:
            return _merged(*(self.forward(part) for part in _past_and_own(problem)))
        query, key, mask, scale = _kernel_arguments(problem, self._kernel)
        if problem.value is None:
            size = self._size(query)
            query, key = _widened(query, size), _widened(key, size)
            # The kernel must have values, and the keys are at hand.
            return (self._run(problem, query, key, key.detach(), mask, scale)[1],)
        # The kernel does not check that key and value have as many heads.
        value = _repeat_heads(problem.value.to(query.dtype), key.shape[1])
        value_size, size = value.shape[-1], self._size(query, value)
        query, key, value = (_widened(tensor, size) for tensor in (query, key, value))
        # The compiler does not take one tensor for two arguments of a custom function.
        value = value.view_as(value) if value is key else value
        output, log_z = self._run(problem, query, key, value, mask, scale)
        output = output[..., :value_size].to(problem.query.dtype)
        return output.reshape(*log_z.shape, value_size), log_z

    def _size(self, *tensors: Tensor) -> int:
        """One head size for all that the kernel takes."""
        size, multiple = max([tensor.shape[-1] for tensor in tensors]), self._kernel.multiple
        return -(-size // multiple) * multiple

    def _run(
        self, problem: AttentionProblem, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        empty = problem.sees_no_key()
        if empty is not None:
            unknown = torch.compiler.is_compiling() or in_functorch() or query.device.type != "cpu"
            if unknown or bool(empty.any()):
                heads = problem.query.shape[1:3]
                query = query.masked_fill(empty.expand(-1, *heads, -1).flatten(1, 2).unsqueeze(-1), 0.0)
        low, high = (problem.band or (None, None)) if self.bands else (None, 0 if problem.is_causal else None)
        output, log_z = self._function(query, key, value, mask, scale, low, high, problem.value is None)
        log_z = log_z.reshape(problem.query.shape[:-1])
        return output, log_z if empty is None else log_z.masked_fill(empty, -torch.inf)


def _past_and_own(problem: AttentionProblem) -> tuple[AttentionProblem, AttentionProblem]:
    """Causality with an offset: the keys that every query sees, and a triangle of the others."""
    length, keys, offset = problem.query.shape[3], problem.key.shape[2], problem.offset
    problem, rows = replace(problem, offset=0), slice(0, length)
    past = replace(problem.narrow(rows, slice(0, offset)), is_causal=False)
    return past, problem.narrow(rows, slice(offset, min(keys, offset + length)))


def _merged(*parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results over the keys of all parts together."""
    weights, total, log_z = reference.softmax(torch.stack([part[-1] for part in parts], dim=-1), None)
    if len(parts[0]) == 1:
        return (log_z,)
    shares = (weights / total.unsqueeze(-1)).unsqueeze(-2)
    outputs = torch.stack([part[0] for part in parts], dim=-1)
    return (outputs * shares).sum(-1).to(outputs.dtype), log_z


def _kernel_arguments(problem: AttentionProblem, kernel: FusedKernel) -> tuple[Tensor, Tensor, Tensor | None, float]:
    """Query ``(B, H, L, D)``, key ``(B, Hk or H, N, D)``, additive mask and scale as the kernel wants them."""
    query, key, scale, weight = problem.query, problem.key, problem.scale, problem.log_weight
    # The kernel knows of causality itself, and some know of every band.
    window = None if kernel.bands else problem.window
    band = hidden_by_position(window, 0, query.shape[3], key.shape[2], query.device)
    rounded = weight is not None and weight.is_floating_point() and kernel.masks != "any"
    if weight is not None and (rounded or may_be_differentiated(weight)):
        # A half-precision column, or mask, would round the log-weights.
        query, key = query.to(problem.dtype), key.to(problem.dtype)
    if isinstance(scale, Tensor) or ((problem.is_causal or kernel.bands) and scale <= 0):
        query, scale = (query * scale).to(query.dtype), 1.0
    query = query.flatten(1, 2)
    if weight is None:
        return query, key, None if band is None else _hiding(band, _mask_dtype(query, kernel)), scale
    if may_be_differentiated(weight):
        query, key, mask = _with_weight_column(query * scale, key, weight, problem)
        return query, key, mask if band is None else mask.masked_fill(band, -torch.inf), 1.0
    if (
        band is None
        and weight.is_floating_point()
        and weight.shape[3] == 1
        and weight.device.type == "cpu"
        and values_are_readable(weight)
        and not some(weight)
    ):
        # A mask costs the kernel up to a tenth of its time, also when it hides and weighs nothing.
        return query, key, None, scale
    if weight.dtype == torch.bool:
        hidden = ~weight if band is None else ~weight | band
        weight = _hiding(hidden, query.dtype if band is None else _mask_dtype(query, kernel))
    else:
        weight = weight.to(problem.dtype)
        weight = weight if band is None else weight.masked_fill(band, -torch.inf)
    return query, key, _flatten_heads(weight, problem), scale


def _mask_dtype(query: Tensor, kernel: FusedKernel) -> torch.dtype:
    return working_dtype(query) if kernel.masks == "any" else query.dtype


def _hiding(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask, of at least four dimensions, to be added to scores."""
    return torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, -torch.inf)[(None,) * max(0, 4 - hidden.ndim)]


def _flatten_heads(weight: Tensor, problem: AttentionProblem) -> Tensor:
    if weight.shape[1] == weight.shape[2] == 1:
        return weight.squeeze(2)
    return weight.expand(-1, *problem.query.shape[1:3], -1, -1).flatten(1, 2)


def _with_weight_column(
    query: Tensor, key: Tensor, weight: Tensor, problem: AttentionProblem
) -> tuple[Tensor, Tensor, Tensor]:
    """Per-key log-weights as one more column of the key, met by ones in the query: their gradient is the key's."""
    weight = _flatten_heads(weight, problem).to(query.dtype)
    heads = key.shape[1]
    if weight.shape[1] not in (1, heads):
        heads = weight.shape[1]
        key = _repeat_heads(key, heads)
    hidden = weight.detach() == -torch.inf
    column = weight.masked_fill(hidden, 0.0).expand(key.shape[0], heads, 1, key.shape[2]).mT
    query = torch.cat([query, torch.ones_like(query[..., :1])], dim=-1)
    mask = torch.zeros_like(weight.detach()).masked_fill(hidden, -torch.inf)
    return query, torch.cat([key, column], dim=-1), mask.expand(-1, -1, -1, key.shape[2])


def _widened(tensor: Tensor, size: int) -> Tensor:
    """Zeros behind each row."""
    return tensor if tensor.shape[-1] == size else F.pad(tensor, (0, size - tensor.shape[-1]))


def _repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    repeats = heads // tensor.shape[1]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=1)


CPU = Fused(CpuKernel())
"""PyTorch's kernel for the CPU."""
