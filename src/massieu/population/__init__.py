"""Tokens as particles: layers as operators on token clouds and on laws, and observables of the clouds."""

from massieu.population.alignment import precision_alignment
from massieu.population.attention_layer import AttentionLayer
from massieu.population.cloud_shape import CloudShape
from massieu.population.clusters import Clusters
from massieu.population.doubly_stochastic import DoublyStochasticLayer, doubly_stochastic_attention, sinkhorn
from massieu.population.flow import Flow
from massieu.population.integrate import integrate
from massieu.population.layer import Composition, FeedForward, Normalisation
from massieu.population.observables import (
    CloudMoments,
    covariance_spectrum,
    effective_rank,
    log_determinant,
    pairwise_distance,
)
from massieu.population.operator import Operator
from massieu.population.push_forward import PushForward
from massieu.population.reading import ObservableReading
from massieu.population.renormalisation import Renormalisation, TraceRenormalisation
from massieu.population.resampled import ResampledLayer
from massieu.population.self_attention import SelfAttention

__all__ = [
    "AttentionLayer",
    "CloudMoments",
    "CloudShape",
    "Clusters",
    "Composition",
    "DoublyStochasticLayer",
    "FeedForward",
    "Flow",
    "Normalisation",
    "ObservableReading",
    "Operator",
    "PushForward",
    "Renormalisation",
    "ResampledLayer",
    "SelfAttention",
    "TraceRenormalisation",
    "covariance_spectrum",
    "doubly_stochastic_attention",
    "effective_rank",
    "integrate",
    "log_determinant",
    "pairwise_distance",
    "precision_alignment",
    "sinkhorn",
]


def __dir__() -> list[str]:
    return __all__
