"""FlexAttention's kernel, in its dense form on the CPU: against all weights at once in float64."""

import itertools
import math
import re
import sys
import threading

import pytest
import torch
from tests.support.ops.explicit import attention, draw, finite
from tests.support.rows import every_row, some_slow
from torch.nn.attention import flex_attention as peer

from massieu import ops
from massieu.ops.cuda import flex, proof
from massieu.ops.shapes import check_problem

REGISTRY = sys.modules["massieu.ops.attention"]
LAYOUTS = {
    "square": (2, 4, 2, 9, 9, 16, 16),
    "long keys": (1, 2, 2, 5, 140, 8, 3),
    "long queries": (1, 3, 1, 150, 20, 24, 40),
}
LENGTH, KEYS = 150, 140
SINGLE = torch.finfo(torch.float32).eps
OPTIONS = {
    "plain": {},
    "soft cap": {"softcap": 0.7, "scale": 0.4},
    "causal": {"is_causal": True, "softcap": 2.0},
    "window": {"window": (3, 1), "softcap": 2.0},
    "wide window": {"window": (130, 2)},
    "scale per head": {"scale": torch.tensor([0.2, -0.5]), "is_causal": True},
    "boolean": {"log_weight": draw(1, 1, LENGTH, KEYS) > 0.5, "softcap": 2.0},
    "keys": {"log_weight": draw(1, 1, 1, KEYS).masked_fill(draw(1, 1, 1, KEYS) > 1, -math.inf), "window": 4},
    "pairs": {"log_weight": draw(4, LENGTH, KEYS), "softcap": 1.5},
    "pairs of all heads": {
        "log_weight": draw(LENGTH, KEYS).masked_fill(draw(LENGTH, KEYS) > 1, -math.inf),
        "is_causal": True,
    },
}


@pytest.fixture
def registered(monkeypatch):
    """Flex for the CPU in place of CUDA, compiled by `compiler`, or where that is None not at all."""

    def register(compiler=None, proves=False):
        class OnCpu(flex.Flex):
            device_type = "cpu"

        OnCpu.compiler = compiler or "none"
        backend = OnCpu()
        if compiler is None:
            monkeypatch.setattr(peer, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
            backend.__dict__["_compiled"] = flex._attend
        monkeypatch.setattr(proof, "_verdicts", {})
        monkeypatch.setattr(proof, "_warned", set())
        # Uncompiled it has no blocks of its own: a smaller problem proves as much.
        monkeypatch.setattr(proof, "LENGTHS", (35, 75))
        if not proves:
            monkeypatch.setattr(proof, "failure", lambda backend, problem: None)
        # It has a backward pass on the CPU, and says it has none.
        monkeypatch.setattr(peer, "_validate_device", lambda *tensors: None)
        monkeypatch.setattr(REGISTRY, "BACKENDS", (backend, *REGISTRY.BACKENDS))
        return backend

    return register


def problem(layout, options, dtype=torch.float32):
    batch, heads, key_heads, length, keys, size, value_size = LAYOUTS[layout] if isinstance(layout, str) else layout
    tensors = [draw(batch, heads, length, size, seed=1), draw(batch, key_heads, keys, size, seed=2)]
    tensors = [tensor.to(dtype) for tensor in (*tensors, draw(batch, key_heads, keys, value_size, seed=3))]
    options = dict(options)
    weight = options.get("log_weight")
    if weight is not None:
        weight = weight[..., :length, :keys]
        weight = weight[:heads] if weight.ndim == 3 else weight
        options["log_weight"] = weight if weight.dtype == torch.bool else weight.to(torch.float32)
    if isinstance(options.get("scale"), torch.Tensor):
        options["scale"] = options["scale"].repeat(2)[:heads]
    return tensors, options


def gradients(function, tensors, options, shared=torch.float32):
    """Results, and gradients of everything that can have one, for cotangents of both results."""
    given = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    options = {
        name: one.detach().clone().requires_grad_()
        if isinstance(one, torch.Tensor) and one.is_floating_point()
        else one
        for name, one in options.items()
    }
    learned = given + [one for one in options.values() if isinstance(one, torch.Tensor) and one.requires_grad]
    output, log_z = function(*given, **options)
    total = (output * draw(*output.shape, seed=4).to(output)).sum()
    total = total + (finite(log_z) * draw(*log_z.shape, seed=5).to(log_z)).sum()
    return output, log_z, *torch.autograd.grad(total, learned)


def assert_close(found, wanted, tolerance):
    for one, exact in zip(found, wanted, strict=True):
        assert torch.equal(one.isfinite(), exact.isfinite())
        error = (finite(one.double()) - finite(exact.double())).abs().max()
        assert error <= tolerance * finite(exact.double()).abs().max().clamp_min(1e-3), error


@pytest.mark.parametrize(
    "layout", ["square", *(pytest.param(name, marks=pytest.mark.medium) for name in ("long keys", "long queries"))]
)
@pytest.mark.parametrize("name", OPTIONS)
def test_results(registered, layout, name):
    registered()
    tensors, options = problem(layout, OPTIONS[name])
    found = ops.attention(*tensors, **options, backend="flex")
    assert_close(found, attention(*tensors, **options), 16 * SINGLE)
    log_z = ops.log_partition(*tensors[:2], **options, backend="flex")
    assert torch.equal(log_z, found.log_partition)


@pytest.mark.parametrize("name", ["plain", "soft cap", "causal", "window", "wide window", "scale per head", "boolean"])
def test_gradients(registered, name):
    registered()
    tensors, options = problem("square", OPTIONS[name])
    found = gradients(lambda *given, **named: ops.attention(*given, **named, backend="flex"), tensors, options)
    assert_close(found, gradients(attention, [t.double() for t in tensors], options), 40 * SINGLE)


@pytest.mark.slow
@every_row(
    "name, layout",
    zip(
        ("causal", "wide window", "scale per head", "boolean", "keys", "pairs"), itertools.cycle(LAYOUTS), strict=False
    ),
)
def test_compiled_gradients(registered, name, layout):
    """The weights' too: dynamo alone makes them inputs of the kernel."""
    registered("eager")
    tensors, options = problem(layout, OPTIONS[name])
    found = gradients(lambda *given, **named: ops.attention(*given, **named, backend="flex"), tensors, options)
    assert_close(found, gradients(attention, [t.double() for t in tensors], options), 80 * SINGLE)


@every_row("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(registered, dtype):
    registered()
    tensors, options = problem("long keys", OPTIONS["soft cap"], dtype)
    output, log_z, *found = gradients(
        lambda *given, **named: ops.attention(*given, **named, backend="flex"), tensors, options
    )
    wanted, level, *exact = gradients(attention, [t.double() for t in tensors], options)
    assert (output.dtype, log_z.dtype) == (dtype, torch.float32)
    # Weights, what is multiplied with them, and the result are rounded.
    assert_close((output, *found), (wanted, *exact), 3 * torch.finfo(dtype).eps)
    assert_close((log_z,), (level,), 16 * SINGLE)


def test_log_partition_alone(registered):
    registered()
    tensors, options = problem("square", OPTIONS["soft cap"])
    query, key = (tensor.requires_grad_() for tensor in tensors[:2])
    found = torch.autograd.grad(ops.log_partition(query, key, **options, backend="flex").square().sum(), (query, key))
    wide = [tensor.detach().double().requires_grad_() for tensor in (query, key)]
    exact = torch.autograd.grad(attention(wide[0], wide[1], wide[1], **options)[1].square().sum(), wide)
    assert_close(found, exact, 40 * SINGLE)


def test_a_value_alone_may_be_learned(registered):
    registered()
    query, key, value = problem("square", {})[0]
    value.requires_grad_()
    (found,) = torch.autograd.grad(ops.attention(query, key, value, softcap=1.0, backend="flex").output.sum(), value)
    wide = value.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(attention(query, key, wide, softcap=1.0)[0].sum(), wide)
    assert_close((found,), (exact,), 40 * SINGLE)


def test_second_derivatives(registered):
    registered()
    tensors, _ = problem((1, 2, 1, 3, 4, 2, 2), {})

    def slope(function, given):
        output, log_z = function(*given, softcap=1.0)
        first = torch.autograd.grad(output.sin().sum() + log_z.square().sum(), given, create_graph=True)
        return torch.autograd.grad([one.square().sum() for one in first], given)

    found = slope(
        lambda *given, **named: ops.attention(*given, **named, backend="flex"), [t.requires_grad_() for t in tensors]
    )
    assert_close(found, slope(attention, [t.detach().double().requires_grad_() for t in tensors]), 160 * SINGLE)


def test_layouts_of_memory(registered):
    """Transposed, expanded and sliced tensors, and a graph gone through twice."""
    registered()
    (query, key, value), _ = problem("square", {})
    odd = query.mT.contiguous().mT, key[:, :1].expand(-1, 2, -1, -1), torch.cat([value, value], -1)[..., ::2]
    found = gradients(lambda *given, **named: ops.attention(*given, **named, backend="flex"), odd, {"softcap": 1.0})
    assert_close(found, gradients(attention, [t.double() for t in odd], {"softcap": 1.0}), 40 * SINGLE)
    learned = [tensor.requires_grad_() for tensor in odd]
    output, log_z = ops.attention(*learned, softcap=1.0, backend="flex")
    once, again = (torch.autograd.grad(output.sum() + log_z.sum(), learned, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, once, again))


def test_rows_that_see_nothing(registered):
    """Output 0, log Z −∞ and gradient 0, whatever the query holds."""
    registered()
    (query, key, value), _ = problem("square", {})
    query[:, :, 3] = math.nan
    query, kept = query.requires_grad_(), torch.ones(9, 9, dtype=torch.bool)
    kept[3] = False
    output, log_z = ops.attention(query, key, value, log_weight=kept, softcap=1.0, backend="flex")
    assert torch.equal(log_z.isneginf().nonzero()[:, 2].unique(), torch.tensor([3]))
    assert not output[:, :, 3].any()
    (grad,) = torch.autograd.grad(output.sum() + finite(log_z).sum(), query)
    assert grad.isfinite().all()
    assert not grad[:, :, 3].any()


def test_what_is_not_a_number_stays_in_its_row(registered):
    registered()
    (query, key, value), _ = problem("square", {})
    query[0, 1, 2] = math.nan
    output, log_z = ops.attention(query, key, value, softcap=1.0, backend="flex")
    assert log_z.isnan().nonzero().tolist() == [[0, 1, 2]]
    assert output.isnan().any(-1).nonzero().tolist() == [[0, 1, 2]]


@every_row("low, high, length, keys", [
    (None, 0, 300, 300), (None, 5, 257, 400), (-3, 2, 128, 128), (-200, -130, 500, 300), (10, 300, 130, 600),
    (-140, 140, 640, 640), (None, 700, 20, 300), (-1, 0, 1, 1), (400, 500, 130, 200), (127, 300, 128, 256),
    (None, -127, 128, 128), (None, -300, 400, 130),
])  # fmt: skip
def test_tiles_are_those_of_the_whole_mask(low, high, length, keys):
    def seen(item, head, row, column):
        inside = column <= row + high
        return inside if low is None else inside & (column >= row + low)

    mask = peer.create_block_mask(seen, None, None, length, keys, device="cpu")
    first, last, *found = flex._tiles((low, high), length, keys, torch.device("cpu"))
    wanted = [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]
    wanted += [mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices]
    for place in range(0, 8, 2):
        assert torch.equal(found[place], wanted[place])
        used = torch.arange(found[place + 1].shape[-1]) < found[place].unsqueeze(-1)
        assert torch.equal(found[place + 1][used], wanted[place + 1][used])
    place = torch.arange(keys) - torch.arange(length)[:, None]
    assert torch.equal(
        (place >= first) & (place <= last), seen(0, 0, torch.arange(length)[:, None], torch.arange(keys))
    )


def test_the_kernel_is_given_those_tiles(registered, monkeypatch):
    registered()
    query, key, value = (draw(1, 1, length, 16).float() for length in (300, 400, 400))
    masks = []
    monkeypatch.setattr(
        peer, "flex_attention", lambda *given, **options: (masks.append(given[4]), peer.AuxOutput(query[..., 0]))
    )
    ops.log_partition(query, key, window=(150, 140), backend="flex")
    mask = peer.create_block_mask(
        lambda item, head, row, column: (column >= row - 150) & (column <= row + 140),
        None,
        None,
        300,
        400,
        device="cpu",
    )
    assert torch.equal(masks[0].to_dense(), mask.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(masks[0], name), getattr(mask, name)), name
    assert masks[0].shape == mask.shape
    assert masks[0].BLOCK_SIZE == mask.BLOCK_SIZE


def test_tiles_are_kept_and_few():
    flex._kept_tiles.cache_clear()
    (query, key, value), _ = problem("square", {})
    given = check_problem(query, key, value, None, None, True)
    assert flex._tiles_of(given) is flex._tiles_of(given)
    with torch.inference_mode():
        made = flex._tiles_of(check_problem(query[:, :, 1:], key, value, None, None, True))
    assert made is not None
    assert not made[0].is_inference()
    for length in range(1, 50):
        flex._kept_tiles((None, 0), length, 3, torch.device("cpu"), None)
    assert flex._kept_tiles.cache_info().currsize == 32


def test_refusals(registered, monkeypatch):
    backend = registered()
    (query, key, value), _ = problem("square", {})

    def refusal(*tensors, **options):
        with pytest.raises(ValueError, match="backend 'flex' cannot be used here: ") as error:
            ops.attention(*tensors, **options, backend="flex")
        return str(error.value)

    assert "it has no float64" in refusal(query.double(), key.double(), value.double())
    assert "at least one query and one key" in refusal(query[:, :, :0], key, value)
    with pytest.raises(ValueError, match=r"no torch\.func transforms"):
        torch.func.vmap(lambda q: ops.attention(q, key, value, backend="flex").output)(query[None])
    with torch.autograd.forward_ad.dual_level():
        assert "no forward mode" in refusal(query, key, value)
    large = torch.empty(2**16, 2**15, device="meta")
    given = check_problem(query, key, value, None, None, False)
    object.__setattr__(given, "log_weight", large)
    assert "32 bits, got 2,147,483,648 of them" in str(backend.refuses(given))
    monkeypatch.setattr(type(backend), "compiler", "inductor")
    monkeypatch.setattr(flex, "find_spec", lambda name: None)
    assert "it needs Triton, which is not installed" in refusal(query, key, value)


def test_on_the_cpu_it_refuses():
    with pytest.raises(ValueError, match="it runs on CUDA, got cpu; 'reference' can"):
        ops.attention(*problem("square", {})[0], backend="flex")


@pytest.mark.slow
def test_it_is_compiled_once(registered):
    """Once for each of: with and without gradients, caps, kinds of mask. Another length makes sizes variable, once."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counts = CompileCounterWithBackend("eager")
    backend = registered("eager")
    backend.__dict__["_compiled"] = torch.compile(flex._attend, backend=counts, fullgraph=True)
    made = []
    for length in (5, 7, 9):
        for window in (2, 3) if length == 5 else (3,):
            query, key, value = (draw(1, 2, length, 16, seed=length).float() for _ in range(3))
            found = ops.attention(query, key, value, window=window, softcap=2.0, backend="flex")
            assert_close(found, attention(query, key, value, window=window, softcap=2.0), 16 * SINGLE)
        made.append(counts.frame_count)
    assert made[1] == made[2]
    assert made[1] <= 2


# --- the proof -------------------------------------------------------------------------------------------------------


@pytest.mark.medium
@some_slow(
    "name, dtype, compiler",
    [
        ("window", torch.float32, None),
        ("soft cap", torch.bfloat16, None),
        *((name, torch.float32, None) for name in ("plain", "causal", "scale per head", "boolean")),
        # Weights that are learned take a compiler.
        *((name, torch.float32, "eager") for name in ("keys", "pairs")),
    ],
    2,
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_it_is_proved_and_taken(registered, name, dtype, compiler):
    registered(compiler, proves=True)
    tensors, options = problem("square", OPTIONS[name], dtype)
    gradients(ops.attention, tensors, options)
    assert set(proof._verdicts.values()) == {None}
    assert all(key[0] == "flex" for key in proof._verdicts)
    layouts = [key[3] for key in proof._verdicts]
    assert {isinstance(one, proof.Layout) and one.capped for one in layouts} == {"softcap" in OPTIONS[name]}


def in_base_two(run, *given):
    output, log_z = run(*given)
    return output, log_z / math.log(2)


def without_its_cotangent(run, *given):
    output, log_z = run(*given)
    return output, log_z.detach() + 0 * output.sum(-1)


def without_its_cap(run, query, key, value, weight, scale, softcap, tiles):
    return run(query, key, value, weight, scale, None, tiles)


def with_a_late_band(run, *given):
    return run(*given[:-1], (given[-1][0], given[-1][1] + 1, *given[-1][2:]))


def without_a_weight_gradient(run, query, key, value, weight, *rest):
    return run(query, key, value, 0.9 * weight + 0.1 * weight.detach(), *rest)


def out_of_order(*given):
    raise RuntimeError("no valid Triton configs")


@pytest.mark.parametrize(("name", "fault", "told"), [
    ("soft cap", in_base_two, "its log_partition is off by"),
    ("soft cap", out_of_order, "it failed its proof: no valid Triton configs"),
    ("soft cap", without_its_cotangent, "its grad_query is off by|of the gradient of"),
    ("soft cap", without_its_cap, "its output is off by"),
    ("causal", with_a_late_band, "its output is off by"),
    pytest.param("keys", without_a_weight_gradient, "its grad_log_weight is off by", marks=pytest.mark.slow),
])  # fmt: skip
def test_what_is_wrong_is_not_taken(registered, name, fault, told):
    """And the results are the reference's, with one warning."""
    backend = registered("eager" if name == "keys" else None, proves=True)  # weights that are learned take a compiler
    run = backend._compiled
    backend.__dict__["_compiled"] = lambda *given: fault(run, *given)
    tensors, options = problem("square", OPTIONS[name])
    with pytest.warns(UserWarning, match="'flex' is not used on cpu") as warned:
        found, again = (gradients(ops.attention, tensors, options) for _ in range(2))
    assert len(warned) == 1
    assert re.search(told, str(warned[0].message))
    wanted = gradients(attention, [t.double() for t in tensors], options)
    assert_close(found, wanted, 40 * SINGLE)
    assert all(map(torch.equal, found, again))


@pytest.mark.slow
def test_within_compiled_code_it_is_proved_before_or_not_taken(registered):
    """The proof would have to be compiled meanwhile, which never ends."""
    registered(proves=True)
    tensors, options = problem("square", OPTIONS["causal"])

    def compiled(backend):
        torch._dynamo.reset()
        return torch.compile(lambda *given: tuple(ops.attention(*given, **options)), backend=backend, fullgraph=True)

    with pytest.warns(UserWarning, match="call it once before"):
        before = compiled("eager")(*tensors)
    assert not proof._verdicts
    ops.attention(*tensors, **options)
    assert list(proof._verdicts.values()) == [None]
    assert_close(before, attention(*tensors, **options), 16 * SINGLE)
    after = gradients(compiled("aot_eager"), tensors, {})
    exact = gradients(lambda *given: attention(*given, **options), [t.double() for t in tensors], {})
    assert_close(after, exact, 40 * SINGLE)


def test_another_thread(registered):
    registered()
    tensors, options = problem("square", OPTIONS["causal"])
    found = []
    thread = threading.Thread(target=lambda: found.extend(ops.attention(*tensors, **options, backend="flex")))
    thread.start()
    thread.join()
    assert_close(found, attention(*tensors, **options), 16 * SINGLE)


def test_under_autocast(registered):
    registered()
    (query, key, value), _ = problem("square", {})
    with torch.autocast("cpu", torch.bfloat16):
        output, log_z = ops.attention(query, key, value, softcap=1.0, backend="flex")
    assert (output.dtype, log_z.dtype) == (torch.bfloat16, torch.float32)
    rounded = [tensor.bfloat16() for tensor in (query, key, value)]
    assert_close((log_z,), attention(*rounded, softcap=1.0)[1:], 16 * SINGLE)
