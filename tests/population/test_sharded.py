"""A population spread over Gloo processes of this machine, against one process that has all of it."""

import pytest
import torch
from tests.support import processes
from tests.support.population import sharded_work as work

from massieu.population import AttentionLayer, Flow, ResampledLayer

pytestmark = pytest.mark.medium  # processes


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_forward_and_gradients_are_those_of_one_process(size):
    """Gradients of weights are parts of a sum; a process may have no particle at all."""
    told = processes.run(work.everything, size)
    result = [results for results, _ in told]
    after, gradient, weights = work.alone(size)
    torch.testing.assert_close(torch.cat([each[0] for each in result], 1), after, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(torch.cat([each[1] for each in result], 1), gradient, rtol=1e-11, atol=1e-11)
    for index, expected in enumerate(weights):
        torch.testing.assert_close(sum(each[2][index] for each in result), expected, rtol=1e-11, atol=1e-11)
    if size == 2:
        flows_are_that_of_one_process([flow for _, flow in told])


def flows_are_that_of_one_process(flows):
    """Layers with a renormalisation of the whole population behind them."""
    alone = work.flow().run(work.population()[0, : sum(work.SIZES[2])], progress=False)
    torch.testing.assert_close(torch.cat([each.particles for each in flows]), alone.particles, rtol=1e-10, atol=1e-10)
    for name in alone.observables:
        for each in flows:
            torch.testing.assert_close(each.values(name), alone.values(name), rtol=1e-9, atol=1e-9)


def test_a_flow_of_processes_needs_operators_that_communicate():
    layer = ResampledLayer.create(generator=torch.Generator())
    with pytest.raises(ValueError, match="ResampledLayer needs the whole population"):
        Flow(layer, depth=2, group=object())


def test_without_a_process_group():
    with pytest.raises(ValueError, match="call init_process_group first"):
        AttentionLayer.random(4, 2).sharded(torch.zeros(3, 4))
