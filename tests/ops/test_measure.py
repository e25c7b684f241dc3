"""The errors that `massieu devices` and the benchmarks tell, of an attention whose errors are known."""

import pytest
import torch
from tests.support.ops import explicit

from massieu.ops.measure import errors_of


@pytest.mark.medium
def test_errors_are_relative_and_by_part():
    """An output that is a hundredth too large, with half of log Z's gradient."""

    def run(query, key, value):
        output, log_z = explicit.attention(query, key, value, is_causal=True)
        return 1.01 * output, (log_z + log_z.detach()) / 2

    errors, share = errors_of(run, "float32", torch.device("cpu"), size=8)
    assert errors["output"] == pytest.approx(0.01, rel=1e-3)
    assert errors["log_partition"] < 1e-6
    assert errors["grad_value"] == pytest.approx(0.01, rel=1e-3)
    assert share == pytest.approx(0.5, abs=1e-3)
