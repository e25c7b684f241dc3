"""Random calls of every kernel against float64 on explicit matrices: the short form of `scripts/fuzz_ops.py`."""

from dataclasses import replace

import pytest
import torch
from tests.support.ops.fuzz import command
from tests.support.ops.fuzz.case import errors

from massieu import ops


def test_every_kernel_has_cases_or_a_reason():
    """A new name of `massieu.ops` needs cases, or a reason why it is no kernel."""
    assert command.uncovered() == []
    assert set(command.GENERATORS) | set(command.NOT_KERNELS) == set(ops.__all__)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", command.GENERATORS)
def test_random_calls(kernel):
    found = command.failures(seed=2026, indices=range(25), device="cpu", kernel=kernel)
    wrong = [failure for failure in found if not isinstance(failure, str)]
    assert not wrong, wrong[0]


@pytest.mark.medium
@pytest.mark.parametrize("part", ["output", "gradient 1 of query", "log_partition"])
def test_an_error_of_a_billionth_is_noticed(part):
    """In float64, in a result or in a gradient: a bound that excuses it would be no bound."""
    noticed = []
    for index in range(8):
        draws = command.Draws(5, index)
        case = command.GENERATORS["attention"](draws)
        if case.dtype == torch.float64 and "query" in case.learned and draws.leaves["query"].numel() > 0:
            noticed.append(any(line.startswith(part) for line in errors(_with_error(case, part), "cpu")))
    assert noticed and all(noticed)


def _with_error(case, part):
    """The case of a kernel that is off by a billionth in this result, or in this gradient."""

    def kernel(views):
        results = case.kernel(views)
        if part in results:
            return results | {part: results[part] + 1e-9}
        change = 1e-9 * (views["query"] - views["query"].detach()).sum()
        return {name: result + change for name, result in results.items()}

    return replace(case, kernel=kernel)
