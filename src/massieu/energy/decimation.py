"""Decimation: spins of an Ising model are summed out, and the rest interact as if they were there (B10, B14).

A renormalisation step in the physicists' sense. `integrate_out` does it to chosen sites of any `SpinModel` of ±1, with
interactions of every order; `decimation_flow` repeats it on a uniform chain, where it is exact, and on lattices whose bonds
are moved first (Migdal 1975, Kadanoff 1976).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.energy.sites import MAX_STATES, state_blocks
from massieu.energy.spins import SpinModel
from massieu.foundation.arguments import as_tensor, check_finite, instance, number_or_tensor, whole_number
from massieu.foundation.doors import door
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.transforms import all_true
from massieu.measures import Spin

_MOST_BONDS = 2**53
"""Whole numbers up to here are exact in float64."""
_BISECTIONS = 200
"""Halvings of the interval of the fixed point, more than float64 has digits."""


# Chosen sites of one model.


@dataclass(frozen=True)
class IntegratedResult:
    """The interactions of the sites that are left: log-weight(S) = Σ_A interactions_A Π_{i in A} S_i, in nats.

    Attributes:
        kept: Numbers of these sites in the model, in order.
        interactions: Shape (2,)·k: the index has a 1 for each site of the subset A. The first is a constant.
        model: The fields and pair couplings alone, as a `SpinModel` of the k sites.
        constant: With it log Z is kept, if no interaction is of order 3 or more: log Z = constant + log Z of `model`.
    """

    kept: tuple[int, ...]
    interactions: Float[Tensor, "..."]
    model: SpinModel
    constant: Float[Tensor, ""]

    __repr__ = fields_repr
    _repr_html_ = fields_html

    def strength(self) -> Float[Tensor, "k+1"]:
        """Root of the sum of squares of all interactions of each order, from 0 to k: what `model` leaves out is from 3 on."""
        flat = self.interactions.flatten()
        order = _subset_sizes(len(self.kept), flat.device)
        squares = torch.zeros(len(self.kept) + 1, dtype=flat.dtype, device=flat.device)
        return squares.index_add(0, order, flat.square()).sqrt()


def integrate_out(model: SpinModel, sites: Sequence[int], *, order: int | None = None) -> IntegratedResult:
    """Sum out sites of a model of spins ±1, exactly by enumeration or by cumulants to an order.

    With S the spins that are left, s those summed out and W the couplings between them, what s leave is
    log ⟨exp(SᵀWs)⟩, with the mean over the law of s by itself: its cumulant series is the one in W that gives effective
    interactions (B10). Errors of order n fall as W^(n+1).

    Args:
        model: Sites of `Spin`, one component each, at most 20.
        sites: Numbers of the sites to sum out: at least one, not all.
        order: Cumulants to this order, 1 to 4; None: exact.

    Returns:
        Interactions of all subsets of the sites that are left, in the model's dtype; differentiable.

    Raises:
        TypeError: no `SpinModel`, its sites are no spins, or `sites` are not whole numbers.
        ValueError: a site that does not exist or stands twice; none or all of them; more than 20 sites; another order.

    Example:
        >>> import torch
        >>> from massieu.energy import SpinModel, integrate_out
        >>> from massieu.measures import Spin
        >>> chain = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
        >>> left = integrate_out(SpinModel.create(Spin.create(torch.zeros(3).double()), chain), [1]).model
        >>> coupling = left.coupling[0, 1, 0, 0]
        >>> bool(torch.isclose(coupling.tanh(), torch.tanh(torch.tensor(1.0).double()) ** 2))  # tanh K' = tanh² K
        True
    """
    field, coupling = _fields_and_couplings(model)
    removed = _checked_sites(sites, len(field))
    if order is not None:
        whole_number("order", order, least=1, most=4)
    kept = [site for site in range(len(field)) if site not in removed]
    states = _all_states(len(kept), field)
    removed_states = _all_states(len(removed), field)
    log_weight = _own_log_weight(states, field[kept], coupling[kept][:, kept])
    removed_log_weight = _own_log_weight(removed_states, field[removed], coupling[removed][:, removed])
    # SᵀWs of every state of the kept and of the removed spins, (2^k, 2^m).
    cross = states @ coupling[kept][:, removed] @ removed_states.mT
    if order is None:
        log_weight = log_weight + torch.logsumexp(cross + removed_log_weight, -1)
    else:
        law = torch.softmax(removed_log_weight, -1)
        log_weight = log_weight + torch.logsumexp(removed_log_weight, -1) + _cumulant_series(cross, law, order)
    interactions = _walsh_coefficients(log_weight, len(kept))
    return _result(kept, interactions)


def _result(kept: list[int], interactions: Tensor) -> IntegratedResult:
    """The interactions, with the fields and pair couplings among them as a model."""
    count = len(kept)
    flat = interactions.flatten()
    # The number of a subset has the bit of site i at place count − 1 − i.
    bits = 2 ** torch.arange(count - 1, -1, -1, device=flat.device)
    field = flat[bits]
    pairs = flat[bits.unsqueeze(0) | bits.unsqueeze(1)]
    # On the diagonal stand the fields: a site does not couple to itself.
    coupling = torch.where(torch.eye(count, dtype=torch.bool, device=flat.device), 0.0, pairs)
    model = SpinModel.create(Spin.create(field), coupling)
    return IntegratedResult(tuple(kept), interactions, model, flat[0] + _log_two_cosh(field).sum())


def _fields_and_couplings(model: SpinModel) -> tuple[Tensor, Tensor]:
    """The fields (N,) and couplings (N, N) of a model of spins ±1."""
    site = instance("model", model, SpinModel, "a SpinModel").site
    spins = instance("the sites of the model", site, Spin, "spins of ±1 (Spin)")
    if spins.field.shape[-1] != 1:
        raise ValueError(f"the sites of the model must have one component each, got {spins.field.shape[-1]}")
    if 2 ** len(spins.field) > MAX_STATES:
        raise ValueError(f"integrate_out goes through all states of at most 20 sites, got {len(spins.field)}")
    return spins.field[:, 0].to(model.coupling.dtype), model.coupling[:, :, 0, 0]


def _checked_sites(sites: Sequence[int], count: int) -> list[int]:
    """The numbers of the sites in order; or an error."""
    if isinstance(sites, str) or not isinstance(sites, Sequence):
        raise TypeError(f"sites must be a list of whole numbers, got {type(sites).__name__}")
    numbers = sorted(whole_number("sites", site, least=0, most=count - 1) for site in sites)
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"sites must differ from each other, got {list(sites)}")
    if not 0 < len(numbers) < count:
        raise ValueError(f"sites must be at least one and not all of the {count} sites, got {len(numbers)}")
    return numbers


def _all_states(count: int, like: Tensor) -> Float[Tensor, "states count"]:
    return torch.cat(list(state_blocks(Spin.create(dim=count), like)))


def _own_log_weight(states: Tensor, field: Tensor, coupling: Tensor) -> Float[Tensor, "states"]:
    """log of exp(½ SᵀJS) Π ρ_i(S_i), the ρ_i probabilities."""
    return states @ field + 0.5 * ((states @ coupling) * states).sum(-1) - _log_two_cosh(field).sum()


def _log_two_cosh(field: Tensor) -> Tensor:
    return torch.logaddexp(field, -field)


def _cumulant_series(cross: Float[Tensor, "kept removed"], law: Float[Tensor, "removed"], order: int) -> Tensor:
    """Σ_n κ_n/n! of the rows of `cross` under the law, to the order."""
    mean = cross @ law
    deviation = cross - mean.unsqueeze(-1)
    second = deviation**2 @ law
    series = mean
    if order >= 2:
        series = series + second / 2
    if order >= 3:
        series = series + deviation**3 @ law / 6
    if order >= 4:
        series = series + (deviation**4 @ law - 3 * second**2) / 24
    return series


def _walsh_coefficients(values: Float[Tensor, "states"], count: int) -> Float[Tensor, "..."]:
    """Coefficients of the products of spins in a function of their states, shape (2,)·count."""
    coefficients = values.reshape([2] * count)
    for site in range(count):
        # The first state of a site is −1, the second +1.
        down, up = coefficients.unbind(site)
        coefficients = torch.stack([up + down, up - down], site) / 2
    return coefficients


def _subset_sizes(count: int, device: torch.device) -> Tensor:
    """Number of sites in each subset, (2^count,), in the order of `interactions`."""
    sizes = torch.zeros(1, dtype=torch.long, device=device)
    for _ in range(count):
        sizes = torch.cat([sizes, sizes + 1])
    return sizes


# A uniform chain or lattice.


class DecimationFlowResult(NamedTuple):
    """Couplings and fields along a flow, its start included.

    `constant` is what a new bond adds to log Z in nats, 0 at the start: in one dimension
    log Z of N sites = (N/block)·constant[1] + log Z of N/block sites with coupling[1] and field[1].
    """

    coupling: Float[Tensor, "steps+1 *batch"]
    field: Float[Tensor, "steps+1 *batch"]
    constant: Float[Tensor, "steps+1 *batch"]

    __repr__ = fields_repr
    _repr_html_ = fields_html


class DecimationFixedPointResult(NamedTuple):
    """Where a flow stays.

    `exponent` is y = log(dK'/dK)/log(block): a distance from the fixed point grows as length^y, the correlation length
    diverges with ν = 1/y.
    """

    coupling: float
    exponent: float

    __repr__ = fields_repr
    _repr_html_ = fields_html


@door(coupling=number_or_tensor, field=number_or_tensor)
def decimation_flow(
    coupling: Float[Tensor, "*batch"] | float,
    field: Float[Tensor, "*batch"] | float = 0.0,
    *,
    steps: int = 1,
    block: int = 2,
    dimension: int = 1,
) -> DecimationFlowResult:
    """Repeated decimation of a uniform Ising model: of `block` sites in a row all but one are summed out.

    A chain, exp(Σ K S_i S_{i+1} + h S_i), stays a chain, exactly: without a field tanh K' = tanh^block K, with it the power
    of the transfer matrix. In more dimensions block^(dimension − 1) parallel bonds are first moved together, which is an
    approximation (Migdal and Kadanoff).

    Args:
        coupling: K, of either sign.
        field: h; 0 in more than one dimension, where bonds have no unique share of it.
        steps: At least 0.
        block: Length by which a step shrinks the lattice, at least 2.
        dimension: At least 1.

    Returns:
        In the dtype of the arguments, numbers in float64. The relative error is rounding, for weak couplings too;
        differentiable.

    Raises:
        TypeError: a coupling or field that is neither a number nor a floating-point tensor; another number that is not whole.
        ValueError: values that are not finite; numbers out of range; a field in more than one dimension.

    Example:
        >>> from massieu.energy import decimation_flow
        >>> [
        ...     round(value, 4) for value in decimation_flow(1.0, steps=3).coupling.tolist()
        ... ]  # a chain forgets its coupling
        [1.0, 0.6625, 0.3501, 0.1137]
        >>> [round(value, 4) for value in decimation_flow(0.5, steps=3, dimension=2).coupling.tolist()]  # it orders
        [0.5, 0.6625, 0.9809, 1.6155]
    """
    whole_number("steps", steps, least=0)
    whole_number("block", block, least=2)
    whole_number("dimension", dimension, least=1)
    bonds = _parallel_bonds(block, dimension)
    coupling, field = _couplings_of_flow(coupling, field)
    if dimension > 1 and not all_true(field == 0):
        raise ValueError(f"field must be 0 in {dimension} dimensions: a field is decimated in one dimension alone")
    path = [(coupling, field, torch.zeros_like(coupling))]
    for _ in range(steps):
        moved = bonds * coupling
        coupling, field, constant = _decimated_chain(moved, field, block)
        path.append((coupling, field, constant))
    return DecimationFlowResult(*(torch.stack(values) for values in zip(*path, strict=True)))


def _parallel_bonds(block: int, dimension: int) -> int:
    """How many parallel bonds are moved together, block^(dimension − 1)."""
    bonds = block ** min(dimension - 1, 64)
    if bonds > _MOST_BONDS:
        raise ValueError(f"block^(dimension − 1) must be at most 2^53, got {block}^{dimension - 1}")
    return bonds


def _couplings_of_flow(coupling: Tensor | float, field: Tensor | float) -> tuple[Tensor, Tensor]:
    """Both as tensors of one dtype and shape."""
    tensors = [value for value in (coupling, field) if isinstance(value, Tensor)]
    like = (
        sum((tensor.new_zeros(()) for tensor in tensors[1:]), tensors[0])
        if tensors
        else torch.zeros((), dtype=torch.float64)
    )
    like = like.to(torch.promote_types(like.dtype, torch.float32))
    coupling = as_tensor("coupling", coupling, like)
    field = as_tensor("field", field, like)
    check_finite(coupling=coupling, field=field)
    return tuple(torch.broadcast_tensors(coupling, field))  # pyright: ignore[reportReturnType]


def _decimated_chain(coupling: Tensor, field: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """K', h' and the constant of a chain of which every `block`-th site is left."""
    # Elements of the logarithm of the transfer matrix exp(K SS' + ½h(S + S')), and of its powers: all are positive.
    up, unlike, down = coupling + field, -coupling, coupling - field
    log_up, log_unlike, log_down = up, unlike, down
    for _ in range(block - 1):
        log_up, log_unlike, log_down = (
            torch.logaddexp(log_up + up, log_unlike + unlike),
            torch.logaddexp(log_up + unlike, log_unlike + down),
            torch.logaddexp(log_unlike + unlike, log_down + down),
        )
    # e^(4K') − 1 is the determinant of the power, (2 sinh 2K)^block, by the square of its element of unlike spins: no
    # difference is formed where K' is small.
    size = coupling.abs()
    exponent = -2 / block * log_unlike
    small = 2 * torch.sinh(2 * coupling.clamp(-1, 1)) * exponent.exp()
    large = coupling.sign() * -torch.expm1(-4 * size) * (2 * size + exponent).exp()
    ratio = torch.where(size < 1, small, large) ** block
    is_large = ~(ratio.abs() < 0.5)
    direct = log_up + log_down - 2 * log_unlike
    # The inner `where` keeps the gradient of the unused branch finite.
    new_coupling = torch.where(is_large, direct, torch.log1p(torch.where(is_large, 0.0, ratio))) / 4
    return new_coupling, (log_up - log_down) / 2, (log_up + log_down + 2 * log_unlike) / 4


def decimation_fixed_point(dimension: int, *, block: int = 2) -> DecimationFixedPointResult:
    """The coupling at which `decimation_flow` without a field stays, between the fixed points 0 and ∞.

    From below it couplings flow to 0, from above to ∞: it is the critical point. In two dimensions with blocks of 2 it is
    0.305, and the exact one of the square lattice ½ log(1 + √2) = 0.441. In one dimension there is none: K = ∞, y = 0.

    Raises:
        TypeError, ValueError: `dimension` is no whole number of at least 1, or `block` none of at least 2.

    Example:
        >>> from massieu.energy import decimation_fixed_point
        >>> [round(value, 4) for value in decimation_fixed_point(2)]
        [0.3047, 0.7472]
    """
    whole_number("dimension", dimension, least=1)
    whole_number("block", block, least=2)
    if dimension == 1:
        return DecimationFixedPointResult(math.inf, 0.0)
    bonds = _parallel_bonds(block, dimension)
    # Below the fixed point a step weakens the coupling. At 1 it strengthens it, as bonds·K − ½ log(block) > K there.
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        if float(decimation_flow(middle, block=block, dimension=dimension).coupling[1]) < middle:
            low = middle
        else:
            high = middle
    moved = bonds * high
    tanh = math.tanh(moved)
    # dK'/dK by the chain rule of artanh(tanh^block(bonds·K)).
    slope = bonds * block * tanh ** (block - 1) / math.cosh(moved) ** 2 / (1 - tanh ** (2 * block))
    return DecimationFixedPointResult(high, math.log(slope) / math.log(block))
