"""Implicit layers: the linear case in closed form, unrolled iterations, and all sets of active units by enumeration."""

import itertools
import math

import pytest
import torch
from tests.support.derivatives import check_derivatives
from torch import Tensor, nn

from massieu.errors import ConvergenceError, ConvergenceWarning
from massieu.nn import Equilibrium, MonotoneEquilibrium
from massieu.solve import OneStep, Picard, Status, fixed_point

F64 = torch.float64
SOLVED = 1e-8
"""Of fixed points: the residual is 1e-10 of the state, and maps that contract by .9 or less make ten of it."""


class Linear(nn.Module):
    """z ↦ Wz + x, or with one argument z ↦ Wz."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        weight = torch.randn(size, size, dtype=F64)
        self.weight = nn.Parameter(0.8 * weight / torch.linalg.matrix_norm(weight, 2))

    def forward(self, state: Tensor, inputs: Tensor) -> Tensor:
        return state @ self.weight.mT + inputs


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


# Any block -----------------------------------------------------------------------------------------------------------


def test_a_linear_block_is_the_inverse_with_its_gradients():
    block = Linear()
    layer, inputs = Equilibrium(block), draw(5, 3).requires_grad_()
    exact = inputs @ torch.linalg.inv(torch.eye(3, dtype=F64) - block.weight).mT
    output = layer(inputs)
    torch.testing.assert_close(output, exact, rtol=SOLVED, atol=SOLVED)
    gradients = [torch.autograd.grad(value.pow(3).sum(), [inputs, block.weight]) for value in (output, exact)]
    for gradient, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-7, atol=1e-7)
    assert layer.convergence is not None
    assert bool((layer.convergence.status == Status.CONVERGED).all())


def test_a_block_of_one_tensor_gets_the_sum():
    torch.manual_seed(0)
    block, inputs = nn.Linear(3, 3, dtype=F64), draw(4, 3)
    layer = Equilibrium(block)
    assert layer.injection == "sum"
    with torch.no_grad():
        block.weight.mul_(0.5)
    exact = (inputs @ block.weight.mT + block.bias) @ torch.linalg.inv(torch.eye(3, dtype=F64) - block.weight).mT
    torch.testing.assert_close(layer(inputs), exact, rtol=SOLVED, atol=SOLVED)


@pytest.mark.medium
def test_first_and_second_derivatives():
    block = Linear(2)

    def function(inputs: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(Equilibrium(Squashed(block)), {"block.linear.weight": weight}, (inputs,))

    check_derivatives(function, (draw(2, 2), block.weight.detach()))


class Squashed(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, state: Tensor, inputs: Tensor) -> Tensor:
        return torch.tanh(self.linear(state, inputs))


def encoder(dropout: float = 0.0) -> nn.Module:
    """A layer of transformers whose fixed point attracts: small weights, and a norm of a long state."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True, dtype=F64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(0.5)
    return layer


@pytest.mark.medium
def test_a_layer_of_transformers_is_what_many_copies_of_it_give():
    block, inputs = encoder(), draw(2, 5, 8).requires_grad_()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    layer = Equilibrium(block)
    output = layer(inputs, src_key_padding_mask=padding)
    state = torch.zeros_like(inputs)
    for _ in range(120):
        state = block(state + inputs, src_key_padding_mask=padding)
    torch.testing.assert_close(output, state, rtol=1e-7, atol=1e-7)
    of = [inputs, *block.parameters()]
    gradients = [torch.autograd.grad(value.square().sum(), of) for value in (output, state)]
    for gradient, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-6)
    assert layer.convergence is not None
    assert layer.convergence.status.shape == (2,)  # all tokens of a sequence are one item


@pytest.mark.medium
def test_dropout_is_drawn_once_a_call_and_the_gradient_is_of_that_draw():
    layer, inputs = Equilibrium(encoder(dropout=0.2)), draw(1, 3, 8)

    def function(inputs: Tensor) -> Tensor:
        torch.manual_seed(5)
        output = layer(inputs)
        torch.rand(1)  # before the backward pass, what else a model draws
        return output

    check_derivatives(function, (inputs,), second=False)
    assert layer.convergence is not None
    assert bool((layer.convergence.status == Status.CONVERGED).all())
    first, second = layer(inputs), layer(inputs)
    assert not torch.allclose(first, second)
    layer.eval()
    torch.testing.assert_close(layer(inputs), layer(inputs), rtol=0, atol=0)


def test_random_numbers_after_a_call_do_not_depend_on_its_steps():
    layer = Equilibrium(encoder(dropout=0.2))
    drawn = []
    for max_steps in (1, 30):
        layer.max_steps = max_steps
        torch.manual_seed(3)
        with pytest.warns(ConvergenceWarning) if max_steps == 1 else torch.no_grad():
            layer(draw(1, 3, 8))
        drawn.append(torch.rand(()))
    assert drawn[0] == drawn[1]


def test_the_state_may_have_another_shape_than_the_input():
    class Block(nn.Module):
        def forward(self, state: Tensor, inputs: Tensor, factor: Tensor) -> Tensor:
            return 0.5 * state + factor * inputs.sum(-1, keepdim=True)

    inputs, factor = draw(2, 3), torch.tensor(2.0, dtype=F64, requires_grad=True)
    output = Equilibrium(Block())(inputs, factor, start=torch.zeros(2, 4, dtype=F64))
    wanted = 4 * inputs.sum(-1, keepdim=True).expand(2, 4)  # z = z/2 + 2·Σx
    torch.testing.assert_close(output, wanted, rtol=SOLVED, atol=SOLVED)
    (gradient,) = torch.autograd.grad(output.sum(), factor)
    torch.testing.assert_close(gradient, 8 * inputs.sum())


def test_an_item_without_a_fixed_point_leaves_the_others_alone():
    layer = Equilibrium(Linear())
    inputs = draw(3, 3)
    inputs[1, 0] = torch.nan
    inputs.requires_grad_()
    with pytest.warns(ConvergenceWarning, match=r"Equilibrium: 1 of 3 items .*NOT_FINITE"):
        output = layer(inputs)
    assert bool(output[[0, 2]].isfinite().all())
    output[[0, 2]].sum().backward()
    assert layer.block.weight.grad is not None
    assert bool(layer.block.weight.grad.isfinite().all())
    torch.testing.assert_close(output[0], Equilibrium(Linear())(inputs[:1].detach())[0], rtol=SOLVED, atol=SOLVED)
    with pytest.raises(ConvergenceError, match="no fixed point for 1 of 3 items"):
        Equilibrium(Linear(), throw=True)(inputs.detach())


def test_no_items_and_one_step_gradients():
    assert Equilibrium(Linear())(draw(0, 3)).shape == (0, 3)
    layer, inputs = Equilibrium(Linear(), adjoint=OneStep()), draw(2, 3).requires_grad_()
    (gradient,) = torch.autograd.grad(layer(inputs).sum(), inputs)
    torch.testing.assert_close(gradient, torch.ones_like(inputs))  # ∂f/∂x alone


def test_errors_say_what_is_needed():
    with pytest.raises(TypeError, match=r"block must be a torch\.nn\.Module, got "):
        Equilibrium(torch.tanh)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="injection must be 'argument' or 'sum'"):
        Equilibrium(nn.Linear(2, 2), injection="add")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="items must not act on each other, but 0 is a BatchNorm1d in training"):
        Equilibrium(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))(torch.ones(3, 2))
    with pytest.raises(ValueError, match="must return its first argument's shape and dtype"):
        Equilibrium(nn.Linear(2, 3))(torch.ones(1, 2))
    with pytest.raises(TypeError, match="must return a tensor of its first argument's shape, got tuple"):
        Equilibrium(nn.LSTM(2, 2))(torch.ones(1, 3, 2))
    with pytest.raises(TypeError, match=r"inputs is float64, the module's parameters float32"):
        Equilibrium(nn.Linear(2, 2))(draw(1, 2))


@pytest.mark.parametrize("parameters", [(), (torch.ones(2), torch.ones(2))])
def test_the_solver_says_how_many_parameters_a_function_takes(parameters):
    with pytest.raises(TypeError, match=r"function cannot be called with the state and \d parameters"):
        fixed_point(lambda z, x: 0.5 * z + x, torch.zeros(2), parameters)
    with pytest.raises(TypeError, match=r"or take massieu.nn.Equilibrium, which passes the module's own parameters"):
        fixed_point(Linear(), torch.zeros(2), parameters)


# A block that always converges ---------------------------------------------------------------------------------------


def monotone(hidden_size: int = 4, scale: float = 1.0, **options) -> MonotoneEquilibrium:
    torch.manual_seed(0)
    layer = MonotoneEquilibrium(3, hidden_size, dtype=F64, **options)
    with torch.no_grad():
        layer.symmetric_factor.mul_(scale)
        layer.skew_factor.mul_(scale)
    return layer


def explicit_weight(layer: MonotoneEquilibrium) -> Tensor:
    """W by its formula."""
    a, b = layer.symmetric_factor, layer.skew_factor
    return (1 - layer.monotonicity) * torch.eye(len(a), dtype=F64) - a.T @ a + b - b.T


def by_enumeration(weight: Tensor, field: Tensor) -> Tensor:
    """The z = relu(Wz + field) of one item, by all 2ⁿ sets of units that are not 0: exactly one of them fits."""
    size = len(field)
    solutions = []
    for active in itertools.product((False, True), repeat=size):
        chosen = torch.tensor(active)
        z = torch.zeros(size, dtype=F64)
        matrix = torch.eye(int(chosen.sum()), dtype=F64) - weight[chosen][:, chosen]
        z[chosen] = torch.linalg.solve(matrix, field[chosen])
        if bool((z[chosen] > 0).all()) and bool((weight @ z + field)[~chosen].le(0).all()):
            solutions.append(z)
    assert len(solutions) == 1
    return solutions[0]


@pytest.mark.parametrize("scale", [1.0, 10.0])
@pytest.mark.parametrize("monotonicity", [1.0, 0.1])
def test_the_fixed_point_is_the_one_of_all_sets_of_active_units(scale, monotonicity):
    """At ten times the weights, plain iteration of relu(W· + …) diverges."""
    layer, inputs = monotone(scale=scale, monotonicity=monotonicity), draw(6, 3)
    field = inputs @ layer.input_weight.T + layer.bias
    weight = explicit_weight(layer)
    torch.testing.assert_close(layer.weight, weight)
    wanted = torch.stack([by_enumeration(weight.detach(), each) for each in field.detach()])
    assert 0.2 < float((wanted > 0).double().mean()) < 0.9
    result = layer.solve(inputs)
    assert bool(result.converged.all())
    # The residual is 1e-10 of the state, and the distance at most residual/(1 − rate).
    tolerance = 1e-10 / (1 - float(layer.rate))
    torch.testing.assert_close(result.value, wanted, rtol=tolerance, atol=10 * tolerance)


def test_the_state_comes_nearer_by_the_rate():
    """‖u_k − u*‖ ≤ rate^k·‖u*‖ from 0, with u* = z* − ((I − W)z* − Ux − b)/L; relu brings no two points further apart."""
    layer, inputs = monotone(8, scale=4.0, monotonicity=0.5), draw(5, 3)
    field = (inputs @ layer.input_weight.T + layer.bias).detach()
    operator = torch.eye(8, dtype=F64) - explicit_weight(layer).detach()
    largest = float(torch.linalg.svdvals(operator)[0])
    rate = math.sqrt(1 - 0.5 / largest)
    assert float(layer.rate) == pytest.approx(rate, rel=1e-12)
    end = torch.stack([by_enumeration(explicit_weight(layer).detach(), each) for each in field])
    state = end - (end @ operator.T - field) / largest
    layer.method = Picard()
    for steps in (1, 3, 10, 30):
        layer.max_steps = steps
        distance = (layer.solve(inputs).value - end).norm(dim=-1)
        assert bool((distance <= rate**steps * state.norm(dim=-1) + 1e-9).all())


def test_the_operator_is_monotone_and_every_part_of_it_counts():
    layer = monotone(5, scale=3.0, monotonicity=0.3)
    operator = torch.eye(5, dtype=F64) - layer.weight.detach()
    assert float(torch.linalg.eigvalsh((operator + operator.T) / 2)[0]) >= 0.3 - 1e-12
    skew = (operator - operator.T) / 2
    torch.testing.assert_close(skew, layer.skew_factor.T - layer.skew_factor)


@pytest.mark.medium
def test_derivatives_of_the_monotone_layer():
    layer, inputs = monotone(3), draw(2, 3)
    names = [name for name, _ in layer.named_parameters()]

    def function(inputs: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (inputs,))

    check_derivatives(function, (inputs, *(one.detach() for one in layer.parameters())), forward=True)


def test_a_monotone_layer_trains_with_large_weights():
    layer, inputs = monotone(16, scale=5.0, monotonicity=0.2), draw(8, 3)
    layer(inputs).square().sum().backward()
    assert all(bool(one.grad.isfinite().all()) and bool(one.grad.any()) for one in layer.parameters())
    with pytest.raises(ValueError, match="monotonicity must be positive"):
        MonotoneEquilibrium(2, 2, monotonicity=0.0)
    with pytest.raises(ValueError, match="inputs must have 3 numbers in its last dimension"):
        layer(draw(2, 4))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Equilibrium(Squashed(Linear()), method=Picard()), id="block", marks=pytest.mark.slow),
        pytest.param(lambda: monotone(3, method=Picard()), id="monotone", marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_both_compile_to_one_graph(make):
    """Other methods and derivatives in compiled code are those of `fixed_point`, which has tests of them."""
    layer, inputs = make(), draw(2, 3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(inputs), layer(inputs), rtol=1e-9, atol=1e-9)
