"""Linear systems, determinants and symmetric roots with right derivatives of second order within `torch.func.vmap`.

There `torch.linalg.solve`, `lu_solve`, `det`, `slogdet` and `logdet` have wrong ones (torch 2.13), and say nothing.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.measures.definite import eigenvalue_rounding
from massieu.measures.value import values_are_readable

_ORDERS = 3
"""Orders of derivatives of a matrix's root that are right."""


def solve(matrix: Float[Tensor, "*lead n n"], right: Float[Tensor, "*lead n k"]) -> Float[Tensor, "*lead n k"]:
    """matrix⁻¹ right; not finite where the matrix is singular."""
    return torch.linalg.inv_ex(matrix).inverse @ right


def log_determinant(matrix: Float[Tensor, "*lead n n"]) -> Float[Tensor, "*lead"]:
    """log det; NaN where the determinant is negative, −inf where it is 0."""
    factors, pivots, _ = torch.linalg.lu_factor_ex(matrix)
    diagonal = factors.diagonal(dim1=-2, dim2=-1)
    rows = torch.arange(1, matrix.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    flips = (diagonal < 0).sum(-1) + (pivots != rows).sum(-1)
    return torch.where(flips % 2 == 0, diagonal.abs().log().sum(-1), torch.nan)


def square_root(matrix: Float[Tensor, "*lead n n"], *, owner: str) -> Float[Tensor, "*lead n n"]:
    """The symmetric root, with derivatives that do not pass through eigenvectors, which repeated eigenvalues do not have.

    Each chord step S + L(Σ − S²), L the inverse of X ↦ SX + XS at the solution, makes one more order right.

    Raises:
        ValueError: the matrix is not finite, or not positive definite; the message begins with `owner`, whose covariance it is.
    """
    if values_are_readable(matrix) and not bool(matrix.isfinite().all()):
        raise ValueError(f"{owner} needs a finite covariance, got one with a NaN or an infinity")
    eigenvalues, vectors = torch.linalg.eigh(matrix.detach())
    smallest, size = eigenvalues[..., 0], eigenvalues[..., -1].abs()
    least = eigenvalue_rounding(matrix.shape[-1], matrix.dtype) * size
    if values_are_readable(smallest) and not bool((smallest > least).all()):
        raise ValueError(
            f"{owner} needs a positive definite covariance, got a least eigenvalue of {float(smallest.min()):.3g} "
            f"beside {float(size.max()):.3g}; more points or an eps make it so"
        )
    roots = eigenvalues.sqrt()
    root = (vectors * roots.unsqueeze(-2)) @ vectors.mT
    sums = roots.unsqueeze(-1) + roots.unsqueeze(-2)
    left = (matrix - root @ root).detach()
    for _ in range(_ORDERS):
        missing = matrix - root @ root - left
        root = root + vectors @ ((vectors.mT @ missing @ vectors) / sums) @ vectors.mT
    return root
