"""The optimisers that take the training's steps, and what is in them."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from massieu.errors import InputError
from massieu.foundation.arguments import described


def optimizers_of(argument: object) -> list[Optimizer]:
    """The optimisers in an argument, each once: one or a sequence of them; wrappers such as accelerate's are removed.

    Raises:
        InputError: the argument holds something else.
    """
    if argument is None:
        return []
    candidates = argument if isinstance(argument, list | tuple) else [argument]
    optimizers: list[Optimizer] = []
    for candidate in candidates:
        if not isinstance(candidate, Optimizer):
            raise InputError(
                f"optimizer must be a torch.optim.Optimizer or a list of these, got {described(candidate)}"
            )
        optimizers.append(_innermost(candidate))
    return list(dict.fromkeys(optimizers))


def parameter_groups(optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    """The parameter groups of several optimisers, one after another."""
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def parameters_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """All parameters that the optimisers train, each once."""
    return list(dict.fromkeys(parameter for group in parameter_groups(optimizers) for parameter in group["params"]))


def learning_rates(optimizers: Iterable[Optimizer]) -> dict[str, float]:
    """``learning_rate`` of the first group, then ``learning_rate_1`` and so on."""
    rates: dict[str, float] = {}
    for index, group in enumerate(parameter_groups(optimizers)):
        name = f"learning_rate_{index}" if index else "learning_rate"
        rates[name] = float(group["lr"])
    return rates


def _innermost(optimizer: Optimizer) -> Optimizer:
    """The optimiser to which a wrapper hands its steps; the wrapper itself may have no hooks."""
    while True:
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            return optimizer
        optimizer = inner
