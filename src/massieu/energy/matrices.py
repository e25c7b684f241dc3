"""Linear systems and determinants with right derivatives of second order within `torch.func.vmap`.

There `torch.linalg.solve`, `lu_solve`, `det`, `slogdet` and `logdet` have wrong ones (torch 2.13), and say nothing.
"""

import torch
from jaxtyping import Float
from torch import Tensor


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
