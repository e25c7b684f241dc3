"""Clusters, cosines and Gaussian clouds of tokens with depth, before any training. (N5, N6, S20)"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64
from torch import Tensor

from massieu import ops
from massieu.measures import Gaussian
from massieu.papers.experiments.descriptions import described
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.transformer import TransformerBlock
from massieu.population import AttentionLayer, Clusters

_TOKENS = 64
# Clusters on the sphere.
_SIZE = 3
_STEP = 0.1
_SCALES = (1, 4, 16)
_TIMES = (0, 5, 50)
# Cosines with depth.
_WIDTH = 64
_DEPTHS = (1, 8, 32)
# Gaussian closure.
_CLOSURE_WIDTH = 8
_CLOSURE_LAYERS = (1, 4, 8)


@experiment(
    "depth",
    question="Do tokens cluster with depth at initialisation, and do Gaussian clouds stay Gaussian?",
    claims="N5, N6, S20",
    minutes=1,
    criteria=[
        *described(
            {
                f"clusters_{scale}_at_{time}": f"clusters on the sphere, scale {scale}, time {time}"
                for scale in _SCALES
                for time in _TIMES
            }
        ),
        *described(
            {
                f"cosine_{kind}_{depth}": f"mean cosine of two tokens after {depth} random layers, {title}"
                for kind, title in (("attention", "attention alone"), ("whole", "with feed-forward networks"))
                for depth in _DEPTHS
            }
        ),
        *described(
            {
                f"closure_{depth}": f"error of the covariance that Gaussian closure predicts, layer {depth}"
                for depth in _CLOSURE_LAYERS
            }
        ),
    ],
)
def depth(seed: int, quick: bool) -> Numbers:
    """Clusters: 64 uniform tokens on the sphere in 3 dimensions follow x ← normalise(x + 0.1·Σ p_j x_j), where p is the
    softmax of scale·x·x_j. Tokens closer than 0.1 belong to one cluster. Cosines: 64 standard normal tokens of width 64
    pass through random pre-norm layers of 4 heads. Closure: 4,096 Gaussian tokens of width 8 pass through random attention
    layers with a residual and steps of 0.3. The error is the relative Frobenius distance of their covariance from the one
    that is exact for a Gaussian law of infinitely many tokens (S20).
    """
    generator = torch.Generator().manual_seed(seed)
    clusters = _cluster_counts(generator)
    cosines = _cosines(seed, generator)
    closure = _closure_errors(generator, 256 if quick else 4096)
    return clusters | cosines | closure


def _cluster_counts(generator: torch.Generator) -> Numbers:
    numbers: Numbers = {}
    start = F.normalize(torch.randn(_TOKENS, _SIZE, generator=generator, dtype=torch.float64), dim=-1)
    for scale in _SCALES:
        points = start
        for step in range(round(_TIMES[-1] / _STEP) + 1):
            time = step * _STEP
            if round(time, 6) in _TIMES:
                numbers[f"clusters_{scale}_at_{round(time)}"] = float(Clusters()(points)["clusters"].value)
            points = F.normalize(points + _STEP * self_attention(points, float(scale)), dim=-1)
    return numbers


def self_attention(points: Float64[Tensor, "n d"], scale: float) -> Float64[Tensor, "n d"]:
    """The output of attention of each token to all, without maps."""
    batch = points[None, None]
    return ops.attention(batch, batch, batch, scale=scale).output[0, 0]


def _cosines(seed: int, generator: torch.Generator) -> Numbers:
    numbers: Numbers = {}
    start = torch.randn(1, _TOKENS, _WIDTH, generator=generator)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for kind in ("attention", "whole"):
            tokens = start
            for layer in range(1, _DEPTHS[-1] + 1):
                block = TransformerBlock(_WIDTH, 4)
                if kind == "attention":
                    for parameter in block.feed_forward.parameters():
                        parameter.zero_()
                tokens = block(tokens, is_causal=False)
                if layer in _DEPTHS:
                    numbers[f"cosine_{kind}_{layer}"] = mean_cosine(tokens[0])
    return numbers


def mean_cosine(tokens: Float[Tensor, "n d"]) -> float:
    """The mean cosine of pairs of different tokens."""
    directions = F.normalize(tokens.double(), dim=-1)
    count = len(directions)
    # ‖Σ u_i‖² is the sum over all pairs; the n pairs of a token with itself have cosine 1.
    return float((directions.sum(0).square().sum() - count) / (count * (count - 1)))


def _closure_errors(generator: torch.Generator, tokens: int) -> Numbers:
    cloud = torch.randn(tokens, _CLOSURE_WIDTH, generator=generator, dtype=torch.float64)
    law = Gaussian.create(cloud.mean(0), torch.cov(cloud.mT, correction=0))
    numbers: Numbers = {}
    for number in range(1, _CLOSURE_LAYERS[-1] + 1):
        layer = AttentionLayer.random(_CLOSURE_WIDTH, 2, generator=generator, dtype=torch.float64, step_size=0.3)
        cloud = layer(cloud)
        law = layer.gaussian(law)
        if number in _CLOSURE_LAYERS:
            covariance = torch.cov(cloud.mT, correction=0)
            numbers[f"closure_{number}"] = float((covariance - law.covariance).norm() / covariance.norm())
    return numbers
