"""Scores on their way from a product of two activations to a softmax: every step that keeps them an affine function of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from massieu.probing.capture.attention_call import above_gap
from massieu.probing.capture.follow.dims import Dim, Dims, Label, broadcast, merged, of

HIDES = -1e4  # an additive mask of this or less hides a key; a mask with one other value than 0 does from -100 on
HIDES_ALONE = -100.0
Path = tuple[nn.Module, ...]
"""The modules that are running, the outermost first."""


@dataclass(frozen=True, eq=False)
class ScoreProduct:
    """The product of two activations that scores come from, with what its dimensions mean."""

    left: Tensor
    right: Tensor
    left_dims: Dims
    right_dims: Dims
    summed: Dim
    path: Path


@dataclass(frozen=True, eq=False)
class ScoreStep:
    """One step from products to scores: ``kind`` is "mul", "add", "hide" or "tanh"."""

    kind: str
    value: Tensor | float = 0.0
    dims: Dims | None = None


@dataclass(frozen=True, eq=False)
class Scores:
    """What is known of a tensor of scores.

    Attributes:
        affine: the steps say how the scores follow from the product; else the scores have to be taken as they are.
        moving: a log-weight was computed from the queries or the keys.
        broken: why these are no scores that can be read; None where they can be.
        sink: a score without a value that stands behind the keys, and its dimensions.
        extended: the label of keys and sink together.
    """

    product: ScoreProduct
    dims: Dims
    steps: tuple[ScoreStep, ...] = ()
    affine: bool = True
    moving: bool = False
    broken: str | None = None
    sink: tuple[Tensor, Dims] | None = None
    extended: tuple[Label, Dim] | None = None

    def then(self, kind: str, value: Tensor | float = 0.0, *, moving: bool = False) -> "Scores":
        """With one more step; a tensor is one that is combined elementwise with the scores."""
        dims = None
        if isinstance(value, Tensor):
            if value.numel() == 1:
                value = float(value.detach()) if kind != "hide" else bool(value)
            else:
                while value.dim() > len(self.dims) and value.shape[0] == 1:
                    value = value[0]
                if value.dim() > len(self.dims):
                    return replace(self, broken="its scores are broadcast to more dimensions")
                dims = broadcast(self.dims, value.shape)
        return replace(self, steps=(*self.steps, ScoreStep(kind, value, dims)), moving=self.moving or moving)


@dataclass(frozen=True, eq=False)
class Weights:
    """The softmax of scores over the labels ``keys``.

    Attributes:
        token: number of what is open until the weights meet values.
        taken: the scores themselves, where they are no known affine function of the product.
        original: the weights as the softmax gave them, with their dimensions, where the scores are taken as they are.
    """

    scores: Scores
    dims: Dims
    keys: Dim
    path: Path
    token: int
    taken: Tensor | None = None
    original: tuple[Tensor, Dims] | None = None
    broken: str | None = None


@dataclass(frozen=True, eq=False)
class Reduction:
    """A largest score, which a softmax cannot see."""

    scores: Scores


@dataclass(frozen=True, eq=False)
class AffineScores:
    """scores = softcap·tanh(coefficient · product / softcap) + log-weight, laid out as (batch, head, query, key)."""

    coefficient: float | Tensor
    log_weight: Tensor | None
    softcap: float | None


def affine(scores: Scores, groups: Sequence[Dim]) -> AffineScores | None:
    """All steps together; None where the scores are no affine function of the product after all."""
    coefficient: float | Tensor = 1.0
    bias: float | Tensor = 0.0
    hidden: Tensor | None = None
    inner: float | None = None
    for step in scores.steps:
        value = step.value
        if isinstance(value, Tensor):
            assert step.dims is not None
            value = merged(value, step.dims, groups, expand=False)
            value = value if value.dtype in (torch.bool, torch.float64) else value.float()
        if step.kind == "mul":
            coefficient, bias = coefficient * value, bias * value
        elif step.kind == "add":
            bias = bias + value
            hides = _hides(value)
            hidden = hides if hidden is None else hidden if hides is None else hidden | hides
        elif step.kind == "hide":
            mask = value if isinstance(value, Tensor) else torch.tensor(bool(value))
            hidden = mask if hidden is None else hidden | mask
        elif isinstance(coefficient, Tensor) or isinstance(bias, Tensor) or bias or hidden is not None or inner:
            return None
        else:
            inner, coefficient = coefficient, 1.0
    if isinstance(coefficient, Tensor):
        shared = _without_keys(coefficient, hidden)
        if shared is None or inner is not None:
            return None
        coefficient = shared
    weight = _log_weight(bias, hidden)
    if inner is not None:
        assert isinstance(coefficient, float)
        return AffineScores(inner * coefficient, weight, coefficient)
    return AffineScores(coefficient, weight, None)


def _hides(value: Tensor | float) -> Tensor | None:
    """Where an additive mask hides keys; None where it hides none."""
    if not isinstance(value, Tensor):
        return None
    least = float(value.min()) if value.numel() else 0.0
    if least <= HIDES:
        return as_low_as_a_mask(value)
    if least <= HIDES_ALONE and bool(((value == 0) | (value == least)).all()):
        return value == least
    return None


def as_low_as_a_mask(log_weight: Tensor) -> Tensor:
    """Which log-weights of rows of keys hide a key; not those to which a bias by position falls in small steps."""
    hidden = log_weight <= HIDES
    falls = above_gap(log_weight) & (log_weight.amax(-1, keepdim=True) > HIDES)
    return hidden & ~falls


def _without_keys(coefficient: Tensor, hidden: Tensor | None) -> Tensor | None:
    """A coefficient that visible keys share, with one entry in place of the keys; None where they do not share it."""
    if coefficient.shape[-1] == 1:
        return coefficient
    visible = torch.ones_like(coefficient, dtype=torch.bool) if hidden is None else ~hidden
    coefficient, visible = torch.broadcast_tensors(coefficient, visible)
    largest = coefficient.masked_fill(~visible, -torch.inf).amax(-1, keepdim=True)
    if not bool(((coefficient == largest) | ~visible).all()):
        return None
    return torch.where(largest > -torch.inf, largest, 1.0)


def _log_weight(bias: Tensor | float, hidden: Tensor | None) -> Tensor | None:
    """Boolean where that says everything, else float with −inf for hidden keys; a constant is no weight."""
    if isinstance(bias, Tensor):
        shown = bias if hidden is None else bias.masked_fill(hidden, 0.0)
        if bool(shown.any()):
            return shown if hidden is None else shown.masked_fill(hidden, -torch.inf)
    return None if hidden is None else ~hidden


Letters = tuple[list[str], list[str], list[str]]
"""Names of the dimensions of the left and the right factor and of their product."""


def contraction(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Letters] | None:
    """Two tensors that are multiplied and summed, and what their dimensions are called."""
    operands: tuple[Any, ...]
    if func in EINSUMS:
        operands = tuple(args[1]) if len(args) == 2 and isinstance(args[1], list | tuple) else tuple(args[1:])
        return _einsum(args[0], operands) if isinstance(args[0], str) and len(operands) == 2 else None
    operands = tuple(args[1:3]) if func in BADDBMM else tuple(args[:2])
    if len(operands) < 2 and func in BADDBMM:
        operands = (kwargs.get("batch1"), kwargs.get("batch2"))
    elif len(operands) < 2:
        other = [kwargs[name] for name in ("other", "mat2", "tensor2") if name in kwargs]
        operands = (*operands, *other)
    if func in REVERSED:
        operands = operands[::-1]
    if len(operands) != 2 or not all(isinstance(o, Tensor) and o.dim() >= 2 for o in operands):
        return None
    left, right = operands
    size = max(left.dim(), right.dim())
    batch = [f"b{i}" for i in range(size - 2)]
    spelled = [*batch[size - left.dim() :], "l", "d"], [*batch[size - right.dim() :], "d", "n"], [*batch, "l", "n"]
    return left, right, spelled


def _einsum(equation: str, operands: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Letters] | None:
    given, _, result = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if not result or len(terms) != 2:
        return None
    dots = [tensor.dim() - len(term.replace("...", "")) for term, tensor in zip(terms, operands, strict=True)]
    spelled = []
    for term, count in zip((*terms, result), (*dots, max(dots)), strict=True):
        before, found, behind = term.partition("...")
        more = [f"…{count - i}" for i in range(count)] if found else []
        spelled.append([*before, *more, *behind])
    left, right, out = spelled
    if len(set(left)) < len(left) or len(set(right)) < len(right):
        return None
    return operands[0], operands[1], (left, right, out)


EINSUMS = {torch.einsum}
BADDBMM = {torch.baddbmm, Tensor.baddbmm, Tensor.baddbmm_}
REVERSED = {Tensor.__rmatmul__}
CONTRACTIONS = {
    *EINSUMS, *BADDBMM, *REVERSED, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm
}  # fmt: skip


def labelled(
    left: Tensor, right: Tensor, letters: Letters, known: Dims | None, which: int
) -> tuple[Dims, Dims, Dims] | None:
    """The dimensions of both factors and of the result, where those of one factor (``which``, 0 or 1) may be known."""
    names: dict[str, Dim] = {}
    if known is not None:
        names = dict(zip(letters[which], known, strict=True))
    for tensor, spelled in ((left, letters[0]), (right, letters[1])):
        for letter, size in zip(spelled, tensor.shape, strict=True):
            if not names.get(letter) and size > 1:
                names[letter] = (Label(size),)
    found = []
    for tensor, spelled in ((left, letters[0]), (right, letters[1])):
        found.append([() if s == 1 else names[c] for c, s in zip(spelled, tensor.shape, strict=True)])
    result = [names.get(letter, ()) for letter in letters[2]]
    return found[0], found[1], result


def contracted(left_dims: Dims, right_dims: Dims, result: Dims) -> Dim:
    """The labels that a product sums over."""
    kept = set(of(result))
    return tuple(label for label in of(left_dims) if label in set(of(right_dims)) and label not in kept)
