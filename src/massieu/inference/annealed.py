"""Annealed importance sampling and sequential Monte Carlo: log Z of a density, with its standard error.

Particles walk from a law that can be drawn exactly to the one that is asked for, along a path of densities. The product
of the ratios that they meet is an unbiased estimate of the ratio of the normalisers.

Each particle on its own is annealed importance sampling. Within a group, particles that have lost their weight are
replaced by copies of those that have it, which is sequential Monte Carlo; groups stay independent of each other, so that
the scatter of their estimates tells the error.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.foundation.arguments import check_shape, check_values, described, floating, number, whole_number
from massieu.foundation.doors import MOST, door, function
from massieu.inference.resampling import effective_sample_size, resample

Path = Callable[[Tensor, float], Tensor]
"""(position (particles, *event), t in [0, 1]) ↦ unnormalised log-density (particles,)."""
Move = Callable[[Tensor, float, torch.Generator | None], Tensor]
"""(position, t, generator) ↦ position: a Markov kernel that leaves exp(path(·, t)) invariant."""


class AnnealHistory(NamedTuple):
    """What each step of the path met, in order."""

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
    steps = _schedule(schedule)
    number("threshold", threshold, least=0, most=1)
    particles = _begin(position, groups)
    time, met = 0.0, []
    for t in progress(steps):
        particles = particles._replace(log_weight=_reweighed(particles, path, time, t))
        worn = effective_sample_size(particles.log_weight) < threshold * particles.log_weight.shape[1]
        # A group without any weight stays as it is: its estimate is 0 for good.
        worn = worn & (particles.estimates() > -torch.inf)
        met.append((t, effective_sample_size(particles.log_weights()), worn.sum()))
        particles = _resampled(particles, worn, generator)
        moved = floating("move(position, t, generator)", move(particles.position, t, generator))
        check_shape("move(position, t, generator)", moved, particles.position.shape)
        particles, time = particles._replace(position=moved), t
    estimates, log_weight = particles.estimates(), particles.log_weights()
    log_z = torch.logsumexp(estimates, 0) - math.log(len(estimates))
    if not log_z.isfinite():
        raise ValueError("no particle has any weight: path(·, 1) is −inf wherever they went")
    return AnnealResult(
        log_z,
        (estimates - log_z).exp().std() / math.sqrt(len(estimates)),
        particles.position,
        log_weight.log_softmax(0),
        effective_sample_size(log_weight),
        AnnealHistory(
            log_weight.new_tensor(steps), *(torch.stack(column) for column in list(zip(*met, strict=True))[1:])
        ),
    )


def _schedule(schedule: Sequence[float] | int) -> list[float]:
    if isinstance(schedule, bool | int):
        whole_number("schedule", schedule, most=MOST)
        steps = [(index + 1) / schedule for index in range(schedule)]
    elif isinstance(schedule, Sequence):
        steps = list(schedule)
    else:
        raise TypeError(f"schedule must be a whole number or a sequence of numbers, got {described(schedule)}")
    if not steps or steps[-1] != 1 or any(b <= a for a, b in zip([0.0, *steps], steps, strict=False)):
        raise ValueError(f"schedule must rise from above 0 to 1, got {schedule!r}")
    return steps


def _begin(position: Tensor, groups: int | None) -> _Particles:
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
    densities = [floating("path(position, t)", path(particles.position, at)) for at in (before, t)]
    for density in densities:
        check_values(path=density)
        check_shape("path(position, t)", density, particles.position.shape[:1])
    ratio = (densities[1] - densities[0]).to(old.dtype).reshape(old.shape)
    # What has no weight gets none back.
    new = torch.where(old == -torch.inf, -torch.inf, old + ratio)
    if not (new < torch.inf).all():
        raise ValueError(f"the weights at t = {t} are not defined: a log-density is NaN, or rises from −inf")
    return new


def _resampled(particles: _Particles, worn: Tensor, generator: torch.Generator | None) -> _Particles:
    """The groups that are `worn`, with particles drawn in proportion to their weights."""
    if not worn.any():
        return particles
    groups, size = particles.log_weight.shape
    chosen = worn.unsqueeze(1)
    drawn = resample(particles.log_weight.masked_fill(~chosen, 0.0), generator)
    parent = torch.where(chosen, drawn, torch.arange(size, device=drawn.device))
    parent = (parent + size * torch.arange(groups, device=drawn.device).unsqueeze(1)).flatten()
    return _Particles(
        particles.position[parent],
        particles.log_weight.masked_fill(chosen, 0.0),
        torch.where(worn, particles.estimates(), particles.log_partition),
    )
