"""Updates that rounding loses: the share of weights in half precision that an optimiser's step leaves as they were."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.optim import Optimizer

from massieu.probing.monitor.training import groups

SAMPLE = 1024
"""Entries of a weight that are compared at most, evenly spaced."""
_HALF = (torch.float16, torch.bfloat16)


class _Before(NamedTuple):
    """Some entries of a weight before a step, and which of them have a gradient.

    Attributes:
        places: of the entries in the weight's row of numbers.
        entries_each: how many entries of the weight one of the sample stands for.
    """

    weight: Tensor
    places: Int[Tensor, " S"]
    values: Float[Tensor, " S"]
    has_gradient: Bool[Tensor, " S"]
    entries_each: float


class UnchangedWeights:
    """Of the weights in half precision that have a gradient, how many a step leaves bit for bit as they were.

    A weight w in bfloat16 has neighbours at a distance of |w|/256 to |w|/128: a step of less than half of that is lost.
    Left out are weights of a group whose learning rate is 0, or has risen since the step that was compared before: a warm-up
    means its steps to be small, and loses little with them. So are weights that are sharded over processes.
    """

    def __init__(self) -> None:
        # Of each optimiser's groups, at the step before.
        self._rates: dict[int, list[float]] = {}
        self._before: dict[int, list[_Before]] = {}
        # For each optimiser (2,): entries that stayed, and entries that have a gradient.
        self._counts: dict[int, Tensor] = {}

    @torch.no_grad()
    def begin(self, optimizer: Optimizer) -> None:
        """Keep some entries of each weight, as a step of this optimiser begins."""
        rates = [float(group["lr"]) for group in groups([optimizer])]
        rates_before = self._rates.get(id(optimizer), [])
        self._rates[id(optimizer)] = rates
        settled = [
            group
            for group, rate, before in zip(groups([optimizer]), rates, rates_before, strict=False)
            if 0 < rate <= before
        ]
        trained = [weight for group in settled for weight in group["params"]]
        self._before[id(optimizer)] = [_sampled(weight) for weight in _half(trained)]

    @torch.no_grad()
    def end(self, optimizer: Optimizer) -> None:
        """Compare them, as the step has ended."""
        counts = []
        for weight, places, values, has_gradient, entries_each in self._before.pop(id(optimizer), []):
            stayed = has_gradient & (weight.detach().flatten()[places] == values)
            counts.append(torch.stack([stayed.sum(), has_gradient.sum()]).cpu() * entries_each)
        if counts:
            self._counts[id(optimizer)] = torch.stack(counts).sum(0)

    def share(self) -> float | None:
        """Of all optimisers' latest steps together, which are then forgotten; None where no such weight has a gradient."""
        counts = list(self._counts.values())
        self.clear()
        if not counts:
            return None
        stayed, total = torch.stack(counts).sum(0).tolist()
        return stayed / total if total else None

    def clear(self) -> None:
        """Forget the steps."""
        self._before.clear()
        self._counts.clear()


def _half(weights: Iterable[Tensor]) -> list[Tensor]:
    """Those in half precision, with a gradient, that are whole on this process."""
    return [
        weight
        for weight in weights
        if weight.dtype in _HALF
        and weight.grad is not None
        and weight.grad.layout == torch.strided
        and not hasattr(weight, "device_mesh")
    ]


def _sampled(weight: Tensor) -> _Before:
    count = min(SAMPLE, weight.numel())
    places = torch.linspace(0, weight.numel() - 1, count, dtype=torch.float64, device=weight.device).long()
    assert weight.grad is not None
    has_gradient = weight.grad.flatten()[places] != 0
    return _Before(weight, places, weight.detach().flatten()[places], has_gradient, weight.numel() / max(count, 1))
