"""All the states of a measure that has finitely many."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.measures import Bernoulli, Categorical, Constant, Measure, Spin

MOST = 1 << 20
"""So many states at most are gone through."""
_BLOCK = 1 << 14


def count(measure: Measure) -> int | None:
    """How many states there are; None for infinitely many, or where it is not known."""
    size = measure.event_shape[0]
    if isinstance(measure, Spin | Bernoulli):
        return 2**size
    if isinstance(measure, Categorical):
        return size
    return 1 if isinstance(measure, Constant) else None


def blocks(measure: Measure, like: Tensor) -> Iterator[Float[Tensor, "block d"]]:
    """All states, in blocks, of the dtype and on the device of `like`."""
    number, size = count(measure), measure.event_shape[0]
    if number is None:
        raise ValueError(f"{type(measure).__name__} has no finite list of states")
    if isinstance(measure, Categorical):
        yield torch.eye(size, dtype=like.dtype, device=like.device)
        return
    if isinstance(measure, Constant):
        yield measure.value.to(like).unsqueeze(0)
        return
    powers = 2 ** torch.arange(size - 1, -1, -1, device=like.device)
    for first in range(0, number, _BLOCK):
        index = torch.arange(first, min(first + _BLOCK, number), device=like.device)
        bits = (index.unsqueeze(1) // powers % 2).to(like.dtype)
        yield 2 * bits - 1 if isinstance(measure, Spin) else bits
