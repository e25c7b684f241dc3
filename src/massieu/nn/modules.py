"""Common code of the modules: checked inputs, trained numbers, resets to the start, iterations that may not converge."""

from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from massieu.foundation.arguments import FLOATS, check_one_device, check_range, check_shape, floating, number
from massieu.foundation.doors import door
from massieu.foundation.transforms import all_true, autocasts, in_functorch, values_are_readable
from massieu.solve.status import warn_unconverged

Number = float | int | Tensor | None
"""One number or one a head: a constant, a tensor that is saved with the module, or a Parameter, which trains."""

Device = torch.device | str | None
_MOST_SHOWN = 8
"""The most numbers of a setting that a module's `repr` lists."""


def check_input(
    name: str, tensor: object, module: nn.Module, size: int | None = None, *, or_half: bool = False
) -> Tensor:
    """The input, if it is floating-point, of the module's dtype and on its device, and of that size in its last dimension.

    Args:
        or_half: Allow half precision for a module of any dtype, which computes it in at least float32.

    Raises:
        TypeError: another dtype than the module's; both are named. Any dtype is allowed for a module whose tensors are single
            numbers, and under autocast half precision and float32 may meet.
        ValueError: another device or size.
    """
    inputs = floating(name, tensor)
    size = input_size(module) if size is None else size
    if size is not None and (inputs.ndim == 0 or inputs.shape[-1] != size):
        raise ValueError(f"{name} must have {size} numbers in its last dimension, got shape {tuple(inputs.shape)}")
    # Type promotion leaves out single numbers, so they say nothing of the module's dtype.
    weights = (one for one in chain(module.parameters(), module.buffers()) if one.is_floating_point() and one.ndim)
    weight = next(weights, None)
    if weight is None:
        return inputs
    check_one_device(**{name: inputs, "the module's parameters": weight})
    # Autocast brings all but float64 to one dtype.
    is_cast = autocasts(inputs.device.type) and torch.float64 not in (inputs.dtype, weight.dtype)
    is_cast = is_cast or (or_half and inputs.dtype.itemsize == 2)
    if inputs.dtype != weight.dtype and weight.dtype in FLOATS and not is_cast:
        module_dtype = str(weight.dtype).removeprefix("torch.")
        input_dtype = str(inputs.dtype).removeprefix("torch.")
        raise TypeError(
            f"{name} is {input_dtype}, the module's parameters {module_dtype}: convert one, as by .to(torch.{module_dtype})"
        )
    return inputs


def check_tokens(name: str, tensor: object, projection: nn.Module, batch_first: bool) -> Float[Tensor, "B L d"]:
    """The tokens for a projection, batch first; they come as (batch, length, size), or (length, batch, size).

    Raises:
        TypeError, ValueError: another shape; as `check_input`.
    """
    order = ("batch", "length") if batch_first else ("length", "batch")
    check_shape(name, floating(name, tensor), (*order, input_size(projection) or "size"))
    tokens = check_input(name, tensor, projection)
    return tokens if batch_first else tokens.transpose(0, 1)


def input_size(module: nn.Module) -> int | None:
    """The size of a projection's input vectors; None for a module that does not say."""
    if isinstance(module, nn.Sequential):
        return next((size for part in module if (size := input_size(part)) is not None), None)
    if isinstance(module, nn.LayerNorm):
        return module.normalized_shape[-1]
    return module.in_features if isinstance(module, nn.Linear) else None


def check_heads(embed_dim: int, num_heads: int) -> None:
    """Raise a ValueError unless tokens of size `embed_dim` split into `num_heads` heads of one size."""
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
    """Keep a number as an attribute, a tensor as a buffer, and a Parameter as a parameter, which trains.

    Raises:
        TypeError: neither a number nor a floating-point tensor.
        ValueError: not finite, not above the bound, or a tensor that has neither one number nor one for each head.
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
    placed = start.to(device_for(start, device), dtype if start.is_floating_point() else None)
    if not trained:
        module.register_buffer(name, placed)
    elif isinstance(placed, nn.Parameter):
        module.register_parameter(name, placed)
    else:
        # A copy: training must not change the caller's tensor, and entries of an expanded tensor share their memory.
        is_frozen = isinstance(start, nn.Parameter) and not start.requires_grad
        module.register_parameter(name, nn.Parameter(placed.detach().clone(), requires_grad=not is_frozen))
    start = start.detach()
    # On the CPU, which a module that moves or is on meta leaves alone.
    vars(module).setdefault("_start_values", {})[name] = start if start.is_meta else start.to("cpu", copy=True)


def device_for(start: Tensor, device: Device) -> Device:
    """The device for a tensor: the one requested; else the default device if the tensor is on the CPU; else None, to stay."""
    if device is None and start.device.type == "cpu":
        return torch.get_default_device()
    return device


class Resettable(nn.Module):
    """A module that can start anew: made on `meta`, it gets memory by `to_empty(device=…)` and numbers by `reset_parameters`.

    One call resets the parts of the module too.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if cls.__module__.startswith("massieu."):  # what users' own classes call their arguments is up to them
            door(cls)

    def reset_parameters(self) -> None:
        """Draw the random weights again, in parts of the module too, and restore the numbers passed at creation.

        Raises:
            ValueError: a number was passed on `meta`, where it has no value to restore.
        """
        reset_parts(self)
        for name, start in vars(self).get("_start_values", {}).items():
            tensor = getattr(self, name)
            if start.is_meta and not tensor.is_meta:
                raise ValueError(
                    f"{name} was given on meta, where it has no value: load a state dict, or give it elsewhere"
                )
            with torch.no_grad():
                tensor.copy_(start)


def reset_parts(module: nn.Module) -> None:
    """Reset the parameters of each part of a module; of a part without `reset_parameters`, those of its own parts."""
    for part in module.children():
        reset: Any = getattr(part, "reset_parameters", partial(reset_parts, part))
        reset()


def settings(module: nn.Module, *names: str) -> str:
    """``name=value`` for the attributes of a module that are not None, as its `repr` shows them."""
    values = {name: getattr(module, name) for name in names}
    return ", ".join(f"{name}={_shown(value)}" for name, value in values.items() if value is not None)


def _shown(value: object) -> str:
    """A setting as a `repr` shows it: short tensors by their numbers, others by their shape."""
    if isinstance(value, float):
        return f"{value:g}"
    if not isinstance(value, Tensor):
        return str(value)
    numbers = f"shape {tuple(value.shape)}"
    if value.numel() <= _MOST_SHOWN and values_are_readable(value):
        numbers = ", ".join(f"{one:g}" for one in value.flatten().tolist())
    if value.ndim:
        numbers = f"[{numbers}]"
    return f"{numbers} trained" if isinstance(value, nn.Parameter) else numbers


class LearnableAlpha(Resettable):
    """α in [low, high), one number or one for each head. A trained α lies in (low, low + 1), and its logit is the parameter."""

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
        """Starts at `value`.

        Raises:
            ValueError: outside [low, high), or, with `learn`, outside (low, low + 1).
            TypeError: no number, or a Parameter: `learn` trains it.
        """
        super().__init__()
        if isinstance(value, nn.Parameter):
            raise TypeError("alpha must be a number or a tensor; learn_alpha=True trains it")
        register_number(self, "alpha", value, heads, or_none=False, device=device, dtype=dtype)
        alpha = value if isinstance(value, Tensor) else torch.tensor(float(value), device="cpu")
        if learn:
            is_inside = (alpha > low) & (alpha < low + 1)
            interval = f"({low:g}, {low + 1:g}) to be learned"
        else:
            is_inside = (alpha >= low) & (alpha < high)
            interval = f"[{low:g}, {high:g})"
        if not all_true(is_inside):
            raise ValueError(f"alpha must lie in {interval}, got {alpha.tolist()}")
        self.low = low
        self.logit = None
        if learn:
            # The logit takes alpha's place, also in what a reset restores.
            del self.alpha, self.logit
            vars(self).pop("_start_values", None)
            start = torch.logit((alpha - low).to(torch.get_default_dtype())).expand(heads)
            hold(self, "logit", start, True, device or torch.get_default_device(), dtype)

    def forward(self) -> Tensor | float:
        """α at the current numbers."""
        return self.alpha if self.logit is None else self.low + torch.sigmoid(self.logit)

    def extra_repr(self) -> str:
        return settings(self, "logit") if self.logit is not None else settings(self, "alpha")


class Convergence(NamedTuple):
    """Whether each item of a forward pass has converged; without derivatives."""

    status: Int[Tensor, "*items"]
    """Values of `massieu.solve.Status`; 0 is converged."""
    residual: Float[Tensor, "*items"]
    """‖f(z) − z‖ of the state that was used; for linear systems the residual relative to the right side."""


class Iterating:
    """A mixin: the module keeps the `convergence` of its last forward pass, and warns once if an item has not converged.

    Such an item goes on with its last state, so that one slow query does not end a training run. It has that state's
    derivative if it ran out of steps, and derivative 0 if it diverged, so that the other items still train the parameters.
    Transforms of `torch.func` keep nothing; compiled code keeps `convergence` but cannot warn. With `throw` a
    ConvergenceError is raised instead.
    """

    convergence: Convergence | None = None
    """Convergence of the last forward pass; None before the first, and if nothing was solved for."""
    _warned: bool = False

    def _keep(self, status: Tensor, residual: Tensor, *, warn: bool = True) -> None:
        if in_functorch():
            return
        self.convergence = Convergence(status.detach(), residual.detach())
        self._warned = self._warned or (warn and warn_unconverged(status, residual, type(self).__name__))
