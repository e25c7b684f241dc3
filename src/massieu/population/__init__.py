"""Tokens as particles: what a layer does to a cloud of tokens."""

from massieu.population.observables import (
    covariance_spectrum,
    effective_rank,
    log_determinant,
    pairwise_distance,
    participation_ratio,
)

__all__ = [
    "covariance_spectrum",
    "effective_rank",
    "log_determinant",
    "pairwise_distance",
    "participation_ratio",
]
