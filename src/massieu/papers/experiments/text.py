"""Data without an exact law: characters of the reference text that ships with Python."""

from functools import cache
from pydoc_data.topics import topics

import torch
from jaxtyping import Bool, Int
from torch import Tensor

_HELD_OUT = 0.1


@cache
def _characters() -> tuple[Int[Tensor, " n"], int]:
    """The text as the number of each character, and the size of its alphabet."""
    text = "\n".join(topics.values())
    alphabet = sorted(set(text))
    numbers = {character: number for number, character in enumerate(alphabet)}
    return torch.tensor([numbers[character] for character in text]), len(alphabet)


class ReferenceText:
    """Windows of the text; the last tenth is held out. There is no exact law: models are compared with each other."""

    def __init__(self, length: int) -> None:
        tokens, self.vocabulary = _characters()
        self.judged: Bool[Tensor, " L"] = torch.ones(length, dtype=torch.bool)
        num_training = round(len(tokens) * (1 - _HELD_OUT))
        self.training = tokens[:num_training]
        self.held_out = tokens[num_training:]

    def sample(self, contexts: int, generator: torch.Generator) -> Int[Tensor, "B L+1"]:
        """Windows of the training part."""
        return self._windows(self.training, contexts, generator)

    def test(self, seed: int) -> Int[Tensor, "1024 L+1"]:
        """Windows of the held-out part; the same for every arm of a seed."""
        return self._windows(self.held_out, 1024, torch.Generator().manual_seed(seed))

    def _windows(self, tokens: Int[Tensor, " n"], contexts: int, generator: torch.Generator) -> Int[Tensor, "B L+1"]:
        size = len(self.judged) + 1
        starts = torch.randint(len(tokens) - size, (contexts, 1), generator=generator)
        return tokens[starts + torch.arange(size)]

    def pair_loss(self, seed: int) -> float:
        """Mean surprise of a bigram model at the test's characters, in nats; each pair is counted once more than it comes."""
        tokens = self.test(seed)
        pairs = self.training[:-1] * self.vocabulary + self.training[1:]
        counts = torch.bincount(pairs, minlength=self.vocabulary**2).reshape(self.vocabulary, -1).double() + 1
        log_law = (counts / counts.sum(1, keepdim=True)).log()  # (character, next character)
        return float(-log_law[tokens[:, :-1], tokens[:, 1:]].mean())
