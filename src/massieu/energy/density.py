"""The Hopfield memory as a density: p ∝ exp(−βE) is a mixture of Gaussians, and attention is its denoiser (B6, B7).

For stored patterns x_n of weights w_n under the identity, exp(−βE(v))/Z = Σ_n π_n N(v; x_n, 1/β) exactly, with
π_n ∝ w_n exp(½β‖x_n‖²). With another exponent than β times the energy it is no mixture.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy.base import promoted
from massieu.energy.bounds import stored
from massieu.energy.contraction.base import align
from massieu.energy.hopfield import HopfieldEnergy
from massieu.measures import Gaussian, mixture
from massieu.measures.mixture import Mixture
from massieu.measures.value import values_are_readable
from massieu.solve.arguments import told


def log_pattern_weights(hopfield: HopfieldEnergy) -> Float[Tensor, "*batch N"]:
    """log π_n, π_n ∝ w_n exp(½β‖x_n‖²): far from uniform where the norms differ by more than 1/β (B6).

    Raises:
        TypeError: the memory is not a set of patterns, or the reference not the identity.
        ValueError: a memory is masked altogether: it has no density.
    """
    return torch.log_softmax(_log_terms(hopfield), -1)


def density(hopfield: HopfieldEnergy) -> Mixture:
    """p ∝ exp(−βE) as a measure: its ``log_prob(0, v)`` is the log-density, its tilts are Hopfield densities too.

    Raises:
        TypeError, ValueError: as `log_pattern_weights`.
    """
    points = stored(hopfield).points
    variance = (1 / promoted(hopfield.scale)).unsqueeze(-1).expand(points.shape[:-1])
    return mixture(log_pattern_weights(hopfield), Gaussian.create(points, variance))


def log_normaliser(hopfield: HopfieldEnergy) -> Float[Tensor, "*batch"]:
    """log ∫ exp(−βE(v)) dv = (d/2) log(2π/β) + log Σ w_n exp(½β‖x_n‖²) − β·constant, E with all constants (B6).

    Raises:
        TypeError, ValueError: as `log_pattern_weights`.
    """
    scale, width = promoted(hopfield.scale), hopfield.memory.event_shape[0]
    total = torch.logsumexp(_log_terms(hopfield), -1)
    return 0.5 * width * torch.log(2 * math.pi / scale) + total - scale * hopfield.constant


def responsibilities(
    hopfield: HopfieldEnergy, state: Float[Tensor, "*batch_query d"]
) -> Float[Tensor, "*batch_query N"]:
    """P(n | v): which pattern v came from. They are the attention weights, softmax(β x_n·v + log w_n) (B6).

    Raises:
        TypeError: as `log_pattern_weights`.
        ValueError: the state's shape does not fit, or a memory is masked altogether.
    """
    memory = stored(hopfield)
    _need_mass(hopfield)
    hopfield._check_shape(hopfield._given(state))
    eta = promoted(state) * align(promoted(hopfield.scale), state.ndim)
    identity = torch.eye(memory.points.shape[-2], dtype=memory.points.dtype, device=memory.points.device)
    return memory.expectation(eta, identity.expand(*memory.points.shape[:-1], -1))


def score(hopfield: HopfieldEnergy, state: Float[Tensor, "*batch_query d"]) -> Float[Tensor, "*batch_query d"]:
    """∇ log p(v) = −β∇E(v) = β(T(v) − v) (B6).

    Raises:
        TypeError, ValueError: as `responsibilities`.
    """
    stored(hopfield)
    _need_mass(hopfield)
    hopfield._check_shape(hopfield._given(state))
    return align(promoted(hopfield.scale), state.ndim) * (hopfield.step(state) - promoted(state))


def denoise(hopfield: HopfieldEnergy, noisy: Float[Tensor, "*batch_query d"]) -> Float[Tensor, "*batch_query d"]:
    """E[pattern | pattern + noise of variance 1/β = noisy] = noisy + score/β (Tweedie): the attention step itself (B6).

    The prior over patterns is π, not the weights w: dot-product attention prefers long patterns.

    Raises:
        TypeError, ValueError: as `responsibilities`.
    """
    stored(hopfield)
    _need_mass(hopfield)
    return hopfield.step(noisy)


def sample(
    hopfield: HopfieldEnergy, shape: Sequence[int] = (), *, generator: torch.Generator | None = None
) -> Float[Tensor, "*shape_batch d"]:
    """Exact independent draws from p ∝ exp(−βE): a pattern by its weight π, and noise of variance 1/β. No gradient.

    Raises:
        TypeError, ValueError: as `log_pattern_weights`.
    """
    if not isinstance(shape, tuple | list):
        raise TypeError(f"shape must be a sequence of whole numbers, got {told(shape)}")
    with torch.no_grad():
        memory, weights = stored(hopfield), log_pattern_weights(hopfield).exp()
        count, batch = torch.Size(shape).numel(), memory.batch_shape
        flat = weights.reshape(-1, weights.shape[-1])
        chosen = torch.multinomial(flat, count, replacement=True, generator=generator)
        points = memory.points.reshape(len(flat), *memory.points.shape[-2:])
        drawn = points.take_along_dim(chosen.unsqueeze(-1), 1).movedim(1, 0).reshape(*shape, *batch, -1)
        noise = torch.randn(drawn.shape, dtype=drawn.dtype, device=drawn.device, generator=generator)
        return drawn + noise / promoted(hopfield.scale).sqrt().unsqueeze(-1)


def negative_log_likelihood(
    hopfield: HopfieldEnergy, data: Float[Tensor, "*batch_query d"]
) -> Float[Tensor, "*batch_query"]:
    """−log p(data), p ∝ exp(−βE): the loss whose minimum in the patterns is maximum likelihood (B7).

    ½β‖v‖² − log Σ w_n exp(βx_n·v) + log Σ w_n exp(½β‖x_n‖²) + (d/2) log(2π/β), without the score matrix. It can be
    differentiated in patterns, weights and β; its gradient in the patterns is the data's mean with attention weights, less
    that of the patterns themselves.

    Raises:
        TypeError: as `log_pattern_weights`.
        ValueError: the data's shape does not fit, or a memory is masked altogether.
    """
    energy = hopfield(data)
    return align(promoted(hopfield.scale), energy.ndim) * energy + align(log_normaliser(hopfield), energy.ndim)


def _log_terms(hopfield: HopfieldEnergy) -> Tensor:
    """log w_n + ½β‖x_n‖²."""
    memory = stored(hopfield)
    _need_mass(hopfield)
    return memory.log_weight + 0.5 * promoted(hopfield.scale).unsqueeze(-1) * memory.points.square().sum(-1)


def _need_mass(hopfield: HopfieldEnergy) -> None:
    log_weight = hopfield.memory.log_weight
    if values_are_readable(log_weight) and bool((log_weight == -torch.inf).all(-1).any()):
        raise ValueError("a memory that is masked altogether has no density")
