"""How far a cloud of tokens and a layer's score matrix are from what the equilibrium theorem assumes (S13)."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import check_finite, check_one_device, check_shape, floating, number, real
from massieu.foundation.doors import door
from massieu.measures import Gaussian
from massieu.papers.theory.equilibrium import entropy_gain, key_law, whitened_map
from massieu.papers.theory.growth import cumulant_growth

ORDERS = (3, 4)
"""Of the cumulants whose growth is reported."""


class EquilibriumResult(NamedTuple):
    """What the theorem says of this cloud and this layer. C is the cloud's covariance, M the matrix, K = MCMᵀ."""

    mismatch: Float[Tensor, "*batch"]
    """‖MC − 1‖/√d in Frobenius's norm: 0 where M is the cloud's precision, which the theorem takes it to be."""
    commutator: Float[Tensor, "*batch"]
    """‖CK − KC‖/(‖C‖‖K‖): 0 where the layer and full renormalisation would leave every particle of a Gaussian in place."""
    displacement: Float[Tensor, "*batch"]
    """‖W − 1‖/√d for the `whitened_map` W: how far they would move it, root mean square in standard deviations."""
    entropy_gain: Float[Tensor, "*batch"]
    """log det(1 + step·K), nats a layer: what a renormalisation has to take back."""
    growth: Float[Tensor, "*batch d orders"]
    """`cumulant_growth` of the orders 3 and 4 along C's principal axes, largest variance first."""
    skewness: Float[Tensor, "*batch d"]
    """Along these axes, in standard errors √(6/n) of that many independent Gaussian particles."""
    excess_kurtosis: Float[Tensor, "*batch d"]
    """The same, in standard errors √(24/n)."""
    norm_spread: Float[Tensor, "*batch"]
    """Standard deviation of ‖x‖ by its mean: √(1/(2d)) of a wide standard Gaussian; 0 on a sphere, as after RMSNorm."""
    log_keys_needed: Float[Tensor, "*batch"]
    """Median over tokens of xᵀKx, nats: attention over many fewer than e to that many keys is not the population's (S15)."""


@door(step=real)
def equilibrium_report(
    particles: Float[Tensor, "*batch n d"], matrix: Float[Tensor, "d d"], step: float = 1.0
) -> EquilibriumResult:
    """Measure the equilibrium theorem's assumptions and consequences on hidden states and a score matrix.

    Every number is one of the Gaussian theory; how far the cloud is from being Gaussian stands beside them. Off the axes on
    which C and M commute, `growth` takes M's diagonal on C's axes and is approximate.

    Args:
        particles: What the attention layer reads, after the norm before it; n > d.
        matrix: M with attention's scale in it: the score of tokens i and j is x_iᵀMx_j, for a head W_QᵀW_K/√d_h.
        step: What multiplies the output of attention, for a head whose W_OW_V is close to step·M.

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
    particles, matrix = particles.detach().double(), matrix.detach().double()
    count, width = particles.shape[-2:]
    location = particles.mean(-2)
    centred = particles - location.unsqueeze(-2)
    covariance = centred.mT @ centred / count
    law = Gaussian(location, covariance, location.new_zeros((*location.shape, 0)))
    keys = key_law(law, matrix)
    product = covariance @ keys.covariance
    identity = torch.eye(width, dtype=matrix.dtype, device=matrix.device)
    size = torch.linalg.matrix_norm(covariance) * torch.linalg.matrix_norm(keys.covariance)

    variances, axes = (part.flip(-1) for part in torch.linalg.eigh(covariance))
    link = (axes * (matrix @ axes)).sum(-2)
    whitened = centred @ axes / variances.sqrt().unsqueeze(-2)
    norms = particles.norm(dim=-1)
    return EquilibriumResult(
        _size_per_root(matrix @ covariance - identity),
        torch.linalg.matrix_norm(product - product.mT) / torch.where(size == 0, 1.0, size),
        _size_per_root(whitened_map(law, keys, step) - identity),
        entropy_gain(keys, step),
        torch.stack([cumulant_growth(order, step * link, link * variances) for order in ORDERS], -1),
        (whitened**3).mean(-2) / (6 / count) ** 0.5,
        ((whitened**4).mean(-2) - 3) / (24 / count) ** 0.5,
        norms.std(-1, correction=0) / norms.mean(-1),
        ((particles @ keys.covariance) * particles).sum(-1).median(-1).values,
    )


def _size_per_root(matrix: Tensor) -> Tensor:
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
