"""What a head's weights say: is W_O W_V a gradient step on the head's own log Z (S3.2, E2), is the score mutual (S11)?

All norms and products of the D × D maps are taken through Dh × Dh matrices; the maps themselves are never formed.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from massieu.probing.replay import HeadMaps


@dataclass(frozen=True, eq=False)
class MapStatistics:
    """Statistics of the weights of one site.

    Attributes:
        cosine: entry (g, h) is the cosine of head g's W_O W_V with head h's W_QᵀW_K; the diagonal is the head's own.
        symmetric_share: ‖(M + Mᵀ)/2‖² / ‖M‖² of M = W_QᵀW_K.
        rotation_deviation: standard deviation of the cosine after independent random rotations, exactly 1/D.
    """

    cosine: Float64[Tensor, "H H"]
    symmetric_share: Float64[Tensor, " H"]
    rotation_deviation: float


def map_statistics(maps: HeadMaps) -> MapStatistics:
    """Cosines and symmetric shares of all heads of a site.

    ⟨O V, QᵀK⟩ = ⟨Q O, K Vᵀ⟩, ‖O V‖² = ⟨OᵀO, V Vᵀ⟩, ‖QᵀK‖² = ⟨Q Qᵀ, K Kᵀ⟩ and ⟨M, Mᵀ⟩ = tr((K Qᵀ)²).
    """
    query, key, value, output = maps.query, maps.key, maps.value, maps.output
    write_norm = _dot(output.mT @ output, value @ value.mT).sqrt()
    score_norm = _dot(query @ query.mT, key @ key.mT).sqrt()
    through = torch.einsum("hkd,gdv->ghkv", query, output)
    back = torch.einsum("hkd,gvd->ghkv", key, value)
    cosine = (through * back).sum((-2, -1)) / (write_norm[:, None] * score_norm[None])
    cross = key @ query.mT
    symmetric = 0.5 * (1 + _dot(cross, cross.mT) / score_norm.square())
    return MapStatistics(cosine, symmetric, 1.0 / query.shape[-1])


def _dot(left: Float[Tensor, "H A B"], right: Float[Tensor, "H A B"]) -> Float[Tensor, " H"]:
    return (left * right).sum((-2, -1))
