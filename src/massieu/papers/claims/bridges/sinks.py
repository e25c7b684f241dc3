"""X4: an attention sink is a prior pseudo-observation."""

from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.ops import attention, log_partition
from massieu.papers.claims.claim import Check, at_least, close
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
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
    # With fewer repetitions the interval of the rate is wider than a tenth.
    check_at_least(100, repetitions=repetitions)
    normal = normal_draws(seed)
    query = normal(2, 3, 5, dimensions)
    key = normal(2, 3, tokens, dimensions)
    value = normal(2, 3, tokens, dimensions)
    sink = normal(3)
    prior = normal(3, dimensions)
    yield from _value_zero(query, key, value, sink)
    yield from _value_of_its_own(query, key, value, sink, prior)
    yield from _conjugate(normal(7, dimensions), prior[0], sink[0])
    yield from _share_of_many_tokens(normal, dimensions, repetitions)


def _value_zero(query: Tensor, key: Tensor, value: Tensor, sink: Tensor) -> Iterator[Check]:
    """A sink of value zero shrinks the output of the same attention without a sink."""
    without_sink = attention(query, key, value, scale=1.0)
    with_sink = attention(query, key, value, scale=1.0, sink=sink)
    partition = (query @ key.mT).exp().sum(-1)
    sink_weight = sink.exp().reshape(3, 1)  # e^b, one for each head
    factor = (partition / (partition + sink_weight)).unsqueeze(-1)
    expected = factor * without_sink.output
    yield close("value zero: output and Z/(Z + e^b)·attention", with_sink.output, expected, _EXACT)
    expected = (partition + sink_weight).log()
    yield close("value zero: log-partition and log(Z + e^b)", with_sink.log_partition, expected, _EXACT)


def _value_of_its_own(query: Tensor, key: Tensor, value: Tensor, sink: Tensor, prior: Tensor) -> Iterator[Check]:
    """The sink as one more key, at the origin, with its logit as log-weight and v₀ as its value."""
    batch, heads, tokens, dimensions = key.shape
    keys = torch.cat([torch.zeros_like(key[:, :, :1]), key], 2)
    values = torch.cat([prior.expand(batch, heads, dimensions).unsqueeze(2), value], 2)
    bias = torch.cat([sink.reshape(heads, 1, 1), torch.zeros(heads, 1, tokens, dtype=torch.float64)], -1)
    weights = (query @ keys.mT + bias).softmax(-1)
    result = attention(query, key, value, sink=sink, sink_value=prior, scale=1.0)
    yield close("value v₀: output and softmax over L + 1 tokens", result.output, weights @ values, _EXACT)
    share = (sink[:, None] - result.log_partition).exp()
    yield close("value v₀: share of the sink and κ₀/(κ₀ + Z)", share, weights[..., 0], _EXACT)


def _share_of_many_tokens(normal: Normal, dimensions: int, repetitions: int) -> Iterator[Check]:
    """The share 1/(1 + Z) of a sink of logit 0, by the number of tokens."""
    sizes = [2**power for power in range(5, 11)]
    shares = []
    for size in sizes:
        query = normal(repetitions, 1, 1, dimensions) / 2
        key = normal(repetitions, 1, size, dimensions)
        log_z = log_partition(query, key, scale=1.0)
        shares.append(torch.sigmoid(-log_z.flatten()))
    yield has_rate("κ₀ = 1: rate of the sink's share in L", rate(sizes, torch.stack(shares)), -1.0)


def _conjugate(tokens: Tensor, prior: Tensor, sink: Tensor) -> Iterator[Check]:
    """Scores of zero: the posterior of a Gaussian mean, by its formula and by the library."""
    zeros = torch.zeros(1, 1, len(tokens), 1, dtype=torch.float64)
    result = attention(zeros[:, :, :1], zeros, tokens.expand(1, 1, -1, -1), sink=sink, sink_value=prior)
    strength = sink.exp()
    mean = (strength * prior + tokens.sum(0)) / (strength + len(tokens))
    yield close("scores of zero: output and (κ₀m₀ + Σx)/(κ₀ + L)", result.output.flatten(), mean, _EXACT)
    prior_law = GaussianMean.create(prior, strength, torch.ones_like(strength))
    posterior = prior_law.posterior(tokens)
    covariance = (-result.log_partition.flatten()).exp() * torch.eye(len(mean), dtype=torch.float64)
    yield close("scores of zero: I/Z and the posterior's covariance", covariance, posterior.covariance, _EXACT)
    # Trap 24: the same tokens twice have one average, and one output of attention without a sink, but another posterior.
    posterior_of_twice = prior_law.posterior(tokens.repeat(2, 1))
    change = (posterior_of_twice.mean - posterior.mean).norm()
    yield at_least("the tokens twice: change of the posterior's mean", change, 1e-6)
