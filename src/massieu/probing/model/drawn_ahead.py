"""Weights that other threads draw before they are asked for, and those of the next block with them.

Random numbers are drawn in main memory, by one thread for each weight. A GPU has read a block long before a single thread has
drawn the next one.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

DEVICES = frozenset({"cuda"})
"""Types of devices for which weights are drawn ahead."""
MOST_THREADS = 8


class Drawable(Protocol):
    """A weight by its name and its block."""

    @property
    def name(self) -> str: ...
    @property
    def block(self) -> str | None: ...
    @property
    def by_rows(self) -> bool: ...


Task = TypeVar("Task")
SomeWeight = TypeVar("SomeWeight", bound=Drawable)


class DrawnAhead(Generic[SomeWeight]):
    """The weights of the block at work and of the next one, as other threads draw them.

    Args:
        weights: of the model, in the order of its blocks.
        draw: draws one of them.
    """

    def __init__(self, weights: Sequence[SomeWeight], draw: Callable[[SomeWeight], Tensor]) -> None:
        self._draw = draw
        self._of_block: dict[str, list[SomeWeight]] = defaultdict(list)
        for weight in weights:
            if weight.block is not None and not weight.by_rows:
                self._of_block[weight.block].append(weight)
        blocks = list(self._of_block)
        self._next = dict(pairwise(blocks))
        self._threads = ThreadPoolExecutor(min(MOST_THREADS, torch.get_num_threads()))
        self._begun: dict[str, dict[str, Future[Tensor]]] = {}

    def begin(self, block: str) -> None:
        """Draw a block's weights, and those of the one that follows; others are given up."""
        wanted = [block, self._next.get(block, block)]
        for other in self._begun.keys() - set(wanted):
            for future in self._begun.pop(other).values():
                future.cancel()
        for each in wanted:
            if each not in self._begun:
                self._begun[each] = {
                    weight.name: self._threads.submit(self._draw, weight) for weight in self._of_block[each]
                }

    def take(self, weight: SomeWeight) -> Tensor | None:
        """A weight that was begun; None if it was not, or was taken before."""
        future = self._begun.get(weight.block or "", {}).pop(weight.name, None)
        return None if future is None else future.result()

    def all(self, draw: Callable[[Task], Tensor], tasks: Iterable[Task]) -> list[Tensor]:
        """What the threads draw for all of some tasks."""
        return list(self._threads.map(draw, tasks))

    def end(self) -> None:
        """Give up what is under way."""
        self._begun.clear()
        self._threads.shutdown(cancel_futures=True)


def are_drawn_ahead(device: torch.device | None) -> bool:
    """Whether weights for a device are drawn by other threads."""
    return device is not None and device.type in DEVICES and torch.get_num_threads() > 1
