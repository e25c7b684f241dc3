"""Tokens as particles: what a layer does to a cloud of tokens, and to the law of one."""

from massieu.population.alignment import Alignment, precision_alignment
from massieu.population.assumptions import EquilibriumReport, equilibrium_report
from massieu.population.equilibrium import (
    after_layer,
    entropy_gain,
    equilibrium,
    key_law,
    sample_error,
    whitened_map,
)
from massieu.population.expansion import Expansion, expansion
from massieu.population.growth import cumulant_growth, harmonic_growth, measured_cumulant_growth
from massieu.population.observables import (
    covariance_spectrum,
    effective_rank,
    log_determinant,
    pairwise_distance,
    participation_ratio,
)
from massieu.population.renormalisation import Renormalisation, TraceRenormalisation

__all__ = [
    "Alignment",
    "EquilibriumReport",
    "Expansion",
    "Renormalisation",
    "TraceRenormalisation",
    "after_layer",
    "covariance_spectrum",
    "cumulant_growth",
    "effective_rank",
    "entropy_gain",
    "equilibrium",
    "equilibrium_report",
    "expansion",
    "harmonic_growth",
    "key_law",
    "log_determinant",
    "measured_cumulant_growth",
    "pairwise_distance",
    "participation_ratio",
    "precision_alignment",
    "sample_error",
    "whitened_map",
]
