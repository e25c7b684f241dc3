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
from massieu.probing.monitor.period import PeriodProposal, agreed
from massieu.probing.monitor.site_numbers import SiteNumbers, joined
from massieu.probing.monitor.stream_numbers import StreamNumbers

PATIENCE = 30.0  # seconds
"""After so long without the other processes a warning says what they lack."""
NEEDED = "every process must make a Monitor and call it at the same steps"


@dataclass(frozen=True)
class BatchShare:
    """Which rows of the whole batch a process holds: the processes' rows follow each other in the order of their ranks.

    Attributes:
        name: equal for processes that hold the same rows, as those that share heads or layers do.
        first_row: number of the first of them in the whole batch.
    """

    name: str = ""
    first_row: int = 0


@dataclass(eq=False)
class MonitorSums:
    """What one process measured at a step.

    Attributes:
        stream: by layer.
        extra: the numbers that were given with the step.
        period: when the next record is due.
    """

    step: int
    sites: list[SiteNumbers]
    stream: dict[str, StreamNumbers]
    share: BatchShare
    extra: dict[str, float]
    period: PeriodProposal


def is_distributed() -> bool:
    """Whether there are several processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_first_process() -> bool:
    """Whether this is the process of rank 0, or the only one."""
    return not (dist.is_available() and dist.is_initialized() and dist.get_rank() > 0)


def batch_name(inputs: Mapping[str, Any]) -> str:
    """Equal for processes that were given equal inputs, which then hold the same rows."""
    if not is_distributed():
        return ""
    digest = TextDigest()
    digest.add(inputs, None)
    return digest.text() or f"process {dist.get_rank()}"


def batch_share(step: int, inputs: Mapping[str, Any], num_rows: int) -> BatchShare:
    """The share of this process, which has so many rows; every process has to call.

    Raises:
        InputError: not all of them call.
    """
    if not is_distributed():
        return BatchShare()
    name = batch_name(inputs)
    distinct = list(dict.fromkeys(gathered(step, (name, num_rows))))
    before = distinct[: distinct.index((name, num_rows))]
    return BatchShare(name, sum(rows for _, rows in before))


def gathered(step: int, value: Any) -> list[Any]:
    """The values of all processes of the default group, in the order of ranks; all of them have to call.

    Raises:
        InputError: not all of them call.
    """
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    with _waiting_for_all(step):
        dist.all_gather_object(values, value)
    return values


def over_processes(measured: MonitorSums) -> MonitorSums:
    """The sums of all processes of the default group; every one of them has to call.

    Processes that hold the same tokens and heads count equally often, which changes no mean and no maximum. Of processes
    that hold the same rows, one measures a layer's stream. An extra number is the mean of what the processes gave.

    Raises:
        InputError: they measure different steps, or not all of them call.
    """
    if not is_distributed():
        return measured
    parts = gathered(measured.step, measured)
    steps = {part.step for part in parts}
    if len(steps) > 1:
        raise InputError(f"all processes must call the monitor at the same steps, got steps {sorted(steps)}")
    return MonitorSums(
        step=measured.step,
        sites=_sites_of_all(parts),
        stream=_stream_of_all(parts),
        share=measured.share,
        extra=_means_of_extra(parts),
        period=agreed([part.period for part in parts]),
    )


def _sites_of_all(parts: Sequence[MonitorSums]) -> list[SiteNumbers]:
    by_place: dict[str, list[SiteNumbers]] = {}
    for part in parts:
        for site in part.sites:
            by_place.setdefault(site.place, []).append(site)
    return [joined(sites) for sites in by_place.values()]


def _stream_of_all(parts: Sequence[MonitorSums]) -> dict[str, StreamNumbers]:
    stream: dict[str, StreamNumbers] = {}
    counted: set[tuple[str, str]] = set()
    for part in parts:
        for layer, numbers in part.stream.items():
            # Processes with the same rows have measured the same tokens: they count once.
            if (part.share.name, layer) not in counted:
                counted.add((part.share.name, layer))
                stream[layer] = stream.get(layer, StreamNumbers()) + numbers
    return stream


def _means_of_extra(parts: Sequence[MonitorSums]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part.extra)
    return {name: statistics.fmean(part.extra[name] for part in parts if name in part.extra) for name in names}


@contextmanager
def _waiting_for_all(step: int) -> Iterator[None]:
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

    Call it during the module's forward, where parameters that FSDP2 shards are whole.
    """
    for parameter in module.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            continue
        for dim, placement in enumerate(getattr(parameter, "placements", ())):
            if placement.is_shard():
                return mesh.get_local_rank(dim)
    return 0


def reshard(modules: Sequence[nn.Module]) -> None:
    """Free what FSDP1 or FSDP2 gathered for a forward pass that no backward pass follows."""
    for module in modules:
        reshard_module = getattr(module, "reshard", None)
        if callable(reshard_module) and hasattr(module, "unshard"):
            reshard_module()
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
