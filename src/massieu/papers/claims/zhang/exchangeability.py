"""Z1, Z2: exchangeable tokens have a latent if there are enough of them; its posterior is what they say of it."""

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.papers.claims.claim import CLOSED_FORM, ZHANG, Check, at_least, at_most, close
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.registry import claim
from massieu.papers.theory import finite_extension_bound, urn_total_variation
from massieu.posteriors import DirichletMultinomial, DiscreteLatent, GaussianMean, sufficiency

_ROUNDING = 1e-12

# --- Z1 --------------------------------------------------------------------------------------------------------------


@claim(
    "Z1",
    title="Exchangeability and de Finetti",
    statement="A sequence that can be extended without end is exchangeable if and only if its tokens are "
    "independent given a latent z, with one law for every length. For the first k of n exchangeable tokens this "
    "holds up to k(k − 1)/(2n) in total variation.",
    source=f"{ZHANG}, abstract; the finite bound is derived",
    status="abstract only",
    corrected="The abstract states no condition, but the sequence must be extendable without end. Two draws without "
    "replacement from {0, 1} have covariance −¼; in a mixture of independent tokens no covariance is below 0.",
)
def de_finetti(balls: int = 10, drawn: int = 3, length: int = 5, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, balls=balls, drawn=drawn, length=length)
    drawn = min(drawn, balls)
    normal = normal_draws(seed)
    yield from _mixtures(normal, length)
    yield from _urns(balls, drawn)
    # All ways to draw both balls of {0, 1}, equally likely.
    pairs = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    covariance = pairs.prod(-1).mean() - pairs.mean(0).prod()
    yield close("two draws without replacement: covariance and −¼", covariance, -0.25)


def _mixtures(normal: Normal, length: int) -> Iterator[Check]:
    """Laws with a latent: exchangeable, consistent in the length, of covariance at least 0."""
    index = normal(length).mul(1.5).abs().floor().clamp(max=2).long()
    order = normal(length).argsort()
    dirichlet = DirichletMultinomial.create(normal(3).exp())
    concepts = DiscreteLatent.create(normal(4), normal(4, 3).log_softmax(-1))
    gaussian = GaussianMean.create(normal(2), normal(1).exp()[0], normal(1).exp()[0])
    for name, law, tokens in (
        ("Dirichlet", dirichlet, index),
        ("concepts", concepts, index),
        ("Gaussian", gaussian, normal(length, 2)),
    ):
        permuted = law.posterior(tokens[order]).log_evidence
        in_order = law.posterior(tokens).log_evidence
        yield close(f"{name}: joint log-probability, tokens permuted", permuted, in_order, _ROUNDING)
    for name, law in (("Dirichlet", dirichlet), ("concepts", concepts)):
        extensions = [torch.cat([index, last.reshape(1)]) for last in torch.arange(3)]
        longer = torch.stack([law.posterior(tokens).log_evidence for tokens in extensions])
        yield close(f"{name}: Σ p(X, next) and p(X)", longer.logsumexp(0), law.posterior(index).log_evidence, _ROUNDING)
        # The joint law of two tokens, (3, 3).
        pairs = torch.cartesian_prod(torch.arange(3), torch.arange(3))
        joint = torch.stack([law.posterior(pair).log_evidence for pair in pairs]).exp().reshape(3, 3)
        covariance = joint - joint.sum(0) * joint.sum(1, keepdim=True)
        least = torch.linalg.eigvalsh(covariance)[0]
        yield at_least(f"{name}: least eigenvalue of two tokens' covariance", least, -_ROUNDING)


def _urns(balls: int, drawn: int) -> Iterator[Check]:
    """The first k of n balls of an urn are at most k(k − 1)/(2n) away from draws with replacement."""
    yield close("10 balls, 3 drawn: distance and .28", urn_total_variation([1] * 10, 3), 0.28)
    yield close("10 balls, 3 drawn: bound and .3", finite_extension_bound(3, 10), 0.3)
    all_different = [1] * balls
    two_colours = [1, 1] if balls == 2 else [balls - balls // 3, balls // 3]
    for counts in (all_different, two_colours):
        colours = f"{len(counts)} colours of {balls} balls, {drawn} drawn"
        distance = urn_total_variation(counts, drawn)
        if len(counts) ** drawn <= 5000:
            yield close(f"{colours}: distance and that of the sequences", distance, _by_sequences(counts, drawn))
        yield at_most(f"{colours}: distance over k(k − 1)/(2n)", distance / finite_extension_bound(drawn, balls), 1.0)


def _by_sequences(counts: list[int], drawn: int) -> float:
    """½ Σ |P − Q| over all sequences, one draw after the other."""
    total = sum(counts)
    distance = 0.0
    for sequence in itertools.product(range(len(counts)), repeat=drawn):
        remaining = list(counts)
        without_replacement = 1.0
        for colour in sequence:
            without_replacement *= remaining[colour] / sum(remaining)
            remaining[colour] -= 1
        with_replacement = math.prod(counts[colour] / total for colour in sequence)
        distance += abs(without_replacement - with_replacement)
    return distance / 2


# --- Z2 --------------------------------------------------------------------------------------------------------------


@claim(
    "Z2",
    title="The latent posterior is sufficient and minimal",
    statement="The posterior S = P(z | X) is sufficient, I(z; S) = I(z; X), and minimal for z: it is a function of every "
    "sufficient statistic, and to merge two of its values loses information. In exponential families it is the sum of the "
    "statistics together with the count.",
    source=f"{ZHANG}, abstract (a); the proof is derived",
    status="abstract only",
    corrected="The abstract does not say for what the representation is minimal. It is minimal for z. For one label "
    "y the minimal statistic is P(y | X), which is coarser: different posteriors may be merged without loss.",
)
def sufficiency_of_the_posterior(concepts: int = 3, tokens: int = 4, length: int = 3, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, concepts=concepts, tokens=tokens)
    normal = normal_draws(seed)
    prior = normal(concepts)
    table = normal(concepts, tokens)
    result = sufficiency(prior, table, length)
    joint = _joint(prior, table, length)
    information = _entropy(joint.sum(0)) + _entropy(joint.sum(1)) - _entropy(joint)
    yield close("I(z; X) and H(z) + H(X) − H(z, X)", result.information, information)
    posterior = joint / joint.sum(1, keepdim=True)
    # I(z; S) by conditioning on S: H(z) less the mean entropy of the posteriors.
    mean_entropy = torch.stack([_entropy(law) for law in posterior]) @ joint.sum(1)
    yield close("I(z; S) and H(z) − E H(S)", result.posterior_information, _entropy(joint.sum(0)) - mean_entropy)
    yield close("I(z; S) and I(z; X)", result.posterior_information, result.information)
    yield close("sequences and V^L", float(result.sequences), float(tokens**length))
    multisets = float(math.comb(tokens + length - 1, length))
    yield close("posteriors of tokens in general position and multisets", float(result.posteriors), multisets)
    yield at_least("I(z; ·) lost by the cheapest merger of two posteriors", result.least_loss, 1e-12)
    yield from _predictive(normal, prior, table, posterior, length)
    yield from _counted(normal)
    yield from _one_label()


def _predictive(normal: Normal, prior: Tensor, table: Tensor, posterior: Tensor, length: int) -> Iterator[Check]:
    """Labels see the tokens through the posterior; and the library's posterior is the enumerated one."""
    sequences = torch.cartesian_prod(*[torch.arange(table.shape[1])] * length).reshape(-1, length)
    law = DiscreteLatent.create(prior, table.log_softmax(-1))
    yield close("posteriors and those of the enumeration", law.posterior(sequences).mean, posterior, CLOSED_FORM)
    label = normal(table.shape[0], 2).softmax(-1)
    joint = _joint(prior, table, length)
    yield close("P(y | X) and Σ P(y | z) S(z)", joint @ label / joint.sum(1, keepdim=True), posterior @ label)


def _counted(normal: Normal) -> Iterator[Check]:
    """Equal sums and counts have one posterior; equal averages do not (trap 24)."""
    law = GaussianMean.create(normal(1), normal(1).exp()[0], normal(1).exp()[0])
    tokens = normal(6, 1)
    shift = normal(1)
    same_sum = torch.cat([tokens[:4], tokens[4:5] + shift, tokens[5:] - shift])
    posterior = law.posterior(tokens)
    yield close("equal sums and counts: means", law.posterior(same_sum).mean, posterior.mean)
    difference = law.posterior(same_sum).covariance - posterior.covariance
    yield close("equal sums and counts: covariances", difference, 0.0)
    twice = law.posterior(torch.cat([tokens, tokens]))
    # Σ/(κ + 12) over Σ/(κ + 6)
    ratio = (law.strength + 6) / (law.strength + 12)
    yield close("equal averages, twice the count: covariances", twice.covariance, ratio * posterior.covariance)


def _one_label() -> Iterator[Check]:
    """Two concepts of one label, which tokens 0 and 1 tell apart: for the label they need not be."""
    table = torch.tensor([[0.6, 0.2, 0.2], [0.2, 0.6, 0.2], [0.1, 0.1, 0.8]], dtype=torch.float64).log()
    label = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    result = sufficiency(torch.zeros(3, dtype=torch.float64), table, 1, label=label)
    yield at_least("two concepts of one label: I(z; ·) lost by the cheapest merger", result.least_loss, 1e-3)
    yield at_most("two concepts of one label: I(y; ·) lost by it", result.least_label_loss, _ROUNDING)


def _joint(prior: Tensor, table: Tensor, length: int) -> Tensor:
    """P(X, z), a row a sequence: the product of its tokens' probabilities, token by token."""
    joint = prior.softmax(0).unsqueeze(0)
    for _ in range(length):
        joint = (joint.unsqueeze(1) * table.softmax(1).T).flatten(0, 1)
    return joint


def _entropy(probabilities: Tensor) -> Tensor:
    return -torch.special.xlogy(probabilities, probabilities).sum()
