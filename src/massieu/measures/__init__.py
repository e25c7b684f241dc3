"""Measures and the algebra on them: a measure h is known by its log-partition A(eta) = log ∫ exp(x·eta) h(dx)."""

from massieu.measures.atoms import Atoms
from massieu.measures.base import DomainError, Measure, MissingFormError, static_field
from massieu.measures.categorical import Categorical
from massieu.measures.combine import Affine, Tilted, affine, tilt
from massieu.measures.conjugate import ConjugatePrior
from massieu.measures.continuous import Constant, Exponential, Gamma, Laplace
from massieu.measures.convolution import Convolution, convolve
from massieu.measures.discrete import Bernoulli, Poisson, Spin
from massieu.measures.gaussian import Gaussian
from massieu.measures.mixture import Mixture, mixture
from massieu.measures.named import boosting, divergence_kernel, hybrid
from massieu.measures.sphere import Sphere
from massieu.measures.sums import Power, Product, power, product
from massieu.measures.uniform import Uniform

__all__ = [
    "Affine",
    "Atoms",
    "Bernoulli",
    "Categorical",
    "ConjugatePrior",
    "Constant",
    "Convolution",
    "DomainError",
    "Exponential",
    "Gamma",
    "Gaussian",
    "Laplace",
    "Measure",
    "MissingFormError",
    "Mixture",
    "Poisson",
    "Power",
    "Product",
    "Sphere",
    "Spin",
    "Tilted",
    "Uniform",
    "affine",
    "boosting",
    "convolve",
    "divergence_kernel",
    "hybrid",
    "mixture",
    "power",
    "product",
    "static_field",
    "tilt",
]
