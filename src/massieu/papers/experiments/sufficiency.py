"""Does a trained attention layer hold the posterior, at lengths that it was trained on and at others? (E16, Z2, Z3)"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from massieu.measures.continuous import standard_gammas
from massieu.nn import Attention
from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.tasks import BIT
from massieu.papers.experiments.training import minimise
from massieu.posteriors import DirichletMultinomial

SYMBOLS = 4
WIDTH = 32
LONGEST = 64
"""The largest number of tokens in training."""
_CONTEXTS = 256
_TARGETS = 16
"""Next symbols that are drawn for each context."""
_TEST_BATCHES = 20


@experiment(
    "sufficiency",
    question="Does a trained attention layer predict as the exact posterior does, at trained and at longer lengths?",
    claims="E16, Z2, Z3",
    minutes=15,
    criteria=[
        Criterion("trained_lengths", "KL(exact ‖ layer) in bits, at 1 to 64 tokens", most=1e-3),
        Criterion("longer", "KL(exact ‖ layer) in bits, at 128 tokens, twice the longest", most=1e-3),
        Criterion("excess_risk", "KL(exact ‖ layer) in nats, at 1 to 64 tokens", most=1e-2, role="optimisation"),
        Criterion(
            "shuffled", "KL in bits at 1 to 64 tokens, trained on targets of other contexts", most=1e-3, role="control"
        ),
        Criterion(
            "counts_forgotten",
            "KL in bits at 1 to 64 tokens, without the learned key for the prior",
            most=1e-3,
            role="control",
        ),
    ],
)
def sufficiency(seed: int, quick: bool) -> Numbers:
    """A context has 1 to 64 symbols out of 4; its length is log-uniform. The symbols' probabilities are drawn from a Dirichlet
    prior of unequal concentrations. One attention layer of 4 heads and width 32, followed by a small network, predicts the
    next symbol from samples alone. Its only query is a learned token, which is also a key. The exact prediction is (α +
    counts)/(α₀ + length). Kullback–Leibler divergences are exact, on fixed contexts. Without the learned key, softmax
    cannot tell 2 tokens from 20.
    """
    task = _Task(torch.Generator().manual_seed(seed))
    steps = 60 if quick else 6000
    layer = task.train(steps)
    shuffled = task.train(steps // 12, shuffled=True)
    without_prior_key = task.train(steps // 12, with_prior_key=False)
    trained_lengths = task.batches()
    longer = task.batches(length=2 * LONGEST)
    divergence = task.divergence(layer, trained_lengths)
    return {
        "trained_lengths": divergence / BIT,
        "longer": task.divergence(layer, longer) / BIT,
        "excess_risk": divergence,
        "shuffled": task.divergence(shuffled, trained_lengths) / BIT,
        "counts_forgotten": task.divergence(without_prior_key, trained_lengths) / BIT,
        "ten_tokens": task.divergence(layer, task.batches(length=10)) / BIT,
    }


class _Layer(nn.Module):
    """Attention of one learned query to the tokens, and a network that reads its output."""

    def __init__(self, with_prior_key: bool) -> None:
        """With a key for the prior, the query is a key as well."""
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.query = nn.Parameter(torch.randn(WIDTH))
        self.attention = Attention(WIDTH, 4, batch_first=True)
        self.readout = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, SYMBOLS))
        self.with_prior_key = with_prior_key

    def forward(self, tokens: Int[Tensor, "B L"], real: Bool[Tensor, "B L"]) -> Float[Tensor, "B M"]:
        keys = self.embedding(tokens)
        query = self.query.expand(len(tokens), 1, WIDTH)
        padding = ~real
        if self.with_prior_key:
            keys = torch.cat([query, keys], 1)
            padding = F.pad(padding, (1, 0))
        output, _ = self.attention(query, keys, keys, key_padding_mask=padding, need_weights=False)
        return self.readout((query + output)[:, 0])


class _Batch(NamedTuple):
    """Padded contexts, and symbols that come next."""

    tokens: Int[Tensor, "B L"]
    real: Bool[Tensor, "B L"]
    """True where a token is no padding."""
    targets: Int[Tensor, "B T"]


class _Task:
    """A Dirichlet prior of unequal concentrations, and contexts drawn from it."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.concentration = torch.tensor([0.5, 1.0, 1.5, 3.0])[torch.randperm(SYMBOLS, generator=generator)]

    def batch(self, contexts: int, length: int | None = None) -> _Batch:
        """Contexts of one length, or by default of log-uniform lengths from 1 to `LONGEST`."""
        # Drawn whether they are needed or not, so that the generator goes on equally.
        random_lengths = (torch.rand(contexts, generator=self.generator) * math.log(LONGEST + 1)).exp().long()
        if length is None:
            longest = LONGEST
            lengths = random_lengths.clamp(1, LONGEST)
        else:
            longest = length
            lengths = torch.full((contexts,), length)
        # Gamma variables are Dirichlet probabilities up to a factor, which `multinomial` needs not.
        concentrations = self.concentration.expand(contexts, SYMBOLS).contiguous()
        weights = standard_gammas(concentrations, self.generator).clamp_min(1e-30)
        symbols = torch.multinomial(weights, longest + _TARGETS, replacement=True, generator=self.generator)
        return _Batch(
            tokens=symbols[:, :longest],
            real=torch.arange(longest) < lengths.unsqueeze(1),
            targets=symbols[:, longest:],
        )

    def batches(self, length: int | None = None) -> list[_Batch]:
        """Contexts to test on."""
        return [self.batch(_CONTEXTS, length) for _ in range(_TEST_BATCHES)]

    def train(self, steps: int, *, shuffled: bool = False, with_prior_key: bool = True) -> _Layer:
        """Train a layer; with `shuffled`, on the targets of other contexts."""
        with torch.random.fork_rng():
            torch.manual_seed(int(torch.randint(2**31, (), generator=self.generator)))
            layer = _Layer(with_prior_key)

        def loss() -> Tensor:
            batch = self.batch(_CONTEXTS)
            targets = batch.targets.roll(1, 0) if shuffled else batch.targets
            return -layer(batch.tokens, batch.real).log_softmax(-1).gather(1, targets).mean()

        minimise(loss, list(layer.parameters()), steps=steps, step_size=3e-3, averaged_share=0.1)
        return layer

    def divergence(self, layer: _Layer, batches: list[_Batch]) -> float:
        """Mean KL(exact ‖ layer) of the next symbol, in nats."""
        prior = DirichletMultinomial.create(self.concentration.double())
        divergences = []
        for batch in batches:
            exact = prior.posterior(batch.tokens, batch.real).mean
            with torch.no_grad():
                log_prediction = layer(batch.tokens, batch.real).double().log_softmax(-1)
            divergences.append((exact * (exact.log() - log_prediction)).sum(-1).mean())
        return float(torch.stack(divergences).mean())
