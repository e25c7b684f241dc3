"""Restricted Boltzmann machines against enumeration; training towards the exact likelihood's maximum."""

import itertools
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row, some_slow

from massieu.measures import (
    Atoms,
    Bernoulli,
    Categorical,
    Exponential,
    Gamma,
    Gaussian,
    Laplace,
    Poisson,
    Sphere,
    Spin,
    Uniform,
    product,
)
from massieu.nn.boltzmann import RestrictedBoltzmannMachine


def bits(number):
    return Bernoulli.create(torch.full((number,), 0.5))


def states(number, values=(0.0, 1.0)):
    return torch.tensor(list(itertools.product(values, repeat=number)))


def model(visible=None, hidden=None, spread=0.7):
    found = RestrictedBoltzmannMachine(
        visible or bits(4), hidden or bits(3), generator=torch.Generator().manual_seed(0)
    )
    for index, parameter in enumerate(found.parameters()):
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
        parameter.data = spread * noise
    return found.double()


def log_joint(machine):
    """log p̃ of all states of 4 visible and 3 hidden bits, relative to counting."""
    visible, hidden = states(4).double(), states(3).double()
    return (
        visible @ machine.weight @ hidden.mT + (visible @ machine.visible_bias)[:, None] + hidden @ machine.hidden_bias
    )


def test_likelihood_of_all_states():
    machine = model()
    wanted = log_joint(machine).logsumexp(1)
    found = machine.score_samples(states(4).double())
    assert torch.allclose(found, wanted - wanted.logsumexp(0))
    assert torch.isclose(found.exp().sum(), torch.tensor(1.0).double())


def test_pseudo_likelihood_is_the_product_of_conditionals():
    machine = model()
    level = log_joint(machine).logsumexp(1)
    wanted = []
    for index, state in enumerate(states(4)):
        total = 0.0
        for unit in range(4):
            other = index ^ (1 << (3 - unit))
            assert (states(4)[other] != state).nonzero().flatten().tolist() == [unit]
            total += (level[index] - torch.logaddexp(level[index], level[other])).item()
        wanted.append(total)
    assert torch.allclose(machine.pseudo_log_likelihood(states(4).double()), torch.tensor(wanted).double())


def test_pseudo_likelihood_of_other_numbers_than_the_units_take():
    found = model().pseudo_log_likelihood(torch.tensor([[0.0, 0.5, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]]).double())
    assert found.isfinite().tolist() == [False, True] and found[0] == -math.inf


def test_features_and_reconstructions():
    machine = model()
    data = states(4).double()
    p = log_joint(machine).softmax(1)
    features = p @ states(3).double()
    assert torch.allclose(machine.transform(data), features)
    assert torch.allclose(machine(data), features)
    wanted = torch.sigmoid(features @ machine.weight.mT + machine.visible_bias)
    assert torch.allclose(machine.reconstruct(data), wanted)


def test_samples_have_the_models_law():
    machine = model()
    drawn = machine.sample(20_000, sweeps=30, generator=torch.Generator().manual_seed(1))
    p = log_joint(machine).logsumexp(1).softmax(0)
    found = torch.bincount((drawn @ torch.tensor([8.0, 4.0, 2.0, 1.0]).double()).long(), minlength=16) / 20_000
    assert ((found - p).abs() < 5 * (p * (1 - p) / 20_000).sqrt()).all()


@pytest.mark.parametrize("kind", ["Bernoulli", "Spin"])
def test_an_update_goes_along_the_likelihoods_gradient(kind):
    """With chains in the exact proportions of the model, whatever the centres: ascent of the mean log-likelihood."""
    units = {"Bernoulli": (bits, (0.0, 1.0)), "Spin": (lambda n: Spin.create(dim=n), (-1.0, 1.0))}[kind]
    machine = model(units[0](4), units[0](3))
    data = states(4, units[1]).double()[[0, 3, 3, 9, 14]]
    exact = machine.score_samples(states(4, units[1]).double()).exp()
    index = torch.multinomial(exact, 200_000, True, generator=torch.Generator().manual_seed(2))
    machine.chains = states(4, units[1]).double()[index]
    loss = -(-machine.energy(data) - machine.machine().log_partition()).mean()
    gradient = dict(
        zip(dict(machine.named_parameters()), torch.autograd.grad(loss, list(machine.parameters())), strict=True)
    )
    before = {name: parameter.detach().clone() for name, parameter in machine.named_parameters()}
    activity, centre = machine.transform(data.mean(0)), data.mean(0)
    machine.fit(data, epochs=1, batch_size=5, chains=200_000, learning_rate=1e-3, progress=False)
    moved = {name: (parameter - before[name]) / 1e-3 for name, parameter in machine.named_parameters()}
    noise = 5 * (1.0 if kind == "Spin" else 0.5) / math.sqrt(200_000)
    # Centred: the bias's gradient is taken with the weight's share about the centres removed.
    weight = (
        -gradient["weight"]
        - torch.outer(-gradient["visible_bias"], activity)
        - torch.outer(centre, -gradient["hidden_bias"])
    )
    assert (moved["weight"] - weight).abs().max() < noise
    assert (moved["visible_bias"] - (-gradient["visible_bias"] - weight @ activity)).abs().max() < noise
    assert (moved["hidden_bias"] - (-gradient["hidden_bias"] - centre @ weight)).abs().max() < noise
    assert weight.abs().max() > 0.04


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "rate"), [(bits(6), 0.3), (Spin.create(dim=6), 0.1)], ids=["Bernoulli", "Spin"])
def test_training_raises_the_exact_likelihood(layer, rate):
    # Bars: four horizontal or vertical lines of a 3 × 3 image.
    grid = states(3)[:, :, None].expand(8, 3, 3)
    data = torch.cat([grid.reshape(8, 9), grid.mT.reshape(8, 9)])
    machine = RestrictedBoltzmannMachine(bits(9), layer, generator=torch.Generator().manual_seed(0))
    before = machine.score_samples(data).mean()
    machine.fit(
        data, epochs=1500, batch_size=16, learning_rate=rate, generator=torch.Generator().manual_seed(1), progress=False
    )
    after = machine.score_samples(data).mean()
    independent = 9 * math.log(0.5)
    assert abs(before - independent) < 0.1
    assert after > before + 1.0
    entropy = 12 / 16 * math.log(16) + 4 / 16 * math.log(8)  # 14 images, two of them twice
    assert after < -entropy


@pytest.mark.slow
def test_gaussian_visible_units_learn_a_covariance():
    generator = torch.Generator().manual_seed(0)
    factor = torch.tensor([[0.9, 0.0], [0.8, 0.2], [0.0, 0.7]])
    data = torch.randn(4000, 2, generator=generator) @ factor.mT + 0.6 * torch.randn(4000, 3, generator=generator)
    variance = data.var(0)
    visible = Gaussian.create(torch.zeros(3), 0.36 * torch.ones(3))
    machine = RestrictedBoltzmannMachine(
        visible, Gaussian.create(torch.zeros(2), torch.tensor(1.0)), generator=generator
    )
    machine.fit(data, epochs=60, batch_size=200, chains=200, learning_rate=0.05, generator=generator, progress=False)
    precision = (1 / 0.36) * torch.eye(3) - machine.weight @ machine.weight.mT
    assert torch.allclose(torch.linalg.inv(precision).diagonal(), variance, rtol=0.15)
    assert torch.allclose(torch.linalg.inv(precision)[0, 1], (factor @ factor.mT)[0, 1], rtol=0.2)


def test_a_checkpoint_holds_layers_and_parameters(tmp_path):
    machine = model(spread=0.5)
    torch.save(machine.state_dict(), tmp_path / "machine.pt")
    fresh = RestrictedBoltzmannMachine(Bernoulli.create(torch.full((4,), 0.25)), bits(3)).double()
    fresh.load_state_dict(torch.load(tmp_path / "machine.pt"))
    data = states(4).double()
    assert torch.equal(fresh.score_samples(data), machine.score_samples(data))


def test_an_interrupted_training_keeps_what_it_has(monkeypatch):
    machine = RestrictedBoltzmannMachine(bits(4), bits(3))
    start = machine.weight.detach().clone()
    calls = itertools.count()

    def interrupt(rate):
        if next(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(machine, "_check_normaliser", interrupt)
    with pytest.warns(UserWarning, match="interrupted in epoch 3 of 50"):
        machine.fit(states(4), epochs=50, progress=False)
    assert not torch.equal(machine.weight, start)
    chains = machine.chains
    assert chains is not None and chains.shape == (20, 4)
    monkeypatch.undo()
    machine.fit(states(4), epochs=1, progress=False)  # goes on, from those chains
    assert machine.chains is not chains


def test_progress_is_shown_on_the_error_stream(capsys):
    RestrictedBoltzmannMachine(bits(4), bits(3)).fit(states(4), epochs=3)
    assert capsys.readouterr().out == ""


UNITS = {
    "Bernoulli": lambda n: Bernoulli.create(torch.full((n,), 0.4)),
    "Spin": lambda n: Spin.create(dim=n),
    "Categorical": lambda n: Categorical.create(torch.full((n,), 1 / n)),
    "Gaussian": lambda n: Gaussian.create(torch.zeros(n), torch.tensor(0.5)),
    "Poisson": lambda n: Poisson.create(torch.ones(n)),
    "Exponential": lambda n: Exponential.create(torch.full((n,), 3.0)),
    "Gamma": lambda n: Gamma.create(torch.full((n,), 2.0), torch.full((n,), 0.3)),
    "Laplace": lambda n: Laplace.create(torch.full((n,), 0.3)),
    "Uniform": lambda n: Uniform.create(-torch.ones(n), torch.ones(n)),
    "Sphere": lambda n: Sphere.create(dim=n),
    "Atoms": lambda n: Atoms.create(torch.eye(n) + 0.5),
    "a product": lambda n: product(bits(n - 1), Gaussian.create(torch.zeros(1), torch.tensor(1.0))),
}


@pytest.mark.medium
@some_slow("role", ["visible", "hidden"], 1)
@some_slow("kind", UNITS, 6)
def test_units_of_every_kind_learn_and_are_kept(kind, role, tmp_path):
    """Data from the layer, tilted: the likelihood of the data rises, and a checkpoint gives the same machine."""
    generator = torch.Generator().manual_seed(0)
    layers = [UNITS[kind](3), bits(2)] if role == "visible" else [bits(3), UNITS[kind](2)]
    machine = RestrictedBoltzmannMachine(*layers, generator=generator)
    data = layers[0].sample(torch.tensor([0.8, -0.8, 0.4]), (500,), generator=generator)
    before = machine.score_samples(data).mean()
    machine.fit(data, epochs=20, batch_size=100, learning_rate=0.1, generator=generator, progress=False)
    after = machine.score_samples(data)
    assert after.isfinite().all() and after.mean() > before + 0.005
    drawn = machine.sample(2000, sweeps=10, generator=generator)
    error = (data.std(0) / math.sqrt(500)).clamp_min(0.02)
    assert ((drawn.mean(0) - data.mean(0)).abs() < 6 * error).all()
    save_file(machine.state_dict(), tmp_path / "machine.safetensors")
    fresh = RestrictedBoltzmannMachine(*layers)
    fresh.load_state_dict(load_file(tmp_path / "machine.safetensors"))
    assert torch.equal(fresh.score_samples(data), after)
    assert torch.equal(fresh.transform(data), machine.transform(data))


def test_layers_of_one_measure_are_kept_apart(tmp_path):
    layer = bits(3)
    machine = RestrictedBoltzmannMachine(layer, layer)
    save_file(machine.state_dict(), tmp_path / "machine.safetensors")
    assert set(load_file(tmp_path / "machine.safetensors")) == set(machine.state_dict())
    assert "visible=Bernoulli × 3, hidden=Bernoulli × 3" in repr(machine)


def test_data_of_any_dtype_are_cast_and_the_measures_give_the_parameters_theirs():
    machine = RestrictedBoltzmannMachine(bits(4), Bernoulli.create(torch.full((3,), 0.5, dtype=torch.float64)))
    assert {tensor.dtype for tensor in machine.state_dict().values()} == {torch.float64}
    wanted = machine.score_samples(states(4))
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.float32):
        data = states(4).to(dtype)
        assert torch.equal(machine.score_samples(data), wanted)
        assert torch.equal(machine.transform(data), machine.transform(states(4)))
    machine.fit(states(4).bool(), epochs=2, progress=False)
    with pytest.raises(TypeError, match="must be a tensor, got ndarray"):
        machine.fit(states(4).numpy())


@pytest.mark.slow
def test_compiled():
    machine = model()
    data = states(4).double()
    compiled = torch.compile(machine, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(data), machine(data))


def test_features_and_energies_under_transforms():
    machine = model()
    data = states(4).double()
    assert torch.allclose(torch.func.vmap(machine.energy)(data), machine.energy(data))
    parameters = dict(machine.named_parameters())
    call = lambda weight: torch.func.functional_call(machine, parameters | {"weight": weight}, (data,))  # noqa: E731
    check_derivatives(call, [parameters["weight"]], second=False)


@every_row(
    ("call", "message"),
    [
        (lambda m: m.fit(torch.zeros(3, 5)), r"\(\*items, 4\), got \(3, 5\)"),
        (lambda m: m.fit(torch.zeros(0, 4)), r"at least one item, got shape \(0, 4\)"),
        (
            lambda m: m.fit(torch.full((3, 4), 0.5)),
            "states of Bernoulli units, got others in 3 of 3 items, item 0 first",
        ),
        (lambda m: m.fit(torch.zeros(3, 4), learning_rate=0.0), "learning_rate must be positive and finite, got 0.0"),
        (lambda m: m.fit(torch.zeros(3, 4), epochs=-1), "epochs must be a whole number, at least 1, got -1"),
        (lambda m: m.fit(torch.zeros(3, 4), batch_size=2.5), "batch_size must be a whole number, got 2.5"),
        (lambda m: m.fit(torch.zeros(4)), r"\(items, 4\), got \(4,\)"),
        (lambda m: m.fit(torch.tensor([[0, 1, 0, 1], [0, math.nan, 0, 1]])), "NaN, got them in 1 of 2 items, item 1"),
        (lambda m: m.score_samples(torch.full((2, 4), math.nan)), "NaN, got them in 2 of 2 items"),
        (lambda m: m.transform(torch.zeros(2, 5)), r"\(\*items, 4\), got \(2, 5\)"),
        (lambda m: m.reconstruct(torch.tensor(0.0)), r"\(\*items, 4\), got \(\)"),
        (lambda m: m.pseudo_log_likelihood(torch.zeros(2, 3)), r"\(\*items, 4\), got \(2, 3\)"),
        (lambda m: m.bfloat16().fit(torch.zeros(3, 4)), "float32 or float64, got torch.bfloat16"),
        (lambda m: m.sample(0), "count must be a whole number, at least 1, got 0"),
        (lambda m: m.sample(3, sweeps=0), "sweeps must be a whole number, at least 1, got 0"),
    ],
)
def test_bad_fits(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(RestrictedBoltzmannMachine(bits(4), bits(3)))


def test_training_that_diverges_says_so():
    gaussian = Gaussian.create(torch.zeros(3), torch.tensor(1.0))
    machine = RestrictedBoltzmannMachine(gaussian, Gaussian.create(torch.zeros(2), torch.tensor(1.0)))
    with pytest.raises(ValueError, match="smaller learning_rate than"):
        machine.fit(
            3 * torch.randn(100, 3, generator=torch.Generator().manual_seed(0)), learning_rate=50.0, progress=False
        )


def test_machines_that_never_have_a_normaliser_train_not_at_all():
    gaussian = Gaussian.create(torch.zeros(3), torch.tensor(1.0))
    with pytest.raises(ValueError, match="Poisson hidden and Gaussian visible units never have one"):
        RestrictedBoltzmannMachine(gaussian, Poisson.create(torch.ones(2)))
    laplace = Laplace.create(torch.ones(2))
    machine = RestrictedBoltzmannMachine(bits(3), laplace)  # a biased Laplace unit is none any more by its class
    with pytest.raises(ValueError, match="Laplace hidden and Gaussian visible units never have one"):
        RestrictedBoltzmannMachine(gaussian, laplace.tilt(torch.full((2,), 0.1)))
    machine.weight.data.fill_(0.4)  # fields up to 1.2, and the domain ends at 1
    with pytest.raises(ValueError, match=r"unit 0 reaches from 0 to 1.2, and Laplace needs"):
        machine.fit(states(3), learning_rate=1e-6, epochs=1, progress=False)
    machine.weight.data.fill_(0.3)
    with pytest.raises(ValueError, match=r"training diverged to a machine .* smaller learning_rate than 1"):
        machine.fit(states(3)[-1:], epochs=50, progress=False)


def test_a_layer_for_another_half_line_starts_below_zero():
    machine = RestrictedBoltzmannMachine(Poisson.create(torch.ones(3)), Gamma.create(torch.ones(2), torch.ones(2)))
    assert (machine.weight < 0).all()


def test_pseudo_likelihood_needs_two_values():
    machine = RestrictedBoltzmannMachine(Poisson.create(torch.ones(3)), bits(2))
    with pytest.raises(ValueError, match="not Poisson"):
        machine.pseudo_log_likelihood(torch.zeros(1, 3))
