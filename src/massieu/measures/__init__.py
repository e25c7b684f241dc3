"""Measures and the algebra on them: a measure h is known by its log-partition A(eta) = log ∫ exp(x·eta) h(dx)."""

from massieu.measures.atoms import Atoms
from massieu.measures.base import DomainError, Measure, static_field
from massieu.measures.combine import Affine, Tilted, affine, tilt
from massieu.measures.coordinates import Spin
from massieu.measures.gaussian import Gaussian

__all__ = [
    "Affine",
    "Atoms",
    "DomainError",
    "Gaussian",
    "Measure",
    "Spin",
    "Tilted",
    "affine",
    "static_field",
    "tilt",
]
