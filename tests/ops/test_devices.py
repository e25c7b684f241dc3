"""Tiles and losses on another device than the CPU: sizes, masks that nobody looks at, no value that is waited for."""

import ctypes
import functools
import itertools
import subprocess
from pathlib import Path

import pytest
import torch
from tests.support.ops.explicit import draw
from tests.support.rows import every_row
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from massieu import ops
from massieu.ops import received, tiles
from massieu.ops.shapes import AttentionProblem, scores_per_tile

QUERY, KEY, VALUE = draw(2, 4, 9, 3), draw(2, 2, 7, 3, seed=1), draw(2, 2, 7, 2, seed=2)
MASK = draw(2, 4, 9, 7, seed=3) > 0.3
MASKS = {
    "none": None,
    "a key": torch.where(MASK[:, :1, :1], draw(2, 1, 1, 7, seed=4), -torch.inf),
    "nought": torch.zeros(7, dtype=torch.float64),
    "a pair": MASK,
    "a weight a pair": torch.where(MASK, draw(2, 4, 9, 7, seed=4), -torch.inf),
    "no key": torch.zeros(7, dtype=torch.bool),
}
BANDS = {"all": {}, "causal": {"is_causal": True}, "window": {"window": (2, 1)}, "narrow": {"window": 0}}
OPTIONS = {
    f"{mask}, {band}": {"log_weight": MASKS[mask], **BANDS[band]} for mask, band in itertools.product(MASKS, BANDS)
}
FUNCTIONS = {
    "attention": lambda **options: ops.attention(QUERY, KEY, VALUE, **options),
    "attention_moments": lambda **options: ops.attention_moments(QUERY, KEY, VALUE, **options),
    "fisher_vp": lambda **options: (ops.fisher_vp(QUERY, KEY, QUERY, **options),),
    "attention_received": lambda **options: ops.attention_received(QUERY, KEY, **options),
}


@every_row("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_masks_that_nobody_looks_at_hide_the_same(function, options, monkeypatch):
    wanted = function(**options, backend="reference")
    with monkeypatch.context() as patch:
        for module in (tiles, received):
            patch.setattr(module, "can_sync", lambda device: False)
        found = function(**options, backend="blocks")
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@every_row("band", [(None, 0), (None, 3), (-2, 1), (0, 0), (-1, 4), (2, 5), (-9, -3)])
@every_row("keys", [1, 5, 8])
def test_visible_keys_are_those_of_the_band(band, keys):
    """Of every slab of queries, against a mask of pairs."""
    query, key = draw(1, 1, 6, 2), draw(1, 1, keys, 2)
    problem = AttentionProblem(query.unsqueeze(1), key, None, None, 1.0, False, (1, 1, 6), window=band)
    ahead = torch.arange(keys) - torch.arange(6)[:, None]
    wanted = (ahead <= band[1]) & (ahead >= -99 if band[0] is None else ahead >= band[0])
    for first, last in itertools.combinations(range(7), 2):
        seen = tiles._visible(problem, slice(0, 1), slice(first, last))
        shown = torch.zeros(last - first, keys, dtype=torch.bool)
        shown[:, seen.first : seen.last] = True
        if seen.keep is not None:
            shown[:, seen.mixed_first : seen.mixed_last] = seen.keep.flatten(0, 3).bool()
        assert torch.equal(shown, wanted[first:last])
        assert torch.equal(seen.count.flatten().expand(last - first), wanted[first:last].sum(-1).double())


def test_a_device_is_given_more_at_a_time():
    assert scores_per_tile(100, torch.device("cpu")) == 100
    assert scores_per_tile(100, torch.device("cuda")) == scores_per_tile(100, torch.device("xpu")) == 1 << 25
    assert scores_per_tile(1 << 26, torch.device("cuda")) == 1 << 26


class Unread(TorchDispatchMode):
    """Refuses to tell values, or shapes that depend on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.item):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


HOT = {
    **{name: functools.partial(function, backend="blocks") for name, function in FUNCTIONS.items()},
    **{f"{name}, reference": functools.partial(function, backend="reference") for name, function in FUNCTIONS.items()},
}


@every_row("function", HOT.values(), ids=HOT)
def test_nothing_is_read_on_the_way(function, monkeypatch):
    """What runs on CUDA as it is, forward: a value that is asked for there holds up all work."""
    for module in (tiles, received):
        monkeypatch.setattr(module, "can_sync", lambda device: False)
    for options in OPTIONS.values():
        with torch.no_grad(), Unread():
            function(**options)


GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>) }
"""
"""Without it Python cannot index tensors that are said to be on CUDA where there is none."""


@pytest.fixture(scope="session")
def guard(tmp_path_factory):
    if torch.cuda.is_available():
        pytest.skip("with a GPU the suites themselves run there")
    folder, torch_folder = tmp_path_factory.mktemp("guard"), Path(torch.__file__).parent
    (folder / "guard.cpp").write_text(GUARD)
    places = ["-I", torch_folder / "include", "-L", torch_folder / "lib"]
    library = folder / "guard.so"
    command = ["g++", "-shared", "-fPIC", "-std=c++20", *places, folder / "guard.cpp", "-o", library, "-lc10"]
    subprocess.run(command, check=True)
    ctypes.CDLL(str(library))


@pytest.fixture
def cuda(guard):
    """A device of type "cuda" whose tensors have no values; a derivative cannot be taken there."""
    with FakeTensorMode():
        yield torch.device("cuda")


@pytest.mark.needs("compiler")
@pytest.mark.slow
@every_row("dtype", [torch.float64, torch.bfloat16])
@every_row("mask, band", zip(MASKS, [*BANDS, *BANDS], strict=False))
@every_row("backend", ["blocks", "reference"])
def test_on_cuda_all_stays_there(cuda, backend, mask, band, dtype):
    weight = MASKS[mask]
    there = None if weight is None else torch.empty(weight.shape, dtype=weight.dtype, device=cuda)
    query, key, value = (torch.empty(each.shape, dtype=dtype, device=cuda) for each in (QUERY, KEY, VALUE))
    options = {**BANDS[band], "log_weight": there, "backend": backend}
    with torch.no_grad():
        found = [
            ops.attention(query, key, value, **options),
            ops.attention_moments(query, key, value, **options),
            ops.fisher_vp(query, key, query, **options),
            ops.attention_received(query, key, **options),
        ]
    tensors = pytree.tree_leaves(found)
    assert {tensor.device.type for tensor in tensors} == {"cuda"}
    assert tensors[0].shape == (*QUERY.shape[:3], 2)
    assert tensors[0].dtype == dtype
    assert tensors[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
