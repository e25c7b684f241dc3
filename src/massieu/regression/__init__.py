"""Kernel ridge regression of values on keys within a sequence: the conditional mean that attention estimates (Z4 to Z6)."""

from massieu.regression.conditional_mean import conditional_mean_attention, ridge_from
from massieu.regression.exact import Cholesky
from massieu.regression.kernels import ExponentialKernel, FeatureKernel, GaussianKernel, Kernel, LinearKernel
from massieu.regression.leave_one_out import choose_ridge, leave_one_out
from massieu.regression.low_rank import LowRank
from massieu.regression.transfer import transfer_estimate

__all__ = [
    "Cholesky",
    "ExponentialKernel",
    "FeatureKernel",
    "GaussianKernel",
    "Kernel",
    "LinearKernel",
    "LowRank",
    "choose_ridge",
    "conditional_mean_attention",
    "leave_one_out",
    "ridge_from",
    "transfer_estimate",
]


def __dir__() -> list[str]:
    return __all__
