"""Log-partitions of linear scores, and by how much they exceed one target's score, without the matrix of scores.

Row i gives column j the score ``row_i·column_j``. Two losses are made of it: a vocabulary's (columns are the words) and
the contrastive ones (columns are the keys). Tiles of scores are computed twice, once in the forward pass and once in the
backward pass; derivatives beyond the first, forward mode and compiled transforms take plain operations in blocks of rows.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from massieu.ops import reference, score_tiles, tile_operators
from massieu.ops.shapes import (
    check_dense,
    in_functorch,
    in_nested_forward_mode,
    may_be_differentiated,
    without_autocast,
)

Rule = Literal["all", "no equals", "no self", "peers"]
"""Which columns a row sees: all; those of another id, and its target; all but the one of its own index; those of its id
but the one of its own index."""


class Seen(NamedTuple):
    """Which pairs of a row and a column count, and with which log-weight."""

    rule: Rule = "all"
    row_ids: Tensor | None = None
    column_ids: Tensor | None = None
    log_weight: Tensor | None = None
    """(rows, columns), float, or bool with True = keep."""


EVERYTHING = Seen()


class Direction(NamedTuple):
    """Results for one direction, a number for each row (or column)."""

    excess: Tensor
    """log Z minus the score of the target; exactly 0 where the target has all the weight."""
    log_partition: Tensor


def check_tensors(tensors: dict[str, Tensor], mixed: bool = False) -> None:
    """Floating-point tensors of the first one's device and, unless `mixed`, its dtype; a `TypeError` or `ValueError`."""
    (name, first), *_ = tensors.items()
    for other, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{other} must be a tensor, got {type(tensor).__name__}")
        if not tensor.is_floating_point():
            raise TypeError(f"{other} must be a floating-point tensor, got {tensor.dtype}")
        check_dense(other, tensor)
        if tensor.dtype != first.dtype and not mixed:
            raise TypeError(f"{name} and {other} must have one dtype, got {first.dtype} and {tensor.dtype}")
        if tensor.device != first.device:
            raise ValueError(f"{name} and {other} must be on one device, got {first.device} and {tensor.device}")


def check_integers(name: str, tensor: Tensor, shape: tuple[int, ...], reason: str, device: torch.device) -> None:
    """Integers of that shape on that device; a `TypeError` or `ValueError`."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor of integers, got {type(tensor).__name__}")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} must be a tensor of integers, got {tensor.dtype}")
    check_dense(name, tensor)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape} {reason}, got {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def check_range(name: str, target: Tensor, count: int, alternative: str = "") -> None:
    """Each target in 0 … count − 1: a `ValueError` on the CPU; elsewhere, where looking would cost a wait, a NaN later."""
    if target.numel() and values_are_known(target):
        low, high = (int(bound) for bound in target.aminmax())
        if low < 0 or high >= count:
            wrong = low if low < 0 else high
            raise ValueError(f"{name} must be in 0 … {count - 1}{alternative}, got {wrong}")


def values_are_known(tensor: Tensor) -> bool:
    """Whether the program may depend on this tensor's values: on the CPU, outside transforms and compilation."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and not in_functorch()


def autocasts(tensor: Tensor) -> bool:
    """Whether products of this tensor are taken in half precision here."""
    device = tensor.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def full_precision(tensor: Tensor) -> AbstractContextManager[object]:
    """Where log-scale results are formed: autocast is off."""
    return without_autocast(tensor.device)


def log_partitions(
    row: Tensor,
    column: Tensor,
    bias: Tensor | None,
    target: Tensor,
    seen: Seen = EVERYTHING,
    *,
    bias_in_score: bool = False,
    both: bool = False,
) -> tuple[Direction, ...]:
    """log Σ_j exp(row_i·column_j + bias_j + log_weight_ij) over what row i sees, and its excess over the target's score.

    Args:
        row: (T, D), float32 or float64.
        column: (V, D), of any floating dtype; promoted to the row's a tile at a time.
        bias: (V,) or None: a part of the target's score if `bias_in_score`, else a log-weight.
        target: (T,), which column is the row's own; outside 0 … V − 1 its excess is NaN.
        both: also the log-partitions of the first min(T, V) columns over the rows, without the bias. Row i's target must be
            i, or be out of range, where column i's excess is NaN too.
    """
    tensors = (row, column, bias, seen.log_weight)
    weight_gradient = seen.log_weight is not None and may_be_differentiated(seen.log_weight)
    compiled_transform = torch.compiler.is_compiling() and in_functorch()
    nested = not torch.compiler.is_compiling() and in_nested_forward_mode()
    with full_precision(row):
        if weight_gradient or compiled_transform or nested:
            found = plain(target, seen.row_ids, seen.column_ids, seen.rule, bias_in_score, both, *tensors)
        else:
            compiling = torch.compiler.is_compiling()
            # The compiler refuses a custom function that is given one tensor twice.
            column_ids = seen.column_ids.clone() if compiling and seen.column_ids is not None else seen.column_ids
            fixed = (target, seen.row_ids, column_ids, seen.log_weight)
            tiled = CompiledTiled if compiling else Tiled
            found = tiled.apply(row, column, bias, *fixed, seen.rule, bias_in_score, both)
    return tuple(Direction(*found[start : start + 2]) for start in range(0, len(found), 2))  # pyright: ignore


def plain(
    target: Tensor,
    row_ids: Tensor | None,
    column_ids: Tensor | None,
    rule: Rule,
    bias_in_score: bool,
    both: bool,
    row: Tensor,
    column: Tensor,
    bias: Tensor | None,
    log_weight: Tensor | None,
) -> tuple[Tensor, ...]:
    """The definition, in blocks of rows; (excess, log-partition), for both directions one after the other."""
    column = column.to(row.dtype)
    bias = None if bias is None else bias.to(row.dtype)
    found = _plain_rows(target, row_ids, column_ids, rule, bias_in_score, row, column, bias, log_weight)
    if both:
        length = min(len(row), len(column))
        log_weight = None if log_weight is None else log_weight[:, :length].mT
        column_ids = None if column_ids is None else column_ids[:length]
        found += _plain_rows(target[:length], column_ids, row_ids, rule, False, column[:length], row, None, log_weight)
    return found


def _plain_rows(
    target: Tensor,
    row_ids: Tensor | None,
    column_ids: Tensor | None,
    rule: Rule,
    bias_in_score: bool,
    row: Tensor,
    column: Tensor,
    bias: Tensor | None,
    log_weight: Tensor | None,
) -> tuple[Tensor, ...]:
    length, count = len(row), len(column)
    block = max(1, min(length, reference.BLOCK_PAIRS // max(1, count)))
    parts = []
    for first in range(0, max(length, 1), block):
        rows = slice(first, min(length, first + block))
        weight = None if log_weight is None else log_weight[rows]
        arguments = (row[rows], column, bias, weight, target, row_ids, column_ids)
        function = partial(_plain_block, rule, bias_in_score, rows)
        parts.append(function(*arguments) if block >= length else reference.recomputed(function, *arguments))
    return tuple(torch.cat(results) for results in zip(*parts, strict=True))


def _plain_block(
    rule: Rule,
    bias_in_score: bool,
    rows: slice,
    row: Tensor,
    column: Tensor,
    bias: Tensor | None,
    log_weight: Tensor | None,
    target: Tensor,
    row_ids: Tensor | None,
    column_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    scores = row @ column.mT
    hidden = score_tiles.hidden(rule, target, row_ids, column_ids, rows, slice(0, len(column)))
    target = target[rows]
    weight = scores.new_zeros(()) if bias is None else bias
    if log_weight is not None and log_weight.dtype == torch.bool:
        weight = torch.where(log_weight, weight, -torch.inf)
    elif log_weight is not None:
        weight = weight + log_weight.to(scores.dtype)
    if hidden is not None:
        weight = torch.where(hidden, -torch.inf, weight)
    inside = (target >= 0) & (target < len(column))
    index = torch.where(inside, target, 0)
    own = scores.gather(1, index.unsqueeze(1)).squeeze(1) if len(column) else scores.sum(1)
    lost = torch.zeros_like(own)
    if bias_in_score and bias is not None:
        # A hidden word's score is −inf: as a constant, so that derivatives of what is masked later are numbers.
        hidden_word = bias[index] == -torch.inf
        own = own + bias[index].masked_fill(hidden_word, 0.0)
        lost = lost.masked_fill(hidden_word, torch.inf)
    excess = reference.softmax(scores - own.unsqueeze(1), weight)[2]
    return (excess + lost).masked_fill(~inside, torch.nan), excess + own


class Tiled(torch.autograd.Function):
    """(row, column, bias, target, ids, log_weight, rule, bias_in_score, both) ↦ excess and log Z, or two of each."""

    forward = staticmethod(score_tiles.forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.rule, ctx.bias_in_score, ctx.both = inputs
        ctx.save_for_backward(*tensors, *output[1::2])
        ctx.save_for_forward(*tensors, *output[1::2])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return _spread(ctx, TiledBackward.apply, cotangents)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        row, column, bias = ctx.saved_tensors[:3]
        return reference.forward_derivative(_values(ctx), (row, column, bias), tangents[:3])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        return _one_by_one(Tiled, info.batch_size, in_dims, arguments)


class CompiledTiled(torch.autograd.Function):
    """`Tiled` under `torch.compile`, which accepts no forward mode here and takes only first derivatives."""

    @staticmethod
    def forward(
        row: Tensor,
        column: Tensor,
        bias: Tensor | None,
        target: Tensor,
        row_ids: Tensor | None,
        column_ids: Tensor | None,
        log_weight: Tensor | None,
        rule: Rule,
        bias_in_score: bool,
        both: bool,
    ) -> tuple[Tensor, ...]:
        fixed = (target, row_ids, column_ids, log_weight)
        return tuple(tile_operators.forward(row, column, bias, *fixed, rule, bias_in_score, both))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.rule, ctx.bias_in_score, ctx.both = inputs
        ctx.save_for_backward(*tensors, *output[1::2])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return _spread(ctx, tile_operators.backward, cotangents)


def _spread(ctx: Any, function: Callable[..., Any], cotangents: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """What the backward function finds, in the places of the arguments."""
    tensors, levels = ctx.saved_tensors[:7], ctx.saved_tensors[7:]
    levels, cotangents = _two(levels), (*cotangents, None, None)[:4]
    wanted = tuple(ctx.needs_input_grad[:3])
    with full_precision(tensors[0]):
        found = list(function(*tensors, *levels, *cotangents, ctx.rule, ctx.bias_in_score, ctx.both, wanted))
    return *(found.pop(0) if needed else None for needed in wanted), *(None,) * 7


class TiledBackward(torch.autograd.Function):
    """(…, levels, cotangents, rule, bias_in_score, both, wanted) ↦ the wanted gradients of row, column and bias."""

    forward = staticmethod(score_tiles.backward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.rule, ctx.bias_in_score, ctx.both, ctx.wanted = inputs
        kept = (*tensors[:7], *tensors[9:])
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        arguments = _gradient_arguments(ctx)
        found = iter(reference.reverse_derivative(_gradients(ctx), arguments, cotangents))
        first, given = arguments[:3], arguments[3:]
        gradients = [None if tensor is None else next(found) for tensor in first]
        given_gradients = [None if tensor is None else next(found) for tensor in given]
        return *gradients, *(None,) * 6, *given_gradients, *(None,) * 4

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        return _one_by_one(TiledBackward, info.batch_size, in_dims, arguments)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        # The saved levels are functions of row, column and bias here, so their tangents are not used.
        return reference.forward_derivative(_gradients(ctx), _gradient_arguments(ctx), (*tangents[:3], *tangents[9:13]))


def _two(levels: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
    return levels[0], levels[1] if len(levels) > 1 else None


def _values(ctx: Any) -> Callable[..., tuple[Tensor, ...]]:
    """Results as the plain function of row, column and bias."""
    target, row_ids, column_ids, log_weight = ctx.saved_tensors[3:7]

    def values(row: Tensor, column: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        fixed = (target, row_ids, column_ids, ctx.rule, ctx.bias_in_score, ctx.both)
        return plain(*fixed, row, column, bias, log_weight)

    return values


def _gradient_arguments(ctx: Any) -> tuple[Tensor | None, ...]:
    return *ctx.saved_tensors[:3], *ctx.saved_tensors[7:]


def _gradients(ctx: Any) -> Callable[..., tuple[Tensor, ...]]:
    """The wanted gradients as the plain function's, of row, column, bias and the cotangents."""
    values, both, wanted = _values(ctx), ctx.both, ctx.wanted

    def gradients(row: Tensor, column: Tensor, bias: Tensor | None, *cotangents: Tensor | None) -> tuple[Tensor, ...]:
        given = cotangents if both else cotangents[:2]
        found = iter(reference.reverse_derivative(values, (row, column, bias), given))
        every = [None if tensor is None else next(found) for tensor in (row, column, bias)]
        return tuple(found for found, needed in zip(every, wanted, strict=True) if needed and found is not None)

    return gradients


def _one_by_one(
    function: type[torch.autograd.Function], size: int, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...]
) -> tuple[Any, Any]:
    """vmap: each item has scores of its own, so nothing is lost by doing one after the other."""
    results = []
    for item in range(size):
        chosen = (
            argument.select(dim, item) if isinstance(argument, Tensor) and dim is not None else argument
            for argument, dim in zip(arguments, in_dims, strict=True)
        )
        results.append(function.apply(*chosen))
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)
