"""In which type of numbers a forward pass computed: it says how much rounding explains."""

import torch
from torch import Tensor


def coarsest(*dtypes: torch.dtype) -> torch.dtype:
    """The floating-point type that rounds most."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def computed_in(*tensors: Tensor) -> torch.dtype:
    """The type that rounds most, of some floating-point tensors and of the autocast that is active where they are.

    A result may be of a finer type than what it was computed from: models under autocast give float32 as well. So the
    question is asked during the forward pass, where the autocast of the model's own code is active.
    """
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    for device in {tensor.device.type for tensor in tensors}:
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            dtypes.append(torch.get_autocast_dtype(device))
    return coarsest(*dtypes)
