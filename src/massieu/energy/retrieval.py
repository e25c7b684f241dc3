"""How much a memory of the user's own patterns holds: the share that comes back, by number stored and by noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.energy.hopfield import HopfieldEnergy, by_distance, checked_scale
from massieu.foundation.arguments import check_finite, flag, floating, instance, number, whole_number
from massieu.foundation.arguments import generator as check_generator
from massieu.foundation.doors import door
from massieu.measures import Atoms
from massieu.solve.status import CONVERGED

LEVEL = 0.95
"""Confidence level of the intervals."""
_ELEMENTS_PER_BLOCK = 1 << 24
"""The most elements of stored patterns, over all trials of a block, that are held at a time."""


@dataclass(frozen=True)
class RetrievalCurveResult:
    """Shares of retrieved patterns, by C numbers of stored patterns and K levels of noise."""

    counts: Int[Tensor, "C"]
    noise: Float[Tensor, "K"]
    share: Float[Tensor, "C K"]
    """The share of trials that retrieved their pattern."""
    lower: Float[Tensor, "C K"]
    upper: Float[Tensor, "C K"]
    """Ends of Wilson's interval of 95 % for each share by itself."""
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
        patterns: Patterns to draw from. One that is there twice counts as not retrieved when both copies are stored.
        counts: Numbers of stored patterns, each at most N.
        noise: Standard deviations, in the unit of the patterns.
        scale: β, as for `HopfieldEnergy.create`.
        euclidean: Retrieve by distance, `HopfieldEnergy.euclidean`; False: by dot products, `HopfieldEnergy.create`.
        trials: Number of trials for each number of stored patterns. The interval's half-width is at most 1/√trials.
        max_steps: Limit of steps of a descent.

    Raises:
        TypeError: patterns are not a floating-point tensor, or a number is of another type.
        ValueError: patterns are of another shape or not finite, a number is below its minimum, or a count is above N.

    Example:
        >>> import torch
        >>> from massieu import energy
        >>> curve = energy.retrieval_curve(torch.eye(8), [2, 8], [0.0, 3.0], scale=50.0, generator=torch.Generator())
        >>> curve.share[:, 0].tolist(), bool(curve.upper[1, 1] < curve.lower[0, 0])  # without noise all come back
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
    if isinstance(scale, Tensor):
        scale = scale.reshape(())
    points = patterns.to(torch.promote_types(patterns.dtype, torch.float32))
    if euclidean:
        # Distances do not change, and the rounding of squares is least about the mean.
        points = points - points.mean(0)
    retrieval = _Retrieval(points, levels, scale, euclidean, max_steps, generator)
    outcomes_by_count = []
    for count in stored:
        block = max(1, _ELEMENTS_PER_BLOCK // (count * points.shape[1]))
        sizes = [min(block, trials - first) for first in range(0, trials, block)]
        outcomes_by_count.append(torch.cat([retrieval.outcomes(count, size) for size in sizes], -1))
    # (2, counts, levels, trials): whether a trial succeeded, and whether its descent had not ended.
    outcomes = torch.stack(outcomes_by_count, 1)
    share, unfinished = outcomes.double().mean(-1)
    lower, upper = _wilson(share, trials)
    number_stored = torch.tensor(stored, device=share.device)
    deviations = torch.tensor(levels, dtype=torch.float64, device=share.device)
    return RetrievalCurveResult(number_stored, deviations, share, lower, upper, unfinished, trials)


def _listed(name: str, value: object) -> Sequence[object]:
    """The value as it is; or an error unless it is a sequence of at least one number."""
    numbers: Sequence[object] = instance(name, value, Sequence, "a sequence of numbers")  # pyright: ignore[reportAssignmentType]
    if isinstance(value, str) or not len(numbers):
        raise ValueError(f"{name} must be a sequence of at least one number, got {value!r}")
    return numbers


@dataclass(frozen=True)
class _Retrieval:
    """Trials of retrieval from memories drawn from `points` (N, d)."""

    points: Tensor
    levels: list[float]
    scale: float | Tensor | None
    euclidean: bool
    max_steps: int
    generator: torch.Generator | None

    def outcomes(self, count: int, trials: int) -> Tensor:
        """Whether each trial succeeded, and whether its descent had not ended: booleans (2, levels, trials)."""
        points = self.points
        device = points.device if self.generator is None else self.generator.device
        # Sorting random numbers gives a random order: its first `count` patterns are stored, (trials, count, d).
        order = torch.rand(trials, len(points), generator=self.generator, device=device).to(points.device)
        stored = points[order.argsort(-1)[:, :count]]
        target = stored[:, 0]
        radius = self._success_radius(stored, target)
        direction = torch.randn(target.shape, generator=self.generator, device=device, dtype=target.dtype)
        direction = direction.to(target.device)
        outcomes = []
        for level in self.levels:
            start = target + level * direction
            end = self._memory(stored).retrieve(start, max_steps=self.max_steps, throw=False)
            near = torch.linalg.vector_norm(end.state - target, dim=-1) < radius
            ended = end.status == CONVERGED
            outcomes.append(torch.stack([near & ended, ~ended]))
        return torch.stack(outcomes, 1)

    def _success_radius(self, stored: Tensor, target: Tensor) -> Tensor:
        """Half the distance from the target to the nearest other stored pattern, (trials,); infinite without others."""
        if stored.shape[1] == 1:
            return target.new_full((len(target),), torch.inf)
        distance = torch.linalg.vector_norm(stored[:, 1:] - target.unsqueeze(1), dim=-1)
        return 0.5 * distance.amin(-1)

    def _memory(self, stored: Tensor) -> HopfieldEnergy:
        # Not by `euclidean`, which warns of patterns that overlap: how much they do is what is measured.
        atoms = Atoms.create(stored)
        if self.euclidean:
            atoms = by_distance(atoms, checked_scale(atoms, self.scale))
        return HopfieldEnergy.create(atoms, scale=self.scale)


def _wilson(share: Tensor, trials: int) -> tuple[Tensor, Tensor]:
    """Wilson's interval: the probabilities that a score test of the observed share does not reject."""
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
    centre = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half_width = z / (1 + z**2 / trials) * (share * (1 - share) / trials + (z / (2 * trials)) ** 2).sqrt()
    # At a share of 0 or 1 that share is an end of the interval, which rounding may move past it.
    lower = (centre - half_width).clamp(min=0.0).minimum(share)
    upper = (centre + half_width).clamp(max=1.0).maximum(share)
    return lower, upper
