"""Nested tensors: sequences of several lengths without padding, which `torch.nn.TransformerEncoder` makes in evaluation."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def padded(nested: Tensor) -> tuple[Float[Tensor, "B L d"], Bool[Tensor, "B L"]]:
    """The sequences in one dense tensor, 0 behind their ends, and where that padding is."""
    lengths = torch.tensor([len(sequence) for sequence in nested.unbind()], device=nested.device)
    dense = torch.nested.to_padded_tensor(nested, 0.0)
    return dense, torch.arange(dense.shape[1], device=nested.device) >= lengths.unsqueeze(-1)


def like(dense: Float[Tensor, "B L d"], padding: Bool[Tensor, "B L"], nested: Tensor) -> Tensor:
    """The sequences of a dense tensor, in the layout of `nested`."""
    if nested.layout == torch.jagged:
        # With its own offsets, since sums of nested tensors ask whether these are the same.
        offsets = nested.offsets()  # pyright: ignore[reportAttributeAccessIssue]
        return torch.nested.nested_tensor_from_jagged(dense[~padding], offsets)
    rows = zip(dense, (~padding).sum(-1).tolist(), strict=True)
    return torch.nested.as_nested_tensor([row[:length] for row, length in rows])
