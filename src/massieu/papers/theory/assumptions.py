"""The distance of a cloud of tokens and a layer's score matrix from the assumptions of the equilibrium theorem (S13)."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import check_finite, check_one_device, check_shape, floating, number, real
from massieu.foundation.doors import door
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.measures import Gaussian
from massieu.papers.theory.equilibrium import entropy_gain, key_law, whitened_map
from massieu.papers.theory.growth import cumulant_growth

ORDERS = (3, 4)
"""The orders of the cumulants whose growth is reported."""


class EquilibriumResult(NamedTuple):
    """The theorem's numbers for a cloud and a layer. C is the cloud's covariance, M the matrix, K = MCMᵀ."""

    mismatch: Float[Tensor, "*batch"]
    """‖MC − 1‖/√d in Frobenius's norm: 0 where M is the cloud's precision, which the theorem takes it to be."""
    commutator: Float[Tensor, "*batch"]
    """‖CK − KC‖/(‖C‖‖K‖): 0 where the layer and full renormalisation would leave every particle of a Gaussian in place."""
    displacement: Float[Tensor, "*batch"]
    """‖W − 1‖/√d for the `whitened_map` W: root mean square distance, in standard deviations, that they would move it."""
    entropy_gain: Float[Tensor, "*batch"]
    """log det(1 + step·K), nats per layer, which a renormalisation has to take back."""
    growth: Float[Tensor, "*batch d orders"]
    """`cumulant_growth` of the orders 3 and 4 along C's principal axes, largest variance first."""
    skewness: Float[Tensor, "*batch d"]
    """Skewness along these axes, in standard errors √(6/n) of as many independent Gaussian particles."""
    excess_kurtosis: Float[Tensor, "*batch d"]
    """Excess kurtosis along these axes, in standard errors √(24/n)."""
    norm_spread: Float[Tensor, "*batch"]
    """Standard deviation of ‖x‖ over its mean: √(1/(2d)) for a wide standard Gaussian; 0 on a sphere, as after RMSNorm."""
    log_keys_needed: Float[Tensor, "*batch"]
    """Median over tokens of xᵀKx, nats: attention over far fewer keys than its exponential is not the population's (S15)."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


@door(step=real)
def equilibrium_report(
    particles: Float[Tensor, "*batch n d"], matrix: Float[Tensor, "d d"], step: float = 1.0
) -> EquilibriumResult:
    """Measure the equilibrium theorem's assumptions and consequences on hidden states and a score matrix.

    Every number is one of the Gaussian theory, except those that measure how far the cloud is from being Gaussian. Where C
    and M do not commute, `growth` takes M's diagonal on C's axes and is approximate.

    Args:
        particles: The inputs of the attention layer, after the norm before it; n > d.
        matrix: M with attention's scale in it: the score of tokens i and j is x_iᵀMx_j, for a head W_QᵀW_K/√d_h.
        step: The factor of the output of attention, for a head whose W_OW_V is close to step·M.

    Returns:
        Everything in float64.

    Raises:
        ValueError: n ≤ d, a matrix that is not (d, d), something that is not finite, or a cloud of singular covariance.
        TypeError: no floating-point tensors.

    Example:
        >>> import torch
        >>> from massieu.papers.theory import equilibrium_report
        >>> cloud = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        >>> round(equilibrium_report(cloud, torch.eye(2)).commutator.item(), 3)
        0.0
    """
    _check(particles, matrix, step)
    particles = particles.detach().double()
    matrix = matrix.detach().double()
    count, width = particles.shape[-2:]
    location = particles.mean(-2)
    centred = particles - location.unsqueeze(-2)
    covariance = centred.mT @ centred / count
    law = Gaussian(location, covariance, location.new_zeros((*location.shape, 0)))
    keys = key_law(law, matrix)
    identity = torch.eye(width, dtype=matrix.dtype, device=matrix.device)
    # Both are symmetric, so that KC is the transpose of CK.
    product = covariance @ keys.covariance
    size = torch.linalg.matrix_norm(covariance) * torch.linalg.matrix_norm(keys.covariance)
    commutator = torch.linalg.matrix_norm(product - product.mT) / torch.where(size == 0, 1.0, size)

    ascending_variances, ascending_axes = torch.linalg.eigh(covariance)
    variances = ascending_variances.flip(-1)
    axes = ascending_axes.flip(-1)
    matrix_on_axes = (axes * (matrix @ axes)).sum(-2)  # vᵀMv of each axis
    growth = [cumulant_growth(order, step * matrix_on_axes, matrix_on_axes * variances) for order in ORDERS]
    whitened = centred @ axes / variances.sqrt().unsqueeze(-2)
    norms = particles.norm(dim=-1)
    log_keys_needed = ((particles @ keys.covariance) * particles).sum(-1)  # of each token
    return EquilibriumResult(
        mismatch=_norm_per_root(matrix @ covariance - identity),
        commutator=commutator,
        displacement=_norm_per_root(whitened_map(law, keys, step) - identity),
        entropy_gain=entropy_gain(keys, step),
        growth=torch.stack(growth, -1),
        skewness=(whitened**3).mean(-2) / (6 / count) ** 0.5,
        excess_kurtosis=((whitened**4).mean(-2) - 3) / (24 / count) ** 0.5,
        norm_spread=norms.std(-1, correction=0) / norms.mean(-1),
        log_keys_needed=log_keys_needed.median(-1).values,
    )


def _norm_per_root(matrix: Float[Tensor, "*batch d d"]) -> Float[Tensor, "*batch"]:
    """Frobenius's norm over √d."""
    return torch.linalg.matrix_norm(matrix) / matrix.shape[-1] ** 0.5


def _check(particles: Tensor, matrix: Tensor, step: float) -> None:
    shape = floating("particles", particles).shape
    if len(shape) < 2 or shape[-2] <= shape[-1]:
        raise ValueError(
            f"particles must have shape (*batch, n, d) with n > d, got {tuple(shape)}; fewer tokens have a singular "
            "covariance, and their leading principal components have not"
        )
    check_shape("matrix", floating("matrix", matrix), (shape[-1], shape[-1]))
    check_one_device(particles=particles, matrix=matrix)
    check_finite(particles=particles, matrix=matrix)
    number("step", step)
