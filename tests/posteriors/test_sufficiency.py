"""Sufficiency and regret: against enumeration, and what must fail."""

import itertools
import math

import numpy as np
import pytest
import torch
from tests.support.rows import every_row

from massieu.posteriors import DiscreteLatent, averaging_regret, sufficiency


def tensor(value):
    return torch.as_tensor(np.asarray(value, dtype=np.float64))


@every_row(("call", "message"), [
    (lambda: sufficiency(torch.zeros(2), torch.zeros(3, 2), 2), r"log_likelihood must have shape \(2, V\)"),
    (lambda: sufficiency(torch.zeros(2), torch.zeros(2, 10), 9), "sequences"),
    (lambda: sufficiency(torch.zeros(2), torch.zeros(2, 3), 2), "nothing to merge"),
    (lambda: sufficiency(torch.zeros(2), torch.randn(2, 3), 2, label=torch.ones(3, 2)), "label must have shape"),
    (lambda: averaging_regret(torch.zeros(3), torch.zeros(4, 2), torch.zeros(2)), r"log_likelihoods must have shape \(3, K\)"),
    (lambda: averaging_regret(torch.zeros(3) * torch.nan, torch.zeros(3, 2), torch.zeros(2)), "NaN"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def entropy(p):
    p = np.asarray(p).ravel()
    p = p[p > 0]
    return -(p * np.log(p)).sum()


@every_row("seed", range(4))
def test_sufficiency_by_enumeration(seed):
    generator = np.random.default_rng(seed)
    prior, table = generator.dirichlet(np.ones(3)), generator.dirichlet(np.ones(4), 3)
    found = sufficiency(tensor(np.log(prior)), tensor(np.log(table)), 3)
    joint = np.array([prior * table[:, list(s)].prod(1) for s in itertools.product(range(4), repeat=3)])
    information = entropy(joint.sum(0)) + entropy(joint.sum(1)) - entropy(joint)
    assert found.information == pytest.approx(information, abs=1e-12)
    assert found.posterior_information == pytest.approx(information, abs=1e-12)
    assert (found.sequences, found.posteriors) == (64, 20)
    # The cheapest merger, by informations of the merged tables.
    laws, number = np.unique((joint / joint.sum(1, keepdims=True)).round(9), axis=0, return_inverse=True)
    merged = np.array([joint[number == kind].sum(0) for kind in range(len(laws))])
    losses = []
    for a, b in itertools.combinations(range(len(merged)), 2):
        both = np.vstack([np.delete(merged, [a, b], 0), merged[a] + merged[b]])
        losses.append(information - (entropy(both.sum(0)) + entropy(both.sum(1)) - entropy(both)))
    assert found.least_loss == pytest.approx(min(losses), abs=1e-12)
    assert found.least_loss > 0


def test_posteriors_that_coincide_are_one():
    # Tokens 2 and 3 say the same of the concept: they are one symbol to the posterior.
    table = tensor([[0.5, 0.3, 0.1, 0.1], [0.2, 0.2, 0.3, 0.3]]).log()
    assert sufficiency(torch.zeros(2), table, 3).posteriors == 10  # multisets of 3 from 3 symbols
    impossible = tensor([[0.5, 0.5, 0.0], [0.1, 0.9, 0.0]]).log()
    assert sufficiency(torch.zeros(2), impossible, 2).sequences == 4


def test_the_posterior_is_not_minimal_for_one_label():
    """Trap 23: two of three concepts have one label; sequences that differ in these two alone may be merged for free."""
    prior = tensor([0.0, 0.0, 0.0])
    # Given "not the third", tokens 0 and 1 tell the first two concepts apart, and nothing of the label.
    table = tensor([[0.6, 0.2, 0.2], [0.2, 0.6, 0.2], [0.1, 0.1, 0.8]]).log()
    label = tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    found = sufficiency(prior, table, 1, label=label)
    assert found.posteriors == 3
    assert found.least_loss > 0.05
    assert abs(found.least_label_loss) < 1e-15


@every_row("seed", range(5))
def test_averaging_loses_no_more_than_its_bound(seed):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(5, 6, dtype=torch.float64, generator=generator).log_softmax(-1)
    prior = torch.randn(5, dtype=torch.float64, generator=generator)
    tokens = torch.randint(6, (40, 30), generator=generator)
    each = table[:, tokens].movedim(0, -1)
    law, predictives = DiscreteLatent.create(prior, table), []
    for token in tokens.unbind(1):
        predictives.append(law.log_predictive(token))
        law = law.posterior(token.unsqueeze(1))
    found = averaging_regret(torch.stack(predictives, -1), each, prior)
    assert (found.loss <= found.bound + 1e-12).all()
    exact = -(prior.log_softmax(0) + each.cumsum(-2)).logsumexp(-1)
    torch.testing.assert_close(found.loss, exact, rtol=1e-12, atol=1e-12)
    by_hand = -torch.stack([each[:, :t].sum(1).amax(-1) for t in range(1, 31)], -1)
    torch.testing.assert_close(found.best, by_hand, rtol=1e-12, atol=0)
    uniform = averaging_regret(torch.stack(predictives, -1), each, torch.zeros(5, dtype=torch.float64))
    steps = torch.arange(1, 31, dtype=torch.float64)
    torch.testing.assert_close(
        uniform.bound - uniform.best, torch.full((40, 30), math.log(5), dtype=torch.float64), rtol=1e-12, atol=0
    )
    torch.testing.assert_close(uniform.average, (uniform.loss - uniform.best) / steps, rtol=1e-12, atol=0)


def test_one_token_that_tells_all_meets_the_bound():
    law = DiscreteLatent.create(torch.zeros(10).double(), torch.eye(10).double().log())
    found = averaging_regret(
        law.log_predictive(torch.tensor([4])), law.log_likelihood[:, 4].unsqueeze(0), law.log_weight
    )
    assert found.loss.item() == pytest.approx(2.302585, abs=1e-6)
    assert found.loss.item() == pytest.approx(found.bound.item(), abs=1e-14)


def test_sequences_too_rare_for_floating_point_are_left_out():
    """A third token of probability e⁻⁹⁰⁰ changes nothing."""
    prior, table = torch.zeros(2), torch.tensor([[0.6, 0.4], [0.2, 0.8]], dtype=torch.float64).log()
    found = sufficiency(prior, torch.cat([table, torch.full((2, 1), -900.0)], 1), 2)
    assert tuple(found) == pytest.approx(tuple(sufficiency(prior, table, 2)), rel=1e-12)
    with pytest.raises(ValueError, match="500500 different counts of tokens, more than the 2048"):
        sufficiency(torch.zeros(2), torch.randn(2, 1000), 2)


def test_lists_of_numbers_are_read_in_float64():
    given = [0.3, 0.7], [[0.1, 0.9], [0.6, 0.4]]
    tensors = (torch.tensor(each, dtype=torch.float64).log() for each in given)
    lists = ([math.log(0.3), math.log(0.7)], [[math.log(x) for x in row] for row in given[1]])
    assert sufficiency(*lists, 3).information == pytest.approx(sufficiency(*tensors, 3).information, rel=1e-14)
