"""Processes that share a population must have one operator, and read it alike: else one error on all, at once."""

import pytest
import torch
from tests.support import processes
from tests.support.population import disagreements as work
from tests.support.rows import every_row

from massieu.population import covariance_spectrum

pytestmark = pytest.mark.medium  # processes


@pytest.fixture(scope="module")
def results():
    """The results of each process."""
    return processes.run(work.everything, 2)


@every_row("name", work.ROWS)
def test_one_error_on_all_processes(results, name):
    words = work.ROWS[name][2]
    for result in results:
        assert name in result, "a number, and no error"
    first, other = (result[name] for result in results)
    assert words in first and "process 1" in first and "\n" not in first, first
    assert first == other or first.endswith(other), other
    expected = covariance_spectrum(work.POINTS)[:4]
    for result in results:
        torch.testing.assert_close(result[name, "next"], expected)
