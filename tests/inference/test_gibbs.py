"""Block Gibbs sampling and contrastive divergence on a machine of bits that can be enumerated."""

import itertools
import math

import pytest
import torch
from tests.support.rows import every_row

from massieu.inference import contrastive_divergence, gibbs_init, gibbs_step

WEIGHT = torch.tensor([[1.0, -0.5], [0.3, 0.8], [-1.2, 0.4]]).double()
FIELD = torch.tensor([0.2, -0.4, 0.1]).double()


def bits(count):
    return torch.tensor(list(itertools.product((0.0, 1.0), repeat=count)), dtype=torch.float64)


def draw(logits, generator):
    return (torch.rand(logits.shape, generator=generator, dtype=logits.dtype) < torch.sigmoid(logits)).double()


def sample_hidden(visible, generator):
    return draw(visible @ WEIGHT, generator)


def sample_visible(hidden, generator):
    return draw(hidden @ WEIGHT.mT + FIELD, generator)


def energy(visible, weight=WEIGHT, field=FIELD):
    """Of the visible units, hidden ones summed out."""
    return -(visible @ field) - torch.nn.functional.softplus(visible @ weight).sum(-1)


def joint():
    """log p(v, h), all 8 × 4 states."""
    visible, hidden = bits(3), bits(2)
    return (visible @ WEIGHT @ hidden.mT + (visible @ FIELD)[:, None]).flatten().log_softmax(0).reshape(8, 4)


def test_the_chains_have_the_joint_law():
    generator = torch.Generator().manual_seed(0)
    chains = 20_000
    state = gibbs_init(torch.zeros(chains, 3, dtype=torch.float64), sample_hidden, generator)
    state = gibbs_step(state, sample_visible, sample_hidden, generator, steps=30)
    index = (
        state.visible @ torch.tensor([4.0, 2.0, 1.0]).double() * 4 + state.hidden @ torch.tensor([2.0, 1.0]).double()
    )
    found = torch.bincount(index.long(), minlength=32) / chains
    wanted = joint().exp().flatten()
    assert ((found - wanted).abs() < 5 * (wanted * (1 - wanted) / chains).sqrt()).all()


def test_steps_are_sweeps():
    state = gibbs_init(torch.zeros(5, 3, dtype=torch.float64), sample_hidden, torch.Generator().manual_seed(1))
    once, again = torch.Generator().manual_seed(2), torch.Generator().manual_seed(2)
    found = gibbs_step(state, sample_visible, sample_hidden, once, steps=3)
    for _ in range(3):
        state = gibbs_step(state, sample_visible, sample_hidden, again)
    assert torch.equal(found.visible, state.visible)
    assert torch.equal(found.hidden, state.hidden)


def test_gradient_of_contrastive_divergence_is_the_likelihoods():
    """Samples in the exact proportions of the model: the gradient of the mean negative log-likelihood of the data."""
    weight = WEIGHT.clone().requires_grad_()
    data = bits(3)[[0, 3, 3, 6]]
    log_z = torch.logsumexp(-energy(bits(3), weight), 0)
    (wanted,) = torch.autograd.grad((energy(data, weight) + log_z).mean(), weight)
    assert wanted.abs().max() > 0.1
    # 20,000 exact draws stand for the model.
    chosen = torch.multinomial((-energy(bits(3))).softmax(0), 20_000, True, generator=torch.Generator().manual_seed(0))
    loss = contrastive_divergence(lambda v: energy(v, weight), data, bits(3)[chosen])
    (found,) = torch.autograd.grad(loss, weight)
    assert (found - wanted).abs().max() < 5 * 0.5 / math.sqrt(20_000)


@every_row("steps", [0, -1, 1.5, True])
def test_bad_steps(steps):
    state = gibbs_init(torch.zeros(5, 3, dtype=torch.float64), sample_hidden)
    with pytest.raises((TypeError, ValueError), match="steps must be a whole number"):
        gibbs_step(state, sample_visible, sample_hidden, steps=steps)


@every_row(("data", "sample"), [((4, 3), (5, 2)), ((0, 3), (5, 3)), ((4, 3), (0, 3))])
def test_bad_samples(data, sample):
    with pytest.raises(ValueError, match=r"visible units of one number, .* got shapes"):
        contrastive_divergence(energy, torch.zeros(data), torch.zeros(sample))
