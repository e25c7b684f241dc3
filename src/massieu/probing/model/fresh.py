"""The re-initialised control: a copy of a model with freshly drawn weights, in which nothing learned is left."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from massieu.probing.model.checkpoint import quiet, sentence, shortened
from massieu.probing.model.forward import device_of, dtype_of
from massieu.probing.model.offload import moved, placed_like
from massieu.probing.model.seeding import OwnGenerator
from massieu.probing.model.unwrap import is_pretrained


def reinitialised(
    module: nn.Module, seed: int, matters: Callable[[nn.Module], bool] = lambda _: True
) -> tuple[nn.Module | None, str | None]:
    """A copy of the model with freshly drawn weights: the same architecture, nothing learned.

    A model of transformers is built anew from its configuration. Any other is copied, and its modules' own
    initialisations run, innermost first: ``reset_parameters``, ``_reset_parameters``, ``init_weights``, ``_init_weights``. What
    other threads draw in the meantime does not change it, and the global generator is left as it is.

    Args:
        matters: whether NaN in the weights that no initialisation reached shows in anything that is measured of the copy.

    Returns:
        The copy, or None where it would be half-trained; and what is to be said about either, if anything.
    """
    if is_pretrained(module):
        with torch.device("cpu"), OwnGenerator(seed), quiet():
            fresh = type(module)(copy.deepcopy(module.config))  # type: ignore[call-arg]
        if not moved(module):
            return fresh.to(device=device_of(module), dtype=dtype_of(module)).eval(), None
        placed = placed_like(fresh.to(dtype_of(module)).eval(), module)
        return (None, placed) if isinstance(placed, str) else (placed, None)
    if moved(module):
        return None, f"{type(module).__name__} is offloaded, and only models of transformers are then built anew"
    try:
        fresh = copy.deepcopy(module)
        missed = _reset(fresh, seed)
        depends = bool(missed) and matters(fresh)
    except Exception as error:  # of whatever class the user's own code raises, or a module that cannot be copied
        return None, f"a freshly initialised copy of {type(module).__name__} cannot be made ({sentence(error)})"
    if not missed:
        return fresh.eval(), None
    weights_missed = f"{len(missed)} weights that no reset_parameters or _init_weights reaches ({shortened(missed)})"
    if depends:
        return None, f"what it shows would depend on {weights_missed}"
    learned = module.state_dict()
    with torch.no_grad():
        for name in missed:
            fresh.get_parameter(name).copy_(learned[name])
    return fresh.eval(), f"it keeps the values of {weights_missed}; no attention and no hidden state depends on them"


def _reset(module: nn.Module, seed: int) -> list[str]:
    """Run every initialisation in the module; the names of the weights that none reached, which then are NaN."""
    numbers = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.is_floating_point() or parameter.is_complex()
    }
    with torch.no_grad(), OwnGenerator(seed), quiet():
        for parameter in numbers.values():
            parameter.fill_(torch.nan)
        for submodule in reversed(list(module.modules())):  # the innermost first, as when they were made
            _reset_one(submodule)
        _call(getattr(module, "init_weights", None))
    # Of whole numbers, which cannot be NaN, nobody knows whether they were reset.
    names = [name for name, _ in module.named_parameters()]
    return [name for name in names if name not in numbers or bool(numbers[name].isnan().any())]


def _reset_one(module: Any) -> None:
    if not _call(getattr(module, "reset_parameters", None)):
        _call(getattr(module, "_reset_parameters", None))
    reset_submodule = getattr(module, "_init_weights", None)
    if not _call(reset_submodule) and callable(reset_submodule) and len(_required(reset_submodule)) == 1:
        module.apply(reset_submodule)


def _call(function: Any) -> bool:
    """Call an initialisation that needs no argument; False where there is none."""
    if not callable(function) or _required(function):
        return False
    function()
    return True


def _required(function: Callable[..., Any]) -> list[str]:
    """Names of the positional arguments without a default."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.default is each.empty and each.kind in positional]
