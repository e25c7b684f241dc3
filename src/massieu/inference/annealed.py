"""Annealed importance sampling and sequential Monte Carlo: log Z of a density, with its standard error.

Particles walk from a law that can be drawn exactly to the one that is asked for, along a path of densities. The product
of the ratios that they meet is an unbiased estimate of the ratio of the normalisers.

Each particle on its own is annealed importance sampling. Within a group, particles that have lost their weight are
replaced by copies of those that have it, which is sequential Monte Carlo; groups stay independent of each other, so that
the scatter of their estimates tells the error.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.foundation.arguments import check_shape, check_values, described, floating, number, whole_number
from massieu.foundation.doors import MOST, door, function
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.inference.resampling import effective_sample_size, resample

Path = Callable[[Tensor, float], Tensor]
"""(position (particles, *event), t in [0, 1]) ↦ unnormalised log-density (particles,)."""
Move = Callable[[Tensor, float, torch.Generator | None], Tensor]
"""(position, t, generator) ↦ position: a Markov kernel that leaves exp(path(·, t)) invariant."""


class AnnealHistory(NamedTuple):
    """One number for each step of the path, in order."""

    t: Float[Tensor, " steps"]
    effective_sample_size: Float[Tensor, " steps"]
    """Of all particles, weighed for that t and not yet resampled."""
    resampled: Int[Tensor, " steps"]
    """In how many groups."""


class AnnealResult(NamedTuple):
    """An estimate of log Z(1)/Z(0)."""

    log_partition: Float[Tensor, ""]
    """Nats. exp of it is unbiased; it itself is biased down, by half its variance."""
    standard_error: Float[Tensor, ""]
    """Of `log_partition`: the relative standard error of Z over the groups, which are independent."""
    position: Float[Tensor, "particles *event"]
    log_weight: Float[Tensor, " particles"]
    """Under these weights, which sum to one, `position` is a sample of exp(path(·, 1))."""
    effective_sample_size: Float[Tensor, ""]
    """1/Σ weight²."""
    history: AnnealHistory

    __repr__ = fields_repr
    _repr_html_ = fields_html


class _Particles(NamedTuple):
    """Weighted particles somewhere on the path; particle i is of group i // size."""

    position: Float[Tensor, "particles *event"]
    log_weight: Float[Tensor, "groups size"]  # since the group was last resampled
    log_partition: Float[Tensor, " groups"]  # log of the product of the mean weights at its resamplings so far

    def estimates(self) -> Float[Tensor, " groups"]:
        """log Z of each group; −inf for one without any weight."""
        return self.log_partition + torch.logsumexp(self.log_weight, 1) - math.log(self.log_weight.shape[1])

    def log_weights(self) -> Float[Tensor, " particles"]:
        """Of all particles, those of resampled groups included."""
        return (self.log_partition.unsqueeze(1) + self.log_weight).flatten()


@door(path=function, progress=function)
@torch.no_grad()
def anneal(
    position: Float[Tensor, "particles *event"],
    path: Path,
    move: Move,
    *,
    schedule: Sequence[float] | int = 100,
    groups: int | None = None,
    threshold: float = 0.5,
    generator: torch.Generator | None = None,
    progress: Callable[[Sequence[float]], Iterable[Any]] = iter,
) -> AnnealResult:
    """Estimate log Z(1)/Z(0) by annealed importance sampling or, with `groups`, by sequential Monte Carlo.

    For each t of the schedule, particles are weighed by exp(path(·, t) − path(·, t before)), resampled where need be, and
    moved at t.

    Args:
        position: Drawn exactly from exp(path(·, 0)).
        schedule: Rising values of t above 0 that end with 1, or how many equal steps.
        groups: How many independent groups of equal size there are; None: each particle is one. Sixteen groups tell the
            error to a fifth.
        threshold: A group is resampled when its effective sample size falls below this share of its particles; 0 for never.
        progress: Wraps the schedule, as `rich.progress.track` does.

    Raises:
        TypeError: a particle or log-density is no floating-point number, or `schedule` is no whole number or sequence.
        ValueError: a schedule that does not rise to 1; a threshold outside [0, 1]; fewer than two
            groups, of which no error can be told, or groups that do not divide the particles; a log-density that is NaN
            or rises from −inf; or no particle has any weight at the end.

    Example:
        >>> import torch
        >>> from massieu.inference import anneal
        >>> start = torch.linspace(-2, 2, 100).unsqueeze(-1)
        >>> path, stay = lambda x, t: 2.0 * t - 0.5 * x[:, 0] ** 2, lambda x, t, generator: x
        >>> round(anneal(start, path, stay, schedule=4).log_partition.item(), 4)  # only the constant changes
        2.0
    """
    times = _times(schedule)
    number("threshold", threshold, least=0, most=1)
    particles = _unweighted(position, groups)
    group_size = particles.log_weight.shape[1]
    last_t = 0.0
    sample_sizes = []
    resampled_groups = []
    for t in progress(times):
        particles = particles._replace(log_weight=_reweighed(particles, path, last_t, t))
        depleted = effective_sample_size(particles.log_weight) < threshold * group_size
        # A group without any weight stays as it is: its estimate is 0 for good.
        depleted = depleted & (particles.estimates() > -torch.inf)
        sample_sizes.append(effective_sample_size(particles.log_weights()))
        resampled_groups.append(depleted.sum())
        particles = _resampled(particles, depleted, generator)
        moved = floating("move(position, t, generator)", move(particles.position, t, generator))
        check_shape("move(position, t, generator)", moved, particles.position.shape)
        particles = particles._replace(position=moved)
        last_t = t
    estimates = particles.estimates()
    log_weight = particles.log_weights()
    # The mean of the groups' estimates of Z, which is unbiased as each of them is.
    log_z = torch.logsumexp(estimates, 0) - math.log(len(estimates))
    if not log_z.isfinite():
        raise ValueError("no particle has any weight: path(·, 1) is −inf wherever they went")
    history = AnnealHistory(
        t=log_weight.new_tensor(times),
        effective_sample_size=torch.stack(sample_sizes),
        resampled=torch.stack(resampled_groups),
    )
    return AnnealResult(
        log_partition=log_z,
        standard_error=(estimates - log_z).exp().std() / math.sqrt(len(estimates)),
        position=particles.position,
        log_weight=log_weight.log_softmax(0),
        effective_sample_size=effective_sample_size(log_weight),
        history=history,
    )


def _times(schedule: Sequence[float] | int) -> list[float]:
    """The values of t in order; raises TypeError or ValueError if the schedule is none."""
    if isinstance(schedule, bool | int):
        whole_number("schedule", schedule, most=MOST)
        times = [(index + 1) / schedule for index in range(schedule)]
    elif isinstance(schedule, Sequence):
        times = list(schedule)
    else:
        raise TypeError(f"schedule must be a whole number or a sequence of numbers, got {described(schedule)}")
    rises = all(before < after for before, after in pairwise([0.0, *times]))
    if not times or times[-1] != 1 or not rises:
        raise ValueError(f"schedule must rise from above 0 to 1, got {schedule!r}")
    return times


def _unweighted(position: Tensor, groups: int | None) -> _Particles:
    """The particles at t = 0, all of one weight."""
    count = position.shape[0] if floating("position", position).ndim else 0
    check_values(position=position)
    groups = count if groups is None else whole_number("groups", groups)
    if groups < 2 or count % groups:
        raise ValueError(f"there must be at least two groups that divide the particles, got {groups} and {count}")
    dtype = torch.promote_types(position.dtype, torch.float32)
    log_weight = torch.zeros(groups, count // groups, dtype=dtype, device=position.device)
    return _Particles(position, log_weight, log_weight[:, 0])


def _reweighed(particles: _Particles, path: Path, before: float, t: float) -> Float[Tensor, "groups size"]:
    """The weights at t of particles that were weighed before."""
    old = particles.log_weight
    old_density = _log_density(particles, path, before)
    new_density = _log_density(particles, path, t)
    log_ratio = (new_density - old_density).to(old.dtype).reshape(old.shape)
    # A particle of weight 0 keeps it, though its log-ratio may be −inf + inf.
    new = torch.where(old == -torch.inf, -torch.inf, old + log_ratio)
    if not (new < torch.inf).all():
        raise ValueError(f"the weights at t = {t} are not defined: a log-density is NaN, or rises from −inf")
    return new


def _log_density(particles: _Particles, path: Path, t: float) -> Float[Tensor, " particles"]:
    """The path's log-density at each particle; raises TypeError or ValueError if it returns something else."""
    density = floating("path(position, t)", path(particles.position, t))
    check_values(path=density)
    check_shape("path(position, t)", density, particles.position.shape[:1])
    return density


def _resampled(particles: _Particles, depleted: Tensor, generator: torch.Generator | None) -> _Particles:
    """The particles, with those of the groups that are `depleted` drawn anew in proportion to their weights."""
    if not depleted.any():
        return particles
    groups, size = particles.log_weight.shape
    in_depleted = depleted.unsqueeze(1)
    drawn = resample(particles.log_weight.masked_fill(~in_depleted, 0.0), generator)
    # Each particle's parent: its place within the group, then within all particles.
    parent = torch.where(in_depleted, drawn, torch.arange(size, device=drawn.device))
    parent = (parent + size * torch.arange(groups, device=drawn.device).unsqueeze(1)).flatten()
    return _Particles(
        position=particles.position[parent],
        # Copies have equal weights; what the group weighed goes into its estimate.
        log_weight=particles.log_weight.masked_fill(in_depleted, 0.0),
        log_partition=torch.where(depleted, particles.estimates(), particles.log_partition),
    )
