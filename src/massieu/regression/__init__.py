"""The conditional mean of a value given a key, over tokens: kernel ridge regression, which attention estimates (Z4)."""

from massieu.regression.conditional_mean import ConditionalMeanResult, conditional_mean_attention, ridge_from
from massieu.regression.iterative import ConjugateGradient
from massieu.regression.kernels import ExponentialKernel, FeatureKernel, GaussianKernel, Kernel, LinearKernel
from massieu.regression.leave_one_out import LeaveOneOutResult, RidgeChoiceResult, choose_ridge, leave_one_out
from massieu.regression.low_rank import LowRank

__all__ = [
    "ConditionalMeanResult",
    "ConjugateGradient",
    "ExponentialKernel",
    "FeatureKernel",
    "GaussianKernel",
    "Kernel",
    "LeaveOneOutResult",
    "LinearKernel",
    "LowRank",
    "RidgeChoiceResult",
    "choose_ridge",
    "conditional_mean_attention",
    "leave_one_out",
    "ridge_from",
]
