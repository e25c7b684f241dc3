"""A record over several processes: each measures its own tokens or its own heads, and all get the same sums."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Timer
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import nn

from massieu.errors import InputError
from massieu.probing.monitor.quantities import Array, SiteNumbers, joined

PATIENCE = 30.0  # seconds
"""After so long without the other processes a warning says what they lack."""
NEEDED = "every process must make a Monitor and call it at the same steps"


@dataclass(eq=False)
class MonitorSums:
    """What one process measured at a step.

    Attributes:
        stream: for each layer, as `quantities.stream_numbers` gives it.
    """

    step: int
    sites: list[SiteNumbers]
    stream: dict[str, Array]


def over_processes(own: MonitorSums) -> MonitorSums:
    """The sums of all processes of the default group; every one of them has to call.

    Processes that hold the same tokens and heads count equally often, which changes no mean and no maximum.

    Raises:
        InputError: they measure different steps, or not all of them call.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return own
    parts: list[Any] = [None] * dist.get_world_size()
    with _answers(own.step):
        dist.all_gather_object(parts, own)
    if len(steps := {part.step for part in parts}) > 1:
        raise InputError(f"all processes must call the monitor at the same steps, got steps {sorted(steps)}")
    places = dict.fromkeys(site.place for part in parts for site in part.sites)
    sites = [joined([s for part in parts for s in part.sites if s.place == place]) for place in places]
    layers = dict.fromkeys(layer for part in parts for layer in part.stream)
    stream = {layer: np.sum([part.stream[layer] for part in parts if layer in part.stream], axis=0) for layer in layers}
    return MonitorSums(own.step, sites, stream)


@contextmanager
def _answers(step: int) -> Iterator[None]:
    """Around what waits for all processes: says what is needed where some do not come.

    Raises:
        InputError: the group's time is over, or another process has begun something else.
    """
    waiting = f"massieu.Monitor: waiting for the other processes; {NEEDED}"
    timer = Timer(PATIENCE, warnings.warn, [waiting])
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as error:
        raise InputError(f"not all processes have called the monitor at step {step}; {NEEDED} ({error})") from error
    finally:
        timer.cancel()


def head_shard(module: nn.Module) -> int:
    """Which share of a module's heads this process computes under tensor parallelism, counted from 0.

    Asked during the module's forward, where parameters that FSDP2 shards are whole.
    """
    for parameter in module.parameters():
        mesh, placements = getattr(parameter, "device_mesh", None), getattr(parameter, "placements", ())
        for dim, placement in enumerate(placements):
            if mesh is not None and placement.is_shard():
                return mesh.get_local_rank(dim)
    return 0


def resharded(modules: Sequence[nn.Module]) -> None:
    """Give back what FSDP2 gathered for a forward pass that no backward pass follows."""
    for module in modules:
        if callable(reshard := getattr(module, "reshard", None)) and hasattr(module, "unshard"):
            reshard()
