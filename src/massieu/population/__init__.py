"""Tokens as particles: what a layer does to a cloud of tokens."""

from massieu.population.cloud_shape import (
    ProjectedCumulants,
    gaussian_cumulant_spread,
    gaussian_distance_null,
    projected_cumulants,
    random_directions,
    squared_gaussian_distance,
)
from massieu.population.clusters import ClusterCount, cluster_count
from massieu.population.doubly_stochastic import (
    DoublyStochastic,
    DoublyStochasticLayer,
    Potentials,
    doubly_stochastic_attention,
    sinkhorn,
)
from massieu.population.flow import Flow
from massieu.population.flow_observables import CloudMoments, CloudShape, Clusters, SelfAttention
from massieu.population.flow_result import FlowResult
from massieu.population.observables import (
    covariance_spectrum,
    effective_rank,
    log_determinant,
    pairwise_distance,
    participation_ratio,
)
from massieu.population.reading import Observable, Reading
from massieu.population.resampled import ResampledLayer, ResampledTokens
from massieu.population.self_attention import SelfAttentionLevels, self_attention_levels

__all__ = [
    "CloudMoments",
    "CloudShape",
    "ClusterCount",
    "Clusters",
    "DoublyStochastic",
    "DoublyStochasticLayer",
    "Flow",
    "FlowResult",
    "Observable",
    "Potentials",
    "ProjectedCumulants",
    "Reading",
    "ResampledLayer",
    "ResampledTokens",
    "SelfAttention",
    "SelfAttentionLevels",
    "cluster_count",
    "covariance_spectrum",
    "doubly_stochastic_attention",
    "effective_rank",
    "gaussian_cumulant_spread",
    "gaussian_distance_null",
    "log_determinant",
    "pairwise_distance",
    "participation_ratio",
    "projected_cumulants",
    "random_directions",
    "self_attention_levels",
    "sinkhorn",
    "squared_gaussian_distance",
]
