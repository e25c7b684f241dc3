"""`massieu.nn.EnergyTransformer` against steps by explicit matrices; `SigmaReparametrization` against the singular values."""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from massieu.nn import EnergyTransformer, EnergyTransformerStack, SigmaReparametrization


def block(**options):
    torch.manual_seed(0)
    return EnergyTransformer(8, 2, **({"steps": 3, "num_memories": 5} | options)).double()


def tokens(*lead, count=5):
    return torch.randn(*lead, count, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def unrolled(module, x, scale, steps=3, step_size=0.1):
    """The paper's update for one item, ∂E/∂g by autograd of the explicit energy."""
    for _ in range(steps):
        g = module.normalisation.log_gain.exp() * F.layer_norm(x, (8,), eps=1e-5) + module.normalisation.bias
        level = -0.5 * torch.relu(g @ module.memories.T).square().sum()
        for h in range(2):
            scores = scale[h] * (g @ module.key_weight[h].T) @ (g @ module.query_weight[h].T).T
            scores = scores.masked_fill(torch.eye(len(x), dtype=torch.bool), -torch.inf)
            level = level - torch.logsumexp(scores, 0).sum() / scale[h]
        x = x - step_size * torch.autograd.grad(level, g, create_graph=True)[0]
    return x


def test_outputs_and_gradients_are_those_of_the_papers_steps():
    module, x = block(scale=nn.Parameter(torch.tensor([0.4, 0.9]))), tokens(3).requires_grad_()
    with torch.no_grad():
        module.normalisation.bias += 0.3 * torch.randn(8)
    found = module(x)
    wanted = torch.stack([unrolled(module, item, module.scale) for item in x])
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    of = [x, *module.parameters()]
    for got, want in zip(*(torch.autograd.grad(out.sin().sum(), of) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        assert bool((got != 0).any())


def test_energies_are_those_of_the_energy_and_fall():
    module, x = block(steps=6), tokens(2, 3)
    output, energies = module(x, need_energies=True)
    torch.testing.assert_close(output, module(x))
    assert energies.shape == (7, 2, 3)
    energy = module.energy()
    torch.testing.assert_close(energies[0], energy(energy.normalise(x)))
    torch.testing.assert_close(energies[-1], energy(energy.normalise(output)))
    assert (energies.diff(dim=0) < 0).all()
    energies = block(steps=6, step_size=None)(x, need_energies=True)[1]
    assert (energies.diff(dim=0) < 0).all()


def test_padding_is_left_alone_and_seen_by_nobody():
    module, x = block(), tokens(2)
    mask = torch.tensor([[False] * 5, [False, False, False, True, True]])
    spoilt = torch.where(mask.unsqueeze(-1), torch.nan, x)
    output, energies = module(spoilt, mask, need_energies=True)
    torch.testing.assert_close(module(spoilt, mask), output, equal_nan=True)
    alone, own = module(x[1, :3], need_energies=True)
    torch.testing.assert_close(output[1, :3], alone)
    torch.testing.assert_close(energies[:, 1], own)
    torch.testing.assert_close(output[0], module(x[0]))
    assert output[1, 3:].isnan().all()
    module(spoilt, mask)[~mask].sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in module.parameters())


@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision(autocast):
    module, x = block(), tokens(2)
    wanted = module(x)
    dtype = torch.float32 if autocast else torch.bfloat16
    module.to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found, energies = module(x.to(dtype), need_energies=True)
    assert found.dtype == dtype and energies.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=0.05, atol=0.1)
    found.float().sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in module.parameters())


def test_what_an_option_advertises_changes_the_output_and_state_dicts_load():
    x = tokens(2)
    options = (
        {},
        {"steps": 4},
        {"step_size": 0.2},
        {"step_size": None},
        {"scale": 3.0},
        {"eps": 0.1},
        {"num_memories": 9},
    )
    outputs = [block(**option)(x) for option in options]
    for index, output in enumerate(outputs):
        assert not any(torch.allclose(output, other) for other in outputs[:index])
    module = block()
    other = EnergyTransformer(8, 2, steps=3, num_memories=5).double()
    other.load_state_dict(module.state_dict())
    torch.testing.assert_close(other(x), module(x))
    torch.testing.assert_close(module.eval()(x), outputs[0])
    assert "num_memories=5, steps=3" in repr(module)


@pytest.mark.slow
def test_compiled():
    torch._dynamo.reset()
    mask = torch.arange(5).expand(2, -1) >= 4
    module, x = block(steps=2, step_size=None).float(), tokens(2).float().requires_grad_()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    outputs = [call(x, mask, need_energies=True) for call in (module, compiled)]
    of = [x, module.key_weight, module.memories, module.normalisation.log_gain]
    gradients = [torch.autograd.grad(output.square().sum(), of) for output, _ in outputs]
    for eager, got in zip((*outputs[0], *gradients[0]), (*outputs[1], *gradients[1]), strict=True):
        torch.testing.assert_close(got, eager, rtol=1e-4, atol=1e-4)


@every_row(
    ("call", "error", "message"),
    [
        (lambda: EnergyTransformer(8, 3), ValueError, "multiple of num_heads, got 8 and 3"),
        (lambda: block(steps=0), ValueError, "at least 1, got 0"),
        (lambda: block(step_size=0.0), ValueError, "step_size must be positive and finite, got 0.0"),
        (lambda: block(num_memories=-1), ValueError, "num_memories must be a whole number, at least 0, got -1"),
        (lambda: block(scale=torch.ones(3)), ValueError, "one for each of 2 heads"),
        (lambda: block(values=True), TypeError, "unexpected keyword"),
        (lambda: block()(tokens(2)[..., :7]), ValueError, r"queries \+ \(n, 8\).*, got \(2, 5, 7\)"),
        (lambda: block()(tokens(2).long()), TypeError, "got a tensor of torch.int64"),
        (
            lambda: block()(tokens(2), torch.zeros(2, 4, dtype=torch.bool)),
            ValueError,
            r"queries \+ \(4, 8\).*, got \(2, 5, 8\)",
        ),
        (lambda: block()(tokens(2), torch.zeros(2, 5)), TypeError, "True hides a token.*got a tensor of torch.float32"),
    ],
)
def test_bad_input_is_one_clear_sentence(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --- spectral norms --------------------------------------------------------------------------------------------------


@every_row("shape", [(4, 7), (7, 4), (3, 5, 2)])
@every_row("size", [1e-25, 1.0, 1e25])
def test_the_spectral_norm_is_the_gain(shape, size):
    weight = size * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = SigmaReparametrization(2.5)(weight)
    torch.testing.assert_close(torch.linalg.svdvals(found)[..., 0], torch.full(shape[:-2], 2.5))
    torch.testing.assert_close(F.normalize(found, dim=-1), F.normalize(weight / size, dim=-1))


def test_its_derivatives_and_a_weight_of_zeros():
    module = SigmaReparametrization(1.3).double()
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    check_derivatives(module, [weight])
    none = torch.zeros(3, 4, requires_grad=True)
    module = SigmaReparametrization()
    module(none).sum().backward()
    assert (module(none) == 0).all() and none.grad.isfinite().all()


def test_a_weight_with_a_nan_has_no_spectral_norm():
    weight = torch.eye(3)
    weight[0, 1] = torch.nan
    assert SigmaReparametrization()(weight).isnan().all()


def test_a_layer_trains_its_gain_alone_as_a_norm():
    torch.manual_seed(0)
    layer = nn.Linear(6, 4)
    before = layer.weight.detach().clone()
    register_parametrization(layer, "weight", SigmaReparametrization(float(torch.linalg.matrix_norm(before, 2))))
    torch.testing.assert_close(layer.weight, before)
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.5)
    for _ in range(5):
        optimiser.zero_grad()
        layer(torch.randn(8, 6)).square().sum().backward()
        optimiser.step()
        gain = layer.parametrizations.weight[0].gain
        torch.testing.assert_close(torch.linalg.matrix_norm(layer.weight, 2), gain.abs())
    assert SigmaReparametrization()(before.bfloat16()).dtype == torch.bfloat16


@every_row("gain", [0.0, -1.0, math.inf, "1"])
def test_the_gain_must_be_positive(gain):
    with pytest.raises((TypeError, ValueError), match=r"gain must be (positive and finite|a number), got"):
        SigmaReparametrization(gain)


def test_no_matrix():
    with pytest.raises(ValueError, match=r"\(\*batch, m, n\), got \(4,\)"):
        SigmaReparametrization()(torch.ones(4))
    with pytest.raises(TypeError, match=r"got a tensor of torch\.int64"):
        SigmaReparametrization()(torch.ones(4, 4, dtype=torch.long))


def test_a_stack_is_its_blocks_in_turn():
    first, second = block(), block(steps=2, num_memories=3)
    stack, x = EnergyTransformerStack([first, second, first]), tokens(3)
    padding = torch.arange(5) >= torch.tensor([[5], [3], [4]])
    wanted, energies = x, []
    for layer in (first, second, first):
        wanted, path = layer(wanted, padding, need_energies=True)
        energies.append(path)
    found, given = stack(x, padding, need_energies=True)
    assert torch.equal(found, wanted)
    assert torch.equal(stack(x, padding), wanted)
    assert all(torch.equal(one, other) for one, other in zip(given, energies, strict=True))
    assert len(list(stack.parameters())) == len(list(first.parameters())) + len(list(second.parameters()))


def test_stacks_that_cannot_be_made():
    with pytest.raises(ValueError, match="got no block"):
        EnergyTransformerStack([])
    with pytest.raises(ValueError, match=r"one size, got \[4, 8\]"):
        EnergyTransformerStack([block(), EnergyTransformer(4, 2)])
    with pytest.raises(TypeError, match="must be EnergyTransformer modules, got Linear"):
        EnergyTransformerStack([nn.Linear(8, 8)])


def test_weights_start_normal_with_a_variance_of_one_over_the_width():
    torch.manual_seed(0)
    block = EnergyTransformer(64, 4)
    for weight in (block.key_weight, block.query_weight, block.memories):
        # Of n normal numbers the deviation is known to 1/√(2n): five of that.
        assert abs(8 * float(weight.detach().std()) - 1) < 5 / (2 * weight.numel()) ** 0.5
