"""A prior of every family, batched, with tokens for it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from massieu.measures import Bernoulli, Exponential, Gamma, Gaussian, Poisson, Spin
from massieu.posteriors import (
    BayesianLinearRegression,
    DirichletMultinomial,
    DiscreteLatent,
    ExponentialFamily,
    GaussianMean,
    HiddenMarkov,
    NoisyLinearRegression,
    Posterior,
)


class Case(NamedTuple):
    """`prior` builds the law from its floating-point `parameters`; tokens are of batch (2,)."""

    build: Callable[..., Posterior]
    parameters: tuple[Tensor, ...]
    tokens: Tensor
    exchangeable: bool = True

    @property
    def prior(self) -> Any:
        return self.build(*self.parameters)


def _draws(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)


def _function(tokens: Tensor) -> Tensor:
    """Log-densities under three normals, up to a constant."""
    centres = torch.tensor([-1.0, 0.5, 2.0], dtype=tokens.dtype, device=tokens.device)
    return -0.5 * (tokens - centres).square()


def _family(likelihood: Callable[..., Any], chi: Tensor, tokens: Tensor, *parameters: Tensor) -> Case:
    strength = torch.tensor([1.7, 3.1], dtype=torch.float64)
    return Case(
        lambda chi, strength: ExponentialFamily.create(likelihood(*parameters), chi, strength), (chi, strength), tokens
    )


def cases(length: int = 6) -> dict[str, Case]:
    normal = _draws(0)
    positive = lambda *shape: normal(*shape).abs() + 0.4  # noqa: E731
    whole = lambda *shape: normal(*shape).mul(1.5).abs().floor()  # noqa: E731
    index = lambda *shape: whole(*shape).clamp(max=3).long()  # noqa: E731
    share = torch.tensor([[0.7, 1.2], [0.4, 2.0]], dtype=torch.float64)
    half = torch.full((2, 2), 0.3, dtype=torch.float64)
    precision = normal(2, 3, 5)
    precision = precision @ precision.mT + torch.eye(3, dtype=torch.float64)
    return {
        "Gaussian mean": Case(GaussianMean.create, (normal(2, 3), positive(2), positive(2)), normal(2, length, 3)),
        "Bernoulli": _family(Bernoulli.create, share, (normal(2, length, 2) > 0).double(), half),
        "spin": _family(Spin.create, share - 1, normal(2, length, 2).sign(), half),
        "Poisson": _family(Poisson.create, share, whole(2, length, 2), half),
        "exponential": _family(Exponential.create, share, positive(2, length, 2), half),
        "gamma": _family(Gamma.create, share, positive(2, length, 2), half + 1, half),
        "Gaussian": _family(Gaussian.create, share, normal(2, length, 2), half, half),
        "concepts": Case(DiscreteLatent.create, (normal(2, 3), normal(2, 3, 4).log_softmax(-1)), index(2, length)),
        "concepts of a function": Case(
            lambda log_weight: DiscreteLatent.create(log_weight, _function), (normal(2, 3),), normal(2, length, 1)
        ),
        "Dirichlet": Case(DirichletMultinomial.create, (positive(2, 4),), index(2, length)),
        "regression": Case(
            BayesianLinearRegression.create, (normal(2, 3, 2), precision, positive(2)), normal(2, length, 5)
        ),
        "regression of unknown noise": Case(
            NoisyLinearRegression.create,
            (normal(2, 3, 2), precision, positive(2) + 1, positive(2)),
            normal(2, length, 5),
        ),
        "hidden Markov": Case(
            HiddenMarkov.create,
            (normal(2, 3), normal(2, 3, 3), normal(2, 3, 4).log_softmax(-1)),
            index(2, length),
            exchangeable=False,
        ),
    }
