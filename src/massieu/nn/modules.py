"""What modules share: checked inputs, numbers that train, a start to go back to, iterations that may not end."""

from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from massieu.foundation.arguments import FLOATS, check_one_device, check_range, check_shape, floating, number
from massieu.foundation.doors import door
from massieu.foundation.transforms import autocasts, every, in_functorch, values_are_readable
from massieu.solve.status import warn_unconverged

Number = float | int | Tensor | None
"""One number or one a head: a constant, a tensor that is saved with the module, or a Parameter, which trains."""

Device = torch.device | str | None
_SHOWN = 8
"""The most numbers of a setting that a module's `repr` lists."""


def check_input(
    name: str, tensor: object, module: nn.Module, size: int | None = None, *, or_half: bool = False
) -> Tensor:
    """The input, if it is floating-point, of the module's dtype and on its device, and of that size in its last dimension.

    Args:
        or_half: Half precision goes into a module of any dtype, which computes it in at least float32. Single numbers have
            no dtype of their own: with none but these, any goes.

    Raises:
        TypeError: another dtype; both are named. Autocast makes half precision and float32 one.
        ValueError: another device or size.
    """
    given = floating(name, tensor)
    size = input_size(module) if size is None else size
    if size is not None and (given.ndim == 0 or given.shape[-1] != size):
        raise ValueError(f"{name} must have {size} numbers in its last dimension, got shape {tuple(given.shape)}")
    held = chain(module.parameters(), module.buffers())
    own = next((one for one in held if one.is_floating_point() and one.ndim), None)
    if own is None:
        return given
    check_one_device(**{name: given, "the module's parameters": own})
    # Autocast brings all but float64 to one dtype.
    cast = autocasts(given.device.type) and torch.float64 not in (given.dtype, own.dtype)
    cast = cast or (or_half and given.dtype.itemsize == 2)
    if given.dtype != own.dtype and own.dtype in FLOATS and not cast:
        ours, theirs = (str(dtype).removeprefix("torch.") for dtype in (own.dtype, given.dtype))
        raise TypeError(f"{name} is {theirs}, the module's parameters {ours}: convert one, as by .to(torch.{ours})")
    return given


def check_tokens(name: str, given: object, projection: nn.Module, batch_first: bool) -> Float[Tensor, "B L d"]:
    """Tokens for a projection, batch first; given as (batch, length, size), or else (length, batch, size).

    Raises:
        TypeError, ValueError: another shape; as `check_input`.
    """
    order = ("batch", "length") if batch_first else ("length", "batch")
    check_shape(name, floating(name, given), (*order, input_size(projection) or "size"))
    tokens = check_input(name, given, projection)
    return tokens if batch_first else tokens.transpose(0, 1)


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


def register_number(
    module: nn.Module,
    name: str,
    value: Number,
    heads: int,
    *,
    or_none: bool = True,
    above: float | None = None,
    device: Device = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Keep a number as it is, a tensor as a buffer and a Parameter as a parameter, which trains.

    Raises:
        TypeError: neither number nor floating-point tensor.
        ValueError: not finite or not above that bound, or a tensor that is neither one number nor one a head.
    """
    if not isinstance(value, Tensor):
        setattr(module, name, None if value is None and or_none else float(number(name, value, above=above)))
        return
    if tuple(floating(name, value).shape) not in ((), (heads,)):
        raise ValueError(f"{name} must be one number or one for each of {heads} heads, got shape {tuple(value.shape)}")
    check_range(name, value, above=above)
    hold(module, name, value, isinstance(value, nn.Parameter), device, dtype)


def hold(
    module: nn.Module, name: str, start: Tensor, trained: bool, device: Device = None, dtype: torch.dtype | None = None
) -> None:
    """Register a tensor as a buffer or a parameter, and remember it for a reset. A Parameter stays the same object."""
    moved = start.to(place_of(start, device), dtype if start.is_floating_point() else None)
    if not trained:
        module.register_buffer(name, moved)
    else:
        trains = start.requires_grad or not isinstance(start, nn.Parameter)
        # A copy: what was given is not trained with it, and an expanded tensor has one number for many.
        own = moved if isinstance(moved, nn.Parameter) else nn.Parameter(moved.detach().clone(), requires_grad=trains)
        module.register_parameter(name, own)
    start = start.detach()
    vars(module).setdefault("_given", {})[name] = start if start.is_meta else start.to("cpu", copy=True)


def place_of(start: Tensor, device: Device) -> Device:
    """The device that is asked for, else the tensor's own; for one of the CPU, where modules are made by default."""
    return torch.get_default_device() if device is None and start.device.type == "cpu" else device


class Resettable(nn.Module):
    """A module that can start anew: made on `meta`, it gets memory by `to_empty(device=…)` and a start by `reset_parameters`.

    One call resets the parts of the module too.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if cls.__module__.startswith("massieu."):  # what users' own classes call their arguments is up to them
            door(cls)

    def reset_parameters(self) -> None:
        """Draw again what was drawn at the start, in parts of the module too, and restore the numbers that were given.

        Raises:
            ValueError: a number was given on `meta`, where it has no value to restore.
        """
        reset_parts(self)
        for name, start in vars(self).get("_given", {}).items():
            own = getattr(self, name)
            if start.is_meta and not own.is_meta:
                raise ValueError(
                    f"{name} was given on meta, where it has no value: load a state dict, or give it elsewhere"
                )
            with torch.no_grad():
                own.copy_(start)


def reset_parts(module: nn.Module) -> None:
    """Have each part of a module reset its parameters; a part that cannot, its own parts."""
    for part in module.children():
        own: Any = getattr(part, "reset_parameters", partial(reset_parts, part))
        own()


def settings(module: nn.Module, *names: str) -> str:
    """``name=value`` for the attributes of a module that are not None, as its `repr` shows them."""
    return ", ".join(f"{name}={_told(value)}" for name in names if (value := getattr(module, name)) is not None)


def _told(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"{value:g}" if isinstance(value, float) else str(value)
    known = value.numel() <= _SHOWN and values_are_readable(value)
    numbers = ", ".join(f"{one:g}" for one in value.flatten().tolist()) if known else f"shape {tuple(value.shape)}"
    return f"{f'[{numbers}]' if value.ndim else numbers}{' trained' if isinstance(value, nn.Parameter) else ''}"


class LearnableAlpha(Resettable):
    """A number in [low, high), or one or one a head; a trained one lies between `low` and low + 1, and its logit is trained."""

    logit: Tensor | None
    alpha: Tensor | float

    def __init__(
        self,
        value: float | Tensor,
        heads: int,
        low: float,
        high: float,
        *,
        learn: bool,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Raises ValueError outside [low, high), or, to be learned, outside (low, low + 1); TypeError for what is no number."""
        super().__init__()
        if isinstance(value, nn.Parameter):
            raise TypeError("alpha must be a number or a tensor; learn_alpha=True trains it")
        register_number(self, "alpha", value, heads, or_none=False, device=device, dtype=dtype)
        given = value if isinstance(value, Tensor) else torch.tensor(float(value), device="cpu")
        inside = (given > low) & (given < low + 1) if learn else (given >= low) & (given < high)
        if not every(inside):
            interval = f"({low:g}, {low + 1:g}) to be learned" if learn else f"[{low:g}, {high:g})"
            raise ValueError(f"alpha must lie in {interval}, got {given.tolist()}")
        self.low, self.logit = low, None
        if learn:
            del self.alpha, self.logit
            vars(self).pop("_given", None)
            start = torch.logit((given - low).to(torch.get_default_dtype())).expand(heads)
            hold(self, "logit", start, True, device or torch.get_default_device(), dtype)

    def forward(self) -> Tensor | float:
        return self.alpha if self.logit is None else self.low + torch.sigmoid(self.logit)

    def extra_repr(self) -> str:
        return settings(self, "logit") if self.logit is not None else settings(self, "alpha")


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

    def _keep(self, status: Tensor, residual: Tensor, *, warn: bool = True) -> None:
        if in_functorch():
            return
        self.convergence = Convergence(status.detach(), residual.detach())
        self._warned = self._warned or (warn and warn_unconverged(status, residual, type(self).__name__))
