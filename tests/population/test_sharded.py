"""A population spread over Gloo processes of this machine, against one process that has all of it."""

import pytest
import torch
from tests.ops import processes
from tests.population import sharded_work as work

from massieu.population import AttentionLayer


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_forward_and_gradients_are_those_of_one_process(size):
    """Gradients of weights are parts of a sum; a process may have no particle at all."""
    found = processes.run(work.everything, size)
    after, gradient, weights = work.alone(size)
    torch.testing.assert_close(torch.cat([each[0] for each in found], 1), after, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(torch.cat([each[1] for each in found], 1), gradient, rtol=1e-11, atol=1e-11)
    for index, expected in enumerate(weights):
        torch.testing.assert_close(sum(each[2][index] for each in found), expected, rtol=1e-11, atol=1e-11)


def test_without_a_process_group():
    with pytest.raises(ValueError, match="call init_process_group first"):
        AttentionLayer.random(4, 2).sharded(torch.zeros(3, 4))
