"""How much a memory of the user's own patterns holds: the share that comes back, by number stored and by noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.energy.hopfield import HopfieldEnergy
from massieu.foundation.arguments import check_finite, flag, floating, instance, number, whole_number
from massieu.foundation.arguments import generator as check_generator
from massieu.foundation.doors import door
from massieu.measures import Atoms
from massieu.solve.status import CONVERGED

LEVEL = 0.95
"""Of the intervals."""
_NUMBERS_AT_ONCE = 1 << 24
"""The most numbers of stored patterns that are held at a time."""


@dataclass(frozen=True)
class RetrievalCurveResult:
    """What `retrieval_curve` found, of C numbers of stored patterns and K levels of noise."""

    counts: Int[Tensor, "C"]
    noise: Float[Tensor, "K"]
    share: Float[Tensor, "C K"]
    """Of the trials that brought their pattern back."""
    lower: Float[Tensor, "C K"]
    upper: Float[Tensor, "C K"]
    """Wilson's interval of 95 %, each by itself."""
    unfinished: Float[Tensor, "C K"]
    """The share of trials whose descent had not ended at `max_steps`; they count as not retrieved."""
    trials: int


@door
@torch.no_grad()
def retrieval_curve(
    patterns: Float[Tensor, "N d"],
    counts: Sequence[int],
    noise: Sequence[float] = (0.0,),
    *,
    scale: float | Float[Tensor, ""] | None = None,
    euclidean: bool = True,
    trials: int = 200,
    max_steps: int = 100,
    generator: torch.Generator | None = None,
) -> RetrievalCurveResult:
    """What share of patterns a memory retrieves, for memories of several sizes, with intervals.

    A trial stores `count` patterns, drawn without replacement, and starts at one of them with Gaussian noise on each
    coordinate. It succeeds if the descent ends within half the distance from its pattern to the nearest other stored one.
    There no other pattern is nearer, and a mean of two is no success. Trials are independent given the patterns. Levels of
    noise share what is stored and the direction of the noise, so their differences scatter less than the intervals say.

    Args:
        patterns: What may be stored; a pattern that is there twice is never told from its copy.
        counts: How many are stored, each at most N.
        noise: Standard deviations, in the unit of the patterns.
        scale: β, as for `HopfieldEnergy.create`.
        euclidean: Retrieve by distance, `HopfieldEnergy.euclidean`; False: by dot products, `HopfieldEnergy.create`.
        trials: Of each number stored. The interval's half-width is at most 1/√trials.
        max_steps: Where a descent gives up.

    Raises:
        TypeError: patterns that are no floating-point tensor, numbers of another type.
        ValueError: patterns of another shape or not finite; a number below its least, or more to store than there are.

    Example:
        >>> import torch
        >>> from massieu import energy
        >>> found = energy.retrieval_curve(torch.eye(8), [2, 8], [0.0, 3.0], scale=50.0, generator=torch.Generator())
        >>> found.share[:, 0].tolist(), bool(found.upper[1, 1] < found.lower[0, 0])  # without noise all come back
        ([1.0, 1.0], True)
    """
    if floating("patterns", patterns).ndim != 2 or 0 in patterns.shape:
        raise ValueError(f"patterns must have shape (N, d) with a pattern or more, got {tuple(patterns.shape)}")
    check_finite(patterns=patterns)
    stored = [whole_number("counts", count, least=1, most=len(patterns)) for count in _listed("counts", counts)]
    levels = [float(number("noise", level, least=0)) for level in _listed("noise", noise)]
    if isinstance(scale, Tensor) and scale.numel() != 1:
        raise ValueError(f"scale must be one number for all trials, got shape {tuple(scale.shape)}")
    flag("euclidean", euclidean)
    whole_number("trials", trials, least=1)
    whole_number("max_steps", max_steps, least=1)
    if generator is not None:
        check_generator("generator", generator)
    scale = scale.reshape(()) if isinstance(scale, Tensor) else scale
    points = patterns.to(torch.promote_types(patterns.dtype, torch.float32))
    if euclidean:
        points = points - points.mean(0)
    rows = []
    for count in stored:
        block = max(1, _NUMBERS_AT_ONCE // (count * points.shape[1]))
        sizes = [min(block, trials - first) for first in range(0, trials, block)]
        parts = [_tried(points, count, size, levels, scale, euclidean, max_steps, generator) for size in sizes]
        rows.append(torch.cat(parts, -1))
    tried = torch.stack(rows, 1)
    share, unfinished = tried.double().mean(-1)
    lower, upper = _wilson(share, trials)
    number_stored = torch.tensor(stored, device=share.device)
    deviations = torch.tensor(levels, dtype=torch.float64, device=share.device)
    return RetrievalCurveResult(number_stored, deviations, share, lower, upper, unfinished, trials)


def _listed(name: str, given: object) -> Sequence[object]:
    """The numbers, if they are a list of at least one."""
    found: Sequence[object] = instance(name, given, Sequence, "a sequence of numbers")  # pyright: ignore[reportAssignmentType]
    if isinstance(given, str) or not len(found):
        raise ValueError(f"{name} must be a sequence of at least one number, got {given!r}")
    return found


def _tried(
    points: Tensor,
    count: int,
    trials: int,
    levels: list[float],
    scale: float | Tensor | None,
    euclidean: bool,
    max_steps: int,
    generator: torch.Generator | None,
) -> Tensor:
    """Whether each trial succeeded, and whether it had not ended: (2, levels, trials)."""
    device = points.device if generator is None else generator.device
    order = torch.rand(trials, len(points), generator=generator, device=device).to(points.device)
    # The first of a random order is the one that is asked for.
    memory = points[order.argsort(-1)[:, :count]]
    own = memory[:, 0]
    other = torch.linalg.vector_norm(memory[:, 1:] - own.unsqueeze(1), dim=-1)
    radius = 0.5 * other.amin(-1) if count > 1 else own.new_full((trials,), torch.inf)
    direction = torch.randn(own.shape, generator=generator, device=device, dtype=own.dtype).to(own.device)
    make = HopfieldEnergy.euclidean if euclidean else _by_products
    found = []
    for level in levels:
        end = make(memory, scale=scale).retrieve(own + level * direction, max_steps=max_steps, throw=False)
        near = torch.linalg.vector_norm(end.state - own, dim=-1) < radius
        ended = end.status == CONVERGED
        found.append(torch.stack([near & ended, ~ended]))
    return torch.stack(found, 1)


def _by_products(patterns: Tensor, *, scale: float | Tensor | None) -> HopfieldEnergy:
    return HopfieldEnergy.create(Atoms.create(patterns), scale=scale)


def _wilson(share: Tensor, trials: int) -> tuple[Tensor, Tensor]:
    """The bounds of a binomial share whose score test does not reject it."""
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
    middle = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * (share * (1 - share) / trials + (z / (2 * trials)) ** 2).sqrt()
    # At a share of 0 or 1 the bound is that share, which rounding may pass.
    return (middle - half).clamp(min=0.0).minimum(share), (middle + half).clamp(max=1.0).maximum(share)
