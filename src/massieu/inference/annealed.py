"""Annealed importance sampling and sequential Monte Carlo: log Z of a density, with its standard error.

Particles walk from a law that can be drawn exactly to the one that is asked for, along a path of densities. The product
of the ratios that they meet is an unbiased estimate of the ratio of the normalisers. `anneal_init` makes a state,
`anneal_step` goes to the next density of the path, `anneal_result` reads the estimate off, `anneal` does all.

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

from massieu.inference.arguments import floating
from massieu.inference.resampling import Resampling, check_method, effective_sample_size, resample

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


class AnnealState(NamedTuple):
    """Weighted particles somewhere on the path; particle i is of group i // size."""

    position: Float[Tensor, "particles *event"]
    log_weight: Float[Tensor, "groups size"]
    """Since the group was last resampled."""
    log_partition: Float[Tensor, " groups"]
    """log of the product of the mean weights at a group's resamplings so far."""
    t: float
    history: AnnealHistory


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


def anneal_init(position: Float[Tensor, "particles *event"], groups: int | None = None) -> AnnealState:
    """Particles drawn exactly from exp(path(·, 0)).

    Args:
        groups: how many independent groups of equal size there are; None: each particle is one.

    Raises:
        ValueError: fewer than two groups, of which no error can be told, or groups that do not divide the particles.
    """
    particles = position.shape[0] if floating("position", position).ndim else 0
    groups = particles if groups is None else groups
    if groups < 2 or particles % groups:
        raise ValueError(f"there must be at least two groups that divide the particles, got {groups} and {particles}")
    dtype = torch.promote_types(position.dtype, torch.float32)
    log_weight = torch.zeros(groups, particles // groups, dtype=dtype, device=position.device)
    history = AnnealHistory(
        log_weight.new_zeros(0), log_weight.new_zeros(0), torch.zeros(0, dtype=torch.int64, device=position.device)
    )
    return AnnealState(position, log_weight, log_weight[:, 0], 0.0, history)


@torch.no_grad()
def anneal_step(
    state: AnnealState,
    t: float,
    path: Path,
    move: Move,
    generator: torch.Generator | None = None,
    *,
    threshold: float = 0.5,
    resampling: Resampling = "systematic",
) -> AnnealState:
    """Weigh the particles by exp(path(·, t) − path(·, state.t)), resample where need be, and move them at t.

    Args:
        threshold: a group is resampled when its effective sample size falls below this share of its particles;
            0 for never.
        resampling: as in `resample`.

    Raises:
        ValueError: t is not behind `state.t` and at most 1; an unknown resampling; a log-density is NaN, or rises from −inf.
    """
    if not state.t < t <= 1:
        raise ValueError(f"t must be above {state.t} and at most 1, got {t}")
    check_method(resampling)
    before, after = (floating("path(position, t)", path(state.position, at)) for at in (state.t, t))
    if not before.shape == after.shape == state.position.shape[:1]:
        wanted = tuple(state.position.shape[:1])
        raise ValueError(f"path must return a number a particle, {wanted}, got shape {tuple(after.shape)}")
    ratio = after - before
    log_weight = state.log_weight + ratio.to(state.log_weight.dtype).reshape(state.log_weight.shape)
    log_weight = torch.where(
        state.log_weight == -torch.inf, -torch.inf, log_weight
    )  # what has no weight gets none back
    if log_weight.isnan().any() or (log_weight == torch.inf).any():
        raise ValueError(f"the weights at t = {t} are not defined: a log-density is NaN, or rises from −inf")
    state = state._replace(log_weight=log_weight)
    worn = effective_sample_size(log_weight) < threshold * log_weight.shape[1]
    # A group without any weight stays as it is: its estimate is 0 for good.
    worn = worn & (torch.logsumexp(log_weight, 1) > -torch.inf)
    state = state._replace(history=_recorded(state, t, worn))
    state = _resampled(state, worn, resampling, generator)
    return state._replace(position=move(state.position, t, generator), t=t)


def anneal_result(state: AnnealState) -> AnnealResult:
    """The estimate, once the path's end is reached.

    Raises:
        ValueError: the path's end is not reached, or no particle has any weight.
    """
    if state.t != 1:
        raise ValueError(f"the path ends at t = 1, and this state is at t = {state.t}")
    groups, size = state.log_weight.shape
    estimate = state.log_partition + torch.logsumexp(state.log_weight, 1) - math.log(size)
    log_z = torch.logsumexp(estimate, 0) - math.log(groups)
    if not log_z.isfinite():
        raise ValueError("no particle has any weight: path(·, 1) is −inf wherever they went")
    relative = (estimate - log_z).exp()
    log_weight = _log_weights(state).log_softmax(0)
    return AnnealResult(
        log_z,
        relative.std() / math.sqrt(groups),
        state.position,
        log_weight,
        effective_sample_size(log_weight),
        state.history,
    )


def anneal(
    position: Float[Tensor, "particles *event"],
    path: Path,
    move: Move,
    *,
    schedule: Sequence[float] | int = 100,
    groups: int | None = None,
    threshold: float = 0.5,
    resampling: Resampling = "systematic",
    generator: torch.Generator | None = None,
    progress: Callable[[Sequence[float]], Iterable[Any]] = iter,
) -> AnnealResult:
    """log Z(1)/Z(0) by annealed importance sampling or, with `groups`, by sequential Monte Carlo.

    Args:
        position: drawn exactly from exp(path(·, 0)).
        schedule: rising values of t above 0 that end with 1, or how many equal steps.
        groups, threshold, resampling: as in `anneal_init` and `anneal_step`. Sixteen groups tell the error to a fifth.
        progress: wraps the schedule, as `rich.progress.track` does.

    Raises:
        ValueError: a schedule that does not rise to 1, a threshold outside [0, 1], and as `anneal_init` and `anneal_step`.
    """
    if isinstance(schedule, Tensor):
        raise TypeError("schedule must be a whole number or a sequence of numbers, got a tensor: pass .tolist()")
    if isinstance(schedule, bool) or not isinstance(schedule, int | Sequence):
        raise TypeError(f"schedule must be a whole number or a sequence of numbers, got {type(schedule).__name__}")
    steps = [(index + 1) / schedule for index in range(schedule)] if isinstance(schedule, int) else list(schedule)
    if not steps or steps[-1] != 1 or any(b <= a for a, b in zip([0.0, *steps], steps, strict=False)):
        raise ValueError(f"schedule must rise from above 0 to 1, got {schedule!r}")
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold must be a share between 0 and 1, got {threshold}")
    state = anneal_init(position, groups)
    for t in progress(steps):
        state = anneal_step(state, t, path, move, generator, threshold=threshold, resampling=resampling)
    return anneal_result(state)


def _log_weights(state: AnnealState) -> Float[Tensor, " particles"]:
    """Of all particles, those of resampled groups included."""
    return (state.log_partition.unsqueeze(1) + state.log_weight).flatten()


def _recorded(state: AnnealState, t: float, worn: Tensor) -> AnnealHistory:
    met = (state.log_weight.new_tensor(t), effective_sample_size(_log_weights(state)), worn.sum())
    return AnnealHistory(*(torch.cat([kept, new.reshape(1)]) for kept, new in zip(state.history, met, strict=True)))


def _resampled(
    state: AnnealState, worn: Tensor, resampling: Resampling, generator: torch.Generator | None
) -> AnnealState:
    """The groups that are `worn`, with particles drawn in proportion to their weights."""
    if not worn.any():
        return state
    groups, size = state.log_weight.shape
    chosen = worn.unsqueeze(1)
    drawn = resample(state.log_weight.masked_fill(~chosen, 0.0), resampling, generator)
    parent = torch.where(chosen, drawn, torch.arange(size, device=drawn.device))
    parent = (parent + size * torch.arange(groups, device=drawn.device).unsqueeze(1)).flatten()
    mean_weight = torch.logsumexp(state.log_weight, 1) - math.log(size)
    return state._replace(
        position=state.position[parent],
        log_weight=state.log_weight.masked_fill(chosen, 0.0),
        log_partition=state.log_partition + torch.where(worn, mean_weight, 0.0),
    )
