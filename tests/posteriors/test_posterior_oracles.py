"""Posteriors against other routes: joint normals, SciPy's laws, quadrature, enumeration."""

import itertools

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from tests.posteriors.cases import cases

from massieu.measures import Bernoulli, Exponential, Gamma, Poisson, Spin
from massieu.posteriors import (
    BayesianLinearRegression,
    DirichletMultinomial,
    DiscreteLatent,
    ExponentialFamily,
    GaussianMean,
    HiddenMarkov,
    NoisyLinearRegression,
)

CASES = cases()
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def tensor(value):
    return torch.as_tensor(np.asarray(value, dtype=np.float64))


# --- Gaussian means ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heteroscedastic", [False, True])
def test_gaussian_mean_is_a_joint_normal(heteroscedastic):
    law, tokens = CASES["Gaussian mean"].prior, CASES["Gaussian mean"].tokens
    precision = torch.rand(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3 + 0.1
    found = law.posterior(tokens, precision=precision if heteroscedastic else None)
    for row in range(2):
        noise = (law.variance[row] / (precision[row] if heteroscedastic else tensor(np.ones(6)))).numpy()
        prior = float(law.variance[row] / law.strength[row])
        joint = np.diag(noise) + prior
        x, m = tokens[row].numpy(), law.mean[row].numpy()
        evidence = sum(stats.multivariate_normal(np.full(6, m[j]), joint).logpdf(x[:, j]) for j in range(3))
        torch.testing.assert_close(found.log_evidence[row], tensor(evidence), **EXACT)
        gain = np.full(6, prior) @ np.linalg.inv(joint)
        torch.testing.assert_close(found.mean[row], tensor(m + gain @ (x - m)), **EXACT)
        covariance = tensor((prior - gain @ np.full(6, prior)) * np.eye(3))
        torch.testing.assert_close(found.covariance[row], covariance, **EXACT)
    if heteroscedastic:
        attended = law.as_attention(tokens, precision=precision).attend()
        torch.testing.assert_close(attended.output, found.mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(attended.log_partition, found.strength.log(), rtol=0, atol=1e-12)
        value = found.log_predictive(tokens[:, 0], precision=precision[:, 0])
        later = found.posterior(tokens[:, :1], precision=precision[:, :1])
        torch.testing.assert_close(later.log_evidence - found.log_evidence, value, **EXACT)


def test_tokens_far_from_the_origin_keep_their_digits():
    law = GaussianMean.create(tensor([1e6]), tensor(2.0), tensor(1.0))
    near = GaussianMean.create(tensor([0.0]), tensor(2.0), tensor(1.0))
    tokens = torch.randn(50, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).mul(64).round() / 64
    far = law.posterior(tokens + 1e6)
    torch.testing.assert_close(far.log_evidence, near.posterior(tokens).log_evidence, rtol=1e-9, atol=0)


def test_an_average_loses_the_count():
    """Trap 24: equal averages of different lengths have different posteriors; log Z tells them apart."""
    law = GaussianMean.create(tensor([0.0]), tensor(1.0), tensor(1.0))
    short, long = torch.full((3, 1), 0.5, dtype=torch.float64), torch.full((300, 1), 0.5, dtype=torch.float64)
    assert short.mean() == long.mean()
    first, second = law.as_attention(short).attend(), law.as_attention(long).attend()
    assert (first.output - second.output).abs() > 0.1
    for tokens, found in ((short, first), (long, second)):
        width = law.variance / found.log_partition.exp()
        torch.testing.assert_close(law.posterior(tokens).covariance, width.reshape(1, 1), **EXACT)
    # Concepts too: the average of the log-likelihoods without the factor L is another posterior.
    concepts = CASES["concepts"].prior
    tokens = CASES["concepts"].tokens
    form = concepts.as_attention(tokens)
    averaged = form._replace(query=form.query / 6).attend().output
    assert (averaged - concepts.posterior(tokens).mean).abs().max() > 0.05


# --- exponential families ----------------------------------------------------------------------------------------------


def scalar(likelihood, chi, strength):
    return ExponentialFamily.create(likelihood, tensor([chi]), tensor(strength))


def test_bernoulli_tokens_have_beta_posteriors():
    law = scalar(Bernoulli.create(tensor([0.5])), 1.3, 4.1).posterior(tensor([[1.0], [0.0], [1.0]]))
    posterior = stats.beta(3.3, 3.8)
    torch.testing.assert_close(law.mean, tensor([posterior.mean()]), **EXACT)
    numbers = [1.3 / 4.1, 2.8 / 5.1, 2.3 / 6.1]
    torch.testing.assert_close(law.log_evidence, tensor(np.log(numbers).sum()), **EXACT)
    logit, _ = integrate.quad(lambda p: np.log(p / (1 - p)) * posterior.pdf(p), 0, 1, epsabs=1e-12)
    torch.testing.assert_close(law.natural_mean, tensor([logit]), rtol=1e-8, atol=1e-8)


def test_poisson_predictives_are_negative_binomial():
    law = scalar(Poisson.create(tensor([1.7])), 2.2, 1.4).posterior(tensor([[3.0], [0.0]]))
    points = torch.arange(8, dtype=torch.float64)
    expected = stats.nbinom(5.2, 3.4 / 4.4).logpmf(points.numpy())
    torch.testing.assert_close(law.log_predictive(points.unsqueeze(-1)), tensor(expected), **EXACT)


def test_exponential_predictives_are_lomax():
    # Rates from gamma(ν + 1, χ); the likelihood's own rate only moves the origin of η.
    law = scalar(Exponential.create(tensor([0.7])), 2.2, 1.4).posterior(tensor([[3.0], [0.2]]))
    points = tensor([0.1, 1.0, 7.0])
    expected = stats.lomax(1.4 + 2 + 1, scale=5.4).logpdf(points.numpy())
    torch.testing.assert_close(law.log_predictive(points.unsqueeze(-1)), tensor(expected), **EXACT)


def test_gamma_and_spin_predictives_by_quadrature():
    law = scalar(Gamma.create(tensor([1.6]), tensor([1.0])), 2.2, 1.4).posterior(tensor([[3.0]]))
    rate = stats.gamma(1.6 * 2.4 + 1, scale=1 / 5.2)
    for x in (0.3, 2.0):
        value, _ = integrate.quad(
            lambda r, x=x: stats.gamma(1.6, scale=1 / r).pdf(x) * rate.pdf(r), 0, np.inf, epsabs=1e-12
        )
        torch.testing.assert_close(law.log_predictive(tensor([x])), tensor(np.log(value)), rtol=1e-8, atol=1e-8)
    spin = scalar(Spin.create(tensor([0.0])), 0.4, 2.0).posterior(tensor([[1.0], [-1.0]]))
    torch.testing.assert_close(spin.log_predictive(tensor([1.0])), tensor(np.log(0.5 * (1 + 0.4 / 4))), **EXACT)


# --- categories and concepts -------------------------------------------------------------------------------------------


def test_dirichlet_multinomial_is_scipys():
    concentration, tokens = CASES["Dirichlet"].parameters[0], CASES["Dirichlet"].tokens
    law = CASES["Dirichlet"].prior.posterior(tokens)
    for row in range(2):
        counts = np.bincount(tokens[row].numpy(), minlength=4)
        orders = stats.multinomial(6, np.full(4, 0.25)).logpmf(counts) - 6 * np.log(0.25)
        expected = stats.dirichlet_multinomial(concentration[row].numpy(), 6).logpmf(counts) - orders
        torch.testing.assert_close(law.log_evidence[row], tensor(expected), **EXACT)
        posterior = stats.dirichlet(concentration[row].numpy() + counts)
        torch.testing.assert_close(law.mean[row], tensor(posterior.mean()), **EXACT)
        torch.testing.assert_close(law.covariance[row], tensor(posterior.cov()), **EXACT)


def test_dirichlet_multinomial_by_simulation():
    """(.33333, .09524, .57143): weights by likelihood of draws from the prior."""
    law = DirichletMultinomial.create(tensor([0.5, 1.0, 2.0]))
    found = law.posterior(torch.tensor([0, 0, 0, 2, 2, 2, 2])).mean
    torch.testing.assert_close(found, tensor([7 / 21, 2 / 21, 12 / 21]), rtol=0, atol=1e-12)
    draws = np.random.default_rng(0).dirichlet([0.5, 1.0, 2.0], 200_000)
    weights = draws[:, 0] ** 3 * draws[:, 2] ** 4
    weights /= weights.sum()
    mean = weights @ draws
    error = np.sqrt((weights[:, None] ** 2 * (draws - mean) ** 2).sum(0))
    assert (np.abs(found.numpy() - mean) < 5 * error).all()
    assert error.max() < 0.005


def test_concepts_by_enumeration():
    law, tokens = CASES["concepts"].prior, CASES["concepts"].tokens
    found = law.posterior(tokens)
    for row in range(2):
        prior = law.log_weight[row].exp().numpy()
        table = law.log_likelihood[row].exp().numpy()
        joint = prior * table[:, tokens[row].numpy()].prod(1)
        torch.testing.assert_close(found.log_evidence[row].exp(), tensor(joint.sum()), **EXACT)
        torch.testing.assert_close(found.mean[row], tensor(joint / joint.sum()), **EXACT)
        following = table.T @ joint / joint.sum()
        predicted = found.log_predictive(torch.arange(4).expand(2, 4))[row]
        torch.testing.assert_close(predicted.exp(), tensor(following), **EXACT)
        p = joint / joint.sum()
        torch.testing.assert_close(found.covariance[row], tensor(np.diag(p) - np.outer(p, p)), **EXACT)


def test_concepts_that_rule_tokens_out():
    table = tensor([[0.5, 0.5, 0.0], [0.0, 0.2, 0.8]]).log()
    law = DiscreteLatent.create(tensor([0.0, 0.0]), table)
    found = law.posterior(torch.tensor([1, 0]))
    torch.testing.assert_close(found.mean, tensor([1.0, 0.0]), **EXACT)
    values = tensor([[1.0, 2.0], [3.0, 4.0]])
    attended = law.as_attention(torch.tensor([1, 0]), values=values).attend()
    torch.testing.assert_close(attended.output, values[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(attended.log_partition.exp(), tensor(0.5 * 0.25), **EXACT)


# --- regression --------------------------------------------------------------------------------------------------------


def regressions():
    case = CASES["regression"]
    for row in range(2):
        tokens = case.tokens[row].numpy()
        mean, precision = (part[row].numpy() for part in case.parameters[:2])
        yield row, tokens[:, :3], tokens[:, 3:], mean, np.linalg.inv(precision)


def test_regression_is_a_joint_normal():
    law = CASES["regression"].prior
    found = law.posterior(CASES["regression"].tokens)
    query = tensor([[0.3, -1.0, 2.0]]).expand(2, 3)
    predicted = found.predict(query)
    for row, features, targets, mean, covariance in regressions():
        noise = float(law.noise[row])
        joint = noise * np.eye(6) + features @ covariance @ features.T
        evidence = sum(stats.multivariate_normal(features @ mean[:, j], joint).logpdf(targets[:, j]) for j in range(2))
        torch.testing.assert_close(found.log_evidence[row], tensor(evidence), **EXACT)
        gain = covariance @ features.T @ np.linalg.inv(joint)
        torch.testing.assert_close(found.mean[row], tensor(mean + gain @ (targets - features @ mean)), **EXACT)
        left = covariance - gain @ features @ covariance
        torch.testing.assert_close(found.covariance[row], tensor(left), **EXACT)
        q = query[row].numpy()
        torch.testing.assert_close(predicted.variance[row], tensor(noise + q @ left @ q), **EXACT)


def test_regression_of_unknown_noise_is_students_t():
    law = CASES["regression of unknown noise"].prior
    tokens = CASES["regression of unknown noise"].tokens
    found = law.posterior(tokens)
    for row in range(2):
        features, targets = tokens[row, :, :3].numpy(), tokens[row, :, 3:].numpy()
        a, b = float(law.shape[row]), float(law.rate[row])
        joint = np.eye(6) + features @ np.linalg.inv(law.precision[row].numpy()) @ features.T
        both = np.kron(np.eye(2), joint)  # one noise for both targets
        centre = (features @ law.mean[row].numpy()).T.ravel()
        expected = stats.multivariate_t(centre, both * b / a, df=2 * a).logpdf(targets.T.ravel())
        torch.testing.assert_close(found.log_evidence[row], tensor(expected), **EXACT)
    wide = NoisyLinearRegression.create(law.mean, law.precision, torch.ones(2).double(), law.rate)
    assert wide.noise.isinf().all()


def test_kernel_ridge_is_the_predictive_mean():
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randn(9, 5, dtype=torch.float64, generator=generator)
    features, targets = tokens.split([3, 2], -1)
    noise, prior = 0.3, 1.7
    identity = torch.eye(3, dtype=torch.float64)
    law = BayesianLinearRegression.create(torch.zeros(3, 2, dtype=torch.float64), identity / prior, tensor(noise))
    query = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    gram = features @ features.T + noise / prior * torch.eye(9, dtype=torch.float64)
    expected = query @ features.T @ torch.linalg.solve(gram, targets)
    torch.testing.assert_close(law.posterior(tokens).predict(query).mean, expected, **EXACT)


# --- hidden Markov chains ----------------------------------------------------------------------------------------------


def test_hidden_markov_by_all_paths():
    law, tokens = CASES["hidden Markov"].prior, CASES["hidden Markov"].tokens[:, :4]
    seen = torch.tensor([[True] * 4, [True, False, True, True]])
    found, path = law.posterior(tokens, seen), law.path(tokens, seen)
    for row in range(2):
        first, move, emit = (
            part[row].exp().numpy() for part in (law.log_weight, law.log_transition, law.log_likelihood)
        )
        emitted = np.stack([emit[:, x] if keep else np.ones(3) for x, keep in zip(tokens[row], seen[row], strict=True)])
        weight = {
            states: first[states[0]]
            * np.prod([move[i, j] for i, j in itertools.pairwise(states)])
            * np.prod([emitted[t, s] for t, s in enumerate(states)])
            for states in itertools.product(range(3), repeat=4)
        }
        total = sum(weight.values())
        torch.testing.assert_close(found.log_evidence[row], tensor(np.log(total)), **EXACT)
        torch.testing.assert_close(path.log_predictive[row].sum(), tensor(np.log(total)), **EXACT)
        smoothed = np.zeros((4, 3))
        for states, mass in weight.items():
            for t, s in enumerate(states):
                smoothed[t, s] += mass / total
        torch.testing.assert_close(path.smoothed[row].exp(), tensor(smoothed), **EXACT)
        torch.testing.assert_close(path.filtered[row, -1].exp(), tensor(smoothed[-1]), **EXACT)
        torch.testing.assert_close(found.mean[row], tensor(smoothed[-1] @ move), **EXACT)


def test_a_chain_without_memory_is_a_mixture_at_each_token():
    table = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).log_softmax(-1)
    prior = tensor([0.1, 0.5, -0.4])
    chain = HiddenMarkov.create(prior, prior.expand(3, 3), table)
    tokens = torch.tensor([0, 3, 1, 1])
    alone = sum(DiscreteLatent.create(prior, table).posterior(token.reshape(1)).log_evidence for token in tokens)
    torch.testing.assert_close(chain.posterior(tokens).log_evidence, alone, **EXACT)


def test_long_chains_in_single_precision():
    """Log-space: a product of 300 probabilities is below the smallest number of float32, e^−103."""
    table = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log()
    tokens = torch.randint(2, (300,), generator=torch.Generator().manual_seed(0))
    single = HiddenMarkov.create(torch.zeros(2), table, table).path(tokens)
    double = HiddenMarkov.create(torch.zeros(2).double(), table.double(), table.double()).path(tokens)
    torch.testing.assert_close(single.smoothed.double(), double.smoothed, rtol=0, atol=2e-6)
    torch.testing.assert_close(single.log_predictive.double(), double.log_predictive, rtol=0, atol=2e-6)
    assert double.log_predictive.sum() < -150


def test_a_chain_that_stays_is_a_concept():
    case = CASES["concepts"]
    stay = torch.eye(3, dtype=torch.float64).log()
    chain = HiddenMarkov.create(case.parameters[0], stay, case.parameters[1]).posterior(case.tokens)
    concepts = case.prior.posterior(case.tokens)
    torch.testing.assert_close(chain.log_evidence, concepts.log_evidence, **EXACT)
    torch.testing.assert_close(chain.mean, concepts.mean, **EXACT)
