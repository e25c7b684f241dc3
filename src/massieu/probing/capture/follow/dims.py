"""What each dimension of a tensor means, followed through views, permutations and products.

A dimension is a tuple of labels, the most significant first: (batch, head) after both were merged, () where its size is 1. A
label is split where a view splits a dimension, and all tensors that carry it see the parts.
"""

import math
from collections.abc import Iterable, Sequence

from torch import Tensor


class Label:
    """One index that tensors share, such as the batch, a head or a key."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: tuple[Label, ...] = ()

    def split(self, first: int) -> "tuple[Label, Label]":
        """Two labels in place of this one, the first of size ``first``."""
        parts = Label(first), Label(self.size // first)
        self.parts = parts
        return parts


Dim = tuple[Label, ...]
Dims = list[Dim]


def whole(labels: Iterable[Label]) -> Dim:
    """Labels with the parts in place of those that were split."""
    found: list[Label] = []
    for label in labels:
        found.extend(whole(label.parts) if label.parts else (label,))
    return tuple(found)


def of(dims: Dims) -> Dim:
    """All labels in their order."""
    return whole(label for dim in dims for label in dim)


def regrouped(dims: Dims, sizes: Sequence[int]) -> Dims | None:
    """The dimensions of a view with these sizes; None where it cuts across them."""
    left = list(of(dims))
    found: Dims = []
    for size in sizes:
        dim: list[Label] = []
        missing = size
        while missing > 1:
            if not left:
                return None
            label = left.pop(0)
            if missing % label.size == 0:
                missing //= label.size
                dim.append(label)
            elif label.size % missing == 0:
                first, rest = label.split(missing)
                left.insert(0, rest)
                dim.append(first)
                missing = 1
            else:
                return None
        found.append(tuple(dim))
    return None if left or 0 in sizes else found


def broadcast(dims: Dims, sizes: Sequence[int]) -> Dims:
    """The dimensions of a tensor of these sizes that is combined elementwise with one of ``dims``."""
    behind = dims[len(dims) - len(sizes) :] if sizes else []
    return [() if size == 1 else dim for size, dim in zip(sizes, behind, strict=True)]


def arranged(tensor: Tensor, dims: Dims, order: Sequence[Label]) -> Tensor:
    """The tensor with one dimension for each label of ``order``, of size 1 for those that it does not have."""
    own = of(dims)
    tensor = tensor.reshape([label.size for label in own])
    tensor = tensor.permute([own.index(label) for label in order if label in own])
    for place, label in enumerate(order):
        if label not in own:
            tensor = tensor.unsqueeze(place)
    return tensor


def merged(tensor: Tensor, dims: Dims, groups: Sequence[Dim], *, expand: bool = True) -> Tensor:
    """The tensor with one dimension for each group of labels.

    Args:
        expand: give the tensor every label's size; else a group keeps size 1 where the tensor has none of its labels.
    """
    own = set(of(dims))
    order = [label for group in groups for label in group]
    tensor = arranged(tensor, dims, order)
    full = [g if expand or any(label in own for label in g) else () for g in groups]
    wanted = {label for group in full for label in group}
    sizes = [label.size if label in wanted else 1 for label in order]
    return tensor.expand(sizes).reshape([entries(group) for group in full])


def unmerged(tensor: Tensor, groups: Sequence[Dim], dims: Dims) -> Tensor:
    """The way back of `merged`: from one dimension for each group of labels, all of which are in ``dims``, to those."""
    order = [label for group in groups for label in group]
    tensor = tensor.reshape([label.size for label in order])
    tensor = tensor.permute([order.index(label) for label in of(dims)])
    return tensor.reshape([entries(whole(dim)) for dim in dims])


def entries(dim: Dim) -> int:
    """The size of a dimension."""
    return math.prod(label.size for label in dim)
