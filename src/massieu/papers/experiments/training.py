"""The one training loop: Adam, a step size that falls to zero, and the mean of the last weights; slopes of what came out."""

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
    averaged: float = 0.0,
) -> list[float]:
    """Minimise an expected loss of which each call draws an estimate; returns the losses.

    Args:
        step_size: At the start; it falls to 0 along half a cosine.
        averaged: The share of the last steps over whose weights the result is the mean.
    """
    chosen = list(parameters)
    optimiser = torch.optim.Adam(chosen, lr=step_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))
    losses, first, sums, count = [], math.ceil(steps * (1 - averaged)), [torch.zeros_like(p) for p in chosen], 0
    for step in range(steps):
        optimiser.zero_grad()
        found = loss()
        found.backward()
        optimiser.step()
        schedule.step()
        losses.append(found.item())
        if step >= first:
            count += 1
            for total, parameter in zip(sums, chosen, strict=True):
                total += parameter.detach()
    if count:
        with torch.no_grad():
            for total, parameter in zip(sums, chosen, strict=True):
                parameter.copy_(total / count)
    return losses


def slope(x: Float64[Tensor, " n"], y: Float64[Tensor, " n"]) -> float:
    """Of the least-squares line."""
    apart = x - x.mean()
    return float((apart * (y - y.mean())).sum() / apart.square().sum())
