"""What modules check of their inputs, so that no error comes from a kernel far below."""

import torch
from torch import Tensor, nn

from massieu.solve.arguments import FLOATS, floating


def check_input(name: str, tensor: object, module: nn.Module, size: int | None = None) -> Tensor:
    """The input, if it is floating-point, of the module's dtype and on its device, and of that size in its last dimension.

    Raises:
        TypeError: another dtype; both are named. Autocast makes half precision and float32 one.
        ValueError: another device or size.
    """
    given = floating(name, tensor)
    own = next((parameter for parameter in module.parameters() if parameter.is_floating_point()), None)
    size = input_size(module) if size is None else size
    if size is not None and (given.ndim == 0 or given.shape[-1] != size):
        raise ValueError(f"{name} must have {size} numbers in its last dimension, got shape {tuple(given.shape)}")
    if own is None:
        return given
    check_device(name, given, own)
    if given.dtype != own.dtype and own.dtype in FLOATS and not _cast(given, own):
        dtypes = _name(given), _name(own)
        raise TypeError(
            f"{name} is {dtypes[0]}, the module's parameters {dtypes[1]}: convert one, as by .to(torch.{dtypes[1]})"
        )
    return given


def check_device(name: str, given: Tensor, own: Tensor) -> None:
    """Raises ValueError if the input is on another kind of device than a parameter."""
    if given.device.type != own.device.type:
        raise ValueError(
            f"{name} is on {given.device.type}, the module's parameters on {own.device.type}: move one with .to"
        )


def input_size(module: nn.Module) -> int | None:
    """The size of the vectors that a projection takes; None where that is not known."""
    if isinstance(module, nn.Sequential):
        return next((size for part in module if (size := input_size(part)) is not None), None)
    if isinstance(module, nn.LayerNorm):
        return module.normalized_shape[-1]
    return module.in_features if isinstance(module, nn.Linear) else None


def _cast(given: Tensor, own: Tensor) -> bool:
    """Whether autocast brings both to one dtype, which it does for all but float64."""
    kind = given.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return False
    return torch.float64 not in (given.dtype, own.dtype)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
