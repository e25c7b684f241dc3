"""CUDA's kernels by what their sources say: the code that runs on a GPU, on the CPU against simulated operators."""

import math
import threading
import warnings

import pytest
import torch
from tests.support.ops import explicit, simulated
from tests.support.ops.explicit import draw
from tests.support.ops.simulated import KERNELS, WRONG
from tests.support.rows import every_row, one_in, some_slow

from massieu import ops
from massieu.ops.cuda import proof

HALVES = torch.bfloat16, torch.float16


@pytest.fixture
def cuda(monkeypatch):
    with simulated.on_the_cpu(monkeypatch):
        yield


def _tensors(shape=(2, 4, 2, 37, 37, 40, 24), dtype=torch.bfloat16):
    batch, heads, key_heads, length, keys, size, value_size = shape
    return (
        draw(batch, heads, length, size, seed=1, dtype=dtype),
        draw(batch, key_heads, keys, size, seed=2, dtype=dtype),
        draw(batch, key_heads, keys, value_size, seed=3, dtype=dtype),
    )


def _gradients(function, tensors, grad, level):
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    output, log_z = function(*tensors)
    level = torch.where(log_z.isfinite(), level, 0.0)
    grad = torch.where(log_z.isfinite().unsqueeze(-1), grad, 0.0)
    log_z = torch.where(log_z.isfinite(), log_z, 0.0)
    found = torch.autograd.grad((output, log_z), tensors, (grad.to(output.dtype), level.to(log_z.dtype)))
    return output.detach(), log_z.detach(), *found


def _error(found, exact):
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-300))


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "a scale a head": {"scale": torch.tensor([0.1, 0.2, 0.3, 0.4])},
    "negative scale, causal": {"scale": -0.2, "is_causal": True},
    "window": {"window": (9, 4)},
    "causal window": {"window": 9, "is_causal": True},
    "offset": {"is_causal": True, "query_offset": 5},
    "sink": {"sink": torch.tensor([0.0, 1.0, -1.0, 2.0])},
    "keys": {"log_weight": torch.arange(37) % 3 > 0},
    "causal keys": {"log_weight": torch.arange(37) > 4, "is_causal": True},
    "pairs": {"log_weight": torch.arange(37)[:, None] * torch.arange(37) % 5 > 0},
    "weights": {"log_weight": torch.linspace(-3, 2, 37)},
}
MASKED = {"keys", "causal keys", "pairs", "weights"}


def _taken(kernel, dtype, name):
    if kernel == "flash":
        return dtype in HALVES and name not in MASKED
    return dtype in HALVES and name != "weights" if kernel == "cudnn" else dtype != torch.float64


@pytest.mark.medium
@every_row("kernel", list(KERNELS), ids=str)
@some_slow("dtype", [torch.bfloat16, torch.float32, torch.float16], 1, ids=str)
def test_both_results_and_all_gradients(cuda, kernel, dtype):
    tensors = _tensors(dtype=dtype)
    grad, level = draw(2, 4, 37, 24, seed=4).to(dtype), 0.3 * draw(2, 4, 37, seed=5)
    wide = [tensor.double() for tensor in tensors]
    room = 8 * torch.finfo(dtype).eps
    for name, options in OPTIONS.items():
        if not _taken(kernel, dtype, name):
            with pytest.raises(ValueError, match=f"backend '{kernel}' cannot be used here"):
                ops.attention(*tensors, backend=kernel, **options)
            continue
        found = _gradients(lambda *t: ops.attention(*t, backend=kernel, **options), tensors, grad, level)  # noqa: B023
        exact = _gradients(lambda *t: explicit.attention(*t, **options), wide, grad.double(), level)  # noqa: B023
        for one, other in zip(found, exact, strict=True):
            assert _error(one, other) < room, name
        log_z = ops.log_partition(*tensors[:2], backend=kernel, **options)
        assert _error(torch.where(log_z.isfinite(), log_z, 0.0), exact[1]) < 1e-5 + 0.1 * torch.finfo(dtype).eps


SHAPES = {
    "one number a head": (1, 2, 2, 9, 9, 1, 1),
    "values larger": (1, 2, 1, 9, 12, 8, 30),
    "96 and 128": (1, 1, 1, 20, 17, 96, 128),
    "fewer queries": (1, 2, 2, 5, 33, 16, 16),
    "fewer keys": (1, 2, 2, 33, 5, 16, 16),
    "two and two": (1, 1, 1, 2, 2, 8, 8),
}


@every_row("kernel", list(KERNELS), ids=str)
def test_every_shape_causal(cuda, kernel):
    for name, shape in SHAPES.items():
        tensors = _tensors(shape)
        grad = draw(*shape[:2], shape[3], shape[6], seed=4).bfloat16()
        level = draw(*shape[:2], shape[3], seed=5)
        options = {"is_causal": True}
        found = _gradients(lambda *t: ops.attention(*t, backend=kernel, **options), tensors, grad, level)  # noqa: B023
        wide = [tensor.double() for tensor in tensors]
        exact = _gradients(lambda *t: explicit.attention(*t, **options), wide, grad.double(), level)  # noqa: B023
        for one, other in zip(found, exact, strict=True):
            assert _error(one, other) < 0.05 or float(other.norm()) < 1e-2, name


@pytest.mark.slow
@every_row("kernel", list(KERNELS), ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_all_of_the_gradient_of_log_partition_arrives(cuda, kernel, dtype):
    """On average over draws, however small its cotangent is beside the output's."""
    for scale in (1.0, 0.01):
        shares = []
        for seed in range(12):
            tensors = [draw(1, 2, 128, 64, seed=4 * seed + part, dtype=dtype) for part in range(3)]
            grad = draw(1, 2, 128, 64, seed=4 * seed + 3).to(dtype)
            level = scale * draw(1, 2, 128, seed=seed + 1000)

            def run(*t):
                return ops.attention(*t, is_causal=True, backend=kernel)

            added = [
                one.double() - other.double()
                for one, other in zip(
                    _gradients(run, tensors, grad, level)[2:4],
                    _gradients(run, tensors, grad, 0 * level)[2:4],
                    strict=True,
                )
            ]
            wide = [tensor.double() for tensor in tensors]
            exact = _gradients(
                lambda *t: explicit.attention(*t, is_causal=True), wide, torch.zeros_like(wide[0]), level
            )[2:4]
            shares.append([float((a * e).sum() / e.square().sum()) for a, e in zip(added, exact, strict=True)])
        found = torch.tensor(shares, dtype=torch.float64)
        error = found.std(0) / math.sqrt(len(shares))
        assert ((found.mean(0) - 1).abs() <= 4 * error + 1e-3).all(), (scale, found.mean(0), error)


@every_row("size", [1e-30, 1e-6, 1.0, 3e4], ids=str)
def test_float16_keeps_cotangents_of_any_size(cuda, size):
    """Its range is short: cotangents are brought near 1 and gradients back."""
    tensors = _tensors((1, 2, 2, 24, 24, 16, 16), torch.float16)
    grad, level = draw(1, 2, 24, 16, seed=4), draw(1, 2, 24, seed=5)
    wide = [tensor.double() for tensor in tensors]
    exact = _gradients(explicit.attention, wide, 0 * grad, size * level)[2:4]
    found = _gradients(lambda *t: ops.attention(*t, backend="flash"), tensors, 0 * grad, size * level)
    if size * 1e2 < torch.finfo(torch.float16).max and size > 1e-7:
        for one, other in zip(found[2:4], exact, strict=True):
            assert _error(one, other) < 0.02 + 3e-7 / size
    assert all(tensor.isfinite().all() for tensor in found[2:4]) or size > 1e3
    assert float(found[4].abs().max()) <= torch.finfo(torch.float16).eps * size


def test_rows_whose_cotangent_is_zero_still_carry_log_z(cuda):
    tensors = _tensors((1, 2, 2, 24, 24, 16, 16), torch.float16)
    grad, level = draw(1, 2, 24, 16, seed=4), draw(1, 2, 24, seed=5)
    grad[:, :, ::2] = 0
    exact = _gradients(explicit.attention, [tensor.double() for tensor in tensors], grad, level)
    for kernel in KERNELS:
        found = _gradients(lambda *t: ops.attention(*t, backend=kernel), tensors, grad.half(), level)  # noqa: B023
        for one, other in zip(found, exact, strict=True):
            assert _error(one, other) < 0.01


PACKED = {
    "causal": ((20, 1, 16), None, {"is_causal": True}),
    "window": ((20, 1, 16), None, {"window": (3, 2)}),
    "all": ((5, 30, 2), None, {}),
    "other lengths": ((5, 30, 2), (10, 7, 20), {}),
    "offset": ((20, 1, 16), None, {"is_causal": True, "query_offset": 3}),
    "an empty document": ((20, 0, 17), None, {"is_causal": True}),
    "a document without keys": ((20, 3, 14), (20, 0, 17), {}),
    "a sink": ((20, 1, 16), None, {"sink": torch.tensor([0.0, 1.0, -1.0, 2.0])}),
}


@pytest.mark.parametrize("name", list(PACKED), ids=str)
def test_documents_by_one_call(cuda, monkeypatch, name):
    from massieu.ops.cuda.packed_flash import PACKED_FLASH

    lengths, key_lengths, options = PACKED[name]
    documents, called = ops.Documents.of_lengths(lengths, key_lengths), []
    monkeypatch.setattr(PACKED_FLASH, "forward", _noting(called, name, PACKED_FLASH.forward))
    tensors = _tensors()
    grad, level = draw(2, 4, 37, 24, seed=4).bfloat16(), 0.3 * draw(2, 4, 37, seed=5)
    for _ in range(2):
        called.clear()  # of the proof
        found = _gradients(lambda *t: ops.attention(*t, documents=documents, **options), tensors, grad, level)
    assert called == [name]
    wide = [tensor.double() for tensor in tensors]

    def apart(*t):
        split = [
            tensor.split(sizes, 2)
            for tensor, sizes in zip(t, (lengths, key_lengths or lengths, key_lengths or lengths), strict=True)
        ]
        parts = [explicit.attention(*each, **options) for each in zip(*split, strict=True)]
        return tuple(torch.cat(each, 2) for each in zip(*parts, strict=True))

    exact = _gradients(apart, wide, grad.double(), level)
    for one, other in zip(found, exact, strict=True):
        assert _error(one, other) < 8 * torch.finfo(torch.bfloat16).eps


def test_second_derivatives_of_documents(cuda):
    documents = ops.Documents.of_lengths((20, 1, 16))
    query, key, _ = (tensor.requires_grad_() for tensor in _tensors(dtype=torch.float16))
    log_z = ops.log_partition(query, key, documents=documents, is_causal=True, backend="flash")
    (slope,) = torch.autograd.grad(log_z.sum(), query, create_graph=True)
    (bend,) = torch.autograd.grad(slope.float().square().sum(), key)
    exact = [tensor.detach().double().requires_grad_() for tensor in (query, key)]
    log_z = ops.log_partition(*exact, documents=documents, is_causal=True, backend="reference")
    (slope,) = torch.autograd.grad(log_z.sum(), exact[0], create_graph=True)
    assert _error(bend, torch.autograd.grad(slope.square().sum(), exact[1])[0]) < 0.02


def test_documents_of_a_wrong_kernel_take_the_next(monkeypatch):
    tensors, documents = _tensors(), ops.Documents.of_lengths((20, 1, 16))
    with simulated.on_the_cpu(monkeypatch, simulated.OwnDelta()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = ops.attention(*tensors, documents=documents, is_causal=True)
    expected = ops.attention(*(tensor.float() for tensor in tensors), documents=documents, is_causal=True)
    assert _error(found.log_partition, expected.log_partition.double()) < 1e-3


def test_nan_is_shown(cuda):
    query, key, value = _tensors()
    query, key = query.clone(), key.clone()
    query[0, 0, 3], key[1, 1, 20] = torch.nan, torch.nan
    for kernel in KERNELS:
        output, log_z = ops.attention(query, key, value, is_causal=True, backend=kernel)
        lost = torch.zeros(2, 4, 37, dtype=torch.bool)
        lost[0, 0, 3] = lost[1, 2:, 20:] = True
        assert torch.equal(log_z.isnan(), lost)
        assert torch.equal(output.isnan().any(-1), lost)


def test_queries_that_see_nothing(cuda):
    query, key, value = _tensors(dtype=torch.float32)
    kept = torch.ones(2, 1, 1, 37, dtype=torch.bool)
    kept[1] = False
    tensors = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    output, log_z = ops.attention(*tensors, log_weight=kept, backend="efficient")
    assert (log_z[1] == -torch.inf).all() and (output[1] == 0).all() and log_z[0].isfinite().all()
    gradients = torch.autograd.grad(output.sum() + log_z[0].sum(), tensors)
    assert all((gradient[1] == 0).all() and gradient.isfinite().all() for gradient in gradients)


# --- which is taken --------------------------------------------------------------------------------------------------


def test_the_first_that_is_right_is_taken(cuda, monkeypatch):
    taken = []
    for name, backend in KERNELS.items():
        monkeypatch.setattr(backend, "forward", _noting(taken, name, backend.forward))
    query, key, value = _tensors()
    cases = [
        ("cudnn", (query, key, value), {}),
        ("cudnn", (query, key, value), {"log_weight": torch.arange(37) > 2}),
        ("flash", (query[:, :, :1], key, value), {}),
        ("efficient", (query[:, :, :1], key, value), {"log_weight": torch.arange(37) > 2}),
        ("efficient", (query, key, value), {"log_weight": torch.linspace(-1, 1, 37)}),
        ("efficient", [tensor.float() for tensor in (query, key, value)], {"is_causal": True}),
        (None, [tensor.double() for tensor in (query, key, value)], {}),
        (None, (query, key, value), {"softcap": 3.0}),
    ]
    for expected, tensors, options in cases:
        ops.attention(*tensors, **options)
        taken.clear()  # of the proofs
        ops.attention(*tensors, **options)
        assert taken == [expected] * (expected is not None), options


def _noting(taken, name, forward):
    def noted(problem, *others):
        taken.append(name)
        return forward(problem, *others)

    return noted


@every_row("wrong", list(WRONG), ids=str)
def test_a_wrong_kernel_is_found_out_and_said_once(monkeypatch, wrong):
    operators, kernels = WRONG[wrong]
    tensors = _tensors((1, 2, 2, 33, 20, 16, 16))
    options = {"log_weight": torch.arange(20) > 2} if kernels == ("efficient",) else {}
    with simulated.on_the_cpu(monkeypatch, operators()):
        for kernel in kernels:
            if kernels == ("flash",):
                options = {"is_causal": True}
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                for _ in range(2):
                    with pytest.raises(
                        ValueError, match=f"backend '{kernel}' cannot be used here: (its|it failed|of the)"
                    ):
                        ops.attention(*tensors, backend=kernel, **options)
            assert len(said) == 1 and f"{kernel!r} is not used on cpu" in str(said[0].message)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = ops.attention(*tensors, **options)
        exact = explicit.attention(*(tensor.double() for tensor in tensors), **options)
        assert _error(found.output, exact[0]) < 0.02 and _error(found.log_partition, exact[1]) < 1e-2


def test_the_layout_of_the_output_matters(monkeypatch):
    """A carrier that is contiguous in another order is read as garbage: the proof says so."""
    from massieu.ops.cuda import efficient

    class Careless(efficient.EfficientKernel):
        @staticmethod
        def backward(grad, *given):
            query, key, value, output, *rest = given
            mine = efficient.kernel.operators

            class Contiguous:
                def __getattr__(self, name):
                    function = getattr(mine, name)
                    if not name.endswith("backward"):
                        return function
                    return lambda g, q, k, v, b, o, *more, **named: function(
                        g, q, k, v, b, o.contiguous(), *more, **named
                    )

            efficient.kernel.operators = Contiguous()
            try:
                return efficient.EfficientKernel.backward(grad, query, key, value, output, *rest)
            finally:
                efficient.kernel.operators = mine

    with simulated.on_the_cpu(monkeypatch), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backend = efficient.Fused(Careless())
        problem = _problem()
        assert "grad_query is off" in str(proof.failure(backend, problem))


def _problem(dtype=torch.bfloat16, **options):
    from massieu.ops.shapes import check_problem

    query, key, value = _tensors(dtype=dtype)
    return check_problem(query, key, value, None, None, False, **options)


def test_a_proof_is_made_once_and_touches_nothing(cuda, monkeypatch):
    made = []
    measured = proof._measured
    monkeypatch.setattr(proof, "_measured", lambda *given: made.append(given[0].name) or measured(*given))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    query, key, value = _tensors()
    with torch.inference_mode(), torch.autocast("cpu", torch.float16):
        ops.attention(query, key, value, is_causal=True, backend="flash")
    with torch.no_grad():
        ops.attention(query[:1, :, :5], key[:1, :, :5], value[:1, :, :5], is_causal=True, backend="flash")
    assert made == ["flash", "flash"]  # float16 under autocast, and bfloat16
    torch.func.vmap(lambda q: ops.attention(q, key, value, is_causal=True, backend="flash").output)(query[None])
    assert made == ["flash", "flash"]
    ops.attention(query, key, value, window=3, backend="flash")
    assert made == ["flash"] * 3
    assert torch.equal(torch.get_rng_state(), state)


def test_in_a_transform_first(cuda):
    """The first call of a process may be inside a transform; the proof is not."""
    query, key, value = _tensors()
    found = torch.func.vmap(lambda q: ops.attention(q, key, value, backend="flash").output)(query[None])
    torch.testing.assert_close(found[0], ops.attention(query, key, value, backend="flash").output)
    gradient = torch.func.grad(lambda q: ops.log_partition(q, key, backend="efficient").sum())(query)
    assert gradient.isfinite().all()


def test_many_threads_make_one_proof(cuda, monkeypatch):
    made = []
    measured = proof._measured
    monkeypatch.setattr(proof, "_measured", lambda *given: made.append(1) or measured(*given))
    problem = _problem()
    threads = [threading.Thread(target=proof.failure, args=(KERNELS["flash"], problem)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]


def test_a_lack_of_memory_is_no_verdict(cuda, monkeypatch):
    problem = _problem()

    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(proof, "_measured", full)
        assert "no memory to prove it" in str(proof.failure(KERNELS["flash"], problem))
    assert proof.failure(KERNELS["flash"], problem) is None


# --- on CUDA as PyTorch describes it ---------------------------------------------------------------------------------


@every_row("kernel", list(KERNELS), ids=str)
def test_shapes_of_the_real_operators(kernel, monkeypatch):
    monkeypatch.setattr(proof, "failure", lambda backend, problem: None)
    monkeypatch.setattr(simulated.kernel.CudaKernel, "device_type", "meta")
    monkeypatch.setattr(simulated.cudnn.CudnnKernel, "missing", staticmethod(lambda device: None))
    query, key, value = (
        torch.empty(2, heads, 37, size, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for heads, size in ((4, 40), (2, 40), (2, 24))
    )
    output, log_z = ops.attention(query, key, value, is_causal=True, backend=kernel)
    assert output.shape == (2, 4, 37, 24) and output.dtype == torch.bfloat16
    assert log_z.shape == (2, 4, 37) and log_z.dtype == torch.float32
    gradients = torch.autograd.grad(output.float().sum() + log_z.sum(), (query, key, value))
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, value.shape]


@one_in(2, {"name": KERNELS, "turned": [False, True]})
def test_views_whose_rows_begin_anywhere_in_memory(cuda, name, turned):
    """Kernels read sixteen bytes at a time: where that is not possible in place there is a copy."""

    def places(tensor):
        wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 3, dtype=tensor.dtype)
        wide = wide.transpose(1, 2).contiguous().transpose(1, 2) if turned else wide
        return wide[..., 1:-2].copy_(tensor)

    tensors = _tensors((2, 4, 2, 37, 37, 40, 40))
    grad, level = draw(2, 4, 37, 40, seed=4, dtype=torch.bfloat16), torch.zeros(2, 4, 37)

    def run(*given, backend=name):
        return ops.attention(*given, backend=backend)

    found = _gradients(run, [places(tensor) for tensor in tensors], places(grad), level)
    exact = _gradients(lambda *given: run(*given, backend="reference"), [t.double() for t in tensors], grad, level)
    assert max(_error(one, other) for one, other in zip(found, exact, strict=True)) < 0.02


def test_a_float_log_weight_that_begins_anywhere_in_memory(cuda):
    tensors = _tensors((2, 4, 4, 37, 48, 40, 40), dtype=torch.float32)
    weight = draw(2, 1, 37, 64, seed=5, dtype=torch.float32)[..., 1:49]
    found = ops.attention(*tensors, log_weight=weight, backend="efficient")
    exact = ops.attention(*tensors, log_weight=weight, backend="reference")
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


def test_cudnn_is_not_taken_where_results_must_be_deterministic(cuda):
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ValueError, match="its gradients are not deterministic"):
            ops.attention(*_tensors(), backend="cudnn")
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert ops.attention(*_tensors(), backend="cudnn").output.isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)
