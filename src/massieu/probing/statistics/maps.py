"""What a head's weights say: is W_O W_V a gradient step on the head's own log Z (S3.2, E2), is the score mutual (S11)?

Each function is a statistic of the maps of one site. It gives a number for each head, or a matrix: entry (g, h) is of head
g's write and head h's score, the diagonal the head's own, the rest the control. All norms and products of the D × D maps
are taken through Dh × Dh matrices; the maps themselves are never formed:
⟨O V, QᵀK⟩ = ⟨Q O, K Vᵀ⟩, ‖O V‖² = ⟨OᵀO, V Vᵀ⟩, ‖QᵀK‖² = ⟨Q Qᵀ, K Kᵀ⟩ and ⟨M, Mᵀ⟩ = tr((K Qᵀ)²).
"""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from massieu.probing.statistics.registry import MAPS, SHIM, measures, statistic
from massieu.probing.stream.replay import HeadMaps

_of_maps = partial(statistic, MAPS, paper=SHIM)


def _dot(left: Float[Tensor, "H A B"], right: Float[Tensor, "H A B"]) -> Float[Tensor, " H"]:
    return (left * right).sum((-2, -1))


@_of_maps(
    "Cosine of W_O W_V with W_QᵀW_K",
    formula="⟨W_O W_V, W_QᵀW_K⟩ / (‖W_O W_V‖ ‖W_QᵀW_K‖), norm gains folded in",
    claim="S3.2, S25, E2",
    caveat="Compare it with the other heads of the layer: random rotations are too easy a control. "
    "For rotary models it is the cosine at offset zero.",
    control="mismatched",
    signed=True,
)
def write_score_cosine(maps: HeadMaps) -> Float64[Tensor, "H H"]:
    """Do the head's weights make its write a gradient step on its own log Z (1 if they do)?"""
    write_norm = _dot(maps.output.mT @ maps.output, maps.value @ maps.value.mT).sqrt()
    through = torch.einsum("hkd,gdv->ghkv", maps.query, maps.output)
    back = torch.einsum("hkd,gvd->ghkv", maps.key, maps.value)
    return (through * back).sum((-2, -1)) / (write_norm[:, None] * maps.score_norm[None])


@_of_maps(
    "Symmetric share of W_QᵀW_K",
    formula="‖(M + Mᵀ)/2‖² / ‖M‖², M = W_QᵀW_K with norm gains folded in",
    claim="S11, E6",
    caveat="One half for a random matrix.",
    control=None,
)
def symmetric_share(maps: HeadMaps) -> Float64[Tensor, " H"]:
    """How much of the score is symmetric in query and key token, as a similarity is?"""
    cross = maps.key @ maps.query.mT
    return 0.5 * (1 + _dot(cross, cross.mT) / maps.score_norm.square())


@_of_maps(
    "Antisymmetric share of W_QᵀW_K",
    formula="‖(M − Mᵀ)/2‖² / ‖M‖² = 1 − symmetric share",
    claim="S11, E6",
    caveat="One half for a random matrix.",
    control=None,
)
def antisymmetric_share(maps: HeadMaps) -> Float64[Tensor, " H"]:
    """How much of the score changes sign when query and key token are exchanged?"""
    return 1 - symmetric_share(maps)


@dataclass(frozen=True, eq=False)
class MapStatistics:
    """Statistics of the weights of one site.

    Attributes:
        values: by the statistics' names.
        rotation_deviation: standard deviation of the cosine after independent random rotations, exactly 1/D.
    """

    values: dict[str, Float64[Tensor, "*H H"]]
    rotation_deviation: float


def map_statistics(maps: HeadMaps) -> MapStatistics:
    """Every statistic of the weights of a site."""
    return MapStatistics({name: of(maps) for name, of in measures(MAPS).items()}, 1.0 / maps.query.shape[-1])
