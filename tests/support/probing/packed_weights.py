"""Weights of 8 bits that refuse to be viewed, as those of quantisation packages do."""

from typing import Any

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn


class RowScaledWeight(Tensor):
    """A matrix of whole numbers, each row times a scale. It can be detached, dequantised, and used by a linear layer."""

    @staticmethod
    def __new__(cls, whole: Int8[Tensor, "Out In"], scale: Float[Tensor, "Out 1"]) -> Any:
        made = Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype, device=whole.device)  # type: ignore[attr-defined]
        made.whole, made.scale = whole, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "scale"], None

    def dequantize(self) -> Float[Tensor, "Out In"]:
        return self.whole.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and isinstance(args[1], cls):
            return func(args[0], args[1].dequantize(), *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].whole, args[0].scale)
        raise NotImplementedError(f"{cls.__name__} dispatch: attempting to run unimplemented operator: {func}")


def quantise(model: nn.Module) -> None:
    """Give every linear layer of a model such a weight in place of its own."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.detach()
            scale = weight.abs().amax(1, keepdim=True) / 127
            module.weight = nn.Parameter(
                RowScaledWeight((weight / scale).round().to(torch.int8), scale), requires_grad=False
            )


def dequantise(model: nn.Module) -> None:
    """Give every linear layer the full matrix in place of such a weight."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and isinstance(module.weight, RowScaledWeight):
            module.weight = nn.Parameter(module.weight.dequantize())
