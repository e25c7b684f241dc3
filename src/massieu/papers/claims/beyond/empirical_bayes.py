"""N9: attention denoises by the empirical prior of its context."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from massieu import ops
from massieu.energy import HopfieldEnergy
from massieu.papers.claims.claim import GRADIENT_BY_DIFFERENCES, Check, at_least, close
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.oracles import differences
from massieu.papers.claims.rates import Rate, has_rate, rate
from massieu.papers.claims.registry import claim

_EXACT = 1e-12


@claim(
    "N9",
    title="Attention as empirical Bayes",
    statement="One step of attention from a noisy token y, at inverse temperature β = 1/σ² and with log-weights −½β‖xₙ‖², is "
    "E[x | y] under the context's empirical prior and Gaussian noise, y + σ²∇log p(y) (Tweedie); tokens of equal norms need "
    "no weights, and then it is one gradient step on the context's Hopfield energy. Over L tokens it comes within L^{−1/2} of "
    "the denoiser that knows the prior.",
    source="empirical Bayes, arXiv 2605.29351; in-context denoising, Smart, Bietti and Sengupta, arXiv 2502.05164",
    status="quoted",
)
def in_context_denoising(
    tokens: int = 12, dimensions: int = 3, noise: float = 0.8, repetitions: int = 250, seed: int = 0
) -> Iterator[Check]:
    check_at_least(2, tokens=tokens, dimensions=dimensions)
    check_at_least(200, repetitions=repetitions)
    normal = normal_draws(seed)
    variance = noise**2
    context = normal(tokens, dimensions)
    noisy = normal(6, dimensions)
    bayes = _bayes_rule(noisy, context, variance)
    yield close("attention with log-weights and Bayes' rule", _denoise(noisy, context, variance), bayes, _EXACT)

    def log_density(y: Tensor) -> Tensor:
        square = -0.5 * (y.unsqueeze(-2) - context).square().sum(-1) / variance
        return square.logsumexp(-1) - math.log(tokens)

    tweedie = noisy + variance * differences(log_density, noisy)
    yield close("y + σ²∇log p(y) by differences and Bayes' rule", tweedie, bayes, GRADIENT_BY_DIFFERENCES)
    unweighted = torch.softmax(noisy @ context.T / variance, -1) @ context
    yield at_least("norms that differ, no log-weights: distance from Bayes' rule", (unweighted - bayes).norm(), 1e-3)
    yield from _one_gradient_step(normal, tokens, dimensions, variance)
    distance_rate = _rate_of_distance(normal, repetitions, variance)
    yield has_rate("rate of the distance from the true prior's denoiser in L", distance_rate, -0.5)


def _bayes_rule(noisy: Tensor, context: Tensor, variance: float) -> Tensor:
    """E[x | y] under the empirical prior of the context and Gaussian noise."""
    likelihood = (-0.5 * (noisy.unsqueeze(1) - context).square().sum(-1) / variance).exp()
    return (likelihood / likelihood.sum(-1, keepdim=True)) @ context


def _one_gradient_step(normal: Normal, tokens: int, dimensions: int, variance: float) -> Iterator[Check]:
    """For tokens of equal norms the denoiser is one gradient step on the context's Hopfield energy."""
    context = F.normalize(normal(tokens, dimensions), dim=-1)
    noisy = normal(6, dimensions)
    energy = HopfieldEnergy.create(context, scale=1 / variance)

    def energy_formula(state: Tensor) -> Tensor:
        return 0.5 * state.square().sum(-1) - variance * (state @ context.T / variance).logsumexp(-1)

    stepped = noisy - differences(energy_formula, noisy)
    bayes = _bayes_rule(noisy, context, variance)
    yield close("equal norms: a gradient step of the energy and Bayes' rule", stepped, bayes, GRADIENT_BY_DIFFERENCES)
    yield close("equal norms: the memory's step and Bayes' rule", energy.step(noisy), bayes, _EXACT)


def _rate_of_distance(normal: Normal, repetitions: int, variance: float) -> Rate:
    """Of attention over L tokens from N(0, I) to the denoiser y/(1 + σ²), which knows that law."""
    sizes = [2**power for power in range(6, 12)]
    errors = []
    noisy = torch.tensor([[0.8, -0.5]], dtype=torch.float64)
    for size in sizes:
        denoised = _denoise(noisy.expand(repetitions, 1, 2), normal(repetitions, size, 2), variance)
        errors.append((denoised - noisy / (1 + variance)).flatten(1).norm(dim=-1))
    return rate(sizes, torch.stack(errors))


def _denoise(noisy: Tensor, context: Tensor, variance: float) -> Tensor:
    """Attention with log-weights, of noisy tokens (*batch, L, d) over contexts (*batch, N, d)."""
    query = noisy.reshape(-1, 1, *noisy.shape[-2:])
    key = context.reshape(-1, 1, *context.shape[-2:])
    log_weight = (-0.5 / variance * key.square().sum(-1)).unsqueeze(-2)
    return ops.attention(query, key, key, log_weight=log_weight, scale=1 / variance).output.reshape(noisy.shape)
