"""Traps 20, 21 and 34: rates of smoothing, ridges, and the bias of attention."""

import pytest
import torch
from tests.support.papers.small import SMALL
from torch import Tensor

from massieu.papers.claims.rates import has_exact_rate
from massieu.papers.claims.run import verify


@pytest.mark.medium
def test_trap_20_is_shown_by_the_claim_itself():
    (claim,) = verify("Z7", settings=SMALL["Z7"])
    published = [check for check in claim.checks if check.form == "published"]
    assert published[0].measured == pytest.approx(0.4239, abs=1e-4)


@pytest.mark.medium
def test_trap_21_the_proofs_ridge_is_worse_at_every_length():
    (claim,) = verify("Z6", settings=SMALL["Z6"])
    (check,) = [check for check in claim.checks if check.name.startswith("error with λ = σ²/λ₀ by that with L^{3/4}")]
    assert check.measured < 0.5


def _bias(size: int, p: Tensor, ratio: Tensor, spread: Tensor) -> Tensor:
    """|E output − limit| over keys of two values 0 and 1 + spread: the second has the probability p and the weight ratio."""
    count = torch.arange(size + 1, dtype=torch.float64)
    binomial = torch.distributions.Binomial(size, p).log_prob(count).exp()
    output = (1 + spread) * count * ratio / (size - count + count * ratio)
    limit = (1 + spread) * p * ratio / (1 - p + p * ratio)
    return (binomial @ output - limit).abs()


def _leading_bias(size: int, p: Tensor, ratio: Tensor, spread: Tensor) -> Tensor:
    """|E[w²(v − m)]|/(N Z²)."""
    z = 1 - p + p * ratio
    limit = (1 + spread) * p * ratio / z
    return (((1 - p) * limit - p * ratio**2 * (1 + spread - limit)) / (size * z**2)).abs()


def test_trap_34_the_bias_of_attention_falls_as_one_over_the_number_of_keys():
    """S15 by enumeration: of keys of two values N draws have one of N + 1 compositions."""
    sizes = [16, 64, 256, 1024]
    generator = torch.Generator().manual_seed(0)
    share, tilt, spread = torch.rand(24, 3, dtype=torch.float64, generator=generator).unbind(-1)
    laws = list(zip(0.3 + 0.4 * share, torch.exp(0.4 + tilt), spread, strict=True))
    biases = torch.stack([torch.stack([_bias(size, *law) for law in laws]) for size in sizes])
    leading = torch.stack([_leading_bias(sizes[-1], *law) for law in laws])
    torch.testing.assert_close(leading, biases[-1], rtol=0.02, atol=0)
    assert has_exact_rate("bias", sizes, biases, -1.0).holds
    assert not has_exact_rate("bias", sizes, biases, -0.5).holds
