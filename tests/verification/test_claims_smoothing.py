"""Claims on smoothing, precision matching, transfer and generalisation notice what is wrong; traps 20, 25 and 34."""

import pytest
import torch
from tests.support.rows import every_row
from tests.support.verification.small import SMALL
from torch import Tensor

from massieu.errors import InputError
from massieu.theory import (
    GaussianTokens,
    attention_lipschitz,
    denoising_score,
    excess_risk_bound,
    generalisation_bound,
    masked_gaussian_mean,
    masked_mean,
    masked_token_probabilities,
    smoothing_floor,
    sphere_multipliers,
    transfer,
)
from massieu.verification.bridges import precision as precision_claims
from massieu.verification.bridges import sphere_spectrum as spectrum_claims
from massieu.verification.rates import has_exact_rate
from massieu.verification.registry import find
from massieu.verification.run import verify
from massieu.verification.zhang import attention_rates as rates_claims
from massieu.verification.zhang import generalisation as generalisation_claims
from massieu.verification.zhang import smoothing as smoothing_claims
from massieu.verification.zhang import transfer as transfer_claims

_ERROR = GaussianTokens.error


def _without_the_biases_product(self: GaussianTokens, query: Tensor, share: float, keys: int) -> Tensor:
    slope = ((query - self.key_mean) @ self.regression.mT).square().sum(-1)
    growth = (share**2 * self.squared_distance(query)).exp() / keys
    return _ERROR(self, query, share, keys) - growth * 2 * share * (1 - share) * slope


def _on_all_of_space(g: Tensor, d: Tensor, simplex: bool = True):
    return transfer(g, d, simplex=False)


WRONG = {
    "Z7: the ratio of the next dimension": (
        "Z7",
        smoothing_claims,
        "sphere_multipliers",
        lambda degree, dimension, scale: sphere_multipliers(degree, dimension + 1, scale),
    ),
    "Z7: one temperature for all lengths": (
        "Z7",
        smoothing_claims,
        "optimal_scale",
        lambda keys, *arguments: 0 * keys + 30.0,
    ),
    "Z7: a floor a tenth too low": (
        "Z7",
        smoothing_claims,
        "smoothing_floor",
        lambda *arguments: smoothing_floor(*arguments)._replace(error=0.9 * smoothing_floor(*arguments).error),
    ),
    "Z9: one temperature for all lengths": ("Z9", rates_claims, "optimal_scale", lambda keys, *_: 0 * keys + 10.0),
    "Z9: a prior that grows with the length": (
        "Z9",
        rates_claims,
        "masked_gaussian_mean",
        lambda observed, mean, weight: masked_gaussian_mean(observed, mean, 0.1 * observed.shape[-2]),
    ),
    "Z10: half the Lipschitz constant": (
        "Z10",
        generalisation_claims,
        "attention_lipschitz",
        lambda *arguments: type(attention_lipschitz(*arguments))(*(x / 2 for x in attention_lipschitz(*arguments))),
    ),
    "Z10: a third of the bound": (
        "Z10",
        generalisation_claims,
        "generalisation_bound",
        lambda *arguments, **named: generalisation_bound(*arguments, **named) / 3,
    ),
    "Z12: a sink a tenth too heavy": (
        "Z12",
        transfer_claims,
        "masked_gaussian_mean",
        lambda observed, mean, weight: masked_gaussian_mean(observed, mean, 1.1 * weight),
    ),
    "Z12: latents without their prior": (
        "Z12",
        transfer_claims,
        "masked_mean",
        lambda targets, likelihood, prior: masked_mean(targets, likelihood, 0 * prior),
    ),
    "Z12: no sink": (
        "Z12",
        transfer_claims,
        "masked_gaussian_mean",
        lambda observed, mean, weight: observed.mean(-2),
    ),
    "Z12: counts without pseudo-counts": (
        "Z12",
        transfer_claims,
        "masked_token_probabilities",
        lambda counts, alpha: masked_token_probabilities(counts, 1e-3 * alpha),
    ),
    "Z13: without the tangent space": ("Z13", transfer_claims, "transfer", _on_all_of_space),
    "Z13: a risk bound with κ in place of κ²": (
        "Z13",
        transfer_claims,
        "excess_risk_bound",
        lambda kappa, excess, ratio=1.0: 0.3 * kappa * ratio * excess,
    ),
    "Z13: a risk bound without the density ratio": (
        "Z13",
        transfer_claims,
        "excess_risk_bound",
        lambda kappa, excess, ratio=1.0: excess_risk_bound(kappa, excess),
    ),
    "X1: a mismatch in another norm": (
        "X1",
        GaussianTokens,
        "mismatch",
        lambda self, score: torch.linalg.matrix_norm(self.cross_covariance @ score - self.regression),
    ),
    "X1: the covariance for the precision": (
        "X1",
        GaussianTokens,
        "score",
        property(lambda self: self.key_covariance),
    ),
    "X1: the clean context's score for the noisy one": (
        "X1",
        precision_claims,
        "denoising_score",
        lambda covariance, noise, clean_context: denoising_score(covariance, noise, clean_context=True),
    ),
    "X2: without the product of both biases": ("X2", GaussianTokens, "error", _without_the_biases_product),
    "X2: full precision at every length": (
        "X2",
        GaussianTokens,
        "optimal_share",
        lambda self, query, keys: torch.ones_like(query[..., 0]),
    ),
    "X9: the degree off by one": (
        "X9",
        spectrum_claims,
        "sphere_multipliers",
        lambda degree, *arguments: sphere_multipliers(degree + 1, *arguments)[..., 1:],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_function_fails_its_claim(case: str, monkeypatch: pytest.MonkeyPatch):
    id, owner, name, replacement = WRONG[case]
    monkeypatch.setattr(owner, name, replacement)
    assert verify(id, settings=SMALL.get(id))[0].verdict == "fails"


@every_row(
    ("id", "settings"),
    [
        ("Z7", {"keys": 10}),
        ("Z9", {"repetitions": 5}),
        ("Z10", {"repetitions": 2}),
        ("Z12", {"sequences": 10}),
        ("Z13", {"pairs": 10}),
        ("X1", {"repetitions": 3}),
        ("X2", {"keys": 5}),
    ],
)
def test_too_few_draws_are_refused(id: str, settings: dict[str, int]):
    with pytest.raises(InputError, match="must be at least"):
        find(id)(**settings)


def test_trap_20_is_shown_by_the_claim_itself():
    (claim,) = verify("Z7", settings=SMALL["Z7"])
    published = [check for check in claim.checks if check.form == "published"]
    assert not any(check.holds for check in published)
    assert published[0].measured == pytest.approx(0.4239, abs=1e-4)


def test_trap_34_the_bias_of_attention_falls_as_one_over_the_number_of_keys():
    """S15 by enumeration: keys of two values, of which N draws have one of N + 1 compositions."""
    sizes, generator = [16, 64, 256, 1024], torch.Generator().manual_seed(0)
    laws = torch.rand(24, 3, dtype=torch.float64, generator=generator)
    errors = []
    for size in sizes:
        count = torch.arange(size + 1, dtype=torch.float64)
        row = []
        for share, tilt, spread in laws:
            p, ratio = (
                0.3 + 0.4 * share,
                torch.exp(0.4 + tilt),
            )  # probability of the second key, its weight to the first's
            binomial = torch.distributions.Binomial(size, p).log_prob(count).exp()
            output = (1 + spread) * count * ratio / (size - count + count * ratio)
            limit = (1 + spread) * p * ratio / (1 - p + p * ratio)
            bias = (binomial @ output - limit).abs()
            if size == sizes[-1]:  # −E[w²(v − m)]/(N Z²)
                z = 1 - p + p * ratio
                leading = ((1 - p) * limit - p * ratio**2 * (1 + spread - limit)) / (size * z**2)
                assert leading.abs().item() == pytest.approx(bias.item(), rel=0.02)
            row.append(bias)
        errors.append(torch.stack(row))
    biases = torch.stack(errors)
    assert has_exact_rate("bias", sizes, biases, -1.0).holds
    assert not has_exact_rate("bias", sizes, biases, -0.5).holds
