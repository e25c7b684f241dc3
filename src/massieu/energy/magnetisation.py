"""What is known of a spin model's sites, and the block matrices that it is computed with."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.solve import FixedPointResult


class Magnetisation(NamedTuple):
    """What a spin model's sites do."""

    mean: Float[Tensor, "N d"]
    """⟨S_i⟩."""
    covariance: Float[Tensor, "N d N d"]
    """⟨S_i S_jᵀ⟩ − ⟨S_i⟩⟨S_j⟩ᵀ: exact, or by linear response, ∂⟨S_i⟩/∂field_j."""
    log_partition: Float[Tensor, ""]
    """log E exp(½ Σ SᵀJS) over the sites' probabilities: 0 without couplings. Nats."""
    solution: FixedPointResult | None
    """Of the equations that were solved: status, residual, steps; None for exact results."""


def block_diagonal(blocks: Float[Tensor, "N d d"]) -> Float[Tensor, "Nd Nd"]:
    """The matrix with these blocks on its diagonal."""
    number, size, _ = blocks.shape
    same = torch.eye(number, dtype=blocks.dtype, device=blocks.device)
    return torch.einsum("ij,iab->iajb", same, blocks).reshape(number * size, number * size)


def diagonal_blocks(matrix: Float[Tensor, "Nd Nd"], number: int) -> Float[Tensor, "N d d"]:
    """The blocks on the diagonal of a matrix."""
    size = len(matrix) // number
    return matrix.reshape(number, size, number, size).diagonal(dim1=0, dim2=2).movedim(-1, 0)


def as_matrix(coupling: Float[Tensor, "N N d d"]) -> Float[Tensor, "Nd Nd"]:
    """Blocks laid out as one matrix."""
    number, _, size, _ = coupling.shape
    return coupling.transpose(1, 2).reshape(number * size, number * size)


def identity_like(matrix: Float[Tensor, "*lead n n"]) -> Float[Tensor, "n n"]:
    """The unit matrix of this size, dtype and device."""
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
