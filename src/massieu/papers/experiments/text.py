"""Data without an exact law: characters of the reference text that ships with Python."""

from functools import cache
from pydoc_data.topics import topics

import torch
from jaxtyping import Bool, Int
from torch import Tensor

_HELD_OUT = 0.1


@cache
def _characters() -> tuple[Int[Tensor, " n"], int]:
    """The text in numbers, and how many characters there are."""
    text = "\n".join(topics.values())
    known = {character: place for place, character in enumerate(sorted(set(text)))}
    return torch.tensor([known[character] for character in text]), len(known)


class ReferenceText:
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
