"""How far apart the tokens of a cloud are, and how many directions they fill.

A cloud is a tensor ``(*batch, n, d)``: n tokens in R^d, equally weighted. Everything is computed in float64 whatever
the input's dtype, and relative to one of the tokens, so that a large common offset costs no accuracy.

A *collapsed* cloud (all tokens equal, a single token included) has defined values instead of NaN: pairwise distance 0,
effective rank 0 and log-determinant −inf. A cloud that holds a NaN or an infinity gives NaN, and leaves the other clouds of
its batch untouched.
"""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import floating
from massieu.population.reading import (
    ObservableReading,
    Processes,
    centred,
    check_call,
    check_cloud,
    check_single_cloud,
    summed,
    token_counts,
)

_FEW = 25
"""Tokens whose differences are formed one by one. Distances of more come from inner products, in a quarter of the time."""
_EMPTY = 1e-12
"""A direction counts as empty if its eigenvalue is below this share of the mean eigenvalue."""


def pairwise_distance(points: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch"]:
    """Mean Euclidean distance over the n(n − 1)/2 pairs of distinct tokens.

    Two tokens closer than 1e-8 of the cloud's radius are reported at up to that distance.

    Raises:
        ValueError: ``points`` has fewer than two dimensions or no token.

    Example:
        >>> import torch
        >>> from massieu.population import pairwise_distance
        >>> pairwise_distance(torch.tensor([[0.0, 0.0], [3.0, 4.0]])).item()
        5.0
    """
    relative, count = centred(points)
    if count == 1:
        return relative.sum((-2, -1))  # A single token relative to itself: 0, or NaN if it is not finite.
    if count <= _FEW:
        distances = torch.cdist(relative, relative)
        total = distances.sum((-2, -1)) - distances.diagonal(dim1=-2, dim2=-1).sum(-1)
    else:
        total = _distances(relative @ relative.mT).sum((-2, -1))
    return total / (count * (count - 1))


def _distances(inner_products: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """‖x_i − x_j‖ = √(⟨x_i, x_i⟩ + ⟨x_j, x_j⟩ − 2⟨x_i, x_j⟩); the diagonal is 0, and so is the derivative of a distance 0."""
    squared_norms = inner_products.diagonal(dim1=-2, dim2=-1)
    squares = squared_norms[..., :, None] + squared_norms[..., None, :] - 2 * inner_products
    apart = ~torch.eye(inner_products.shape[-1], dtype=torch.bool, device=inner_products.device)
    # NaN is neither 0 nor below it, and stays.
    zero = (squares <= 0) | ~apart
    return torch.where(zero, 0.0, torch.where(zero, 1.0, squares).sqrt())


def covariance_spectrum(
    points: Float[Tensor, "*batch n d"], *, group: Processes = None
) -> Float[Tensor, "*batch rank"]:
    """Eigenvalues of the biased token covariance (1/n) Σ (x − x̄)(x − x̄)ᵀ, largest first.

    The eigenvalues are those of the n×n matrix of inner products or of the d×d covariance, whichever is smaller. There are
    ``rank = min(n − 1, d)`` of them, as no more can be positive.

    Args:
        points: The tokens.
        group: Processes that share the cloud, each with its own tokens; every one gets the spectrum of the whole cloud.

    Raises:
        ValueError: ``points`` has fewer than two dimensions or no token.

    Example:
        >>> import torch
        >>> from massieu.population import covariance_spectrum
        >>> [round(x, 3) for x in covariance_spectrum(torch.tensor([[2.0, 1.0], [-2.0, 1.0], [0.0, 1.0]])).tolist()]
        [2.667, 0.0]
    """
    processes = check_call("covariance_spectrum", points, group, partial(check_cloud, points))
    relative, count = centred(points, processes)
    dimension = relative.shape[-1]
    # X Xᵀ and XᵀX have the same positive eigenvalues. Only the second one is a sum over the tokens of all processes.
    if processes is None and count <= dimension:
        gram = relative @ relative.mT
    else:
        gram = summed(relative.mT @ relative, processes)
    finite = gram.isfinite().all(-1).all(-1)
    # The eigenvalue routine raises on a non-finite matrix, which would lose the whole batch.
    solvable = torch.where(finite[..., None, None], gram / count, 0.0)
    spectrum = torch.linalg.eigvalsh(solvable).flip(-1).clamp_min(0.0)
    spectrum = torch.where(finite[..., None], spectrum, torch.nan)
    return spectrum[..., : min(count - 1, dimension)]


def log_determinant(spectrum: Float[Tensor, "*batch rank"]) -> Float[Tensor, "*batch"]:
    """Mean log-eigenvalue, in nats per direction: log det Σ divided by the number of eigenvalues.

    Half its change is the change of the cloud's log-volume per direction. Eigenvalues below 10⁻¹² times the mean eigenvalue
    are raised to it: a direction that is empty up to rounding has log 10⁻¹² = −27.6 nats relative to the mean instead of an
    arbitrary number. The value of a cloud with empty directions depends on this choice.

    Args:
        spectrum: Eigenvalues, as returned by `covariance_spectrum`.

    Raises:
        ValueError: ``spectrum`` has no dimension.

    Example:
        >>> import torch
        >>> from massieu.population import log_determinant
        >>> round(log_determinant(torch.tensor([1.0, 1.0]).exp()).item(), 3)
        1.0
    """
    spectrum = _spectrum(spectrum)
    if spectrum.shape[-1] == 0:
        return spectrum.new_full(spectrum.shape[:-1], -torch.inf)
    return torch.maximum(spectrum, _EMPTY * spectrum.mean(-1, keepdim=True)).log().mean(-1)


def effective_rank(spectrum: Float[Tensor, "*batch rank"]) -> Float[Tensor, "*batch"]:
    """Exponential of the entropy of the normalised spectrum: between 1 and its length; 0 for a collapsed cloud.

    This is the effective rank of the covariance matrix, whose singular values are these eigenvalues. For the n×d matrix of
    tokens, whose singular values are their square roots, the same formula gives a larger number.

    Source: Roy and Vetterli, "The effective rank" (EUSIPCO 2007), definition 1.

    Example:
        >>> import torch
        >>> from massieu.population import effective_rank
        >>> round(effective_rank(torch.tensor([2.0, 2.0, 0.0])).item(), 3)
        2.0
    """
    spectrum = _spectrum(spectrum)
    trace = spectrum.sum(-1)
    collapsed = trace == 0
    shares = spectrum / torch.where(collapsed, 1.0, trace)[..., None]
    return torch.where(collapsed, 0.0, torch.special.entr(shares).sum(-1).exp())


@dataclass(frozen=True)
class CloudMoments:
    """Observable: mean and spread of the tokens, in time linear in their number.

    Records `mean` (of each coordinate), `length` (root mean square of ‖x‖), `length_of_mean` (‖x̄‖), `covariance_spectrum`,
    `log_determinant` (nats per direction) and `effective_rank`.

    Example:
        >>> import torch
        >>> from massieu.population import CloudMoments
        >>> readings = CloudMoments()(torch.tensor([[3.0, 4.0], [-3.0, -4.0]]))
        >>> readings["length"].value.item(), readings["length_of_mean"].value.item()
        (5.0, 0.0)
    """

    def __call__(self, points: Float[Tensor, "n d"], /, *, group: Processes = None) -> dict[str, ObservableReading]:
        processes = check_call("CloudMoments", points, group, partial(check_single_cloud, points))
        # Both sums in one tensor, so that processes add up once.
        sums = torch.cat([points.double().square().sum().reshape(1), points.double().sum(0)])
        means = summed(sums, processes) / sum(token_counts(points, processes))
        mean_square = means[0]
        mean = means[1:]
        spectrum = covariance_spectrum(points, group=group)
        values = {
            "mean": mean,
            "length": mean_square.sqrt(),
            "length_of_mean": mean.norm(),
            "covariance_spectrum": spectrum,
            "log_determinant": log_determinant(spectrum),
            "effective_rank": effective_rank(spectrum),
        }
        return {name: ObservableReading(value) for name, value in values.items()}


def _spectrum(spectrum: Tensor) -> Tensor:
    if floating("spectrum", spectrum).ndim < 1:
        raise ValueError("spectrum must have shape (*batch, rank), got a scalar")
    return spectrum.double()
