"""What modules share: checked inputs, numbers that train, projections to heads, and iterations that may not end."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from massieu.foundation.arguments import FLOATS, check_one_device, check_shape, floating, number
from massieu.foundation.transforms import autocasts, in_functorch
from massieu.nn.heads import merge_heads, split_heads
from massieu.solve.status import warn_unconverged

Number = float | int | Tensor | None
"""One number or one a head: a constant, a tensor that is saved with the module, or a Parameter, which trains."""


def check_input(name: str, tensor: object, module: nn.Module, size: int | None = None) -> Tensor:
    """The input, if it is floating-point, of the module's dtype and on its device, and of that size in its last dimension.

    Raises:
        TypeError: another dtype; both are named. Autocast makes half precision and float32 one.
        ValueError: another device or size.
    """
    given = floating(name, tensor)
    size = input_size(module) if size is None else size
    if size is not None and (given.ndim == 0 or given.shape[-1] != size):
        raise ValueError(f"{name} must have {size} numbers in its last dimension, got shape {tuple(given.shape)}")
    own = next((parameter for parameter in module.parameters() if parameter.is_floating_point()), None)
    if own is None:
        return given
    check_one_device(**{name: given, "the module's parameters": own})
    # Autocast brings all but float64 to one dtype.
    cast = autocasts(given.device.type) and torch.float64 not in (given.dtype, own.dtype)
    if given.dtype != own.dtype and own.dtype in FLOATS and not cast:
        ours, theirs = (str(dtype).removeprefix("torch.") for dtype in (own.dtype, given.dtype))
        raise TypeError(f"{name} is {theirs}, the module's parameters {ours}: convert one, as by .to(torch.{ours})")
    return given


def input_size(module: nn.Module) -> int | None:
    """The size of the vectors that a projection takes; None where that is not known."""
    if isinstance(module, nn.Sequential):
        return next((size for part in module if (size := input_size(part)) is not None), None)
    if isinstance(module, nn.LayerNorm):
        return module.normalized_shape[-1]
    return module.in_features if isinstance(module, nn.Linear) else None


def check_heads(embed_dim: int, num_heads: int) -> None:
    """Raise a ValueError unless tokens of that size can be cut into so many heads."""
    if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
        raise ValueError(f"embed_dim must be a positive multiple of num_heads, got {embed_dim} and {num_heads}")


def register_number(module: nn.Module, name: str, value: Number, heads: int, *, or_none: bool = True) -> None:
    """Keep a number as it is, a tensor as a buffer and a Parameter as a parameter, which trains.

    Raises:
        TypeError: neither number nor floating-point tensor.
        ValueError: not finite, or a tensor that is neither one number nor one a head.
    """
    if not isinstance(value, Tensor):
        setattr(module, name, None if value is None and or_none else float(number(name, value)))
        return
    if tuple(floating(name, value).shape) not in ((), (heads,)):
        raise ValueError(f"{name} must be one number or one for each of {heads} heads, got shape {tuple(value.shape)}")
    if isinstance(value, nn.Parameter):
        module.register_parameter(name, value)
    else:
        module.register_buffer(name, value)


class LearnableAlpha(nn.Module):
    """A number in [low, high), or one or one a head; a trained one lies between `low` and low + 1, and its logit is trained."""

    logit: Tensor | None
    alpha: Tensor | float

    def __init__(self, value: float | Tensor, heads: int, low: float, high: float, *, learn: bool) -> None:
        """Raises ValueError outside [low, high), or, to be learned, outside (low, low + 1); TypeError for what is no number."""
        super().__init__()
        if isinstance(value, nn.Parameter):
            raise TypeError("alpha must be a number or a tensor; learn_alpha=True trains it")
        register_number(self, "alpha", value, heads, or_none=False)
        given = torch.as_tensor(self.alpha)
        inside = (given > low) & (given < low + 1) if learn else (given >= low) & (given < high)
        if not bool(inside.all()):
            interval = f"({low:g}, {low + 1:g}) to be learned" if learn else f"[{low:g}, {high:g})"
            raise ValueError(f"alpha must lie in {interval}, got {given.tolist()}")
        self.low, self.logit = low, None
        if learn:
            start = torch.logit((given - low).to(torch.get_default_dtype()))
            self.logit = nn.Parameter(start.expand(heads).clone())
            del self.alpha

    def forward(self) -> Tensor | float:
        return self.alpha if self.logit is None else self.low + torch.sigmoid(self.logit)


class Convergence(NamedTuple):
    """What became of each item of a forward pass, without derivatives."""

    status: Int[Tensor, "*items"]
    """Values of `massieu.solve.Status`; 0 is converged."""
    residual: Float[Tensor, "*items"]
    """‖f(z) − z‖ of the state that was used; of systems of equations, relative to their right sides."""


class Iterating:
    """A module with this keeps the `convergence` of its last forward pass, and warns once where an item has not converged.

    An item that has not goes on with its last state, so that one slow query ends no training run. It has that state's
    derivative if it ran out of steps, and none if it diverged, so that the parameters of the others train on. In transforms
    of `torch.func` nothing is kept; compiled code keeps it and cannot warn. With `throw` a ConvergenceError is raised instead.
    """

    convergence: Convergence | None = None
    """Of the last forward pass; None before the first, and where nothing was solved for."""
    _warned: bool = False

    def _keep(self, status: Tensor, residual: Tensor) -> None:
        if in_functorch():
            return
        self.convergence = Convergence(status.detach(), residual.detach())
        self._warned = self._warned or warn_unconverged(status, residual, type(self).__name__)


class HeadsOfTokens(Iterating, nn.Module):
    """A module that projects tokens to heads, solves for something in each, and projects that to the output.

    Attributes are the arguments of the same names.
    """

    def __init__(self, embed_dim: int, num_heads: int, bias: bool, batch_first: bool, **sizes: int) -> None:
        """Projections `…_proj` from the sizes by name, and `out_proj` to `embed_dim`."""
        super().__init__()
        check_heads(embed_dim, num_heads)
        for name, size in sizes.items():
            setattr(self, f"{name}_proj", nn.Linear(size, embed_dim, bias=bias))
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first

    def _heads(self, name: str, tokens: object, *projections: str) -> list[Float[Tensor, "B H L D"]]:
        """The projections of one input.

        Raises:
            ValueError, TypeError: it is not (batch, length, size) or, if the batch is second, (length, batch, size).
        """
        modules = [self.get_submodule(f"{projection}_proj") for projection in projections]
        order = ("batch", "length") if self.batch_first else ("length", "batch")
        check_shape(name, floating(name, tokens), (*order, input_size(modules[0]) or "size"))
        given = check_input(name, tokens, modules[0])
        given = given if self.batch_first else given.transpose(0, 1)
        return [split_heads(module(given), self.num_heads) for module in modules]

    def _output(self, heads: Float[Tensor, "B H L D"], dtype: torch.dtype) -> Tensor:
        output = self.out_proj(merge_heads(heads).to(dtype))
        return output if self.batch_first else output.transpose(0, 1)
