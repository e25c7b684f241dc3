"""The one unknown of α-entmax, found by Newton's method.

With d = z − max z, a = α − 1 and the largest weight e^{−λ}, the weights are those of the *stretched* scores D = d e^{aλ}:

    p_n = e_a(D_n)/E,  e_a(D) = [1 + aD]₊^{1/a},  E = Σ e_a(D_n) = e^λ.

So written the weights sum to one by construction, a small largest weight keeps its digits, and a = 0 is no special case.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from massieu.foundation.numerics import TAYLOR_RADIUS, second_phi_series
from massieu.foundation.transforms import derivative_orders, repeat

_CONVEX_STEPS = 16
"""Limit of steps for α ≤ 2, where Newton's method is monotone; 8 are the most that were seen."""
_STEPS = 60
"""Limit of steps for other α: more than bisection to rounding takes."""
_UNDERFLOW = -1000.0
"""Below this D, e_a(D) ≤ e^D is 0 in every dtype."""
_SERIES_RADIUS = 0.1
_SERIES_TERMS = 17
"""The series of log(1 + x)/x is exact to float64's rounding at |x| below the radius."""


def solve(distance: Tensor, a: float | Tensor) -> tuple[Tensor, Tensor]:
    """Weights and Ω* (..., 1) of scores whose largest is 0; not differentiable."""
    return _result(distance, a, _solve_for_unknown(distance, a), smooth=False)


def solve_differentiably(distance: Tensor, a: float | Tensor) -> tuple[Tensor, Tensor]:
    """The same by plain operations, with derivatives in `distance` and `a` of every order that is taken.

    Newton steps at the solution change nothing but the derivatives: n of them make 2ⁿ − 1 orders right.
    """
    constant_a = a.detach() if isinstance(a, Tensor) else a
    unknown = _solve_for_unknown(distance.detach(), constant_a)
    for _ in range(derivative_orders().bit_length()):
        power, slope = _stretched(distance, a, unknown, smooth=True)
        total = power.sum(-1, keepdim=True)
        unknown = unknown + total / slope.sum(-1, keepdim=True) * (total.log() - unknown)
    return _result(distance, a, unknown, smooth=True)


def first_phi(y: Tensor) -> Tensor:
    """φ₁(y) = (eʸ − 1)/y."""
    small = y.abs() < TAYLOR_RADIUS
    near = torch.where(small, y, 0.0)
    away = torch.where(small, 1.0, y)
    return torch.where(small, 1 + near * second_phi(near), torch.expm1(away) / away)


def second_phi(y: Tensor) -> Tensor:
    """φ₂(y) = (eʸ − 1 − y)/y²."""
    small = y.abs() < TAYLOR_RADIUS
    near = torch.where(small, y, 0.0)
    away = torch.where(small, 1.0, y)
    return torch.where(small, second_phi_series(near), (torch.expm1(away) - away) / away.square())


class _State(NamedTuple):
    """The state of Newton's method for each row; all of shape (..., 1)."""

    unknown: Tensor  # λ
    low: Tensor  # the bracket of λ
    high: Tensor
    last_step: Tensor  # |Δλ| of the last step
    done: Tensor


def _solve_for_unknown(distance: Tensor, a: float | Tensor) -> Tensor:
    """λ, shape (..., 1).

    For a ≤ 1, E^a as a function of the threshold is a norm of convex functions: Newton's method on it rises to the
    solution from λ = 0, in one step if a = 0 or the scores of the support are equal. For a > 1 the method is confined to a
    bracket, which is bisected wherever a step is not at most half of the one before.
    """

    def step(state: _State, distance: Tensor, *order: Tensor) -> _State:
        return _step(state, distance, a if isinstance(a, float) else order[0])

    # E lies between 1, its largest term, and the number of terms.
    zero = torch.zeros_like(distance[..., :1])
    high = torch.full_like(zero, distance.shape[-1]).log()
    start = _State(zero, zero, high, high, torch.zeros_like(zero, dtype=torch.bool))
    limit = _CONVEX_STEPS if isinstance(a, float) and a <= 1 else _STEPS
    constants = (distance, a) if isinstance(a, Tensor) else (distance,)
    return repeat(step, start, lambda state: ~state.done, limit, constants).unknown


def _step(state: _State, distance: Tensor, a: float | Tensor) -> _State:
    """One Newton step of the rows that are not done; the others keep their λ, so that no row depends on its batch mates."""
    unknown = state.unknown
    power, slope = _stretched(distance, a, unknown, smooth=False)
    total = power.sum(-1, keepdim=True)
    excess = total.log() - unknown
    # The step is one in e^{−aλ}, whose relative change is a·shrink; −log(1 + a·shrink)/a takes it back to λ, also at a = 0.
    shrink = -total / slope.sum(-1, keepdim=True) * excess * first_phi(-a * excess)
    trial = unknown - shrink * _log_ratio(a * shrink, smooth=False)
    low = torch.where(excess >= 0, unknown, state.low)
    high = torch.where(excess <= 0, unknown, state.high)
    if isinstance(a, Tensor) or a > 1:
        in_bracket = (trial >= low) & (trial <= high)
        halves = (trial - unknown).abs() <= 0.5 * state.last_step
        accepted = in_bracket & (halves | _at_most_one(a, in_bracket))
        trial = torch.where(accepted, trial, 0.5 * (low + high))
    last_step = (trial - unknown).abs()
    # Negated, so that a NaN is done too.
    done = state.done | ~(last_step > 2 * torch.finfo(distance.dtype).eps * (1 + trial))
    return _State(torch.where(state.done, unknown, trial), low, high, last_step, done)


def _at_most_one(a: float | Tensor, like: Tensor) -> Tensor:
    """Whether a ≤ 1, where Newton's method needs no bracket; as a tensor of booleans."""
    if isinstance(a, Tensor):
        return a <= 1
    return torch.full_like(like, a <= 1)


def _result(distance: Tensor, a: float | Tensor, unknown: Tensor, smooth: bool) -> tuple[Tensor, Tensor]:
    """Weights and Ω* (..., 1) at the solution λ."""
    power, _ = _stretched(distance, a, unknown, smooth)
    weights = power / power.sum(-1, keepdim=True)
    # z_n − (p_n^a − 1)/a is one number t wherever p_n > 0, which leaves of Ω* = p·z + H only:
    threshold = unknown * first_phi(-a * unknown)
    return weights, (threshold + a * (weights * distance).sum(-1, keepdim=True)) / (1 + a)


def _stretched(distance: Tensor, a: float | Tensor, unknown: Tensor, smooth: bool) -> tuple[Tensor, Tensor]:
    """e_a(D) and its derivative e_a(D)/(1 + aD); `smooth` where they are to be differentiated."""
    # e^limit is the root of the largest number, so that its product with a distance stays finite.
    limit = 0.5 * math.log(torch.finfo(distance.dtype).max)
    distance = distance * torch.exp((a * unknown).clamp_max(limit))
    x = a * distance
    if isinstance(a, float) and a == 1:
        base = (1 + x).clamp_min(0)
        return base, (base > 0).to(base.dtype)
    if isinstance(a, float) and a == 0.5:
        base = (1 + x).clamp_min(0)
        return base.square(), base
    inside = (x > -1) & (distance > _UNDERFLOW)
    x = torch.where(inside, x, 0.0)
    power = torch.where(inside, torch.exp(torch.where(inside, distance, 0.0) * _log_ratio(x, smooth)), 0.0)
    return power, power / (1 + x)


def _log_ratio(x: Tensor, smooth: bool) -> Tensor:
    """log(1 + x)/x; if `smooth`, by a series near 0, without which its derivatives would lose their digits there."""
    if not smooth:
        return torch.where(x == 0, 1.0, torch.log1p(x) / torch.where(x == 0, 1.0, x))
    small = x.abs() < _SERIES_RADIUS
    near = torch.where(small, -x, 0.0)
    # Horner's scheme for Σ (−x)^n/(n + 1).
    series = torch.zeros_like(x)
    for power in range(_SERIES_TERMS, 0, -1):
        series = 1 / power + near * series
    away = torch.where(small, 1.0, x)
    return torch.where(small, series, torch.log1p(away) / away)
