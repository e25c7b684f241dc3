"""Tokens as particles: layers as operators on token clouds and on laws, and observables of the clouds."""

from typing import TYPE_CHECKING

from massieu.foundation.lazy_names import lazy_names

if TYPE_CHECKING:
    from massieu.population.alignment import precision_alignment
    from massieu.population.attention_layer import AttentionLayer
    from massieu.population.cloud_shape import CloudShape
    from massieu.population.clusters import Clusters
    from massieu.population.doubly_stochastic import DoublyStochasticLayer, doubly_stochastic_attention, sinkhorn
    from massieu.population.flow import Flow
    from massieu.population.integration import integrate
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

# A probe takes observables of clouds from here. It does not wait for layers, which need most of the core.
__getattr__, __dir__ = lazy_names(
    __name__,
    __all__,
    {
        "AttentionLayer": "massieu.population.attention_layer:AttentionLayer",
        "CloudMoments": "massieu.population.observables:CloudMoments",
        "CloudShape": "massieu.population.cloud_shape:CloudShape",
        "Clusters": "massieu.population.clusters:Clusters",
        "Composition": "massieu.population.layer:Composition",
        "DoublyStochasticLayer": "massieu.population.doubly_stochastic:DoublyStochasticLayer",
        "FeedForward": "massieu.population.layer:FeedForward",
        "Flow": "massieu.population.flow:Flow",
        "Normalisation": "massieu.population.layer:Normalisation",
        "ObservableReading": "massieu.population.reading:ObservableReading",
        "Operator": "massieu.population.operator:Operator",
        "PushForward": "massieu.population.push_forward:PushForward",
        "Renormalisation": "massieu.population.renormalisation:Renormalisation",
        "ResampledLayer": "massieu.population.resampled:ResampledLayer",
        "SelfAttention": "massieu.population.self_attention:SelfAttention",
        "TraceRenormalisation": "massieu.population.renormalisation:TraceRenormalisation",
        "covariance_spectrum": "massieu.population.observables:covariance_spectrum",
        "doubly_stochastic_attention": "massieu.population.doubly_stochastic:doubly_stochastic_attention",
        "effective_rank": "massieu.population.observables:effective_rank",
        "integrate": "massieu.population.integration:integrate",
        "log_determinant": "massieu.population.observables:log_determinant",
        "pairwise_distance": "massieu.population.observables:pairwise_distance",
        "precision_alignment": "massieu.population.alignment:precision_alignment",
        "sinkhorn": "massieu.population.doubly_stochastic:sinkhorn",
    },
)
