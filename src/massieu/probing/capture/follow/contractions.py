"""Products of two tensors: which dimensions they share, which are summed over, and which the result keeps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from massieu.probing.capture.follow.dims import Dim, Dims, Label, labels_of

EINSUMS = {torch.einsum}
BADDBMM = {torch.baddbmm, Tensor.baddbmm, Tensor.baddbmm_}
REVERSED = {Tensor.__rmatmul__}
CONTRACTIONS = {
    *EINSUMS, *BADDBMM, *REVERSED, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Contraction:
    """Two tensors that are multiplied and summed.

    Attributes:
        factors: the left and the right one.
        letters: a name for each dimension of the left and of the right factor.
        result_letters: the same for the result; a name that it lacks is summed over.
    """

    factors: tuple[Tensor, Tensor]
    letters: tuple[list[str], list[str]]
    result_letters: list[str]


@dataclass(frozen=True, eq=False)
class ContractionDims:
    """What the dimensions of a contraction mean.

    Attributes:
        factors: of the left and of the right factor.
    """

    factors: tuple[Dims, Dims]
    result: Dims

    def summed(self) -> Dim:
        """The labels that are summed over."""
        left, right = self.factors
        right_labels = set(labels_of(right))
        kept = set(labels_of(self.result))
        return tuple(label for label in labels_of(left) if label in right_labels and label not in kept)


def contraction(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Contraction | None:
    """What a function multiplies and sums; None where that is something else than two tensors."""
    if func in EINSUMS:
        return _einsum(args)
    operands = _operands(func, args, kwargs)
    if len(operands) != 2 or not all(isinstance(o, Tensor) and o.dim() >= 2 for o in operands):
        return None
    left, right = operands
    # Dimensions before the last two broadcast, and so are counted from the last.
    num_batch = max(left.dim(), right.dim()) - 2
    batch = [f"b{i}" for i in range(num_batch)]
    left_batch = batch[num_batch + 2 - left.dim() :]
    right_batch = batch[num_batch + 2 - right.dim() :]
    return Contraction((left, right), ([*left_batch, "l", "d"], [*right_batch, "d", "n"]), [*batch, "l", "n"])


def _operands(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The two factors of a matrix product, the left one first."""
    if func in BADDBMM:
        operands = tuple(args[1:3])  # behind what the product is added to
        return operands if len(operands) == 2 else (kwargs.get("batch1"), kwargs.get("batch2"))
    operands = tuple(args[:2])
    if len(operands) < 2:
        operands += tuple(kwargs[name] for name in ("other", "mat2", "tensor2") if name in kwargs)
    return operands[::-1] if func in REVERSED else operands


def _einsum(args: Sequence[Any]) -> Contraction | None:
    """What ``torch.einsum`` does with two operands; None without an arrow, and where a factor has a diagonal taken."""
    equation = args[0]
    operands = tuple(args[1:])
    if len(args) == 2 and isinstance(args[1], list | tuple):
        operands = tuple(args[1])
    if not isinstance(equation, str) or len(operands) != 2:
        return None
    inputs, _, result = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not result or len(terms) != 2:
        return None
    # How many dimensions the ellipsis of each term stands for; the result's is as long as the longer one.
    lengths = [tensor.dim() - len(term.replace("...", "")) for term, tensor in zip(terms, operands, strict=True)]
    left = _letters(terms[0], lengths[0])
    right = _letters(terms[1], lengths[1])
    if len(set(left)) < len(left) or len(set(right)) < len(right):
        return None
    return Contraction((operands[0], operands[1]), (left, right), _letters(result, max(lengths)))


def _letters(term: str, ellipsis_length: int) -> list[str]:
    """The dimensions of one term, those of its ellipsis counted from the last."""
    before, ellipsis, behind = term.partition("...")
    broadcast = [f"…{ellipsis_length - i}" for i in range(ellipsis_length)] if ellipsis else []
    return [*before, *broadcast, *behind]


def contraction_dims(product: Contraction, known: Dims | None = None, which: int = 0) -> ContractionDims:
    """What the dimensions of both factors and of the result mean.

    Args:
        known: those of one factor; None where all labels are new.
        which: the factor that they are of, 0 or 1.
    """
    names: dict[str, Dim] = {}
    if known is not None:
        names = dict(zip(product.letters[which], known, strict=True))
    for tensor, letters in zip(product.factors, product.letters, strict=True):
        for letter, size in zip(letters, tensor.shape, strict=True):
            if not names.get(letter) and size > 1:
                names[letter] = (Label(size),)

    def dims_of(factor: int) -> Dims:
        sizes = zip(product.letters[factor], product.factors[factor].shape, strict=True)
        return [() if size == 1 else names[letter] for letter, size in sizes]

    result = [names.get(letter, ()) for letter in product.result_letters]
    return ContractionDims((dims_of(0), dims_of(1)), result)
