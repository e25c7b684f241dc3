"""Derivatives of fixed points against dense linear algebra, finite differences and backpropagation through iterates."""

from functools import partial

import pytest
import torch
from tests.support.rows import every_row, some_slow
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils._pytree import tree_leaves

from massieu.errors import ConvergenceError
from massieu.measures import Atoms
from massieu.solve import (
    GMRES,
    Anderson,
    Auto,
    ConjugateGradients,
    Dense,
    Implicit,
    Newton,
    OneStep,
    Picard,
    Status,
    Unrolled,
    fixed_point,
)

DOUBLE = torch.float64
SOLVERS = (GMRES(), ConjugateGradients(), Dense(), GMRES(memory=2, cycles=100))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def forced(z, query, memory, scale=2.0):
    """Attention pulled towards the query; ∂/∂z is symmetric."""
    return 0.5 * query + 0.5 * torch.softmax(scale * z @ memory.mT, -1) @ memory


def general(z, weight, shift):
    return torch.tanh(z @ weight.mT) + shift


QUERY, MEMORY = normal(3, 4, seed=1), 0.7 * normal(6, 4)
WEIGHT = 0.6 * normal(4, 4, seed=2) / 2


def implicit(query, memory, **options):
    return fixed_point(forced, torch.zeros_like(query), (query, memory), **options).value


def iterated(query, memory):
    """Backpropagation through enough plain steps."""
    z = torch.zeros_like(query)
    for _ in range(150):
        z = forced(z, query, memory)
    return z


def loss(solve):
    return lambda query, memory: (solve(query, memory).sin() * torch.arange(1, 5)).sum()


def same(one, other, tolerance=1e-8):
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs)


# --- right to every order, in every mode -----------------------------------------------------------------------------


@pytest.mark.medium
@every_row(("solver", "method"), zip(SOLVERS, [Auto(), Picard(), Anderson(), Newton()], strict=True))
def test_first_derivatives_are_those_of_dense_linear_algebra(solver, method):
    inputs = QUERY.clone().requires_grad_(), MEMORY.clone().requires_grad_()
    found = implicit(*inputs, adjoint=Implicit(solver), method=method)
    cotangent = normal(3, 4, seed=5)
    given = torch.autograd.grad(found, inputs, cotangent)
    value, expected = found.detach(), [torch.zeros_like(QUERY), torch.zeros_like(MEMORY)]
    for place in range(3):
        z, query = value[place], QUERY[place]
        right = torch.linalg.solve((torch.eye(4, dtype=DOUBLE) - jacrev(forced)(z, query, MEMORY)).mT, cotangent[place])
        to_query, to_memory = torch.func.vjp(partial(forced, z), query, MEMORY)[1](right)
        expected[0][place] += to_query
        expected[1] += to_memory
    assert same(given, expected, 1e-8)


@pytest.mark.medium
@some_slow("solver", SOLVERS, 1)
def test_gradients_of_both_orders_and_modes_against_differences(solver):
    inputs = QUERY[:2, :2].clone().requires_grad_(), MEMORY[:3, :2].clone().requires_grad_()

    def solve(query, memory):
        return implicit(query, memory, adjoint=Implicit(solver), rtol=1e-13, atol=1e-13)

    assert gradcheck(solve, inputs, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(solve, inputs, fast_mode=True)


def test_both_modes_where_the_jacobian_is_not_symmetric():
    """z = M z + b: dz = (I − M)⁻¹ db forwards, the transpose backwards."""
    matrix = 0.5 * torch.linalg.qr(torch.randn(5, 5, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))).Q
    shift, direction = torch.arange(5, dtype=DOUBLE), torch.linspace(-1, 2, 5, dtype=DOUBLE)
    inverse = torch.linalg.inv(torch.eye(5, dtype=DOUBLE) - matrix)

    def solved(shift):
        return fixed_point(lambda z, matrix, shift: matrix @ z + shift, torch.zeros_like(shift), (matrix, shift)).value

    back = torch.func.vjp(solved, shift)[1](direction)[0]
    torch.testing.assert_close(back, inverse.mT @ direction, rtol=1e-8, atol=1e-8)
    forth = torch.func.jvp(solved, (shift,), (direction,))[1]
    torch.testing.assert_close(forth, inverse @ direction, rtol=1e-8, atol=1e-8)


@pytest.mark.medium
def test_a_jacobian_that_is_not_symmetric():
    shift = normal(2, 3, seed=3).requires_grad_()
    weight = WEIGHT[:3, :3].clone().requires_grad_()

    def solve(weight, shift):
        return fixed_point(general, torch.zeros_like(shift), (weight, shift), rtol=1e-13, atol=1e-13).value

    assert gradcheck(solve, (weight, shift), check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(solve, (weight, shift), fast_mode=True)


@pytest.mark.medium
@some_slow(
    "derivative",
    [
        lambda f: hessian(f, (0, 1)),
        lambda f: jacrev(jacrev(f, (0, 1)), (0, 1)),
        lambda f: jacrev(jacfwd(f, (0, 1)), (0, 1)),
        lambda f: jacfwd(jacfwd(f, (0, 1)), (0, 1)),
        lambda f: jacrev(jacrev(grad(f))),
        lambda f: jacfwd(jacfwd(grad(f))),
    ],
    1,
    ids=["fr", "rr", "rf", "ff", "rrr", "ffr"],
)
def test_transforms_to_third_order(derivative):
    given, expected = (derivative(loss(solve))(QUERY[:1], MEMORY[:3]) for solve in (implicit, iterated))
    assert same(given, expected, 1e-7)


def test_vmap_gives_the_loop_and_stops_as_early():
    many = normal(2, 3, 4, seed=7)
    batched = vmap(loss(implicit), (0, None))(many, MEMORY)
    assert same(batched, torch.stack([loss(implicit)(query, MEMORY) for query in many]), 1e-12)
    mapped = vmap(grad(loss(implicit), (0, 1)), (0, None))(many, MEMORY)
    for place in range(2):
        assert same([part[place] for part in mapped], grad(loss(implicit), (0, 1))(many[place], MEMORY), 1e-9)
    outside = grad(lambda memory: vmap(loss(implicit), (0, None))(many, memory).sum())(MEMORY)
    assert same(outside, sum(grad(loss(implicit), 1)(query, MEMORY) for query in many), 1e-9)
    calls = []

    def counted(z, query):
        calls.append(None)
        return 0.5 * z + query

    found = vmap(lambda query: fixed_point(counted, torch.zeros(4), (query,), method=Picard()))(torch.ones(5, 4))
    assert found.status.tolist() == [0] * 5
    assert len(calls) == found.evaluations.max() < 40


@pytest.mark.medium
def test_parameters_that_are_measures():
    points, weights = MEMORY[:4, :2].clone().requires_grad_(), normal(4, seed=4).requires_grad_()
    query = QUERY[:2, :2]

    def solve(points, weights):
        atoms = Atoms.create(points, log_weight=weights)
        return fixed_point(
            lambda z, h, q: 0.5 * q + 0.5 * h.mean(z), query, (atoms, query), rtol=1e-13, atol=1e-13
        ).value

    assert gradcheck(solve, (points, weights), fast_mode=True)


def test_half_precision_parameters_get_gradients_of_their_own():
    query, memory = QUERY.bfloat16().requires_grad_(), MEMORY.bfloat16().requires_grad_()
    given = torch.autograd.grad(implicit(query, memory).sum(), (query, memory))
    wide = query.detach().double().requires_grad_(), memory.detach().double().requires_grad_()
    expected = torch.autograd.grad(implicit(*wide).sum(), wide)
    assert [part.dtype for part in given] == [torch.bfloat16] * 2
    assert same([part.double() for part in given], expected, 2e-2)


def test_without_injection_the_query_has_no_gradient():
    query = QUERY.clone().requires_grad_()
    found = fixed_point(lambda z, m: torch.softmax(2 * z @ m.mT, -1) @ m, query, (MEMORY.requires_grad_(),))
    to_query, to_memory = torch.autograd.grad(found.value.sum(), (query, MEMORY), allow_unused=True)
    MEMORY.requires_grad_(False)
    assert to_query is None
    assert to_memory.abs().max() > 0


def test_nothing_of_the_iteration_is_kept():
    sizes = []
    for moves in (5, 200):
        query, kept = QUERY.clone().requires_grad_(), []

        def keep(tensor, kept=kept):
            kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            fixed_point(
                forced, QUERY, (query, MEMORY), method=Picard(), max_steps=moves, rtol=0.0, atol=0.0, throw=False
            )
        sizes.append(sum(kept))
    assert sizes[0] == sizes[1] < 10 * QUERY.numel() + MEMORY.numel()


# --- the other adjoints ----------------------------------------------------------------------------------------------


def test_unrolled_derivatives_are_those_of_the_moves():
    start, query, memory = (part.clone().requires_grad_() for part in (normal(3, 4, seed=8), QUERY, MEMORY))
    found = fixed_point(
        forced, start, (query, memory), method=Picard(damping=0.7), adjoint=Unrolled(), max_steps=3, throw=False
    )
    z = start
    for _ in range(3):
        z = z + 0.7 * (forced(z, query, memory) - z)
    assert same(found.value, z, 1e-14)
    assert not found.residual.requires_grad
    inputs = (start, query, memory)
    assert same(torch.autograd.grad(found.value.sum(), inputs), torch.autograd.grad(z.sum(), inputs), 1e-13)


def test_one_step_derivatives_are_those_of_the_function_at_the_fixed_point():
    query, memory = QUERY.clone().requires_grad_(), MEMORY.clone().requires_grad_()
    value = implicit(query, memory, adjoint=OneStep())
    expected = forced(value.detach(), query, memory)
    inputs = (query, memory)
    assert same(torch.autograd.grad(value.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), 1e-13)
    assert jvp(lambda q: implicit(q, MEMORY, adjoint=OneStep()), (QUERY,), (QUERY,))[1].isfinite().all()


# --- what is refused -------------------------------------------------------------------------------------------------


def _capture(transform, query=QUERY):
    def solve(captured):
        return fixed_point(lambda z: forced(z, captured, MEMORY), QUERY).value.sum()

    return transform(solve)(query)


@every_row(
    "transform",
    [
        grad,
        jacfwd,
        hessian,
        lambda f: lambda q: vmap(grad(f))(torch.stack([q, q])),
        lambda f: lambda q: grad(lambda b: vmap(lambda w: f(w.detach() + b))(torch.stack([q, q])).sum())(q),
        lambda f: lambda q: f(q.clone().requires_grad_()),
        lambda f: lambda q: f(2 * q.clone().requires_grad_()),
    ],
    ids=["grad", "jacfwd", "hessian", "vmap of grad", "grad of vmap", "leaf", "computed"],
)
def test_captured_parameters_raise(transform):
    with pytest.raises(ValueError, match=r"uses a tensor.* that requires grad and is not among its parameters"):
        _capture(transform)


@every_row("adjoint", [Implicit(), OneStep(), Unrolled()])
def test_a_captured_module_raises_and_names_the_shape(adjoint):
    layer = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"a tensor of shape \(4, 4\) that requires grad.*functional_call"):
        fixed_point(lambda z: torch.tanh(layer(z)), torch.zeros(2, 4), method=Picard(), adjoint=adjoint)


def test_what_is_captured_without_need_of_a_gradient_is_fine():
    needs = QUERY.clone().requires_grad_()
    with torch.no_grad():
        assert fixed_point(lambda z: forced(z, needs, MEMORY), QUERY).converged.all()
    fixed_point(lambda z, m: forced(z, needs.detach(), m), QUERY, (MEMORY.clone().requires_grad_(),))


def test_no_derivative_at_a_saddle():
    memory = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=DOUBLE, requires_grad=True)
    starts = torch.tensor([[0.0, 0.0], [0.9, 0.0]], dtype=DOUBLE)

    def step(z, memory):
        return torch.softmax(4 * z @ memory.mT, -1) @ memory

    with pytest.raises(ConvergenceError, match="came to a saddle"):
        fixed_point(step, starts, (memory,))
    found = fixed_point(step, starts, (memory,), throw=False)
    assert found.status.tolist() == [Status.NOT_ATTRACTING, Status.CONVERGED]
    (both,) = torch.autograd.grad(found.value.sum(), memory, retain_graph=True)
    assert both.isnan().any()
    # Left out of the loss, it does no harm.
    (kept,) = torch.autograd.grad(found.value[found.converged].sum(), memory)
    assert kept.isfinite().all()


def test_a_singular_system_raises_in_the_backward_pass():
    shift = torch.zeros(2, dtype=DOUBLE, requires_grad=True)

    def identity_along_an_axis(z, shift):
        return torch.stack([z[..., 0], 0.5 * z[..., 1]], -1) + shift

    found = fixed_point(identity_along_an_axis, shift.detach(), (shift,), adjoint=Implicit(check_attraction=False))
    with pytest.raises(ConvergenceError, match=r"SINGULAR.*I − J is singular.*try Implicit\(GMRES\(memory=100\)\)"):
        found.value.sum().backward()
    quiet = fixed_point(
        identity_along_an_axis, shift.detach(), (shift,), adjoint=Implicit(check_attraction=False), throw=False
    )
    assert torch.autograd.grad(quiet.value.sum(), shift)[0].isnan().all()


def test_conjugate_gradients_raise_where_the_fixed_point_is_no_minimum():
    shift = torch.ones(1, dtype=DOUBLE, requires_grad=True)
    found = fixed_point(
        lambda z, s: 3 * torch.tanh(z) * s,
        torch.zeros(1, dtype=DOUBLE),
        (shift,),
        adjoint=Implicit(ConjugateGradients(), check_attraction=False),
    )
    with pytest.raises(ConvergenceError, match="not symmetric positive definite"):
        found.value.sum().backward()
