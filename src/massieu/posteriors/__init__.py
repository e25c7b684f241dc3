"""Exact laws of a latent given exchangeable tokens, also as attention (Z1 to Z4, Z11, Z14).

Tokens that may be permuted are draws from a law that depends on a latent z (de Finetti, Z1). What they say of any label is
said by the posterior of z (Z2), whose mean is attention with a sink in conjugate families (Z3).
Zhang, Liu, Cai, Wang and Wang (arXiv 2212.14852).
"""

from massieu.posteriors.base import Posterior
from massieu.posteriors.conjugate import ExponentialFamily, GaussianMean
from massieu.posteriors.discrete import DirichletMultinomial, DiscreteLatent
from massieu.posteriors.linear_regression import BayesianLinearRegression, NoisyLinearRegression
from massieu.posteriors.markov import HiddenMarkov
from massieu.posteriors.sufficiency import averaging_regret, sufficiency
from massieu.posteriors.symmetry import model_permutation_gap, permutation_gap

__all__ = [
    "BayesianLinearRegression",
    "DirichletMultinomial",
    "DiscreteLatent",
    "ExponentialFamily",
    "GaussianMean",
    "HiddenMarkov",
    "NoisyLinearRegression",
    "Posterior",
    "averaging_regret",
    "model_permutation_gap",
    "permutation_gap",
    "sufficiency",
]


def __dir__() -> list[str]:
    return __all__
