"""Whatever a tensor argument of exchangeable tokens is given as, PyTorch's own errors are not what the user sees."""

import pytest
import torch
from tests.kinds import raw_errors
from tests.rows import every_row

from massieu import posteriors, regression, theory
from massieu.measures import Bernoulli


def n(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


I3 = torch.eye(3, dtype=torch.float64)
C, H = n(10, 3), n(1, 1, 6, 3)
two = torch.tensor([0.3, 0.7], dtype=torch.float64)
one = torch.tensor(1.0, dtype=torch.float64)
T = torch.log(torch.tensor([[0.2, 0.8], [0.5, 0.5]], dtype=torch.float64))
TOKENS = torch.tensor([0, 1])
GT = theory.GaussianTokens.create(n(3), n(3), I3, 0.1 * I3, I3)
LR = posteriors.BayesianLinearRegression.create(n(3, 2), I3, one)

CASES = {
    "cma": (
        lambda **k: regression.conditional_mean_attention(kernel=regression.GaussianKernel.create(1.0), **k),
        {"query": H, "key": H, "value": H, "ridge": torch.tensor(0.3), "log_weight": torch.zeros(6)},
    ),
    "cma exp var": (
        lambda **k: regression.conditional_mean_attention(
            kernel=regression.ExponentialKernel.create(1.0), ridge=0.3, need_variance=True, **k
        ),
        {"query": H, "key": H, "value": H},
    ),
    "cma cg": (
        lambda **k: regression.conditional_mean_attention(
            kernel=regression.ExponentialKernel.create(1.0), ridge=0.3, method="conjugate_gradient", **k
        ),
        {"query": H, "key": H, "value": H},
    ),
    "cma lr": (
        lambda **k: regression.conditional_mean_attention(
            kernel=regression.GaussianKernel.create(1.0), ridge=0.3, method="low_rank", **k
        ),
        {"query": H, "key": H, "value": H},
    ),
    "cma linear": (
        lambda **k: regression.conditional_mean_attention(kernel=regression.LinearKernel(), ridge=0.3, **k),
        {"query": H, "key": H, "value": H},
    ),
    "kernel scale": (regression.ExponentialKernel.create, {"scale": torch.tensor(1.0)}),
    "loo": (
        lambda **k: regression.leave_one_out(kernel=regression.GaussianKernel.create(1.0), ridge=0.3, **k),
        {"key": H, "value": H},
    ),
    "choose_ridge": (
        lambda **k: regression.choose_ridge(kernel=regression.GaussianKernel.create(1.0), **k),
        {"key": H, "value": H, "ridges": two},
    ),
    "ridge_from": (regression.ridge_from, {"noise_variance": two, "prior_variance": two}),
    "Concepts.create": (posteriors.DiscreteLatent.create, {"log_weight": two.log(), "log_likelihood": T}),
    "Concepts.posterior": (
        lambda tokens: posteriors.DiscreteLatent.create(two.log(), T).posterior(tokens),
        {"tokens": TOKENS},
    ),
    "Concepts.pred": (
        lambda tokens: posteriors.DiscreteLatent.create(two.log(), T).log_predictive(tokens),
        {"tokens": torch.tensor(0)},
    ),
    "DM.create": (posteriors.DirichletMultinomial.create, {"concentration": two}),
    "DM.posterior": (lambda tokens: posteriors.DirichletMultinomial.create(two).posterior(tokens), {"tokens": TOKENS}),
    "DM.posterior mask": (
        lambda mask: posteriors.DirichletMultinomial.create(two).posterior(TOKENS, mask),
        {"mask": torch.tensor([True, False])},
    ),
    "HM.create": (posteriors.HiddenMarkov.create, {"log_weight": two.log(), "log_transition": T, "log_likelihood": T}),
    "GM.create": (lambda **k: posteriors.GaussianMean.create(**k), {"mean": n(3), "strength": one, "variance": one}),
    "GM.posterior": (lambda tokens: posteriors.GaussianMean.create(n(3), one, one).posterior(tokens), {"tokens": C}),
    "EF.create": (
        lambda **k: posteriors.ExponentialFamily.create(Bernoulli.create(torch.tensor([0.5]).double()), **k),
        {"chi": torch.tensor([0.5]).double(), "strength": one},
    ),
    "LR.create": (posteriors.BayesianLinearRegression.create, {"mean": n(3, 2), "precision": I3, "noise": one}),
    "LR.posterior": (lambda tokens: LR.posterior(tokens), {"tokens": n(4, 5)}),
    "LR.predict": (lambda features: LR.predict(features), {"features": n(4, 3)}),
    "NLR.create": (
        posteriors.NoisyLinearRegression.create,
        {"mean": n(3, 2), "precision": I3, "shape": one, "rate": one},
    ),
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
    "permutation_gap": (
        lambda tokens: posteriors.permutation_gap(lambda t: t.double() if not t.is_floating_point() else t, tokens),
        {"tokens": n(2, 4, 3)},
    ),
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
    "averaging_regret": (
        posteriors.averaging_regret,
        {"log_predictive": -n(4).abs(), "log_likelihoods": -n(4, 2).abs(), "log_prior": two.log()},
    ),
    "sufficiency": (
        lambda **k: posteriors.sufficiency(length=2, **k),
        {"log_prior": two.log(), "log_likelihood": T, "label": torch.eye(2)},
    ),
    "smoothing_error": (
        lambda **k: theory.smoothing_error(noise_variance=0.1, dimension=3, **k),
        {"keys": 10 * two, "power": two, "scale": two},
    ),
    "smoothing_floor": (lambda **k: theory.smoothing_floor(dimension=3, **k), {"power": two, "scale": one}),
    "deconvolution": (
        lambda **k: theory.deconvolution(cut_off=1, **k),
        {"multipliers": torch.tensor([1.0, 0.5]).double()},
    ),
    "softmax_limit": (lambda **k: theory.softmax_limit(dimension=3, **k), {"parts": two, "scale": one}),
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
    "attention_lipschitz": (lambda **k: theory.attention_lipschitz(**k), {"radius": one, "value_norm": one}),
    "generalisation_bound": (
        lambda **k: theory.generalisation_bound(3, sequences=10, **k),
        {"radius": one, "lipschitz": one},
    ),
    "log_cover_size": (
        lambda **k: theory.log_cover_size(3, **k),
        {"radius": one, "lipschitz": one, "accuracy": 0.1 * one},
    ),
    "excess_risk_bound": (lambda **k: theory.excess_risk_bound(2.0, **k), {"self_supervised_excess": one}),
    "predictive_variance": (
        lambda **k: regression.conditional_mean_attention(
            H, H, H, kernel=regression.LinearKernel(), ridge=1.0, need_variance=True
        ).predictive_variance(**k),
        {"noise_variance": one, "prior_variance": one},
    ),
}


@pytest.mark.medium
@every_row("name", CASES)
def test_no_argument_ends_in_an_error_of_pytorchs(name):
    function, arguments = CASES[name]
    assert raw_errors(function, arguments) == []


def test_a_kernel_made_without_create_is_told_how():
    with pytest.raises(TypeError, match=r"a kernel's number must be a tensor, got float: make the kernel by create"):
        regression.conditional_mean_attention(H, H, H, kernel=regression.ExponentialKernel(0.5), ridge=1.0)  # pyright: ignore
