"""Wrong flows, lineages and doubly stochastic attention."""

import torch

from massieu import ops
from massieu.papers.claims.beyond import clustering, doubly_stochastic
from massieu.papers.claims.shim import resampling
from massieu.papers.theory import ClusteringEnergy
from massieu.population import DoublyStochasticLayer, ResampledLayer, doubly_stochastic_attention
from massieu.population.clusters import cluster_count

_STEP = ClusteringEnergy._step
_OBSERVED = ResampledLayer.observed


def _softmax_layer(self, particles, group):
    query, key, value = self._heads(particles)
    return self._after(particles, ops.attention(query, key, value, scale=self.scale).output)


def _softmax(query, key, value, *, log_weight=None, scale=1.0):
    result = doubly_stochastic_attention(query, key, value, log_weight=log_weight, scale=scale)
    if log_weight is not None:
        log_weight = log_weight.reshape(1, 1, 1, -1)
    softmax = ops.attention(query, key, value, log_weight=log_weight, scale=scale)
    return result._replace(output=softmax.output)


def _weights_forgotten(query, key, value, *, log_weight=None, scale=1.0):
    return doubly_stochastic_attention(query, key, value, scale=scale)


def _each_its_own_ancestor(self, particles):
    return _OBSERVED(self, particles)._replace(ancestors=torch.arange(len(particles)))


WRONG = {
    "N8: a layer of softmax attention": ("N8", DoublyStochasticLayer, "_moved", _softmax_layer),
    "N8: softmax attention": ("N8", doubly_stochastic, "doubly_stochastic_attention", _softmax),
    "N8: tokens of equal weight": ("N8", doubly_stochastic, "doubly_stochastic_attention", _weights_forgotten),
    "N5: a step twice as long": ("N5", ClusteringEnergy, "_step", lambda self, state: _STEP(self, _STEP(self, state))),
    "N5: clusters of no width": ("N5", clustering, "cluster_count", lambda points: cluster_count(points, radius=0.0)),
    "S19: lineages that never meet": ("S19", ResampledLayer, "observed", _each_its_own_ancestor),
    "S19: softmax for doubly stochastic weights": ("S19", resampling, "doubly_stochastic_attention", _softmax),
}
