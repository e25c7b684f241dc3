"""X4: an attention sink is a prior pseudo-observation."""

from collections.abc import Iterator

import torch

from massieu.ops import attention, log_partition
from massieu.papers.claims.claim import Check, at_least, close
from massieu.papers.claims.inputs import check_at_least, normal_draws
from massieu.papers.claims.rates import has_rate, rate
from massieu.papers.claims.registry import claim
from massieu.posteriors import GaussianMean

_EXACT = 1e-12


@claim(
    "X4",
    title="A sink is a prior pseudo-observation",
    statement="A sink of logit b and value zero multiplies the output by Z/(Z + e^b). With a value v₀ it is a "
    "conjugate prior of strength κ₀ = e^b and mean v₀. Its share κ₀/(κ₀ + Z) falls as 1/L if scores do not grow.",
    source="derived (Z3.1)",
    status="derived",
)
def sinks_as_priors(tokens: int = 12, dimensions: int = 4, repetitions: int = 120, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, tokens=tokens)
    # The interval of the rate is a tenth wide.
    check_at_least(100, repetitions=repetitions)
    normal = normal_draws(seed)
    query = normal(2, 3, 5, dimensions)
    key = normal(2, 3, tokens, dimensions)
    value = normal(2, 3, tokens, dimensions)
    sink = normal(3)
    prior = normal(3, dimensions)
    plain = attention(query, key, value, scale=1.0)
    shrunk = attention(query, key, value, scale=1.0, sink=sink)
    mass = (query @ key.mT).exp().sum(-1)
    level = sink.exp().reshape(3, 1)
    factor = (mass / (mass + level)).unsqueeze(-1)
    yield close("value zero: output and Z/(Z + e^b)·attention", shrunk.output, factor * plain.output, _EXACT)
    yield close("value zero: log-partition and log(Z + e^b)", shrunk.log_partition, (mass + level).log(), _EXACT)
    found = attention(query, key, value, sink=sink, sink_value=prior, scale=1.0)
    # The sink as one more key, at the origin, with its logit as log-weight.
    keys = torch.cat([torch.zeros_like(key[:, :, :1]), key], 2)
    values = torch.cat([prior.expand(2, 3, dimensions).unsqueeze(2), value], 2)
    bias = torch.cat([sink.reshape(3, 1, 1), torch.zeros(3, 1, tokens, dtype=torch.float64)], -1)
    weights = (query @ keys.mT + bias).softmax(-1)
    yield close("value v₀: output and softmax over L + 1 tokens", found.output, weights @ values, _EXACT)
    share = (sink[:, None] - found.log_partition).exp()
    yield close("value v₀: share of the sink and κ₀/(κ₀ + Z)", share, weights[..., 0], _EXACT)
    yield from _conjugate(normal(7, dimensions), prior[0], sink[0])
    sizes = [2**power for power in range(5, 11)]
    shares = []
    for size in sizes:
        drawn = log_partition(
            normal(repetitions, 1, 1, dimensions) / 2, normal(repetitions, 1, size, dimensions), scale=1.0
        )
        shares.append(torch.sigmoid(-drawn.flatten()))
    yield has_rate("κ₀ = 1: rate of the sink's share in L", rate(sizes, torch.stack(shares)), -1.0)


def _conjugate(tokens: torch.Tensor, prior: torch.Tensor, sink: torch.Tensor) -> Iterator[Check]:
    """Scores of zero: the posterior of a Gaussian mean, by its formula and by the library."""
    nothing = torch.zeros(1, 1, len(tokens), 1, dtype=torch.float64)
    found = attention(nothing[:, :, :1], nothing, tokens.expand(1, 1, -1, -1), sink=sink, sink_value=prior)
    strength = sink.exp()
    mean = (strength * prior + tokens.sum(0)) / (strength + len(tokens))
    yield close("scores of zero: output and (κ₀m₀ + Σx)/(κ₀ + L)", found.output.flatten(), mean, _EXACT)
    law = GaussianMean.create(prior, strength, torch.ones_like(strength)).posterior(tokens)
    width = (-found.log_partition.flatten()).exp() * torch.eye(len(mean), dtype=torch.float64)
    yield close("scores of zero: I/Z and the posterior's covariance", width, law.covariance, _EXACT)
    # Trap 24: the same tokens twice have one average, and one output of attention without a sink, but another posterior.
    twice = GaussianMean.create(prior, strength, torch.ones_like(strength)).posterior(tokens.repeat(2, 1))
    yield at_least("the tokens twice: change of the posterior's mean", (twice.mean - law.mean).norm(), 1e-6)
