"""Tasks of sequences whose next token has an exact law; training on them, and a model's distance from that law."""

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
    """A sampler of sequences, and the exact law of the next token.

    Attributes:
        vocabulary: The number of tokens.
        judged: True at those of the positions 0 … L − 1 after which the prediction counts.
    """

    vocabulary: int
    judged: Bool[Tensor, " L"]

    def sample(self, contexts: int, generator: torch.Generator) -> Int[Tensor, "B L+1"]:
        """Sequences, each one token longer than a model's input."""
        ...

    def exact(self, tokens: Int[Tensor, "B L+1"]) -> Float64[Tensor, "B L V"]:
        """log p(token ℓ + 1 | tokens 0 … ℓ), in nats."""
        ...


def mean_loss(model: Predictor, judged: Bool[Tensor, " L"], tokens: Int[Tensor, "B L+1"]) -> Float[Tensor, ""]:
    """Mean surprise at the next token, in nats, at the judged positions."""
    log_law = model(tokens[:, :-1])[:, judged].log_softmax(-1)
    return -log_law.gather(-1, tokens[:, 1:][:, judged].unsqueeze(-1)).mean()


def train(
    model: torch.nn.Module,
    task: SequenceTask,
    generator: torch.Generator,
    *,
    steps: int,
    contexts: int,
    step_size: float,
) -> list[float]:
    """Train on samples alone, a new batch each step; returns the losses."""
    loss = lambda: mean_loss(model, task.judged, task.sample(contexts, generator))  # noqa: E731
    return minimise(loss, list(model.parameters()), steps=steps, step_size=step_size, averaged_share=0.1)


def divergence(
    model: Predictor, task: SequenceTask, tokens: Int[Tensor, "B L+1"]
) -> tuple[Float64[Tensor, "B J"], Float64[Tensor, "B J"]]:
    """KL(exact ‖ model), and the model's entropy minus the exact law's; in nats, at each judged position."""
    log_exact = task.exact(tokens)[:, task.judged]
    with torch.no_grad():
        log_model = model(tokens[:, :-1])[:, task.judged].double().log_softmax(-1)
    exact = log_exact.exp()
    # The exact law excludes tokens: 0·log 0 is 0.
    possible = exact > 0
    kl = torch.where(possible, exact * (torch.where(possible, log_exact, 0.0) - log_model), 0.0).sum(-1)
    model_entropy = -(log_model.exp() * log_model).sum(-1)
    exact_entropy = -torch.where(possible, exact * log_exact, 0.0).sum(-1)
    return kl, model_entropy - exact_entropy


class Bijection:
    """A random one-to-one map from keys to values, shown pair by pair; after a key, its value is any that was not seen.

    Tokens 0 … n − 1 are keys, n … 2n − 1 values; keys come in random order, none twice (Agarwal et al., arXiv 2512.22471).
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.vocabulary = 2 * size
        self.judged = torch.arange(2 * size - 1) % 2 == 0  # after a key

    def sample(self, contexts: int, generator: torch.Generator) -> Int[Tensor, "B L+1"]:
        # The order of random numbers is a random permutation.
        keys = torch.rand(contexts, self.size, generator=generator).argsort(-1)
        values = torch.rand(contexts, self.size, generator=generator).argsort(-1)
        return torch.stack([keys, values + self.size], -1).flatten(1)  # key, value, key, value, …

    def exact(self, tokens: Int[Tensor, "B L+1"]) -> Float64[Tensor, "B L V"]:
        """After a key, uniform over values that were not seen; after a value, over keys that were not."""
        seen = F.one_hot(tokens[:, :-1], self.vocabulary).cumsum(1) > 0  # (B, L, V)
        is_value = torch.arange(self.vocabulary) >= self.size
        after_key = torch.arange(tokens.shape[1] - 1) % 2 == 0
        possible = (is_value == after_key.unsqueeze(-1)) & ~seen
        return (possible.double() / possible.sum(-1, keepdim=True)).log()


class Chain:
    """A hidden Markov chain of random transitions and emissions; the exact law is by the forward algorithm."""

    def __init__(self, states: int, symbols: int, length: int, generator: torch.Generator, stay: float = 2.0) -> None:
        """`stay` is the logit of staying in a state minus that of leaving it for another, on average."""
        self.vocabulary = symbols
        self.judged = torch.ones(length, dtype=torch.bool)
        options = {"generator": generator, "dtype": torch.float64}
        transition_logits = stay * torch.eye(states, dtype=torch.float64) + 0.5 * torch.randn(states, states, **options)
        self.log_emission = (1.5 * torch.randn(states, symbols, **options)).log_softmax(-1)
        self.chain = HiddenMarkov.create(torch.zeros(states, dtype=torch.float64), transition_logits, self.log_emission)

    def sample(self, contexts: int, generator: torch.Generator) -> Int[Tensor, "B L+1"]:
        transition = self.chain.log_transition.exp()
        emission = self.log_emission.exp()
        states = torch.randint(len(transition), (contexts,), generator=generator)
        symbols = []
        for _ in range(len(self.judged) + 1):
            symbols.append(torch.multinomial(emission[states], 1, generator=generator).squeeze(-1))
            states = torch.multinomial(transition[states], 1, generator=generator).squeeze(-1)
        return torch.stack(symbols, 1)

    def exact(self, tokens: Int[Tensor, "B L+1"]) -> Float64[Tensor, "B L V"]:
        """The next symbol's law: that of the state after the symbols so far, one transition on, through the emission."""
        filtered = self.chain.path(tokens[:, :-1]).filtered
        return (filtered.exp() @ self.chain.log_transition.exp() @ self.log_emission.exp()).log()
