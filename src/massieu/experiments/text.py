"""Data without an exact law: characters of the reference text that ships with Python, patches of scikit-learn's digits."""

from functools import cache
from pydoc_data.topics import topics

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from massieu.errors import require_extra

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


@cache
def _patches() -> Int[Tensor, "1797 16"]:
    """Each digit as 4×4 patches of 2×2 pixels, dark or light."""
    dark = torch.from_numpy(require_extra("sklearn.datasets", "examples").load_digits().images >= 8).long()
    patches = dark.unfold(1, 2, 2).unfold(2, 2, 2).flatten(3)
    return (patches @ torch.tensor([8, 4, 2, 1])).flatten(1)


class Digits:
    """Scikit-learn's digits, the last fifth held out: 16 places, 16 kinds of patches."""

    vocabulary = 16

    def __init__(self) -> None:
        patches = _patches()
        self.judged: Bool[Tensor, " L"] = torch.ones(16, dtype=torch.bool)
        kept = round(0.8 * len(patches))
        self.learned, self.held_out = patches[:kept], patches[kept:]

    def sample(self, contexts: int, drawn: torch.Generator) -> Int[Tensor, "B L"]:
        """From what is learned."""
        return self.learned[torch.randint(len(self.learned), (contexts,), generator=drawn)]

    def test(self, seed: int) -> Int[Tensor, "n L"]:
        """What is held out, the same for every seed."""
        return self.held_out

    def place_loss(self) -> float:
        """Mean surprise at the held-out patches, in nats, of those counted at the same place, with one more of each."""
        counts = torch.nn.functional.one_hot(self.learned, self.vocabulary).sum(0).double() + 1
        log_law = (counts / counts.sum(-1, keepdim=True)).log()
        return float(-log_law[torch.arange(16), self.held_out].mean())
