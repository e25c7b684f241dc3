"""What a head's weights say: is W_O W_V a gradient step on the head's own log Z (S3.2, E2), is the score symmetric (S11)?

Each function is a statistic of the maps of some heads. It returns a number for each head, or a matrix: entry (g, h) is of head
g's write and head h's score. The diagonal is the head's own number, the rest is the control. Norms and products of the D × D
maps are taken through Dh × Dh matrices, without forming the maps:
⟨O V, QᵀK⟩ = ⟨Q O, K Vᵀ⟩, ‖O V‖² = ⟨OᵀO, V Vᵀ⟩, ‖QᵀK‖² = ⟨Q Qᵀ, K Kᵀ⟩ and ⟨M, Mᵀ⟩ = tr((K Qᵀ)²).
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from massieu.probing.statistics.group import Event, Group, ModelReading, Row, RowPlace, SiteWeights
from massieu.probing.statistics.query_means import Fence
from massieu.probing.statistics.registry import MAPS, SHIM, Register
from massieu.probing.stream.replay import HeadMaps
from massieu.probing.stream.replays import why_no_maps
from massieu.probing.sums.significance import other_heads, two_sided_p
from massieu.probing.sums.units import Estimate

REGISTER = Register[Callable[[HeadMaps], Tensor]](MAPS)
_of_maps = partial(REGISTER.statistic, paper=SHIM)


def _dot(left: Float[Tensor, "*H A B"], right: Float[Tensor, "*H A B"]) -> Float[Tensor, "*H"]:
    """The inner product ⟨A, B⟩ = Σ A_ij B_ij of each head's matrices."""
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
def write_score_cosine(maps: HeadMaps) -> Float64[Tensor, "*batch H H"]:
    """Do the head's weights make its write a gradient step on its own log Z (1 if they do)?"""
    write_norm = _dot(maps.output.mT @ maps.output, maps.value @ maps.value.mT).sqrt()
    query_output = torch.einsum("...hkd,...gdv->...ghkv", maps.query, maps.output)
    key_value = torch.einsum("...hkd,...gvd->...ghkv", maps.key, maps.value)
    norms = write_norm[..., :, None] * maps.score_norm[..., None, :]
    return (query_output * key_value).sum((-2, -1)) / norms


@_of_maps(
    "Symmetric share of W_QᵀW_K",
    formula="‖(M + Mᵀ)/2‖² / ‖M‖², M = W_QᵀW_K with norm gains folded in",
    claim="S11, E6",
    caveat="One half for a random matrix.",
    control=None,
)
def symmetric_share(maps: HeadMaps) -> Float64[Tensor, "*batch H"]:
    """How much of the score is symmetric in query and key token, as a similarity is?"""
    # ‖(M + Mᵀ)/2‖² = (‖M‖² + ⟨M, Mᵀ⟩)/2.
    return 0.5 * (1 + maps.score_symmetry / maps.score_norm.square())


@_of_maps(
    "Antisymmetric share of W_QᵀW_K",
    formula="‖(M − Mᵀ)/2‖² / ‖M‖² = 1 − symmetric share",
    claim="S11, E6",
    caveat="One half for a random matrix.",
    control=None,
)
def antisymmetric_share(maps: HeadMaps) -> Float64[Tensor, "*batch H"]:
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


def map_statistics(maps: HeadMaps, fence: Fence = nullcontext, own_only: bool = False) -> MapStatistics:
    """Every statistic of the weights of a site; the fence leaves out a statistic that fails.

    Args:
        own_only: no head is compared with another one: each statistic is one number for each head.
    """
    measured = maps.apart() if own_only else maps
    values = {}
    for name, measure in REGISTER.functions.items():
        with fence(name):
            numbers = measure(measured)
            values[name] = numbers.flatten() if own_only else numbers
    return MapStatistics(values, 1.0 / maps.query.shape[-1])


class MapsGroup(Group):
    """Statistics of every head's weights. They are not running results: every process that reads the model has them."""

    name = MAPS
    events = frozenset({Event.WEIGHTS})

    def begin(self, model: ModelReading) -> None:
        """Record at which sites there are no maps."""
        super().begin(model)
        self.by_site: dict[int, MapStatistics] = {}
        for info in model.sites:
            reason = why_no_maps(info)
            if reason is not None:
                self.missing(info.site.name, MAPS, reason)

    def on_weights(self, weights: SiteWeights) -> None:
        """Measure the weights of a site."""
        if self.is_missing(weights.info.site.name, MAPS):
            return
        maps = weights.maps()
        if isinstance(maps, str):
            self.missing(weights.info.site.name, MAPS, maps)
        else:
            self.by_site[weights.info.index] = map_statistics(maps, self.fence, own_only=self.model.is_draw)

    def rows(self) -> Iterator[Row]:
        """Exact numbers; a head's write with another head's score is the control."""
        for info in self.model.sites:
            statistics = self.by_site.get(info.index)
            if statistics is None:
                continue
            for name, values in statistics.values.items():
                yield from _map_rows(RowPlace.of_site(info), name, values.numpy(), statistics.rotation_deviation)


def _map_rows(
    place: RowPlace, name: str, values: Float64[np.ndarray, "*H H"], rotation_deviation: float
) -> Iterator[Row]:
    """The rows of one statistic at one site; of a matrix, its diagonal and two controls."""
    heads = values.shape[-1]
    no_error = np.zeros(heads)
    counted_once = np.ones(heads)
    own_values = values if values.ndim == 1 else np.diag(values).copy()
    own = Estimate(own_values, no_error, counted_once, np.full(heads, np.inf))
    yield Row(place, name, "", own)
    if values.ndim == 2:
        yield Row(place, name, "rotation", Estimate(no_error, np.full(heads, rotation_deviation), counted_once))
        mean, deviation, number = other_heads(values)
        p = two_sided_p(own.value, no_error, mean, deviation, np.full(heads, number), own.degrees)
        yield Row(place, name, "mismatched", Estimate(mean, deviation, np.full(heads, float(number))), p)
