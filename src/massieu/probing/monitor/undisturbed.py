"""A forward pass beside training that leaves no trace: modes, random state, caches and shards are afterwards as before."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from massieu.probing.monitor.processes import resharded


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation without gradients, and what draws at random draws nothing that training misses."""
    modes = [(module, module.training) for module in model.modules()]
    # What a forward pass leaves on its modules, such as a loss that training reads later, and buffers in others' place.
    left = [(vars(module), dict(vars(module))) for module in model.modules()]
    left += [(m._buffers, dict(m._buffers)) for m in model.modules() if isinstance(m._buffers, dict)]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the state that training may draw from
    cached = torch.is_autocast_cache_enabled()
    with torch.random.fork_rng(devices=sorted(devices, key=str)), torch.inference_mode(False), torch.no_grad():
        try:
            for module, _ in modes:
                module.training = False
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
