"""Tasks of sequences whose next token has an exact law, and text, which has none; how far a model is from that law."""

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from massieu.papers.experiments.training import minimise
from massieu.posteriors import HiddenMarkov

BIT = math.log(2)
Predictor = Callable[[Int[Tensor, "B L"]], Float[Tensor, "B L V"]]
"""From tokens to logits of the token after each."""


class SequenceTask(Protocol):
    """What a task of one's own has: a sampler, and the exact law of what comes next.

    Attributes:
        vocabulary: How many tokens there are.
        judged: Of the places 0 … L − 1, those after which the prediction counts.
    """

    vocabulary: int
    judged: Bool[Tensor, " L"]

    def sample(self, contexts: int, drawn: torch.Generator) -> Int[Tensor, "B L+1"]:
        """Sequences, each one token longer than what a model is shown."""
        ...

    def exact(self, tokens: Int[Tensor, "B L+1"]) -> Float64[Tensor, "B L V"]:
        """log p(token ℓ + 1 | tokens 0 … ℓ), in nats."""
        ...


def mean_loss(model: Predictor, judged: Bool[Tensor, " L"], tokens: Int[Tensor, "B L+1"]) -> Float[Tensor, ""]:
    """Mean surprise at what came next, in nats, at the judged places."""
    log_law = model(tokens[:, :-1])[:, judged].log_softmax(-1)
    return -log_law.gather(-1, tokens[:, 1:][:, judged].unsqueeze(-1)).mean()


def train(
    model: torch.nn.Module,
    task: SequenceTask,
    drawn: torch.Generator,
    *,
    steps: int,
    contexts: int,
    step_size: float,
) -> list[float]:
    """Train on samples alone, a new batch each step; returns the losses."""
    loss = lambda: mean_loss(model, task.judged, task.sample(contexts, drawn))  # noqa: E731
    return minimise(loss, list(model.parameters()), steps=steps, step_size=step_size, averaged=0.1)


def divergence(
    model: Predictor, task: SequenceTask, tokens: Int[Tensor, "B L+1"]
) -> tuple[Float64[Tensor, "B J"], Float64[Tensor, "B J"]]:
    """KL(exact ‖ model) and entropy of the model less that of the exact law, in nats, at each judged place."""
    exact = task.exact(tokens)[:, task.judged]
    with torch.no_grad():
        found = model(tokens[:, :-1])[:, task.judged].double().log_softmax(-1)
    shares = exact.exp()
    seen = shares > 0
    apart = torch.where(seen, shares * (torch.where(seen, exact, 0.0) - found), 0.0).sum(-1)
    entropies = -(found.exp() * found).sum(-1), -torch.where(seen, shares * exact, 0.0).sum(-1)
    return apart, entropies[0] - entropies[1]


class Bijection:
    """A random one-to-one map from keys to values, shown pair by pair; after a key, its value is any that was not seen.

    Tokens 0 … n − 1 are keys, n … 2n − 1 values; keys come in random order, none twice (Agarwal et al., arXiv 2512.22471).
    """

    def __init__(self, size: int) -> None:
        self.size, self.vocabulary = size, 2 * size
        self.judged = torch.arange(2 * size - 1) % 2 == 0  # after a key

    def sample(self, contexts: int, drawn: torch.Generator) -> Int[Tensor, "B L+1"]:
        keys, values = (torch.rand(contexts, self.size, generator=drawn).argsort(-1) for _ in range(2))
        return torch.stack([keys, values + self.size], -1).flatten(1)

    def exact(self, tokens: Int[Tensor, "B L+1"]) -> Float64[Tensor, "B L V"]:
        """After a key, uniform over values that were not seen; after a value, over keys that were not."""
        seen = F.one_hot(tokens[:, :-1], self.vocabulary).cumsum(1) > 0
        kind = torch.arange(self.vocabulary) >= self.size
        asked = (kind == (torch.arange(tokens.shape[1] - 1) % 2 == 0).unsqueeze(-1)) & ~seen
        return (asked.double() / asked.sum(-1, keepdim=True)).log()


class Chain:
    """A hidden Markov chain, drawn once: what comes next needs the law of the hidden state, by the forward algorithm."""

    def __init__(self, states: int, symbols: int, length: int, drawn: torch.Generator, stay: float = 2.0) -> None:
        """`stay` is the logit of staying in a state above that of leaving it for another, on average."""
        self.vocabulary, self.judged = symbols, torch.ones(length, dtype=torch.bool)
        options = {"generator": drawn, "dtype": torch.float64}
        moves = stay * torch.eye(states, dtype=torch.float64) + 0.5 * torch.randn(states, states, **options)
        self.log_emission = (1.5 * torch.randn(states, symbols, **options)).log_softmax(-1)
        self.chain = HiddenMarkov.create(torch.zeros(states, dtype=torch.float64), moves, self.log_emission)

    def sample(self, contexts: int, drawn: torch.Generator) -> Int[Tensor, "B L+1"]:
        moves, shown = self.chain.log_transition.exp(), self.log_emission.exp()
        state = torch.randint(len(moves), (contexts,), generator=drawn)
        symbols = []
        for _ in range(len(self.judged) + 1):
            symbols.append(torch.multinomial(shown[state], 1, generator=drawn).squeeze(-1))
            state = torch.multinomial(moves[state], 1, generator=drawn).squeeze(-1)
        return torch.stack(symbols, 1)

    def exact(self, tokens: Int[Tensor, "B L+1"]) -> Float64[Tensor, "B L V"]:
        filtered = self.chain.path(tokens[:, :-1]).filtered
        return (filtered.exp() @ self.chain.log_transition.exp() @ self.log_emission.exp()).log()
