"""A forward pass beside training that leaves no trace: modes, random state, caches and shards are afterwards as before."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from massieu.probing.monitor.processes import resharded


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation without gradients, and what draws at random draws nothing that training misses."""
    modes = [(module, module.training) for module in model.modules()]
    # What a forward pass leaves on its modules, such as a loss that training reads later, and what it writes to.
    written: list[dict[str, Any]] = [m._parameters for m in model.modules() if _renormalises(m)]
    buffers: list[dict[str, Any]] = [m._buffers for m in model.modules() if isinstance(m._buffers, dict)]
    left: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (held, dict(held)) for held in (*map(vars, model.modules()), *buffers, *written)
    ]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the state that training may draw from
    cached = torch.is_autocast_cache_enabled()
    with torch.random.fork_rng(devices=sorted(devices, key=str)), torch.inference_mode(False), torch.no_grad():
        try:
            for module, _ in modes:
                module.training = False
            _copy(written)
            # A cast made without gradients would be found in the cache by the training step, whose gradients it lacks.
            torch.set_autocast_cache_enabled(False)
            yield
        finally:
            torch.set_autocast_cache_enabled(cached)
            for held, before in left:
                for name in held.keys() - before.keys():
                    del held[name]
                held.update(before)
            for module, training in modes:
                module.training = training
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
            resharded([module for module, _ in modes])


def _renormalises(module: nn.Module) -> bool:
    """Whether a look-up writes to the module's weight, which is not sharded."""
    return getattr(module, "max_norm", None) is not None and type(getattr(module, "weight", None)) is nn.Parameter


def _copy(written: list[dict[str, Any]]) -> None:
    """Put copies in the place of tensors; one of a tensor that several modules share."""
    copies: dict[int, Tensor] = {}
    for held in written:
        for name, tensor in held.items():
            if tensor is not None:
                held[name] = copies.setdefault(id(tensor), tensor.detach().clone())
