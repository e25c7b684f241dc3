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
    p = torch.softmax(beta * query @ key.T, -1)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (tensor[None, None] for tensor in (query, key, value))
    drawn = resample_attention(q, k, v, generator=generator, draws=resamples)
    yield from _moments(drawn.sample[0, 0], p, value)
    yield close("Σⱼ Pᵢⱼvⱼ and attention", p @ value, attention(q, k, v).output[0, 0])

    slope = differences(lambda query: attention(query[None, None], k, k).output[0, 0], query)
    own = slope[torch.arange(tokens), :, :] / beta
    yield close("β⁻¹ ∂out/∂q and Cov_P(k)", own, _covariance(p, key), GRADIENT_BY_DIFFERENCES)

    size = drawn.effective_size[0, 0]
    perplexity = torch.exp(-(p * p.log()).sum(-1))
    yield close("effective sample size and 1/Σⱼ Pᵢⱼ²", size, 1 / (p * p).sum(-1))
    yield at_least("effective sample size and 1", size, 1 - 1e-12)
    yield at_most("effective sample size less the perplexity exp H(Pᵢ)", size - perplexity, 1e-12)
    yield at_most("effective sample size and N", size, tokens + 1e-12)
    yield close("expected offspring and column sums Σᵢ Pᵢⱼ", drawn.offspring[0, 0], p.sum(0))

    systematic = resample_attention(q, k, v, generator=generator, draws=16, method="systematic")
    counts = torch.nn.functional.one_hot(systematic.indices[0, 0], tokens).sum(1)
    yield at_most("systematic resampling: |count of j in S draws − S Pᵢⱼ|", (counts - 16 * p).abs(), 1 + 1e-9)

    yield from _increment(normal, query, key, beta, generator, resamples)
    yield from _self_normalised(normal, dimensions)
    yield from _coalescence(normal(_LINES, dimensions), generator)
    yield from _doubly_stochastic(query, key, value, beta)


def _covariance(p: Tensor, value: Tensor) -> Tensor:
    """Cov_{P_i}(v), one matrix a query."""
    centred = value - (p @ value).unsqueeze(1)
    return torch.einsum("ij,ijc,ijd->icd", p, centred, centred)


def _moments(sample: Tensor, p: Tensor, value: Tensor) -> Iterator[Check]:
    """Mean and covariance of the draws (queries, draws, d), in standard errors that P itself gives."""
    count = sample.shape[1]
    mean = p @ value
    covariance = _covariance(p, value)
    error = (covariance.diagonal(dim1=1, dim2=2) / count).sqrt()
    yield near_in_standard_errors("mean of the draws and Σⱼ Pᵢⱼvⱼ", sample.mean(1), mean, error)
    centred = value - mean.unsqueeze(1)
    products = centred.unsqueeze(-1) * centred.unsqueeze(-2)
    spread = (torch.einsum("ij,ijcd->icd", p, products.square()) - covariance.square()) / count
    deviation = sample - mean.unsqueeze(1)
    found = torch.einsum("isc,isd->icd", deviation, deviation) / count
    yield near_in_standard_errors("covariance of the draws and Cov_P(v)", found, covariance, spread.sqrt())


def _increment(
    normal: Normal, query: Tensor, key: Tensor, beta: float, generator: torch.Generator, resamples: int
) -> Iterator[Check]:
    """A query changes by δ: the incremental weights are exp(βk·δ), exactly, and after resampling without bias."""
    change = 0.5 * normal(*query.shape)
    k = key[None, None]
    before, after = (log_partition(q[None, None], k)[0, 0] for q in (query, query + change))
    p = torch.softmax(beta * query @ key.T, -1)
    weight = torch.exp(beta * change @ key.T)
    expected = (p * weight).sum(-1)
    yield close("log Z(q + δ) − log Z(q) and log E_P exp(βk·δ)", after - before, expected.log())
    drawn = resample_attention(query[None, None], k, k, generator=generator, draws=resamples).indices[0, 0]
    found = weight.gather(1, drawn).mean(1)
    error = (((p * weight.square()).sum(-1) - expected.square()) / resamples).sqrt()
    yield near_in_standard_errors("mean weight after resampling and Z(q + δ)/Z(q)", found, expected, error)


def _self_normalised(normal: Normal, dimensions: int, keys: int = 200, sets: int = 20_000) -> Iterator[Check]:
    """Keys from N(0, I): Ẑ is unbiased, attention has the bias −exp(‖η‖²)η/N of a self-normalised estimate."""
    eta = normal(dimensions)
    eta = 0.5 * eta / eta.norm()
    square = eta.square().sum()
    partitions = []
    biases = []
    block = max(1, 2_000_000 // (keys * dimensions))
    for first in range(0, sets, block):
        drawn = normal(min(block, sets - first), keys, dimensions)
        weight = torch.exp(drawn @ eta - square / 2)  # of mean 1
        deviation = drawn - eta
        linear = (weight.unsqueeze(-1) * deviation).mean(1)  # of mean 0
        batch = drawn.unsqueeze(1)
        output, _ = attention(eta.expand(len(drawn), 1, 1, -1), batch, batch, scale=1.0)
        partitions.append(weight.mean(1))
        biases.append(output[:, 0, 0] - eta - linear)
    partition = torch.cat(partitions)
    bias = torch.cat(biases)
    error = (torch.expm1(square) / (keys * sets)).sqrt()
    yield near_in_standard_errors("keys from N(0, I): mean of Ẑ/Z and 1", partition.mean(), 1.0, error)
    expected = -square.exp() * eta / keys
    yield mean_of_draws("bias of attention and −exp(‖η‖²)η/N", bias, expected)
    yield differs("bias of attention, in standard errors", bias, 0.0, expected)


def _coalescence(points: Tensor, generator: torch.Generator) -> Iterator[Check]:
    """A flow of tokens that are replaced by uniform draws: the model of Wright and Fisher."""
    layer = ResampledLayer.create(generator=generator, scale=0.0)
    flow = Flow(layer, depth=_GENERATIONS, observables=[])
    found = torch.stack([flow.run(points, progress=False).values("shared_ancestry")[1:] for _ in range(_GENEALOGIES)])
    expected = 1 - (1 - 1 / len(points)) ** torch.arange(1, _GENERATIONS + 1, dtype=torch.float64)
    yield mean_of_draws("pairs with a common ancestor and 1 − (1 − 1/n)^t", found, expected)


def _doubly_stochastic(query: Tensor, key: Tensor, value: Tensor, beta: float) -> Iterator[Check]:
    """The weights of Sinkhorn's algorithm keep the population's mean; attention's do not."""
    heads = query[None, None], key[None, None], value[None, None]
    found = doubly_stochastic_attention(*heads, scale=beta).output[0, 0]
    yield close("doubly stochastic P: mean of P v and mean of v", found.mean(0), value.mean(0))
    softmax = attention(*heads, scale=beta).output[0, 0]
    yield at_least("attention: mean of P v less mean of v", (softmax.mean(0) - value.mean(0)).abs().max(), 1e-6)
