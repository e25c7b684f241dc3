"""One command in several processes, as ``torchrun`` starts them: they share a text, and rank 0 prints and writes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from massieu.cli.streams import say

_MESSAGES = "massieu/messages"
"""The key under which the processes count the final messages."""


def is_distributed() -> bool:
    """Whether ``torchrun`` has started several processes, of which this is one."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_rank_zero() -> bool:
    """Whether this process prints and writes: the only one, or that of rank 0."""
    return not is_distributed() or os.environ.get("RANK") == "0"


def say_first(message: str) -> None:
    """Print one line to standard error, in the process of rank 0 alone."""
    if is_rank_zero():
        say(message)


def say_once(message: str) -> None:
    """Print the line that ends a run to standard error, in the first process that has one.

    This need not be rank 0: when one process ends, ``torchrun`` ends the others, which may not have come so far.
    """
    try:
        is_first = not is_distributed() or _store().add(_MESSAGES, 1) == 1
    except RuntimeError:  # The process that holds the store has ended.
        is_first = True
    if is_first:
        say(message)


@cache
def _store() -> Any:
    """The key–value store that the processes share; ``torchrun`` holds it, and no process waits for another here."""
    from torch.distributed.rendezvous import rendezvous

    return next(rendezvous("env://"))[0]


@contextmanager
def process_group() -> Iterator[None]:
    """Join the process group if there are several processes; on machines with GPUs each uses one of its own."""
    if not is_distributed():
        yield
        return
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    from massieu.probing.session.course import PATIENCE

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    group = PrefixStore("massieu/group", _store())
    dist.init_process_group("gloo", store=group, rank=rank, world_size=size, timeout=PATIENCE)
    yield
    dist.destroy_process_group()
