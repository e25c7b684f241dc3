"""The one training loop, Adam with a step size that falls to zero and the mean of the last weights; and a fitted slope."""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float64
from torch import Tensor


def minimise(
    loss: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    *,
    steps: int,
    step_size: float,
    averaged_share: float = 0.0,
) -> list[float]:
    """Minimise an expected loss; returns the loss of each step.

    Args:
        loss: Draws an estimate of the loss.
        parameters: What is trained, in place.
        steps: The number of steps.
        step_size: The step size at the start; it falls to 0 along half a cosine.
        averaged_share: The share of the steps, the last ones, over which the resulting parameters are averaged.
    """
    optimiser = torch.optim.Adam(list(parameters), lr=step_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))
    losses = []
    first_averaged = math.ceil(steps * (1 - averaged_share))
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    for step in range(steps):
        optimiser.zero_grad()
        estimate = loss()
        estimate.backward()
        optimiser.step()
        schedule.step()
        losses.append(estimate.item())
        if step >= first_averaged:
            for total, parameter in zip(sums, parameters, strict=True):
                total += parameter.detach()
    num_averaged = steps - first_averaged
    if num_averaged > 0:
        with torch.no_grad():
            for total, parameter in zip(sums, parameters, strict=True):
                parameter.copy_(total / num_averaged)
    return losses


def slope(x: Float64[Tensor, " n"], y: Float64[Tensor, " n"]) -> float:
    """The slope of the least-squares line through the points."""
    centred = x - x.mean()
    return float((centred * (y - y.mean())).sum() / centred.square().sum())
