"""PyTorch's fused CPU attention as a differentiable function of both its results.

The kernel already computes log Z, and its backward needs the forward's output only for D_i = Σ_c grad_ic·output_ic.
A cotangent g of log Z enters the gradients as D_i − g_i, so handing the kernel some other output whose product with the
cotangent is D_i − g_i gives the gradients of both results at once. Second derivatives and forward mode are the
reference's.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from massieu.ops import reference
from massieu.ops.differentiable import differentiable
from massieu.ops.shapes import AttentionProblem

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _plain(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, is_causal: bool, value_is_key: bool
) -> tuple[Tensor, ...]:
    """The kernel's two results by the reference."""
    grouped = query.unflatten(1, (key.shape[1], -1))
    if mask is not None:
        while mask.ndim < 4:
            mask = mask.unsqueeze(0)
        mask = mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, grouped.shape[1:3])
    problem = AttentionProblem(grouped, key, value, mask, scale, is_causal, tuple(query.shape[:-1]))
    return tuple(problem.restore(result) for result in reference.attention(problem))


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, is_causal: bool, value_is_key: bool
) -> tuple[Tensor, Tensor]:
    query, key, value = _rows_contiguous(query), _rows_contiguous(key), _rows_contiguous(value)
    mask = None if mask is None else _rows_contiguous(mask)
    run = _forward_operator if torch.compiler.is_compiling() else _of_all_scores
    return run(query, key, value, mask, scale, is_causal)


def _of_all_scores(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """The kernel's forward pass, with the reference's results for rows of extreme scores.

    Of fewer scores than its vectors hold, all of them NaN or −∞, it makes a row without a key, of which it says output 0
    and log Z = 0. In half precision, one score of +∞ among more makes its output 0.
    """
    output, log_z = _kernel(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)
    # 0/0 and ∞/∞ are NaN: two quick operations tell that there is no such log Z, which other rows seldom have.
    if math.isnan((log_z / log_z).sum().item()) and not _are_moderate(query, key, scale):
        lost = (log_z == 0) | (log_z == torch.inf)
        right = _plain(query, key, value, mask, scale, is_causal, False)
        output[lost], log_z[lost] = (result[lost] for result in right)
    return output, log_z


def _are_moderate(query: Tensor, key: Tensor, scale: float) -> bool:
    """Whether no product of a query and a key can be NaN or near the largest number; NaN of a mask the kernel keeps."""
    largest = [tensor.abs().amax().double().clamp_min(1.0) for tensor in (query, key)]
    bound = largest[0] * largest[1] * abs(scale) * query.shape[-1]
    return bool(bound < torch.finfo(torch.float32).max / 2**16)


_forward_operator = torch.library.custom_op("massieu::fused_attention", _of_all_scores, mutates_args=())
"""The same for compiled code, which may not ask for the values that it computes."""


@_forward_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    return _kernel(query, key, value, 0.0, options[1], attn_mask=mask, scale=options[0])


def _gradient(
    tensors: Sequence[Any],
    results: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    options: tuple[float, bool, bool],
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    query, key, value, mask = tensors
    (output, log_z), (grad_output, grad_log_z), (scale, is_causal, value_is_key) = results, cotangents, options
    dtype = query.dtype
    if dtype == torch.float16:
        # Its range cannot hold what `_merge_cotangents` builds.
        query, key, value, output = (tensor.float() for tensor in (query, key, value, output))
        mask = None if mask is None else mask.float()
    # Weights of 0 where all scores are −∞, as where there is no key.
    log_z = log_z.masked_fill(log_z == -torch.inf, 0.0)
    if value_is_key and grad_output is None and grad_log_z is not None and _is_per_key(mask) and not is_causal:
        gradients = _log_partition_gradients(query, key, mask, output, log_z, grad_log_z, scale)
        gradients = (*gradients, torch.zeros_like(value))
    else:
        mask = None if mask is None else _rows_contiguous(mask)
        one_channel = query.shape[-1] == 1
        if one_channel:
            # `_merge_cotangents` works with two.
            query, key, value, output = (F.pad(tensor, (0, 1)) for tensor in (query, key, value, output))
            grad_output = None if grad_output is None else F.pad(grad_output, (0, 1))
        grad_output, output = _merge_cotangents(grad_output, grad_log_z, output)
        query, key, value = _rows_contiguous(query), _rows_contiguous(key), _rows_contiguous(value)
        gradients = _backward(
            grad_output, query, key, value, output, log_z, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        if one_channel:
            gradients = tuple(gradient[..., :1].contiguous() for gradient in gradients)
    return tuple(gradient.to(dtype) for gradient, needed in zip(gradients, wanted, strict=True) if needed)


def _is_per_key(mask: Tensor | None) -> bool:
    return mask is None or (mask.shape[1] == mask.shape[2] == 1)


def _log_partition_gradients(
    query: Tensor, key: Tensor, mask: Tensor | None, mean: Tensor, log_z: Tensor, grad: Tensor, scale: float
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
    sums, log_total = _forward(key, queries, values, level, scale, False, False)
    if mask is not None:
        log_total = log_total + mask.squeeze(2)
    return step * mean, sums * log_total.exp().unsqueeze(-1).to(sums.dtype)


_PIECE = 1 << 16
"""Numbers of the output at a time: what is made on the way is as large as a piece, and only the result is whole."""


def _merge_cotangents(grad_output: Tensor | None, grad_log_z: Tensor | None, output: Tensor) -> tuple[Tensor, Tensor]:
    """A cotangent of the output and an output whose product is D_i − g_i, to the square of their dtype's rounding."""
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    grad_output = _rows_contiguous(grad_output.to(output.dtype))
    if grad_log_z is None:
        return grad_output, output
    pieces = min(-(-output.numel() // _PIECE), output.shape[2])
    if torch.compiler.is_compiling() or pieces < 2:
        return _merged(grad_output, grad_log_z, output)
    carrier, given = torch.empty_like(grad_output), grad_output
    rows = -(-output.shape[2] // pieces)
    for place in range(0, output.shape[2], rows):
        own, log_z, whole, part = (
            tensor.narrow(2, place, min(rows, output.shape[2] - place))
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
    # The least norm that either part of a cotangent may have, and the least in units of the total. (Not globals: with
    # dynamic shapes the compiler would make inputs of those.)
    tiny, share = 1e-30, 1e-36
    dtype = torch.promote_types(output.dtype, torch.float32)
    # One buffer as large as the output, for one thing after the other.
    buffer = grad_output.to(dtype, copy=True).mul_(output)
    # g is subtracted from what is not rounded yet: from a number of single precision it would be lost as from the output.
    total = buffer[..., 1:].sum(-1, keepdim=True) + (buffer[..., :1].double() - grad_log_z.unsqueeze(-1))
    buffer.copy_(grad_output).abs_()
    one, rest = buffer[..., :1].clone(), buffer[..., 1:].sum(-1, keepdim=True)
    least = (share * total.abs()).clamp_min(tiny).to(output.dtype)
    lost = (torch.minimum(one, rest) < least) & (total != 0)
    if torch.compiler.is_compiling() or bool(lost.any()):
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


def _rows_contiguous(tensor: Tensor) -> Tensor:
    """The kernel reads rows of adjacent numbers."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


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


fused_attention = differentiable(_forward, _gradient, _plain, tensors=4, options=3, vmap=_fold_into_batch)
"""(query, key, value, mask, scale, is_causal, value_is_key) ↦ output ``(B, H, L, E)`` and log-partition ``(B, H, L)``.

The kernel reports log Z = 0 for a row without a key. Derivatives are those in query, key and value.

- query, key, value: ``(B, H, L, D)``, ``(B, Hk, N, D)`` and ``(B, Hk, N, D)``.
- mask: added to the scores, ``(#B, #H, #L, N)``, or None; without gradient.
- scale: positive if is_causal, as the kernel multiplies its causal mask, of −∞, by it.
- value_is_key: only log Z is wanted, and the value is the key: a cheaper gradient.
"""
