"""Stores of atoms, and attention over them against the matrix of scores in float64."""

import gc
import itertools
import math
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.support.derivatives import check_derivatives
from tests.support.rows import one_in

from massieu.ops import streaming
from massieu.ops.store import AtomBlock, AtomStore

HEADS, SIZE, VALUE = 2, 4, 3


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def atoms(count, dtype=torch.float64):
    return AtomBlock(
        *(draw(HEADS, count, *rest, seed=n, dtype=dtype) for n, rest in enumerate([(SIZE,), (VALUE,), ()]))
    )


def written(path, block, cuts=()):
    """A store with one file for each piece."""
    pieces = [0, *cuts, block.points.shape[1]]
    ranges = [slice(*pair) for pair in itertools.pairwise(pieces)]
    return AtomStore.write(path, (AtomBlock(*(part if part is None else part[:, r] for part in block)) for r in ranges))


def explicit(query, block, scale=0.5):
    """Output and log Z from the matrix of scores; query (B, H, L, D) with heads of one key head side by side."""
    group = query.shape[1] // HEADS
    key = block.points.to(query).repeat_interleave(group, 0)
    value = key if block.values is None else block.values.to(query).repeat_interleave(group, 0)
    scores = scale * query @ key.mT
    if block.log_weight is not None:
        scores = scores + block.log_weight.to(query).repeat_interleave(group, 0).unsqueeze(-2)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    block = atoms(37)
    return block, written(tmp_path_factory.mktemp("stores") / "small", block, (20, 20))


# --- the store -------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(small):
    block, store = small
    assert (len(store), store.counts, store.heads, store.size, store.value_size) == (37, (20, 0, 17), 2, SIZE, VALUE)
    for size in (1, 7, 100):
        read = list(store.blocks(size))
        assert max(len(part.points[0]) for part in read) <= size
        for index, part in enumerate(block):
            assert torch.equal(torch.cat([found[index] for found in read], 1), part)
    assert AtomStore.open(store.files[0].parent) == store
    assert len(AtomStore.open(store.files[2])) == 17


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_and_points_alone(tmp_path, dtype):
    block = AtomBlock(draw(HEADS, 9, SIZE, dtype=dtype))
    store = written(tmp_path / "store", block)
    (read,) = store.blocks()
    assert torch.equal(read.points, block.points) and read.values is None and read.log_weight is None
    query = draw(1, 2, 3, SIZE, seed=5)
    output, log_z = streaming.attention(query, store, scale=0.5)
    wanted = explicit(query, block)
    torch.testing.assert_close(output, wanted[0])
    torch.testing.assert_close(log_z, wanted[1])


def test_a_change_of_a_block_does_not_reach_the_file(small):
    block, store = small
    next(store.blocks()).points.zero_()
    assert torch.equal(next(store.blocks()).points, block.points[:, :20])


def test_an_interrupted_write_leaves_nothing(tmp_path):
    def blocks():
        yield atoms(3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        AtomStore.write(tmp_path / "store", blocks())
    with pytest.raises(ValueError, match="blocks must be alike"):
        AtomStore.write(tmp_path / "store", [atoms(3), atoms(3)._replace(values=None)])
    with pytest.raises(ValueError, match="at least one block"):
        AtomStore.write(tmp_path / "store", [])
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    written(tmp_path / "store", atoms(3))
    with pytest.raises(ValueError, match="already there"):
        written(tmp_path / "store", atoms(5))
    assert len(AtomStore.open(tmp_path / "store")) == 3
    (tmp_path / "empty").mkdir()
    assert len(written(tmp_path / "empty", atoms(5))) == 5


BLOCK = atoms(3)
BAD_BLOCKS = {
    "tuple": ((BLOCK.points,), TypeError, "must be an AtomBlock, got tuple"),
    "no tensor": (BLOCK._replace(points=[[1.0]]), TypeError, "points must be a floating-point tensor, got list"),
    "no points": (BLOCK._replace(points=None), TypeError, "points must be a floating-point tensor, got None"),
    "whole numbers": (
        BLOCK._replace(log_weight=torch.ones(2, 3, dtype=torch.int64)),
        TypeError,
        "got a tensor of torch.int64",
    ),
    "no heads": (AtomBlock(torch.zeros(3, 4)), ValueError, r"points must have shape \(Hk, N, D\).*got \(3, 4\)"),
    "value count": (BLOCK._replace(values=torch.zeros(2, 4, 3)), ValueError, r"values must have .*\(2, 4, 3\)"),
    "weight shape": (BLOCK._replace(log_weight=torch.zeros(3)), ValueError, r"log_weight must have shape \(2, 3\)"),
}


@pytest.mark.parametrize(("block", "error", "message"), BAD_BLOCKS.values(), ids=BAD_BLOCKS)
def test_bad_blocks(tmp_path, block, error, message):
    with pytest.raises(error, match=message):
        AtomStore.write(tmp_path / "store", [block])


def test_bad_files(tmp_path):
    with pytest.raises(ValueError, match="there is none at"):
        AtomStore.open(tmp_path / "nothing")
    with pytest.raises(ValueError, match="holds none"):
        AtomStore.open(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"no header")
    with pytest.raises(ValueError, match="is not a safetensors file that can be read"):
        AtomStore.open(tmp_path)
    for tensors, message in [
        ({"keys": torch.zeros(1, 2, 3)}, r"a tensor named points, got \['keys'\]"),
        ({"points": torch.zeros(1, 2, 3), "x": torch.zeros(1)}, "points, values and log_weight alone"),
        ({"points": torch.zeros(1, 2, 3, dtype=torch.int32)}, "bfloat16, got I32"),
        ({"points": torch.zeros(1, 2, 3), "values": torch.zeros(1, 3, 3)}, r"a.safetensors: values must have shape"),
    ]:
        save_file(tensors, tmp_path / "a.safetensors")
        with pytest.raises(ValueError, match=message):
            AtomStore.open(tmp_path)
    save_file({"points": torch.zeros(1, 2, 3)}, tmp_path / "a.safetensors")
    save_file({"points": torch.zeros(2, 2, 3)}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=re.escape("a.safetensors has 1 heads, points of size 3, no values")):
        AtomStore.open(tmp_path)


def test_a_file_that_changed(tmp_path):
    store = written(tmp_path / "store", AtomBlock(torch.zeros(1, 5, 2)))
    save_file({"points": torch.zeros(1, 4, 2)}, store.files[0])
    with pytest.raises(ValueError, match="has changed since the store was opened"):
        next(store.blocks())


# --- attention over it -----------------------------------------------------------------------------------------------


@pytest.mark.medium
@one_in(3, {"block_size": [1, 7, 1000], "shape": [(3, 4, 5, SIZE), (1, 2, 1, SIZE), (2, 2, 0, SIZE)]})
def test_equal_to_all_keys_at_once(small, shape, block_size):
    block, store = small
    query = draw(*shape, seed=7).requires_grad_()
    output, log_z = streaming.attention(query, store, scale=0.5, block_size=block_size)
    alone = streaming.log_partition(query, store, scale=0.5, block_size=block_size)
    wanted = explicit(query, block)
    for found, expected in zip((output, log_z, alone), (*wanted, wanted[1]), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    found = torch.autograd.grad(output.square().sum() + log_z.sin().sum() + alone.square().sum(), query)
    expected = torch.autograd.grad(wanted[0].square().sum() + wanted[1].sin().sum() + wanted[1].square().sum(), query)
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("part", ["output", "log_partition"])
def test_the_gradient_of_one_result_alone(small, monkeypatch, part, dtype):
    """In tiles of three atoms, which do not divide a block."""
    monkeypatch.setattr(streaming, "TILE_PAIRS", 3 * HEADS * 5)
    block, store = small
    query = draw(1, HEADS, 5, SIZE, seed=7)
    given = query.to(dtype).requires_grad_()
    found = getattr(streaming.attention(given, store, scale=0.5, block_size=8), part)
    query.requires_grad_()
    wanted = explicit(query, block)[part == "log_partition"]
    (found,) = torch.autograd.grad(found.square().sum(), given)
    (wanted,) = torch.autograd.grad(wanted.square().sum(), query)
    torch.testing.assert_close(
        found.double(), wanted, atol=5 * torch.finfo(dtype).eps, rtol=50 * torch.finfo(dtype).eps
    )


@given(count=st.integers(0, 6), batch=st.integers(1, 2), length=st.integers(0, 3), group=st.integers(1, 2))
def test_small_and_empty_stores(tmp_path_factory, count, batch, length, group):
    block = atoms(count)
    store = written(tmp_path_factory.mktemp("stores") / "store", block)
    query = draw(batch, HEADS, group, length, SIZE, seed=7).requires_grad_()
    output, log_z = streaming.attention(query, store, scale=0.5, block_size=2)
    assert output.shape == (*query.shape[:-1], VALUE) and log_z.shape == query.shape[:-1]
    if count == 0:
        assert (log_z == -math.inf).all() and (output == 0).all()
        output.sum().backward()
        assert query.grad is not None and not query.grad.any()
        return
    wanted = explicit(query.flatten(1, 2), block)
    torch.testing.assert_close(output, wanted[0].unflatten(1, (HEADS, group)), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(log_z, wanted[1].unflatten(1, (HEADS, group)), atol=1e-12, rtol=1e-12)


@pytest.mark.medium
def test_derivatives(small):
    _, store = small
    query, scale = draw(1, HEADS, 2, SIZE, seed=7).requires_grad_(), draw(HEADS, seed=8).requires_grad_()
    for function in (streaming.attention, streaming.log_partition):

        def call(query, scale, function=function):
            return function(query, store, scale=scale, block_size=19)

        check_derivatives(call, (query, scale), forward=function is streaming.attention)


@pytest.mark.slow
def test_under_transforms(small):
    block, store = small
    query = draw(3, 1, HEADS, 1, SIZE, seed=7)

    def ours(query):
        return streaming.log_partition(query, store, scale=0.5).sum() + streaming.attention(query, store)[0].sum()

    def wanted(query):
        return explicit(query, block)[1].sum() + explicit(query, block, SIZE**-0.5)[0].sum()

    for transform in (torch.func.grad, torch.func.hessian, lambda f: torch.func.jacfwd(torch.func.jacfwd(f))):
        torch.testing.assert_close(transform(ours)(query[0]), transform(wanted)(query[0]), atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(
        torch.func.vmap(torch.func.grad(ours))(query), torch.func.vmap(torch.func.grad(wanted))(query)
    )
    compiled = torch.compile(lambda query: 2 * ours(2 * query), backend="eager")
    torch.testing.assert_close(compiled(query[0]), 2 * wanted(2 * query[0]))


def test_hidden_atoms_and_extreme_scores(tmp_path):
    block = atoms(8)
    assert block.log_weight is not None
    block.log_weight[:, :4] = -math.inf  # the first blocks hold nothing to see
    block.points.mul_(1e4)
    store = written(tmp_path / "store", block)
    query = draw(1, HEADS, 3, SIZE, seed=7).requires_grad_()
    output, log_z = streaming.attention(query, store, scale=0.5, block_size=2)
    wanted = explicit(query, block)
    torch.testing.assert_close(output, wanted[0])
    torch.testing.assert_close(log_z, wanted[1])
    found = torch.autograd.grad(output.sum() + log_z.sum(), query)
    torch.testing.assert_close(found, torch.autograd.grad(wanted[0].sum() + wanted[1].sum(), query))
    block.log_weight.fill_(-math.inf)
    nothing = written(tmp_path / "nothing", block)
    output, log_z = streaming.attention(query, nothing, block_size=2)
    assert (log_z == -math.inf).all() and (output == 0).all()
    assert not torch.autograd.grad(output.sum() + streaming.log_partition(query, nothing).sum(), query)[0].any()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-2)])
def test_precision_of_the_query(tmp_path, dtype, tolerance):
    block = atoms(50, torch.float32)
    store = written(tmp_path / "store", block)
    query = draw(1, HEADS, 6, SIZE, seed=7, dtype=dtype)
    output, log_z = streaming.attention(query, store, scale=0.5, block_size=16)
    wanted = explicit(query.double(), AtomBlock(*(part.double() for part in block if part is not None)))
    assert output.dtype == dtype and log_z.dtype == torch.float32
    assert (output.double() - wanted[0]).abs().max() < tolerance
    assert (log_z.double() - wanted[1]).abs().max() < 2e-5


def test_passes_through_the_store(small):
    """One a result; one more for attention's gradient, none for that of log Z alone."""
    _, store = small
    seen = []
    query = draw(1, HEADS, 2, SIZE, seed=7).requires_grad_()

    def progress(done, total):
        seen.append((done, total))

    once = [(20, 37), (37, 37)]
    log_z = streaming.log_partition(query, store, block_size=30, progress=progress)
    log_z.sum().backward()
    assert seen == once
    output, log_z = streaming.attention(query, store, block_size=30, progress=progress)
    (output.sum() + log_z.sum()).backward()
    assert seen == 3 * once

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        streaming.attention(query, store, progress=interrupt)


def test_bad_calls(small):
    _, store = small
    query = draw(1, HEADS, 2, SIZE)
    with pytest.raises(TypeError, match="store must be an AtomStore, got a tensor"):
        streaming.attention(query, query)
    with pytest.raises(TypeError, match="query must be a floating-point tensor, got list"):
        streaming.attention([[1.0]], store)
    with pytest.raises(TypeError, match=r"floating-point tensor, got a tensor of torch.int64"):
        streaming.attention(query.long(), store)
    with pytest.raises(ValueError, match=r"one head size, got 3 in \(1, 2, 2, 3\) and 4"):
        streaming.log_partition(query[..., :3], store)
    with pytest.raises(ValueError, match="multiple of the key's 2, got 3"):
        streaming.attention(draw(1, 3, 2, SIZE), store)
    with pytest.raises(ValueError, match=r"shape \(\*batch, H, L, D\) or \(\*batch, Hk, G, L, D\), got \(4,\)"):
        streaming.attention(draw(4), store)
    with pytest.raises(ValueError, match="block_size must be a whole number, at least 1, got 0"):
        streaming.attention(query, store, block_size=0)
    with pytest.raises(TypeError, match="scale must be a number"):
        streaming.attention(query, store, scale="1")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of memory")
def test_memory_does_not_grow_with_the_store(tmp_path):
    """61 MiB of atoms are gone through in less than 16, mapped pages counted, forwards and backwards."""
    script = f"""
        import torch
        from massieu.ops import streaming
        from massieu.ops.store import AtomBlock, AtomStore

        def resident():
            with open("/proc/self/status") as lines:
                return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssFile"))) / 1024

        path = {str(tmp_path / "store")!r}
        def grown(limit):
            base = resident()
            def progress(done, total):
                assert resident() - base < limit, (done, resident() - base)
            query = torch.randn(1, 1, 4, 32, requires_grad=True)
            streaming.attention(query, store, block_size=8192, progress=progress).output.sum().backward()
        store = AtomStore.write(path + "-small", [AtomBlock(torch.randn(1, 1000, 32))])
        grown(1000)  # what libraries allocate once
        store = AtomStore.write(path, (AtomBlock(torch.randn(1, 250_000, 32)) for _ in range(2)))
        grown(16)
    """
    gc.collect()
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
