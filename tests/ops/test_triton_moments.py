"""What is around the Triton kernels of CUDA: which problems they get, and that a wrong one is not used.

There is no Triton on the CPU. In place of the kernels stand explicit matrices, with what the kernels want of their arguments.
The kernels themselves are held against float64 before they are used, by `benchmarks/on_cuda.py`, and by `scripts/fuzz_ops.py`.
"""

import sys
import types
import warnings

import pytest
import torch
from tests.support.ops import explicit
from tests.support.ops.explicit import draw
from tests.support.rows import every_row

from massieu import ops
from massieu.ops import fused_kernel
from massieu.ops.cuda import proof, rows, triton_moments

MODULE = sys.modules["massieu.ops.moments"]
SINGLE = torch.finfo(torch.float32).eps


def kernel(problem, names, wrong=""):
    """As `massieu.ops.cuda.moment_kernel.moments`, which wants a positive number for a scale and rows of adjacent numbers."""
    assert isinstance(problem.scale, float) and problem.scale > 0 and problem.documents is None
    assert all(part.stride(-1) == 1 for part in (problem.query, problem.key))
    assert problem.log_weight is None or problem.log_weight.dtype == torch.bool
    batch, key_heads, group, length, _ = problem.query.shape
    tensors = [problem.query.flatten(1, 2), problem.key, problem.key if problem.value is None else problem.value]
    low, high = problem.band or (-length, problem.key.shape[2])
    ahead = torch.arange(problem.key.shape[2]) - torch.arange(length)[:, None]
    kept = (ahead <= high) & (ahead >= (-length if low is None else low))
    if problem.log_weight is not None:
        whole = problem.log_weight.expand(batch, key_heads, group, length, -1).flatten(1, 2)
        kept = kept & whole
    found = explicit.moments(
        *(tensor.double() for tensor in tensors), log_weight=kept, scale=problem.scale, softcap=problem.softcap
    )
    if wrong:
        found[wrong] = 1.001 * found[wrong]
    wanted = [*names, *([] if problem.value is None else ["output"])]
    shape = batch, key_heads, group, length
    return {
        name: found[name]
        .reshape(*shape, *found[name].shape[3:])
        .to(torch.int64 if name == "max_position" else problem.query.dtype if name == "output" else torch.float32)
        for name in wanted
    }


@pytest.fixture
def installed(monkeypatch):
    """Triton's backend on the CPU."""

    def install(wrong=""):
        module = types.ModuleType("moment_kernel")
        module.moments = lambda problem, names: kernel(problem, names, wrong)
        monkeypatch.setitem(sys.modules, "massieu.ops.cuda.moment_kernel", module)
        monkeypatch.setattr(sys.modules["massieu.ops.cuda"], "moment_kernel", module, raising=False)
        monkeypatch.setattr(triton_moments, "find_spec", lambda name: True)
        monkeypatch.setattr(triton_moments.TritonMoments, "device_type", "cpu")
        monkeypatch.setattr(proof, "_verdicts", {})
        monkeypatch.setattr(proof, "_warned", set())
        monkeypatch.setattr(proof, "LENGTHS", (35, 75))

    return install


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "offset": {"is_causal": True, "query_offset": 9},
    "window": {"window": (3, 1)},
    "a window behind the first query": {"window": (2, 0), "query_offset": 30},
    "soft cap": {"softcap": 0.8, "scale": 0.7},
    "scales of heads": {"scale": torch.tensor([0.3, -0.5, 1.0, 0.0])},
    "negative scale": {"scale": -0.4},
    "no scale": {"scale": 0.0},
    "mask of keys": {"log_weight": draw(1, 1, 1, 40) > -0.5, "is_causal": True},
    "mask of pairs": {"log_weight": draw(20, 40) > 1.5},
    "a sink": {"sink": torch.tensor([0.0, 1.0, -1.0, 2.0]), "is_causal": True},
}


@every_row("name", list(OPTIONS), ids=str)
def test_problems_reach_the_kernel_as_they_are(installed, name):
    installed()
    tensors = [draw(2, heads, length, 6, seed=heads + length).float() for heads, length in ((4, 20), (2, 40), (2, 40))]
    found = ops.attention_moments(*tensors, **OPTIONS[name], backend="triton")
    exact = explicit.moments(*(tensor.double() for tensor in tensors), **OPTIONS[name])
    for moment, wanted in exact.items():
        one = getattr(found, moment)
        if moment == "max_position":
            # Where all scores are equal the first that is seen has the largest.
            assert torch.equal(one, wanted), moment
            continue
        assert torch.equal(one.isfinite(), wanted.isfinite()), moment
        error = (explicit.finite(one.double()) - explicit.finite(wanted)).abs().max()
        assert error <= 32 * SINGLE * (1 + explicit.finite(wanted).abs().max()), (moment, error)


@pytest.mark.medium
def test_documents_are_done_one_by_one_or_padded(installed):
    installed()
    tensors = [draw(1, heads, 20, 6, seed=heads).float() for heads in (4, 2, 2)]
    documents = ops.Documents.of_lengths((9, 1, 10))
    found = ops.attention_moments(*tensors, documents=documents, is_causal=True, backend="triton")
    parts = [
        explicit.moments(*(tensor[:, :, first:last].double() for tensor in tensors), is_causal=True)
        for first, last in ((0, 9), (9, 10), (10, 20))
    ]
    for moment in ("entropy", "score_variance", "max_score", "log_partition"):
        wanted = torch.cat([part[moment] for part in parts], 2)
        torch.testing.assert_close(getattr(found, moment).double(), wanted, rtol=1e-5, atol=1e-5)
    wanted = torch.cat([part["max_position"] + first for part, first in zip(parts, (0, 9, 10), strict=True)], 2)
    assert torch.equal(found.max_position, wanted)


REFUSED = {
    "float64": (torch.zeros(1, 1, 2, 4, dtype=torch.float64), {}, "no float64"),
    "float log-weights": (torch.zeros(1, 1, 2, 4), {"log_weight": torch.zeros(2)}, "booleans"),
    "large heads": (torch.zeros(1, 1, 2, 300), {}, "at most 256"),
    "a gradient": (torch.zeros(1, 1, 2, 4, requires_grad=True), {}, "no derivative"),
}


@every_row("name", list(REFUSED), ids=str)
def test_what_the_kernel_cannot_do_is_said(installed, name):
    installed()
    tensor, options, reason = REFUSED[name]
    with pytest.raises(ValueError, match=f"backend 'triton' cannot be used here: .*{reason}"):
        ops.attention_moments(tensor, tensor, tensor, **options, backend="triton")


def test_heads_that_lie_far_apart_in_memory_are_refused():
    """A kernel's places in a head are of 32 bits: of 600,000 keys, with 4,096 numbers between one row and the next."""
    near = torch.empty(1, 1, 1, 8, 64, device="meta")
    far = torch.empty(1, 600_000, 64, 64, device="meta").transpose(1, 2)
    for key, reach in ((far, 599_999 * 4096 + 63), (far[:, :, :500_000], 499_999 * 4096 + 63)):
        problem = types.SimpleNamespace(query=near, key=key, value=None, log_weight=None)
        assert triton_moments._reach(problem) == reach
        assert (reach >= triton_moments.MOST_REACH) is (key is far)


def test_on_the_cpu_it_is_refused():
    tensor = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="it runs on CUDA, got cpu"):
        ops.attention_moments(tensor, tensor, backend="triton")


@every_row("moment", ["score_variance", "prior_mean_score", "output"], ids=str)
def test_a_wrong_kernel_is_found_out_and_said_once(installed, moment):
    installed(wrong=moment)
    tensors = [draw(1, 2, 20, 16, seed=seed).float() for seed in range(3)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            with pytest.raises(ValueError, match=f"its {moment} is off by 1.0e-03"):
                ops.attention_moments(*tensors, is_causal=True, backend="triton")
    assert len(said) == 1


def test_it_is_preferred():
    names = [backend.name for backend in MODULE._registry(("entropy",))]
    assert names == ["triton", "compiled", "blocks", "reference"] == list(MODULE.BACKENDS)


# --- rows ------------------------------------------------------------------------------------------------------------


def test_rows_are_handed_to_the_kernels_where_these_are_usable(monkeypatch):
    """With plain operations for kernels the gradients are what they were."""
    taken = []
    grad, output, level = draw(2, 3, 9, 8).half(), draw(2, 3, 9, 8, seed=1).half(), draw(2, 3, 9, seed=2).float()
    module = types.ModuleType("row_kernels")

    def merged(grad_output, grad_log_z, given, tiny, share):
        taken.append((tiny, share))
        return fused_kernel._merged(grad_output, grad_log_z, given)

    module.merged = merged
    module.with_missing = lambda output, log_z: rows._plain_missing(output, log_z)
    module.scaled = lambda numbers, factor: (numbers.double() * factor).to(numbers.dtype)
    alone = fused_kernel._merge_cotangents(grad, level, output), rows.scaled(grad, torch.tensor(0.25))
    monkeypatch.setitem(sys.modules, "massieu.ops.cuda.row_kernels", module)
    monkeypatch.setattr(sys.modules["massieu.ops.cuda"], "row_kernels", module, raising=False)
    monkeypatch.setattr(rows, "usable", lambda output: True)
    found = fused_kernel._merge_cotangents(grad, level, output), rows.scaled(grad, torch.tensor(0.25))
    assert taken == [rows.least_parts(torch.float16)]
    torch.testing.assert_close(found, alone, rtol=0, atol=0)
    # Both are tried on the device before they are used: plain operations pass, and wrong ones do not.
    assert rows._difference(torch.device("cpu")) is None
    module.scaled = lambda numbers, factor: numbers
    assert rows._difference(torch.device("cpu")) == "their numbers are wrong"
    module.merged = lambda *given: fused_kernel._merged(given[0], 1.01 * given[1], given[2])
    assert rows._difference(torch.device("cpu")) == "their numbers are wrong"


def test_a_kernel_that_cannot_be_compiled_is_said_once(monkeypatch):
    module = types.ModuleType("row_kernels")

    def failing(*given):
        raise RuntimeError("Failed to find C compiler")

    module.merged = failing
    monkeypatch.setitem(sys.modules, "massieu.ops.cuda.row_kernels", module)
    monkeypatch.setattr(sys.modules["massieu.ops.cuda"], "row_kernels", module, raising=False)
    monkeypatch.setattr(rows, "find_spec", lambda name: True)
    monkeypatch.setattr(rows, "_verdicts", {})
    with pytest.warns(
        UserWarning, match="not used on cpu, but plain operations: RuntimeError: Failed to find C compiler"
    ):
        assert not rows._try(torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not rows._try(torch.device("cpu"))
