"""Deep Boltzmann machines and implicit mixtures of machines beside sums over all states, written out with exponentials."""

import itertools

import pytest
import torch
from tests.support.rows import every_row
from torch import Tensor

from massieu.measures import Bernoulli, Categorical, Gaussian, Measure, Spin, switched
from massieu.nn import DeepBoltzmannMachine, RestrictedBoltzmannMachine

F64 = torch.float64


def bits(*sizes: int) -> list[Measure]:
    return [Bernoulli.create(torch.full((size,), 0.5, dtype=F64)) for size in sizes]


def drawn(layers: list[Measure], seed: int = 0, size: float = 1.0) -> DeepBoltzmannMachine:
    """Of random parameters that matter."""
    generator = torch.Generator().manual_seed(seed)
    deep = DeepBoltzmannMachine(layers, generator=generator)
    with torch.no_grad():
        for parameter in deep.parameters():
            parameter.copy_(size * torch.randn(parameter.shape, dtype=F64, generator=generator))
    return deep


def states(size: int, values: tuple[float, ...] = (0.0, 1.0)) -> Tensor:
    return torch.tensor(list(itertools.product(values, repeat=size)), dtype=F64)


def log_weights(deep: DeepBoltzmannMachine, values: list[Tensor]) -> Tensor:
    """vᵀW₀h₁ + … + Σ biases of every combination of the layers' states, one dimension a layer."""
    count = len(values)
    total = torch.zeros(*(len(each) for each in values), dtype=F64)
    for layer, (units, bias) in enumerate(zip(values, deep.biases, strict=True)):
        total = total + (units @ bias).reshape([-1 if place == layer else 1 for place in range(count)])
    for low, weight in enumerate(deep.weights):
        pairs = values[low] @ weight @ values[low + 1].mT
        shape = [len(values[place]) if place in (low, low + 1) else 1 for place in range(count)]
        total = total + pairs.reshape(shape)
    return total.detach()


def law_of_visible(deep: DeepBoltzmannMachine, values: list[Tensor]) -> Tensor:
    """log p of every visible state: the fair prior of units of one kind is the same for all states, and drops out."""
    joint = log_weights(deep, values).flatten(1).logsumexp(1)
    return joint - joint.logsumexp(0)


KINDS = {
    "three layers of bits": (bits(4, 3, 2), [states(4), states(3), states(2)]),
    "four layers": (bits(3, 2, 3, 2), [states(3), states(2), states(3), states(2)]),
    "five layers": (bits(3, 2, 2, 2, 2), [states(3), *[states(2)] * 4]),
    "spins and a class": (
        [Spin.create(dim=4).to(F64), *bits(3), Categorical.create(torch.full((3,), 1 / 3, dtype=F64))],
        [states(4, (-1.0, 1.0)), states(3), torch.eye(3, dtype=F64)],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_likelihood_is_the_sum_over_all_states(kind: str):
    layers, values = KINDS[kind]
    deep = drawn(layers)
    expected = law_of_visible(deep, values)
    torch.testing.assert_close(deep.score_samples(values[0]), expected)
    assert float(expected.exp().sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_one_and_rises_with_the_steps(kind: str):
    layers, values = KINDS[kind]
    deep = drawn(layers, seed=1)
    expected = law_of_visible(deep, values)
    bounds = torch.stack([deep.bound(values[0], steps=steps) for steps in (1, 2, 3, 10, 100)]).detach()
    rounding = 1e-12
    assert (bounds <= expected + rounding).all()
    assert (bounds[1:] >= bounds[:-1] - rounding).all()
    # The difference to log p is the divergence of the mean field from the posterior, summed out here.
    field = deep._mean_field(values[0], 100)
    laws = [_law(layer, part) for layer, part in zip(layers[1:], _fields(deep, field), strict=True)]
    joint = log_weights(deep, values)
    log_posterior = joint - joint.flatten(1).logsumexp(1).reshape(-1, *[1] * (len(values) - 1))
    log_q = torch.zeros_like(log_posterior)
    for place, (law, units) in enumerate(zip(laws, values[1:], strict=True), 1):
        log_prob = law(units)
        shape = [len(values[0])] + [log_prob.shape[1] if other == place else 1 for other in range(1, len(values))]
        log_q = log_q + log_prob.reshape(shape)
    divergence = (log_q.exp() * (log_q - log_posterior)).flatten(1).sum(1)
    torch.testing.assert_close(expected - bounds[-1], divergence.detach(), atol=1e-10, rtol=1e-10)


def _fields(deep: DeepBoltzmannMachine, field) -> list[Tensor]:
    """The field of each hidden layer with its bias, in order."""
    even = list(field.even_field.split([len(bias) for bias in deep.biases][::2], -1))
    odd = list(field.odd_field.split([len(bias) for bias in deep.biases][1::2], -1))
    by_layer = [(even if layer % 2 == 0 else odd)[layer // 2] for layer in range(len(deep.biases))]
    return [part + bias for part, bias in zip(by_layer[1:], list(deep.biases)[1:], strict=True)]


def _law(layer: Measure, field: Tensor):
    """log q of states under e^(field·h), normalised over them."""

    def log_prob(units: Tensor) -> Tensor:
        return (field @ units.mT).log_softmax(-1)

    return log_prob


def test_where_layers_above_do_not_matter_the_mean_field_is_exact():
    deep = drawn(bits(4, 3, 2))
    with torch.no_grad():
        deep.weights[1].zero_()
    visible = states(4)
    torch.testing.assert_close(deep.bound(visible, steps=1), deep.score_samples(visible))
    below = RestrictedBoltzmannMachine(*bits(4, 3))
    with torch.no_grad():
        below.weight.copy_(deep.weights[0])
        below.visible_bias.copy_(deep.biases[0])
        below.hidden_bias.copy_(deep.biases[1])
    torch.testing.assert_close(deep.score_samples(visible), below.score_samples(visible))


def test_annealing_agrees_and_samples_have_the_law():
    deep = drawn(bits(4, 3, 2), size=0.7)
    generator = torch.Generator().manual_seed(0)
    exact = deep.machine().log_partition().detach()
    estimate = deep.machine().estimate_log_partition(400, schedule=50, generator=generator)
    assert abs(float(estimate.log_partition - exact)) < 5 * float(estimate.standard_error)
    samples = deep.sample(4000, sweeps=50, generator=generator)
    share = (samples.unsqueeze(1) == states(4)).all(-1).double().mean(0)
    p = law_of_visible(deep, KINDS["three layers of bits"][1]).exp()
    # Independent chains: binomial errors, and the largest of 16 within five of them.
    assert ((share - p).abs() < 5 * (p * (1 - p) / 4000).sqrt()).all()


@pytest.mark.slow
def test_training_fits_the_law_of_the_data():
    """Two rows of equal halves: an independent law has 6·log 2 = 4.2 nats, the law of the data log 8 = 2.1."""
    generator = torch.Generator().manual_seed(0)
    half = states(3)
    data = torch.cat([half, half], -1).repeat(25, 1)
    deep = DeepBoltzmannMachine(bits(6, 5, 3), generator=generator)
    before = float(deep.score_samples(data[:8]).mean())
    deep.fit(data, epochs=200, batch_size=100, sweeps=1, steps=5, generator=generator, progress=False)
    after = float(deep.score_samples(data[:8]).mean())
    assert before < -4.0
    assert after > -2.7
    bound = float(deep.bound(data[:8]).detach().mean())
    assert after - 1.0 < bound <= after + 1e-9
    assert deep.chains is not None


def test_the_gradient_of_the_bound_is_a_difference_of_means():
    """Of products and units: in the mean field given the data, less those of the model, summed over all states."""
    deep = drawn(bits(4, 3, 2), size=0.5)
    data = states(4)[[3, 5, 9]]
    steps = 300
    fixed = deep._mean_field(data, steps)
    # At the end of the mean field the bound is stationary in it, so that its gradient is the one with means held.
    loss = deep.bound(data, steps=steps).mean()
    gradients = torch.autograd.grad(loss, list(deep.parameters()))
    values = KINDS["three layers of bits"][1]
    joint = log_weights(deep, values)
    p = (joint - joint.logsumexp((0, 1, 2))).exp()
    expected = {
        "weights.0": fixed.even[:, :4].mT @ fixed.odd / 3 - values[0].mT @ p.sum(2) @ values[1],
        "weights.1": fixed.odd.mT @ fixed.even[:, 4:] / 3 - values[1].mT @ p.sum(0) @ values[2],
        "biases.0": data.mean(0) - p.sum((1, 2)) @ values[0],
        "biases.1": fixed.odd.mean(0) - p.sum((0, 2)) @ values[1],
        "biases.2": fixed.even[:, 4:].mean(0) - p.sum((0, 1)) @ values[2],
    }
    for (name, _), gradient in zip(deep.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, expected[name].detach(), atol=1e-8, rtol=1e-8)


def test_gaussian_visible_units_learn():
    generator = torch.Generator().manual_seed(0)
    layers = [Gaussian.create(torch.zeros(3, dtype=F64), torch.tensor(0.3, dtype=F64)), *bits(4, 2)]
    centres = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]], dtype=F64)
    data = centres.repeat(60, 1) + 0.3 * torch.randn(120, 3, generator=generator, dtype=F64)
    deep = DeepBoltzmannMachine(layers, generator=generator)
    before = float(deep.score_samples(data).mean())
    deep.fit(data, epochs=40, learning_rate=0.5, sweeps=1, steps=5, generator=generator, progress=False)
    exact = deep.machine().log_partition().detach()
    after = float(deep.score_samples(data, exact).mean())
    # Two clouds of standard deviation ⅓ in three dimensions, against one that covers both.
    assert after > before + 2.0
    estimate = deep.machine().estimate_log_partition(200, schedule=100, generator=generator)
    assert abs(float(estimate.log_partition - exact)) < 5 * float(estimate.standard_error)


# Implicit mixtures of machines.


def test_an_implicit_mixture_is_the_sum_of_its_machines():
    generator = torch.Generator().manual_seed(0)
    mixture = RestrictedBoltzmannMachine(bits(5)[0], switched(bits(3)[0], 2), generator=generator)
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=F64))
    visible, hidden = states(5), states(3)
    weight, bias = mixture.weight.detach(), mixture.hidden_bias.detach()
    log_weight = []
    for copy in range(2):
        own = slice(3 * copy, 3 * copy + 3)
        switch = visible @ weight[:, 6 + copy] + bias[6 + copy]
        joint = visible @ weight[:, own] @ hidden.mT + hidden @ bias[own]
        log_weight.append(visible @ mixture.visible_bias.detach() + switch + joint.logsumexp(-1))
    of_machines = torch.stack(log_weight, -1)
    expected = of_machines.logsumexp(-1) - of_machines.flatten().logsumexp(0)
    torch.testing.assert_close(mixture.score_samples(visible), expected)
    torch.testing.assert_close(mixture.transform(visible)[:, 6:], of_machines.softmax(-1))


@pytest.mark.slow
def test_an_implicit_mixture_learns_and_annealing_agrees():
    """Two kinds of rows, each of which one machine takes."""
    generator = torch.Generator().manual_seed(0)
    kind = torch.arange(120) % 2
    on = torch.stack([torch.arange(8) < 4, torch.arange(8) >= 4])[kind]
    data = (on & (torch.rand(120, 8, generator=generator) < 0.8)).double()
    mixture = RestrictedBoltzmannMachine(bits(8)[0], switched(bits(2)[0], 2), generator=generator)
    before = mixture.score_samples(data).mean()
    mixture.fit(data, epochs=40, learning_rate=0.3, generator=generator, progress=False)
    exact = mixture.machine().log_partition().detach()
    assert float(mixture.score_samples(data, exact).mean() - before) > 1.0
    estimate = mixture.machine().estimate_log_partition(200, schedule=100, generator=generator)
    assert abs(float(estimate.log_partition - exact)) < 5 * float(estimate.standard_error) + 1e-9


REFUSED = {
    "two layers": (lambda: DeepBoltzmannMachine(bits(4, 3)), "three or more, got 2", ValueError),
    "no layers": (lambda: DeepBoltzmannMachine(3), "sequence of measures", TypeError),
    "no measures": (lambda: DeepBoltzmannMachine([1, 2, 3]), "must be a measure", TypeError),
    "unbounded": (
        lambda: DeepBoltzmannMachine([Gaussian.create(torch.zeros(2), torch.tensor(1.0))] * 3),
        "bounded",
        ValueError,
    ),
    "NaN": (lambda: DeepBoltzmannMachine(bits(4, 3, 2)).bound(torch.full((2, 4), torch.nan)), "NaN", ValueError),
    "shape": (
        lambda: DeepBoltzmannMachine(bits(4, 3, 2)).score_samples(torch.zeros(2, 3)),
        r"\(\*items, 4\)",
        ValueError,
    ),
    "no states": (
        lambda: DeepBoltzmannMachine(bits(4, 3, 2)).fit(torch.full((2, 4), 0.5), progress=False),
        "states of Bernoulli",
        ValueError,
    ),
    "steps": (lambda: DeepBoltzmannMachine(bits(4, 3, 2)).bound(torch.ones(2, 4), steps=0), "steps", ValueError),
    "too many states": (
        lambda: DeepBoltzmannMachine(bits(4, 3, 21)).score_samples(torch.ones(2, 4)),
        "take `bound`",
        ValueError,
    ),
    "switched of a batch": (lambda: switched(Bernoulli.create(torch.full((2, 3), 0.5)), 2), "one measure", ValueError),
    "switched, no copy": (lambda: switched(bits(3)[0], 0), "count", ValueError),
}


@every_row("name", REFUSED)
def test_bad_input_is_one_clear_error(name: str):
    call, message, error = REFUSED[name]
    with pytest.raises(error, match=message):
        call()
