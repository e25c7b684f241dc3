"""Which dimension of a batch is the items' and which the tokens', as the first forward pass of a model shows it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.model.forward import main_input, separable


@dataclass(frozen=True)
class BatchLayout:
    """Where a batch's items are.

    Attributes:
        items: dimension of the main input; None where the batch is one item without a dimension for it.
        separable: the first dimension of every tensor is the items', so that a batch can be cut into them.
    """

    items: int | None = 0
    separable: bool = True

    def rows(self, module: nn.Module, inputs: Mapping[str, Any]) -> int:
        """How many items a batch has."""
        return 1 if self.items is None else main_input(module, inputs).shape[self.items]


def batch_layout(module: nn.Module, inputs: Mapping[str, Any], sequences: Sequence[int]) -> BatchLayout:
    """Where the items are, known from how many sequences each attention call had."""
    if hasattr(module, "main_input_name") and separable(inputs):
        return BatchLayout()
    shape = main_input(module, inputs).shape
    whole_axes = [axis for axis, size in enumerate(shape[:2]) if size in sequences]
    # Attention within windows has several sequences for each item.
    cut_axes = [axis for axis, size in enumerate(shape[:1]) if any(count % size == 0 for count in sequences if size)]
    axes = [*whole_axes, *cut_axes]
    return BatchLayout(axes[0] if axes else None, separable=False)


def tokens_first(call: AttentionCall, state: Tensor | None) -> bool | None:
    """Whether a module was given its tokens as (L, B, D), PyTorch's ``batch_first=False``; None where that cannot be known.

    Args:
        state: what it was given.
    """
    batch = call.query.shape[0]
    length = call.query.shape[2]
    if state is None or call.route == "interface" or batch == length == 1:
        return False
    if batch != length:
        return tuple(state.shape[:2]) == (length, batch)
    batch_first = getattr(call.module, "batch_first", None)
    return None if batch_first is None else not batch_first
