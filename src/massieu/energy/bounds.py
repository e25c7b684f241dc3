"""Bounds for a Hopfield memory before it is used: capacity, separation, basins (B5.6 to B5.8; `theory.descent`: B5.2 to B5.5).

(6) `lipschitz`; (7) `separation`, `retrieval_bound`, `basin`; (8) `capacity`. Constants of Ramsauer et al.
(arXiv 2008.02217), generalised to weights w_n: a pattern's score is x_n·ξ + log(w_n)/β, so that what a mask leaves out
counts for nothing. All but `capacity` take the energy of stored patterns, and raise a TypeError at another; but for
`diameter` and `lipschitz` its reference must be the identity.
"""

import math
import sys
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.energy.activations import Identity
from massieu.energy.base import promoted, times
from massieu.energy.hopfield import HopfieldEnergy
from massieu.foundation.arguments import check_one_device, choice, floating, instance, number, real, whole_number
from massieu.foundation.doors import door
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.values import align, need_batch, promoted_dtype
from massieu.measures import Atoms

__all__ = ["basin", "capacity", "diameter", "lipschitz", "retrieval_bound", "separation"]


def __dir__() -> list[str]:
    return __all__


_PATTERNS_PER_BLOCK = 1024
"""Rows of the matrix of all pairs of patterns that are held at a time."""


class RetrievalBoundResult(NamedTuple):
    """Bounds on the error of one step, for every pattern: 1 − p_i ≤ `weight` and ‖T(ξ) − x_i‖ ≤ `distance`."""

    weight: Float[Tensor, "*batch_query N"]
    distance: Float[Tensor, "*batch_query N"]

    __repr__ = fields_repr
    _repr_html_ = fields_html


class BasinResult(NamedTuple):
    """Guarantees for the ball about every pattern.

    `exists`: the descent map takes the ball into itself, and so has a fixed point there, at most `distance` from the pattern;
    `unique`: the map also contracts there, so that a descent from any start in the ball ends at that point.
    """

    exists: Bool[Tensor, "*batch N"]
    unique: Bool[Tensor, "*batch N"]
    distance: Float[Tensor, "*batch N"]

    __repr__ = fields_repr
    _repr_html_ = fields_html


class CapacityResult(NamedTuple):
    """How many random `patterns` can be stored, √p·base^((d−1)/4); whether the theorem's condition on the base `holds`."""

    base: float
    patterns: float
    holds: bool

    __repr__ = fields_repr
    _repr_html_ = fields_html


def stored(hopfield: HopfieldEnergy, *, any_reference: bool = False) -> Atoms:
    """The stored patterns, in at least float32.

    Raises:
        TypeError: the memory is not a set of patterns, or the reference is not the identity and `any_reference` is False.
    """
    memory = instance("hopfield", hopfield, HopfieldEnergy, "a HopfieldEnergy").memory
    instance("the memory", memory, Atoms, "a set of stored patterns")
    if not any_reference:
        instance("the reference", hopfield.reference, Identity, "the identity, for which alone this is known")
    return Atoms(promoted(hopfield.memory.points), promoted(hopfield.memory.log_weight))


def largest_norm(hopfield: HopfieldEnergy) -> Float[Tensor, "*batch"]:
    """M = max ‖x_n‖ over the patterns that are not masked; 0 if there are none."""
    return _unmasked_points(stored(hopfield, any_reference=True)).norm(dim=-1).amax(-1)


@door
def diameter(hopfield: HopfieldEnergy, *, method: Literal["exact", "radius"] = "exact") -> Float[Tensor, "*batch"]:
    """The largest distance D = max ‖x_i − x_j‖ between patterns that are not masked.

    Args:
        hopfield: A memory of stored patterns, under any reference.
        method: "exact" compares all pairs, 1024 patterns at a time, at N²·d operations; "radius" returns twice the largest
            distance from the mean pattern, between D and 2D, at N·d.

    Example:
        >>> import torch
        >>> from massieu.energy import HopfieldEnergy, bounds
        >>> bounds.diameter(HopfieldEnergy.create(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))).item()
        5.0
    """
    choice("method", method, "exact", "radius")
    points = _unmasked_points(stored(hopfield, any_reference=True))
    if method == "radius":
        return 2 * (points - points.mean(-2, keepdim=True)).norm(dim=-1).amax(-1)
    # ‖x‖² + ‖y‖² − 2x·y, the other mode of cdist, would lose the digits of small distances.
    by_differences = "donot_use_mm_for_euclid_dist"
    blocks = points.split(_PATTERNS_PER_BLOCK, -2)
    block_maxima = [torch.cdist(block, points, compute_mode=by_differences).amax((-2, -1)) for block in blocks]
    return torch.stack(block_maxima).amax(0)


@door
def lipschitz(hopfield: HopfieldEnergy, *, method: Literal["exact", "radius"] = "exact") -> Float[Tensor, "*batch"]:
    """A Lipschitz constant of the retrieval step: βD²/4 times that of the reference (B5.6).

    Below 1 the fixed point is unique and reached at this rate; above 1 there may be several. For patterns ±a the change is
    exactly at β‖a‖² = 1. `method` is `diameter`'s; "radius" gives a bound between one and four times as large.

    Raises:
        TypeError: the reference's constant is not known.

    Example:
        >>> import torch
        >>> from massieu.energy import HopfieldEnergy, bounds
        >>> bounds.lipschitz(HopfieldEnergy.create(torch.tensor([[0.0], [2.0]]), scale=1.0)).item()
        1.0
    """
    largest_distance = diameter(hopfield, method=method)
    constant = align(hopfield.reference.lipschitz.to(largest_distance), largest_distance.ndim)
    # The slope of attention is β times the covariance of the patterns, whose eigenvalues are at most D²/4 (Popoviciu).
    return constant * promoted(hopfield.scale) * largest_distance.square() / 4


@door
def separation(
    hopfield: HopfieldEnergy, state: Float[Tensor, "*batch_query d"] | None = None
) -> Float[Tensor, "*batch_query N"] | Float[Tensor, "*batch N"]:
    """Separation of patterns at a state ξ: by how much the score of pattern i is above all others.

    Δ_i(ξ) = min over j ≠ i of (x_i − x_j)·ξ + log(w_i/w_j)/β; +inf for the only pattern, −inf for a masked one (B5.7).

    Args:
        hopfield: Stored patterns under the identity.
        state: ξ; without one, Δ_i(x_i) of every pattern.

    Raises:
        ValueError: the state's shape does not fit.

    Example:
        >>> import torch
        >>> from massieu.energy import HopfieldEnergy, bounds
        >>> bounds.separation(HopfieldEnergy.create(torch.tensor([[1.0], [3.0]])), torch.tensor([2.0])).tolist()
        [-4.0, 4.0]
    """
    memory = stored(hopfield)
    if state is not None:
        return _score_leads(_scores(hopfield, memory, state))
    # Δ_i(x_i) is on the diagonal of the leads of all patterns at all patterns, which are formed a block of rows at a time.
    separations = []
    start = 0
    for block in memory.points.split(_PATTERNS_PER_BLOCK, -2):
        leads = _score_leads(_scores(hopfield, memory, block))
        separations.append(leads.diagonal(start, -2, -1))
        start += block.shape[-2]
    return torch.cat(separations, -1)


@door
def retrieval_bound(hopfield: HopfieldEnergy, state: Float[Tensor, "*batch_query d"]) -> RetrievalBoundResult:
    """Bounds on the error of one retrieval step: on the weight of other patterns and on the distance from pattern i.

    They are (N−1)e^(−βΔ_i(ξ)) and 2M times that, N the number of patterns that are not masked (B5.7; Ramsauer et al.,
    theorem 4).

    Example:
        >>> import torch
        >>> from massieu.energy import HopfieldEnergy, bounds
        >>> memory = HopfieldEnergy.create(torch.tensor([[-1.0], [1.0]]), scale=5.0)
        >>> bounds.retrieval_bound(memory, torch.tensor([1.0])).weight[1].item() < 1e-4
        True
    """
    lead = separation(hopfield, state)
    weight = _weight_of_others(hopfield, lead)
    return RetrievalBoundResult(weight, 2 * align(largest_norm(hopfield), lead.ndim) * weight)


@door(radius=real)
def basin(hopfield: HopfieldEnergy, radius: float) -> BasinResult:
    """Guarantees for the ball of `radius` around each pattern: convergence, one fixed point, its distance (B5.7).

    In the ball Δ_i is at least Δ_i(x_i) − 2M·radius. A fixed point exists if the bound on the distance is at most the radius.
    The map contracts if also 4βM²(N−1)e^(−βΔ) < 1.

    Raises:
        ValueError: a radius that is not positive and finite.

    Example:
        >>> import torch
        >>> from massieu.energy import HopfieldEnergy, bounds
        >>> found = bounds.basin(HopfieldEnergy.create(torch.tensor([[-1.0], [1.0]]), scale=5.0), radius=0.5)
        >>> found.exists.tolist(), [round(x, 3) for x in found.distance.tolist()]
        ([True, True], [0.013, 0.013])
    """
    number("radius", radius, above=0)
    at_pattern = separation(hopfield)
    norm = align(largest_norm(hopfield), at_pattern.ndim)
    scale = align(promoted(hopfield.scale), at_pattern.ndim)
    in_ball = at_pattern - 2 * norm * radius
    weight = _weight_of_others(hopfield, in_ball)
    distance = 2 * norm * weight
    exists = distance <= radius
    contracts = 4 * scale * norm.square() * weight < 1
    return BasinResult(exists, exists & contracts, distance)


@door(scale=real, radius=real, failure=real)
def capacity(
    dimension: int, *, scale: float | None = None, radius: float = 1.0, failure: float = 0.001
) -> CapacityResult:
    """How many random patterns on the sphere of radius·√(d−1) can be stored and retrieved, except with probability `failure`.

    N ≥ √p·c^((d−1)/4) with c = b/W₀(exp(a + ln b)), a = (2/(d−1))(1 + ln(2βK²p(d−1))), b = 2K²β/5, W₀ Lambert's function,
    where c ≥ (2/√p)^(4/(d−1)) (B5.8; Ramsauer et al., theorem 3). What is larger than any float is +inf.

    Args:
        dimension: d, at least 2.
        scale: β, d^-½ by default.
        radius: K.
        failure: p, between 0 and 1.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> from massieu.energy import bounds
        >>> found = bounds.capacity(20, scale=1.0, radius=3.0)
        >>> round(found.patterns, 2), found.holds
        (7.41, True)
    """
    whole_number("dimension", dimension, least=2)
    if scale is None:
        scale = dimension**-0.5
    scale = number("scale", scale, above=0)
    number("radius", radius, above=0)
    number("failure", failure, above=0, below=1)
    # In logarithms, since numbers of patterns leave the range of floats in a few thousand dimensions.
    freedom = dimension - 1
    # log(βK²), which both a and b contain.
    log_size = 2 * math.log(radius) + math.log(scale)
    a = 2 / freedom * (1 + math.log(2) + log_size + math.log(failure) + math.log(freedom))
    # c = b/W₀(y) = e^{W₀(y) − a}, since W₀(y) e^{W₀(y)} = y = b e^a.
    log_base = _lambert(a + math.log(0.4) + log_size) - a
    holds = log_base >= 4 / freedom * (math.log(2) - 0.5 * math.log(failure))
    log_patterns = 0.5 * math.log(failure) + freedom / 4 * log_base
    return CapacityResult(_exp(log_base), _exp(log_patterns), holds)


def _exp(logarithm: float) -> float:
    """e^logarithm; +inf if that is larger than any float."""
    if logarithm < math.log(sys.float_info.max):
        return math.exp(logarithm)
    return math.inf


def _lambert(log_argument: float) -> float:
    """W₀(exp(y)): the w > 0 with w + ln w = y."""
    if log_argument < -700:
        return math.exp(log_argument)  # W₀(z) = z − z² + …
    if log_argument < 0:
        w = math.exp(log_argument)
    else:
        w = 1 + log_argument / 2
    # Newton's method for w + ln w = y, whose left side is concave: every iterate after the first lies below the root.
    for _ in range(100):
        before = w
        w = w * (1 + log_argument - math.log(w)) / (1 + w)
        if abs(w - before) <= 1e-15 * w:
            break
    return w


def _unmasked_points(memory: Atoms) -> Tensor:
    """The points (*batch, N, d); masked ones are moved to the first that is not masked, or to 0 if all are.

    So a maximum over norms or distances does not see them, and shapes do not depend on the mask.
    """
    unmasked = memory.log_weight != -torch.inf
    first = unmasked.to(torch.int8).argmax(-1)[..., None, None]
    first = first.expand(*unmasked.shape[:-1], 1, memory.points.shape[-1])
    stand_in = memory.points.gather(-2, first).masked_fill(~unmasked.any(-1)[..., None, None], 0.0)
    points = torch.where(unmasked.unsqueeze(-1), memory.points, stand_in)
    # A weight of NaN does not say whether the pattern is masked.
    return points.masked_fill(memory.log_weight.isnan().unsqueeze(-1), torch.nan)


def _scores(hopfield: HopfieldEnergy, memory: Atoms, state: Tensor) -> Tensor:
    """x_n·ξ + log(w_n/max w)/β, shape (*batch, *query, N)."""
    check_one_device(state=floating("state", state), memory=memory.points)
    need_batch("the memory", "a state", state.shape, memory.batch_shape, memory.event_shape)
    dtype = promoted_dtype(state, memory.points, memory.log_weight)
    scores = times(state.to(dtype), memory.points.mT.to(dtype))
    # Only differences count, and next to a large number that all have in common the scores would be lost to rounding.
    top = memory.log_weight.amax(-1, keepdim=True)
    excess = memory.log_weight - top.masked_fill(top == -torch.inf, 0.0)
    bias = excess / promoted(hopfield.scale).unsqueeze(-1)
    return scores + align(bias, scores.ndim, 1)


def _score_leads(scores: Tensor) -> Tensor:
    """Each score less the largest of the others; −inf for masked patterns, +inf for the only one."""
    if scores.shape[-1] == 1:
        return torch.where(scores == -torch.inf, -torch.inf, torch.inf)
    # The largest of the others is the best score, but for the best itself, which is compared with the second.
    best, second = scores.topk(2, -1).values.unbind(-1)
    best_index = scores.argmax(-1, keepdim=True)
    is_best = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best_index, True)
    lead = scores - torch.where(is_best, second.unsqueeze(-1), best.unsqueeze(-1))
    return torch.where(scores == -torch.inf, -torch.inf, lead)


def _weight_of_others(hopfield: HopfieldEnergy, lead: Tensor) -> Tensor:
    """(N − 1)e^(−β·lead), a bound on the weight of all other patterns: 0 for the only pattern, +inf for a masked one."""
    num_unmasked = (stored(hopfield).log_weight != -torch.inf).sum(-1)
    # At least 1: the only pattern has a lead of +inf, and a masked one of −inf, whose bound must not become 0·inf.
    others = align((num_unmasked - 1).clamp_min(1), lead.ndim)
    return others * (-align(promoted(hopfield.scale), lead.ndim) * lead).exp()
