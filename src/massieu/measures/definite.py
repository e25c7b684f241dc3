"""One decision on whether a matrix is positive definite, which does not hang on a last bit."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor


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
