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
from massieu.posteriors.sufficiency import RegretResult

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
    """A Gaussian mean, against the conditional law of z in the joint normal law of z and all tokens."""
    prior = GaussianMean.create(normal(dimensions), normal(1).exp()[0], normal(1).exp()[0])
    observed = normal(tokens, dimensions)
    precision = normal(tokens).exp()
    yield from _gaussian_mean("tokens of one precision", prior, observed, None)
    yield from _gaussian_mean("tokens of their own precisions", prior, observed, precision)


def _gaussian_mean(name: str, prior: GaussianMean, observed: Tensor, precision: Tensor | None) -> Iterator[Check]:
    tokens, dimensions = observed.shape
    ones = torch.ones(tokens, dtype=torch.float64)
    noise_variance = prior.variance / ones if precision is None else prior.variance / precision
    prior_variance = prior.variance / prior.strength
    # The joint covariance of the tokens is diag(noise) + prior_variance·11ᵀ, in every coordinate.
    factor = torch.linalg.cholesky(torch.diag(noise_variance) + prior_variance)
    residual = observed - prior.mean
    solution = torch.cholesky_solve(torch.cat([residual, ones.unsqueeze(-1)], -1), factor)
    weighted_residual = solution[:, :-1]
    mean = prior.mean + prior_variance * weighted_residual.sum(0)
    variance = prior_variance - prior_variance.square() * solution[:, -1].sum()

    attended = prior.as_attention(observed, precision=precision).attend()
    yield close(f"{name}: attention with a sink and E z", attended.output, mean, _EXACT)
    count = prior.variance / variance
    yield close(f"{name}: exp(log Z) and σ²/Var z", attended.log_partition.exp(), count, CLOSED_FORM)
    posterior = prior.posterior(observed, precision=precision)
    yield close(f"{name}: mean of the posterior", posterior.mean, mean, _EXACT)
    square = (residual * weighted_residual).sum()
    constant = tokens * math.log(2 * math.pi) + 2 * factor.diagonal().log().sum()
    evidence = -0.5 * (dimensions * constant + square)
    yield close(f"{name}: log-evidence and the joint normal density", posterior.log_evidence, evidence)


def _families(normal: Normal, tokens: int) -> Iterator[Check]:
    """The statistic of any exponential family: attention over the tokens and a sink of value χ/ν and logit log ν."""
    half = torch.tensor([0.4], dtype=torch.float64)
    strength = 1.5 + normal(1).abs()[0]
    for likelihood, sink_value, observed in (
        (Bernoulli.create(half), 0.3, (normal(tokens, 1) > 0).double()),
        (Spin.create(half), -0.2, normal(tokens, 1).sign()),
        (Poisson.create(half), 0.9, normal(tokens, 1).mul(2).abs().floor()),
        (Exponential.create(half), 1.2, normal(tokens, 1).abs() + 0.1),
        (Gaussian.create(half, half), -0.6, normal(tokens, 1)),
    ):
        name = type(likelihood).__name__
        chi = sink_value * strength.reshape(1)
        prior = ExponentialFamily.create(likelihood, chi, strength)
        attended = prior.as_attention(observed).attend()
        total = chi
        for token in observed:
            total = total + token
        count = strength + tokens
        yield close(f"{name}: attention and (χ + Σx)/(ν + L)", attended.output, total / count, _EXACT)
        yield close(f"{name}: log Z and log(ν + L)", attended.log_partition, count.log(), _EXACT)


def _concepts(normal: Normal, tokens: int) -> Iterator[Check]:
    """Finitely many concepts: attention runs over them, with log-likelihoods summed over the tokens."""
    prior = normal(5)
    table = normal(5, 4).log_softmax(-1)
    values = normal(5, 3)
    index = normal(tokens).mul(1.5).abs().floor().clamp(max=3).long()
    # Bayes' rule, token by token.
    probability = prior.softmax(0)
    for token in index:
        probability = probability * table[:, token].exp()
        probability = probability / probability.sum()
    attention = DiscreteLatent.create(prior, table).as_attention(index, values=values)
    mean = probability @ values
    yield close("concepts: attention and Bayes' rule", attention.attend().output, mean, _EXACT)
    averaged = attention._replace(query=attention.query / tokens).attend().output
    # Trap 24: without the factor L a long context counts as one token.
    yield at_least("concepts: error of averages without the factor L", (averaged - mean).norm(), 1e-3)


def _dirichlet() -> Iterator[Check]:
    """Categorical tokens with a Dirichlet prior, against the integral over the simplex."""
    prior = DirichletMultinomial.create(torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    observed = torch.tensor([0, 0, 0, 2, 2, 2, 2])
    attended = prior.as_attention(observed).attend()
    expected = torch.tensor([7.0, 2.0, 12.0], dtype=torch.float64) / 21
    yield close("Dirichlet–multinomial: attention and (.33333, .09524, .57143)", attended.output, expected, _EXACT)
    # The simplex by sticks broken off: p = (u, (1 − u)v, (1 − u)(1 − v)), of Jacobian 1 − u.
    nodes, log_weight = quadrature(0.0, 1.0, panels=20)
    first = nodes.unsqueeze(-1)
    second_share = nodes
    shares = torch.stack(
        torch.broadcast_tensors(first, (1 - first) * second_share, (1 - first) * (1 - second_share)), -1
    )
    counts = torch.tensor([3.0, 0.0, 4.0], dtype=torch.float64)
    exponent = prior.concentration - 1 + counts
    log_mass = (exponent * shares.log()).sum(-1) + (1 - first).log() + log_weight.unsqueeze(-1) + log_weight
    mean = log_mass.flatten().softmax(0) @ shares.flatten(0, 1)
    yield close("Dirichlet–multinomial: attention and the integral over the simplex", attended.output, mean, QUADRATURE)


def _without_the_sink(normal: Normal, dimensions: int, repetitions: int) -> Iterator[Check]:
    """Uniform attention without the sink is off by κ₀/(κ₀ + L)·‖m₀ − x̄‖, with κ₀ = 1."""
    sizes = [2**power for power in range(5, 11)]
    errors = []
    prior = GaussianMean.create(normal(dimensions), torch.tensor(1.0).double(), torch.tensor(1.0).double())
    for size in sizes:
        latent = prior.mean + normal(repetitions, 1, dimensions)
        observed = latent + normal(repetitions, size, dimensions)
        average = observed.mean(1)
        error = (average - prior.posterior(observed).mean).norm(dim=-1)
        errors.append(error)
        expected = (prior.mean - average).norm(dim=-1) / (1 + size)
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
    # The claim is for every sequence: half of them are drawn from a concept, half from none.
    from_concept = (table[:, 0].unsqueeze(1) + _gumbel(normal, models, length, tokens)).argmax(-1)
    from_none = normal(models, length).abs().argsort(-1) % tokens
    sequences = torch.where(torch.arange(models).unsqueeze(-1) % 2 == 0, from_concept, from_none)
    yield from _regret("any prior", prior, table, sequences)
    yield from _regret("uniform prior", torch.zeros_like(prior), table, sequences)
    uniform = _averaging(torch.zeros_like(prior), table, sequences)
    steps = torch.arange(1, length + 1, dtype=torch.float64)
    yield at_most("uniform prior: average regret·t/log|𝒵|", uniform.average * steps / math.log(concepts), 1 + _EXACT)
    yield from _telling_token()


def _log_likelihoods(table: Tensor, sequences: Tensor) -> Tensor:
    """log p(rᵢ | z), (models, length, concepts)."""
    return table.gather(-1, sequences.unsqueeze(1).expand(-1, table.shape[1], -1)).mT


def _averaging(log_prior: Tensor, table: Tensor, sequences: Tensor) -> RegretResult:
    """The regret of exact averages, with predictions token by token."""
    law = DiscreteLatent.create(log_prior.expand(len(table), -1), table)
    log_predictives = []
    for token in sequences.unbind(1):
        log_predictives.append(law.log_predictive(token))
        law = law.posterior(token.unsqueeze(-1))
    return averaging_regret(torch.stack(log_predictives, -1), _log_likelihoods(table, sequences), log_prior)


def _regret(name: str, log_prior: Tensor, table: Tensor, sequences: Tensor) -> Iterator[Check]:
    """Averaging never loses more than the best concept plus log 1/π."""
    regret = _averaging(log_prior, table, sequences)
    log_likelihoods = _log_likelihoods(table, sequences)
    loss = -(log_prior.log_softmax(-1) + log_likelihoods.cumsum(-2)).logsumexp(-1)
    yield close(f"{name}: the best concept's loss", regret.best[:, -1], -log_likelihoods.sum(-2).amax(-1))
    yield close(f"{name}: Σ −log p(rᵢ | r_<i) and −log Σ π(z) Π p(rᵢ | z)", regret.loss, loss)
    length = sequences.shape[1]
    yield at_most(f"{name}: loss − min[loss of z + log 1/π(z)]", regret.loss - regret.bound, _EXACT * length)


def _telling_token() -> Iterator[Check]:
    """The bound is attained by ten concepts that emit one token each."""
    table = torch.eye(10, dtype=torch.float64).log()
    law = DiscreteLatent.create(torch.zeros(10, dtype=torch.float64), table)
    log_predictive = law.log_predictive(torch.tensor([7]))
    regret = averaging_regret(log_predictive, table[:, 7].unsqueeze(0), law.log_weight)
    yield close("ten concepts, one token that tells: loss and the bound, 2.3026", regret.loss, regret.bound, _EXACT)
    yield close("ten concepts, one token that tells: loss and log 10", regret.loss, math.log(10), _EXACT)


def _gumbel(normal: Normal, *shape: int) -> Tensor:
    """Draws of Gumbel's law, by which an argmax samples."""
    uniform = 0.5 * (1 + torch.erf(normal(*shape) / math.sqrt(2)))
    return -(-uniform.clamp(1e-300, 1 - 1e-16).log()).log()
