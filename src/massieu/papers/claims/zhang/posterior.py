"""Z3, Z11: posterior means that are attention, and what averaging over concepts loses."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.measures import Bernoulli, Exponential, Gaussian, Poisson, Spin
from massieu.papers.claims.claim import CLOSED_FORM, FOLLOW_UP, QUADRATURE, Check, at_least, at_most, close
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.oracles import quadrature
from massieu.papers.claims.rates import has_rate, rate
from massieu.papers.claims.registry import claim
from massieu.posteriors import DirichletMultinomial, DiscreteLatent, ExponentialFamily, GaussianMean, averaging_regret

_EXACT = 1e-12

# --- Z3 --------------------------------------------------------------------------------------------------------------


@claim(
    "Z3",
    title="A posterior mean as attention",
    statement="Posterior means are attention. For a Gaussian mean, or the statistic of any exponential family, it "
    "runs over the tokens and a sink of value χ/ν and logit log ν; with precisions τ, the logits are log τ. For "
    "finitely many concepts it runs over the concepts, with sum-pooled log-likelihoods. The log-partition is the "
    "log of the posterior's count. Uniform attention without the sink is off by κ₀/(κ₀ + L)·‖m₀ − x̄‖.",
    source="conjugate Bayes, derived",
    status="derived",
)
def posterior_means_as_attention(
    tokens: int = 12, dimensions: int = 3, repetitions: int = 120, seed: int = 0
) -> Iterator[Check]:
    check_at_least(2, tokens=tokens)
    # The interval of the rate is a tenth wide.
    check_at_least(100, repetitions=repetitions)
    normal = normal_draws(seed)
    yield from _gaussian(normal, tokens, dimensions)
    yield from _families(normal, tokens)
    yield from _concepts(normal, tokens)
    yield from _dirichlet()
    yield from _without_the_sink(normal, dimensions, repetitions)


def _gaussian(normal: Normal, tokens: int, dimensions: int) -> Iterator[Check]:
    """Against the conditional law of z in the joint normal law of z and all tokens."""
    prior = GaussianMean.create(normal(dimensions), normal(1).exp()[0], normal(1).exp()[0])
    seen = normal(tokens, dimensions)
    precision = normal(tokens).exp()
    for name, given in (("tokens of one precision", None), ("tokens of their own precisions", precision)):
        noise = prior.variance / (torch.ones(tokens, dtype=torch.float64) if given is None else given)
        width = prior.variance / prior.strength
        factor = torch.linalg.cholesky(torch.diag(noise) + width)
        right = torch.cat([seen - prior.mean, torch.ones(tokens, 1, dtype=torch.float64)], -1)
        solved = torch.cholesky_solve(right, factor)
        mean = prior.mean + width * solved[:, :-1].sum(0)
        variance = width - width.square() * solved[:, -1].sum()
        attended = prior.as_attention(seen, precision=given).attend()
        yield close(f"{name}: attention with a sink and E z", attended.output, mean, _EXACT)
        count = prior.variance / variance
        yield close(f"{name}: exp(log Z) and σ²/Var z", attended.log_partition.exp(), count, CLOSED_FORM)
        found = prior.posterior(seen, precision=given)
        yield close(f"{name}: mean of the posterior", found.mean, mean, _EXACT)
        square = ((seen - prior.mean) * solved[:, :-1]).sum()
        constant = tokens * math.log(2 * math.pi) + 2 * factor.diagonal().log().sum()
        evidence = -0.5 * (dimensions * constant + square)
        yield close(f"{name}: log-evidence and the joint normal density", found.log_evidence, evidence)


def _families(normal: Normal, tokens: int) -> Iterator[Check]:
    half = torch.tensor([0.4], dtype=torch.float64)
    strength = 1.5 + normal(1).abs()[0]
    for likelihood, share, seen in (
        (Bernoulli.create(half), 0.3, (normal(tokens, 1) > 0).double()),
        (Spin.create(half), -0.2, normal(tokens, 1).sign()),
        (Poisson.create(half), 0.9, normal(tokens, 1).mul(2).abs().floor()),
        (Exponential.create(half), 1.2, normal(tokens, 1).abs() + 0.1),
        (Gaussian.create(half, half), -0.6, normal(tokens, 1)),
    ):
        name = type(likelihood).__name__
        chi = share * strength.reshape(1)
        law = ExponentialFamily.create(likelihood, chi, strength)
        attended = law.as_attention(seen).attend()
        total = chi
        for token in seen:
            total = total + token
        count = strength + tokens
        yield close(f"{name}: attention and (χ + Σx)/(ν + L)", attended.output, total / count, _EXACT)
        yield close(f"{name}: log Z and log(ν + L)", attended.log_partition, count.log(), _EXACT)


def _concepts(normal: Normal, tokens: int) -> Iterator[Check]:
    prior = normal(5)
    table = normal(5, 4).log_softmax(-1)
    values = normal(5, 3)
    index = normal(tokens).mul(1.5).abs().floor().clamp(max=3).long()
    weight = prior.softmax(0)
    for token in index:  # Bayes, token by token
        weight = weight * table[:, token].exp()
        weight = weight / weight.sum()
    law = DiscreteLatent.create(prior, table)
    form = law.as_attention(index, values=values)
    yield close("concepts: attention and Bayes' rule", form.attend().output, weight @ values, _EXACT)
    averaged = form._replace(query=form.query / tokens).attend().output
    # Trap 24: without the factor L a long context counts as one token.
    yield at_least("concepts: error of averages without the factor L", (averaged - weight @ values).norm(), 1e-3)


def _dirichlet() -> Iterator[Check]:
    """Against the integral over the simplex."""
    law = DirichletMultinomial.create(torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    seen = torch.tensor([0, 0, 0, 2, 2, 2, 2])
    attended = law.as_attention(seen).attend()
    expected = torch.tensor([7.0, 2.0, 12.0], dtype=torch.float64) / 21
    yield close("Dirichlet–multinomial: attention and (.33333, .09524, .57143)", attended.output, expected, _EXACT)
    line, log_weight = quadrature(0.0, 1.0, panels=20)
    first = line.unsqueeze(-1)
    rest = line
    shares = torch.stack(torch.broadcast_tensors(first, (1 - first) * rest, (1 - first) * (1 - rest)), -1)
    exponent = law.concentration - 1 + torch.tensor([3.0, 0.0, 4.0], dtype=torch.float64)
    log_mass = (exponent * shares.log()).sum(-1) + (1 - first).log() + log_weight.unsqueeze(-1) + log_weight
    mean = log_mass.flatten().softmax(0) @ shares.flatten(0, 1)
    yield close("Dirichlet–multinomial: attention and the integral over the simplex", attended.output, mean, QUADRATURE)


def _without_the_sink(normal: Normal, dimensions: int, repetitions: int) -> Iterator[Check]:
    sizes = [2**power for power in range(5, 11)]
    errors = []
    prior = GaussianMean.create(normal(dimensions), torch.tensor(1.0).double(), torch.tensor(1.0).double())
    for size in sizes:
        latent = prior.mean + normal(repetitions, 1, dimensions)
        seen = latent + normal(repetitions, size, dimensions)
        error = (seen.mean(1) - prior.posterior(seen).mean).norm(dim=-1)
        errors.append(error)
        expected = (prior.mean - seen.mean(1)).norm(dim=-1) / (1 + size)
        if size == sizes[0]:
            yield close("uniform attention: error and κ₀/(κ₀ + L)·‖m₀ − x̄‖", error, expected, _EXACT)
    yield has_rate("uniform attention: rate of the error in L", rate(sizes, torch.stack(errors)), -1.0)


# --- Z11 -------------------------------------------------------------------------------------------------------------


@claim(
    "Z11",
    title="Regret of Bayesian model averaging",
    statement="The exact average over all concepts never loses more than the best concept plus log 1/π of its prior "
    "probability: −Σ log p(rᵢ | r_<i) ≤ min_z[−Σ log p(rᵢ | z) + log 1/π(z)], for every sequence. Under a uniform "
    "prior its average regret is at most log|𝒵|/t.",
    source=FOLLOW_UP,
    status="reconstructed",
)
def regret_of_averaging(
    models: int = 50, concepts: int = 6, tokens: int = 5, length: int = 40, seed: int = 0
) -> Iterator[Check]:
    check_at_least(2, concepts=concepts, tokens=tokens, length=length)
    normal = normal_draws(seed)
    table = (2 * normal(models, concepts, tokens)).log_softmax(-1)
    prior = normal(concepts).log_softmax(-1)
    # Any sequence will do: half of them are of one concept each, half of none.
    likely = (table[:, 0].unsqueeze(1) + _gumbel(normal, models, length, tokens)).argmax(-1)
    index = torch.where(
        torch.arange(models).unsqueeze(-1) % 2 == 0, likely, normal(models, length).abs().argsort(-1) % tokens
    )
    each = table.gather(-1, index.unsqueeze(1).expand(-1, concepts, -1)).mT
    for name, weight in (("any prior", prior), ("uniform prior", torch.zeros_like(prior))):
        law = DiscreteLatent.create(weight.expand(models, -1), table)
        predictives = []
        for token in index.unbind(1):
            predictives.append(law.log_predictive(token))
            law = law.posterior(token.unsqueeze(-1))
        found = averaging_regret(torch.stack(predictives, -1), each, weight)
        by_hand = -(weight.log_softmax(-1) + each.cumsum(-2)).logsumexp(-1)
        yield close(f"{name}: the best concept's loss", found.best[:, -1], -each.sum(-2).amax(-1))
        yield close(f"{name}: Σ −log p(rᵢ | r_<i) and −log Σ π(z) Π p(rᵢ | z)", found.loss, by_hand)
        yield at_most(f"{name}: loss − min[loss of z + log 1/π(z)]", found.loss - found.bound, _EXACT * length)
    steps = torch.arange(1, length + 1, dtype=torch.float64)
    yield at_most("uniform prior: average regret·t/log|𝒵|", found.average * steps / math.log(concepts), 1 + _EXACT)
    table = torch.eye(10, dtype=torch.float64).log()
    sure = DiscreteLatent.create(torch.zeros(10, dtype=torch.float64), table)
    one = averaging_regret(sure.log_predictive(torch.tensor([7])), table[:, 7].unsqueeze(0), sure.log_weight)
    yield close("ten concepts, one token that tells: loss and the bound, 2.3026", one.loss, one.bound, _EXACT)
    yield close("ten concepts, one token that tells: loss and log 10", one.loss, math.log(10), _EXACT)


def _gumbel(normal: Normal, *shape: int) -> Tensor:
    """Draws of Gumbel's law, by which an argmax samples."""
    uniform = 0.5 * (1 + torch.erf(normal(*shape) / math.sqrt(2)))
    return -(-uniform.clamp(1e-300, 1 - 1e-16).log()).log()
