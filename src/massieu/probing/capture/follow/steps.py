"""What becomes of scores, attention weights and outputs in one more function of PyTorch."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from massieu.probing.capture.follow import functions as f
from massieu.probing.capture.follow.dims import Dims, Label, LabelledTensor, entries, regrouped, whole
from massieu.probing.capture.follow.functions import FunctionCall
from massieu.probing.capture.follow.scores import HIDES, ExtendedKeys, Reduction, Scores, Weights

Moves = Callable[[Any], bool]
"""Whether an operand was computed from queries or keys."""


def scores_after(
    call: FunctionCall, tensor: Tensor, scores: Scores, others: Sequence[Any], moves: Moves
) -> Scores | None:
    """The note of scores after one more function.

    Args:
        tensor: the scores, as the function was given them.
        others: notes of other tensors that it was given.
    """
    func = call.func
    if scores.broken is not None:
        # What its dimensions are is not known, but a softmax may still come, which is then refused.
        return scores if func in f.MOVING or func in f.FILLING or func in f.SOFTMAX else None
    if func in f.SOFTMAX or is_largest(call):
        return scores
    dims = reshaped(call, tensor, scores.dims)
    if dims is not None:
        return replace(scores, dims=dims)
    products = [other for other in others if isinstance(other, Scores) and other.broken is None]
    # Beside scores that are known, a product of which entries were picked, as for relative positions, is a bias.
    if any(other.affine or not scores.affine for other in products):
        return replace(scores, broken="two products of activations make its scores")
    if func in f.SUBTRACTING and others and call.args[0] is tensor:
        return scores  # a softmax does not see what is taken from all scores of a row
    changed = _masked_or_bent(call, tensor, scores)
    if changed is not None:
        return changed
    if _second(call, tensor) is tensor or any(isinstance(other, Reduction) for other in others):
        return replace(scores, affine=False)
    return _combined(call, tensor, scores, moves)


def _masked_or_bent(call: FunctionCall, tensor: Tensor, scores: Scores) -> Scores | None:
    """Scores after a function of them alone, or one that fills, picks or joins; None after any other."""
    func = call.func
    if func in f.NEGATING:
        return scores.then("mul", -1.0)
    if func in f.CAPPING:
        return scores.then("tanh")
    if func in f.FILLING:
        return _filled(scores, call.argument(1, "mask"), call.argument(2, "value"))
    if func in f.SELECTING:
        return _selected(call, tensor, scores)
    if func in f.ASSIGNING:
        place, value = call.args[1:3]
        return _filled(scores, place, value) if _is_mask(place) else replace(scores, affine=False)
    if func in f.JOINING:
        return _with_sink(call, tensor, scores)
    if func in f.ELEMENTWISE:
        return replace(scores, affine=False)
    if func in f.CLAMPING or func in f.LARGEST:
        return scores if _is_far(call, tensor) else replace(scores, affine=False)
    return None


def _combined(call: FunctionCall, tensor: Tensor, scores: Scores, moves: Moves) -> Scores:
    """Scores after arithmetic with something that is no score."""
    func = call.func
    other = _second(call, tensor)
    if func in f.ADDING:
        return added(scores, other, call.kwargs.get("alpha", 1), moves)
    if func in f.SUBTRACTING:
        if call.args[0] is not tensor:
            return added(scores.then("mul", -1.0), call.args[0], 1, moves)
        return added(scores, other, -call.kwargs.get("alpha", 1), moves)
    if func in f.SUBTRACTED:
        return added(scores.then("mul", -1.0), other, 1, moves)
    if func in f.MULTIPLYING:
        return scores.then("mul", other, moving=moves(other))
    if func in f.DIVIDING and call.args[0] is tensor:
        return scores.then("mul", 1.0 / other, moving=moves(other))
    if func in f.DIVIDING:
        return replace(scores, affine=False)
    return replace(scores, broken=f"its scores go through {call.name()}")


def is_largest(call: FunctionCall) -> bool:
    """A largest entry along a dimension, and not the larger of two tensors."""
    return call.func in f.LARGEST and not (len(call.args) > 1 and isinstance(call.args[1], Tensor))


def added(scores: Scores, value: Any, factor: float, moves: Moves) -> Scores:
    """Scores with a bias of ``factor · value``."""
    if not isinstance(value, Tensor):
        return scores.then("add", float(value) * factor)
    # Where the value comes from is asked of the value itself: a product made here is known to nobody.
    bias = value if factor == 1 else value * factor
    return scores.then("add", bias, moving=moves(value))


def _selected(call: FunctionCall, tensor: Tensor, scores: Scores) -> Scores:
    """Scores after ``torch.where``, or ``Tensor.where``."""
    condition, chosen, other = _selection(call)
    if chosen is tensor:
        return _filled(scores, ~condition, other)
    return _filled(scores, condition, chosen)


def _selection(call: FunctionCall) -> tuple[Any, Any, Any]:
    """The condition of ``torch.where``, what is taken where it is true, and what is taken elsewhere.

    The first argument of ``Tensor.where`` is what is kept.
    """
    args = call.args
    if len(args) == 3:
        condition, chosen, other = args
    else:
        condition = args[0]
        chosen = call.kwargs.get("input", args[-1])
        other = call.kwargs.get("other", args[-1])
    if isinstance(condition, Tensor) and condition.dtype != torch.bool:
        return chosen, condition, other
    return condition, chosen, other


def weights_after(call: FunctionCall, tensor: Tensor, weights: Weights) -> Weights:
    """The note of attention weights after one more function."""
    dims = reshaped(call, tensor, weights.dims)
    if dims is not None:
        return replace(weights, dims=dims)
    without_sink = _without_sink(call, tensor, weights)
    if without_sink is not None:
        return without_sink
    if call.func in f.FILLING and call.argument(2, "value") == 0:
        return weights  # rows that see no key
    if call.func in f.SELECTING and _selects_zero(call, tensor):
        return weights  # the same, as TransformerLens writes it
    return replace(weights, broken=f"its attention weights go through {call.name()}")


def _selects_zero(call: FunctionCall, tensor: Tensor) -> bool:
    """Whether weights stay as they are but where zeros take their place."""
    _, chosen, other = _selection(call)
    replacement = other if chosen is tensor else chosen
    if isinstance(replacement, Tensor):
        return not replacement.requires_grad and not bool(replacement.any())
    return replacement == 0


def _without_sink(call: FunctionCall, tensor: Tensor, weights: Weights) -> Weights | None:
    """The weights of the keys alone, where an index leaves out the sink behind them; None where it does not."""
    extended = weights.scores.extended
    result = call.result
    if call.func not in f.INDEXING or extended is None or not isinstance(result, Tensor):
        return None
    places = [place for place, dim in enumerate(weights.dims) if dim == (extended.label,)]
    if not places or result.dim() != tensor.dim() or result.shape[places[0]] != entries(extended.keys):
        return None
    dims = list(weights.dims)
    dims[places[0]] = extended.keys
    return replace(weights, dims=dims)


def _second(call: FunctionCall, tensor: Tensor) -> Any:
    """The other operand; the tensor itself where it is both."""
    operands = [*call.args[:2], *(call.kwargs[name] for name in ("other", "value") if name in call.kwargs)]
    return next((value for value in operands if value is not tensor), tensor)


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool


def _filled(scores: Scores, mask: Any, value: Any) -> Scores:
    """Scores of which some are replaced: hidden keys, where the value is as low as that."""
    highest = float(value.max()) if isinstance(value, Tensor) and value.numel() else value
    if isinstance(highest, int | float) and highest <= HIDES and isinstance(mask, Tensor):
        return scores.then("hide", mask.bool())
    return replace(scores, affine=False)


def _with_sink(call: FunctionCall, tensor: Tensor, scores: Scores) -> Scores:
    """Scores with one more behind the keys that has no value."""
    parts = list(call.args[0])
    dim = call.argument(1, "dim", 0) % tensor.dim()
    if len(parts) != 2 or parts[0] is not tensor or parts[1].shape[dim] != 1 or scores.sink is not None:
        return replace(scores, broken="its scores are joined with others")
    sink = parts[1]
    sink_dims: Dims = [() if sink.shape[place] == 1 else own for place, own in enumerate(scores.dims)]
    label = Label(tensor.shape[dim] + 1)
    extended = ExtendedKeys(label, whole(scores.dims[dim]))
    dims = list(scores.dims)
    dims[dim] = (label,)
    return replace(scores, dims=dims, sink=LabelledTensor(sink, sink_dims), extended=extended)


def reshaped(call: FunctionCall, tensor: Tensor, dims: Dims) -> Dims | None:
    """The dimensions after a function that moves no number; None after any other."""
    func = call.func
    result = call.result
    if not isinstance(result, Tensor):
        return None
    if func is F.dropout or func is torch.dropout:
        return dims
    if func in f.KEEPING:
        return dims if result.shape == tensor.shape else None
    if func in f.REGROUPING:
        return regrouped(dims, result.shape)
    if func in f.PERMUTING:
        # The function itself says where each dimension goes: on the meta device, of sizes that differ and are not 1.
        marked = torch.empty([place + 2 for place in range(tensor.dim())], device="meta")
        moved = func(marked, *call.args[1:], **call.kwargs)
        return [dims[size - 2] for size in moved.shape]
    if func in f.INDEXING and result.numel() == tensor.numel() and _keeps_order(call.args[1]):
        return regrouped(dims, result.shape)
    return None


def _keeps_order(index: Any) -> bool:
    """An index of new dimensions, an ellipsis and slices forward alone."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or isinstance(part, slice | int) for part in parts)


def _is_far(call: FunctionCall, tensor: Tensor) -> bool:
    """Whether bounds are so far out that only masked scores reach them."""
    arguments = (*call.args, *call.kwargs.values())
    bounds = [value for value in arguments if value is not tensor and value is not None]
    sizes = [float(bound.abs().min()) if isinstance(bound, Tensor) else abs(float(bound)) for bound in bounds]
    return min(sizes, default=0.0) >= -HIDES
