"""A flow that is killed at each of the moments of writing its third checkpoint, in a process of its own each time."""

import os
import signal
import sys
from pathlib import Path

import torch

from massieu.population import CloudMoments, Flow

MOMENTS = ("before open", "before fsync", "before replace", "after replace", "before unlink")


def halve(points):
    """The flow's only layer."""
    return points / 2


def cloud():
    """The tokens that the flow starts from."""
    return torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def build():
    """The flow that is killed and the one that goes on."""
    return Flow(halve, depth=4, observables=[CloudMoments()])


def killed_at(moment: str) -> None:
    """Make the third time's step of that name the last that this process does."""
    when, name = moment.split()
    place = Path if name in ("open", "unlink") else os
    real = getattr(place, name)
    calls = []

    def last(*arguments, **options):
        ours = name == "fsync" or "process-" in str(arguments[0])
        real_unlink = name == "unlink" and Path(arguments[0]).name.startswith(".")
        if ours and not real_unlink:
            calls.append(1)
        stop = ours and not real_unlink and len(calls) == 3
        if stop and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*arguments, **options)
        if stop:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(place, name, last)


if __name__ == "__main__":
    # Under its importable name, so that the flow is the one that a test builds.
    from tests.support.population import killed_writing

    torch.set_num_threads(1)
    for moment in MOMENTS:
        child = os.fork()
        if child == 0:
            killed_writing.killed_at(moment)
            killed_writing.build().run(killed_writing.cloud(), checkpoint=Path(sys.argv[1], moment), progress=False)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(moment, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)
