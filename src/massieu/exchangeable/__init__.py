"""Exchangeable tokens: their latent posterior, the conditional mean that attention estimates, and what transfers.

Tokens that may be permuted are draws from a law that depends on a latent z (de Finetti, Z1). What they say of any label is
said by the posterior of z (Z2), whose mean is attention in conjugate families (Z3), and the conditional mean of a value given
a key is kernel ridge regression over the tokens (Z4). Zhang, Liu, Cai, Wang and Wang (arXiv 2212.14852).
"""

from massieu.exchangeable.conditional_mean import ConditionalMean, conditional_mean_attention, ridge_from
from massieu.exchangeable.iterative import ConjugateGradient
from massieu.exchangeable.kernels import Exponential, Features, Gaussian, Kernel, Linear
from massieu.exchangeable.leave_one_out import LeaveOneOut, RidgeChoice, choose_ridge, leave_one_out
from massieu.exchangeable.low_rank import LowRank

__all__ = [
    "ConditionalMean",
    "ConjugateGradient",
    "Exponential",
    "Features",
    "Gaussian",
    "Kernel",
    "LeaveOneOut",
    "Linear",
    "LowRank",
    "RidgeChoice",
    "choose_ridge",
    "conditional_mean_attention",
    "leave_one_out",
    "ridge_from",
]
