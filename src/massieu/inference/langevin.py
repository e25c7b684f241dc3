"""Langevin dynamics with Metropolis correction: samples of exp(log_density) for a density one can differentiate.

A sampler is a pair: `langevin_init` makes a state, `langevin_step` maps a state and its noise to the next one. Noise is
drawn apart (`langevin_noise`), so that the step is a function like any other: it can be repeated, vectorised, tested.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.foundation.arguments import check_shape, check_values, floating, number, of_class, real
from massieu.foundation.doors import door
from massieu.foundation.short_repr import fields_html, fields_repr

LogDensity = Callable[[Float[Tensor, "chains *event"]], Float[Tensor, " chains"]]


class LangevinState(NamedTuple):
    """Where the chains are, with the log-density and its gradient there, which the next step needs."""

    position: Float[Tensor, "chains *event"]
    log_density: Float[Tensor, " chains"]
    """In nats, up to the constant that `log_density` leaves out."""
    gradient: Float[Tensor, "chains *event"]
    """Of the log-density, at the position."""


class LangevinNoiseResult(NamedTuple):
    """The random numbers of one step."""

    normal: Float[Tensor, "chains *event"]
    uniform: Float[Tensor, " chains"]

    __repr__ = fields_repr
    _repr_html_ = fields_html


class LangevinResult(NamedTuple):
    """The chains after one step, and which of them moved."""

    state: LangevinState
    accepted: Bool[Tensor, " chains"]
    acceptance: Float[Tensor, " chains"]
    """The probability with which the proposal was to be accepted."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


@door
def langevin_init(position: Float[Tensor, "chains *event"], log_density: LogDensity) -> LangevinState:
    """Start Langevin chains at `position`.

    Raises:
        TypeError: `position` is not a floating-point tensor.
        ValueError: it has no chain, `log_density` does not return a number a chain, or that or its gradient is not
            finite.

    Example:
        >>> import torch
        >>> from massieu.inference import langevin_init
        >>> langevin_init(torch.ones(2, 1), lambda x: -0.5 * x.square().sum(-1)).gradient.tolist()
        [[-1.0], [-1.0]]
    """
    if floating("position", position).ndim == 0 or position.shape[0] == 0:
        raise ValueError(
            f"position must have shape (chains, *event) with at least one chain, got {tuple(position.shape)}"
        )
    check_values(position=position)
    state = _evaluate(position, log_density)
    # From a gradient that is not finite every proposal is refused, so that such a chain would never move.
    if not (state.log_density.isfinite().all() and state.gradient.isfinite().all()):
        raise ValueError("every chain must start where the log-density and its gradient are finite")
    return state


@door(state=partial(of_class, kind="LangevinState"))
def langevin_noise(state: LangevinState, generator: torch.Generator | None = None) -> LangevinNoiseResult:
    """Draw the noise for one Langevin step from `state`.

    Example:
        >>> import torch
        >>> from massieu.inference import langevin_init, langevin_noise
        >>> state = langevin_init(torch.ones(2, 3), lambda x: -0.5 * x.square().sum(-1))
        >>> [tuple(part.shape) for part in langevin_noise(state)]
        [(2, 3), (2,)]
    """
    options = {"dtype": state.position.dtype, "device": state.position.device, "generator": generator}
    normal = torch.randn(state.position.shape, **options)
    uniform = torch.rand(state.log_density.shape, **options)
    return LangevinNoiseResult(normal, uniform)


@door(
    state=partial(of_class, kind="LangevinState"), noise=partial(of_class, kind="LangevinNoiseResult"), step_size=real
)
def langevin_step(
    state: LangevinState, noise: LangevinNoiseResult, log_density: LogDensity, *, step_size: float
) -> LangevinResult:
    """One Metropolis-adjusted Langevin step: a proposal along the gradient, accepted so that exp(log_density) is invariant.

    Proposed is x + ½ε²∇log p(x) + ε·normal with ε = `step_size`; a proposal of which density or gradient is not finite is
    refused.

    Raises:
        ValueError: `step_size` is not positive and finite.

    Example:
        >>> import torch
        >>> from massieu.inference import langevin_init, langevin_step
        >>> from massieu.inference.langevin import LangevinNoiseResult
        >>> log_density = lambda x: -0.5 * x.square().sum(-1)
        >>> state, still = langevin_init(torch.ones(1, 1), log_density), torch.zeros(1, 1)
        >>> noise = LangevinNoiseResult(still, still[0])
        >>> langevin_step(state, noise, log_density, step_size=1.0).state.position.item()  # x − ½ε²x
        0.5
    """
    number("step_size", step_size, above=0)
    proposal = _evaluate(state.position + _drift(state, step_size) + step_size * noise.normal, log_density)
    # The Metropolis–Hastings ratio p(y)q(x|y) / p(x)q(y|x), where q(·|x) is Gaussian of variance ε² about x + drift(x).
    squared_noise = _squared_norm(step_size * noise.normal)
    squared_noise_back = _squared_norm(state.position - proposal.position - _drift(proposal, step_size))
    log_proposal_ratio = (squared_noise - squared_noise_back) / (2 * step_size**2)
    log_ratio = proposal.log_density - state.log_density + log_proposal_ratio
    acceptance = log_ratio.clamp(max=0.0).exp().nan_to_num(nan=0.0)
    accepted = noise.uniform < acceptance

    def chosen(new: Tensor, old: Tensor) -> Tensor:
        """The proposal's value for the chains that accepted it."""
        return torch.where(accepted.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    next_state = LangevinState(
        position=chosen(proposal.position, state.position),
        log_density=chosen(proposal.log_density, state.log_density),
        gradient=chosen(proposal.gradient, state.gradient),
    )
    return LangevinResult(next_state, accepted, acceptance)


def _evaluate(position: Tensor, log_density: LogDensity) -> LangevinState:
    """The chains at a position, with the density and its gradient there, both detached."""
    position = position.detach()

    def total_and_each(points: Tensor) -> tuple[Tensor, Tensor]:
        densities = floating("log_density(position)", log_density(points))
        check_values(log_density=densities)
        check_shape("log_density(position), a number a chain,", densities, position.shape[:1])
        return densities.sum(), densities

    # Chains do not act on each other, so that the gradient of the sum holds each chain's own.
    gradient, densities = torch.func.grad(total_and_each, has_aux=True)(position)
    return LangevinState(position, densities.detach(), gradient)


def _drift(state: LangevinState, step_size: float) -> Tensor:
    """½ε²∇log p at the chains."""
    return 0.5 * step_size**2 * state.gradient


def _squared_norm(tensor: Tensor) -> Tensor:
    """‖·‖² of each chain."""
    return tensor.square().flatten(1).sum(-1)
