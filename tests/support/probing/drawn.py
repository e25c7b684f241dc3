"""A model of which all weights are in memory, beside one that is drawn block by block."""

import copy
from typing import Any

import torch
from torch import nn


def in_memory(model: Any, drawn: nn.Module) -> Any:
    """A whole model of its class with all weights and buffers of a drawn one, read by their names."""
    whole = type(model)(copy.deepcopy(model.config)).eval()
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            module, _, own = name.rpartition(".")
            with torch._C.DisableTorchFunction():
                parameter.copy_(getattr(drawn.get_submodule(module), own))
        for name, buffer in whole.named_buffers():
            buffer.copy_(drawn.get_buffer(name))
    return whole
