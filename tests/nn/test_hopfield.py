"""`massieu.nn.Hopfield` against explicit matrices, and what hopfield-layers could not do."""

import itertools
import warnings

import pytest
import torch
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row, one_in, some_slow
from torch import nn

from massieu.energy.activations import RMSNorm, Tanh
from massieu.errors import ConvergenceError
from massieu.nn import Activation, Hopfield, HopfieldLayer, HopfieldPooling
from massieu.solve import Status

STEPS = [1, 2, 4]


def bare(heads=1, **options):
    """A layer that takes patterns as they are."""
    parts = {name: nn.Identity() for name in ("state", "stored", "projection", "output")}
    return Hopfield(num_heads=heads, **parts, **options)


def patterns(batch=2, keys=7, states=4, width=6, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = ((keys, width), (states, width), (keys, width))
    return tuple(torch.randn(batch, *shape, dtype=dtype, requires_grad=True) for shape in shapes)


def explicit(stored, state, projection, scale, steps, log_weight=0.0):
    """One head: repeated softmax with its matrix."""
    for step in range(steps):
        weights = torch.softmax(scale * state @ stored.mT + log_weight, -1)
        state = weights @ (stored if step < steps - 1 else projection)
    return state


@every_row("steps", STEPS)
def test_steps_are_repeated_softmax_with_its_gradients(steps):
    inputs = patterns()
    mask = torch.randn(4, 7).double()
    scale = torch.tensor(0.8).double().requires_grad_()
    layer = bare(steps=steps, scale=nn.Parameter(scale.detach()))
    found = layer(inputs, association_mask=mask)
    wanted = explicit(*inputs, scale, steps, mask)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    for got, want in zip(
        torch.autograd.grad(found.sum(), [*inputs, layer.scale]),
        torch.autograd.grad(wanted.sum(), [*inputs, scale]),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)


def test_heads_scales_and_sink_are_each_heads_own():
    inputs = patterns()
    scale, sink = torch.tensor([0.4, 2.0]).double(), torch.tensor([-0.5, 1.0]).double()
    found = bare(2, steps=3, scale=scale, sink=sink)(inputs)
    for head in range(2):
        part = [tensor[..., 3 * head : 3 * head + 3] for tensor in inputs]
        part = [torch.cat([tensor, torch.zeros_like(tensor[:, :1])], 1) for tensor in (part[0], part[2])] + [part[1]]
        weight = torch.zeros(8).double()
        weight[7] = sink[head]
        wanted = explicit(part[0], part[2], part[1], scale[head], 3, weight)
        torch.testing.assert_close(found[..., 3 * head : 3 * head + 3], wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.medium
@some_slow("scale", [4.0, 0.3, 32.0], 1)
def test_a_descent_to_its_end_is_many_steps(scale):
    inputs = patterns()
    found = bare(steps=None, scale=scale)(inputs)
    wanted = explicit(*inputs, scale, 500)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    gradients = [torch.autograd.grad(out.square().sum(), inputs, materialize_grads=True) for out in (found, wanted)]
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.medium
@some_slow("steps", [None, 2], 1)
def test_second_derivatives(steps):
    inputs = tuple(tensor.detach().requires_grad_() for tensor in patterns(batch=1, keys=3, states=2, width=2))
    layer = bare(steps=steps, scale=0.3)
    check_derivatives(lambda *x: layer(x), inputs)


def test_noise_is_taken_off_stored_patterns():
    torch.manual_seed(0)
    stored = torch.nn.functional.normalize(torch.randn(1, 50, 64), dim=-1)
    layer = bare(steps=None, scale=40.0)
    found = layer((stored, stored + 0.05 * torch.randn(1, 50, 64), stored))
    # B5.7: 1 − p ≤ (N − 1)exp(−β Δ) with Δ the least gap of scores.
    scores = (stored @ stored.mT)[0]
    gap = (1 - scores.masked_fill(torch.eye(50, dtype=torch.bool), -1)).min()
    assert (found - stored).norm(dim=-1).max() <= 2 * 49 * torch.exp(-40 * (gap - 0.35))
    assert (found - stored).norm(dim=-1).max() < 1e-2


@one_in(2, {"activation": [None, Activation(RMSNorm.create(0.9)), Tanh.create()], "sink": [None, 0.4]})
def test_every_step_lowers_the_energy_of_the_memory(activation, sink):
    stored, state, _ = patterns()
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    layer = bare(2, activation=activation, scale=torch.tensor([1.0, 3.0]).double(), sink=sink)
    energy = layer.memory(stored, padding)
    point = layer.query(state)
    for steps in (2, 3):
        layer.steps = steps
        following = energy.step(point)
        # The module's own passes are the energy's steps: the read-out of keys after `steps` passes is the mean there.
        read = layer((stored, state, stored), stored_pattern_padding_mask=padding)
        mean = energy.memory.mean(energy._eta(following))
        torch.testing.assert_close(read.unflatten(-1, (2, 3)).transpose(1, 2), mean, rtol=1e-8, atol=1e-9)
        assert bool((energy(following) <= energy(point) + 1e-12)[energy(point).isfinite()].all())
        point = following


def test_energy_and_retrieval_need_no_training():
    stored, state, _ = patterns()
    layer = Hopfield(6, 2, scale=nn.Parameter(torch.tensor(2.0))).double()
    found = layer.memory(stored).retrieve(layer.query(state))
    assert found.state.shape == (2, 2, 4, 3)
    assert bool((found.status == Status.CONVERGED).all())
    assert torch.autograd.grad(found.energy.sum(), layer.scale)[0].isfinite()


def test_states_get_no_gradient_at_the_end_of_a_descent_and_all_else_does():
    layer = Hopfield(6, 2, steps=None, scale=nn.Parameter(torch.tensor(0.5))).double()
    inputs = patterns()
    gradients = torch.autograd.grad(layer(inputs).square().sum(), [*inputs, layer.scale], materialize_grads=True)
    assert not gradients[1].any()
    assert all(bool(gradients[place].any()) for place in (0, 2, 3))


def test_not_converged_is_told():
    stored, state, projection = patterns()
    # Patterns ±a with β‖a‖² = 1: a pitchfork, at which descent is not geometric (B5.6).
    stored = torch.tensor([[[1.0], [-1.0]]]).double()
    arguments = (stored, torch.ones(1, 1, 1).double(), stored)
    with pytest.raises(ConvergenceError, match="residual"):
        bare(steps=None, scale=1.0, max_steps=20, throw=True)(arguments)


@every_row("steps", [1, 3, None])
def test_a_state_that_sees_nothing_retrieves_zero(steps):
    inputs = patterns()
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1] = True
    found = bare(steps=steps, scale=0.5)(inputs, padding)
    assert not found[1].any()
    for gradient in torch.autograd.grad(found.sum(), inputs, materialize_grads=True):
        assert bool(gradient.isfinite().all())


@every_row("steps", [1, 3, None])
def test_items_do_not_depend_on_their_batch_mates(steps):
    inputs = tuple(tensor.detach().float() for tensor in patterns(batch=3))
    layer = bare(2, steps=steps, scale=1.5)
    together = layer(inputs)
    for item in range(3):
        torch.testing.assert_close(together[item], layer([x[item : item + 1] for x in inputs])[0], rtol=1e-5, atol=1e-6)


def test_padding_hides_and_weighs():
    stored, state, projection = patterns()
    layer = bare(steps=3, scale=0.7)
    padding = torch.arange(7).expand(2, -1) >= 5
    wanted = layer((stored[:, :5], state, projection[:, :5]))
    torch.testing.assert_close(layer((stored, state, projection), padding), wanted)
    # A log-weight of log 2 is a pattern stored twice.
    twice = [torch.cat([tensor, tensor[:, :1]], 1) for tensor in (stored, projection)]
    weight = torch.zeros(2, 7).double()
    weight[:, 0] = torch.tensor(2.0).double().log()
    torch.testing.assert_close(layer((stored, state, projection), weight), layer((twice[0], state, twice[1])))


@pytest.mark.parametrize("steps", [1, 3])
def test_the_association_matrix_is_the_last_passs(steps):
    stored, state, projection = patterns()
    layer = bare(2, steps=steps, scale=1.2)
    weights = layer.association_matrix((stored, state, projection))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 4).double())
    read = (weights @ projection.unflatten(-1, (2, 3)).transpose(1, 2)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(read, layer((stored, state, projection)))


def test_pooling_and_layer_are_the_hopfield_layer_with_parameters_for_inputs():
    inputs = patterns()
    pooling = HopfieldPooling(6, 2, quantity=3, steps=2).double()
    wanted = pooling.hopfield((inputs[0], pooling.states.expand(2, -1, -1), inputs[0])).flatten(1)
    torch.testing.assert_close(pooling(inputs[0]), wanted)
    layer = HopfieldLayer(6, 2, quantity=5, separate_targets=True, pattern_projection_size=3, steps=2).double()
    wanted = layer.hopfield((layer.patterns.expand(2, -1, -1), inputs[1], layer.targets.expand(2, -1, -1)))
    torch.testing.assert_close(layer(inputs[1]), wanted)
    for module, output in ((pooling, pooling(inputs[0])), (layer, layer(inputs[1]))):
        output.sum().backward()
        assert all(bool(parameter.grad.isfinite().all()) for parameter in module.parameters())


@pytest.mark.parametrize("steps", [1, 3])
def test_evaluation_has_the_gradient_of_training_and_dropout_is_of_the_last_weights(steps):
    inputs = patterns()
    layer = Hopfield(6, 2, steps=steps).double()
    gradients = [torch.autograd.grad(layer.train(mode)(inputs).sum(), inputs) for mode in (True, False)]
    assert all(torch.equal(train, evaluation) for train, evaluation in zip(*gradients, strict=True))
    torch.manual_seed(0)
    layer = bare(steps=steps, dropout=0.5, scale=1.0)
    wide = tuple(tensor.detach().repeat(1000, 1, 1) for tensor in inputs)
    drawn = layer(wide).unflatten(0, (1000, 2))
    error = (drawn.mean(0) - layer.eval()(inputs)).abs() / (drawn.std(0) / 1000**0.5)
    assert error.max() < 5


@one_in(3, {"dtype": [torch.bfloat16, torch.float16], "steps": [1, 3, None], "autocast": [True, False]})
def test_half_precision(dtype, steps, autocast):
    torch.manual_seed(0)
    layer = Hopfield(6, 2, steps=steps, scale=0.5).double()
    inputs = tuple(tensor.detach() for tensor in patterns())
    wanted = layer(inputs)
    layer.to(torch.float32 if autocast else dtype)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        found = layer(tuple(tensor.to(torch.float32 if autocast else dtype) for tensor in inputs))
    assert found.dtype == dtype
    accuracy = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), wanted, rtol=accuracy, atol=accuracy)
    found.float().sum().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in layer.parameters())


@pytest.mark.slow
def test_compiled():
    torch._dynamo.reset()
    layer = Hopfield(6, 2, steps=None, scale=nn.Parameter(torch.tensor([0.3, 0.6])))
    inputs = tuple(tensor.detach().float().requires_grad_() for tensor in patterns())
    padding = torch.arange(7).expand(2, -1) >= 5
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    outputs = [module(inputs, padding) for module in (layer, compiled)]
    gradients = [torch.autograd.grad(out.square().sum(), [inputs[0], inputs[2], layer.scale]) for out in outputs]
    for eager, got in zip((outputs[0], *gradients[0]), (outputs[1], *gradients[1]), strict=True):
        torch.testing.assert_close(got, eager, rtol=1e-4, atol=1e-4)


def spread(layer: nn.Module) -> nn.Module:
    """The layer with weights so large that the patterns' weights differ, as training makes them."""
    torch.manual_seed(1)
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            nn.Linear.reset_parameters(module)
    return layer


def test_weights_start_small_and_normal():
    """Of deviation 0.02, biases 0, as hopfield-layers' do: all patterns begin with nearly one weight."""
    torch.manual_seed(0)
    layer = HopfieldLayer(64, 4, quantity=50, separate_targets=True)
    for name, parameter in layer.named_parameters():
        parameter = parameter.detach()
        if parameter.ndim > 1:
            # Of n normal numbers the deviation is known to 1/√(2n): five of that.
            assert abs(float(parameter.std()) / 0.02 - 1) < 5 / (2 * parameter.numel()) ** 0.5, name
            assert abs(float(parameter.mean())) < 5 * 0.02 / parameter.numel() ** 0.5, name
        elif name.endswith("bias"):
            assert not parameter.any(), name
    weights = layer.hopfield.association_matrix((layer.patterns, torch.randn(1, 5, 64), layer.targets))
    assert float((50 * weights - 1).abs().max()) < 0.1


def test_what_an_option_advertises_changes_the_output():
    inputs = patterns()
    table = (
        {},
        {"steps": 3},
        {"steps": None},
        {"scale": 3.0},
        {"sink": 0.0},
        {"steps": 3, "activation": Tanh.create()},
        {"space": nn.LayerNorm(3)},
    )
    outputs = [spread(Hopfield(6, 2, **options)).double()(inputs) for options in table]
    for one, other in itertools.combinations(outputs, 2):
        assert (one - other).abs().max() > 1e-5


BAD = {
    "steps": (lambda: Hopfield(6, steps=0), "steps must be a whole number, at least 1, got 0"),
    "dropout": (lambda: Hopfield(6, dropout=1), "dropout must be finite, at least 0 and below 1, got 1"),
    "heads": (lambda: Hopfield(6, 4), "input_size must be a multiple of num_heads, got 6 and 4"),
    "no heads": (lambda: Hopfield(6, num_heads=0), "num_heads must be a whole number, at least 1, got 0"),
    "size": (lambda: Hopfield(), "needed to make a projection"),
    "output": (
        lambda: Hopfield(state=nn.Identity(), stored=nn.Identity(), projection=nn.Identity()),
        "needed to make the module `output`",
    ),
    "scale": (lambda: Hopfield(6, 2, scale=torch.ones(6)), "one for each of 2 heads"),
    "targets": (lambda: HopfieldLayer(6, stored_pattern_size=5), "need separate_targets"),
    "unknown": (lambda: HopfieldPooling(6, update_steps_max=3), "unexpected keyword argument 'update_steps_max'"),
}


@every_row(("make", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_made(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_wrong_calls_name_what_is_wrong():
    stored, state, projection = patterns(dtype=torch.float32)
    layer = Hopfield(6, 2)
    calls = [
        ((stored[0],), {}, r"input must have shape \(batch, length, 6\), got \(7, 6\)"),
        (((stored, state),), {}, "or \\(stored, states, projections\\), got 2"),
        ((stored, torch.zeros(2, 6)), {}, r"key_padding_mask must have shape \(\(2, 7\)|must have shape \(2, 7\)"),
        (((stored, state[:1], projection),), {}, "one batch size"),
    ]
    for arguments, keywords, message in calls:
        with pytest.raises((ValueError, TypeError), match=message):
            layer(*arguments, **keywords)


@pytest.mark.parametrize("steps", [1, 4])
def test_memory_is_linear_in_patterns_and_states(steps):
    """Numbers that are kept for the backward pass, counted."""

    def kept(length):
        layer = Hopfield(8, 2, steps=steps)
        inputs = tuple(torch.randn(1, length, 8, requires_grad=True) for _ in range(3))
        sizes = {}

        def pack(tensor):
            sizes[tensor.data_ptr(), tensor.shape] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(inputs)
        return max(sizes.values()), sum(sizes.values())

    (largest, total), (_, doubled) = kept(1000), kept(2000)
    assert largest <= 1000 * 24
    assert doubled <= 2.01 * total
    # A pass keeps a state, an output and log Z; keys, values and what made them are kept once.
    assert total <= 1000 * (3 * 8 * 8 + steps * 8 * 4)


def test_a_number_of_steps_keeps_how_far_the_last_one_went():
    inputs = patterns()
    for steps, scale, ends in ((1, 1.0, None), (4, 1.0, Status.MAX_STEPS), (300, 0.1, Status.CONVERGED)):
        layer = bare(steps=steps, scale=scale)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer(inputs)
        if ends is None:
            assert layer.convergence is None
            continue
        stored, state, _ = inputs
        before, after = (explicit(stored, state, stored, scale, passes) for passes in (steps - 2, steps - 1))
        torch.testing.assert_close(layer.convergence.residual, (after - before).norm(dim=-1).unsqueeze(1).detach())
        assert bool((layer.convergence.status == ends).all())
    layer((inputs[0], inputs[1] * torch.nan, inputs[2]))
    assert bool((layer.convergence.status == Status.NOT_FINITE).all())
