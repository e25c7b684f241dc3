"""Tokens that attract each other on a sphere: the energy of self-attention followed by a normalisation (N5)."""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from massieu import ops
from massieu.energy.base import Energy, promoted
from massieu.foundation.arguments import positive
from massieu.foundation.values import align

_ROUNDINGS = 16
"""A token may lie outside the sphere by this number of roundings of its dtype."""


class ClusteringEnergy(Energy):
    """The energy by which n tokens cluster: −Σ_ij exp(scale·⟨x_i, x_j⟩)/(2·scale·n²); +inf outside the unit ball.

    Its descent map moves all tokens at once to x_i ← the direction of Σ_j exp(scale·⟨x_i, x_j⟩) x_j: self-attention with
    tied queries, keys and values, followed by the projection onto the sphere, in which the softmax's denominators drop out.

    E never rises. exp lies above its tangents, so −E does above a quadratic form in X with weights W = exp(scale·XXᵀ)
    entrywise; these are positive semi-definite (Schur), so the form lies above its own tangents; and the map takes the tokens
    to where the tangent is largest. The flow in continuous time: Geshkovski et al., arXiv 2312.10794; in three dimensions and
    more almost every start ends in one cluster.

    Tokens that attend to held keys have an energy each (`HopfieldEnergy`); here the tokens are the keys as well, so that the
    gradient has a term for either part (S3).

    Attributes:
        scale: Shape (*batch), positive.

    Example:
        >>> import torch
        >>> from massieu.papers.theory import ClusteringEnergy
        >>> ClusteringEnergy.create(1.0)(torch.zeros(2, 3)).item()  # all scores are 0: −1/2
        -0.5
    """

    scale: Float[Tensor, "*batch"]

    @classmethod
    def create(cls, scale: Float[Tensor, "*batch"] | float = 1.0) -> Self:
        """Raises ValueError unless `scale` is positive and finite."""
        return cls(positive("scale", scale))

    @property
    def _event_dims(self) -> int:
        return 2

    def _energy(self, state: Tensor) -> Tensor:
        rounding = _ROUNDINGS * torch.finfo(state.dtype).eps
        state = self._checked_clouds(promoted(state))
        scale = align(self.scale.to(state), state.ndim - 2)
        scores = scale[..., None, None] * (state @ state.mT)  # (*batch_query, n, n)
        is_outside = (state.detach().norm(dim=-1) > 1 + rounding).any(-1)
        return -(scores.exp().mean((-2, -1)) / (2 * scale)).masked_fill(is_outside, -torch.inf)

    def _step(self, state: Tensor) -> Tensor:
        state = self._checked_clouds(promoted(state))
        *lead, count, width = state.shape
        if 0 in lead:
            return state
        # One head for each cloud.
        tokens = state.reshape(1, -1, count, width)
        scale = align(self.scale.to(state), state.ndim).expand(*lead, 1, 1).reshape(1, -1, 1, 1)
        output = ops.attention(scale * tokens, tokens, tokens, scale=1.0).output.reshape(state.shape)
        length = output.norm(dim=-1, keepdim=True)
        # If the sum is exactly 0 it has no direction, and the token keeps its own.
        has_direction = length != 0
        return torch.where(has_direction, output / torch.where(has_direction, length, 1.0), state)

    def _checked_clouds(self, state: Tensor) -> Tensor:
        batch = tuple(self.scale.shape)
        if state.ndim < len(batch) + 2 or tuple(state.shape[: len(batch)]) != batch or 0 in state.shape[-2:]:
            raise ValueError(
                f"ClusteringEnergy needs a state of shape {batch} + (*queries, n, d), got {tuple(state.shape)}"
            )
        return state
