"""The part of a module in memory that is read: without what wraps it, without its head, and with weights that have numbers."""

from typing import Any

from torch import Tensor, nn

from massieu.errors import InputError
from massieu.probing.model.checkpoint import shortened
from massieu.probing.model.offload import offloaded
from massieu.probing.model.signature import forward_signature
from massieu.probing.model.unwrap import is_pretrained, unwrapped


def readable_trunk(module: nn.Module) -> nn.Module:
    """A module without what wraps it; of a transformers model with a head, its trunk.

    Raises:
        InputError: as `unwrapped`; packed weights, or none at all: on the meta device, or lazy ones.
    """
    inner: Any = unwrapped(module)
    trunk: nn.Module = trunk_of(inner) if is_pretrained(inner) else inner
    class_name = type(inner).__name__
    packed_names = [name for name, entry in trunk.state_dict().items() if _is_packed(name, entry)]
    if packed_names:
        raise InputError(
            f"{class_name} has packed weights that cannot be read ({shortened(packed_names)}), as quantize_dynamic of "
            "torch makes them; give the model before quantisation"
        )
    check_loaded(trunk, class_name)
    return trunk


def check_loaded(module: nn.Module, class_name: str) -> None:
    """Raises:
    InputError: some of the module's weights have no numbers.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    # Offloaded weights are on the meta device too, and are fetched when their module is called.
    offloaded_modules = {name for name, part in module.named_modules() if offloaded(part)}
    empty_names = []
    for name, tensor in tensors:
        owner_name = name.rpartition(".")[0]
        if _is_empty(tensor) and owner_name not in offloaded_modules:
            empty_names.append(name)
    if empty_names:
        raise InputError(
            f"{class_name} is on the meta device or lazy, so it has no weights to read ({shortened(empty_names)}); "
            "load them first"
        )


def _is_empty(tensor: Tensor) -> bool:
    return tensor.is_meta or nn.parameter.is_lazy(tensor)


def _is_packed(name: str, entry: Any) -> bool:
    """Whether an entry of a state dict holds weights in a form of its own, which no tensor of numbers shows."""
    if isinstance(entry, Tensor):
        return not nn.parameter.is_lazy(entry) and entry.is_quantized
    return not name.endswith("_extra_state")


def trunk_of(model: Any) -> nn.Module:
    """A model of transformers without its head; the model itself where the base cannot be called with the model's input."""
    base = model.base_model
    parameters = forward_signature(base).parameters.values()
    required = {p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    return base if required <= {str(model.main_input_name)} else model
