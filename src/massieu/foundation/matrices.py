"""Tests of positive definiteness that do not depend on a last bit, and linear algebra with correct second derivatives.

Within `torch.func.vmap`, second derivatives of `torch.linalg.solve`, `lu_solve`, `det`, `slogdet` and `logdet` are wrong
without any error (torch 2.13); those of `solve`, `log_determinant` and `square_root` here are correct. Forward mode within
forward mode gives half of the second derivative of `torch.linalg.solve`.
"""

import math

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor

from massieu.foundation.transforms import all_true, derivative_orders, unwrapped


def eigenvalue_rounding(size: int, dtype: torch.dtype) -> float:
    """Bound of the error of an n × n matrix' eigenvalues, in units of the largest: max(n, 4√n)·ε.

    The error is some √n·ε if roundings are independent, and n·ε at worst. An eigenvalue below this bound may be 0 on one
    processor, and have either sign on others.
    """
    return max(size, 4 * math.sqrt(size)) * torch.finfo(dtype).eps


@torch.no_grad()
def is_singular(matrix: Float[Tensor, "*lead n n"]) -> Bool[Tensor, "*lead"]:
    """Whether a symmetric matrix is not positive definite, or singular to rounding.

    That is, whether the condition number of the matrix scaled to a diagonal of ones, H_ij = A_ij/√(A_ii A_jj), is above
    1/`eigenvalue_rounding`. A Cholesky factor of such a matrix may exist on one processor and not on another; here it
    counts as singular on all. The units of the coordinates do not matter. A matrix with a NaN or an infinity is singular.
    """
    # A diagonal entry that is not positive becomes NaN, and with it the matrix counts as singular.
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    units = torch.where(diagonal > 0, diagonal, torch.nan).sqrt()
    # Divided by one root after the other: the product of two may overflow.
    scaled = matrix / units.unsqueeze(-1) / units.unsqueeze(-2)
    is_finite = scaled.isfinite().all(-1).all(-1)
    size = matrix.shape[-1]
    if size == 0:
        return ~is_finite
    # `eigvalsh` may fail for a matrix with NaN, so that it gets the identity in its place.
    identity = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
    eigenvalues = torch.linalg.eigvalsh(torch.where(is_finite[..., None, None], scaled, identity))
    rounding = eigenvalue_rounding(size, matrix.dtype) * eigenvalues[..., -1]
    return ~(is_finite & (eigenvalues[..., 0] > rounding))


def solve(matrix: Float[Tensor, "*lead n n"], right: Float[Tensor, "*lead n k"]) -> Float[Tensor, "*lead n k"]:
    """matrix⁻¹ right; its entries are not finite if the matrix is singular."""
    return torch.linalg.inv_ex(matrix).inverse @ right


def least_squares(matrix: Float[Tensor, "*lead m n"], right: Float[Tensor, "*lead m k"]) -> Float[Tensor, "*lead n k"]:
    """The x of least ‖matrix·x − right‖, and among several that of least norm; by singular values, on a CPU.

    PyTorch's default driver of `torch.linalg.lstsq` reads uninitialised memory (torch 2.13): its last bits differ from call
    to call, and for a matrix of deficient rank its answer may be wrong.
    """
    return torch.linalg.lstsq(matrix, right, driver="gelsd").solution


def eigenvalues(matrix: Float[Tensor, "*lead n n"]) -> Complex[Tensor, "*lead n"]:
    """The eigenvalues of a matrix that need not be symmetric; NaN if the matrix has a NaN or an infinity.

    `torch.linalg.eigvals` ends the process at such a matrix (MKL, torch 2.13 and 2.14).
    """
    is_finite = matrix.isfinite().all(-1).all(-1)
    values = torch.linalg.eigvals(torch.where(is_finite[..., None, None], matrix, 0.0))
    return torch.where(is_finite.unsqueeze(-1), values, torch.nan)


def log_determinant(matrix: Float[Tensor, "*lead n n"]) -> Float[Tensor, "*lead"]:
    """log det; NaN if the determinant is negative, −inf if it is 0."""
    factors, pivots, _ = torch.linalg.lu_factor_ex(matrix)
    diagonal = factors.diagonal(dim1=-2, dim2=-1)
    # The sign of the determinant: each negative pivot changes it, and each row that was exchanged. Rows count from 1.
    rows = torch.arange(1, matrix.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    sign_changes = (diagonal < 0).sum(-1) + (pivots != rows).sum(-1)
    return torch.where(sign_changes % 2 == 0, diagonal.abs().log().sum(-1), torch.nan)


def square_root(matrix: Float[Tensor, "*lead n n"], *, owner: str) -> Float[Tensor, "*lead n n"]:
    """The symmetric square root S of a covariance Σ, with derivatives that exist at repeated eigenvalues too.

    Derivatives through eigenvectors would not. Each chord step S + L(Σ − S²), with L the inverse of X ↦ SX + XS at the
    solution, makes derivatives of one more order correct. As many steps are made as `torch.func` transforms need, and at
    least three.

    Raises:
        ValueError: the matrix is not finite, or not positive definite; the message begins with `owner`, whose covariance it is.
    """
    if not all_true(matrix.isfinite()):
        raise ValueError(f"{owner} needs a finite covariance, got one with a NaN or an infinity")
    eigenvalues, vectors = torch.linalg.eigh(matrix.detach())
    smallest = eigenvalues[..., 0]
    largest = eigenvalues[..., -1].abs()
    rounding = eigenvalue_rounding(matrix.shape[-1], matrix.dtype) * largest
    if not all_true(smallest > rounding):
        raise ValueError(
            f"{owner} needs a positive definite covariance, got a least eigenvalue of {float(unwrapped(smallest).min()):.3g} "
            f"beside {float(unwrapped(largest).max()):.3g}; more points or an eps make it so"
        )
    roots = eigenvalues.sqrt()
    root = (vectors * roots.unsqueeze(-2)) @ vectors.mT
    # In the basis of eigenvectors, X ↦ SX + XS multiplies the entry ij by √λ_i + √λ_j.
    sums = roots.unsqueeze(-1) + roots.unsqueeze(-2)
    # The residual of the root's value, which is rounding, is taken off as a constant: steps change derivatives alone.
    rounding_residual = (matrix - root @ root).detach()
    for _ in range(derivative_orders()):
        residual = matrix - root @ root - rounding_residual
        root = root + vectors @ ((vectors.mT @ residual @ vectors) / sums) @ vectors.mT
    return root
