"""Attention's flow of a Gaussian law in continuous time, to the end or up to its blow-up (S20, N6)."""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.errors import ConvergenceError
from massieu.foundation.arguments import (
    check_finite,
    check_values,
    floating,
    instance,
    number,
    real,
    whole_number,
)
from massieu.foundation.doors import door
from massieu.foundation.values import promoted_dtype
from massieu.measures import Gaussian
from massieu.population.operator import moments

# Dormand and Prince, J. Comp. Appl. Math. 6 (1980), order 5 with an embedded estimate of order 4. The last stage is the step.
_STAGES = (
    (),
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
_ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)

# Near a blow-up at t* C ~ 1/(t* − t): steps get short, and C doubles within t* − t. A stiff flow takes short steps too,
# but does not grow.
_SHORTEST_STEP = 1e-11
"""Steps shorter than this share of the whole time are looked at."""
_DOUBLING_TIME = 1e-8
"""They mean a blow-up if C grows by itself in this share of the whole time or less."""


class BlowUpError(ArithmeticError):
    """The covariance becomes infinite before the time asked for.

    Attributes:
        time: The time up to which the flow was followed; the blow-up is within 1e-8 of the time asked for after it.
        law: The law at that time.

    Example:
        >>> import torch
        >>> from massieu.measures import Gaussian
        >>> from massieu.papers.theory import BlowUpError, gaussian_flow
        >>> law, one = Gaussian.create(torch.zeros(1), torch.eye(1)), torch.eye(1)
        >>> try:
        ...     gaussian_flow(law, value=one, score=one, time=1.0)
        ... except BlowUpError as error:
        ...     round(error.time, 3)
        0.5
    """

    def __init__(self, message: str, time: float, law: Gaussian) -> None:
        super().__init__(message)
        self.time = time
        self.law = law


@door(time=real)
def gaussian_flow(
    law: Gaussian,
    *,
    value: Float[Tensor, "*H d d"],
    score: Float[Tensor, "*H d d"],
    time: float,
    tolerance: float = 1e-10,
    max_steps: int = 10_000,
) -> Gaussian:
    """The Gaussian law at `time` of tokens that flow under attention, ẋ = Σ_h V_h ∇A(B_hᵀx).

    That is the limit of layers of small step size. With M = Σ_h V_h C B_hᵀ: ṁ = (Σ_h V_h + M)m, Ċ = MC + CMᵀ. What is
    integrated is a factor of C, L̇ = ML, so C stays positive semi-definite of exactly its rank, and the result has that factor.
    Steps are chosen for a relative error of `tolerance` each; computed in float64, differentiable through the steps taken.

    Biases are weights of a coordinate that is always 1: ẋ = Σ_h V_h ∇A(B_hᵀx + q_h) + b is the flow of (x, 1) with the values
    (V_h b/H; 0 0) and the scores (B_h 0; q_hᵀ 0). Its law has the mean (m, 1), and zeros for the last row of the factor of C.

    Source: Castin, Ablin, Carrillo, Peyré, arXiv 2501.18322; S20.

    Args:
        law: Of any rank; the laws of a batch take common steps.
        value, score: V and B, one each or one for each head.
        time: At least 0.
        tolerance: Relative, of a step.
        max_steps: Steps tried.

    Raises:
        BlowUpError: the covariance becomes infinite before `time` (of one law, for a batch).
        ConvergenceError: `time` was not reached in `max_steps`.
        ValueError: shapes that do not fit, matrices that are not finite, a time that is negative or infinite, a tolerance or a
            number of steps that is not positive.
        TypeError: another measure, no floating-point tensors, a time or a tolerance that is no number.

    Example:
        >>> import torch
        >>> from massieu.measures import Gaussian
        >>> from massieu.papers.theory import gaussian_flow
        >>> law = Gaussian.create(torch.zeros(1), torch.eye(1))
        >>> still = gaussian_flow(law, value=torch.zeros(1, 1), score=torch.eye(1), time=1.0)  # nothing is written
        >>> round(still.fisher(torch.zeros(1)).item(), 3)
        1.0
    """
    value, score = _checked_maps(law, value, score)
    number("time", time, least=0)
    number("tolerance", tolerance, above=0)
    whole_number("max_steps", max_steps, least=1)
    dtype = promoted_dtype(law.location)
    # The mean and a factor L of the covariance L Lᵀ, side by side: (*batch, d, 1 + r).
    state = torch.cat([moments(law).mean.double().unsqueeze(-1), _factor(law)], -1)
    velocity = partial(_velocity, value=value, score=score)
    reached = 0.0
    step = 1e-3 * time
    for _ in range(max_steps):
        if reached >= time:
            break
        step = min(step, time - reached)
        after, error = _runge_kutta_step(state, velocity, step)
        # Above 1 the step is rejected, and tried again with a shorter one.
        error_ratio = _relative_error(error, state, after) / tolerance
        if error_ratio <= 1:
            state = after
            reached += step
            if time - reached <= 1e-14 * time:
                reached = time
        # The error of a step is of fifth order in its length.
        step *= min(4.0, max(0.1, 0.9 * max(error_ratio, 1e-10) ** -0.2))
        if reached < time and step < _SHORTEST_STEP * time and _growth(state, velocity) * _DOUBLING_TIME * time > 1:
            message = f"the covariance becomes infinite at time {reached:.6g}, before the {time:g} asked for"
            raise BlowUpError(message, reached, _law_of(state, dtype))
    if reached < time:
        raise ConvergenceError(f"the flow reached time {reached:.6g} of {time:g} in {max_steps} steps; allow more")
    return _law_of(state, dtype)


def _velocity(state: Tensor, value: Float[Tensor, "H d d"], score: Float[Tensor, "H d d"]) -> Tensor:
    """The time derivative of mean and factor: ṁ = (Σ_h V_h + M)m, L̇ = ML with M = Σ_h V_h C B_hᵀ."""
    factor = state[..., 1:].unsqueeze(-3)  # (*batch, 1, d, r)
    # V_h C B_hᵀ as (V_h L)(B_h L)ᵀ, without the covariance.
    matrix = ((value @ factor) @ (score @ factor).mT).sum(-3)
    change = matrix @ state
    mean_change = change[..., :1] + value.sum(0) @ state[..., :1]
    return torch.cat([mean_change, change[..., 1:]], -1)


def _runge_kutta_step(state: Tensor, velocity: Callable[[Tensor], Tensor], length: float) -> tuple[Tensor, Tensor]:
    """The state after a step, and an estimate of its error."""
    slopes: list[Tensor] = []
    stage = state
    for weights in _STAGES:
        if slopes:
            stage = state + _weighted_sum(slopes, weights, length)
        slopes.append(velocity(stage))
    return stage, _weighted_sum(slopes, _ERROR, length)


def _weighted_sum(slopes: list[Tensor], weights: tuple[float, ...], length: float) -> Tensor:
    total = torch.zeros_like(slopes[0])
    for slope, weight in zip(slopes, weights, strict=True):
        if weight:
            total = total + (length * weight) * slope
    return total


def _growth(state: Tensor, velocity: Callable[[Tensor], Tensor]) -> float:
    """The largest rate d log(tr C)/dt of the batch."""
    with torch.no_grad():
        factor = state[..., 1:].flatten(-2)
        change = velocity(state)[..., 1:].flatten(-2)
        # tr C = ‖L‖², in units of which no product overflows.
        norm = torch.where(factor == 0, 1.0, factor).norm(dim=-1, keepdim=True)
        return (2 * ((factor / norm) * (change / norm)).sum(-1)).max().item()


def _relative_error(error: Tensor, before: Tensor, after: Tensor) -> float:
    """The largest error of the batch, relative to the size of its state; infinite where the step is not finite."""
    size = torch.maximum(_norm(before), _norm(after))
    is_zero = size == 0
    largest = torch.where(is_zero, 0.0, _norm(error) / torch.where(is_zero, 1.0, size)).max().item()
    return largest if largest < torch.inf else torch.inf  # NaN is not below infinity


def _norm(state: Tensor) -> Float[Tensor, "*batch"]:
    return state.detach().flatten(-2).norm(dim=-1)


def _factor(law: Gaussian) -> Float[Tensor, "*batch d r"]:
    """L with L Lᵀ = C, of as many columns as the largest rank in the batch."""
    covariance = moments(law).covariance.double()
    dtype = promoted_dtype(law.location)
    eigenvalues, vectors = torch.linalg.eigh(covariance)
    rounding = covariance.shape[-1] * torch.finfo(dtype).eps * eigenvalues[..., -1:]
    is_positive = eigenvalues > rounding
    rank = int(is_positive.sum(-1).max())
    # The inner `where` keeps the derivative of the root at 0 out of the gradient.
    roots = torch.where(is_positive, torch.where(is_positive, eigenvalues, 1.0).sqrt(), 0.0)
    # Eigenvalues ascend: the last columns are those that are not 0.
    return (vectors * roots.unsqueeze(-2))[..., vectors.shape[-1] - rank :]


def _law_of(state: Tensor, dtype: torch.dtype) -> Gaussian:
    return Gaussian.create(state[..., 0].to(dtype), factor=state[..., 1:].to(dtype))


def _checked_maps(law: Gaussian, value: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
    """Value and score of each head in float64, both (H, d, d)."""
    size = instance("law", law, Gaussian, "a massieu.measures.Gaussian").event_shape[0]
    shape = floating("value", value).shape
    same_shape = shape == floating("score", score).shape
    if not same_shape or len(shape) not in (2, 3) or shape[-2:] != (size, size) or not shape[0]:
        raise ValueError(
            f"value and score must both have shape ({size}, {size}) or (H, {size}, {size}), got {tuple(shape)} and "
            f"{tuple(score.shape)}"
        )
    check_values(law=law.location, value=value, score=score)
    check_finite(value=value, score=score)
    value = value.to(law.location.device, torch.float64)
    score = score.to(law.location.device, torch.float64)
    if value.ndim == 2:
        return value.unsqueeze(0), score.unsqueeze(0)
    return value, score
