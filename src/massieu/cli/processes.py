"""One command in several processes, as ``torchrun`` starts them: they share a text, and one of them speaks and writes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from massieu.cli.streams import say

_SAID = "massieu/said"


def many() -> bool:
    """Whether ``torchrun`` has started this process beside others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def leads() -> bool:
    """Whether this process speaks and writes: the only one, or the first of several."""
    return not many() or os.environ.get("RANK") == "0"


def say_first(message: str) -> None:
    """One line on standard error, from the process that speaks."""
    if leads():
        say(message)


def say_once(message: str) -> None:
    """One line on standard error, from the first process that has one: what ends a run is said once, not by each.

    The first one speaks, whichever it is: when it ends, ``torchrun`` ends the others, which may not have come so far.
    """
    try:
        first = not many() or _store().add(_SAID, 1) == 1
    except RuntimeError:  # the process that keeps the store has ended
        first = True
    if first:
        say(message)


@cache
def _store() -> Any:
    """Where the processes leave word for each other; ``torchrun`` keeps it, and none of them waits for another here."""
    from torch.distributed.rendezvous import rendezvous

    return next(rendezvous("env://"))[0]


@contextmanager
def joined() -> Iterator[None]:
    """The processes make a group, if there are several; on machines with GPUs each has one of its own."""
    if not many():
        yield
        return
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    from massieu.probing.session.course import PATIENCE

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = PrefixStore("massieu/group", _store())
    dist.init_process_group("gloo", store=group, rank=rank, world_size=size, timeout=PATIENCE)
    yield
    dist.destroy_process_group()
