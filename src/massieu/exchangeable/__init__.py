"""Exchangeable tokens: their latent posterior, the conditional mean that attention estimates, and what transfers.

Tokens that may be permuted are draws from a law that depends on a latent z (de Finetti, Z1). What they say of any label is
said by the posterior of z (Z2), whose mean is attention in conjugate families (Z3), and the conditional mean of a value given
a key is kernel ridge regression over the tokens (Z4). Zhang, Liu, Cai, Wang and Wang (arXiv 2212.14852).
"""

from massieu.exchangeable.conditional_mean import ConditionalMean, conditional_mean_attention, ridge_from
from massieu.exchangeable.definetti import (
    Regret,
    Sufficiency,
    averaging_regret,
    finite_extension_bound,
    sufficiency,
    urn_total_variation,
)
from massieu.exchangeable.generalisation import (
    AttentionLipschitz,
    attention_lipschitz,
    generalisation_bound,
    log_cover_size,
)
from massieu.exchangeable.iterative import ConjugateGradient
from massieu.exchangeable.kernels import Exponential, Features, Gaussian, Kernel, Linear
from massieu.exchangeable.leave_one_out import LeaveOneOut, RidgeChoice, choose_ridge, leave_one_out
from massieu.exchangeable.low_rank import LowRank
from massieu.exchangeable.posterior import AttentionForm, Posterior
from massieu.exchangeable.posterior_conjugate import ExponentialFamily, GaussianMean
from massieu.exchangeable.posterior_discrete import Concepts, DirichletMultinomial
from massieu.exchangeable.posterior_markov import HiddenMarkov, Path
from massieu.exchangeable.posterior_regression import LinearRegression, NoisyLinearRegression, Prediction
from massieu.exchangeable.precision import GaussianTokens, denoising_score, precision_matching_score
from massieu.exchangeable.sink import PriorAttention, attention_with_prior
from massieu.exchangeable.smoothing import (
    SmoothingError,
    SmoothingFloor,
    asymptotic_scale,
    deconvolution,
    harmonic_count,
    optimal_scale,
    ridge_multipliers,
    smoothing_error,
    smoothing_floor,
    softmax_limit,
    sphere_multipliers,
    spherical_kernel,
    zonal_harmonics,
)
from massieu.exchangeable.symmetry import PermutationGap, model_permutation_gap, permutation_gap
from massieu.exchangeable.transfer import (
    Transfer,
    excess_risk_bound,
    masked_gaussian_mean,
    masked_mean,
    masked_token_probabilities,
    transfer,
)

__all__ = [
    "AttentionForm",
    "AttentionLipschitz",
    "Concepts",
    "ConditionalMean",
    "ConjugateGradient",
    "DirichletMultinomial",
    "Exponential",
    "ExponentialFamily",
    "Features",
    "Gaussian",
    "GaussianMean",
    "GaussianTokens",
    "HiddenMarkov",
    "Kernel",
    "LeaveOneOut",
    "Linear",
    "LinearRegression",
    "LowRank",
    "NoisyLinearRegression",
    "Path",
    "PermutationGap",
    "Posterior",
    "Prediction",
    "PriorAttention",
    "Regret",
    "RidgeChoice",
    "SmoothingError",
    "SmoothingFloor",
    "Sufficiency",
    "Transfer",
    "asymptotic_scale",
    "attention_lipschitz",
    "attention_with_prior",
    "averaging_regret",
    "choose_ridge",
    "conditional_mean_attention",
    "deconvolution",
    "denoising_score",
    "excess_risk_bound",
    "finite_extension_bound",
    "generalisation_bound",
    "harmonic_count",
    "leave_one_out",
    "log_cover_size",
    "masked_gaussian_mean",
    "masked_mean",
    "masked_token_probabilities",
    "model_permutation_gap",
    "optimal_scale",
    "permutation_gap",
    "precision_matching_score",
    "ridge_from",
    "ridge_multipliers",
    "smoothing_error",
    "smoothing_floor",
    "softmax_limit",
    "sphere_multipliers",
    "spherical_kernel",
    "sufficiency",
    "transfer",
    "urn_total_variation",
    "zonal_harmonics",
]
