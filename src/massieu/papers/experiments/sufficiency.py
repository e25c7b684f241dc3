"""Does a trained attention layer hold the posterior, at lengths that it was trained on and at others? (E16, Z2, Z3)"""

import math

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

SYMBOLS, WIDTH, LONGEST = 4, 32, 64
_CONTEXTS, _TARGETS = 256, 16
_Batch = tuple[Int[Tensor, "B L"], Bool[Tensor, "B L"], Int[Tensor, "B T"]]


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
    layers = {
        "own": task.trained(steps),
        "shuffled": task.trained(steps // 12, shuffled=True),
        "forgetful": task.trained(steps // 12, with_key=False),
    }
    fixed = [task.batch(_CONTEXTS) for _ in range(20)]
    longer = [task.batch(_CONTEXTS, length=2 * LONGEST) for _ in range(20)]
    divergence = {name: task.divergence(layer, fixed) for name, layer in layers.items()}
    return {
        "trained_lengths": divergence["own"] / BIT,
        "longer": task.divergence(layers["own"], longer) / BIT,
        "excess_risk": divergence["own"],
        "shuffled": divergence["shuffled"] / BIT,
        "counts_forgotten": divergence["forgetful"] / BIT,
        "ten_tokens": task.divergence(layers["own"], [task.batch(_CONTEXTS, length=10) for _ in range(20)]) / BIT,
    }


class _Layer(nn.Module):
    """One question to the tokens, and what is made of the answer."""

    def __init__(self, with_key: bool) -> None:
        super().__init__()
        self.embedding, self.asking = nn.Embedding(SYMBOLS, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.attention = Attention(WIDTH, 4, batch_first=True)
        self.after = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, SYMBOLS))
        self.with_key = with_key

    def forward(self, tokens: Int[Tensor, "B L"], real: Bool[Tensor, "B L"]) -> Float[Tensor, "B M"]:
        keys, asking = self.embedding(tokens), self.asking.expand(len(tokens), 1, WIDTH)
        hidden = ~real
        if self.with_key:
            keys, hidden = torch.cat([asking, keys], 1), F.pad(hidden, (1, 0))
        output, _ = self.attention(asking, keys, keys, key_padding_mask=hidden, need_weights=False)
        return self.after((asking + output)[:, 0])


class _Task:
    """A prior, and contexts of it."""

    def __init__(self, drawn: torch.Generator) -> None:
        self.drawn = drawn
        self.concentration = torch.tensor([0.5, 1.0, 1.5, 3.0])[torch.randperm(SYMBOLS, generator=drawn)]

    def batch(self, contexts: int, length: int | None = None) -> _Batch:
        """Tokens, which are real, and symbols that come next."""
        longest = LONGEST if length is None else length
        sizes = (torch.rand(contexts, generator=self.drawn) * math.log(LONGEST + 1)).exp().long().clamp(1, LONGEST)
        lengths = sizes if length is None else torch.full((contexts,), length)
        shapes = self.concentration.expand(contexts, SYMBOLS)
        weights = standard_gammas(shapes.contiguous(), self.drawn).clamp_min(1e-30)
        count = longest + _TARGETS
        symbols = torch.multinomial(weights, count, replacement=True, generator=self.drawn)
        return symbols[:, :longest], torch.arange(longest) < lengths.unsqueeze(1), symbols[:, longest:]

    def trained(self, steps: int, *, shuffled: bool = False, with_key: bool = True) -> _Layer:
        with torch.random.fork_rng():
            torch.manual_seed(int(torch.randint(2**31, (), generator=self.drawn)))
            layer = _Layer(with_key)

        def loss() -> Tensor:
            tokens, real, targets = self.batch(_CONTEXTS)
            log_shares = layer(tokens, real).log_softmax(-1)
            return -log_shares.gather(1, targets.roll(1, 0) if shuffled else targets).mean()

        minimise(loss, list(layer.parameters()), steps=steps, step_size=3e-3, averaged=0.1)
        return layer

    def divergence(self, layer: _Layer, batches: list[_Batch]) -> float:
        """Mean KL of the exact prediction from the layer's, in nats."""
        found = []
        for tokens, real, _ in batches:
            exact = DirichletMultinomial.create(self.concentration.double()).posterior(tokens, real).mean
            with torch.no_grad():
                predicted = layer(tokens, real).double().log_softmax(-1)
            found.append((exact * (exact.log() - predicted)).sum(-1).mean())
        return float(torch.stack(found).mean())
