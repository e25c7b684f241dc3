"""The claims on attention's engine notice an engine that is wrong: they run what users run."""

import pytest
import torch

from massieu.measures import Sphere
from massieu.ops import reference, score_tiles
from massieu.ops.fused import Fused
from massieu.verification.run import verify
from massieu.verification.shim import contrastive


def _scaled(function, factor):
    """The same with every result a little too large."""

    def call(*arguments, **options):
        found = function(*arguments, **options)
        return tuple(factor * part for part in found) if isinstance(found, tuple) else factor * found

    return call


# Settings that leave the wrong number many standard errors of a sample away.
SETTINGS = {"S15": {"repetitions": 20_000}, "B17": {"estimates": 200}}


@pytest.mark.slow
@pytest.mark.parametrize("id", ["S3", "S15", "S19", "S23", "B17"])
def test_an_engine_that_is_wrong_fails_the_claim(id: str, monkeypatch: pytest.MonkeyPatch):
    for owner, name in ((Fused, "forward"), (reference, "_attention")):
        monkeypatch.setattr(owner, name, _scaled(getattr(owner, name), 1.01))
    assert verify(id, settings=SETTINGS.get(id, {}))[0].verdict == "fails"


WRONG = {
    "a loss": (contrastive, "info_nce", 1.0 + 1e-8),
    "the N-pair loss": (contrastive, "n_pairs", 1.0 + 1e-8),
    "a vocabulary's loss": (contrastive, "linear_cross_entropy", 1.0 + 1e-8),
    "the loss of neighbours": (contrastive, "nca", 1.0 + 1e-8),
    "the sphere": (Sphere, "_log_partition", 1.1),
}


@pytest.mark.medium
@pytest.mark.parametrize("case", WRONG)
def test_a_loss_that_is_wrong_fails_s23(case: str, monkeypatch: pytest.MonkeyPatch):
    owner, name, factor = WRONG[case]
    monkeypatch.setattr(owner, name, _scaled(getattr(owner, name), factor))
    assert verify("S23")[0].verdict == "fails"


@pytest.mark.medium
def test_a_gradient_that_is_wrong_fails_s23(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(score_tiles, "backward", _scaled(score_tiles.backward, 1.0 + 1e-8))
    assert verify("S23")[0].verdict == "fails"


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"atoms": 2}, {"atoms": 40, "dimensions": 2}, {"dimensions": 30, "seed": 5}])
def test_s23_holds_for_other_sizes(settings: dict[str, int]):
    (claim,) = verify("S23", settings=settings | {"samples": 20_000})
    assert claim.verdict == "holds", [check for check in claim.checks if not check.holds]


def test_a_weight_on_the_positive_takes_the_loss_below_zero():
    # ℓ > 0 holds without weights; a weight below 1 on the positive alone takes ℓ below 0, down to log w₊.
    key = torch.eye(3, dtype=torch.float64)
    loss = contrastive._loss(50 * key[0], key, torch.tensor([-0.5, 0.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(loss, torch.tensor(-0.5, dtype=torch.float64), rtol=1e-12, atol=1e-12)
