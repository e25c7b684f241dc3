"""Stacked Boltzmann machines beside sums over all states, written out with sigmoids and exponentials."""

import itertools

import pytest
import torch
from tests.support.rows import every_row
from torch import Tensor

from massieu.measures import Bernoulli, Gaussian, Spin
from massieu.nn import RestrictedBoltzmannMachine, StackedBoltzmannMachine


def bits(*sizes: int) -> list[Bernoulli]:
    return [Bernoulli.create(torch.full((size,), 0.5, dtype=torch.float64)) for size in sizes]


def stack(*sizes: int, seed: int = 0) -> StackedBoltzmannMachine:
    """Bits, of random parameters that matter."""
    generator = torch.Generator().manual_seed(seed)
    made = StackedBoltzmannMachine(bits(*sizes), generator=generator)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    return made


def states(size: int) -> Tensor:
    return torch.tensor(list(itertools.product([0.0, 1.0], repeat=size)), dtype=torch.float64)


def conditional(logits: Tensor, units: Tensor) -> Tensor:
    """Π p of bits with those logits (A, n), at each of the units (B, n): (A, B)."""
    chance = 1 / (1 + torch.exp(-logits)).unsqueeze(1)
    return torch.where(units > 0.5, chance, 1 - chance).prod(-1)


def laws(made: StackedBoltzmannMachine) -> tuple[list[Tensor], Tensor]:
    """Tables p(h_k | h_{k+1}) of all but the top machine, and p of the top machine's lower layer."""
    *below, top = made.machines
    tables = []
    for machine in below:
        logits = states(machine.weight.shape[1]) @ machine.weight.mT + machine.visible_bias
        tables.append(conditional(logits, states(machine.weight.shape[0])))
    low, high = states(top.weight.shape[0]), states(top.weight.shape[1])
    joint = torch.exp(low @ top.weight @ high.mT + (low @ top.visible_bias).unsqueeze(1) + high @ top.hidden_bias)
    return tables, joint.sum(1) / joint.sum()


def law_of_visible(made: StackedBoltzmannMachine) -> Tensor:
    tables, law = laws(made)
    for table in reversed(tables):
        law = law @ table
    return law.detach()


@every_row("sizes", [(4, 3, 2), (3, 4, 2, 3)])
def test_the_likelihood_is_the_sum_over_all_states(sizes):
    made, visible = stack(*sizes), states(sizes[0])
    wanted = law_of_visible(made)
    torch.testing.assert_close(made.score_samples(visible).exp(), wanted, rtol=1e-12, atol=1e-15)
    assert abs(wanted.sum() - 1) < 1e-12
    torch.testing.assert_close(made.score_samples(visible.view(2, -1, sizes[0])).flatten().exp(), wanted)
    assert made.score_samples(visible[:0]).shape == (0,)
    assert made.score_samples(0.5 * visible[-1]) == -torch.inf  # no state of the visible units


@every_row("sizes", [(4, 3, 2), (3, 4, 2, 3)])
def test_the_bound_is_the_one_written_out_and_weighing_closes_it(sizes):
    made, visible = stack(*sizes), states(sizes[0])
    tables, law = laws(made)
    up = [
        conditional(states(len(one.weight)) @ one.weight + one.hidden_bias, states(len(one.hidden_bias)))
        for one in made.machines[:-1]
    ]
    # E_q of Σ log p(h_k | h_{k+1}) − log q(h_{k+1} | h_k) plus log p of the top, from the top downwards.
    value = law.log()
    for q, p in zip(reversed(up), reversed(tables), strict=True):
        value = (q * (value + p.mT.log() - q.log())).sum(-1)
    found = made.bound(visible, 2000, generator=torch.Generator().manual_seed(1))
    exact = made.score_samples(visible)
    assert ((found.bound - value).abs() < 5 * found.standard_error).all()
    assert (value < exact).all() and (found.bound <= found.log_likelihood).all()
    assert ((found.log_likelihood - exact).abs() < 0.15).all() and (exact - value).max() > 0.15
    assert made.bound(visible[0], 1).standard_error.isnan()


def test_upside_down_the_second_machine_leaves_the_likelihood_as_it_is():
    """p(v|h) p(h)/q(h|v) is then p(v) for every h: no draw differs from the log-likelihood of the machine below."""
    made, visible = stack(4, 3, 4), states(4)
    first, second = made.machines
    with torch.no_grad():
        second.weight.copy_(first.weight.mT)
        second.visible_bias.copy_(first.hidden_bias)
        second.hidden_bias.copy_(first.visible_bias)
    found = made.bound(visible, 7, generator=torch.Generator())
    torch.testing.assert_close(found.bound, first.score_samples(visible), rtol=1e-12, atol=1e-12)
    assert found.standard_error.max() < 1e-12
    torch.testing.assert_close(made.score_samples(visible), first.score_samples(visible), rtol=1e-12, atol=1e-12)


def test_draws_have_the_law():
    made = stack(3, 2, 2)
    count = 4000
    drawn = made.sample(count, sweeps=100, generator=torch.Generator().manual_seed(2))
    frequency = (drawn.unsqueeze(1) == states(3)).all(-1).double().mean(0)
    wanted = law_of_visible(made)
    assert ((frequency - wanted).abs() < 5 * (wanted * (1 - wanted) / count).sqrt()).all()


def test_features_are_means_upwards():
    made, visible = stack(4, 3, 2), states(4)
    wanted = visible
    for machine in made.machines:
        wanted = torch.sigmoid(wanted @ machine.weight + machine.hidden_bias)
    torch.testing.assert_close(made.transform(visible), wanted.detach())
    assert made(visible).requires_grad and not made.transform(visible).requires_grad


@pytest.mark.slow
def test_a_second_machine_raises_the_likelihood():
    """From the second machine upside down, small steps: as its fit to the hidden units gets better, so does the whole."""
    generator = torch.Generator().manual_seed(0)
    kinds = torch.tensor([[1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1]]).double()
    data = kinds[torch.randint(3, (300,), generator=generator)]
    made = StackedBoltzmannMachine(bits(6, 2, 6), generator=generator)
    options = {"epochs": 100, "learning_rate": 0.3, "tied_start": True, "generator": generator, "progress": False}
    assert made.fit(data, **options) is made
    alone, together = made.machines[0].score_samples(data).mean(), made.score_samples(data).mean()
    assert together > alone + 0.005, (alone, together)
    estimate = made.machines[-1].machine().estimate_log_partition(200, schedule=200, generator=generator)
    error = 5 * estimate.standard_error
    given = made.score_samples(data[0], estimate.log_partition)
    assert abs(given - made.score_samples(data[0])) < error
    bound = made.bound(data[:50], 200, log_partition=estimate.log_partition, generator=generator)
    assert (bound.bound < made.score_samples(data[:50]) + 5 * bound.standard_error + error).all()


@pytest.mark.medium
def test_all_states_of_every_layer_are_gone_through():
    made = stack(8, 8, 8)
    total = made.score_samples(states(8)).logsumexp(0)
    assert abs(total) < 1e-10


def test_an_interruption_leaves_the_machines_above(monkeypatch):
    made = StackedBoltzmannMachine(bits(4, 3, 2))
    before = made.machines[1].weight.clone()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("massieu.nn.boltzmann._Training.update", interrupted)
    with pytest.warns(UserWarning, match="interrupted in epoch 1"):
        made.fit(states(4), progress=False)
    assert torch.equal(made.machines[1].weight, before) and made.machines[1].chains is None


def test_units_of_other_kinds():
    layers = [Gaussian.create(torch.zeros(3).double(), 1.0), Spin.create(torch.zeros(2).double()), *bits(3)]
    made, data = StackedBoltzmannMachine(layers), torch.randn(5, 3, dtype=torch.float64)
    with torch.no_grad():
        made.machines[0].weight.copy_(torch.tensor([[0.5, -1.0], [0.2, 0.3], [-0.4, 0.1]]))
    signs = torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]]).double()
    weights = made.machines[1].score_samples(signs)
    centres = signs @ made.machines[0].weight.mT
    normal = torch.distributions.MultivariateNormal(centres.detach(), torch.eye(3).double())
    wanted = (normal.log_prob(data.unsqueeze(1)) + weights).logsumexp(-1)
    torch.testing.assert_close(made.score_samples(data), wanted)


@every_row(
    "make, words, kind",
    [
        (lambda: StackedBoltzmannMachine(bits(4, 3)), "layers must be three or more, got 2", ValueError),
        (lambda: StackedBoltzmannMachine(3), "layers must be a sequence of measures", TypeError),
        (lambda: StackedBoltzmannMachine([1, 2, 3]), "must be a measure", TypeError),
        (lambda: stack(4, 3, 2).fit(states(4), tied_start=True), "0 and 2 are not", ValueError),
        (lambda: stack(4, 3, 4).fit(states(4), tied_start=1), "tied_start", TypeError),
        (lambda: stack(4, 3, 2).fit(states(4), epochs=0), "epochs", ValueError),
        (lambda: stack(4, 3, 2).fit(states(3)), r"\(\*items, 4\)", ValueError),
        (lambda: stack(4, 3, 2).bound(states(4), 0), "draws", ValueError),
        (lambda: stack(4, 3, 2).score_samples([1.0]), "data must be a tensor", TypeError),
        (
            lambda: stack(4, 21, 2).score_samples(states(4)),
            r"at most 2\^20 states, got 2097152; take `bound`",
            ValueError,
        ),
        (lambda: stack(2, 15, 14, 2).score_samples(states(2)), r"2\^28 pairs", ValueError),
    ],
)
def test_bad_calls(make, words, kind):
    with pytest.raises(kind, match=words):
        make()


def test_of_two_layers_there_is_the_machine_itself():
    """The stack's lowest machine is one like any other."""
    assert all(isinstance(machine, RestrictedBoltzmannMachine) for machine in stack(4, 3, 2).machines)
