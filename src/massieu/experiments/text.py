"""Characters of the reference text that ships with Python, and models that differ in one part trained on them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pydoc_data.topics import topics

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from massieu.experiments.study import Numbers
from massieu.experiments.tasks import Predictor, mean_loss
from massieu.experiments.training import minimise

_HELD_OUT = 0.1


@cache
def _characters() -> tuple[Int[Tensor, " n"], int]:
    """The text in numbers, and how many characters there are."""
    text = "\n".join(topics.values())
    known = {character: place for place, character in enumerate(sorted(set(text)))}
    return torch.tensor([known[character] for character in text]), len(known)


class Text:
    """Windows of the text; the last tenth is held out. There is no exact law: models are compared with each other."""

    def __init__(self, length: int) -> None:
        tokens, self.vocabulary = _characters()
        self.judged: Bool[Tensor, " L"] = torch.ones(length, dtype=torch.bool)
        kept = round(len(tokens) * (1 - _HELD_OUT))
        self.learned, self.held_out = tokens[:kept], tokens[kept:]

    def sample(self, contexts: int, drawn: torch.Generator) -> Int[Tensor, "B L+1"]:
        """From what is learned."""
        return self._windows(self.learned, contexts, drawn)

    def test(self, seed: int) -> Int[Tensor, "1024 L+1"]:
        """From what is held out; the same for every arm of a seed."""
        return self._windows(self.held_out, 1024, torch.Generator().manual_seed(seed))

    def _windows(self, tokens: Int[Tensor, " n"], contexts: int, drawn: torch.Generator) -> Int[Tensor, "B L+1"]:
        size = len(self.judged) + 1
        starts = torch.randint(len(tokens) - size, (contexts, 1), generator=drawn)
        return tokens[starts + torch.arange(size)]

    def pair_loss(self, seed: int) -> float:
        """Mean surprise at the test's characters, in nats, of counted pairs with one more of each."""
        tokens = self.test(seed)
        pairs = torch.bincount(self.learned[:-1] * self.vocabulary + self.learned[1:], minlength=self.vocabulary**2)
        counts = pairs.reshape(self.vocabulary, -1).double() + 1
        log_law = (counts / counts.sum(1, keepdim=True)).log()
        return float(-log_law[tokens[:, :-1], tokens[:, 1:]].mean())


MASKED = 0.25
"""The share of characters that a model with `masked_loss` has to fill in."""


def masked_loss(model: Predictor, tokens: Int[Tensor, "B L"], drawn: torch.Generator, mask: int) -> Float[Tensor, ""]:
    """Mean surprise at masked characters, in nats; `mask` is the token that stands for them."""
    hidden = torch.rand(tokens.shape, generator=drawn) < MASKED
    log_law = model(tokens.masked_fill(hidden, mask)).log_softmax(-1)
    return -log_law.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)[hidden].mean()


STEP_SIZES = (6e-3, 1.2e-2, 2.4e-2)
"""Tried by tuning."""


@dataclass(frozen=True)
class Arms:
    """Models that differ in one part, and how they are trained.

    Attributes:
        models: How each is made, by name.
        step_sizes: Of each; the best of `STEP_SIZES` on seed 0, by ``--tune``.
        steps: Of all, or of each.
        masked: Fill in characters; by default, predict the next one.
    """

    text: Text
    models: Mapping[str, Callable[[], nn.Module]]
    step_sizes: Mapping[str, float]
    steps: int | Mapping[str, int]
    contexts: int = 32
    masked: bool = False

    def losses(self, seed: int, quick: bool = False) -> dict[str, tuple[float, nn.Module]]:
        """Each arm's loss on held-out text, in nats, and its model; all see the same windows in the same order."""
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
                return masked_loss(model, tokens[:, :-1], drawn, self.text.vocabulary)
            return mean_loss(model, self.text, tokens)

        steps = 12 if quick else self.steps if isinstance(self.steps, int) else self.steps[name]
        step = lambda: loss(self.text.sample(self.contexts, drawn))  # noqa: E731
        minimise(step, list(model.parameters()), steps=steps, step_size=step_size, averaged=0.1)
        drawn.manual_seed(seed)  # the same characters are masked for every arm
        with torch.no_grad():
            parts = [float(loss(part)) for part in self.text.test(seed).split(128)[: 1 if quick else None]]
        return math.fsum(parts) / len(parts), model
