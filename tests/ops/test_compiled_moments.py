"""Moments by compiled code: the numbers of float64, whatever the tile, the mask and the number of threads; and no compiler."""

import ctypes
import math
import subprocess
import sys

import pytest
import torch
from tests.support.ops import explicit
from tests.support.ops.explicit import draw
from tests.support.ops.small_tiles import use_small_tiles
from tests.support.rows import every_row, one_in
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from massieu import ops
from massieu.ops.compiled import library, row_sums
from massieu.ops.moments import NAMES, MomentsResult

pytestmark = pytest.mark.needs("compiler")
EPS = torch.finfo(torch.float32).eps

OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "keys": {"log_weight": draw(2, 1, 1, 53, seed=3) > -0.5},
    "pairs": {"log_weight": draw(37, 53, seed=3) > 1.5},
    "window": {"window": (2, 1)},
    "offset": {"is_causal": True, "query_offset": 7},
    "cap": {"softcap": 1.5},
    "sink": {"sink": draw(4, seed=5), "is_causal": True},
}


def inputs(length=37, keys=53):
    shapes = (2, 4, length, 8), (2, 2, keys, 8), (2, 2, keys, 5)
    return [draw(*shape, seed=seed, dtype=torch.float32) for seed, shape in enumerate(shapes)]


@every_row("pairs", [None, 64])
@every_row("option", OPTIONS)
def test_against_float64(option, pairs, monkeypatch):
    """With all keys in one tile, and with tiles of four keys."""
    if pairs is not None:
        use_small_tiles(monkeypatch, pairs)
    tensors = inputs()
    found = ops.attention_moments(*tensors, backend="compiled", **OPTIONS[option])
    wanted = explicit.moments(*tensors, **OPTIONS[option])
    assert wanted.keys() == set(MomentsResult._fields)
    for name, numbers in wanted.items():
        # Scores of eight products and sums over 53 keys, each rounded: 20 roundings of the largest number.
        level = 20 * EPS * max(1.0, float(numbers[numbers.isfinite()].abs().max()))
        torch.testing.assert_close(getattr(found, name).to(numbers.dtype), numbers, atol=level, rtol=0, msg=name)


@one_in(2, {"option": OPTIONS, "pairs": [None, 64]})
def test_one_alone_is_bit_for_bit_the_one_of_all(option, pairs, monkeypatch):
    if pairs is not None:
        use_small_tiles(monkeypatch, pairs)
    query, key, value = inputs()
    options = OPTIONS[option] | {"backend": "compiled"}
    whole = ops.attention_moments(query, key, value, **options)
    for names in (*((name,) for name in NAMES), ("entropy", "max_score"), ["score_variance", "prior_mean_score"]):
        for given in (value, None):
            found = ops.attention_moments(query, key, given, moments=names, **options)
            assert given is None or torch.equal(found.output, whole.output)
            for name in names:
                assert torch.equal(getattr(found, name), getattr(whole, name)), name


@every_row("option", OPTIONS)
def test_threads_change_no_more_than_rounding(option):
    tensors = inputs(170, 53) if "log_weight" not in OPTIONS[option] else inputs()
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(ops.attention_moments(*tensors[:2], backend="compiled", **OPTIONS[option]))
    finally:
        torch.set_num_threads(before)
    for name, one, other in zip(NAMES, *(result[1:] for result in results), strict=True):
        # PyTorch shares the products of scores too, which may round them in another way. Scores lie within 30 of each other.
        torch.testing.assert_close(one, other, atol=20 * EPS * 30, rtol=0, msg=name)


@every_row("keys", [1, 3, 4, 7, 8, 15, 16, 17, 31, 33, 1023, 1024, 1025, 2049])
def test_every_rest_of_a_register(keys):
    scores = draw(2, 3, keys, dtype=torch.float32) * 4
    scores[0, :, ::3] = -math.inf
    for masked, some in ((True, scores[:1]), (False, scores[1:])):
        for names in ({"top"}, {"spread"}, {"total"}, {"position", *row_sums.SUMS}):
            for weights in (False, True):
                found = row_sums.RowSums.empty((1, 3), some)
                tile = some.clone()
                found.write(tile, None, 0, None, masked, names, weights)
                exact = some.double()
                visible = exact > -math.inf
                count = visible.sum(-1, keepdim=True)
                top = exact.amax(-1, keepdim=True)
                if keys == 1 and masked:
                    assert (found.sums["count"] == 0).all()
                    continue
                weight = (exact - top).exp()
                mean = exact.where(visible, 0.0).sum(-1, keepdim=True) / count
                assert torch.equal(found.sums["top"].double(), top) and torch.equal(found.sums["count"], count.float())
                if "position" in names:
                    assert torch.equal(found.position.long(), exact.argmax(-1, keepdim=True))
                torch.testing.assert_close(found.sums["mean"].double(), mean, atol=8 * EPS * 16, rtol=0)
                if weights:
                    torch.testing.assert_close(tile.double(), weight, rtol=0, atol=4 * EPS)
                if weights or "total" in names:
                    torch.testing.assert_close(
                        found.sums["total"].double(), weight.sum(-1, keepdim=True), rtol=8 * EPS, atol=0
                    )
                if "spread" in names:
                    spread = (exact - mean).where(visible, 0.0).norm(dim=-1, keepdim=True)
                    torch.testing.assert_close(found.sums["spread"].double(), spread, rtol=8 * EPS, atol=8 * EPS * 16)


def test_the_exponential_to_two_units_in_the_last_place():
    x = torch.linspace(-87, 0, 200_003)
    found = row_sums.RowSums.empty((1, 1), x)
    tile = x.clone()[None, None]
    found.write(tile, None, 0, None, False, {"total"}, True)
    assert float((tile.double() / x.double().exp() - 1).abs().max()) <= 2 * EPS


def test_weights_far_below_the_largest_vanish():
    """Where e^score would be no normal number: down to the lowest float32, without NaN."""
    query, key = torch.ones(1, 1, 1, 1), torch.tensor([0.0, -86.0, -1e3, -1e10, -1e38])[None, None, :, None]
    found = ops.attention_moments(query, key, scale=1.0, backend="compiled")
    for name, wanted in (("log_partition", 0.0), ("entropy", 0.0), ("score_variance", 0.0), ("max_weight", 1.0)):
        assert float(getattr(found, name)) == pytest.approx(wanted, abs=1e-30)


def test_long_rows_lose_no_digits():
    """A million equal numbers. One by one in single precision they would add up to a hundredth too much."""
    key = torch.full((1, 1, 1_000_003, 1), 0.1)
    found = ops.attention_moments(torch.ones(1, 1, 1, 1), key, scale=1.0, backend="compiled")
    # A lane adds at most 256 keys of a block, with half a unit of rounding each.
    assert float(found.prior_mean_score) == pytest.approx(float(key[0, 0, 0, 0].double()), rel=128 * EPS)
    assert float(found.log_partition) == pytest.approx(0.1 + math.log(1_000_003), rel=2 * EPS)


@every_row("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite(number):
    """A query with one has NaN; a hidden key with one enters nothing; a score of −∞ that is visible is as in plain tiles."""
    query, key, value = inputs()
    query[0, 0, 3] = number
    key[:, :, 5] = number
    keep = torch.ones(37, 53, dtype=torch.bool)
    keep[:, 5] = False
    found = ops.attention_moments(query, key, value, log_weight=keep, backend="compiled")
    clean = torch.where(torch.arange(53)[:, None] == 5, 0.0, key)
    wanted = ops.attention_moments(query, clean, value, log_weight=keep, backend="compiled")
    for name, one, other in zip(found._fields, found, wanted, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)), name
    assert found.entropy[0, 0, 3].isnan() and found.entropy[0, 0, :3].isfinite().all()


@every_row("keys", [3, 20, 53])
def test_a_largest_score_is_no_number_where_a_score_is_none(keys):
    """Alone and with the others; the maxima of a processor leave NaN out, and infinities of both signs add up to NaN."""
    scores = draw(1, 4, keys, dtype=torch.float32)
    scores[0, 0, keys - 1] = math.nan
    scores[0, 1, 0] = math.nan
    scores[0, 2, :2] = torch.tensor([math.inf, -math.inf])
    wanted = scores.amax(-1, keepdim=True)
    for names in ({"top"}, {"top", "total", "position"}):
        for masked in (False, True):
            found = row_sums.RowSums.empty((1, 4), scores)
            found.write(scores.clone(), None, 0, None, masked, names, False)
            assert torch.equal(found.sums["top"].nan_to_num(-7.0), wanted.nan_to_num(-7.0))


@every_row("place", [0, 40, 52])
def test_a_largest_score_is_no_number_in_whichever_tile_it_stands(place, monkeypatch):
    """Tiles of 4 keys: one of NaN is followed, or led, by tiles without it."""
    use_small_tiles(monkeypatch, 64)
    query, key, _ = inputs()
    key[:, :, place] = math.nan
    for names in (("max_score",), ("max_score", "log_partition")):
        found = ops.attention_moments(query, key, moments=names, backend="compiled")
        assert found.max_score.isnan().all()


def test_a_visible_score_of_minus_infinity_is_none_of_a_hidden_pair():
    query, key = torch.full((1, 1, 3, 1), 1e30), torch.linspace(0, 1, 8)[None, None, :, None].clone()
    key[0, 0, 2] = -1e30
    keep = torch.ones(3, 8, dtype=torch.bool)
    keep[:, 4] = False
    found = ops.attention_moments(query, key, scale=1.0, log_weight=keep, backend="compiled")
    wanted = ops.attention_moments(query, key, scale=1.0, log_weight=keep, backend="blocks")
    for name, one, other in zip(NAMES, found[1:], wanted[1:], strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)), name


def reason(*, value=None, **changes):
    tensors = dict(zip(("query", "key"), inputs()[:2], strict=True)) | changes
    with pytest.raises(ValueError, match="'compiled' cannot be used here: ") as raised:
        ops.attention_moments(**tensors, backend="compiled")
    return str(raised.value)


class Marked(torch.Tensor):
    """A class of tensors of one's own."""


def test_what_it_refuses():
    query, key, _ = inputs()
    assert "it has no float64" in reason(query=query.double(), key=key.double())
    assert "no log_weight but booleans" in reason(log_weight=torch.zeros(53))
    assert "no derivative" in reason(query=query.clone().requires_grad_())
    assert "memory of plain tensors" in reason(key=key.as_subclass(Marked))
    assert "runs on the CPU, got meta" in reason(query=query.to("meta"), key=key.to("meta"))
    with FlopCounterMode(display=False):
        assert "dispatch mode" in reason()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert ops.moments_backend(query, key) != "compiled"
    assert ops.moments_backend(query, key) == "compiled"


# --- the library -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A cache of its own, and nothing loaded before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for function in (library.library, row_sums._function, row_sums.failure):
        function.cache_clear()
    yield tmp_path / "massieu"
    for function in (library.library, row_sums._function, row_sums.failure):
        function.cache_clear()


def test_it_is_compiled_once(fresh, monkeypatch):
    assert isinstance(library.library(), ctypes.CDLL)
    (kept,) = fresh.iterdir()
    library.library.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("compiled again"))
    assert isinstance(library.library(), ctypes.CDLL) and [*fresh.iterdir()] == [kept]


def test_without_a_compiler(fresh, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert "it needs a C compiler, and there is no cc, gcc, clang here" in reason()
    assert ops.moments_backend(*inputs()[:2]) == "blocks"
    assert not fresh.exists()


def test_with_a_compiler_that_fails(fresh, monkeypatch, tmp_path):
    for name, script, said in (
        ("false", "echo no such option >&2; exit 1", "failed: no such option"),
        ("silent", "exit 3", "failed: it said nothing"),
        ("foreign", r"printf '\351chec\n' >&2; exit 1", "failed: \ufffdchec"),
    ):
        broken = tmp_path / name
        broken.write_text(f"#!/bin/sh\n{script}\n")
        broken.chmod(0o755)
        monkeypatch.setenv("CC", str(broken))
        library.library.cache_clear()
        row_sums.failure.cache_clear()
        assert said in reason()
    assert ops.moments_backend(*inputs()[:2]) == "blocks"


@pytest.mark.slow
def test_a_damaged_file_is_compiled_again(fresh, monkeypatch, tmp_path):
    library.library()
    (kept,) = fresh.iterdir()
    # In another folder, since a process does not load a path anew.
    damaged = tmp_path / "other" / "massieu" / kept.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(kept.read_bytes()[:100])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    library.library.cache_clear()
    assert isinstance(library.library(), ctypes.CDLL)
    assert len(damaged.read_bytes()) == len(kept.read_bytes())


@pytest.mark.slow
def test_a_cache_that_cannot_be_written(fresh):
    fresh.write_text("a file in the place of the folder")
    assert isinstance(library.library(), ctypes.CDLL)


def test_it_is_tried_in_float32_whatever_the_default(fresh):
    torch.set_default_dtype(torch.float64)
    try:
        assert row_sums.failure() is None
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.slow
def test_a_full_disk_leaves_nothing_half_written(fresh, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(library.os, "replace", full)
    assert isinstance(library.library(), ctypes.CDLL)
    assert not [*fresh.iterdir()]


@pytest.mark.slow
def test_a_user_without_a_home(fresh, monkeypatch):
    """As in a container whose user has no entry: nothing is kept, and nothing is made in the working directory."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(library.os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(fresh.parent)
    assert isinstance(library.library(), ctypes.CDLL)
    assert not [*fresh.parent.iterdir()]


def test_without_a_folder_for_passing_files(fresh, monkeypatch):
    monkeypatch.setattr(library.tempfile, "tempdir", str(fresh / "missing"))
    assert "its code could not be compiled here: " in reason()


@pytest.mark.slow
def test_code_that_is_wrong_is_not_used(fresh, monkeypatch, tmp_path):
    """A compiler that confuses a sum: found on the first small tile."""
    right = library.SOURCE.read_text()
    sum_of_squares = "so_far->second = fused(product, x, so_far->second)"
    assert sum_of_squares in right
    wrong = tmp_path / "row_sums.c"
    wrong.write_text(right.replace(sum_of_squares, "so_far->second += product"))
    monkeypatch.setattr(library, "SOURCE", wrong)
    assert "its sum 'second' is off" in reason()


@pytest.mark.slow
def test_two_processes_at_once(tmp_path):
    code = "from massieu.ops.compiled import row_sums; assert row_sums.failure() is None, row_sums.failure()"
    environment = library.os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    assert len([*(tmp_path / "massieu").iterdir()]) == 1
