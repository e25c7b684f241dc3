"""A flow whose process is killed in its fourth layer when run as a script, and the same flow for one that goes on."""

import os
import signal
import sys

import torch

from massieu.population import CloudMoments, CloudShape, Flow, ResampledLayer

CALLS = 0
KILLED_AT = 0


def cloud():
    """The tokens that the flow starts from."""
    return torch.randn(25, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def grow(points):
    """A layer that kills its process at the chosen call."""
    global CALLS
    CALLS += 1
    if CALLS == KILLED_AT:
        os.kill(os.getpid(), signal.SIGKILL)
    return points * 1.1


def build():
    """The flow, with a generator of its own."""
    draw = ResampledLayer.create(generator=torch.Generator().manual_seed(1), scale=0.3, step_size=0.5, residual=True)
    return Flow([draw, grow] * 3, observables=[CloudMoments(), CloudShape(projections=8)])


if __name__ == "__main__":
    # Under its importable name, so that the flow is the one that a test builds.
    from tests.support.population import killed_flow

    killed_flow.KILLED_AT = 2
    killed_flow.build().run(killed_flow.cloud(), checkpoint=sys.argv[1])
