"""The claims on attention's engine notice an engine that is wrong: they run what users run."""

import pytest
import torch
from tests.papers.claims.wrong.engine import scaled

from massieu.ops import reference
from massieu.ops.fused import Fused
from massieu.papers.claims.run import verify
from massieu.papers.claims.shim import contrastive

# Settings that leave the wrong number many standard errors of a sample away.
SETTINGS = {"S15": {"repetitions": 20_000}, "B17": {"estimates": 200}}


@pytest.mark.slow
@pytest.mark.parametrize("id", ["S3", "S15", "S19", "S23", "B17"])
def test_an_engine_that_is_wrong_fails_the_claim(id: str, monkeypatch: pytest.MonkeyPatch):
    for owner, name in ((Fused, "forward"), (reference, "_attention")):
        monkeypatch.setattr(owner, name, scaled(getattr(owner, name), 1.01))
    assert verify(id, settings=SETTINGS.get(id, {}))[0].verdict == "fails"


def test_a_weight_on_the_positive_takes_the_loss_below_zero():
    # ℓ > 0 holds without weights; a weight below 1 on the positive alone takes ℓ below 0, down to log w₊.
    key = torch.eye(3, dtype=torch.float64)
    loss = contrastive._loss(50 * key[0], key, torch.tensor([-0.5, 0.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(loss, torch.tensor(-0.5, dtype=torch.float64), rtol=1e-12, atol=1e-12)
