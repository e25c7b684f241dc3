"""Edges: masks beside other scales, long counts in float32, and what has no answer."""

import math

import pytest
import scipy.stats
import torch
from tests.rows import every_row

from massieu.measures import Bernoulli
from massieu.posteriors import (
    BayesianLinearRegression,
    DirichletMultinomial,
    DiscreteLatent,
    ExponentialFamily,
    GaussianMean,
    HiddenMarkov,
    NoisyLinearRegression,
    sufficiency,
)
from massieu.regression import (
    ConjugateGradient,
    ExponentialKernel,
    FeatureKernel,
    GaussianKernel,
    LinearKernel,
    LowRank,
    choose_ridge,
    conditional_mean_attention,
    leave_one_out,
)
from massieu.theory import deconvolution, smoothing_floor, sphere_multipliers, urn_total_variation

NAN, INF = math.nan, math.inf


def draws(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- posteriors ------------------------------------------------------------------------------------------------------


def test_counts_beside_a_strong_prior_in_float32():
    """1e8 + 1 is 1e8 in float32: tokens are counted first; the evidence is no difference of float32 numbers of 1e9."""
    prior = DirichletMultinomial.create(torch.tensor([1e8, 1e8]))
    law = prior.posterior(torch.zeros(1000, dtype=torch.long))
    assert (law.concentration - prior.concentration).tolist() == [1000.0, 0.0]
    exact = scipy.stats.dirichlet_multinomial([1e8, 1e8], 1000).logpmf([1000, 0])
    # scipy's own lgamma differences have 1e9·1e-16·a few.
    assert law.log_evidence.item() == pytest.approx(exact, abs=1e-3)


@pytest.mark.parametrize("strength", [10.0, 1e6])
def test_evidence_is_the_sum_of_predictives_in_float32(strength):
    categories = DirichletMultinomial.create(torch.tensor([0.3, 0.7]) * strength)
    one = categories.posterior(torch.tensor([1])).log_evidence
    assert one.item() == pytest.approx(math.log(0.7), rel=1e-6)
    coin = ExponentialFamily.create(
        Bernoulli.create(torch.tensor([0.5])), torch.tensor([0.7 * strength]), torch.tensor(strength)
    )
    seen = torch.ones(1, 1)
    assert coin.posterior(seen).log_evidence.item() == pytest.approx(math.log(0.7), rel=1e-5)
    assert coin.log_predictive(seen[0]).item() == pytest.approx(math.log(0.7), rel=1e-5)
    assert coin.posterior(seen).log_evidence.dtype == coin.posterior(seen).chi.dtype == torch.float32


@every_row("seed", range(4))
def test_prediction_with_unknown_noise_is_students(seed):
    """By SciPy's multivariate t: mean and covariance."""
    root = draws(3, 3, seed=seed)
    prior = NoisyLinearRegression.create(
        draws(3, 2, seed=seed + 9), root @ root.T + torch.eye(3), torch.tensor(1.7).double(), torch.tensor(0.8).double()
    )
    law, features = prior.posterior(draws(5, 5, seed=seed + 20)), draws(4, 3, seed=seed + 30)
    found = law.predict(features)
    for row, mean, variance in zip(features, found.mean, found.variance, strict=True):
        leverage = (row @ torch.linalg.inv(law.precision) @ row).item()
        student = scipy.stats.t(2 * law.shape.item(), scale=math.sqrt(law.rate / law.shape * (1 + leverage)))
        assert variance.item() == pytest.approx(student.var(), rel=1e-9)
        torch.testing.assert_close(mean, row @ law.mean)
    heavy = NoisyLinearRegression.create(prior.mean, prior.precision, prior.shape * 0 + 1, prior.rate)
    assert bool(heavy.predict(features).variance.isinf().all())


SURE = torch.tensor([[0.0, -INF], [0.0, -INF]])
"""Two concepts that never emit token 1."""


def test_tokens_that_no_concept_emits():
    law = DiscreteLatent.create(torch.zeros(2), SURE)
    for read in (law.posterior, law.as_attention):
        with pytest.raises(ValueError, match="every concept rules out"):
            read(torch.tensor([0, 1]))
    assert law.log_predictive(torch.tensor(1)).item() == -INF
    assert law.as_attention(torch.tensor([0])).attend().output.tolist() == [0.5, 0.5]


def test_values_of_concepts_keep_their_precision():
    values = draws(2, 3)
    found = (
        DiscreteLatent.create(torch.zeros(2), torch.zeros(2, 2)).as_attention(torch.tensor([0]), values=values).attend()
    )
    assert found.output.dtype == torch.float64
    torch.testing.assert_close(found.output, values.mean(0), rtol=0, atol=1e-15)


def _nothing(tokens: torch.Tensor) -> torch.Tensor:
    return torch.stack([tokens * NAN, tokens], -1)


MEAN = GaussianMean.create(torch.zeros(2), torch.tensor(1.0), torch.tensor(1.0))
LINE = BayesianLinearRegression.create(torch.zeros(2, 1), torch.eye(2), torch.tensor(1.0))
COIN = ExponentialFamily.create(Bernoulli.create(torch.tensor([0.5])), torch.tensor([0.5]), torch.tensor(1.0))


@every_row(
    ("call", "error", "named"),
    [
        (lambda: MEAN.posterior(torch.tensor([[NAN, 0.0]])), ValueError, "tokens must be finite, got nan"),
        (lambda: MEAN.as_attention(torch.tensor([[INF, 0.0]])), ValueError, "tokens must be finite, got inf"),
        (lambda: MEAN.log_predictive(torch.tensor([NAN, 0.0])), ValueError, "token must be finite, got nan"),
        (
            lambda: MEAN.posterior(torch.zeros(1, 2), torch.ones(1, dtype=torch.bool), precision=2.0),
            TypeError,
            "precision must be a floating-point tensor, got float",
        ),
        (lambda: LINE.posterior(torch.full((2, 3), NAN)), ValueError, "tokens must be finite, got nan"),
        (
            # Two equal features of 1e4 beside a prior precision of 1e-6: rounding in float32.
            lambda: BayesianLinearRegression.create(
                torch.zeros(2, 1), 1e-6 * torch.eye(2), torch.tensor(1.0)
            ).posterior(1e4 * torch.linspace(1.1, 1.9, 7).unsqueeze(-1).expand(7, 3)),
            ValueError,
            "the precision is singular to rounding in torch.float32",
        ),
        (lambda: LINE.predict(torch.full((2,), NAN)), ValueError, "features must be finite, got nan"),
        (lambda: LINE.log_predictive(torch.tensor([0.0, 0.0, NAN])), ValueError, "token must be finite, got nan"),
        (lambda: COIN.as_attention(torch.tensor([[7.0]])), ValueError, r"support of Bernoulli, got \(7\)"),
        (lambda: DiscreteLatent.create(torch.zeros(2), _nothing).posterior(torch.zeros(3)), ValueError, "NaN or .inf"),
        (
            lambda: DiscreteLatent.create(torch.zeros(2), _nothing).log_predictive(torch.zeros(3)),
            ValueError,
            "NaN or .inf",
        ),
        (
            lambda: DiscreteLatent.create(torch.zeros(2), _nothing).posterior([1.0]),
            TypeError,
            "tokens must be a tensor",
        ),
        (
            lambda: HiddenMarkov.create(torch.zeros(2), torch.zeros(2, 2), _nothing).path(torch.zeros(3)),
            ValueError,
            "log_likelihood must be finite or −inf, got NaN",
        ),
        (
            lambda: DiscreteLatent.create(torch.zeros(2), SURE).as_attention(torch.tensor([0]), values=[[1.0], [2.0]]),
            TypeError,
            "values must be a floating-point tensor, got list",
        ),
    ],
)
def test_posteriors_refuse(call, error, named):
    with pytest.raises(error, match=named):
        call()


# --- conditional mean attention --------------------------------------------------------------------------------------


@every_row("size", [1e-6, 1.0, 1e3])
def test_a_mask_is_no_singular_matrix_at_any_size_of_the_keys(size):
    """In float32 the hidden keys' own equations, were they of size 1, are rounding beside large keys, or large ones."""
    key, value = (size * draws(1, 2, 24, 40)).float(), draws(1, 2, 24, 2, seed=1).float()
    seen = torch.arange(24) < 20
    arguments = {"kernel": LinearKernel(), "ridge": 0.1 * size**2}
    found = conditional_mean_attention(key[:, :, :3], key, value, log_weight=seen, **arguments)
    alone = conditional_mean_attention(key[:, :, :3], key[:, :, :20], value[:, :, :20], **arguments)
    torch.testing.assert_close(found.output, alone.output, rtol=1e-4, atol=1e-4)


@every_row("kernel", [FeatureKernel(lambda x: x / x.norm(dim=-1, keepdim=True)), GaussianKernel.create(1.0)])
@every_row("method", ["cholesky", "low_rank"])
def test_hidden_keys_stand_where_the_kernel_is_defined(kernel, method):
    """At the origin a normalising map is not; and keys far from it lose their digits beside it."""
    far = 0.0 if isinstance(kernel, FeatureKernel) else 1e4
    key, query, value = draws(1, 1, 12, 4), draws(1, 1, 3, 4, seed=1), draws(1, 1, 12, 2, seed=2)
    hidden, seen = key.clone(), torch.arange(12) >= 4
    hidden[:, :, :4] = NAN
    hidden, query = (hidden + far).float().requires_grad_(), (query + far).float()
    rest = (key[:, :, 4:] + far).float()
    arguments = {"kernel": kernel, "ridge": 0.1, "need_variance": True, "method": method}
    found = conditional_mean_attention(query, hidden, value.float(), log_weight=seen, **arguments)
    alone = conditional_mean_attention(query, rest, value[:, :, 4:].float(), **arguments)
    torch.testing.assert_close(found.output, alone.output, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.variance, alone.variance, rtol=1e-3, atol=1e-4)
    (slope,) = torch.autograd.grad(found.output.sum(), hidden)
    assert bool(slope.isfinite().all()) and not bool(slope[:, :, :4].any())


def test_an_operator_ridge_sees_ratios_of_weights_alone():
    key, query, value = draws(1, 1, 8, 3).float(), draws(1, 1, 2, 3, seed=1).float(), draws(1, 1, 8, 1, seed=2).float()
    weight = draws(8, seed=3).float()
    arguments = {"kernel": GaussianKernel.create(1.0), "operator_ridge": 0.1}
    plain = conditional_mean_attention(query, key, value, log_weight=weight, **arguments).output
    for shift in (-300.0, 300.0):  # beyond the range of float32
        moved = conditional_mean_attention(query, key, value, log_weight=weight + shift, **arguments).output
        torch.testing.assert_close(moved, plain, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match=r"finite weights in torch.float32, got 30"):
        conditional_mean_attention(
            query, key, value, log_weight=weight * 0 + 300, kernel=GaussianKernel.create(1.0), ridge=1.0
        )


def test_no_query_under_a_causal_mask():
    key, value = draws(1, 1, 6, 2), draws(1, 1, 6, 3, seed=1)
    found = conditional_mean_attention(
        key[:, :, :0], key, value, kernel=LinearKernel(), ridge=1.0, is_causal=True, need_variance=True
    )
    assert found.output.shape == (1, 1, 0, 3) and found.variance.shape == (1, 1, 0)


@pytest.mark.parametrize("spelt_out", [False, True])
def test_predictive_variance_with_numbers_of_each_head(spelt_out):
    """Head by head, by single calls."""
    key, value = draws(2, 2, 5, 3), draws(2, 2, 5, 1, seed=1)
    query = draws(2, 4, 6, 3, seed=2)
    query = query.unflatten(1, (2, 2)) if spelt_out else query
    noise, prior = torch.tensor([0.3, 0.7]).double(), torch.tensor([1.5, 0.2]).double()
    found = conditional_mean_attention(
        query, key, value, kernel=GaussianKernel.create(1.0), ridge=noise / prior, need_variance=True
    )
    both = found.predictive_variance(noise_variance=noise, prior_variance=prior.expand(2, 2))
    assert both.shape == query.shape[:-1]
    for head in range(2):
        place = (slice(None), head) if spelt_out else (slice(None), slice(2 * head, 2 * head + 2))
        torch.testing.assert_close(both[place], noise[head] + prior[head] * found.variance[place], rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"noise_variance must be one number or one a key head, got shape \(3,\)"):
        found.predictive_variance(noise_variance=torch.ones(3), prior_variance=1.0)
    with pytest.raises(ValueError, match=r"noise_variance must be not negative and finite, got -1.0"):
        found.predictive_variance(noise_variance=-1.0, prior_variance=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_conjugate_gradients_for_distant_queries(dtype):
    """Squares of their kernels lose digits, and underflow: about 10 lengthscales away in float32, 27 in float64."""
    key, value = draws(1, 1, 18, 3).to(dtype), draws(1, 1, 18, 1, seed=1).to(dtype)
    middle = 10.0 if dtype == torch.float32 else 27.0
    query = key.mean(2, keepdim=True) + torch.linspace(middle - 2, middle + 2, 40, dtype=dtype).unsqueeze(-1) / 3**0.5
    arguments = {"kernel": GaussianKernel.create(1.0), "ridge": 0.1, "need_variance": True}
    found = conditional_mean_attention(query, key, value, method=ConjugateGradient(rank=5), **arguments)
    exact = conditional_mean_attention(query, key, value, method="cholesky", **arguments)
    torch.testing.assert_close(found.variance, exact.variance, rtol=1e-4, atol=1e-5)


def test_bounds_are_bounds():
    """Of both methods that approximate, on random keys of all sizes, against the exact output."""
    generator = torch.Generator().manual_seed(0)
    uniform = lambda low, high: low + (high - low) * torch.rand((), generator=generator).item()  # noqa: E731
    for turn in range(40):
        count = int(uniform(1, 20))
        key, query = (10 ** uniform(-1, 0.5) * draws(1, 1, n, 3, seed=turn + n) for n in (count, 4))
        value = draws(1, 1, count, 2, seed=turn + 99)
        kernel = (GaussianKernel.create(10 ** uniform(-0.5, 0.7)), ExponentialKernel.create(10 ** uniform(-2, -1)))[
            turn % 2
        ]
        arguments = {"kernel": kernel, "ridge": 10 ** uniform(-3, 1), "log_weight": draws(count, seed=turn)}
        exact = conditional_mean_attention(query, key, value, method="cholesky", **arguments).output
        for method in (LowRank(1 + turn % count), ConjugateGradient(rtol=10 ** uniform(-8, -1), rank=turn % 3)):
            found = conditional_mean_attention(query, key, value, method=method, **arguments)
            error = (found.output - exact).norm(dim=-1)
            assert bool((error <= found.error_bound + 1e-9 * (1 + exact.norm(dim=-1))).all())


def test_a_key_of_its_own_direction_is_refused_where_rounding_is_all():
    key = torch.zeros(1, 1, 5, 2, dtype=torch.float64)
    key[..., :4, 0], key[..., 4, 1] = draws(4), 1.0
    value = draws(1, 1, 5, 1, seed=1)
    # Nothing is known of it from the others: the residual is the value.
    found = leave_one_out(key, value, kernel=LinearKernel(), ridge=1e-6)
    torch.testing.assert_close(found.residual[..., 4, :], value[..., 4, :], rtol=1e-9, atol=0)
    with pytest.raises(ValueError, match="a key alone determines its own prediction"):
        leave_one_out(key, value, kernel=LinearKernel(), ridge=1e-20)
    for ridges, error in ((None, TypeError), (["a"], TypeError), ([1.0, -1.0], ValueError), ([], ValueError)):
        with pytest.raises(error, match="ridge"):
            choose_ridge(key, value, ridges, kernel=LinearKernel())


# --- smoothing, transfer, urns ---------------------------------------------------------------------------------------


def test_where_the_output_is_zero_no_factor_helps():
    """At β = 0 nothing of degree 1 is left; at β = 1e-200 its square is below floating point, and its factor is not."""
    power = torch.tensor([0.0, 4.0])
    floor = smoothing_floor(power, 3, 0.0)
    assert (floor.error.item(), floor.factor.item(), floor.factor_error.item()) == (2.0, 0.0, 2.0)
    tiny = smoothing_floor(power, 3, 1e-200)
    assert tiny.factor.item() == pytest.approx(3e200, rel=1e-12) and tiny.factor_error.item() < 1e-12
    with pytest.raises(ValueError, match="multipliers must be positive up to degree 1, got 0"):
        deconvolution(sphere_multipliers(2, 3, 0.0), 1)


def test_an_urn_beyond_floating_point():
    """1100 draws have 1e330 orders. By SciPy's laws of the counts."""
    counts = range(1101)
    without = scipy.stats.hypergeom(2200, 1100, 1100).pmf(counts)
    replaced = scipy.stats.binom(1100, 0.5).pmf(counts)
    assert urn_total_variation([1100, 1100], 1100) == pytest.approx(0.5 * abs(without - replaced).sum(), rel=1e-9)


def test_sequences_too_rare_for_floating_point_are_left_out():
    """A third token of probability e⁻⁹⁰⁰ changes nothing."""
    prior, table = torch.zeros(2), torch.tensor([[0.6, 0.4], [0.2, 0.8]], dtype=torch.float64).log()
    found = sufficiency(prior, torch.cat([table, torch.full((2, 1), -900.0)], 1), 2)
    assert tuple(found) == pytest.approx(tuple(sufficiency(prior, table, 2)), rel=1e-12)
    with pytest.raises(ValueError, match="500500 different counts of tokens, more than the 2048"):
        sufficiency(torch.zeros(2), torch.randn(2, 1000), 2)
