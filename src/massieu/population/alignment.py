"""Is the score matrix the precision of what attention reads: the hypothesis W_QᵀW_K ≈ Σ⁻¹, free of conventions (S11)."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import check_finite, check_values, floating, number, real, whole_number
from massieu.foundation.doors import door


class AlignmentResult(NamedTuple):
    """How well sym(M) fits a power of a covariance on M's span, beside random orientations of M."""

    cosine: float
    """Of the two restricted matrices as vectors, ⟨A, B⟩/(‖A‖‖B‖): 1 where they are proportional."""
    null: Float[Tensor, "draws"]
    """The same for sym(M) turned at random: matrices with M's spectrum and no knowledge of the covariance."""
    share: float
    """(1 + how many of the null are at least the cosine)/(1 + draws): the p-value of the test against the null."""
    rank: int
    """Of sym(M): at most twice a head's width."""
    symmetric_share: float
    """‖sym(M)‖/‖M‖: √½ for independent entries, 1 for a symmetric matrix."""


@door(power=real)
def precision_alignment(
    score: Float[Tensor, "d d"],
    covariance: Float[Tensor, "d d"],
    *,
    power: float = -1.0,
    draws: int = 200,
    generator: torch.Generator | None = None,
) -> AlignmentResult:
    """Cosine between the symmetric part of a score matrix and a power of the tokens' covariance, and its null.

    The cosine of sym(M) with C^power is taken on the span of sym(M). The hypothesis that does not depend on what a
    hidden state is taken for is M ∝ C⁻¹, with C the covariance of the *layer's input*, after the norm before it (trap
    18). The two readings differ in which other covariance they compare with: where hidden states are natural
    parameters, M ∝ F for F = Cov(keys' law), `power=1`; where they are means, M ∝ F⁻¹ for F = Cov(hidden), `power=-1`.
    At the Gaussian equilibrium both say M = Cov(hidden)⁻¹.

    Args:
        score: M = W_QᵀW_K of one head, or summed over heads; the score of tokens i and j is x_iᵀMx_j.
        covariance: C, symmetric; positive definite for a negative or fractional power.
        power: −1 for the hypothesis; 1, ½, 0, −½ are what it has to beat.
        draws: Of the null.
        generator: Of the null; torch's default for None.

    Returns:
        Everything in float64. A head of low rank is compared on its own span alone: it says nothing of other directions.

    Raises:
        ValueError: shapes that are not (d, d) twice, a covariance that is not symmetric or has no such power, a symmetric part
            of M that is zero, something that is not finite, or no draw.
        TypeError: no floating-point tensors, a power that is no number, `draws` that is no integer.

    Example:
        >>> import torch
        >>> from massieu.population import precision_alignment
        >>> covariance = torch.diag(torch.tensor([1.0, 2.0, 4.0]))
        >>> found = precision_alignment(covariance.inverse(), covariance, generator=torch.Generator())
        >>> round(found.cosine, 3), found.rank
        (1.0, 3)
    """
    _check(score, covariance, power, draws)
    # Cosines know no scale, and squares of very large or small entries would overflow or vanish.
    score, covariance = (_of_size_one(matrix.detach().double()) for matrix in (score, covariance))
    even = 0.5 * (score + score.mT)
    levels, vectors = torch.linalg.eigh(even)
    rounding = even.shape[-1] * torch.finfo(even.dtype).eps
    kept = levels.abs() > rounding * torch.linalg.matrix_norm(score, 2)
    if not bool(kept.any()):
        raise ValueError("precision_alignment needs a score matrix whose symmetric part is not zero")
    levels, basis = levels[kept], vectors[:, kept]
    target = _power(covariance, power)
    rank = int(kept.sum())
    device = None if generator is None else generator.device
    normal = torch.randn(draws, len(target), rank, dtype=target.dtype, generator=generator, device=device)
    normal = normal.to(target.device)
    # Uniform up to the signs of the vectors, which no cosine sees.
    frames, _ = torch.linalg.qr(normal)
    cosine = _cosine(levels, basis, target)
    null = _cosine(levels, frames, target)
    share = (1 + int((null >= cosine).sum())) / (1 + draws)
    symmetric = torch.linalg.matrix_norm(even) / torch.linalg.matrix_norm(score)
    return AlignmentResult(float(cosine), null, share, rank, float(symmetric))


def _of_size_one(matrix: Tensor) -> Tensor:
    size = matrix.abs().max()
    return matrix / torch.where(size == 0, 1.0, size)


def _cosine(levels: Tensor, basis: Tensor, target: Tensor) -> Tensor:
    """Of basis·diag(levels)·basisᵀ and the target's restriction to the basis."""
    restricted = basis.mT @ target @ basis
    inner = (levels * restricted.diagonal(dim1=-2, dim2=-1)).sum(-1)
    return inner / (levels.norm() * torch.linalg.matrix_norm(restricted))


def _power(covariance: Tensor, power: float) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    least = len(values) * torch.finfo(values.dtype).eps * values[-1].abs()
    if (power < 0 or power != int(power)) and not bool(values[0] > least):
        raise ValueError(
            f"precision_alignment needs a positive definite covariance for the power {power:g}, got a least eigenvalue of "
            f"{float(values[0]):.3g} beside {float(values[-1]):.3g} in units of its "
            "largest entry; more tokens than dimensions, or shrinkage, make it so"
        )
    return (vectors * values**power) @ vectors.mT


def _check(score: Tensor, covariance: Tensor, power: float, draws: int) -> None:
    width = score.shape[-1] if floating("score", score).ndim else 0
    if tuple(score.shape) != (width, width) or score.shape != floating("covariance", covariance).shape:
        raise ValueError(
            f"score and covariance must have one shape (d, d), got {tuple(score.shape)} and {tuple(covariance.shape)}"
        )
    check_values(score=score, covariance=covariance)
    check_finite(score=score, covariance=covariance)
    whole_number("draws", draws, least=1)
    number("power", power)
    rounding = 1e3 * torch.finfo(covariance.dtype).eps * covariance.abs().max()
    if bool(((covariance - covariance.mT).abs() > rounding).any()):
        raise ValueError("covariance must be symmetric")
