"""Z9: how fast attention and posterior means come to what they estimate, as the sequence grows."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from massieu import ops
from massieu.measures import Gaussian
from massieu.papers.claims.claim import Check, at_most, mean_of_draws
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.rates import has_rate, rate
from massieu.papers.claims.registry import claim
from massieu.papers.claims.zhang.smoothing import Task
from massieu.papers.theory import masked_gaussian_mean, optimal_scale

_SIZES = [16, 64, 256, 1024]


@claim(
    "Z9",
    title="Rates, summarised",
    statement="With L tokens, uniform attention approaches the conjugate posterior mean as L⁻¹, and the posterior "
    "mean approaches the truth as L^{−1/2}. Softmax at a fixed β approaches its own limit as L^{−1/2}e^{½β²qᵀΣq}; "
    "at the best β it approaches the conditional mean on the sphere as L^{−2/(d+3)}. The mass on wrong concepts "
    "falls as e^{−L·min KL}.",
    source="Z3, S15 and Z7; Bernstein–von Mises, large deviations",
    status="derived",
)
def rates_of_attention(repetitions: int = 800, seed: int = 0) -> Iterator[Check]:
    check_at_least(250, repetitions=repetitions)
    normal = normal_draws(seed)
    yield from _posterior_mean(normal, repetitions)
    yield from _fixed_temperature(normal, repetitions)
    yield from _best_temperature(normal, repetitions // 4)
    yield from _wrong_concepts(repetitions, seed)


def _posterior_mean(normal: Normal, repetitions: int, dimension: int = 3, weight: float = 2.0) -> Iterator[Check]:
    """Uniform attention approaches the posterior mean as L⁻¹, and the posterior mean the truth as L^{−1/2}.

    Tokens are N(z, I) with z ~ N(m, I/κ₀).
    """
    prior_mean = torch.tensor([1.0, -0.5, 0.2], dtype=torch.float64)
    to_posterior = []
    to_truth = []
    for size in _SIZES:
        latent = prior_mean + normal(repetitions, 1, dimension) / math.sqrt(weight)
        tokens = latent + normal(repetitions, size, dimension)
        posterior = masked_gaussian_mean(tokens, prior_mean, weight)
        uniform = ops.attention(torch.zeros_like(latent)[:, None], tokens[:, None], tokens[:, None], scale=1.0).output
        to_posterior.append((uniform[:, 0, 0] - posterior).norm(dim=-1))
        to_truth.append((posterior - latent[:, 0]).norm(dim=-1))
    yield has_rate("uniform attention to the posterior mean", rate(_SIZES, torch.stack(to_posterior)), -1.0)
    yield has_rate("posterior mean to the truth", rate(_SIZES, torch.stack(to_truth)), -0.5)


def _fixed_temperature(normal: Normal, repetitions: int) -> Iterator[Check]:
    """Keys = values N(0, Σ): the limit is βΣq, the mean squared error e^{β²qᵀΣq}(tr Σ + ‖βΣq‖²)/L to leading order."""
    covariance = torch.tensor([[1.0, 0.3], [0.3, 0.5]], dtype=torch.float64)
    eta = torch.tensor([0.6, -0.4], dtype=torch.float64)
    law = Gaussian.create(torch.zeros(2, dtype=torch.float64), covariance)
    root = torch.linalg.cholesky(covariance)
    limit = law.mean(eta)
    errors = []
    for size in _SIZES:
        key = (normal(repetitions, size, 2) @ root.T)[:, None]
        output = ops.attention(eta.expand(repetitions, 1, 1, 2), key, key, scale=1.0).output[:, 0, 0]
        errors.append((output - limit).norm(dim=-1))
    yield has_rate("softmax at a fixed temperature to its limit", rate(_SIZES, torch.stack(errors)), -0.5)
    square = _SIZES[-1] * errors[-1].square()
    leading = ((eta @ limit).exp() * (covariance.trace() + limit.square().sum())).item()
    yield mean_of_draws(f"L·(mean squared error) at L = {_SIZES[-1]}, and its limit", square, leading)


def _best_temperature(normal: Normal, repetitions: int) -> Iterator[Check]:
    """On the sphere the error at the best β falls as L^{−2/(d+3)}, and is larger at a quarter of it and at four times it."""
    for dimension in (2, 4):
        task = Task(dimension, _SIZES)
        power = torch.tensor([0.0, 1 / dimension], dtype=torch.float64)
        scales = optimal_scale(torch.tensor(_SIZES, dtype=torch.float64), power, task.noise**2, dimension)
        count = max(20, repetitions)
        errors = task.errors(normal, scales, count, 32)
        yield has_rate(f"softmax at the best temperature, d = {dimension}", rate(_SIZES, errors), -2 / (dimension + 3))
        last = Task(dimension, _SIZES[-1:])
        best = errors[-1].square()
        for name, factor in (("a quarter", 0.25), ("four times", 4.0)):
            other = last.errors(normal, factor * scales[-1:], 4 * count, 32)[0].square()
            error = (other.var() / len(other) + best.var() / count).sqrt()
            yield _above(
                f"d = {dimension}: mean squared error at {name} of the best β", other.mean() - best.mean(), error
            )


def _above(name: str, excess: Tensor, error: Tensor) -> Check:
    """An excess is at least three standard errors above 0; far from the minimum it is ten and more."""
    distance = (excess / error).item()
    false_alarm = 0.5 * math.erfc((distance - 3.0) / math.sqrt(2))
    basis = "normal law, from the distance measured"
    name = f"{name}, above the best's in standard errors"
    return Check(name, distance, "≥", 3.0, false_alarm=false_alarm, basis=basis)


def _wrong_concepts(repetitions: int, seed: int) -> Iterator[Check]:
    """Three concepts, tokens of four kinds: the log of the mass on the wrong ones falls by min KL a token."""
    emission = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25], [0.1, 0.1, 0.3, 0.5]], dtype=torch.float64)
    log_ratio = emission.log() - emission[0].log()
    divergence = (-(emission[0] * log_ratio).sum(-1))[1:].min().item()
    short = 100
    long = 500
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.multinomial(emission[0], repetitions * long, replacement=True, generator=generator).view(-1, long)
    # Of each wrong concept against the right one, at every length: (concepts, repetitions, lengths).
    evidence = log_ratio[1:, tokens].cumsum(-1)
    log_mass = _log_wrong_mass(evidence)
    fall = (log_mass[:, long - 1] - log_mass[:, short - 1]) / (long - short)
    yield mean_of_draws("log of the wrong concepts' mass a token, and −min KL", fall, -divergence)
    error = (log_mass[:, -1].mean() / (-long * divergence) - 1).abs()
    yield at_most(f"mean log mass on wrong concepts at L = {long}, over −L·min KL", error, 0.1)


def _log_wrong_mass(evidence: Tensor) -> Tensor:
    """log of the posterior mass of the wrong concepts under a uniform prior."""
    wrong = evidence.logsumexp(0)
    return wrong - torch.logaddexp(torch.zeros_like(wrong), wrong)
