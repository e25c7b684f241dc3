"""Whatever a tensor argument of an ideal case of Zhang et al. is given as, PyTorch's own errors are not what the user sees."""

import pytest
import torch
from tests.support.kinds import PARTS, raw_errors
from tests.support.rows import some_slow

from massieu.papers import theory


def n(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


I3 = torch.eye(3, dtype=torch.float64)
C = n(10, 3)
two = torch.tensor([0.3, 0.7], dtype=torch.float64)
one = torch.tensor(1.0, dtype=torch.float64)
GT = theory.GaussianTokens.create(n(3), n(3), I3, 0.1 * I3, I3)

CASES = {
    "GT.create": (
        theory.GaussianTokens.create,
        {
            "key_mean": n(3),
            "value_mean": n(3),
            "key_covariance": I3,
            "cross_covariance": 0.1 * I3,
            "value_covariance": I3,
        },
    ),
    "GT.conditional_mean": (lambda query: GT.conditional_mean(query), {"query": n(3)}),
    "GT.attention": (lambda query, score: GT.attention(query, score), {"query": n(3), "score": I3}),
    "precision_matching_score": (theory.precision_matching_score, {"covariance": I3}),
    "denoising_score": (theory.denoising_score, {"covariance": I3, "noise_variance": torch.tensor(0.5).double()}),
    "masked_mean": (theory.masked_mean, {"targets": I3, "log_likelihood": n(3), "log_prior": n(3)}),
    "masked_gaussian_mean": (
        theory.masked_gaussian_mean,
        {"observed": C, "prior_mean": n(3), "prior_weight": torch.tensor(1.0)},
    ),
    "masked_token_probabilities": (
        theory.masked_token_probabilities,
        {"counts": torch.tensor([1.0, 2.0]), "concentration": two},
    ),
    "transfer": (theory.transfer, {"self_supervised": I3, "downstream": I3}),
    "smoothing_error": (
        lambda **k: theory.smoothing_error(noise_variance=0.1, dimension=3, **k),
        {"keys": 10 * two, "power": two, "scale": two},
    ),
    "smoothing_floor": (lambda **k: theory.smoothing_floor(dimension=3, **k), {"power": two, "scale": one}),
    "deconvolution": (
        lambda **k: theory.deconvolution(cut_off=1, **k),
        {"multipliers": torch.tensor([1.0, 0.5]).double()},
    ),
    "sphere_multipliers": (lambda **k: theory.sphere_multipliers(2, 3, **k), {"scale": one}),
    "ridge_multipliers": (lambda **k: theory.ridge_multipliers(2, 3, operator_ridge=0.1, **k), {"scale": one}),
    "spherical_kernel": (lambda **k: theory.spherical_kernel(dimension=3, **k), {"cosine": two, "spectrum": two}),
    "zonal_harmonics": (lambda **k: theory.zonal_harmonics(degree=2, dimension=3, **k), {"cosine": two}),
    "optimal_scale": (
        lambda **k: theory.optimal_scale(noise_variance=0.1, dimension=3, **k),
        {"keys": 50 * one, "power": two},
    ),
    "asymptotic_scale": (
        lambda **k: theory.asymptotic_scale(noise_variance=0.1, dimension=3, **k),
        {"keys": 50 * one, "power": two},
    ),
}


@pytest.mark.medium
@some_slow("part", range(PARTS), 1)
@pytest.mark.parametrize("name", CASES)
def test_no_argument_ends_in_an_error_of_pytorchs(name, part):
    function, arguments = CASES[name]
    assert raw_errors(function, arguments, part) == []
