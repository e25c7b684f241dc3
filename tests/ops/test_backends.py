"""The contract of a backend of attention: one table for every one, CUDA's simulated on the CPU, against float64.

A backend is in the table by being in the registry. What it refuses it says, and what it takes is right.
"""

import contextlib
import importlib
import inspect
import itertools
import math

import pytest
import torch
from tests.ops.test_cotangents import arrived, assert_all_arrives, problem
from tests.support.ops import simulated
from tests.support.ops.explicit import attention as explicit
from tests.support.ops.explicit import draw
from tests.support.rounding import FAST_EXPONENTIAL
from tests.support.rows import every_row
from torch.nn.attention import flex_attention as peer

from massieu import ops
from massieu.ops.cuda import flex, proof

REGISTRY = importlib.import_module("massieu.ops.attention")
NAMES = [backend.name for backend in REGISTRY.BACKENDS]
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPES = {
    "square": (2, 2, 2, 9, 9, 8, 8),
    "odd": (1, 3, 3, 7, 5, 7, 3),
    "wide values": (1, 2, 2, 4, 6, 3, 11),
    "grouped": (2, 4, 2, 6, 6, 8, 8),
    "long keys": (1, 2, 1, 3, 40, 16, 16),
    "long queries": (1, 2, 1, 40, 3, 16, 16),
    "one query": (2, 2, 2, 1, 33, 8, 8),
    "one key": (1, 2, 2, 5, 1, 8, 8),
    "one of all": (1, 1, 1, 1, 1, 1, 1),
}
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "offset": {"is_causal": True, "query_offset": 2},
    "window": {"window": (2, 1)},
    "causal window": {"window": 2, "is_causal": True, "query_offset": 1},
    "kept keys": {"log_weight": lambda *shape: draw(*shape[:1], 1, 1, shape[3], seed=5) > -0.5},
    "kept pairs": {"log_weight": lambda *shape: draw(*shape, seed=5) > -0.3, "is_causal": True},
    "weights of keys": {"log_weight": lambda *shape: draw(shape[3], seed=5)},
    "weights of pairs": {"log_weight": lambda *shape: torch.where(draw(*shape) > 0, draw(*shape, seed=5), -math.inf)},
    "no key": {"log_weight": lambda *shape: torch.zeros(shape[3], dtype=torch.bool)},
    "scale": {"scale": -1.3},
    "scale of a head": {"scale": lambda *shape: draw(shape[1], seed=6)},
    "soft cap": {"softcap": 1.5},
    "sink": {"sink": lambda *shape: draw(shape[1], seed=7)},
}
ROWS = [pair for pair in itertools.product(OPTIONS, SHAPES) if pair[0] in ("plain", "offset") or pair[1] == "grouped"]
QUICK = ("fused", "blocks", "reference")
"""Backends for which all rows take less than a second."""
MAIN_DTYPE = {"efficient": "float32", "flex": "float32", "cudnn": "bfloat16", "flash": "float16"}
"""The dtype in which a fast test tries all options of a slower backend; its other dtypes are tried on every fourth row."""
NOT_ITS_DTYPE = {
    *((name, "float64") for name in (*simulated.KERNELS, "flex")),
    ("flash", "float32"),
    ("cudnn", "float32"),
}
TAKEN = {"plain", "causal", "offset", "kept keys", "no key", "scale", "sink"}
"""What none may refuse in its own dtypes, but that FlashAttention has no masks."""
MASKS = {"kept keys", "no key"}


@contextlib.contextmanager
def only(name, monkeypatch):
    """The backend of that name at work on the CPU."""
    if name in simulated.KERNELS:
        with simulated.on_the_cpu(monkeypatch):
            yield
        return
    with monkeypatch.context() as patch:
        if name == "flex":
            patch.setattr(flex.Flex, "device_type", "cpu")
            patch.setattr(flex.Flex, "compiler", "none")
            patch.setattr(peer, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
            patch.setattr(peer, "_validate_device", lambda *tensors: None)
            patch.setitem(vars(REGISTRY.FLEX), "_compiled", flex._attend)
            # Its proof, on far larger problems, is tried in test_flex.py; here it is right in every row or the row fails.
            patch.setattr(proof, "failure", lambda backend, problem: None)
        yield


def tensors(shape, dtype):
    batch, heads, key_heads, length, keys, size, value_size = SHAPES[shape]
    shapes = (batch, heads, length, size), (batch, key_heads, keys, size), (batch, key_heads, keys, value_size)
    return [draw(*each, seed=place).to(dtype) for place, each in enumerate(shapes)]


def given(options, shape):
    """Options for tensors of that shape, and as float64 takes them."""
    batch, heads, _, length, keys, _, _ = SHAPES[shape]
    made = {name: each(batch, heads, length, keys) if callable(each) else each for name, each in options.items()}
    return {
        name: each.float() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for name, each in made.items()
    }


def error(found, wanted):
    """Relative, in the 2-norm; equal infinities are no difference."""
    difference = torch.where(found.double() == wanted, 0.0, found.double() - wanted)
    size = torch.where(wanted.isfinite(), wanted, 0.0).norm()
    return (difference.norm() / size.clamp_min(1e-30)).item() if difference.any() else 0.0


def assert_close(name, found, wanted, bound):
    assert found.shape == wanted.shape
    assert error(found, wanted) <= bound, f"{name}: {error(found, wanted):.2e} above {bound:.2e}"


def call(name, *tensors, **options):
    """The results of a backend; None where it refuses."""
    try:
        return ops.attention(*tensors, **options, backend=name)
    except ValueError as error:
        if f"backend {name!r} cannot be used here: " not in str(error):
            raise
        return None


def taken(name, options, shape, dtype):
    """The results and gradients that a backend gives, and those of float64; None where it refuses."""
    inputs, chosen = tensors(shape, dtype), given(options, shape)
    wide = [tensor.double() for tensor in inputs]
    exact = {key: each.double() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
             for key, each in chosen.items()}  # fmt: skip
    if name == "blocks":
        with torch.no_grad():
            results = call(name, *inputs, **chosen)
    else:
        results = call(name, *(each.requires_grad_() for each in inputs), **chosen)
    if results is None:
        return None
    expected = explicit(*(each.requires_grad_() for each in wide), **exact)
    if name == "blocks":
        return results, expected, (), ()
    cotangents = [draw(*each.shape, seed=8 + place) for place, each in enumerate(expected)]
    cotangents[0] = cotangents[0].to(dtype).double()
    idle = expected[1] == -math.inf
    cotangents[1] = cotangents[1].masked_fill(idle, 0.0).float().double()
    slopes = torch.autograd.grad(results, inputs, [g.to(r.dtype) for g, r in zip(cotangents, results, strict=True)])
    return results, expected, slopes, torch.autograd.grad(expected, wide, cotangents)


DTYPES_OF = [pair for pair in itertools.product(NAMES, DTYPES) if pair not in NOT_ITS_DTYPE]


def fast_rows(name, dtype):
    """The rows of a fast test; all of them for a quick backend."""
    if name in QUICK:
        return ROWS
    if MAIN_DTYPE[name] == dtype:
        return [row for row in ROWS if row[1] in (("grouped",) if name == "flex" else ("grouped", "odd", "one key"))]
    return ROWS[::4]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [pytest.param(name, dtype, marks=[] if name in QUICK else pytest.mark.medium) for name, dtype in DTYPES_OF
     if name != "flex" or dtype == MAIN_DTYPE["flex"]],
)  # fmt: skip
def test_what_it_takes_is_right(name, dtype, monkeypatch):
    taken_options = assert_right(name, dtype, fast_rows(name, dtype), monkeypatch)
    if name in QUICK or MAIN_DTYPE[name] == dtype:
        missing = TAKEN - taken_options - (MASKS if name == "flash" else set())
        assert not missing, f"{name} refuses {missing}"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [pair for pair in DTYPES_OF if pair[0] not in QUICK])
def test_what_it_takes_is_right_in_every_row(name, dtype, monkeypatch):
    assert assert_right(name, dtype, ROWS, monkeypatch)


def assert_right(name, dtype, rows, monkeypatch):
    """Results and gradients of all rows that the backend takes; the options that it took."""
    taken_options = set()
    rounding = torch.finfo(DTYPES[dtype]).eps
    with only(name, monkeypatch):
        for option, shape in rows:
            found = taken(name, OPTIONS[option], shape, DTYPES[dtype])
            if found is None:
                continue
            taken_options.add(option)
            results, expected, slopes, wanted = found
            told = f"{option}, {shape}"
            assert results.output.dtype == DTYPES[dtype]
            assert results.log_partition.dtype == (torch.float64 if dtype == "float64" else torch.float32), told
            assert_close(f"{told}, output", results.output.detach(), expected[0].detach(), 6 * rounding)
            # A query times a tensor is a query of the same dtype.
            bound = 30 * torch.finfo(results.log_partition.dtype).eps + (
                rounding if option.startswith("scale") else 0.0
            )
            exponential = FAST_EXPONENTIAL if name == "fused" and DTYPES[dtype].itemsize == 2 else 0.0
            assert_log_partition(told, results.log_partition.detach(), expected[1].detach(), bound, exponential)
            for place, (slope, right) in enumerate(zip(slopes, wanted, strict=True)):
                assert slope.dtype == DTYPES[dtype]
                assert_close(f"{told}, gradient {place}", slope, right, 8 * rounding)
    return taken_options


def assert_log_partition(told, found, wanted, roundings, exponential):
    """Entry by entry, in nats: a few roundings of the largest log Z, and the error of the kernel's exponential."""
    difference = torch.where(found.double() == wanted, 0.0, found.double() - wanted).abs().amax().item()
    largest = torch.where(wanted.isfinite(), wanted, 0.0).abs().amax().clamp_min(1.0).item()
    bound = roundings * largest + exponential
    assert found.shape == wanted.shape
    assert difference <= bound, f"{told}, log Z: {difference:.2e} nats above {bound:.2e}"


@pytest.mark.parametrize(("name", "dtype"), sorted(NOT_ITS_DTYPE))
def test_what_it_lacks_it_says(name, dtype, monkeypatch):
    with only(name, monkeypatch):
        assert all(taken(name, each, "square", DTYPES[dtype]) is None for each in OPTIONS.values())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.medium if name == "flex" else []) for name in NAMES]
)
def test_nan_stays_and_stays_where_it_is(name, monkeypatch):
    for dtype in (each for each in DTYPES if (name, each) not in NOT_ITS_DTYPE):
        query, key, value = tensors("square", DTYPES[dtype])
        query[0, 1, 3] = torch.nan
        with only(name, monkeypatch), torch.no_grad():
            output, log_z = ops.attention(query, key, value, backend=name)
        ill = torch.zeros(2, 2, 9, dtype=torch.bool)
        ill[0, 1, 3] = True
        assert torch.equal(output.isnan().all(-1), ill)
        assert torch.equal(output.isnan().any(-1), ill)
        assert torch.equal(log_z.isnan(), ill)


@pytest.mark.parametrize("name", NAMES)
def test_no_query_and_no_key(name, monkeypatch):
    """As the reference says, or refused."""
    for length, keys in ((0, 4), (3, 0)):
        query, key = torch.zeros(1, 1, length, 8), torch.zeros(1, 1, keys, 8)
        with only(name, monkeypatch), torch.no_grad():
            found = call(name, query, key, key)
        if found is None:
            continue
        output, log_z = found
        assert torch.equal(output, torch.zeros(1, 1, length, 8))
        assert torch.equal(log_z, torch.full((1, 1, length), -torch.inf))


DRAWS = {0.01: 20, 0.001: 400}
"""Of problems, for each share that log Z's cotangent has of the output's."""
OF_SMALL_SHARES = ("fused", "reference", "flash")
"""Of CUDA's kernels one: what they are given of log Z's cotangent is computed by one function."""
SHARES = [
    pytest.param(
        name, dtype, ratio,
        marks=pytest.mark.medium if ratio == 0.01 and MAIN_DTYPE.get(name, "bfloat16") == dtype and name != "flex"
        else pytest.mark.slow,
    )
    for name, dtype, ratio in itertools.product(NAMES, ("float32", "bfloat16", "float16"), DRAWS)
    if name != "blocks" and (name, dtype) not in NOT_ITS_DTYPE
    and (ratio == 0.01 or (name in OF_SMALL_SHARES and dtype != "float16"))
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "ratio"), SHARES)
def test_all_of_log_zs_gradient_arrives(name, dtype, ratio, monkeypatch):
    """Beside a cotangent of the output that many times as large: a rounded sum would lose it without a word."""
    found = []
    with only(name, monkeypatch):
        for seed in range(DRAWS[ratio] if dtype != "float32" else 10):
            inputs, grad, level = problem(96, DTYPES[dtype], seed)
            found.append(arrived(inputs, grad, ratio * level, is_causal=True, backend=name))
    assert_all_arrives(torch.stack(found))


@every_row("requires_grad", [False, True])
def test_a_call_reads_no_signature(requires_grad, monkeypatch):
    """PyTorch's `Function.apply` asks `inspect` at each call, which takes longer than a few tokens."""
    tensors = [torch.randn(1, 1, 4, 2, requires_grad=requires_grad) for _ in range(3)]

    def refuse(*given, **named):
        raise AssertionError("a signature was read")

    monkeypatch.setattr(inspect.Parameter, "__init__", refuse)
    output, log_z = ops.attention(*tensors)
    if requires_grad:
        torch.autograd.grad(output.sum() + log_z.sum(), tensors)
