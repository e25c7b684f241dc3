"""The conditional mean of a value given a key, over tokens: kernel ridge regression, which attention estimates (Z4)."""

from massieu.regression.conditional_mean import ConditionalMean, conditional_mean_attention, ridge_from
from massieu.regression.iterative import ConjugateGradient
from massieu.regression.kernels import Exponential, Features, Gaussian, Kernel, Linear
from massieu.regression.leave_one_out import LeaveOneOut, RidgeChoice, choose_ridge, leave_one_out
from massieu.regression.low_rank import LowRank

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
