"""Wrong populations."""

from collections.abc import Callable

import torch

from massieu.measures import Gaussian
from massieu.papers.claims.beyond import gaussian_closure
from massieu.papers.theory import gaussian_flow
from massieu.population import AttentionLayer, FeedForward
from massieu.population.operator import ParticleMoments

_ATTENTION = AttentionLayer._attention_to
_CALL = AttentionLayer.__call__
_FORWARD = FeedForward.__call__
_GAUSSIAN = AttentionLayer.gaussian


def _transposed(self, law):
    weights = (self.key_weight, self.query_weight, self.value_weight, self.output_weight)
    return _ATTENTION(AttentionLayer.create(*weights, scale=self.scale), law)


def _without_spread(self, law):
    return _ATTENTION(self, ParticleMoments(law.mean, 0.9 * law.covariance))


def _blurred(self, law):
    after = _GAUSSIAN(self, law)
    return Gaussian.create(after.location, after.covariance + 1e-8 * torch.eye(3).double())


def _always(residual: bool) -> Callable:
    def call(self, particles):
        # A moving population is the particles themselves, for which `create` takes None.
        moves = type(self.population).__name__ == "Moving"
        layer = AttentionLayer.create(
            self.query_weight,
            self.key_weight,
            self.value_weight,
            self.output_weight,
            scale=self.scale,
            step_size=self.step_size,
            population=None if moves else self.population,
            residual=residual,
        )
        return _CALL(layer, particles)

    return call


def _bias_forgotten(self, law):
    after = _ATTENTION(self, law)
    return after._replace(offset=after.offset - self.bias)


def _query_bias_forgotten(self, law):
    weights = (self.query_weight, self.key_weight, self.value_weight, self.output_weight)
    return _ATTENTION(AttentionLayer.create(*weights, bias=self.bias, scale=self.scale), law)


WRONG = {
    "S20: no bias in the closure": ("S20", AttentionLayer, "_attention_to", _bias_forgotten),
    "S20: no bias of queries in the closure": ("S20", AttentionLayer, "_attention_to", _query_bias_forgotten),
    "S20: the score transposed": ("S20", AttentionLayer, "_attention_to", _transposed),
    "S20: too little covariance": ("S20", AttentionLayer, "_attention_to", _without_spread),
    "S20: particles without what they were": ("S20", AttentionLayer, "__call__", _always(False)),
    "S20: a feed-forward layer that mixes": (
        "S20",
        FeedForward,
        "__call__",
        lambda self, x: _FORWARD(self, x) + x.mean(-2, keepdim=True),
    ),
    "N6: the score transposed": (
        "N6",
        gaussian_closure,
        "gaussian_flow",
        lambda law, *, value, score, time: gaussian_flow(law, value=value, score=2 * score.mT - score, time=time),
    ),
    "N6: twice as fast": (
        "N6",
        gaussian_closure,
        "gaussian_flow",
        lambda law, *, value, score, time: gaussian_flow(law, value=value, score=score, time=1.01 * time),
    ),
    "N6: no bias in the closure": ("N6", AttentionLayer, "_attention_to", _bias_forgotten),
    "N6: no bias of queries in the closure": ("N6", AttentionLayer, "_attention_to", _query_bias_forgotten),
    "N6: layers that add to every direction": ("N6", AttentionLayer, "gaussian", _blurred),
    "N12: a skip connection that is always there": ("N12", AttentionLayer, "__call__", _always(True)),
    "N12: none ever": ("N12", AttentionLayer, "__call__", _always(False)),
}
