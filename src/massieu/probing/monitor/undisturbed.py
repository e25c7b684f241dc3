"""A forward pass beside training that leaves no trace: modes, random state, caches and shards are afterwards as before."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from massieu.probing.monitor.processes import reshard


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation without gradients, and what draws at random draws nothing that training misses."""
    modules = list(model.modules())
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with (
        torch.random.fork_rng(devices=sorted(devices, key=str)),
        torch.inference_mode(False),
        torch.no_grad(),
        # The first is left last, when parameters are in their places again.
        _resharding(modules),
        _same_random_state(),
        _same_attributes(modules),
        _evaluating(modules),
        _without_autocast_cache(),
    ):
        yield


@contextmanager
def _resharding(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Free what a forward pass has gathered inside, since no backward pass does."""
    try:
        yield
    finally:
        reshard(modules)


@contextmanager
def _same_random_state() -> Iterator[None]:
    """Put back the states of the random numbers of Python and NumPy, from which a model or a data set may draw."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002 - the state that training may draw from
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002


@contextmanager
def _evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Modules in evaluation inside, each afterwards in its own mode again."""
    modes = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, training in zip(modules, modes, strict=True):
            module.training = training


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """A cast made without gradients would be found in the cache by the training step, whose gradients it lacks."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


@contextmanager
def _same_attributes(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put back what a forward pass leaves on its modules, such as a loss that training reads later, and what it writes to."""
    written = [module._parameters for module in modules if _renormalises(module)]
    dictionaries: list[dict[str, Any]] = [vars(module) for module in modules]
    dictionaries += [module._buffers for module in modules if isinstance(module._buffers, dict)]
    dictionaries += written
    before = [dict(dictionary) for dictionary in dictionaries]
    try:
        _replace_with_copies(written)
        yield
    finally:
        for dictionary, entries in zip(dictionaries, before, strict=True):
            for name in dictionary.keys() - entries.keys():
                del dictionary[name]
            dictionary.update(entries)


def _renormalises(module: nn.Module) -> bool:
    """Whether a look-up writes to the module's weight, which is not sharded."""
    return getattr(module, "max_norm", None) is not None and type(getattr(module, "weight", None)) is nn.Parameter


def _replace_with_copies(dictionaries: Sequence[dict[str, Any]]) -> None:
    """Put copies in the place of tensors; one of a tensor that several modules share."""
    copies: dict[int, Tensor] = {}
    for dictionary in dictionaries:
        for name, tensor in dictionary.items():
            if tensor is not None:
                dictionary[name] = copies.setdefault(id(tensor), tensor.detach().clone())
