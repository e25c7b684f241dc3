"""Models whose weights lie in several places: layers on several devices, or offloaded and fetched when they are called.

accelerate puts a hook on a module whose weights are elsewhere; until the module is called they are on PyTorch's meta device,
where they have no numbers. Nothing here imports accelerate unless a model has such hooks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from massieu.errors import require_extra
from massieu.probing.model.packed import parts


def offloaded(module: nn.Module) -> bool:
    """Whether a module's own weights are elsewhere until it is called."""
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return hasattr(module, "_hf_hook") and any(tensor.is_meta for tensor in tensors)


def moved(model: nn.Module) -> bool:
    """Whether a model's layers are on several devices, or some of them offloaded."""
    places: Any = getattr(model, "hf_device_map", {})
    return len(set(places.values())) > 1 or any(map(offloaded, model.modules()))


@contextmanager
def at_hand(module: nn.Module) -> Iterator[None]:
    """Inside, a module's own weights have their numbers, also where they are offloaded."""
    if not offloaded(module):
        yield
        return
    hook: Any = module._hf_hook
    hook.pre_forward(module)
    try:
        yield
    finally:
        hook.post_forward(module, None)


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Every parameter and buffer by name, with its numbers, and whether it is a buffer; one module's at a time.

    Of a parameter that several modules share, the first alone, unless it is offloaded.
    """
    yielded: set[Tensor] = set()
    for prefix, module in model.named_modules():
        fetched = offloaded(module)
        with at_hand(module):
            parameters = list(module.named_parameters(recurse=False))
            buffers = list(module.named_buffers(recurse=False))
            for is_buffer, named_tensors in ((False, parameters), (True, buffers)):
                for name, tensor in named_tensors:
                    if tensor not in yielded:
                        full_name = f"{prefix}.{name}" if prefix else name
                        yield from ((full_name, part, is_buffer) for part in parts(tensor))
            if not fetched:
                yielded.update(tensor for _, tensor in (*parameters, *buffers))


def execution_device(model: nn.Module) -> torch.device | None:
    """Where the first of the offloaded modules runs; None where none is offloaded."""
    for module in model.modules():
        if offloaded(module):
            hook: Any = module._hf_hook
            for each in (*getattr(hook, "hooks", ()), hook):  # a sequence of hooks has them inside
                device = getattr(each, "execution_device", None)
                if device is not None:
                    return torch.device(device)
    return None


def placed_like(copy: nn.Module, model: nn.Module) -> nn.Module | str:
    """A copy in main memory, its layers put where those of the model are; or why it cannot be, in a few words."""
    places: Any = getattr(model, "hf_device_map", {})
    if "disk" in places.values():
        return "the model is offloaded to disk, so that a copy of it would not fit into memory"
    if len(set(places.values())) > 1:
        return require_extra("accelerate", "offload").dispatch_model(copy, device_map=places)
    device = execution_device(model)
    assert device is not None
    return require_extra("accelerate", "offload").cpu_offload(copy, execution_device=device)
