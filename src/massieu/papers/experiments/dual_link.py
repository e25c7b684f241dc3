"""Keys through the link of an exponential family: does the matching link help on its own data? (E6b, X8)"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int
from torch import Tensor

from massieu.nn import Attention, DualLinkHeads
from massieu.nn.dual_link import Family
from massieu.papers.experiments.descriptions import described
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.training import minimise

SIZE, CLOUDS, OBSERVED, LABELS = 4, 8, 4, 3
_SPREAD, _STEP_SIZES = 0.7, (0.01, 0.1)
_LINKS: dict[Family, str] = {"gaussian": "no link", "bernoulli": "σ", "poisson": "exp"}
_FAMILIES: tuple[Family, ...] = ("bernoulli", "poisson")


class Clouds:
    """Clouds of observations, one of them drawn at parameters η and the others at 0; a query knows η, keys the clouds' means.

    A key is the natural parameter of its cloud's mean, with half an observation of each kind added so that it is finite. The
    posterior of which cloud was drawn at η is ∝ exp(η · sum of the cloud), so that the link's slope and offset are exact.
    """

    def __init__(self, family: str, drawn: torch.Generator) -> None:
        self.family, self.drawn = family, drawn

    def batch(
        self, contexts: int
    ) -> tuple[Tensor, Tensor, Int[Tensor, "B N"], Int[Tensor, " B"], Float64[Tensor, "B N"]]:
        """Queries (B, 1, d), keys (B, N, d), labels of clouds, the label of the one, and the log posterior of which it is."""
        options = {"generator": self.drawn, "dtype": torch.float64}
        eta = _SPREAD * torch.randn(contexts, SIZE, **options)
        chosen = torch.randint(CLOUDS, (contexts,), generator=self.drawn)
        parameters = torch.where(F.one_hot(chosen, CLOUDS).bool().unsqueeze(-1), eta.unsqueeze(1), 0.0)
        observed = self._observations(parameters.unsqueeze(-2).expand(-1, -1, OBSERVED, -1))
        sums = observed.sum(-2)
        mean = (sums + 0.5) / (OBSERVED + 1)
        keys = torch.logit(mean) if self.family == "bernoulli" else mean.log()
        labels = torch.randint(LABELS, (contexts, CLOUDS), generator=self.drawn)
        log_posterior = (sums @ eta.unsqueeze(-1)).squeeze(-1).log_softmax(-1)
        asked = labels.gather(1, chosen.unsqueeze(1)).squeeze(1)
        return eta.float().unsqueeze(1), keys.float(), labels, asked, log_posterior

    def _observations(self, parameters: Float64[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
        if self.family == "bernoulli":
            return torch.bernoulli(parameters.sigmoid(), generator=self.drawn)
        return torch.poisson(parameters.exp(), generator=self.drawn)


def log_shares(log_weights: Float[Tensor, "B N"], labels: Int[Tensor, "B N"]) -> Float[Tensor, "B C"]:
    """The log probability of each label, from that of each cloud."""
    own = labels.unsqueeze(-1) == torch.arange(LABELS)
    return torch.where(own, log_weights.unsqueeze(-1), -torch.inf).logsumexp(1)


@experiment(
    "dual-link",
    question="Is attention nearer to the posterior if its keys go through the link of their own family?",
    claims="E6b, X8",
    minutes=4,
    criteria=described(
        {
            f"{family}_{link}": f"KL(exact ‖ head), nats: {family} keys, {title}"
            for family in _FAMILIES
            for link, title in _LINKS.items()
        }
    ),
)
def dual_link(seed: int, quick: bool) -> Numbers:
    """There are eight clouds of 4 observations in 4 coordinates, Bernoulli or Poisson. One is drawn at parameters η, the
    others at 0. The query is η, a key is the natural parameter of its cloud's mean, and a value is one of 3 labels. The
    target is the label of the cloud drawn at η; its exact posterior is ∝ exp(η · the cloud's sum). A head with maps of
    queries and keys (4×4) weighs the clouds by a dot product with the mapped key, or with σ or exp of it. All arms have
    equally many weights. They learn from labels alone, in 1,000 steps of 256 contexts; of the step sizes 0.01 and 0.1, the
    one with the lower training loss is used. Divergences of labels are on 20,000 other contexts.
    """
    drawn = torch.Generator().manual_seed(seed)
    found: Numbers = {}
    for family in _FAMILIES:
        clouds = Clouds(family, drawn)
        test = clouds.batch(2000 if quick else 20_000)
        for link in _LINKS:
            head = _trained(clouds, link, 20 if quick else 1000)
            with torch.no_grad():
                exact, near = log_shares(test[4], test[2]), log_shares(_log_weights(head, *test[:2]).double(), test[2])
            apart = torch.where(exact.isfinite(), exact.exp() * (exact - near), 0.0)
            found[f"{family}_{link}"] = float(apart.sum(-1).mean())
    return found


def _trained(clouds: Clouds, link: Family, steps: int) -> Attention:
    """With the step size whose last losses are lower."""
    number = int(torch.randint(2**31, (), generator=clouds.drawn))
    candidates: list[tuple[float, Attention]] = []
    for step_size in _STEP_SIZES:
        with torch.random.fork_rng():
            torch.manual_seed(number)
            head = Attention(SIZE, 1, batch_first=True, heads=DualLinkHeads(link, divergence=False, scale=1.0))

        def loss(head: Attention = head) -> Tensor:
            query, key, labels, asked, _ = clouds.batch(256)
            return -log_shares(_log_weights(head, query, key), labels).gather(1, asked.unsqueeze(1)).mean()

        losses = minimise(loss, list(head.parameters()), steps=steps, step_size=step_size, averaged=0.1)
        candidates.append((math.fsum(losses[-steps // 5 :]), head))
    return min(candidates, key=lambda found: found[0])[1]


def _log_weights(head: Attention, query: Float[Tensor, "B 1 D"], key: Float[Tensor, "B N D"]) -> Float[Tensor, "B N"]:
    weights = head(query, key, key, need_weights=True)[1]
    assert weights is not None  # they were asked for
    return weights.squeeze(1).clamp_min(1e-30).log()
