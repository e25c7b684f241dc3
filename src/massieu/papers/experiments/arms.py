"""Models that differ in one part, trained on the same data: their losses, and the step sizes that they are trained with."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from massieu.papers.experiments.study import Numbers
from massieu.papers.experiments.tasks import Predictor, mean_loss
from massieu.papers.experiments.text import ReferenceText
from massieu.papers.experiments.training import minimise

MASKED = 0.25
"""The share of tokens that a model with `masked_loss` has to fill in."""


def masked_loss(model: Predictor, tokens: Int[Tensor, "B L"], drawn: torch.Generator, mask: int) -> Float[Tensor, ""]:
    """Mean surprise at masked tokens, in nats; `mask` is the token that stands for them."""
    hidden = torch.rand(tokens.shape, generator=drawn) < MASKED
    log_law = model(tokens.masked_fill(hidden, mask)).log_softmax(-1)
    return -log_law.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)[hidden].mean()


STEP_SIZES = (3e-3, 6e-3, 1.2e-2, 2.4e-2, 4.8e-2)
"""Tried by tuning."""


@dataclass(frozen=True)
class Arms:
    """Models that differ in one part, and how they are trained.

    Attributes:
        models: How each is made, by name.
        step_sizes: Of each; the best of `STEP_SIZES` on seed 0, by ``--tune``.
        steps: Of all, or of each.
        masked: Fill in tokens; by default, predict the next one.
    """

    data: ReferenceText
    models: Mapping[str, Callable[[], nn.Module]]
    step_sizes: Mapping[str, float]
    steps: int | Mapping[str, int]
    contexts: int = 32
    masked: bool = False

    def losses(self, seed: int, quick: bool = False) -> dict[str, tuple[float, nn.Module]]:
        """Each arm's loss on held-out data, in nats, and its model; all see the same data in the same order."""
        return {name: self._trained(name, seed, self.step_sizes[name], quick) for name in self.models}

    def tuned(self, seed: int, quick: bool = False) -> Numbers:
        """The loss of each arm at each step size."""
        return {
            f"{name} at {size:g}": self._trained(name, seed, size, quick)[0]
            for name in self.models
            for size in STEP_SIZES
        }

    def _trained(self, name: str, seed: int, step_size: float, quick: bool) -> tuple[float, nn.Module]:
        drawn = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = self.models[name]()

        def loss(tokens: Int[Tensor, "B L+1"]) -> Tensor:
            if self.masked:
                return masked_loss(model, tokens, drawn, self.data.vocabulary)
            return mean_loss(model, self.data.judged, tokens)

        steps = 2 if quick else self.steps if isinstance(self.steps, int) else self.steps[name]
        step = lambda: loss(self.data.sample(self.contexts, drawn))  # noqa: E731
        minimise(step, list(model.parameters()), steps=steps, step_size=step_size, averaged=0.1)
        drawn.manual_seed(seed)  # the same tokens are masked for every arm
        with torch.no_grad():
            parts = [float(loss(part)) for part in self.data.test(seed).split(128)[: 1 if quick else None]]
        return math.fsum(parts) / len(parts), model
