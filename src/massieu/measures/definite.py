"""One decision on whether a matrix is positive definite, which does not hang on a last bit."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

_MARGIN = 4
"""How many times the rounding of an eigenvalue, in root mean square, the least one must be."""


@torch.no_grad()
def is_singular(matrix: Float[Tensor, "*lead n n"]) -> Bool[Tensor, "*lead"]:
    """Where a symmetric matrix is not positive definite, or singular to rounding.

    That is, where the condition number of the matrix scaled to a diagonal of ones, H_ij = A_ij/√(A_ii A_jj), is above
    1/(4√n·ε). An eigenvalue of H is found to some √n·ε of the largest, so that of a singular matrix may have either
    sign, and a Cholesky factor exists on one processor and not on the next: here it is singular on all. Which units the
    coordinates have plays no part. A matrix with a NaN or an infinity is singular.
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
    least = _MARGIN * math.sqrt(size) * torch.finfo(matrix.dtype).eps * eigenvalues[..., -1]
    return ~(usable & (eigenvalues[..., 0] > least))
