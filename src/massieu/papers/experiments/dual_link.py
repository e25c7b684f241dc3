"""Keys through the link of an exponential family: does the matching link help on its own data? (E6b, X8)"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int
from torch import Tensor

from massieu.nn import Attention, DualLinkHeads
from massieu.nn.dual_link import Family
from massieu.papers.experiments.descriptions import described
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.training import minimise

SIZE = 4
CLOUDS = 8
OBSERVATIONS = 4
"""The number of observations in a cloud."""
LABELS = 3
_SPREAD = 0.7
"""Standard deviation of the coordinates of η."""
_STEP_SIZES = (0.01, 0.1)
_LINKS: dict[Family, str] = {"gaussian": "no link", "bernoulli": "σ", "poisson": "exp"}
_FAMILIES: tuple[Family, ...] = ("bernoulli", "poisson")


class CloudBatch(NamedTuple):
    """Contexts of N clouds in d coordinates; the target cloud of each is the one drawn at η."""

    queries: Float[Tensor, "B 1 d"]
    keys: Float[Tensor, "B N d"]
    labels: Int[Tensor, "B N"]
    """The label of each cloud."""
    target_labels: Int[Tensor, " B"]
    """The label of the target cloud."""
    log_posterior: Float64[Tensor, "B N"]
    """The log probability of each cloud that it is the target."""


class Clouds:
    """Clouds of observations, one of them drawn at parameters η and the others at 0; a query knows η, keys the clouds' means.

    A key is the natural parameter of its cloud's mean, with half an observation of each kind added so that it is finite. The
    posterior of which cloud was drawn at η is ∝ exp(η · sum of the cloud), so that the link's slope and offset are exact.
    """

    def __init__(self, family: str, generator: torch.Generator) -> None:
        self.family = family
        self.generator = generator

    def batch(self, contexts: int) -> CloudBatch:
        """Draw contexts."""
        eta = _SPREAD * torch.randn(contexts, SIZE, generator=self.generator, dtype=torch.float64)
        target = torch.randint(CLOUDS, (contexts,), generator=self.generator)
        is_target = F.one_hot(target, CLOUDS).bool().unsqueeze(-1)
        parameters = torch.where(is_target, eta.unsqueeze(1), 0.0)  # (B, N, d)
        observations = self._observe(parameters.unsqueeze(-2).expand(-1, -1, OBSERVATIONS, -1))
        sums = observations.sum(-2)
        mean = (sums + 0.5) / (OBSERVATIONS + 1)
        keys = torch.logit(mean) if self.family == "bernoulli" else mean.log()
        labels = torch.randint(LABELS, (contexts, CLOUDS), generator=self.generator)
        return CloudBatch(
            queries=eta.float().unsqueeze(1),
            keys=keys.float(),
            labels=labels,
            target_labels=labels.gather(1, target.unsqueeze(1)).squeeze(1),
            log_posterior=(sums @ eta.unsqueeze(-1)).squeeze(-1).log_softmax(-1),
        )

    def _observe(self, parameters: Float64[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
        if self.family == "bernoulli":
            return torch.bernoulli(parameters.sigmoid(), generator=self.generator)
        return torch.poisson(parameters.exp(), generator=self.generator)


def log_label_probabilities(log_weights: Float[Tensor, "B N"], labels: Int[Tensor, "B N"]) -> Float[Tensor, "B C"]:
    """The log probability of each label, from that of each cloud."""
    has_label = labels.unsqueeze(-1) == torch.arange(LABELS)  # (B, N, C)
    return torch.where(has_label, log_weights.unsqueeze(-1), -torch.inf).logsumexp(1)


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
    generator = torch.Generator().manual_seed(seed)
    numbers: Numbers = {}
    for family in _FAMILIES:
        clouds = Clouds(family, generator)
        test_batch = clouds.batch(2000 if quick else 20_000)
        for link in _LINKS:
            head = _train(clouds, link, 20 if quick else 1000)
            numbers[f"{family}_{link}"] = _divergence(head, test_batch)
    return numbers


def _divergence(head: Attention, batch: CloudBatch) -> float:
    """Mean KL(exact ‖ head) of the labels, in nats."""
    with torch.no_grad():
        log_weights = _log_weights(head, batch).double()
    log_exact = log_label_probabilities(batch.log_posterior, batch.labels)
    log_head = log_label_probabilities(log_weights, batch.labels)
    # Labels that no cloud has: 0·log 0 is 0.
    return float(torch.where(log_exact.isfinite(), log_exact.exp() * (log_exact - log_head), 0.0).sum(-1).mean())


def _train(clouds: Clouds, link: Family, steps: int) -> Attention:
    """A head trained with the step size whose last fifth of losses is lower."""
    seed = int(torch.randint(2**31, (), generator=clouds.generator))
    lowest_loss = math.inf
    best_head = None
    for step_size in _STEP_SIZES:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            head = Attention(SIZE, 1, batch_first=True, heads=DualLinkHeads(link, divergence=False, scale=1.0))

        def loss(head: Attention = head) -> Tensor:
            batch = clouds.batch(256)
            log_probabilities = log_label_probabilities(_log_weights(head, batch), batch.labels)
            return -log_probabilities.gather(1, batch.target_labels.unsqueeze(1)).mean()

        losses = minimise(loss, list(head.parameters()), steps=steps, step_size=step_size, averaged_share=0.1)
        last_loss = math.fsum(losses[-steps // 5 :])
        if best_head is None or last_loss < lowest_loss:
            lowest_loss = last_loss
            best_head = head
    assert best_head is not None
    return best_head


def _log_weights(head: Attention, batch: CloudBatch) -> Float[Tensor, "B N"]:
    _, weights = head(batch.queries, batch.keys, batch.keys, need_weights=True)
    assert weights is not None  # need_weights asks for them.
    return weights.squeeze(1).clamp_min(1e-30).log()
