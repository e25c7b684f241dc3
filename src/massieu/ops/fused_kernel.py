"""Somebody else's fused attention as a differentiable function of both its results.

Such a kernel already computes log Z, and its backward needs the forward's output only for D_i = Σ_c grad_ic·output_ic.
A cotangent g of log Z enters the gradients as D_i − g_i, so handing the kernel some other output whose product with the
cotangent is D_i − g_i gives the gradients of both results at once. Second derivatives and forward mode are the
reference's.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from massieu.ops import packed_rows, reference
from massieu.ops.cuda import rows
from massieu.ops.differentiable import differentiable
from massieu.ops.documents import Documents
from massieu.ops.shapes import AttentionProblem

Pass = Callable[..., tuple[Tensor, ...]]


Masks = Literal["any", "own dtype", "none"]


class FusedKernel(Protocol):
    """Attention by an operator that has a log-partition but no gradient for it.

    Queries are ``(B, H, L, D)``, keys and values ``(B, Hk, N, D)`` of one head size, masks are added to the scores and
    broadcast to ``(B, H, L, N)``. Query i sees keys i + low … i + high; a `low` of None: all from the first, and a `high` of
    None: all. The scale is positive where there is a `high`. Both passes are static methods.
    """

    bands: bool
    """Whether it takes every band; else only a `low` of None with a `high` of 0, causality."""
    masks: Masks
    """Which it takes: of at least float32 beside half precision, of the query's dtype alone, or none."""
    half_only: bool
    """Whether it computes in half precision alone."""
    multiple: int
    """Of what head sizes must be a multiple."""
    proof: bool
    """Whether it must prove itself, on this machine, before it is used."""

    @property
    def name(self) -> str:
        """How a caller asks for it."""
        ...

    def refuses(self, problem: AttentionProblem) -> str | None:
        """Which device, dtype, head size, mask, window or soft cap of the problem it cannot take; None if it takes all."""
        ...

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, low: int | None, high: int | None
    ) -> tuple[Tensor, ...]:
        """Output ``(B, H, L, D)`` and log-partition ``(B, H, L)``, at least float32; a row without a key may hold anything."""
        ...

    @staticmethod
    def backward(grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
        """Gradients of query, key and value from the cotangent of the output.

        Args:
            given: query, key, value, output, log-partition, mask, scale, low and high. The output is not the one that
                `forward` returned, and may be used for its product with `grad` alone.
        """
        ...


def plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    low: int | None,
    high: int | None,
    value_is_key: bool,
    documents: Documents | None = None,
) -> tuple[Tensor, ...]:
    """The kernel's two results by the reference."""
    grouped = query.unflatten(1, (key.shape[1], -1))
    if mask is not None:
        while mask.ndim < 4:
            mask = mask.unsqueeze(0)
        mask = mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, grouped.shape[1:3])
    is_causal = low is None and high is not None
    window = None if low is None or high is None else (low, high)
    lead, offset = tuple(query.shape[:-1]), high if is_causal and high else 0
    problem = AttentionProblem(
        grouped, key, value, mask, scale, is_causal, lead, window, offset=offset, documents=documents
    )
    run = reference.attention if documents is None else partial(packed_rows.apply, reference.attention)
    return tuple(problem.restore(result) for result in run(problem))


def rows_contiguous(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Kernels read rows of adjacent numbers."""
    return tuple(part if part is None or part.stride(-1) == 1 else part.contiguous() for part in tensors)


def _gradient(
    run: Pass,
    pull_back: Pass,
    half_only: bool,
    exact_masks: bool,
    tensors: Sequence[Any],
    results: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    options: tuple[float, int | None, int | None, bool],
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    query, key, value, mask = tensors
    (output, log_z), (grad_output, grad_log_z), (scale, low, high, value_is_key) = results, cotangents, options
    dtype, unit = query.dtype, None
    if dtype == torch.float16 and half_only:
        grad_output, grad_log_z, unit = _in_range(grad_output, grad_log_z, output)
    elif dtype == torch.float16:
        # Its range cannot hold what `_merge_cotangents` builds.
        query, key, value, output = (tensor.float() for tensor in (query, key, value, output))
        mask = None if mask is None else mask.float()
    # Weights of 0 where all scores are −∞, as where there is no key.
    log_z = log_z.nan_to_num(torch.nan, torch.inf, 0.0)
    exact_masks = exact_masks or query.dtype == log_z.dtype
    exchanged = exact_masks and value_is_key and grad_output is None and _is_per_key(mask) and high is None
    if exchanged and grad_log_z is not None:
        gradients = _log_partition_gradients(run, query, key, mask, output, log_z, grad_log_z, scale)
        gradients = *gradients, torch.zeros_like(value)
    else:
        one_channel = query.shape[-1] == 1
        if one_channel:
            # `_merge_cotangents` works with two.
            query, key, value, output = (F.pad(tensor, (0, 1)) for tensor in (query, key, value, output))
            grad_output = None if grad_output is None else F.pad(grad_output, (0, 1))
        grad_output, output = _merge_cotangents(grad_output, grad_log_z, output)
        gradients = pull_back(grad_output, query, key, value, output, log_z, mask, scale, low, high)
        if one_channel:
            gradients = tuple(gradient[..., :1].contiguous() for gradient in gradients)
    if unit is not None:
        gradients = tuple(rows.scaled(gradient, 1 / unit) for gradient in gradients)
    return tuple(gradient.to(dtype) for gradient, needed in zip(gradients, wanted, strict=True) if needed)


def _in_range(
    grad_output: Tensor | None, grad_log_z: Tensor | None, output: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The cotangents times a power of two that brings the largest near 1, where float16 has its digits; and that power."""
    parts = [end.abs().float() for part in (grad_output, grad_log_z) if part is not None for end in part.aminmax()]
    if not parts:
        return None, None, None
    largest = torch.stack(parts).amax()
    # No such power, of zeros, infinities or NaN, changes anything.
    known = (largest > 0) & largest.isfinite()
    unit = torch.where(known, -torch.where(known, largest, 1.0).log2().floor(), 0.0).clamp(-126, 126).exp2()
    grad_output = None if grad_output is None else rows.scaled(grad_output.to(output.dtype), unit)
    return grad_output, None if grad_log_z is None else grad_log_z * unit, unit


def _is_per_key(mask: Tensor | None) -> bool:
    return mask is None or (mask.shape[1] == mask.shape[2] == 1)


def _log_partition_gradients(
    run: Pass,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    mean: Tensor,
    log_z: Tensor,
    grad: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of log Z for query and key by one more forward pass, with queries and keys in exchanged roles.

    The query's is grad·scale·E_p key, and the forward's output is that mean. The key's is
    scale·Σ_i p_in grad_i query_i with p_in = exp(score_in + mask_n − log Z_i): attention of key n over the queries of
    log-weight −log Z_i, times its own partition.
    """
    batch, key_heads = key.shape[:2]
    step = (grad * scale).unsqueeze(-1).to(query.dtype)
    queries, values, level = (
        tensor.reshape(batch, key_heads, -1, tensor.shape[-1]) for tensor in (query, step * query, log_z.unsqueeze(-1))
    )
    # A mask whose rows are not contiguous would be written out in full by the kernel.
    level = -level.mT.contiguous()
    sums, log_total = run(key, queries, values, level, scale, None, None)
    if mask is not None:
        log_total = log_total + mask.squeeze(2)
    return step * mean, sums * log_total.exp().unsqueeze(-1).to(sums.dtype)


_PIECE = 1 << 16
"""Numbers of the output at a time on the CPU: what is made on the way is as large as a piece, and only the result is whole."""
_CUDA_PIECE = 1 << 25
"""The same where a small piece would leave the device idle: 128 MiB in float32."""


def _merge_cotangents(grad_output: Tensor | None, grad_log_z: Tensor | None, output: Tensor) -> tuple[Tensor, Tensor]:
    """A cotangent of the output and an output whose product is D_i − g_i, to the square of their dtype's rounding."""
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    grad_output = grad_output.to(output.dtype)
    # Kernels read rows of adjacent numbers.
    grad_output = grad_output if grad_output.stride(-1) == 1 else grad_output.contiguous()
    if grad_log_z is None:
        return grad_output, output
    if rows.usable(output):
        from massieu.ops.cuda import row_kernels

        return row_kernels.merged(grad_output, grad_log_z, output, *rows.least_parts(output.dtype))
    pieces = min(-(-output.numel() // (_PIECE if output.device.type == "cpu" else _CUDA_PIECE)), output.shape[2])
    if torch.compiler.is_compiling() or pieces < 2:
        return _merged(grad_output, grad_log_z, output)
    carrier, given = torch.empty_like(grad_output), grad_output
    size = -(-output.shape[2] // pieces)
    for place in range(0, output.shape[2], size):
        own, log_z, whole, part = (
            tensor.narrow(2, place, min(size, output.shape[2] - place))
            for tensor in (given, grad_log_z, output, carrier)
        )
        merged, made = _merged(own, log_z, whole)
        part.copy_(made)
        if merged is not own:
            grad_output = grad_output.clone() if grad_output is given else grad_output
            grad_output.narrow(2, place, own.shape[2]).copy_(merged)
    return grad_output, carrier


def _merged(grad_output: Tensor, grad_log_z: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """The same of some rows; the cotangent itself where it can carry all.

    Channel 0 carries what rounding leaves of the total that all others carry. They do so by signs and a norm: nothing is
    squared, so nothing underflows. The output itself could not take g up: a change below half its rounding is none.
    """
    tiny, share = rows.least_parts(output.dtype)
    dtype = torch.promote_types(output.dtype, torch.float32)
    # One buffer as large as the output, for one thing after the other.
    buffer = grad_output.to(dtype, copy=True).mul_(output)
    # g is subtracted from what is not rounded yet: from a number of single precision it would be lost as from the output.
    total = buffer[..., 1:].sum(-1, keepdim=True) + (buffer[..., :1].double() - grad_log_z.unsqueeze(-1))
    buffer.copy_(grad_output).abs_()
    one, rest = buffer[..., :1].clone(), buffer[..., 1:].sum(-1, keepdim=True)
    least = (share * total.abs()).clamp_min(tiny).to(output.dtype)
    lost = (torch.minimum(one, rest) < least) & (total != 0)
    if torch.compiler.is_compiling() or lost.device.type != "cpu" or bool(lost.any()):
        # Cotangents too small to carry it are replaced by one that just can, far below the resolution of the result.
        first, others = grad_output[..., :1], grad_output[..., 1:]
        first = torch.where(lost & (one < least), least, first)
        others = torch.where(lost & (rest < least), F.pad(least, (0, others.shape[-1] - 1)), others)
        grad_output = torch.cat([first, others], dim=-1)
        one, rest = (torch.where(lost, norm.maximum(least), norm) for norm in (one, rest))
    step = (total / rest.clamp_min(tiny)).to(output.dtype)
    remainder = (total - step.double() * rest) / one.clamp_min(tiny)
    carrier = buffer.to(output.dtype).copy_(grad_output).sign_()
    carrier *= step
    carrier[..., :1] = torch.sign(grad_output[..., :1]) * remainder
    return grad_output, carrier


def _fold_into_batch(
    function: type[torch.autograd.Function], size: int, in_dims: Sequence[Any], arguments: Sequence[Any]
) -> tuple[Any, Any]:
    """vmap: the mapped dimension becomes part of the kernel's batch."""

    def fold(argument: Any, dim: int | None) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        argument = argument.unsqueeze(0) if dim is None else argument.movedim(dim, 0)
        batch = max(argument.shape[1], batches)
        return argument.expand(size, batch, *argument.shape[2:]).flatten(0, 1)

    batches = arguments[0].shape[0 if in_dims[0] is None else int(in_dims[0] == 0)]
    results = function.apply(*(fold(*pair) for pair in zip(arguments, in_dims, strict=True)))
    unfolded = tuple(result.unflatten(0, (size, -1)) for result in results)  # pyright: ignore
    return unfolded, (0,) * len(unfolded)


def with_log_partition(kernel: FusedKernel) -> Callable[..., tuple[Tensor, ...]]:
    """(query, key, value, mask, scale, low, high, value_is_key) ↦ the results of `FusedKernel.forward`.

    Derivatives are those in query, key and value. With `value_is_key` only log Z is wanted, and the value is the key: a
    cheaper gradient.
    """

    # Compiled code holds functions, not objects.
    run, pull_back, half_only, exact_masks = kernel.forward, kernel.backward, kernel.half_only, kernel.masks == "any"
    twin = getattr(kernel, "plain", plain)

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        low: int | None,
        high: int | None,
        value_is_key: bool,
    ) -> tuple[Tensor, ...]:
        return run(query, key, value, mask, scale, low, high)

    def gradient(*arguments: Any) -> tuple[Tensor, ...]:
        return _gradient(run, pull_back, half_only, exact_masks, *arguments)

    return differentiable(forward, gradient, twin, tensors=4, options=4, vmap=_fold_into_batch)
