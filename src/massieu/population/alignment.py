"""Is a head's score matrix the precision of its input? The hypothesis W_QᵀW_K ∝ Σ⁻¹ (S11)."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import check_finite, check_values, floating, number, real, whole_number
from massieu.foundation.doors import door
from massieu.foundation.short_repr import fields_html, fields_repr


class AlignmentResult(NamedTuple):
    """How well sym(M) fits a power of a covariance on the span of sym(M), compared with random rotations of sym(M)."""

    cosine: float
    """⟨A, B⟩/(‖A‖‖B‖) of the two restricted matrices: 1 if they are proportional."""
    null: Float[Tensor, "draws"]
    """The same for random rotations of sym(M): matrices with its spectrum that know nothing of the covariance."""
    share: float
    """(1 + how many of the null are at least the cosine)/(1 + draws): the p-value of the test against the null."""
    rank: int
    """Rank of sym(M): at most twice a head's width."""
    symmetric_share: float
    """‖sym(M)‖/‖M‖: √½ for independent entries, 1 for a symmetric matrix."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


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

    The cosine of sym(M) with C^power is taken on the span of sym(M). One hypothesis does not depend on how hidden states are
    interpreted: M ∝ C⁻¹, with C the covariance of the *layer's input*, after the norm before it (trap 18). The two
    interpretations differ in their other hypothesis. If hidden states are natural parameters, M ∝ F for F = Cov(keys' law),
    `power=1`; if they are means, M ∝ F⁻¹ for F = Cov(hidden), `power=-1`. At the Gaussian equilibrium both say
    M = Cov(hidden)⁻¹.

    Args:
        score: M = W_QᵀW_K of one head, or summed over heads; the score of tokens i and j is x_iᵀMx_j.
        covariance: C, symmetric; positive definite for a negative or fractional power.
        power: −1 for the hypothesis; compare it with 1, ½, 0, −½.
        draws: Number of random rotations.
        generator: Source of the rotations; None: torch's default generator.

    Returns:
        Everything in float64. A head of low rank is compared on its own span alone: it says nothing of other directions.

    Raises:
        ValueError: the matrices have not both the shape (d, d), are not finite, the covariance is not symmetric or has no
            such power, the symmetric part of M is zero, or `draws` is below 1.
        TypeError: a matrix is no floating-point tensor, the power no number, or `draws` no integer.

    Example:
        >>> import torch
        >>> from massieu.population import precision_alignment
        >>> covariance = torch.diag(torch.tensor([1.0, 2.0, 4.0]))
        >>> found = precision_alignment(covariance.inverse(), covariance, generator=torch.Generator())
        >>> round(found.cosine, 3), found.rank
        (1.0, 3)
    """
    _check(score, covariance, power, draws)
    # Cosines do not depend on scale, and squares of very large or small entries would overflow or vanish.
    score = _of_size_one(score.detach().double())
    covariance = _of_size_one(covariance.detach().double())
    symmetric_part = 0.5 * (score + score.mT)
    eigenvalues, eigenvectors = torch.linalg.eigh(symmetric_part)
    rounding = symmetric_part.shape[-1] * torch.finfo(symmetric_part.dtype).eps
    is_nonzero = eigenvalues.abs() > rounding * torch.linalg.matrix_norm(score, 2)
    if not bool(is_nonzero.any()):
        raise ValueError("precision_alignment needs a score matrix whose symmetric part is not zero")
    eigenvalues = eigenvalues[is_nonzero]
    basis = eigenvectors[:, is_nonzero]
    rank = int(is_nonzero.sum())
    target = _power(covariance, power)
    device = None if generator is None else generator.device
    normal = torch.randn(draws, len(target), rank, dtype=target.dtype, generator=generator, device=device)
    normal = normal.to(target.device)
    # The bases of a QR factorisation are uniform up to the vectors' signs, which do not change the cosine.
    random_bases, _ = torch.linalg.qr(normal)
    cosine = _cosine(eigenvalues, basis, target)
    null = _cosine(eigenvalues, random_bases, target)
    share = (1 + int((null >= cosine).sum())) / (1 + draws)
    symmetric_share = torch.linalg.matrix_norm(symmetric_part) / torch.linalg.matrix_norm(score)
    return AlignmentResult(float(cosine), null, share, rank, float(symmetric_share))


def _of_size_one(matrix: Tensor) -> Tensor:
    size = matrix.abs().max()
    return matrix / torch.where(size == 0, 1.0, size)


def _cosine(eigenvalues: Tensor, basis: Tensor, target: Tensor) -> Tensor:
    """The cosine of basis·diag(eigenvalues)·basisᵀ with the target restricted to the span of the basis."""
    # Both in coordinates of the orthonormal basis, where the first matrix is diagonal.
    restricted = basis.mT @ target @ basis
    inner = (eigenvalues * restricted.diagonal(dim1=-2, dim2=-1)).sum(-1)
    return inner / (eigenvalues.norm() * torch.linalg.matrix_norm(restricted))


def _power(covariance: Tensor, power: float) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    rounding = len(values) * torch.finfo(values.dtype).eps * values[-1].abs()
    needs_positive = power < 0 or power != int(power)
    if needs_positive and not bool(values[0] > rounding):
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
