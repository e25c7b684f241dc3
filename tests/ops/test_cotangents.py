"""log Z's gradient beside a large cotangent of the output: all of it arrives, in every precision."""

import pytest
import torch
import torch.nn.functional as F
from tests.support.ops.explicit import attention as explicit
from tests.support.ops.explicit import draw
from tests.support.rows import every_row, some_slow

from massieu import ops
from massieu.ops import fused_kernel

HALF, SINGLE = torch.bfloat16, torch.float32
CALLS = {
    "causal": {"is_causal": True},
    "whole": {},
    "grouped queries": {"group": 2},
    "window": {"window": (20, 9)},
    "sink": {"sink": 0.5},
    "mask": {"log_weight": draw(1, 1, 96, 96, seed=9) > -0.5},
    "log-weights": {"log_weight": draw(96, seed=9)},
    "log-weights that learn": {"log_weight": draw(96, seed=9).requires_grad_()},
    "one channel": {"size": 1},
    "an odd number of channels": {"size": 7},
    "values of one channel": {"value_size": 1},
    "values of more channels": {"value_size": 80},
}


def problem(length, dtype, seed, size=64, value_size=None, group=1):
    shapes = (1, 2 * group, length, size), (1, 2, length, size), (1, 2, length, value_size or size)
    tensors = [draw(*shape, seed=10 * seed + place).to(dtype) for place, shape in enumerate(shapes)]
    grad = draw(1, 2 * group, length, value_size or size, seed=10 * seed + 3).to(dtype)
    return tensors, grad, draw(1, 2 * group, length, seed=10 * seed + 4, dtype=torch.float32)


def gradients(attention, tensors, cotangents):
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    return torch.autograd.grad(attention(*tensors), tensors, cotangents, allow_unused=True)


def arrived(tensors, grad, level, backend="auto", **options):
    """Which share of log Z's gradient is among query's and key's, beside the output's: its projection."""

    def ours(*tensors):
        return tuple(ops.attention(*tensors, **options, backend=backend))

    def exact(*tensors):
        return explicit(*(tensor.double() for tensor in tensors), **options)

    with_level = gradients(ours, tensors, (grad, level))
    without = gradients(ours, tensors, (grad, torch.zeros_like(level)))
    wanted = gradients(
        exact, [t.double() for t in tensors], (torch.zeros_like(grad, dtype=torch.float64), level.double())
    )
    pairs = zip(with_level[:2], without[:2], wanted[:2], strict=True)
    return torch.stack([((a.double() - b.double()) * w).sum() / w.square().sum() for a, b, w in pairs])


def assert_all_arrives(shares):
    """The mean share over the draws is 1, up to .01 and three standard errors of theirs."""
    error = shares.std(0) / len(shares) ** 0.5
    assert (error < 0.1).all(), f"so noisy that it says nothing: {error.tolist()}"
    assert ((shares.mean(0) - 1).abs() < 0.01 + 3 * error).all(), (shares.mean(0).tolist(), error.tolist())


@pytest.mark.medium
@some_slow("name", CALLS, 6)
def test_all_of_it_arrives_in_bfloat16(name):
    options = dict(CALLS[name])
    shape = {key: options.pop(key) for key in ("size", "value_size", "group") if key in options}
    found = []
    for seed in range(12):
        tensors, grad, level = problem(96, HALF, seed, **shape)
        found.append(arrived(tensors, grad, 0.01 * level, **options))
    assert_all_arrives(torch.stack(found))


@pytest.mark.medium
def test_all_of_it_arrives_under_autocast():
    found = []
    for seed in range(12):
        tensors, grad, level = problem(96, HALF, seed)
        with torch.autocast("cpu", HALF):
            found.append(arrived([tensor.float() for tensor in tensors], grad, 0.01 * level))
    assert_all_arrives(torch.stack(found))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [HALF, torch.float16])
def test_all_of_it_arrives_at_length_1024(dtype):
    share, found = 0.01, []
    for seed in range(12):
        tensors, grad, level = problem(1024, dtype, seed, size=64)
        found.append(arrived(tensors, grad, share * level, is_causal=True))
    assert_all_arrives(torch.stack(found))


@pytest.mark.medium
@some_slow("share", [1e-6, 1e-5, 1e-7], 1)
def test_all_of_it_arrives_in_single_precision_below_the_outputs_rounding(share):
    shares = torch.stack([arrived(*problem_of(96, SINGLE, seed, share), is_causal=True) for seed in range(20)])
    assert_all_arrives(shares)


def problem_of(length, dtype, seed, share):
    tensors, grad, level = problem(length, dtype, seed)
    return tensors, grad, share * level


@pytest.mark.medium
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_the_outputs_own_gradient_is_as_exact_as_the_kernels(dtype):
    """Errors against float64, beside those of `scaled_dot_product_attention` for the same cotangent."""
    errors = torch.zeros(3, 2, dtype=torch.float64)
    for seed in range(4):
        tensors, grad, level = problem(256, dtype, seed, size=64)
        wide = [tensor.double() for tensor in tensors]
        exact = gradients(lambda *t: explicit(*t, is_causal=True)[0], wide, grad.double())
        alone = gradients(lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), tensors, grad)
        beside = gradients(lambda *t: tuple(ops.attention(*t, is_causal=True)), tensors, (grad, 0 * level))
        for place, wanted in enumerate(exact):
            for side, found in enumerate((beside, alone)):
                errors[place, side] += (found[place].double() - wanted).square().sum()
    assert (errors[:, 0] < 1.05**2 * errors[:, 1]).all(), errors.sqrt().tolist()


def patterns(grad):
    """Cotangents of which a part is 0 or hardly more, each with its row."""
    zeros = torch.zeros_like(grad)
    first, second = zeros.clone(), zeros.clone()
    first[..., 0] = grad[..., 0]
    second[..., 1] = grad[..., 1]
    return {
        "none is 0": grad,
        "only the first is not": first,
        "only one other is not": second,
        "the first is 0": grad - first,
        "half of them are": grad * (torch.arange(grad.shape[-1]) % 2),
        "all are": zeros,
        "the first is tiny": torch.where(torch.arange(grad.shape[-1]) == 0, grad * 1e-25, grad),
        "all are tiny": grad * 1e-33,
        "all are huge": grad * 1e18,
        "the first is huge": torch.where(torch.arange(grad.shape[-1]) == 0, grad * 1e18, grad),
    }


@every_row("name", list(patterns(torch.ones(1, 2))))
@every_row("dtype", [HALF, SINGLE, torch.float64])
@every_row("size", [2, 3, 64])
def test_the_total_that_the_kernel_sums_up(name, dtype, size):
    """Σ_c grad_c·output_c − g, from products of numbers of the kernel's dtype, to the square of that dtype's rounding."""
    grad = patterns(draw(3, 1, 50, size).to(dtype))[name]
    output, g = draw(3, 1, 50, size, seed=1).to(dtype), draw(3, 1, 50, seed=2) * 10.0 ** -torch.arange(3)[:, None, None]
    carrier, carried = (tensor.double() for tensor in fused_kernel._merge_cotangents(grad, g.float(), output))
    wanted = (grad.double() * output.double()).sum(-1) - g.float().double()
    # The total is a sum of products of the working dtype; what is carried of it has two numbers' digits.
    wide = torch.promote_types(dtype, SINGLE)
    size_of_sum = (grad.double() * output.double()).abs().sum(-1) + g.abs()
    bound = 8 * (torch.finfo(dtype).eps ** 2 + 8 * torch.finfo(wide).eps) * size_of_sum
    assert ((carrier * carried).sum(-1) - wanted).abs().le(bound).all()
    # The output's cotangent stays what it was, but for what is far below its own rounding.
    assert (carrier - grad.double()).abs().le(1e-29 + 1e-35 * wanted.abs().unsqueeze(-1)).all()


@every_row("dtype", [HALF, SINGLE])
def test_rows_without_any_cotangent_have_gradient_0(dtype):
    tensors, grad, level = problem(24, dtype, 0)
    query, key, _ = gradients(lambda *t: tuple(ops.attention(*t)), tensors, (grad * 0, level * 0))
    assert not query.any() and not key.any()


@every_row("dtype", [HALF, SINGLE])
def test_mapped_as_one_at_a_time(dtype):
    tensors, grad, level = problem(24, dtype, 0)
    both = torch.stack([grad, -3 * grad]), torch.stack([level, 0.01 * level])
    _, pull_back = torch.func.vjp(lambda *t: tuple(ops.attention(*t)), *tensors)  # pyright: ignore[reportAssignmentType]
    mapped = torch.vmap(pull_back)(both)
    for place in range(2):
        for found, wanted in zip(mapped, pull_back(tuple(each[place] for each in both)), strict=True):
            torch.testing.assert_close(found[place], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_compiled_as_eagerly(dtype):
    (query, key, value), grad, level = problem(24, dtype, 0)
    grad = patterns(grad)["half of them are"].clone()
    grad[:, :, 3] = 0

    def gradients_of(query, key, value):
        return torch.autograd.grad(tuple(ops.attention(query, key, value)), (query, key, value), (grad, level))

    tensors = [tensor.requires_grad_() for tensor in (query, key, value)]
    compiled = torch.compile(lambda *t: tuple(ops.attention(*t)), backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(*tensors), tensors, (grad, level))
    for one, other in zip(found, gradients_of(*tensors), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.medium
def test_rows_without_a_cotangent_of_the_output_among_many():
    """More numbers than are merged at a time, of which some pieces need replaced cotangents."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (torch.randn(1, 2, 700, 64, generator=generator) for _ in range(4))
    log_z = torch.randn(1, 2, 700, generator=generator)
    grad[:, 0, 300:420], grad[:, 1, 5, 0] = 0.0, 0.0
    found = []
    for dtype, backend in ((torch.float32, "auto"), (torch.float64, "reference")):
        given = [tensor.to(dtype).requires_grad_() for tensor in (query, key, value)]
        results = ops.attention(*given, backend=backend)
        found.append(torch.autograd.grad(results, given, (grad.to(dtype), log_z.to(dtype))))
    for near, exact in zip(*found, strict=True):
        torch.testing.assert_close(near.double(), exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())
