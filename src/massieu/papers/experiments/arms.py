"""Models that differ in one part, trained on the same data: their losses, and the step sizes that they are trained with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from massieu.papers.experiments.study import Numbers
from massieu.papers.experiments.tasks import Predictor, mean_loss
from massieu.papers.experiments.text import ReferenceText
from massieu.papers.experiments.training import minimise

MASKED = 0.25
"""The share of tokens that a model with `masked_loss` has to fill in."""
STEP_SIZES = (3e-3, 6e-3, 1.2e-2, 2.4e-2, 4.8e-2)
"""The step sizes that tuning tries."""
_QUICK_STEPS = 2
_TEST_BATCH = 128


def masked_loss(
    model: Predictor, tokens: Int[Tensor, "B L"], generator: torch.Generator, mask: int
) -> Float[Tensor, ""]:
    """Mean surprise at masked tokens, in nats; `mask` is the token that stands for them."""
    is_masked = torch.rand(tokens.shape, generator=generator) < MASKED
    log_law = model(tokens.masked_fill(is_masked, mask)).log_softmax(-1)
    return -log_law.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)[is_masked].mean()


class TrainedArm(NamedTuple):
    """A trained model."""

    loss: float
    """On held-out data, in nats."""
    model: nn.Module


@dataclass(frozen=True)
class Arms:
    """Models that differ in one part, and the settings of their training.

    Attributes:
        data: The text.
        models: A function for each arm, by name, that makes its model.
        step_sizes: The step size of each arm; the best of `STEP_SIZES` on seed 0, by ``--tune``.
        steps: The number of steps of all arms, or of each.
        contexts: The number of windows in a batch.
        masked: Whether models fill in masked tokens; by default, they predict the next one.
    """

    data: ReferenceText
    models: Mapping[str, Callable[[], nn.Module]]
    step_sizes: Mapping[str, float]
    steps: int | Mapping[str, int]
    contexts: int = 32
    masked: bool = False

    def train(self, seed: int, quick: bool = False) -> dict[str, TrainedArm]:
        """Train every arm, on the same data in the same order."""
        return {name: self._train_arm(name, seed, self.step_sizes[name], quick) for name in self.models}

    def losses(self, seed: int, quick: bool = False) -> Numbers:
        """Train every arm; the loss of each."""
        return {name: arm.loss for name, arm in self.train(seed, quick).items()}

    def tune(self, seed: int, quick: bool = False) -> Numbers:
        """The loss of each arm at each step size."""
        return {
            f"{name} at {step_size:g}": self._train_arm(name, seed, step_size, quick).loss
            for name in self.models
            for step_size in STEP_SIZES
        }

    def _train_arm(self, name: str, seed: int, step_size: float, quick: bool) -> TrainedArm:
        generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = self.models[name]()

        def loss_on(tokens: Int[Tensor, "B L+1"]) -> Tensor:
            if self.masked:
                return masked_loss(model, tokens, generator, mask=self.data.vocabulary)
            return mean_loss(model, self.data.judged, tokens)

        def loss() -> Tensor:
            return loss_on(self.data.sample(self.contexts, generator))

        steps = _QUICK_STEPS if quick else self._steps_of(name)
        minimise(loss, list(model.parameters()), steps=steps, step_size=step_size, averaged_share=0.1)
        generator.manual_seed(seed)  # The same tokens are masked for every arm.
        test_batches = self.data.test(seed).split(_TEST_BATCH)
        if quick:
            test_batches = test_batches[:1]
        with torch.no_grad():
            test_losses = [float(loss_on(batch)) for batch in test_batches]
        return TrainedArm(fmean(test_losses), model)

    def _steps_of(self, name: str) -> int:
        return self.steps if isinstance(self.steps, int) else self.steps[name]
