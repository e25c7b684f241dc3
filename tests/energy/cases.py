"""References and memories that energies are tried with, and what the tests know of them by NumPy alone."""

from collections.abc import Callable

import numpy as np
import torch
from scipy.special import logsumexp
from torch import Tensor

from massieu import measures
from massieu.energy import activations

F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def constant(value: float) -> Tensor:
    return torch.tensor(value, dtype=F64)


def cloud(width: int) -> Tensor:
    return draw(6 * width, width, seed=7) * torch.linspace(0.5, 2.0, width, dtype=F64)


ACTIVATIONS: dict[str, Callable[[int], activations.Activation]] = {
    "identity": lambda width: activations.Identity.create(),
    "scalar": lambda width: activations.Scalar.create(constant(0.6)),
    "spin": lambda width: activations.Tanh.create(),
    "sphere": lambda width: activations.SphereProjection.create(constant(1.5)),
    "sphere, softened": lambda width: activations.SphereProjection.create(constant(1.5), eps=0.3),
    "RMSNorm": lambda width: activations.RMSNorm.create(constant(0.8)),
    "LayerNorm": lambda width: activations.LayerNorm.create(constant(0.8), draw(width, seed=3)),
    "LayerNorm, eps 0": lambda width: activations.LayerNorm.create(constant(1.2), eps=0.0),
    "whitening": lambda width: activations.Whitening.of(cloud(width)),
}
"""By the width of the state."""

MEASURES: dict[str, Callable[[int], measures.Measure]] = {
    "Gaussian": lambda width: measures.Gaussian.create(draw(width, seed=4), torch.linspace(0.5, 2, width, dtype=F64)),
    "Spin": lambda width: measures.Spin.create(0.3 * draw(width, seed=5)),
    "Bernoulli": lambda width: measures.Bernoulli.create(torch.linspace(0.2, 0.7, width, dtype=F64)),
    "Sphere": lambda width: measures.Sphere.create(constant(1.3), dim=width),
    "Atoms": lambda width: measures.Atoms.create(draw(3 * width, width, seed=6)),
}

REFERENCES: dict[str, Callable[[int], activations.Activation | measures.Measure]] = {**ACTIVATIONS, **MEASURES}

MEMORIES: dict[str, Callable[[tuple[int, ...], int], measures.Measure]] = {
    "Gaussian": lambda batch, width: measures.Gaussian.create(
        draw(*batch, width, seed=8), 0.3 * draw(*batch, width, seed=9).abs()
    ),
    "mixture": lambda batch, width: measures.mixture(
        draw(*batch, 3, seed=10),
        measures.Gaussian.create(draw(*batch, 3, width, seed=11), 0.2 * draw(*batch, 3, seed=12).abs()),
    ),
    "signs": lambda batch, width: measures.Spin.create(draw(*batch, width, seed=13)),
    "smoothed atoms": lambda batch, width: measures.convolve(
        measures.Atoms.create(draw(*batch, 4, width, seed=14)),
        measures.Gaussian.create(torch.zeros(*batch, width, dtype=F64), torch.full(batch, 0.1, dtype=F64)),
    ),
}
"""Memories other than patterns, by batch and width."""


def hopfield_energy(patterns, state, scale, log_weight=None) -> np.ndarray:
    """½‖x‖² − lse_β(Xx) + β⁻¹ log Σw + ½M², for one memory and one state."""
    kept = np.isfinite(log_weight) if log_weight is not None else np.ones(len(patterns), bool)
    bias = np.zeros(len(patterns)) if log_weight is None else log_weight
    scores = scale * patterns @ state + bias
    norm = np.square(patterns[kept]).sum(-1).max()
    return 0.5 * state @ state - logsumexp(scores) / scale + logsumexp(bias) / scale + 0.5 * norm


def attend(patterns, state, scale, log_weight=None) -> np.ndarray:
    """Xᵀ softmax(βXx + log w)."""
    scores = scale * patterns @ state + (0 if log_weight is None else log_weight)
    return np.exp(scores - logsumexp(scores)) @ patterns
