"""Laws that every posterior keeps: sequential, exchangeable, masked, batched, differentiable, compiled."""

import itertools

import numpy as np
import pytest
import torch
from tests.posteriors.cases import cases
from tests.support.rows import every_row
from torch.utils import _pytree as pytree

from massieu.measures import Poisson
from massieu.posteriors import (
    BayesianLinearRegression,
    DirichletMultinomial,
    DiscreteLatent,
    ExponentialFamily,
    GaussianMean,
    HiddenMarkov,
)

CASES = cases()
EXACT = {"rtol": 1e-10, "atol": 1e-10}
ATTENDING = [name for name, case in CASES.items() if hasattr(case.prior, "as_attention")]


def same(left, right, **tolerance):
    for one, other in zip(pytree.tree_leaves(left), pytree.tree_leaves(right), strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, **(tolerance or EXACT))


def test_order_counts_for_a_chain():
    case = CASES["hidden Markov"]
    moved, plain = (
        case.prior.posterior(case.tokens[:, torch.tensor([3, 1, 5, 0, 2, 4])]),
        case.prior.posterior(case.tokens),
    )
    assert (moved.log_evidence - plain.log_evidence).abs().max() > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_a_masked_token_is_not_there_whatever_it_holds(name):
    case = CASES[name]
    seen = torch.tensor([[True, True, False, True, False, False], [False, True, True, True, True, True]])
    junk = torch.nan if case.tokens.is_floating_point() else -7
    visible = seen if case.tokens.ndim == 2 else seen.unsqueeze(-1)
    found = case.prior.posterior(torch.where(visible, case.tokens, junk), seen)
    for row in range(2):
        one = pytree.tree_map(lambda leaf, row=row: leaf[row] if isinstance(leaf, torch.Tensor) else leaf, case.prior)
        here = pytree.tree_map(lambda leaf, row=row: leaf[row] if isinstance(leaf, torch.Tensor) else leaf, found)
        if case.exchangeable:
            same(here, one.posterior(case.tokens[row][seen[row]]))
        elif row == 0:  # an unobserved token of a chain: the evidence is that of what is seen, summed over it
            shown = case.tokens[row].clone()
            tables = [
                [value] if keep else range(4) for value, keep in zip(shown.tolist(), seen[row].tolist(), strict=True)
            ]
            whole = [one.posterior(torch.tensor(path)).log_evidence for path in itertools.product(*tables)]
            torch.testing.assert_close(here.log_evidence, torch.stack(whole).logsumexp(0), **EXACT)


@pytest.mark.parametrize("name", CASES)
def test_one_prior_serves_many_sequences_and_queries(name):
    case = CASES[name]
    stack = torch.stack([case.tokens, case.tokens.flip(1)], 1)  # (2, 2, n, …)
    found = case.prior.posterior(stack)
    assert found.batch_shape == (2, 2)
    for column, tokens in enumerate((case.tokens, case.tokens.flip(1))):
        one = pytree.tree_map(lambda leaf, c=column: leaf[:, c] if isinstance(leaf, torch.Tensor) else leaf, found)
        same(one, case.prior.posterior(tokens))
    law = case.prior.posterior(case.tokens)
    values = law.log_predictive(case.tokens)  # the tokens' dimension is one of queries
    assert values.shape == (2, 6)
    torch.testing.assert_close(values[:, 3], law.log_predictive(case.tokens[:, 3]), **EXACT)


@every_row("name", ATTENDING)
def test_the_posterior_mean_is_attention(name):
    case = CASES[name]
    mask = torch.tensor([[True, True, False, True, True, True], [True] * 5 + [False]])
    found, law = case.prior.as_attention(case.tokens, mask).attend(), case.prior.posterior(case.tokens, mask)
    torch.testing.assert_close(found.output, law.mean, rtol=0, atol=1e-12)
    if isinstance(law, DiscreteLatent):
        level = law.log_evidence
    elif isinstance(law, DirichletMultinomial):
        level = law.concentration.sum(-1).log()
    else:
        level = law.strength.log()
    torch.testing.assert_close(found.log_partition, level, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_families_in_lower_precision(dtype):
    tokens = torch.tensor([[3.0], [0.0], [2.0]], dtype=dtype)
    chi, strength, rate = torch.tensor([2.0]), torch.tensor(1.5), torch.tensor([1.0])
    found = ExponentialFamily.create(Poisson.create(rate), chi, strength).posterior(tokens)
    exact = ExponentialFamily.create(Poisson.create(rate.double()), chi.double(), strength.double()).posterior(
        tokens.double()
    )
    assert found.log_evidence.dtype == found.mean.dtype == torch.float32
    torch.testing.assert_close(found.log_evidence.double(), exact.log_evidence, rtol=1e-5, atol=1e-5)


@every_row("name", ["regression", "regression of unknown noise"])
def test_pairs_are_features_and_targets_side_by_side(name):
    prior, tokens = CASES[name].prior, CASES[name].tokens.clone()
    tokens[0, 3] = torch.nan
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 3] = False
    pair = tokens[..., :3], tokens[..., 3:]
    same(prior.posterior(pair, mask), prior.posterior(tokens, mask), rtol=0, atol=0)
    law, token = prior.posterior(pair, mask), (pair[0][:, 0], pair[1][:, 0])
    same(law.log_predictive(token), law.log_predictive(tokens[:, 0]), rtol=0, atol=0)
    mixed = prior.posterior((pair[0].float(), pair[1]), mask)
    assert mixed.mean.dtype == torch.float64
    same(mixed.mean, law.mean, rtol=1e-4, atol=1e-4)
    for wrong, named in (
        ((tokens[..., :2], tokens[..., 2:]), r"features must have shape \(2, 6, 3\), got \(2, 6, 2\)"),
        ((pair[0], pair[1][:, :5]), r"targets must have shape \(2, 6, 2\), got \(2, 5, 2\)"),
        ((pair[0], pair[1], pair[1]), "a pair .* got a tuple of 3"),
    ):
        with pytest.raises(ValueError, match=named):
            prior.posterior(wrong)
    with pytest.raises(TypeError, match="targets must be a floating-point tensor, got None"):
        prior.posterior((pair[0], None))


def test_numbers_lists_and_arrays_make_priors():
    tokens = torch.tensor([[1.0, 2.0], [0.5, -1.0]])
    made = GaussianMean.create([0.0, 1.0], 4, 0.5), GaussianMean.create(np.float32([0, 1]), np.float64(4.0), 0.5)
    tensors = GaussianMean.create(torch.tensor([0.0, 1.0]), torch.tensor(4.0), torch.tensor(0.5))
    for law in made:
        same(law.posterior(tokens).mean, tensors.posterior(tokens).mean, check_dtype=False)
    batch = GaussianMean.create(torch.zeros(3, 2), 4.0, 0.5)
    assert batch.strength.shape == batch.variance.shape == (3,)
    same(DirichletMultinomial.create([1, 2]), DirichletMultinomial.create(torch.tensor([1.0, 2.0])))
    line = BayesianLinearRegression.create(np.zeros((2, 1)), [[1.0, 0.0], [0.0, 1.0]], 1)
    assert line.mean.dtype == line.noise.dtype == torch.float64
    chain = HiddenMarkov.create([0.0, 0.0], [[0.0, -1.0], [-1.0, 0.0]], [[0.0, -2.0], [-2.0, 0.0]])
    assert chain.posterior(torch.tensor([0, 1])).log_evidence.isfinite()
    with pytest.raises(TypeError, match=r"mean must be real, got a tensor of torch\.complex64"):
        GaussianMean.create(torch.zeros(2, dtype=torch.complex64), 1.0, 1.0)


def test_what_does_not_fit_is_refused():
    zeros, ones = torch.zeros(2, 3), torch.ones(2)
    law = GaussianMean.create(zeros, ones, ones)
    with pytest.raises(ValueError, match=r"strength must have shape \(2,\), got \(3,\)"):
        GaussianMean.create(zeros, torch.ones(3), ones)
    with pytest.raises(ValueError, match="variance must be positive"):
        GaussianMean.create(zeros, ones, -ones)
    with pytest.raises(ValueError, match="mean must be finite"):
        GaussianMean.create(zeros * torch.nan, ones, ones)
    with pytest.raises(ValueError, match=r"needs tokens of shape \(2,\) \+ queries \+ \(n, 3\).*, got \(2, 5, 4\)"):
        law.posterior(torch.zeros(2, 5, 4))
    with pytest.raises(ValueError, match=r"needs tokens of shape \(2,\) \+ queries \+ \(n, 3\).*, got \(3, 5, 3\)"):
        law.posterior(torch.zeros(3, 5, 3))
    with pytest.raises(ValueError, match=r"mask must have shape \(2, 5\).*got \(5,\)"):
        law.posterior(torch.zeros(2, 5, 3), torch.ones(5, dtype=torch.bool))
    with pytest.raises(TypeError, match="mask must be a boolean tensor"):
        law.posterior(torch.zeros(2, 5, 3), torch.ones(2, 5))
    with pytest.raises(ValueError, match="precision must be positive"):
        law.posterior(torch.zeros(2, 5, 3), precision=torch.zeros(2, 5))
    with pytest.raises(TypeError, match=r"tokens must be a floating-point tensor, got a tensor of torch.int64"):
        law.posterior(torch.zeros(2, 5, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="tokens must lie between 0 and 3, got 4"):
        DirichletMultinomial.create(torch.ones(4)).posterior(torch.tensor([1, 4]))
    with pytest.raises(TypeError, match="whole numbers"):
        DirichletMultinomial.create(torch.ones(4)).posterior(torch.tensor([1.0]))
    with pytest.raises(ValueError, match=r"tokens must lie in the support of Bernoulli, got \(0.5, 1\)"):
        CASES["Bernoulli"].prior.posterior(torch.tensor([[[0.5, 1.0]], [[0.0, 1.0]]]))
    with pytest.raises(ValueError, match="every concept rules out"):
        DiscreteLatent.create(torch.zeros(2), torch.tensor([[0.0, -torch.inf]]).expand(2, 2)).posterior(
            torch.tensor([1])
        )
    with pytest.raises(ValueError, match=r"log_likelihood must have shape \(2, 'V'\) or"):
        DiscreteLatent.create(torch.zeros(2), torch.zeros(3, 4))
    with pytest.raises(ValueError, match="sequence of probability zero"):
        HiddenMarkov.create(torch.zeros(1), torch.zeros(1, 1), torch.tensor([[0.0, -torch.inf]])).posterior(
            torch.tensor([1])
        )
    with pytest.raises(ValueError, match="precision must be positive definite"):
        BayesianLinearRegression.create(torch.zeros(2, 1), -torch.eye(2), torch.tensor(1.0))
    with pytest.raises(ValueError, match="precision must be symmetric"):
        BayesianLinearRegression.create(torch.zeros(2, 1), torch.tensor([[1.0, 0.5], [0.0, 1.0]]), torch.tensor(1.0))
