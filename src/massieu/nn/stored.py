"""A measure kept by a module: its tensors are buffers, so that they move, are cast and are saved with the module."""

import torch
from torch import nn
from torch.utils import _pytree as pytree

from massieu.measures import Measure


class StoredMeasure(nn.Module):
    """Calling it returns the measure, of the buffers as they are now."""

    def __init__(self, measure: Measure) -> None:
        super().__init__()
        leaves, self._structure = pytree.tree_flatten(measure)
        self._count = len(leaves)
        for index, leaf in enumerate(leaves):
            # Of its own memory: two modules of one measure share nothing, and a checkpoint holds each tensor once.
            self.register_buffer(f"leaf{index}", leaf.detach().clone(memory_format=torch.contiguous_format))

    def forward(self) -> Measure:
        return pytree.tree_unflatten([getattr(self, f"leaf{index}") for index in range(self._count)], self._structure)
