"""What modules do where an iteration does not end: they go on, keep what became of each item, and say so once."""

import warnings

import pytest
import torch
from tests.support.rows import every_row
from torch import Tensor, nn

from massieu.errors import ConvergenceError, ConvergenceWarning
from massieu.nn import Attention, ConditionalMeanHeads, Hopfield, ImplicitHeads, SpinAttention, TAPHeads
from massieu.solve import ConjugateGradients, Implicit, Status, fixed_point


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def modules(**options) -> dict[str, nn.Module]:
    """Modules that need more steps than they have."""
    torch.manual_seed(0)
    return {
        "Hopfield": Hopfield(8, 2, steps=None, scale=3.0, state=nn.Linear(8, 8), stored=nn.Linear(8, 8), **options),
        "ImplicitHeads": Attention(8, 2, batch_first=True, heads=ImplicitHeads(alpha=0.9, scale=3.0, **options)),
        "TAPHeads": Attention(8, 2, batch_first=True, heads=TAPHeads(strength=20.0, **options)),
        "SpinAttention": SpinAttention(8, 2, steps=None, scale=1.9, **options),
        "SpinAttention, second order": SpinAttention(8, 2, steps=2, order="second", scale=1.9, **options),
    }


def output_of(module: nn.Module, *tokens: Tensor) -> Tensor:
    return module(*tokens)[0] if isinstance(module, Attention) else module(*tokens)


def iterating(module: nn.Module) -> nn.Module:
    """The one that keeps what became of each item."""
    return module.heads if isinstance(module, Attention) else module


ITEMS = {
    "Hopfield": (3, 2, 5),
    "ImplicitHeads": (3, 2, 5),
    "TAPHeads": (3, 2),
    "SpinAttention": (3, 2),
    "SpinAttention, second order": (3, 2, 5),
}


@pytest.mark.parametrize("name", ITEMS)
def test_a_module_goes_on_and_says_so_once(name: str):
    module, tokens = modules(max_steps=1)[name], draw(3, 5, 8)
    assert iterating(module).convergence is None
    with pytest.warns(ConvergenceWarning, match="have not converged.*MAX_STEPS.*residual") as told:
        output = output_of(module, tokens)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = output_of(module, tokens)
    assert torch.equal(output, again)
    assert output.isfinite().all()
    found = iterating(module).convergence
    assert found is not None
    assert found.status.shape == found.residual.shape == ITEMS[name]
    assert (found.status == Status.MAX_STEPS).any()
    assert (found.residual[found.status == Status.MAX_STEPS] > 0).all()
    assert not found.residual.requires_grad
    output.square().sum().backward()
    assert all(parameter.grad is None or bool(parameter.grad.isfinite().all()) for parameter in module.parameters())


@every_row("name", ITEMS)
def test_a_module_raises_if_asked_to(name: str):
    with pytest.raises(ConvergenceError, match="residual"):
        modules(max_steps=1, throw=True)[name](draw(3, 5, 8))


@every_row("name", ["ImplicitHeads", "TAPHeads", "Hopfield"])
def test_an_item_that_is_not_finite_has_its_own_status_and_spoils_no_other(name: str):
    module, tokens = modules()[name], draw(3, 5, 8)
    if name == "TAPHeads":
        module.heads.strength = 0.5
    wanted = output_of(module, tokens[1:])
    tokens[0, 2] = torch.nan
    with pytest.warns(ConvergenceWarning, match="NOT_FINITE"):
        output = output_of(module, tokens)
    assert (iterating(module).convergence.status[0] == Status.NOT_FINITE).any()
    torch.testing.assert_close(output[1:], wanted)
    assert output[0].isnan().any()


def pushed(z: Tensor, weight: Tensor, drive: Tensor) -> Tensor:
    """A contraction where the weight is below 1; where it is above, z diverges."""
    return weight * z + drive


@every_row("adjoint", ["reverse", "forward in forward"])
def test_items_without_a_fixed_point_have_no_derivative_and_take_none_from_others(adjoint: str):
    """z = w z + d is d/(1 − w) with slopes 1/(1 − w) and d/(1 − w)²; what diverges adds 0 to a shared number."""
    drive = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    share = torch.tensor([[0.5], [3.0], [0.25]], dtype=torch.float64)

    def solved(common: Tensor) -> Tensor:
        parameters = (common * share, drive)
        found = fixed_point(
            pushed, torch.zeros_like(drive), parameters, throw=False, adjoint=Implicit(lost="zero"), max_steps=500
        )
        return torch.where(found.value.abs() < 100, found.value, 0.0).sum()

    one = torch.ones((), dtype=torch.float64)
    expected = (share * drive / (1 - share).square())[[0, 2]].sum()
    if adjoint == "reverse":
        found = torch.func.grad(solved)(one)
    else:
        step = torch.ones_like(one)
        value, found = torch.func.jvp(lambda x: torch.func.jvp(solved, (x,), (step,))[0], (one,), (step,))  # pyright: ignore[reportAssignmentType]
        assert value.isfinite()
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=0)


def test_lost_derivatives_are_nan_unless_asked_for():
    weight = torch.tensor([[0.5], [3.0]], dtype=torch.float64, requires_grad=True)
    found = fixed_point(pushed, torch.zeros(2, 1, dtype=torch.float64), (weight, torch.ones_like(weight)), throw=False)
    (slope,) = torch.autograd.grad(found.value.sum(), weight)
    assert slope[0].isfinite()
    assert slope[1].isnan()
    with pytest.raises(ValueError, match="needs throw=False"):
        fixed_point(pushed, torch.zeros(2, 1), (weight, weight), adjoint=Implicit(lost="zero"))


@pytest.mark.medium
def test_training_goes_on_through_a_query_that_is_at_a_saddle():
    """Two memories and a query between them, where z = Σ p key repels: the other queries train as they do without it."""
    torch.manual_seed(0)
    module = Attention(4, 1, bias=False, batch_first=True, heads=ImplicitHeads(alpha=0.95, scale=40.0)).double()
    tokens, query = draw(1, 6, 4, seed=1).double(), draw(1, 3, 4, seed=2).double()
    query[0, 1] = 0.0
    keys = torch.cat([tokens, -tokens], 1)  # even in the query: 0 is a fixed point, and repels
    with pytest.warns(ConvergenceWarning, match="NOT_ATTRACTING"):
        output, _ = module(query, keys)
    assert module.heads.convergence.status.flatten().tolist() == [0, int(Status.NOT_ATTRACTING), 0]
    gradients = torch.autograd.grad(output[:, [0, 2]].square().sum() + output[:, 1].sum(), [module.in_proj_weight])
    alone, _ = module(query[:, [0, 2]], keys)
    expected = torch.autograd.grad(alone.square().sum(), [module.in_proj_weight])
    torch.testing.assert_close(gradients[0], expected[0], rtol=1e-6, atol=1e-9)


def test_a_transform_keeps_nothing():
    module, tokens = modules()["ImplicitHeads"], draw(3, 5, 8)
    torch.func.vmap(lambda one: module(one.unsqueeze(0))[0])(tokens)
    assert module.heads.convergence is None


def conditional_means(**options) -> Attention:
    torch.manual_seed(0)
    options |= {"method": ConjugateGradients(max_steps=1), "preconditioner_rank": 0}
    return Attention(8, 2, batch_first=True, heads=ConditionalMeanHeads(ridge=1e-3, **options))


def test_conjugate_gradients_that_stop_short_end_no_training():
    module, tokens = conditional_means(), draw(3, 9, 8)
    with pytest.warns(ConvergenceWarning, match="have not converged.*MAX_STEPS") as told:
        output = module(tokens, tokens, tokens, need_weights=False)[0]
    assert len(told) == 1
    found = module.heads.convergence
    assert found is not None
    assert found.status.shape == found.residual.shape == (3, 2, 4)  # batch, heads, value columns
    assert bool((found.status == Status.MAX_STEPS).all())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output.square().sum().backward()
    assert all(parameter.grad is None or bool(parameter.grad.isfinite().all()) for parameter in module.parameters())
    with pytest.raises(ConvergenceError, match="relative residual"):
        conditional_means(throw=True)(tokens, tokens, tokens)


def test_systems_that_have_converged_say_so():
    module, tokens = conditional_means(), draw(3, 9, 8)
    module.heads.method = ConjugateGradients()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(tokens, tokens, tokens, need_weights=False)
    assert module.heads.convergence is not None
    assert bool((module.heads.convergence.status == Status.CONVERGED).all())
    assert float(module.heads.convergence.residual.max()) <= 1e-6
