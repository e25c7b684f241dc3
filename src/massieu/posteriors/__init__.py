"""Exact laws of a latent given exchangeable tokens, also as attention (Z1 to Z3).

Tokens that may be permuted are draws from a law that depends on a latent z (de Finetti, Z1). What they say of any label is
said by the posterior of z (Z2), whose mean is attention in conjugate families (Z3).
Zhang, Liu, Cai, Wang and Wang (arXiv 2212.14852).
"""

from massieu.posteriors.base import AttentionForm, Posterior
from massieu.posteriors.conjugate import ExponentialFamily, GaussianMean
from massieu.posteriors.discrete import Concepts, DirichletMultinomial
from massieu.posteriors.linear_regression import LinearRegression, NoisyLinearRegression, Prediction
from massieu.posteriors.markov import HiddenMarkov, Path
from massieu.posteriors.sink import PriorAttention, attention_with_prior
from massieu.posteriors.sufficiency import Regret, Sufficiency, averaging_regret, sufficiency
from massieu.posteriors.symmetry import PermutationGap, model_permutation_gap, permutation_gap

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
    "model_permutation_gap",
    "permutation_gap",
    "sufficiency",
]
