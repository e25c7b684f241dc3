"""Cholesky factors, and one decision on whether a matrix is positive definite that does not hang on a last bit."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def rounding(size: int, dtype: torch.dtype) -> float:
    """What a pivot may be of its diagonal entry by rounding alone, with a margin: 8√n·ε for n coordinates."""
    return 8 * math.sqrt(size) * torch.finfo(dtype).eps


def cholesky(matrix: Float[Tensor, "*lead n n"]) -> tuple[Float[Tensor, "*lead n n"], Bool[Tensor, "*lead"]]:
    """The lower factor L, and where the matrix is not positive definite, or singular to rounding.

    A computed factor is the exact one of a matrix whose entry ij is off by at most (n + 1)·ε·√(A_ii A_jj) (Higham,
    Accuracy and Stability of Numerical Algorithms, theorem 10.3), about √n·ε of it where roundings are independent. A
    pivot L_ii² below 8√n·ε·A_ii may have either sign on another processor: such a matrix counts as singular on all.
    The decision does not change when a coordinate is rescaled. What a singular matrix's factor holds is not defined.
    """
    factor, status = torch.linalg.cholesky_ex(matrix)
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    least = rounding(matrix.shape[-1], matrix.dtype) * diagonal
    certain = (factor.diagonal(dim1=-2, dim2=-1).square() > least).all(-1)
    return factor, (status != 0) | ~certain
