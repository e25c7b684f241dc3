"""The differentiable linear solve against dense linear algebra, in every mode and order."""

from functools import partial

import pytest
import torch
from tests.support.rows import every_row, some_slow
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from massieu.errors import ConvergenceError
from massieu.solve import GMRES, ConjugateGradients, Dense, Status, linear_solve

DOUBLE = torch.float64
EXACT = ConjugateGradients(rtol=1e-13), GMRES(rtol=1e-13), Dense(), GMRES(rtol=1e-13, memory=2, cycles=100)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def times(vector, matrix):
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def definite(vector, factor):
    """(I + FFᵀ)x."""
    return vector + times(times(vector, factor.mT), factor)


def factored(solver, factor, right, **options):
    """A⁻¹ right of a matrix that suits the solver."""
    product = definite if isinstance(solver, ConjugateGradients) else lambda x, f: 2 * x + times(x, f)
    return linear_solve(product, right, (factor,), solver=solver, **options).value


def dense(solver, factor, right):
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype)
    matrix = eye + factor @ factor.mT if isinstance(solver, ConjugateGradients) else 2 * eye + factor
    # Within `vmap` and forward mode second derivatives of torch.linalg.solve fail, or are wrong (torch 2.13).
    return times(right, torch.linalg.inv(matrix))


FACTOR, RIGHT = normal(3, 3) / 2, normal(2, 3, seed=1)
SINGULAR = torch.diag(torch.tensor([1.0, 0.0], dtype=DOUBLE))


@every_row("solver", EXACT)
def test_value_gradients_and_tangents_are_those_of_dense_linear_algebra(solver):
    inputs = (normal(2, 3, 3, seed=4) / 2).requires_grad_(), RIGHT.clone().requires_grad_()
    found, expected = factored(solver, *inputs), dense(solver, *inputs)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    gradients = [torch.autograd.grad(value, inputs, RIGHT.cos()) for value in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)
    inputs = tuple(part.detach() for part in inputs)
    moved = [jvp(partial(solve, solver), inputs, tuple(map(torch.cos, inputs)))[1] for solve in (factored, dense)]
    torch.testing.assert_close(*moved, rtol=1e-9, atol=1e-9)


@pytest.mark.medium
@every_row(
    ("solver", "transform"),
    [
        (EXACT[0], lambda f: jacfwd(jacrev(f, (0, 1)), (0, 1))),
        (EXACT[1], lambda f: jacrev(jacrev(f, (0, 1)), (0, 1))),
        (EXACT[2], lambda f: jacfwd(jacrev(f, (0, 1)), (0, 1))),
        (EXACT[3], lambda f: jacfwd(f, (0, 1))),
    ],
    ids=["forward of reverse", "reverse of reverse", "forward of reverse, dense", "forward"],
)
def test_transforms(solver, transform):
    def loss(solve):
        return lambda factor, right: (partial(solve, solver)(factor, right).sin() * torch.arange(1, 4)).sum()

    given, expected = (transform(loss(solve))(FACTOR, RIGHT[0]) for solve in (factored, dense))
    torch.testing.assert_close(given, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.medium
@some_slow("solver", EXACT, 1)
def test_gradients_of_both_orders_and_modes_against_differences(solver):
    inputs = FACTOR[:2, :2].clone().requires_grad_(), RIGHT[:, :2].clone().requires_grad_()
    assert gradcheck(partial(factored, solver), inputs, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(partial(factored, solver), inputs, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.medium
@some_slow("transform", [lambda f: jacfwd(jacfwd(f)), lambda f: jacrev(hessian(f))], 1, ids=["ff", "rfr"])
def test_nested_forward_mode_and_third_order(transform):
    def loss(solve):
        return lambda factor: solve(GMRES(rtol=1e-13), factor, RIGHT).square().sum()

    given, expected = (transform(loss(solve))(FACTOR) for solve in (factored, dense))
    torch.testing.assert_close(given, expected, rtol=1e-7, atol=1e-7)


def test_vmap_gives_the_batch():
    factors = normal(4, 3, 3, seed=2) / 2
    mapped = vmap(grad(lambda factor: factored(EXACT[1], factor, RIGHT[0]).sum()))(factors)
    inputs = factors.clone().requires_grad_()
    (expected,) = torch.autograd.grad(dense(EXACT[1], inputs, RIGHT[0].expand(4, 3)).sum(), inputs)
    torch.testing.assert_close(mapped, expected, rtol=1e-9, atol=1e-9)


def test_parameters_are_trees_and_half_precision_is_promoted():
    scale = torch.tensor([2.0, 4.0], dtype=torch.bfloat16, requires_grad=True)
    found = linear_solve(lambda x, p: p["scale"] * x, torch.ones(2), ({"scale": scale, "name": "diagonal"},))
    torch.testing.assert_close(found.value, torch.tensor([0.5, 0.25]))
    found.value.sum().backward()
    torch.testing.assert_close(scale.grad, torch.tensor([-0.25, -0.0625], dtype=torch.bfloat16))


def test_symmetric_solvers_ask_for_no_transpose():
    """The product is one that autograd does not see."""
    right = torch.ones(2, dtype=DOUBLE, requires_grad=True)
    matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=DOUBLE)
    found = linear_solve(lambda x: times(x.detach(), matrix), right, solver=ConjugateGradients())
    found.value[0].backward()
    torch.testing.assert_close(right.grad, torch.linalg.inv(matrix)[0], rtol=1e-9, atol=1e-9)


def test_what_was_not_solved_is_said_or_raised():
    right = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=DOUBLE)
    with pytest.raises(
        ConvergenceError, match=r"not solved for 1 of 2 items \(SINGULAR .* residual 1\): A is singular"
    ):
        linear_solve(times, right, (SINGULAR,))
    found = linear_solve(times, right, (SINGULAR,), throw=False)
    assert found.status.tolist() == [Status.CONVERGED, Status.SINGULAR]
    short = linear_solve(definite, RIGHT, (FACTOR,), solver=ConjugateGradients(max_steps=1), throw=False)
    assert short.status.tolist() == [Status.MAX_STEPS] * 2
    residual = (RIGHT - definite(short.value, FACTOR)).norm(dim=-1)
    torch.testing.assert_close(short.residual, residual)


def test_an_unsolved_transpose_raises_in_the_backward_pass():
    right = torch.tensor([1.0, 0.0], dtype=DOUBLE, requires_grad=True)
    found = linear_solve(times, right, (SINGULAR,))
    with pytest.raises(ConvergenceError, match="A is singular"):
        found.value.sum().backward()


def test_what_is_captured_raises():
    matrix = FACTOR.clone().requires_grad_()
    with pytest.raises(ValueError, match=r"product uses a tensor of shape \(3, 3\) that requires grad"):
        linear_solve(lambda x: times(x, matrix), RIGHT)


@every_row(
    ("given", "error", "said"),
    [
        ({"right": torch.tensor(1.0)}, ValueError, r"right must have shape \(\*items, n\), got a number"),
        ({"solver": "gmres"}, TypeError, r"such as GMRES\(\), ConjugateGradients\(\) or Dense\(\), got 'gmres'"),
        (
            {"product": lambda x: x.sum()},
            ValueError,
            r"product must return its first argument's shape and dtype, \(2, 3\)",
        ),
        ({"parameters": FACTOR}, TypeError, "parameters must be a tuple"),
    ],
)
def test_bad_calls_say_what_is_needed(given, error, said):
    arguments = {"product": lambda x: 2 * x, "right": RIGHT} | given
    with pytest.raises(error, match=said):
        linear_solve(arguments.pop("product"), arguments.pop("right"), **arguments)


@pytest.mark.slow
def test_compiled():
    """GMRES is compiled below, and as the solver of fixed points' derivatives."""
    torch._dynamo.reset()
    solver = EXACT[0]
    inputs = FACTOR.clone().requires_grad_(), RIGHT.clone().requires_grad_()
    compiled = torch.compile(partial(factored, solver), fullgraph=True, backend="aot_eager")
    given, expected = compiled(*inputs), factored(solver, *inputs)
    torch.testing.assert_close(given, expected, rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(value.sin().sum(), inputs) for value in (given, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_compiled_inside_transforms_and_unsolved():
    torch._dynamo.reset()
    factor = FACTOR[:2, :2]
    loss = lambda factor: factored(GMRES(memory=2, cycles=1), factor, RIGHT[:, :2]).sin().sum()  # noqa: E731
    given = torch.compile(hessian(loss), fullgraph=True, backend="aot_eager")(factor)
    torch.testing.assert_close(given, hessian(loss)(factor), rtol=1e-8, atol=1e-8)
    right = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=DOUBLE)
    lost = torch.compile(lambda right: linear_solve(times, right, (SINGULAR,)).value, backend="aot_eager")(right)
    assert lost[0].isfinite().all() and lost[1].isnan().all()
