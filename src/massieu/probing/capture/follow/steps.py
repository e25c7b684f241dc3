"""What becomes of scores, attention weights and outputs in one more function of PyTorch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from massieu.probing.capture.follow import functions as f
from massieu.probing.capture.follow.dims import Dims, Label, entries, regrouped, whole
from massieu.probing.capture.follow.scores import HIDES, Reduction, Scores, Weights

Moves = Callable[[Any], bool]
"""Whether an operand was computed from queries or keys."""


def scores_after(
    func: Any, args: Any, kwargs: Any, tensor: Tensor, note: Scores, others: list[Any], result: Any, moves: Moves
) -> Scores | None:
    """The note of scores after one more function."""
    if (
        note.broken is not None
    ):  # what its dimensions are is not known, but a softmax may still come, which is then refused
        return note if func in f.MOVING or func in f.FILLING or func in f.SOFTMAX else None
    if func in f.SOFTMAX or is_largest(func, args):
        return note
    dims = reshaped(func, args, kwargs, tensor, note.dims, result)
    if dims is not None:
        return replace(note, dims=dims)
    second = _second(args, kwargs, tensor)
    products = [other for other in others if isinstance(other, Scores) and other.broken is None]
    # Beside scores that are known, a product of which entries were picked, as for relative positions, is a bias.
    if any(other.affine or not note.affine for other in products):
        return replace(note, broken="two products of activations make its scores")
    if func in f.SUBTRACTING and others and args[0] is tensor:
        return note  # a softmax does not see what is taken from all scores of a row
    if func in f.NEGATING:
        return note.then("mul", -1.0)
    if func in f.CAPPING:
        return note.then("tanh")
    if func in f.FILLING:
        return _filled(note, *_filling(args, kwargs))
    if func in f.SELECTING:
        return _selected(note, args, kwargs, tensor)
    if func in f.ASSIGNING:
        return _filled(note, args[1], args[2]) if _is_mask(args[1]) else replace(note, affine=False)
    if func in f.JOINING:
        return _with_sink(note, args, kwargs, tensor)
    if func in f.ELEMENTWISE:
        return replace(note, affine=False)
    if func in f.CLAMPING or func in f.LARGEST:
        return note if _is_far(args, kwargs, tensor) else replace(note, affine=False)
    if second is tensor or any(isinstance(other, Reduction) for other in others):
        return replace(note, affine=False)
    if func in f.ADDING:
        return added(note, second, kwargs.get("alpha", 1), moves)
    if func in f.SUBTRACTING:
        if args[0] is not tensor:
            return added(note.then("mul", -1.0), args[0], 1, moves)
        return added(note, second, -kwargs.get("alpha", 1), moves)
    if func in f.SUBTRACTED:
        return added(note.then("mul", -1.0), second, 1, moves)
    if func in f.MULTIPLYING:
        return note.then("mul", second, moving=moves(second))
    if func in f.DIVIDING and args[0] is tensor:
        return note.then("mul", 1.0 / second, moving=moves(second))
    if func in f.DIVIDING:
        return replace(note, affine=False)
    return replace(note, broken=f"its scores go through {named(func)}")


def is_largest(func: Any, args: Any) -> bool:
    """A largest entry along a dimension, and not the larger of two tensors."""
    return func in f.LARGEST and not (len(args) > 1 and isinstance(args[1], Tensor))


def added(note: Scores, value: Any, factor: float, moves: Moves) -> Scores:
    """Scores with a bias."""
    if not isinstance(value, Tensor):
        return note.then("add", float(value) * factor)
    value = value if factor == 1 else value * factor
    return note.then("add", value, moving=moves(value))


def _selected(note: Scores, args: Any, kwargs: Any, tensor: Tensor) -> Scores:
    condition, chosen, other = (
        args if len(args) == 3 else (args[0], kwargs.get("input", args[-1]), kwargs.get("other", args[-1]))
    )
    if isinstance(condition, Tensor) and condition.dtype != torch.bool:
        chosen, condition, other = condition, chosen, other
    if chosen is tensor:
        return _filled(note, ~condition, other)
    return _filled(note, condition, chosen)


def weights_after(func: Any, args: Any, kwargs: Any, tensor: Tensor, note: Weights, result: Any) -> Weights:
    """The note of attention weights after one more function."""
    dims = reshaped(func, args, kwargs, tensor, note.dims, result)
    if dims is not None:
        return replace(note, dims=dims)
    extended = note.scores.extended
    if func in f.INDEXING and extended is not None and isinstance(result, Tensor):
        keys = [i for i, dim in enumerate(note.dims) if dim == (extended[0],)]
        if keys and result.shape[keys[0]] == entries(extended[1]) and result.dim() == tensor.dim():
            return replace(note, dims=[extended[1] if i == keys[0] else d for i, d in enumerate(note.dims)])
    if func in f.FILLING and _filling(args, kwargs)[1] == 0:
        return note  # rows that see no key
    return replace(note, broken=f"its attention weights go through {named(func)}")


def _second(args: Any, kwargs: Any, tensor: Tensor) -> Any:
    """The other operand; the tensor itself where it is both."""
    given = [*args[:2], *(kwargs[name] for name in ("other", "value") if name in kwargs)]
    return next((value for value in given if value is not tensor), tensor)


def _filling(args: Any, kwargs: Any) -> tuple[Any, Any]:
    mask = kwargs.get("mask", args[1] if len(args) > 1 else None)
    return mask, kwargs.get("value", args[2] if len(args) > 2 else None)


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool


def _filled(note: Scores, mask: Any, value: Any) -> Scores:
    """Scores of which some are replaced: hidden keys, where the value is as low as that."""
    highest = float(value.max()) if isinstance(value, Tensor) and value.numel() else value
    if isinstance(highest, int | float) and highest <= HIDES and isinstance(mask, Tensor):
        return note.then("hide", mask.bool())
    return replace(note, affine=False)


def _with_sink(note: Scores, args: Any, kwargs: Any, tensor: Tensor) -> Scores:
    """Scores with one more behind the keys that has no value."""
    parts = list(args[0])
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % tensor.dim()
    if len(parts) != 2 or parts[0] is not tensor or parts[1].shape[dim] != 1 or note.sink is not None:
        return replace(note, broken="its scores are joined with others")
    keys = whole(note.dims[dim])
    sink = (parts[1], [() if i == dim or parts[1].shape[i] == 1 else d for i, d in enumerate(note.dims)])
    label = Label(tensor.shape[dim] + 1)
    dims: Dims = [(label,) if i == dim else d for i, d in enumerate(note.dims)]
    return replace(note, dims=dims, sink=sink, extended=(label, keys))


def reshaped(func: Any, args: Any, kwargs: Any, tensor: Tensor, dims: Dims, result: Any) -> Dims | None:
    """The dimensions after a function that moves no number; None after any other."""
    if not isinstance(result, Tensor):
        return None
    if func is F.dropout or func is torch.dropout:
        return dims
    if func in f.KEEPING:
        return dims if result.shape == tensor.shape else None
    if func in f.REGROUPING:
        return regrouped(dims, result.shape)
    if func in f.PERMUTING:
        marked = torch.empty([i + 2 for i in range(tensor.dim())], device="meta")
        moved = func(marked, *args[1:], **kwargs)
        return [dims[size - 2] for size in moved.shape]
    if func in f.INDEXING and result.numel() == tensor.numel() and _keeps_order(args[1]):
        return regrouped(dims, result.shape)
    return None


def _keeps_order(index: Any) -> bool:
    """An index of new dimensions, an ellipsis and slices forward alone."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or isinstance(part, slice | int) for part in parts)


def named(func: Any) -> str:
    return getattr(func, "__name__", str(func)).strip("_")


def _is_far(args: Any, kwargs: Any, tensor: Tensor) -> bool:
    """Whether bounds are so far out that only masked scores reach them."""
    bounds = [value for value in (*args, *kwargs.values()) if value is not tensor and value is not None]
    sizes = [float(b.abs().min()) if isinstance(b, Tensor) else abs(float(b)) for b in bounds]
    return min(sizes, default=0.0) >= -HIDES
