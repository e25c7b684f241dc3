"""Theorems about attention in ideal cases as functions: bounds, laws and exactly solved models, for claims and experiments.

- Bal: how a memory descends (B5), by `newton_step` too (N23); vector spins of many components, `SphericalSpins` (B15);
  signs that move at once, `KineticIsing` (B16);
  potentials other than log Σ exp, `ScoreDeviation` (B18) and `LogSumReLU` (N4); the dynamics of two layers, `TwoLayer` (B20);
- Shim: the equilibrium of a population and what grows about it (S13, S15, X7), the expansion (S12, X6), Gaussian laws in
  continuous time (S20, N6); tokens that cluster on a sphere, `ClusteringEnergy` (N5);
- Zhang et al.: finite exchangeability (Z1), softmax as a smoother of the sphere (Z7, X9), Gaussian tokens (X1, X2), what a
  masked objective transfers (Z12, Z13), generalisation (Z10).
"""

from massieu.papers.theory.assumptions import equilibrium_report
from massieu.papers.theory.clustering import ClusteringEnergy
from massieu.papers.theory.descent import damped_descent, energy_range, least_descent, path_length, smallest_move
from massieu.papers.theory.equilibrium import (
    after_layer,
    entropy_gain,
    equilibrium,
    key_law,
    sample_error,
    whitened_map,
)
from massieu.papers.theory.expansion import expansion
from massieu.papers.theory.gaussian_flow import BlowUpError, gaussian_flow
from massieu.papers.theory.generalisation import (
    attention_lipschitz,
    generalisation_bound,
    log_cover_size,
)
from massieu.papers.theory.growth import cumulant_growth, harmonic_growth, measured_cumulant_growth
from massieu.papers.theory.kinetic_ising import KineticIsing
from massieu.papers.theory.large_dimension import SphericalSpins
from massieu.papers.theory.newton import newton_step
from massieu.papers.theory.normalized import ScoreDeviation
from massieu.papers.theory.precision import GaussianTokens, denoising_score, precision_matching_score
from massieu.papers.theory.rectified import LogSumReLU
from massieu.papers.theory.smoothing import (
    asymptotic_scale,
    deconvolution,
    harmonic_count,
    optimal_scale,
    ridge_multipliers,
    smoothing_error,
    smoothing_floor,
    sphere_multipliers,
    spherical_kernel,
    zonal_harmonics,
)
from massieu.papers.theory.transfer import (
    excess_risk_bound,
    masked_gaussian_mean,
    masked_mean,
    masked_token_probabilities,
    transfer,
)
from massieu.papers.theory.two_layer import TwoLayer
from massieu.papers.theory.urns import finite_extension_bound, urn_total_variation

__all__ = [
    "BlowUpError",
    "ClusteringEnergy",
    "GaussianTokens",
    "KineticIsing",
    "LogSumReLU",
    "ScoreDeviation",
    "SphericalSpins",
    "TwoLayer",
    "after_layer",
    "asymptotic_scale",
    "attention_lipschitz",
    "cumulant_growth",
    "damped_descent",
    "deconvolution",
    "denoising_score",
    "energy_range",
    "entropy_gain",
    "equilibrium",
    "equilibrium_report",
    "excess_risk_bound",
    "expansion",
    "finite_extension_bound",
    "gaussian_flow",
    "generalisation_bound",
    "harmonic_count",
    "harmonic_growth",
    "key_law",
    "least_descent",
    "log_cover_size",
    "masked_gaussian_mean",
    "masked_mean",
    "masked_token_probabilities",
    "measured_cumulant_growth",
    "newton_step",
    "optimal_scale",
    "path_length",
    "precision_matching_score",
    "ridge_multipliers",
    "sample_error",
    "smallest_move",
    "smoothing_error",
    "smoothing_floor",
    "sphere_multipliers",
    "spherical_kernel",
    "transfer",
    "urn_total_variation",
    "whitened_map",
    "zonal_harmonics",
]


def __dir__() -> list[str]:
    return __all__
