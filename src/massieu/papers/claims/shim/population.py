"""S20: tokens as particles under an operator, and the Gaussian law that stays Gaussian."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor

from massieu.measures import Gaussian
from massieu.papers.claims.claim import SHIM, Check, at_most, close, differs, mean_of_draws, near_in_standard_errors
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.rates import has_rate, rate
from massieu.papers.claims.registry import claim
from massieu.population import AttentionLayer, Composition, FeedForward

_SIZES = [16, 32, 64, 128, 256, 512]
_LAYERS = 3
_STEP = 0.5
_LOGIT = 0.25
"""Standard deviation of the logits before the first layer."""
_NODES = 60
"""Nodes of the Gauss–Hermite rule in each coordinate."""
_QUADRATURE = 1e-8
"""Rounding of the rule; it is exact for logits of less than four standard deviations."""


@claim(
    "S20",
    title="Tokens as particles under an operator",
    statement="An attention layer pushes the population ρ forward by id + γΓ_ρ; a feed-forward layer moves each "
    "token by itself. Attention turns ρ = N(m, C) into N(m + γV(m + CBᵀm), (I + γVCBᵀ)C(I + γVCBᵀ)ᵀ), which the "
    "moments of N particles approach at rate N^(−1/2). After one layer, tokens are exchangeable but not "
    "independent.",
    source=f"{SHIM}, §4 and footnote 1 of §3.2; the Gaussian closure is derived, and rigorous in arXiv 2501.18322",
    status="quoted",
    corrected="The paper calls the queries IID samples (§3.2) and says itself that their updates are not independent: “since "
    "they depend on the other hidden states, they are not independent updates” (§5). Here with numbers: tokens that are "
    "independent before a layer have covariances of order 1/N after it.",
)
def tokens_as_particles(
    particles: int = 100_000, repetitions: int = 500, populations: int = 20_000, seed: int = 0
) -> Iterator[Check]:
    check_at_least(1000, particles=particles, populations=populations)
    check_at_least(250, repetitions=repetitions)
    normal = normal_draws(seed)
    problem = _drawn_problem(normal)
    yield from _closure(problem, normal, particles)
    errors = _errors(problem, normal, repetitions)
    yield has_rate(f"moments of N particles after {_LAYERS} layers: rate in N", rate(_SIZES, errors), -0.5)
    yield from _interaction(problem.layer, normal(5, 2))
    yield from _coupling(normal, populations)
    yield from _biases(problem, normal)


@dataclass(frozen=True)
class _Problem:
    """An attention layer, and the law N(m, C) of the tokens before it.

    Attributes:
        score: B, shape (2, 2).
        write: V, shape (2, 2).
        mean: m, shape (2,).
        root: A root of C, shape (2, 2).
    """

    score: Tensor
    write: Tensor
    mean: Tensor
    root: Tensor

    @property
    def covariance(self) -> Tensor:
        return self.root @ self.root.T

    @property
    def layer(self) -> AttentionLayer:
        return AttentionLayer.from_score(self.score, self.write, step_size=_STEP)

    @property
    def law(self) -> Gaussian:
        return Gaussian.create(self.mean, self.covariance)


def _drawn_problem(normal: Normal) -> _Problem:
    """Random B, V, m and C, with logits kᵀBᵀq of the standard deviation `_LOGIT` over q and k, and ‖V‖ = 1.

    The relative error of attention is √(e^s/N) at logits of the variance s: without a bound on s some laws need more
    particles than there are.
    """
    score = normal(2, 2)
    write = normal(2, 2)
    mean = normal(2)
    root = normal(2, 2) / 2**0.5
    covariance = root @ root.T
    second_moment = covariance + torch.outer(mean, mean)
    logit_variance = (score @ covariance @ score.T @ second_moment).trace()
    score = score * _LOGIT / logit_variance.sqrt()
    write = write / torch.linalg.matrix_norm(write, 2)
    return _Problem(score, write, mean, root)


def _closure(problem: _Problem, normal: Normal, particles: int) -> Iterator[Check]:
    """The Gaussian law behind the layer, and one token's attention to the law and to a sample of it."""
    score = problem.score
    write = problem.write
    mean = problem.mean
    covariance = problem.covariance
    after = problem.layer.gaussian(problem.law)
    jacobian = torch.eye(2).double() + _STEP * write @ covariance @ score.T
    mean_after = mean + _STEP * write @ (mean + covariance @ score.T @ mean)
    yield close("mean behind the layer and m + γV(m + CBᵀm)", after.location, mean_after)
    covariance_after = after.fisher(torch.zeros(2).double())
    expected = jacobian @ covariance @ jacobian.T
    yield close("covariance behind it and (I + γVCBᵀ)C(I + γVCBᵀ)ᵀ", covariance_after, expected)

    state = 0.5 * normal(3, 2)
    keys = mean + normal(particles, 2) @ problem.root.T
    sampled = AttentionLayer.from_score(score, write, step_size=_STEP, population=keys)(state)
    # The standard error of a self-normalised estimate.
    weights = torch.softmax(state @ score @ keys.T, -1)
    values = keys @ write.T
    deviation = values - (weights @ values).unsqueeze(1)
    error = _STEP * (weights.square().unsqueeze(-1) * deviation.square()).sum(1).sqrt()
    expected = state + _STEP * (mean + state @ score @ covariance) @ write.T
    yield near_in_standard_errors(f"x + γΓ_ρ(x) of {particles} draws and x + γV(m + CBᵀx)", sampled, expected, error)
    exact = AttentionLayer.from_score(score, write, step_size=_STEP, population=problem.law)(state)
    yield close("attention to the law itself and x + γV(m + CBᵀx)", exact, expected)


def _errors(problem: _Problem, normal: Normal, repetitions: int) -> Tensor:
    """Distance of the particles' mean and covariance from the recursion's, by size and repetition."""
    layers = Composition.repeat(problem.layer, _LAYERS)
    law = layers.gaussian(problem.law)
    covariance = law.fisher(torch.zeros(2).double())
    errors = []
    for size in _SIZES:
        particles = layers(problem.mean + normal(repetitions, size, 2) @ problem.root.T)
        sample_mean = particles.mean(1)
        centred = particles - sample_mean.unsqueeze(1)
        error_of_mean = sample_mean - law.location
        error_of_covariance = centred.mT @ centred / size - covariance
        errors.append(torch.cat([error_of_mean, error_of_covariance.flatten(1)], 1).norm(dim=1))
    return torch.stack(errors)


def _interaction(layer: AttentionLayer, state: Tensor) -> Iterator[Check]:
    """A feed-forward layer moves each token by itself; attention does not depend on the tokens' order."""
    moved = state.clone()
    moved[0] += 1
    feed_forward = FeedForward.create(torch.tanh)
    change = (feed_forward(moved) - feed_forward(state))[1:].abs()
    yield at_most("feed-forward layer: change of tokens where another one moves", change, 0.0)
    order = torch.tensor([3, 0, 4, 1, 2])
    yield close("attention of reordered tokens, and its own reordered", layer(state[order]), layer(state)[order], 1e-12)


def _coupling(normal: Normal, populations: int) -> Iterator[Check]:
    """Uniform attention, B = 0 and V = 1: x_i + γx̄ have covariance (2γ + γ²)/N, for N tokens of law N(0, 1)."""
    tokens = 8
    one = torch.ones(1, 1).double()
    layer = AttentionLayer.from_score(0 * one, one, step_size=_STEP)
    before = normal(populations, tokens, 1)
    products = _mean_products(before)
    yield mean_of_draws(f"covariance of two tokens before a layer, N = {tokens}", products, 0.0)
    products = _mean_products(layer(before))
    expected = (2 * _STEP + _STEP**2) / tokens
    yield mean_of_draws(f"covariance of two tokens after a layer, N = {tokens}", products, expected)
    name = "covariance of two tokens after a layer: its distance from 0, in standard errors"
    yield differs(name, products, 0.0, expected)


def _biases(problem: _Problem, normal: Normal) -> Iterator[Check]:
    """A layer with a bias of queries, b_Q, and one of what it writes, b: its closure, and quadrature over the law of keys.

    Attention to N(m, C) is affine in the token, so that its values at three points give the law behind the layer.
    """
    query_bias = 0.5 * normal(2)
    bias = normal(2)
    identity = torch.eye(2, dtype=torch.float64)
    layer = AttentionLayer.create(
        *(weight.unsqueeze(0) for weight in (problem.score.T, identity, problem.write, identity)),
        query_bias=query_bias.unsqueeze(0),
        bias=bias,
        scale=1.0,
        step_size=_STEP,
    )
    mean = problem.mean
    tokens = torch.cat([mean.unsqueeze(0), mean + identity])
    queries = tokens @ problem.score + query_bias
    moved = tokens + _STEP * (_mean_key(problem, queries) @ problem.write.T + bias)
    # Column j: how the moved token follows coordinate j of the token.
    jacobian = (moved[1:] - moved[0]).T
    after = layer.gaussian(problem.law)
    yield close("biases: mean behind the layer, and by quadrature over keys", after.location, moved[0], _QUADRATURE)
    expected = jacobian @ problem.covariance @ jacobian.T
    covariance = after.fisher(torch.zeros(2).double())
    yield close("biases: covariance behind the layer, and by quadrature over keys", covariance, expected, _QUADRATURE)


def _mean_key(problem: _Problem, queries: Tensor) -> Tensor:
    """Mean of y under N(dy; m, C)·e^(query·y), for queries (n, 2), by the Gauss–Hermite rule in whitened coordinates."""
    nodes, weights = (torch.from_numpy(each) for each in hermegauss(_NODES))
    keys = problem.mean + torch.cartesian_prod(nodes, nodes) @ problem.root.T
    log_weight = torch.cartesian_prod(weights, weights).log().sum(-1)
    return torch.softmax(queries @ keys.T + log_weight, -1) @ keys


def _mean_products(tokens: Tensor) -> Tensor:
    """Mean of xᵢxⱼ over the pairs i ≠ j of tokens (populations, N, 1)."""
    points = tokens.squeeze(-1)
    count = points.shape[1]
    return (points.sum(1).square() - points.square().sum(1)) / (count * (count - 1))
