"""Decisions on positive definiteness that do not hang on a last bit, and linear algebra with right second derivatives.

Within `torch.func.vmap`, `torch.linalg.solve`, `lu_solve`, `det`, `slogdet` and `logdet` have wrong derivatives of second
order (torch 2.13), and say nothing; those of `solve`, `log_determinant` and `square_root` are right. Forward mode within
forward mode gives half of the second derivative of `torch.linalg.solve`.
"""

import math

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor

from massieu.foundation.transforms import derivative_orders, every, unwrapped


def eigenvalue_rounding(size: int, dtype: torch.dtype) -> float:
    """How far the eigenvalues of an n × n matrix may be off, in units of the largest, with a margin: (n or 4√n)·ε.

    An eigenvalue is off by some √n·ε where roundings are independent, by n·ε at worst. What is below this is 0 on some
    processor, and has either sign on others.
    """
    return max(size, 4 * math.sqrt(size)) * torch.finfo(dtype).eps


@torch.no_grad()
def is_singular(matrix: Float[Tensor, "*lead n n"]) -> Bool[Tensor, "*lead"]:
    """Where a symmetric matrix is not positive definite, or singular to rounding.

    That is, where the condition number of the matrix scaled to a diagonal of ones, H_ij = A_ij/√(A_ii A_jj), is above
    1/`eigenvalue_rounding`. A Cholesky factor of such a matrix exists on one processor and not on the next: here it is
    singular on all. Which units the coordinates have plays no part. A matrix with a NaN or an infinity is singular.
    """
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    units = torch.where(diagonal > 0, diagonal, torch.nan).sqrt()
    # By one root after the other: the product of two may overflow.
    scaled = matrix / units.unsqueeze(-1) / units.unsqueeze(-2)
    usable = scaled.isfinite().all(-1).all(-1)
    size = matrix.shape[-1]
    if size == 0:
        return ~usable
    one = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
    eigenvalues = torch.linalg.eigvalsh(torch.where(usable[..., None, None], scaled, one))
    least = eigenvalue_rounding(size, matrix.dtype) * eigenvalues[..., -1]
    return ~(usable & (eigenvalues[..., 0] > least))


def solve(matrix: Float[Tensor, "*lead n n"], right: Float[Tensor, "*lead n k"]) -> Float[Tensor, "*lead n k"]:
    """matrix⁻¹ right; not finite where the matrix is singular."""
    return torch.linalg.inv_ex(matrix).inverse @ right


def least_squares(matrix: Float[Tensor, "*lead m n"], right: Float[Tensor, "*lead m k"]) -> Float[Tensor, "*lead n k"]:
    """The x of the least ‖matrix·x − right‖, and of the least norm among several; by singular values, on a CPU.

    PyTorch's default driver of `torch.linalg.lstsq` reads memory that nobody wrote (torch 2.13): its last bits differ from call
    to call, and at a matrix of lower rank its answer may be wrong.
    """
    return torch.linalg.lstsq(matrix, right, driver="gelsd").solution


def eigenvalues(matrix: Float[Tensor, "*lead n n"]) -> Complex[Tensor, "*lead n"]:
    """Of a matrix that need not be symmetric; NaN where the matrix has a NaN or an infinity.

    `torch.linalg.eigvals` ends the process there (MKL, torch 2.13 and 2.14).
    """
    finite = matrix.isfinite().all(-1).all(-1)
    found = torch.linalg.eigvals(torch.where(finite[..., None, None], matrix, 0.0))
    return torch.where(finite.unsqueeze(-1), found, torch.nan)


def log_determinant(matrix: Float[Tensor, "*lead n n"]) -> Float[Tensor, "*lead"]:
    """log det; NaN where the determinant is negative, −inf where it is 0."""
    factors, pivots, _ = torch.linalg.lu_factor_ex(matrix)
    diagonal = factors.diagonal(dim1=-2, dim2=-1)
    rows = torch.arange(1, matrix.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    flips = (diagonal < 0).sum(-1) + (pivots != rows).sum(-1)
    return torch.where(flips % 2 == 0, diagonal.abs().log().sum(-1), torch.nan)


def square_root(matrix: Float[Tensor, "*lead n n"], *, owner: str) -> Float[Tensor, "*lead n n"]:
    """The symmetric root, with derivatives that do not pass through eigenvectors, which repeated eigenvalues do not have.

    Each chord step S + L(Σ − S²), L the inverse of X ↦ SX + XS at the solution, makes one more order right: as many as
    `torch.func` transforms take, and three at least.

    Raises:
        ValueError: the matrix is not finite, or not positive definite; the message begins with `owner`, whose covariance it is.
    """
    if not every(matrix.isfinite()):
        raise ValueError(f"{owner} needs a finite covariance, got one with a NaN or an infinity")
    eigenvalues, vectors = torch.linalg.eigh(matrix.detach())
    smallest, size = eigenvalues[..., 0], eigenvalues[..., -1].abs()
    least = eigenvalue_rounding(matrix.shape[-1], matrix.dtype) * size
    if not every(smallest > least):
        raise ValueError(
            f"{owner} needs a positive definite covariance, got a least eigenvalue of {float(unwrapped(smallest).min()):.3g} "
            f"beside {float(unwrapped(size).max()):.3g}; more points or an eps make it so"
        )
    roots = eigenvalues.sqrt()
    root = (vectors * roots.unsqueeze(-2)) @ vectors.mT
    sums = roots.unsqueeze(-1) + roots.unsqueeze(-2)
    left = (matrix - root @ root).detach()
    for _ in range(derivative_orders()):
        missing = matrix - root @ root - left
        root = root + vectors @ ((vectors.mT @ missing @ vectors) / sums) @ vectors.mT
    return root
