"""Does the condition number rank masked tasks by what is read off them downstream? (E21, Z12, Z13)"""

from typing import NamedTuple

import torch
from jaxtyping import Float64, Int
from torch import Tensor, nn

from massieu.foundation.matrices import least_squares
from massieu.nn import Attention
from massieu.papers import theory
from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.training import minimise
from massieu.posteriors import DiscreteLatent

LATENTS = 5
SYMBOLS = 6
LENGTH = 12
WIDTH = 32
NOISE = 0.3
SMALLEST = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""The smallest singular value of the masked targets in each task where it is positive; the others are 1."""
_CONTEXTS = 256
_TEST_CONTEXTS = 4096


@experiment(
    "transfer",
    question="Does the condition number of a masked task bound and rank what a linear probe loses downstream?",
    claims="E21, Z12, Z13",
    minutes=6,
    criteria=[
        Criterion("largest_over_bound", "largest downstream excess risk / (κ² × masked excess risk)", most=1.0),
        Criterion("rank_correlation", "rank correlation of downstream excess risk with κ²", least=0.8),
        Criterion("readable", "excess risk of the fitted probe at the least κ / variance of the target", most=0.05),
        Criterion(
            "masked_excess",
            "largest masked excess risk / variance of its target at κ = 1",
            most=0.02,
            role="optimisation",
        ),
        Criterion(
            "lost", "excess risk of the fitted probe where κ = ∞ / variance of the target", most=0.05, role="control"
        ),
    ],
)
def transfer(seed: int, quick: bool) -> Numbers:
    """One of 5 equally likely latents draws 12 tokens of 6 symbols. The masked token is a vector. Its mean given the latent
    has four directions: three of singular value 1, and a last one of 1 to 1/16, or 0. For each of these a network of one
    attention and one feed-forward layer learns the masked token by squared error. Downstream, the target's mean given the
    latent depends on all four directions. A linear probe predicts it from the network's prediction. One probe is that of
    Z13, for the bound; another is fitted to 4,096 labelled contexts. Excess risks are relative to the exact posterior.
    """
    generator = torch.Generator().manual_seed(seed)
    task = _Task(generator)
    test = _TestData(task)
    steps = 40 if quick else 1500
    readings = [_read(task, test, task.train(task.targets(s), steps), s) for s in SMALLEST]
    unreadable = _read(task, test, task.train(task.targets(0.0), steps), 0.0)
    kappas = [reading.condition_number for reading in readings]
    variance_of_masked = float((test.posterior @ task.targets(1.0).mT).var(0).sum())
    numbers = {
        "largest_over_bound": max(
            reading.by_theory / theory.excess_risk_bound(reading.condition_number, reading.masked)
            for reading in readings
        ),
        "rank_correlation": _rank_correlation(kappas, [reading.by_theory for reading in readings]),
        "rank_correlation_of_fitted": _rank_correlation(kappas, [reading.fitted for reading in readings]),
        "readable": readings[0].fitted / test.variance,
        "lost": unreadable.fitted / test.variance,
        "masked_excess": max(reading.masked for reading in (*readings, unreadable)) / variance_of_masked,
    }
    return numbers | {
        **{f"kappa_{s:g}": reading.condition_number for s, reading in zip(SMALLEST, readings, strict=True)},
        **{f"masked_{s:g}": reading.masked for s, reading in zip(SMALLEST, readings, strict=True)},
        **{f"downstream_{s:g}": reading.by_theory for s, reading in zip(SMALLEST, readings, strict=True)},
        **{f"fitted_{s:g}": reading.fitted for s, reading in zip(SMALLEST, readings, strict=True)},
    }


class _Network(nn.Module):
    """Attention of one learned query to the tokens, and a network that reads its output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.query = nn.Parameter(torch.randn(WIDTH))
        self.attention = Attention(WIDTH, 4, batch_first=True)
        self.readout = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, LATENTS - 1))

    def forward(self, tokens: Int[Tensor, "B L"]) -> Float64[Tensor, "B p"]:
        keys = self.embedding(tokens)
        query = self.query.expand(len(tokens), 1, WIDTH)
        output, _ = self.attention(query, keys, keys, need_weights=False)
        return self.readout((query + output)[:, 0]).double()


class _Task:
    """Latents, the tokens that they emit, and the directions of the targets' means.

    Attributes:
        emission: log p(symbol | latent).
        basis: Orthonormal directions of the tangent space of the simplex, where Σt = 0.
        downstream: D, the downstream target's mean for each latent; it depends on all directions.
    """

    def __init__(self, generator: torch.Generator) -> None:
        options = {"generator": generator, "dtype": torch.float64}
        self.generator = generator
        self.emission = (1.5 * torch.randn(LATENTS, SYMBOLS, **options)).log_softmax(-1)
        centring = torch.eye(LATENTS, dtype=torch.float64) - 1 / LATENTS
        tangent = torch.linalg.svd(centring).Vh[: LATENTS - 1]
        rotation = torch.linalg.qr(torch.randn(LATENTS - 1, LATENTS - 1, **options)).Q
        self.basis = rotation @ tangent
        self.downstream = torch.linalg.qr(torch.randn(LATENTS - 1, LATENTS - 1, **options)).Q[:3] @ self.basis

    def targets(self, smallest: float) -> Float64[Tensor, "p k"]:
        """G: the masked token's mean for each latent."""
        singular_values = torch.ones(LATENTS - 1, dtype=torch.float64)
        singular_values[-1] = smallest
        return singular_values.unsqueeze(-1) * self.basis

    def sample(self, contexts: int) -> tuple[Int[Tensor, "B L"], Int[Tensor, " B"]]:
        """Tokens of contexts, and the latent of each."""
        latents = torch.randint(LATENTS, (contexts,), generator=self.generator)
        weights = self.emission.exp()[latents]
        tokens = torch.multinomial(weights, LENGTH, replacement=True, generator=self.generator)
        return tokens, latents

    def with_noise(self, means: Float64[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
        """Targets of these means."""
        return means + NOISE * torch.randn(means.shape, generator=self.generator, dtype=torch.float64)

    def posterior(self, tokens: Int[Tensor, "B L"]) -> Float64[Tensor, "B k"]:
        prior = DiscreteLatent.create(torch.zeros(len(tokens), LATENTS).double(), self.emission)
        return prior.posterior(tokens).log_weight.softmax(-1)

    def train(self, targets: Float64[Tensor, "p k"], steps: int) -> _Network:
        """A network that learned the masked token."""
        with torch.random.fork_rng():
            torch.manual_seed(int(torch.randint(2**31, (), generator=self.generator)))
            network = _Network()

        def loss() -> Tensor:
            tokens, latents = self.sample(_CONTEXTS)
            masked = self.with_noise(targets.mT[latents])
            return (network(tokens) - masked).square().sum(-1).mean()

        minimise(loss, list(network.parameters()), steps=steps, step_size=3e-3, averaged_share=0.1)
        return network


class _TestData:
    """Contexts without labels, whose exact predictions are known, and labelled ones that probes are fitted to.

    Attributes:
        posterior: The exact posterior of the latent.
        downstream: The best prediction of the downstream target.
        variance: The variance of that prediction.
    """

    def __init__(self, task: _Task) -> None:
        self.tokens, _ = task.sample(_TEST_CONTEXTS)
        self.labelled_tokens, self.labelled_latents = task.sample(_TEST_CONTEXTS)
        self.posterior = task.posterior(self.tokens)
        self.downstream = self.posterior @ task.downstream.mT
        self.variance = float((self.downstream - self.downstream.mean(0)).square().sum(-1).mean())


class _Reading(NamedTuple):
    """The condition number of a masked task, and excess risks: masked, and downstream with two probes."""

    condition_number: float
    masked: float
    by_theory: float
    """Of the probe of Z13."""
    fitted: float
    """Of the probe that is fitted to labels."""


def _read(task: _Task, test: _TestData, network: _Network, smallest: float) -> _Reading:
    targets = task.targets(smallest)
    prediction = network(test.tokens).detach()
    labelled_prediction = network(test.labelled_tokens).detach()
    transfer_result = theory.transfer(targets, task.downstream)
    labels = task.with_noise(task.downstream.mT[test.labelled_latents])
    weights = least_squares(_with_one(labelled_prediction), labels)
    return _Reading(
        transfer_result.condition_number,
        masked=_mean_square(prediction - test.posterior @ targets.mT),
        by_theory=_mean_square(transfer_result.predict(prediction) - test.downstream),
        fitted=_mean_square(_with_one(prediction) @ weights - test.downstream),
    )


def _mean_square(distances: Float64[Tensor, "B p"]) -> float:
    return float(distances.square().sum(-1).mean())


def _with_one(points: Float64[Tensor, "B p"]) -> Float64[Tensor, "B p+1"]:
    """The points with a coordinate 1, for a constant term."""
    return torch.cat([points, torch.ones_like(points[:, :1])], 1)


def _rank_correlation(x: list[float], y: list[float]) -> float:
    """Spearman's rank correlation; no two numbers of a list may be equal."""
    ranks_of_x = torch.tensor(x).argsort().argsort().double()
    ranks_of_y = torch.tensor(y).argsort().argsort().double()
    return float(torch.corrcoef(torch.stack([ranks_of_x, ranks_of_y]))[0, 1])
