"""A record over several processes: each measures its own tokens or its own heads, and all get the same sums."""

import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Timer
from typing import Any

import torch.distributed as dist
from torch import nn

from massieu.errors import InputError
from massieu.foundation.shards import has_flat_shards
from massieu.probing.data.text_digest import TextDigest
from massieu.probing.monitor.period import ToldPeriod, together
from massieu.probing.monitor.quantities import SiteNumbers, StreamNumbers, joined


@dataclass(frozen=True)
class BatchShare:
    """Which rows of the whole batch a process holds: the processes' rows follow each other in the order of their ranks.

    Attributes:
        name: equal for processes that hold the same rows, as those that share heads or layers do.
        first_row: number of the first of them in the whole batch.
    """

    name: str = ""
    first_row: int = 0


PATIENCE = 30.0  # seconds
"""After so long without the other processes a warning says what they lack."""
NEEDED = "every process must make a Monitor and call it at the same steps"


@dataclass(eq=False)
class MonitorSums:
    """What one process measured at a step.

    Attributes:
        stream: by layer.
        beside: the numbers that were given beside the step.
        period: when the next record is due.
    """

    step: int
    sites: list[SiteNumbers]
    stream: dict[str, StreamNumbers]
    share: BatchShare
    beside: dict[str, float]
    period: ToldPeriod


def is_distributed() -> bool:
    """Whether there are several processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def batch_name(inputs: Mapping[str, Any]) -> str:
    """Equal for processes that were given equal inputs, which then hold the same rows."""
    if not is_distributed():
        return ""
    digest = TextDigest()
    digest.add(inputs, None)
    return digest.text() or f"process {dist.get_rank()}"


def batch_share(step: int, inputs: Mapping[str, Any], rows: int) -> BatchShare:
    """The share of this process, which has so many rows; every process has to call.

    Raises:
        InputError: not all of them call.
    """
    if not is_distributed():
        return BatchShare()
    own = (batch_name(inputs), rows)
    shares = gathered(step, own)
    distinct = list(dict.fromkeys(shares))
    return BatchShare(own[0], sum(count for _, count in distinct[: distinct.index(own)]))


def gathered(step: int, own: Any) -> list[Any]:
    """What every process of the default group gives, in the order of ranks; all of them have to call.

    Raises:
        InputError: not all of them call.
    """
    if not is_distributed():
        return [own]
    parts: list[Any] = [None] * dist.get_world_size()
    with _answers(step):
        dist.all_gather_object(parts, own)
    return parts


def over_processes(own: MonitorSums) -> MonitorSums:
    """The sums of all processes of the default group; every one of them has to call.

    Processes that hold the same tokens and heads count equally often, which changes no mean and no maximum. Of processes
    that hold the same rows, one measures a layer's stream. A number beside the step is the mean of what the processes gave.

    Raises:
        InputError: they measure different steps, or not all of them call.
    """
    if not is_distributed():
        return own
    parts = gathered(own.step, own)
    if len(steps := {part.step for part in parts}) > 1:
        raise InputError(f"all processes must call the monitor at the same steps, got steps {sorted(steps)}")
    places = dict.fromkeys(site.place for part in parts for site in part.sites)
    sites = [joined([s for part in parts for s in part.sites if s.place == place]) for place in places]
    stream: dict[str, StreamNumbers] = {}
    counted: set[tuple[str, str]] = set()
    for part in parts:
        for layer, numbers in part.stream.items():
            if (part.share.name, layer) not in counted:
                counted.add((part.share.name, layer))
                stream[layer] = stream[layer] + numbers if layer in stream else numbers
    names = dict.fromkeys(name for part in parts for name in part.beside)
    beside = {name: statistics.fmean(part.beside[name] for part in parts if name in part.beside) for name in names}
    return MonitorSums(own.step, sites, stream, own.share, beside, together([part.period for part in parts]))


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
    """Give back what FSDP1 or FSDP2 gathered for a forward pass that no backward pass follows."""
    for module in modules:
        if callable(reshard := getattr(module, "reshard", None)) and hasattr(module, "unshard"):
            reshard()
    if not has_flat_shards(modules[0]):
        return
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp._runtime_utils import _reshard

    # The outermost keeps its weights for the backward pass. An optimiser's step would change these, and not the shares.
    for module in modules:
        if not isinstance(module, FullyShardedDataParallel):
            continue
        handle = module._handle  # of the module's own weights, where it has some
        if handle is not None and handle.uses_sharded_strategy:
            _reshard(module, handle, True)
