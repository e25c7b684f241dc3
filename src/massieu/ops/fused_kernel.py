"""Fused attention kernels of PyTorch as differentiable functions of both their results, output and log Z.

Such a kernel computes log Z already, and its backward pass uses the forward's output only for D_i = Σ_c grad_ic·output_ic.
A cotangent g of log Z enters the gradients as D_i − g_i. So the kernel is given another output, whose product with the
cotangent is D_i − g_i, and returns the gradients of both results at once. Second derivatives and forward mode are the
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
    """Masks that it takes: "any" is float32 or wider with half-precision queries, "own dtype" the query's dtype alone."""
    half_only: bool
    """Whether it computes in half precision alone."""
    multiple: int
    """Head sizes must be a multiple of this number."""
    proof: bool
    """Whether its results are compared with the reference, once on each machine, before it is used."""

    @property
    def name(self) -> str:
        """The name by which callers choose it."""
        ...

    def refuses(self, problem: AttentionProblem) -> str | None:
        """The reason why it cannot take this problem's device, dtype, head size, mask, window or soft cap; None if it can."""
        ...

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, low: int | None, high: int | None
    ) -> tuple[Tensor, ...]:
        """Output ``(B, H, L, D)`` and log-partition ``(B, H, L)``, at least float32; a row without a key may hold anything."""
        ...

    @staticmethod
    def backward(grad: Tensor, *saved: Any) -> tuple[Tensor, ...]:
        """Gradients of query, key and value from the cotangent of the output.

        Args:
            saved: query, key, value, output, log-partition, mask, scale, low and high. The output is not the one that
                `forward` returned, and may be used for its product with `grad` alone.
        """
        ...


def by_reference(
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
    problem = AttentionProblem(
        grouped,
        key,
        value,
        log_weight=mask,
        scale=scale,
        is_causal=is_causal,
        lead=tuple(query.shape[:-1]),
        window=None if low is None or high is None else (low, high),
        offset=high if is_causal and high else 0,
        documents=documents,
    )
    run = reference.attention if documents is None else partial(packed_rows.apply, reference.attention)
    return tuple(problem.restore(result) for result in run(problem))


def rows_contiguous(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors, copied if the numbers of a row are not adjacent, as kernels need them."""
    return tuple([part if part is None or part.stride(-1) == 1 else part.contiguous() for part in tensors])


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
    """Gradients of query, key and value, those that are wanted, by a kernel.

    Args:
        run, pull_back: the kernel's forward and backward pass.
        half_only, exact_masks: whether it computes in half precision alone, and whether it takes float32 masks.
        tensors, results, cotangents, options, wanted: as in `massieu.ops.differentiable.differentiable`.
    """
    query, key, value, mask = tensors
    output, log_z = results
    grad_output, grad_log_z = cotangents
    scale, low, high, value_is_key = options
    dtype = query.dtype
    unit = None
    if dtype == torch.float16 and half_only:
        grad_output, grad_log_z, unit = _in_range(grad_output, grad_log_z, output)
    elif dtype == torch.float16:
        # Its range cannot hold what `_merge_cotangents` builds.
        query, key, value, output = (tensor.float() for tensor in (query, key, value, output))
        mask = None if mask is None else mask.float()
    # A row without a key has log Z = −∞, and its scores are −∞: with 0 in its place every weight exp(score − log Z) is 0.
    log_z = log_z.nan_to_num(torch.nan, torch.inf, 0.0)
    exact_masks = exact_masks or query.dtype == log_z.dtype
    can_exchange = exact_masks and value_is_key and grad_output is None and _is_per_key(mask) and high is None
    if can_exchange and grad_log_z is not None:
        gradients = _log_partition_gradients(run, query, key, mask, output, log_z, grad_log_z, scale)
        gradients = *gradients, torch.zeros_like(value)
    else:
        one_channel = query.shape[-1] == 1
        if one_channel:
            # `_merge_cotangents` needs two channels: one carries what rounding leaves of the other.
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
    extremes = []
    for cotangent in (grad_output, grad_log_z):
        if cotangent is not None:
            extremes += [extreme.abs().float() for extreme in cotangent.aminmax()]
    if not extremes:
        return None, None, None
    largest = torch.stack(extremes).amax()
    # For zeros, infinities and NaN the power is 1.
    can_scale = (largest > 0) & largest.isfinite()
    exponent = torch.where(can_scale, -torch.where(can_scale, largest, 1.0).log2().floor(), 0.0)
    unit = exponent.clamp(-126, 126).exp2()
    if grad_output is not None:
        grad_output = rows.scaled(grad_output.to(output.dtype), unit)
    if grad_log_z is not None:
        grad_log_z = grad_log_z * unit
    return grad_output, grad_log_z, unit


def _is_per_key(mask: Tensor | None) -> bool:
    """Whether a mask is the same for all heads and queries."""
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

    def by_key_head(tensor: Tensor) -> Tensor:
        """From (B, H, L, ·) to (B, Hk, G·L, ·): the queries of all heads that share a key head, as one row."""
        return tensor.reshape(batch, key_heads, -1, tensor.shape[-1])

    # A mask whose rows are not contiguous would be written out in full by the kernel.
    query_weight = -by_key_head(log_z.unsqueeze(-1)).mT.contiguous()
    sums, log_total = run(key, by_key_head(query), by_key_head(step * query), query_weight, scale, None, None)
    if mask is not None:
        log_total = log_total + mask.squeeze(2)
    return step * mean, sums * log_total.exp().unsqueeze(-1).to(sums.dtype)


_PIECE = 1 << 16
"""Numbers of the output at a time on the CPU: intermediate results are as large as a piece, and stay in the cache."""
_CUDA_PIECE = 1 << 25
"""Numbers at a time on other devices, where a small piece would leave the device idle: 128 MiB in float32."""


def _merge_cotangents(grad_output: Tensor | None, grad_log_z: Tensor | None, output: Tensor) -> tuple[Tensor, Tensor]:
    """A cotangent of the output and a carrier in the output's place, whose product in row i is D_i − g_i.

    The product is right to the square of the dtype's rounding. The cotangent is the caller's own, except in rows where it is
    too small to carry g.
    """
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    grad_output = grad_output.to(output.dtype)
    # Kernels read rows of adjacent numbers.
    if grad_output.stride(-1) != 1:
        grad_output = grad_output.contiguous()
    if grad_log_z is None:
        return grad_output, output
    if rows.usable(output):
        from massieu.ops.cuda import row_kernels

        return row_kernels.merged(grad_output, grad_log_z, output, *rows.least_parts(output.dtype))
    length = output.shape[2]
    piece = _PIECE if output.device.type == "cpu" else _CUDA_PIECE
    pieces = min(-(-output.numel() // piece), length)
    if torch.compiler.is_compiling() or pieces < 2:
        return _merged(grad_output, grad_log_z, output)
    size = -(-length // pieces)
    carrier = torch.empty_like(grad_output)
    merged_grad = grad_output
    for first in range(0, length, size):
        rows_of_piece = slice(first, min(length, first + size))
        piece_grad = grad_output[:, :, rows_of_piece]
        new_grad, new_carrier = _merged(piece_grad, grad_log_z[:, :, rows_of_piece], output[:, :, rows_of_piece])
        carrier[:, :, rows_of_piece] = new_carrier
        if new_grad is not piece_grad:
            # The caller's cotangent must not be changed: it is copied once, for the first piece that changes it.
            if merged_grad is grad_output:
                merged_grad = grad_output.clone()
            merged_grad[:, :, rows_of_piece] = new_grad
    return merged_grad, carrier


def _merged(grad_output: Tensor, grad_log_z: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """`_merge_cotangents` for some rows; the cotangent itself if it can carry g in all of them.

    With total = D − g, channels 1 … D−1 of the carrier are step·sign(grad), so that their product with the cotangent is
    step·Σ|grad| ≈ total: nothing is squared, so nothing underflows. Channel 0 carries what rounding of the step leaves.
    The output itself could not take up g: a change below half its rounding is none.
    """
    tiny, share = rows.least_parts(output.dtype)
    dtype = torch.promote_types(output.dtype, torch.float32)
    # One buffer of the output's size holds the products, then the absolute values.
    buffer = grad_output.to(dtype, copy=True).mul_(output)
    # g is subtracted in double precision, before rounding: in single precision the sum could lose it, as the output does.
    total = buffer[..., 1:].sum(-1, keepdim=True) + (buffer[..., :1].double() - grad_log_z.unsqueeze(-1))
    buffer.copy_(grad_output).abs_()
    first_norm = buffer[..., :1].clone()
    other_norm = buffer[..., 1:].sum(-1, keepdim=True)
    least = (share * total.abs()).clamp_min(tiny).to(output.dtype)
    is_too_small = (torch.minimum(first_norm, other_norm) < least) & (total != 0)
    if torch.compiler.is_compiling() or is_too_small.device.type != "cpu" or bool(is_too_small.any()):
        # A cotangent that is too small is replaced by one that is just large enough, far below the resolution of the result.
        first = grad_output[..., :1]
        others = grad_output[..., 1:]
        first = torch.where(is_too_small & (first_norm < least), least, first)
        one_channel = F.pad(least, (0, others.shape[-1] - 1))
        others = torch.where(is_too_small & (other_norm < least), one_channel, others)
        grad_output = torch.cat([first, others], dim=-1)
        first_norm = torch.where(is_too_small, first_norm.maximum(least), first_norm)
        other_norm = torch.where(is_too_small, other_norm.maximum(least), other_norm)
    step = (total / other_norm.clamp_min(tiny)).to(output.dtype)
    remainder = (total - step.double() * other_norm) / first_norm.clamp_min(tiny)
    carrier = buffer.to(output.dtype).copy_(grad_output).sign_()
    carrier *= step
    carrier[..., :1] = torch.sign(grad_output[..., :1]) * remainder
    return grad_output, carrier


def _fold_into_batch(
    function: type[torch.autograd.Function], size: int, in_dims: Sequence[Any], arguments: Sequence[Any]
) -> tuple[Any, Any]:
    """The rule of vmap: the mapped dimension becomes part of the kernel's batch.

    Args:
        size: of the mapped dimension.
        in_dims: that dimension of each argument; None for an argument without it.
    """

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

    It has derivatives in query, key and value. With `value_is_key` the value is the key and only log Z is used, whose gradient
    is cheaper.
    """

    # Compiled code cannot hold the kernel, which is an object: its passes are functions.
    run = kernel.forward
    pull_back = kernel.backward
    half_only = kernel.half_only
    exact_masks = kernel.masks == "any"
    reference_function = getattr(kernel, "by_reference", by_reference)

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

    return differentiable(forward, gradient, reference_function, tensors=4, options=4, vmap=_fold_into_batch)
