"""Clouds shared by Gloo processes of this machine, against one process that has all tokens."""

import pytest
import torch
from tests.support import processes
from tests.support.population import shared_clouds as work

from massieu.population import Flow, covariance_spectrum

pytestmark = pytest.mark.medium  # processes


@pytest.fixture(scope="module")
def results():
    return processes.run(work.everything, 2)


@pytest.mark.slow
def test_the_spectrum_is_that_of_all_tokens(results):
    for each in results:
        torch.testing.assert_close(each["spectrum"], covariance_spectrum(work.cloud()), atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("kind", ["flow", "resumed"])
def test_a_flow_is_that_of_all_tokens(results, kind):
    alone = Flow(work.towards_the_mean, depth=3, observables=work.OBSERVABLES).run(work.cloud())
    for each in results:
        result = each[kind]
        assert result.complete
        assert result.observables == alone.observables
        for name in alone.observables:
            for column in ("values", "standard_errors", "nulls"):
                mine, all_tokens = (getattr(flow, column)(name) for flow in (result, alone))
                torch.testing.assert_close(mine, all_tokens, atol=1e-9, rtol=1e-9, equal_nan=True)
    particles = torch.cat([each[kind].particles for each in results])
    torch.testing.assert_close(particles, alone.particles, atol=1e-12, rtol=1e-12)


def test_each_process_keeps_its_latest_state(results):
    for each in results:
        assert each["interrupted"] == 1
        assert [name.split("-layer-")[0] for name in each["files"]] == ["process-00000", "process-00001"]
