"""The backend of a fused kernel: which problems it can take, and a problem's arguments in the kernel's form."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from massieu.foundation.transforms import (
    any_true,
    in_functorch,
    in_nested_forward_mode,
    may_be_differentiated,
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
        self.name = kernel.name
        self.bands = kernel.bands
        self._kernel = kernel
        self.kernel_results = with_log_partition(kernel)
        """From arguments in the kernel's form, as `with_log_partition` says."""

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
        if reason is None and self._kernel.proof:
            return proof.failure(self, problem)
        return reason

    def forward(self, problem: AttentionProblem, *others: Tensor) -> tuple[Tensor, ...]:
        """Output ``(B, Hk, G, L, E)``, where there are values, and log-partition ``(B, Hk, G, L)``."""
        if problem.offset and not self.bands:
            return _merged(*(self.forward(part) for part in _prefix_and_triangle(problem)))
        query, key, mask, scale = _kernel_arguments(problem, self._kernel)
        if problem.value is None:
            size = self._size(query)
            query = _padded(query, size)
            key = _padded(key, size)
            # The kernel must have values: with the keys as values its output is the gradient of log Z.
            return (self._run(problem, query, key, key.detach(), mask, scale)[1],)
        # The kernel does not check that key and value have the same number of heads.
        value = problem.value
        if value.dtype != query.dtype:
            value = value.to(query.dtype)
        value = _repeat_heads(value, key.shape[1])
        value_size = value.shape[-1]
        size = self._size(query, value)
        query = _padded(query, size)
        key = _padded(key, size)
        value = _padded(value, size)
        if value is key:
            # The compiler does not take one tensor for two arguments of a custom function.
            value = value.view_as(value)
        output, log_z = self._run(problem, query, key, value, mask, scale)
        if size != value_size:
            output = output[..., :value_size]
        if output.dtype != problem.query.dtype:
            output = output.to(problem.query.dtype)
        return output.reshape((*log_z.shape, value_size)), log_z

    def _size(self, *tensors: Tensor) -> int:
        """The least head size that the kernel takes and that all tensors can be padded to."""
        size = max([tensor.shape[-1] for tensor in tensors])
        multiple = self._kernel.multiple
        return -(-size // multiple) * multiple

    def _run(
        self, problem: AttentionProblem, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The kernel's results, ``(B, H, L, D)`` and ``(B, Hk, G, L)``; log Z is −∞ for queries that see no key."""
        sees_no_key = problem.sees_no_key()
        if sees_no_key is not None:
            is_unreadable = torch.compiler.is_compiling() or in_functorch() or query.device.type != "cpu"
            if is_unreadable or bool(sees_no_key.any()):
                # Such a query may hold NaN, which would reach the gradients of keys: 0·NaN is NaN.
                heads = problem.query.shape[1:3]
                query = query.masked_fill(sees_no_key.expand(-1, *heads, -1).flatten(1, 2).unsqueeze(-1), 0.0)
        if self.bands:
            low, high = problem.band or (None, None)
        else:
            low = None
            high = 0 if problem.is_causal else None
        output, log_z = self.kernel_results(query, key, value, mask, scale, low, high, problem.value is None)
        log_z = log_z.reshape(problem.query.shape[:-1])
        if sees_no_key is not None:
            log_z = log_z.masked_fill(sees_no_key, -torch.inf)
        return output, log_z


def _prefix_and_triangle(problem: AttentionProblem) -> tuple[AttentionProblem, AttentionProblem]:
    """Causality with an offset as two problems: the first keys, which every query sees, and causality over the others."""
    length = problem.query.shape[3]
    keys = problem.key.shape[2]
    offset = problem.offset
    problem = replace(problem, offset=0)
    rows = slice(0, length)
    prefix = replace(problem.narrow(rows, slice(0, offset)), is_causal=False)
    triangle = problem.narrow(rows, slice(offset, min(keys, offset + length)))
    return prefix, triangle


def _merged(*parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results over the keys of all parts together: log Z is a log-sum-exp, the output the average weighted by Z."""
    weights, total, log_z = reference.softmax(torch.stack([part[-1] for part in parts], dim=-1), None)
    if len(parts[0]) == 1:
        return (log_z,)
    shares = (weights / total.unsqueeze(-1)).unsqueeze(-2)
    outputs = torch.stack([part[0] for part in parts], dim=-1)
    return (outputs * shares).sum(-1).to(outputs.dtype), log_z


def _kernel_arguments(problem: AttentionProblem, kernel: FusedKernel) -> tuple[Tensor, Tensor, Tensor | None, float]:
    """Query ``(B, H, L, D)``, key ``(B, Hk or H, N, D)``, additive mask and scale in the kernel's form."""
    query = problem.query
    key = problem.key
    scale = problem.scale
    weight = problem.log_weight
    # The kernel applies causality itself, and some kernels apply every band.
    window = None if kernel.bands else problem.window
    hidden_by_window = hidden_by_position(window, 0, query.shape[3], key.shape[2], query.device)
    would_round = weight is not None and weight.is_floating_point() and kernel.masks != "any"
    if weight is not None and (would_round or may_be_differentiated(weight)):
        # A half-precision column, or mask, would round the log-weights.
        query = query.to(problem.dtype)
        key = key.to(problem.dtype)
    if isinstance(scale, Tensor) or ((problem.is_causal or kernel.bands) and scale <= 0):
        # The kernel takes one number, and with causality a positive one.
        query = (query * scale).to(query.dtype)
        scale = 1.0
    query = query.flatten(1, 2)
    if weight is None:
        mask = None if hidden_by_window is None else _hiding(hidden_by_window, _mask_dtype(query, kernel))
        return query, key, mask, scale
    if may_be_differentiated(weight):
        query, key, mask = _with_weight_column(query * scale, key, weight, problem)
        if hidden_by_window is not None:
            mask = mask.masked_fill(hidden_by_window, -torch.inf)
        return query, key, mask, 1.0
    if (
        hidden_by_window is None
        and weight.is_floating_point()
        and weight.shape[3] == 1
        and weight.device.type == "cpu"
        and values_are_readable(weight)
        and not any_true(weight)
    ):
        # A mask costs the kernel up to a tenth of its time, also when it hides and weighs nothing.
        return query, key, None, scale
    if weight.dtype == torch.bool:
        hidden = ~weight
        dtype = query.dtype
        if hidden_by_window is not None:
            hidden = hidden | hidden_by_window
            dtype = _mask_dtype(query, kernel)
        mask = _hiding(hidden, dtype)
    else:
        mask = weight.to(problem.dtype)
        if hidden_by_window is not None:
            mask = mask.masked_fill(hidden_by_window, -torch.inf)
    return query, key, _flatten_heads(mask, problem), scale


def _mask_dtype(query: Tensor, kernel: FusedKernel) -> torch.dtype:
    """The dtype of a mask that the kernel takes with this query."""
    return working_dtype(query) if kernel.masks == "any" else query.dtype


def _hiding(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """−∞ for hidden pairs and 0 for others, to be added to scores; at least four dimensions."""
    mask = torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, -torch.inf)
    return mask[(None,) * max(0, 4 - hidden.ndim)]


def _flatten_heads(weight: Tensor, problem: AttentionProblem) -> Tensor:
    """From ``(#B, #Hk, #G, #L, #N)`` to ``(#B, 1 or Hk·G, #L, #N)``."""
    if weight.shape[1] == weight.shape[2] == 1:
        return weight.squeeze(2)
    return weight.expand(-1, *problem.query.shape[1:3], -1, -1).flatten(1, 2)


def _with_weight_column(
    query: Tensor, key: Tensor, weight: Tensor, problem: AttentionProblem
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-weights of keys as one more column of the key, and ones as that of the query.

    query·key + weight is then a product of longer vectors, and the weights' gradient is that of the key's last column.

    Returns:
        Query, key, and a mask that hides the keys of log-weight −∞, which the column holds as 0.
    """
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


def _padded(tensor: Tensor, size: int) -> Tensor:
    """Zeros up to a head size, which change no score, and of an output are cut off."""
    return tensor if tensor.shape[-1] == size else F.pad(tensor, (0, size - tensor.shape[-1]))


def _repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    """Each of the key heads as often as query heads share it."""
    repeats = heads // tensor.shape[1]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=1)


CPU = Fused(CpuKernel())
"""PyTorch's kernel for the CPU."""
