"""Compiled whole, everything is what it is eagerly."""

import pytest
import torch
from torch.func import hessian, vmap

from massieu.solve import (
    Anderson,
    ConjugateGradients,
    Dense,
    Implicit,
    Newton,
    OneStep,
    Picard,
    Unrolled,
    fixed_point,
)

DOUBLE = torch.float64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


MASK = torch.tensor([0.0, 0.0, 0.0, 0.0, -torch.inf, 0.0], dtype=DOUBLE)


def forced(z, query, memory):
    # The mask is captured, which is fine as it needs no gradient.
    return 0.7 * query + 0.3 * torch.softmax(2 * z @ memory.mT + MASK, -1) @ memory


def solve(query, memory, **options):
    return fixed_point(forced, torch.zeros_like(query), (query, memory), **options)


def agrees(backend: str, **options) -> None:
    torch._dynamo.reset()
    inputs = normal(3, 4, seed=1).requires_grad_(), normal(6, 4).requires_grad_()
    compiled = torch.compile(lambda query, memory: solve(query, memory, **options), fullgraph=True, backend=backend)
    given, expected = compiled(*inputs), solve(*inputs, **options)
    for name in ("value", "status", "steps", "evaluations", "residual"):
        assert torch.allclose(getattr(given, name), getattr(expected, name), rtol=1e-9, atol=1e-12)
    # The last moves may be no more than 64 roundings long.
    assert torch.allclose(given.lipschitz_estimate, expected.lipschitz_estimate, rtol=0.1)
    gradients = [torch.autograd.grad(found.value.sin().sum(), inputs) for found in (given, expected)]
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"adjoint": Implicit(Dense())},
        {"method": Picard(), "adjoint": Unrolled(), "max_steps": 3, "throw": False},
        {"method": Newton(), "adjoint": OneStep()},
        {"method": Anderson(), "adjoint": Implicit(ConjugateGradients())},
    ],
    ids=["dense", "unrolled", "Newton", "Anderson"],
)
def test_compiled_without_a_compiler(options):
    agrees("aot_eager", **options)


@pytest.mark.slow
@pytest.mark.needs("compiler")
def test_compiled():
    """A loop as machine code, whose kernels take seconds each; other methods, and loops of derivatives, as graphs alone."""
    agrees("inductor", method=Picard(), adjoint=OneStep())


@pytest.mark.slow
@pytest.mark.parametrize("transform", [hessian, vmap])
def test_compiled_inside_transforms(transform):
    """A transform makes as many copies of the loop's body as it may take steps."""
    torch._dynamo.reset()
    memory, query = normal(6, 4), normal(3, 4, seed=1)
    adjoint = Implicit(check_attraction=False)

    def loss(query):
        return solve(query, memory, method=Picard(), max_steps=8, rtol=1e-2, adjoint=adjoint).value.sin().sum()

    whole = transform(loss)
    assert bool(whole(query).isfinite().all())
    given = torch.compile(whole, fullgraph=True, backend="aot_eager")(query)
    assert torch.allclose(given, whole(query), rtol=1e-8, atol=1e-8)


@pytest.mark.slow
def test_other_dampings_compile_in_one_process():
    """A second damping must not become an input of the graph, which its loops cannot have."""
    torch._dynamo.reset()

    def value(query, memory, method):
        return solve(query, memory, method=method, adjoint=Implicit(Dense())).value

    compiled = torch.compile(value, fullgraph=True, backend="eager")
    inputs = normal(3, 4, seed=1).requires_grad_(), normal(6, 4)
    for damping in (1.0, 0.5):
        method = Picard(damping=damping)
        torch.testing.assert_close(compiled(*inputs, method), value(*inputs, method), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_what_cannot_be_raised_becomes_nan():
    torch._dynamo.reset()

    def both(start, throw):
        return fixed_point(
            lambda z, a: a * z + 1.0, start, (torch.tensor([[0.5], [3.0]]),), method=Picard(), throw=throw
        )

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    start = torch.zeros(2, 1)
    assert torch.allclose(compiled(start, True).value, torch.tensor([[2.0], [torch.nan]]), atol=1e-4, equal_nan=True)
    assert compiled(start, False).value.isfinite().all()
    assert compiled(start, False).converged.tolist() == [True, False]


@pytest.mark.medium
def test_captured_parameters_raise():
    torch._dynamo.reset()
    weight = torch.ones(2, requires_grad=True)

    def bad(start):
        return fixed_point(lambda z: 0.5 * z + weight, start).value

    with pytest.raises(Exception, match="requires grad and is not among its parameters"):
        torch.compile(bad, fullgraph=True, backend="aot_eager")(torch.zeros(2))


@pytest.mark.slow
def test_compiled_with_a_tensor_twice_among_the_parameters():
    torch._dynamo.reset()
    inputs = normal(3, 4, seed=1).requires_grad_(), normal(6, 4).requires_grad_()

    def twice(query, memory):
        return fixed_point(
            lambda z, first, second, memory: forced(z, first - second.cos(), memory),
            query,
            (query, query, memory),
            method=Picard(),
            adjoint=Implicit(Dense(), check_attraction=False),
        ).value

    given, expected = torch.compile(twice, fullgraph=True, backend="aot_eager")(*inputs), twice(*inputs)
    assert torch.allclose(given, expected, rtol=1e-9, atol=1e-12)
    gradients = [torch.autograd.grad(found.sin().sum(), inputs) for found in (given, expected)]
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_compiled_once_for_all_sizes():
    """`dynamic=True` makes symbols of numbers too, of which loops take whole ones alone."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda query, memory: solve(query, memory), fullgraph=True, backend=counter, dynamic=True)
    made = []
    for count in (3, 5, 8):
        inputs = normal(count, 4, seed=count), normal(6, 4)
        given, expected = compiled(*inputs), solve(*inputs)
        assert bool((given.status == expected.status).all())
        assert torch.allclose(given.value, expected.value, rtol=1e-9, atol=1e-12)
        made.append(counter.frame_count)
    assert made[0] == made[-1]
