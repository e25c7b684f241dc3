"""Updates that rounding loses: the share of weights in half precision that an optimiser's step leaves as they were."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.optim import Optimizer

from massieu.probing.monitor.optimizers import parameter_groups

SAMPLE = 1024
"""Entries of a weight that are compared at most, evenly spaced."""
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class _WeightSample:
    """Entries of a weight before a step, evenly spaced.

    Attributes:
        places: of the entries in the flattened weight.
        values: of the entries before the step.
        has_gradient: whether an entry's gradient is not zero.
        entries_each: how many entries of the weight one of the sample stands for.
    """

    weight: Tensor
    places: Int[Tensor, " S"]
    values: Float[Tensor, " S"]
    has_gradient: Bool[Tensor, " S"]
    entries_each: float

    @classmethod
    def of(cls, weight: Tensor) -> "_WeightSample":
        """The sample of a weight that has a gradient."""
        assert weight.grad is not None
        size = min(SAMPLE, weight.numel())
        # In float64: float32 cannot tell the places of a large weight apart.
        places = torch.linspace(0, weight.numel() - 1, size, dtype=torch.float64, device=weight.device).long()
        values = weight.detach().flatten()[places]
        has_gradient = weight.grad.flatten()[places] != 0
        return cls(weight, places, values, has_gradient, weight.numel() / max(size, 1))

    def counts(self) -> Float[Tensor, "2"]:
        """Entries of the weight that are as they were although they have a gradient, and entries that have one."""
        unchanged = self.has_gradient & (self.weight.detach().flatten()[self.places] == self.values)
        return torch.stack([unchanged.sum(), self.has_gradient.sum()]).cpu() * self.entries_each


class UnchangedWeights:
    """Of the weights in half precision that have a gradient, how many a step leaves bit for bit as they were.

    A weight w in bfloat16 has neighbours at a distance of |w|/256 to |w|/128: a step of less than half of that is lost.
    Left out are weights of a group whose learning rate is 0, or has risen since the step that was compared before: a warm-up
    means its steps to be small, and loses little with them. So are weights that are sharded over processes.
    """

    def __init__(self) -> None:
        # Each by the optimiser's id.
        self._rates: dict[int, list[float]] = {}  # of its groups, at the step before
        self._samples: dict[int, list[_WeightSample]] = {}
        self._counts: dict[int, Tensor] = {}  # (2,): entries that stayed, and entries that have a gradient

    @torch.no_grad()
    def begin(self, optimizer: Optimizer) -> None:
        """Keep a sample of each weight, as a step of this optimiser begins."""
        groups = parameter_groups([optimizer])
        rates = [float(group["lr"]) for group in groups]
        # Empty at the first step, of which therefore no group is compared.
        rates_before = self._rates.get(id(optimizer), [])
        self._rates[id(optimizer)] = rates
        weights: list[Tensor] = []
        for group, rate, rate_before in zip(groups, rates, rates_before, strict=False):
            if 0 < rate <= rate_before:
                weights.extend(group["params"])
        self._samples[id(optimizer)] = [_WeightSample.of(weight) for weight in _in_half_precision(weights)]

    @torch.no_grad()
    def end(self, optimizer: Optimizer) -> None:
        """Compare the samples with the weights, as the step has ended."""
        counts = [sample.counts() for sample in self._samples.pop(id(optimizer), [])]
        if counts:
            self._counts[id(optimizer)] = torch.stack(counts).sum(0)

    def share(self) -> float | None:
        """Of all optimisers' latest steps together, which are then forgotten; None where no such weight has a gradient."""
        counts = list(self._counts.values())
        self.clear()
        if not counts:
            return None
        unchanged, total = torch.stack(counts).sum(0).tolist()
        return unchanged / total if total else None

    def clear(self) -> None:
        """Forget the steps."""
        self._samples.clear()
        self._counts.clear()


def _in_half_precision(weights: Iterable[Tensor]) -> list[Tensor]:
    """Weights in half precision that have a gradient and are whole on this process."""
    return [
        weight
        for weight in weights
        if weight.dtype in _HALF
        and weight.grad is not None
        and weight.grad.layout == torch.strided
        and not hasattr(weight, "device_mesh")
    ]
