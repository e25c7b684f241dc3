"""Characters of the reference text that ships with Python, and models that differ in one part trained on them."""

import math
from collections.abc import Callable, Mapping
from functools import cache
from pydoc_data.topics import topics

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

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


def losses_of_arms(
    arms: Mapping[str, Callable[[], nn.Module]],
    text: Text,
    seed: int,
    *,
    steps: int | Mapping[str, int],
    contexts: int,
    masked: bool = False,
    step_size: float = 3e-3,
) -> dict[str, tuple[float, nn.Module]]:
    """Each arm's loss on held-out text, in nats, and its model; all see the same windows in the same order.

    Args:
        steps: Of all, or of each.
        masked: Fill in characters; by default, predict the next one.
    """
    test, found = text.test(seed), {}
    for name, make in arms.items():
        drawn = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = make()

        def loss_on(tokens: Tensor, model: nn.Module = model, drawn: torch.Generator = drawn) -> Tensor:
            return (
                masked_loss(model, tokens[:, :-1], drawn, text.vocabulary) if masked else mean_loss(model, text, tokens)
            )

        count = steps if isinstance(steps, int) else steps[name]
        minimise(
            lambda loss_on=loss_on, drawn=drawn: loss_on(text.sample(contexts, drawn)),
            list(model.parameters()),
            steps=count,
            step_size=step_size,
            averaged=0.1,
        )
        drawn.manual_seed(seed)
        with torch.no_grad():
            parts = [float(loss_on(part)) for part in test.split(128)]
        found[name] = math.fsum(parts) / len(parts), model
    return found
