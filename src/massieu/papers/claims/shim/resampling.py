"""S19: attention and sequential Monte Carlo."""

from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.ops.attention import attention, log_partition
from massieu.ops.resampling import resample_attention
from massieu.papers.claims.claim import (
    GRADIENT_BY_DIFFERENCES,
    SHIM,
    Check,
    at_least,
    at_most,
    close,
    differs,
    mean_of_draws,
    near_in_standard_errors,
)
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.oracles import differences
from massieu.papers.claims.registry import claim
from massieu.population import Flow, ResampledLayer, doubly_stochastic_attention

_GENEALOGIES = 200
_GENERATIONS = 2
_LINES = 40


@claim(
    "S19",
    title="Attention as resampling",
    statement="Attention is the mean of multinomial resampling by its weights: a drawn value has mean Σⱼ Pᵢⱼvⱼ and "
    "covariance Cov_P(v), which is β⁻¹ ∂out/∂q for v = k. Lineages of drawn tokens coalesce: with uniform weights, "
    "two tokens have a common ancestor with probability 1 − (1 − 1/n)^t after t layers. Doubly stochastic weights "
    "keep the mean.",
    source=f"{SHIM}, §5 and §6; its exact form is derived",
    status="quoted",
)
def attention_is_the_mean_of_resampling(
    tokens: int = 8, dimensions: int = 3, resamples: int = 50_000, seed: int = 0
) -> Iterator[Check]:
    check_at_least(2, tokens=tokens, dimensions=dimensions, resamples=resamples)
    normal = normal_draws(seed)
    beta = dimensions**-0.5
    query = normal(tokens, dimensions)
    key = normal(tokens, dimensions)
    value = normal(tokens, dimensions)
    weights = torch.softmax(beta * query @ key.T, -1)
    generator = torch.Generator().manual_seed(seed)
    # The library's functions take (batch, heads, tokens, dimensions).
    heads = (query[None, None], key[None, None], value[None, None])
    resampled = resample_attention(*heads, generator=generator, draws=resamples)
    yield from _moments(resampled.sample[0, 0], weights, value)
    yield close("Σⱼ Pᵢⱼvⱼ and attention", weights @ value, attention(*heads).output[0, 0])

    def output(query: Tensor) -> Tensor:
        """Attention with the keys as values."""
        return attention(query[None, None], key[None, None], key[None, None]).output[0, 0]

    jacobian = differences(output, query)
    yield close("β⁻¹ ∂out/∂q and Cov_P(k)", jacobian / beta, _covariance(weights, key), GRADIENT_BY_DIFFERENCES)

    effective_size = resampled.effective_size[0, 0]
    perplexity = torch.exp(-(weights * weights.log()).sum(-1))
    yield close("effective sample size and 1/Σⱼ Pᵢⱼ²", effective_size, 1 / (weights * weights).sum(-1))
    yield at_least("effective sample size and 1", effective_size, 1 - 1e-12)
    yield at_most("effective sample size less the perplexity exp H(Pᵢ)", effective_size - perplexity, 1e-12)
    yield at_most("effective sample size and N", effective_size, tokens + 1e-12)
    yield close("expected offspring and column sums Σᵢ Pᵢⱼ", resampled.offspring[0, 0], weights.sum(0))

    systematic = resample_attention(*heads, generator=generator, draws=16, method="systematic")
    counts = torch.nn.functional.one_hot(systematic.indices[0, 0], tokens).sum(1)
    yield at_most("systematic resampling: |count of j in S draws − S Pᵢⱼ|", (counts - 16 * weights).abs(), 1 + 1e-9)

    yield from _increment(normal, query, key, beta, generator, resamples)
    yield from _self_normalised(normal, dimensions)
    yield from _coalescence(normal(_LINES, dimensions), generator)
    yield from _doubly_stochastic(query, key, value, beta)


def _covariance(weights: Tensor, value: Tensor) -> Tensor:
    """Cov_{P_i}(v), a matrix for each query."""
    centred = value - (weights @ value).unsqueeze(1)
    return torch.einsum("ij,ijc,ijd->icd", weights, centred, centred)


def _moments(sample: Tensor, weights: Tensor, value: Tensor) -> Iterator[Check]:
    """Mean and covariance of the draws (queries, draws, d), with standard errors from P itself."""
    count = sample.shape[1]
    mean = weights @ value
    covariance = _covariance(weights, value)
    error = (covariance.diagonal(dim1=1, dim2=2) / count).sqrt()
    yield near_in_standard_errors("mean of the draws and Σⱼ Pᵢⱼvⱼ", sample.mean(1), mean, error)
    centred = value - mean.unsqueeze(1)
    products = centred.unsqueeze(-1) * centred.unsqueeze(-2)
    variance = (torch.einsum("ij,ijcd->icd", weights, products.square()) - covariance.square()) / count
    deviation = sample - mean.unsqueeze(1)
    sample_covariance = torch.einsum("isc,isd->icd", deviation, deviation) / count
    name = "covariance of the draws and Cov_P(v)"
    yield near_in_standard_errors(name, sample_covariance, covariance, variance.sqrt())


def _increment(
    normal: Normal, query: Tensor, key: Tensor, beta: float, generator: torch.Generator, resamples: int
) -> Iterator[Check]:
    """A query changes by δ: the incremental weights are exp(βk·δ), exactly, and after resampling without bias."""
    change = 0.5 * normal(*query.shape)
    query_heads = query[None, None]
    key_heads = key[None, None]
    before = log_partition(query_heads, key_heads)[0, 0]
    after = log_partition((query + change)[None, None], key_heads)[0, 0]
    weights = torch.softmax(beta * query @ key.T, -1)
    increment = torch.exp(beta * change @ key.T)
    expected = (weights * increment).sum(-1)
    yield close("log Z(q + δ) − log Z(q) and log E_P exp(βk·δ)", after - before, expected.log())
    resampled = resample_attention(query_heads, key_heads, key_heads, generator=generator, draws=resamples)
    estimate = increment.gather(1, resampled.indices[0, 0]).mean(1)
    variance = (weights * increment.square()).sum(-1) - expected.square()
    error = (variance / resamples).sqrt()
    yield near_in_standard_errors("mean weight after resampling and Z(q + δ)/Z(q)", estimate, expected, error)


def _self_normalised(normal: Normal, dimensions: int, keys: int = 200, sets: int = 20_000) -> Iterator[Check]:
    """Keys from N(0, I): Ẑ is unbiased, attention has the bias −exp(‖η‖²)η/N of a self-normalised estimate."""
    eta = normal(dimensions)
    eta = 0.5 * eta / eta.norm()
    squared_norm = eta.square().sum()
    partitions = []
    biases = []
    block = max(1, 2_000_000 // (keys * dimensions))
    for start in range(0, sets, block):
        key = normal(min(block, sets - start), keys, dimensions)
        weight = torch.exp(key @ eta - squared_norm / 2)  # of mean 1
        deviation = key - eta
        # The part of the error that is linear in the weights has mean 0, and most of the variance.
        linear = (weight.unsqueeze(-1) * deviation).mean(1)
        key_heads = key.unsqueeze(1)
        output, _ = attention(eta.expand(len(key), 1, 1, -1), key_heads, key_heads, scale=1.0)
        partitions.append(weight.mean(1))
        biases.append(output[:, 0, 0] - eta - linear)
    partition = torch.cat(partitions)
    bias = torch.cat(biases)
    error = (torch.expm1(squared_norm) / (keys * sets)).sqrt()
    yield near_in_standard_errors("keys from N(0, I): mean of Ẑ/Z and 1", partition.mean(), 1.0, error)
    expected = -squared_norm.exp() * eta / keys
    yield mean_of_draws("bias of attention and −exp(‖η‖²)η/N", bias, expected)
    yield differs("bias of attention, in standard errors", bias, 0.0, expected)


def _coalescence(points: Tensor, generator: torch.Generator) -> Iterator[Check]:
    """A flow of tokens that are replaced by uniform draws: the model of Wright and Fisher."""
    layer = ResampledLayer.create(generator=generator, scale=0.0)
    flow = Flow(layer, depth=_GENERATIONS, observables=[])
    runs = [flow.run(points, progress=False) for _ in range(_GENEALOGIES)]
    # Without the start, where no two tokens have a common ancestor.
    shared_ancestry = torch.stack([run.values("shared_ancestry")[1:] for run in runs])
    generation = torch.arange(1, _GENERATIONS + 1, dtype=torch.float64)
    expected = 1 - (1 - 1 / len(points)) ** generation
    yield mean_of_draws("pairs with a common ancestor and 1 − (1 − 1/n)^t", shared_ancestry, expected)


def _doubly_stochastic(query: Tensor, key: Tensor, value: Tensor, beta: float) -> Iterator[Check]:
    """The weights of Sinkhorn's algorithm keep the population's mean; attention's do not."""
    heads = (query[None, None], key[None, None], value[None, None])
    doubly_stochastic = doubly_stochastic_attention(*heads, scale=beta).output[0, 0]
    yield close("doubly stochastic P: mean of P v and mean of v", doubly_stochastic.mean(0), value.mean(0))
    softmax = attention(*heads, scale=beta).output[0, 0]
    difference = (softmax.mean(0) - value.mean(0)).abs().max()
    yield at_least("attention: mean of P v less mean of v", difference, 1e-6)
