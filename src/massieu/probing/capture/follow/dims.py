"""What each dimension of a tensor means, followed through views, permutations and products.

A dimension is a tuple of labels, the most significant first: (batch, head) after both were merged, () where its size is 1. A
label is split where a view splits a dimension, and all tensors that carry it see the parts.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    parts: list[Label] = []
    for label in labels:
        parts.extend(whole(label.parts) if label.parts else (label,))
    return tuple(parts)


def labels_of(dims: Dims) -> Dim:
    """All labels in their order."""
    return whole(label for dim in dims for label in dim)


@dataclass(frozen=True, eq=False)
class LabelledTensor:
    """A tensor and what its dimensions mean."""

    tensor: Tensor
    dims: Dims

    def labels(self) -> Dim:
        """All labels in their order."""
        return labels_of(self.dims)


def regrouped(dims: Dims, sizes: Sequence[int]) -> Dims | None:
    """The dimensions of a view with these sizes; None where it cuts across them."""
    remaining = list(labels_of(dims))
    new_dims: Dims = []
    for size in sizes:
        dim: list[Label] = []
        missing = size  # the product of the sizes of the labels that the dimension still lacks
        while missing > 1:
            if not remaining:
                return None
            label = remaining.pop(0)
            if missing % label.size == 0:
                missing //= label.size
                dim.append(label)
            elif label.size % missing == 0:
                first, rest = label.split(missing)
                remaining.insert(0, rest)
                dim.append(first)
                missing = 1
            else:
                return None
        new_dims.append(tuple(dim))
    if remaining or 0 in sizes:
        return None
    return new_dims


def broadcast(dims: Dims, sizes: Sequence[int]) -> Dims:
    """The dimensions of a tensor of these sizes that is combined elementwise with one of ``dims``."""
    # Elementwise, the last dimensions meet.
    last = dims[len(dims) - len(sizes) :] if sizes else []
    return [() if size == 1 else dim for size, dim in zip(sizes, last, strict=True)]


def arranged(labelled: LabelledTensor, order: Sequence[Label]) -> Tensor:
    """The tensor with one dimension for each label of ``order``, of size 1 for those that it does not have."""
    labels = labelled.labels()
    tensor = labelled.tensor.reshape([label.size for label in labels])
    tensor = tensor.permute([labels.index(label) for label in order if label in labels])
    for place, label in enumerate(order):
        if label not in labels:
            tensor = tensor.unsqueeze(place)
    return tensor


def merged(labelled: LabelledTensor, groups: Sequence[Dim], *, expand: bool = True) -> Tensor:
    """The tensor with one dimension for each group of labels.

    Args:
        expand: give the tensor every label's size; else a group keeps size 1 where the tensor has none of its labels.
    """
    labels = set(labelled.labels())
    order = [label for group in groups for label in group]
    tensor = arranged(labelled, order)
    full_groups = [group if expand or not labels.isdisjoint(group) else () for group in groups]
    full_labels = {label for group in full_groups for label in group}
    sizes = [label.size if label in full_labels else 1 for label in order]
    return tensor.expand(sizes).reshape([entries(group) for group in full_groups])


def unmerged(tensor: Tensor, groups: Sequence[Dim], dims: Dims) -> Tensor:
    """The way back of `merged`: from one dimension for each group of labels, all of which are in ``dims``, to those."""
    order = [label for group in groups for label in group]
    tensor = tensor.reshape([label.size for label in order])
    tensor = tensor.permute([order.index(label) for label in labels_of(dims)])
    return tensor.reshape([entries(whole(dim)) for dim in dims])


def entries(dim: Dim) -> int:
    """The size of a dimension."""
    return math.prod(label.size for label in dim)
