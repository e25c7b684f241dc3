"""Measures and the algebra on them: a measure h is known by its log-partition A(eta) = log ∫ exp(x·eta) h(dx)."""

from massieu.foundation.values import static_field
from massieu.measures.atoms import Atoms
from massieu.measures.base import DomainError, Measure
from massieu.measures.categorical import Categorical
from massieu.measures.combine import affine
from massieu.measures.conjugate import ConjugatePrior
from massieu.measures.continuous import Constant, Exponential, Gamma, Laplace
from massieu.measures.convolution import convolve
from massieu.measures.discrete import Bernoulli, Poisson, Spin
from massieu.measures.divergence import sampled_kl
from massieu.measures.gaussian import Gaussian
from massieu.measures.hooks import MissingFormError
from massieu.measures.mixture import mixture
from massieu.measures.named import boosting, divergence_kernel, hybrid, switched
from massieu.measures.sphere import Sphere
from massieu.measures.sums import power, product
from massieu.measures.uniform import Uniform

__all__ = [
    "Atoms",
    "Bernoulli",
    "Categorical",
    "ConjugatePrior",
    "Constant",
    "DomainError",
    "Exponential",
    "Gamma",
    "Gaussian",
    "Laplace",
    "Measure",
    "MissingFormError",
    "Poisson",
    "Sphere",
    "Spin",
    "Uniform",
    "affine",
    "boosting",
    "convolve",
    "divergence_kernel",
    "hybrid",
    "mixture",
    "power",
    "product",
    "sampled_kl",
    "static_field",
    "switched",
]


def __dir__() -> list[str]:
    return __all__
