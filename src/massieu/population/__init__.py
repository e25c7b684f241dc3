"""Tokens as particles: layers as operators on populations and on laws, and what they do to a cloud."""

from massieu.population.alignment import AlignmentResult, precision_alignment
from massieu.population.attention_layer import AttentionLayer
from massieu.population.cloud_shape import (
    ProjectedCumulantsResult,
    gaussian_cumulant_spread,
    gaussian_distance_null,
    projected_cumulants,
    random_directions,
    squared_gaussian_distance,
)
from massieu.population.clusters import ClusterCountResult, cluster_count
from massieu.population.doubly_stochastic import (
    DoublyStochasticLayer,
    DoublyStochasticResult,
    SinkhornResult,
    doubly_stochastic_attention,
    sinkhorn,
)
from massieu.population.flow import Flow
from massieu.population.flow_observables import CloudMoments, CloudShape, Clusters, SelfAttention
from massieu.population.flow_result import FlowResult
from massieu.population.layer import Composition, FeedForward, Normalisation
from massieu.population.observables import (
    covariance_spectrum,
    effective_rank,
    log_determinant,
    pairwise_distance,
    participation_ratio,
)
from massieu.population.operator import Operator
from massieu.population.reading import Observable, ObservableReading
from massieu.population.renormalisation import Renormalisation, TraceRenormalisation
from massieu.population.resampled import ResampledLayer, ResampledTokens
from massieu.population.self_attention import SelfAttentionLevelsResult, self_attention_levels

__all__ = [
    "AlignmentResult",
    "AttentionLayer",
    "CloudMoments",
    "CloudShape",
    "ClusterCountResult",
    "Clusters",
    "Composition",
    "DoublyStochasticLayer",
    "DoublyStochasticResult",
    "FeedForward",
    "Flow",
    "FlowResult",
    "Normalisation",
    "Observable",
    "ObservableReading",
    "Operator",
    "ProjectedCumulantsResult",
    "Renormalisation",
    "ResampledLayer",
    "ResampledTokens",
    "SelfAttention",
    "SelfAttentionLevelsResult",
    "SinkhornResult",
    "TraceRenormalisation",
    "cluster_count",
    "covariance_spectrum",
    "doubly_stochastic_attention",
    "effective_rank",
    "gaussian_cumulant_spread",
    "gaussian_distance_null",
    "log_determinant",
    "pairwise_distance",
    "participation_ratio",
    "precision_alignment",
    "projected_cumulants",
    "random_directions",
    "self_attention_levels",
    "sinkhorn",
    "squared_gaussian_distance",
]
