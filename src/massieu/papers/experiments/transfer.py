"""Does the condition number rank masked tasks by what is read off them downstream? (E21, Z12, Z13)"""

import torch
from jaxtyping import Float64, Int
from torch import Tensor, nn

from massieu.foundation.matrices import least_squares
from massieu.nn import Attention
from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.training import minimise
from massieu.papers.theory import excess_risk_bound
from massieu.papers.theory import transfer as reading
from massieu.posteriors import DiscreteLatent

LATENTS, SYMBOLS, LENGTH, WIDTH, NOISE = 5, 6, 12, 32, 0.3
SMALLEST = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""The smallest singular value of each mask's targets, beside 1; the last mask has 0."""
_CONTEXTS = 256


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
    drawn = torch.Generator().manual_seed(seed)
    task = _Task(drawn)
    steps = 40 if quick else 1500
    tokens, labelled = task.tokens(4096)[0], task.tokens(4096)
    exact = task.posterior(tokens)
    downstream = exact @ task.downstream.mT
    variance = float((downstream - downstream.mean(0)).square().sum(-1).mean())
    losses: list[tuple[float, float, float, float]] = []
    for smallest in (*SMALLEST, 0.0):
        targets = task.targets(smallest)
        network = task.trained(targets, steps)
        predicted, prediction_of_labelled = network(tokens).detach(), network(labelled[0]).detach()
        masked = float((predicted - exact @ targets.mT).square().sum(-1).mean())
        found = reading(targets, task.downstream)
        by_theory = float((found.predict(predicted) - downstream).square().sum(-1).mean())
        labels = task.downstream.mT[labelled[1]]
        labels = labels + NOISE * torch.randn(labels.shape, generator=drawn, dtype=torch.float64)
        fitted = _with_one(predicted) @ least_squares(_with_one(prediction_of_labelled), labels)
        losses.append((found.condition_number, masked, by_theory, float((fitted - downstream).square().sum(-1).mean())))
    known = losses[:-1]
    variance_of_masked = float((exact @ task.targets(1.0).mT).var(0).sum())
    return {
        "largest_over_bound": max(
            by_theory / excess_risk_bound(kappa, masked) for kappa, masked, by_theory, _ in known
        ),
        "rank_correlation": _rank_correlation([kappa for kappa, *_ in known], [by for _, _, by, _ in known]),
        "rank_correlation_of_fitted": _rank_correlation([kappa for kappa, *_ in known], [by for *_, by in known]),
        "readable": known[0][3] / variance,
        "lost": losses[-1][3] / variance,
        "masked_excess": max(masked for _, masked, *_ in losses) / variance_of_masked,
        **{f"kappa_{s:g}": kappa for s, (kappa, *_) in zip(SMALLEST, known, strict=True)},
        **{f"masked_{s:g}": masked for s, (_, masked, *_) in zip(SMALLEST, known, strict=True)},
        **{f"downstream_{s:g}": by_theory for s, (_, _, by_theory, _) in zip(SMALLEST, known, strict=True)},
        **{f"fitted_{s:g}": fitted for s, (*_, fitted) in zip(SMALLEST, known, strict=True)},
    }


class _Network(nn.Module):
    """A learned question to the tokens, and what is made of the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.asking = nn.Embedding(SYMBOLS, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.attention = Attention(WIDTH, 4, batch_first=True)
        self.after = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, LATENTS - 1))

    def forward(self, tokens: Int[Tensor, "B L"]) -> Float64[Tensor, "B p"]:
        keys, asking = self.embedding(tokens), self.asking.expand(len(tokens), 1, WIDTH)
        output, _ = self.attention(asking, keys, keys, need_weights=False)
        return self.after((asking + output)[:, 0]).double()


class _Task:
    """Latents, what they emit, and the directions of their means."""

    def __init__(self, drawn: torch.Generator) -> None:
        options = {"generator": drawn, "dtype": torch.float64}
        self.drawn = drawn
        self.emission = (1.5 * torch.randn(LATENTS, SYMBOLS, **options)).log_softmax(-1)
        centring = torch.eye(LATENTS, dtype=torch.float64) - 1 / LATENTS
        tangent = torch.linalg.svd(centring).Vh[: LATENTS - 1]
        turn = torch.linalg.qr(torch.randn(LATENTS - 1, LATENTS - 1, **options)).Q
        self.basis = turn @ tangent
        self.downstream = torch.linalg.qr(torch.randn(LATENTS - 1, LATENTS - 1, **options)).Q[:3] @ self.basis

    def targets(self, smallest: float) -> Float64[Tensor, "p k"]:
        """G: the masked token's mean for each latent."""
        sizes = torch.ones(LATENTS - 1, dtype=torch.float64)
        sizes[-1] = smallest
        return sizes.unsqueeze(-1) * self.basis

    def tokens(self, contexts: int) -> tuple[Int[Tensor, "B L"], Int[Tensor, " B"]]:
        latent = torch.randint(LATENTS, (contexts,), generator=self.drawn)
        return torch.multinomial(self.emission.exp()[latent], LENGTH, replacement=True, generator=self.drawn), latent

    def posterior(self, tokens: Int[Tensor, "B L"]) -> Float64[Tensor, "B k"]:
        law = DiscreteLatent.create(torch.zeros(len(tokens), LATENTS).double(), self.emission)
        return law.posterior(tokens).log_weight.softmax(-1)

    def trained(self, targets: Float64[Tensor, "p k"], steps: int) -> _Network:
        with torch.random.fork_rng():
            torch.manual_seed(int(torch.randint(2**31, (), generator=self.drawn)))
            network = _Network()

        def loss() -> Tensor:
            tokens, latent = self.tokens(_CONTEXTS)
            clean = targets.mT[latent]
            masked = clean + NOISE * torch.randn(clean.shape, generator=self.drawn, dtype=torch.float64)
            return (network(tokens) - masked).square().sum(-1).mean()

        minimise(loss, list(network.parameters()), steps=steps, step_size=3e-3, averaged=0.1)
        return network


def _with_one(points: Float64[Tensor, "B p"]) -> Float64[Tensor, "B p+1"]:
    return torch.cat([points, torch.ones_like(points[:, :1])], 1)


def _rank_correlation(x: list[float], y: list[float]) -> float:
    """Spearman's; no two numbers are equal."""
    ranks = [torch.tensor(numbers).argsort().argsort().double() for numbers in (x, y)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])
