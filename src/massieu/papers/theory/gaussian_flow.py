"""Attention's flow of a Gaussian law in continuous time, to the end or up to its blow-up (S20, N6)."""

from collections.abc import Callable

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

# Dormand and Prince, J. Comp. Appl. Math. 6 (1980), order 5 with an embedded estimate of order 4.
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

_SHORTEST = 1e-11
_NEAR = 1e-8
"""Steps shorter than the first share of the whole time mean a blow-up at t* if C grows by itself in the second or less:
C ~ 1/(t* − t). A stiff flow takes short steps too, but does not grow."""


class BlowUpError(ArithmeticError):
    """The covariance becomes infinite before the time asked for.

    Attributes:
        time: The time up to which the flow was followed; the blow-up is within 1e-8 of the time asked for after it.
        law: The law there.

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
        self.time, self.law = time, law


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
    value, score = _check(law, value, score, time, tolerance, max_steps)
    # The mean and a factor L of the covariance L Lᵀ, side by side: (*batch, d, 1 + r).
    state = torch.cat([moments(law).mean.double().unsqueeze(-1), _factor(law)], -1)

    def slope(at: Tensor) -> Tensor:
        factor = at[..., 1:].unsqueeze(-3)
        pull = ((value @ factor) @ (score @ factor).mT).sum(-3)
        change = pull @ at
        return torch.cat([change[..., :1] + value.sum(0) @ at[..., :1], change[..., 1:]], -1)

    done, step, dtype = 0.0, 1e-3 * time, promoted_dtype(law.location)
    for _ in range(max_steps):
        if done >= time:
            break
        step = min(step, time - done)
        after, error = _step(state, slope, step)
        ratio = _size(error, state, after) / tolerance
        if ratio <= 1:
            state, done = after, done + step
            done = time if time - done <= 1e-14 * time else done
        step *= min(4.0, max(0.1, 0.9 * max(ratio, 1e-10) ** -0.2))
        if done < time and step < _SHORTEST * time and _growth(state, slope) * _NEAR * time > 1:
            where = f"the covariance becomes infinite at time {done:.6g}, before the {time:g} asked for"
            raise BlowUpError(where, done, _law(state, dtype))
    else:
        if done < time:
            raise ConvergenceError(f"the flow reached time {done:.6g} of {time:g} in {max_steps} steps; allow more")
    return _law(state, dtype)


def _step(state: Tensor, slope: Callable[[Tensor], Tensor], length: float) -> tuple[Tensor, Tensor]:
    """The state after a step, and an estimate of its error."""
    slopes: list[Tensor] = []
    at = state
    for weights in _STAGES:
        at = state + _combined(slopes, weights, length) if slopes else state
        slopes.append(slope(at))
    return at, _combined(slopes, _ERROR, length)


def _combined(slopes: list[Tensor], weights: tuple[float, ...], length: float) -> Tensor:
    total = torch.zeros_like(slopes[0])
    for change, weight in zip(slopes, weights, strict=True):
        total = total + (length * weight) * change if weight else total
    return total


def _growth(state: Tensor, slope: Callable[[Tensor], Tensor]) -> float:
    """The largest rate d log(tr C)/dt of the batch."""
    with torch.no_grad():
        factor, change = (each[..., 1:].flatten(-2) for each in (state, slope(state)))
        size = torch.where(factor == 0, 1.0, factor).norm(dim=-1, keepdim=True)
        return (2 * ((factor / size) * (change / size)).sum(-1)).max().item()


def _size(error: Tensor, before: Tensor, after: Tensor) -> float:
    """The largest error of the batch, relative to the state's own size; infinite where the step left the finite numbers."""
    error, before, after = (each.detach().flatten(-2).norm(dim=-1) for each in (error, before, after))
    size = torch.maximum(before, after)
    found = torch.where(size == 0, 0.0, error / torch.where(size == 0, 1.0, size)).max().item()
    return found if found < torch.inf else torch.inf


def _factor(law: Gaussian) -> Float[Tensor, "*batch d r"]:
    """L with L Lᵀ = C, of as many columns as the largest rank in the batch."""
    covariance = moments(law).covariance.double()
    dtype = promoted_dtype(law.location)
    eigenvalues, vectors = torch.linalg.eigh(covariance)
    rounding = covariance.shape[-1] * torch.finfo(dtype).eps * eigenvalues[..., -1:]
    kept = eigenvalues > rounding
    columns = int(kept.sum(-1).max())
    roots = torch.where(kept, torch.where(kept, eigenvalues, 1.0).sqrt(), 0.0)
    return (vectors * roots.unsqueeze(-2))[..., vectors.shape[-1] - columns :]


def _law(state: Tensor, dtype: torch.dtype) -> Gaussian:
    return Gaussian.create(state[..., 0].to(dtype), factor=state[..., 1:].to(dtype))


def _check(
    law: Gaussian, value: Tensor, score: Tensor, time: float, tolerance: float, max_steps: int
) -> tuple[Tensor, Tensor]:
    size = instance("law", law, Gaussian, "a massieu.measures.Gaussian").event_shape[0]
    shape = floating("value", value).shape
    if (
        shape != floating("score", score).shape
        or len(shape) not in (2, 3)
        or shape[-2:] != (size, size)
        or not shape[0]
    ):
        raise ValueError(
            f"value and score must both have shape ({size}, {size}) or (H, {size}, {size}), got {tuple(shape)} and "
            f"{tuple(score.shape)}"
        )
    check_values(law=law.location, value=value, score=score)
    check_finite(value=value, score=score)
    number("time", time, least=0)
    number("tolerance", tolerance, above=0)
    whole_number("max_steps", max_steps, least=1)
    value, score = (each.to(law.location.device, torch.float64) for each in (value, score))
    return (value, score) if value.ndim == 3 else (value.unsqueeze(0), score.unsqueeze(0))
