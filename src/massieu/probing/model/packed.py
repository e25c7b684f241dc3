"""Weights of few bits: what numbers they stand for, and modules that compute with those numbers themselves.

A quantised module's own forward stays the model's. Where its weights are asked about, or where a derivative is wanted that its
kernel does not have, the numbers that its weights stand for take their place.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

_BITSANDBYTES = {"Params4bit", "Int8Params"}
_CLOSE = 0.05
"""A module whose result differs by more from that with its weights' numbers does something else too. Kernels that also
round what they multiply, to 8 bits, differ by about .01."""
_ROWS = 1024


def is_packed(weight: Any) -> bool:
    """Whether a tensor stands for numbers that it holds in fewer bits."""
    if type(weight).__name__ in _BITSANDBYTES:
        return True
    return hasattr(type(weight), "__tensor_flatten__") and not hasattr(weight, "full_tensor")


def parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors in which a tensor's numbers are held: itself, or those that it packs."""
    if not is_packed(tensor) or type(tensor).__name__ in _BITSANDBYTES:
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [part for name in names for part in parts(getattr(tensor, name))]


def dequantised(weight: Tensor) -> Tensor:
    """The numbers that a weight stands for."""
    return weight.dequantize() if is_packed(weight) else weight


def packed_linears(module: nn.Module) -> list[nn.Module]:
    """The modules inside one, or itself, that have a packed matrix of weights."""
    linears = []
    for part in module.modules():
        tensors = {**part._buffers, **part._parameters}  # no weight is computed by this
        if is_packed(tensors.get("weight")):
            linears.append(part)
    return linears


def described(model: nn.Module) -> str | None:
    """How many of a model's modules have packed weights, and of which kinds, in words; None where there are none."""
    linears = packed_linears(model)
    if not linears:
        return None
    kinds = sorted({type(linear.weight).__name__ for linear in linears})
    return f"{len(linears)} matrices held in fewer bits ({', '.join(kinds)})"


def numbers_in(model: nn.Module) -> int:
    """How many numbers a model's parameters stand for."""
    total = sum(parameter.numel() for parameter in model.parameters())
    linears: list[Any] = packed_linears(model)
    for linear in linears:
        # A packed matrix of bitsandbytes counts bytes, of which one holds several numbers.
        if type(linear.weight).__name__ in _BITSANDBYTES:
            total += linear.in_features * linear.out_features - linear.weight.numel()
    return total


def dense_weight(module: Any) -> Float[Tensor, "Out In"]:
    """The matrix of a linear module; where its weights are packed, the one that they stand for."""
    if type(module.weight).__name__ not in _BITSANDBYTES:
        return dequantised(module.weight).detach()
    # Their layout depends on the device and on what was called before; what the module makes of basis vectors does not.
    bias = module.bias
    module.bias = None
    try:
        with torch.no_grad():
            basis = torch.eye(module.in_features, device=module.weight.device)
            return torch.cat([module(rows) for rows in basis.split(_ROWS)]).mT.contiguous()
    finally:
        module.bias = bias


def projection_of(module: Any, source: Tensor, result: Tensor) -> Float[Tensor, "Out In"] | None:
    """The matrix of a linear module with packed weights, where it gives about what the module gave."""
    with torch.no_grad():
        weight = dense_weight(module).to(source.dtype)
        recomputed = nn.functional.linear(source, weight, module.bias)
        close = float((recomputed - result).norm()) <= _CLOSE * float(result.norm())
    return weight if close else None


@contextmanager
def dense_inside(module: nn.Module, *, unrounded: bool = False) -> Iterator[None]:
    """Inside, linear modules with packed weights compute with the numbers that these stand for, so that derivatives are right.

    Args:
        unrounded: also those that round what they multiply, which is no linear map. Else these keep their own forward, which
            has a first derivative.
    """
    linears: list[Any] = [linear for linear in packed_linears(module) if unrounded or not _rounds(linear)]
    # Another library may have set a forward on the instance, which has to be there again afterwards.
    own_forwards = [vars(linear).get("forward") for linear in linears]
    try:
        for linear in linears:
            linear.forward = partial(_linear, dense_weight(linear), linear.bias)
        yield
    finally:
        for linear, forward in zip(linears, own_forwards, strict=True):
            vars(linear).pop("forward", None)
            if forward is not None:
                linear.forward = forward


def _rounds(module: Any) -> bool:
    return type(module.weight).__name__ == "Int8Params"


def _linear(weight: Tensor, bias: Tensor | None, input: Tensor) -> Tensor:
    """A linear map in the input's dtype."""
    return nn.functional.linear(input, weight.to(input.dtype), None if bias is None else bias.to(input.dtype))
