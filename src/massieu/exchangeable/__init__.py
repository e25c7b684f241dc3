"""Exchangeable tokens: their latent posterior, the conditional mean that attention estimates, and what transfers.

Tokens that may be permuted are draws from a law that depends on a latent z (de Finetti, Z1). What they say of any label is
said by the posterior of z (Z2), whose mean is attention in conjugate families (Z3), and the conditional mean of a value given
a key is kernel ridge regression over the tokens (Z4). Zhang, Liu, Cai, Wang and Wang (arXiv 2212.14852).
"""

from massieu.exchangeable.definetti import (
    Regret,
    Sufficiency,
    averaging_regret,
    finite_extension_bound,
    sufficiency,
    urn_total_variation,
)
from massieu.exchangeable.posterior import AttentionForm, Posterior
from massieu.exchangeable.posterior_conjugate import ExponentialFamily, GaussianMean
from massieu.exchangeable.posterior_discrete import Concepts, DirichletMultinomial
from massieu.exchangeable.posterior_markov import HiddenMarkov, Path
from massieu.exchangeable.posterior_regression import LinearRegression, NoisyLinearRegression, Prediction
from massieu.exchangeable.sink import PriorAttention, attention_with_prior
from massieu.exchangeable.symmetry import PermutationGap, model_permutation_gap, permutation_gap

__all__ = [
    "AttentionForm",
    "Concepts",
    "DirichletMultinomial",
    "ExponentialFamily",
    "GaussianMean",
    "HiddenMarkov",
    "LinearRegression",
    "NoisyLinearRegression",
    "Path",
    "PermutationGap",
    "Posterior",
    "Prediction",
    "PriorAttention",
    "Regret",
    "Sufficiency",
    "attention_with_prior",
    "averaging_regret",
    "finite_extension_bound",
    "model_permutation_gap",
    "permutation_gap",
    "sufficiency",
    "urn_total_variation",
]
