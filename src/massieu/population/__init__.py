"""Tokens as particles: layers as operators on populations, on their Gaussian laws, and what they do to a cloud."""

from massieu.population.attention_layer import AttentionLayer
from massieu.population.gaussian_flow import BlowUpError, gaussian_flow
from massieu.population.layer import Composition, FeedForward, Normalisation
from massieu.population.observables import (
    covariance_spectrum,
    effective_rank,
    log_determinant,
    pairwise_distance,
    participation_ratio,
)
from massieu.population.operator import Operator

__all__ = [
    "AttentionLayer",
    "BlowUpError",
    "Composition",
    "FeedForward",
    "Normalisation",
    "Operator",
    "covariance_spectrum",
    "effective_rank",
    "gaussian_flow",
    "log_determinant",
    "pairwise_distance",
    "participation_ratio",
]
