"""Moments asked for alone: the same numbers, fewer operations; and the position of the largest score."""

import math
from itertools import combinations

import pytest
import torch
from tests.support.ops import explicit
from tests.support.ops.explicit import draw
from tests.support.ops.small_tiles import use_small_tiles
from tests.support.rows import every_row, one_in
from torch.utils._python_dispatch import TorchDispatchMode

from massieu import ops
from massieu.ops import moment_blocks
from massieu.ops.moments import NAMES, MomentsResult

OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "kept": {"log_weight": draw(2, 1, 1, 53, seed=3) > -0.5},
    "weights": {"log_weight": draw(2, 4, 1, 53, seed=3).masked_fill(draw(53, seed=4) > 1, -math.inf)},
    "pairs": {"log_weight": draw(37, 53, seed=3) > 1.5},
    "window": {"window": (2, 1)},
    "offset": {"is_causal": True, "query_offset": 7},
    "cap": {"softcap": 1.5},
    "sink": {"sink": draw(4, seed=5), "is_causal": True},
    "sink and weights": {"sink": 0.3, "log_weight": draw(53, seed=3)},
}


def inputs(length=37, keys=53, dtype=torch.float64):
    return (
        draw(2, 4, length, 8, dtype=dtype),
        draw(2, 2, keys, 8, seed=1, dtype=dtype),
        draw(2, 2, keys, 5, seed=2, dtype=dtype),
    )


@one_in(2, {"backend": ["blocks", "reference"], "option": OPTIONS})
def test_one_alone_is_bit_for_bit_the_one_of_all(option, backend):
    query, key, value = inputs(dtype=torch.float32)
    options = OPTIONS[option] | {"backend": backend}
    whole = ops.attention_moments(query, key, value, **options)
    for names in (*((name,) for name in NAMES), ("entropy", "max_score"), ["score_variance", "prior_mean_score"]):
        for given in (value, None):
            found = ops.attention_moments(query, key, given, moments=names, **options)
            assert (found.output is None) == (given is None)
            assert given is None or torch.equal(found.output, whole.output)
            for name in NAMES:
                assert name not in names or torch.equal(getattr(found, name), getattr(whole, name)), name
                assert name in names or getattr(found, name) is None, name


@every_row("backend", ["blocks", "reference"])
@every_row("option", OPTIONS)
def test_all_against_explicit_weights(option, backend):
    query, key, value = inputs()
    found = ops.attention_moments(query, key, value, backend=backend, **OPTIONS[option])
    wanted = explicit.moments(query, key, value, **OPTIONS[option])
    assert wanted.keys() == set(MomentsResult._fields)
    for name, numbers in wanted.items():
        torch.testing.assert_close(getattr(found, name), numbers, atol=1e-11, rtol=1e-11, msg=name)


@every_row("backend", ["blocks", "reference"])
def test_the_first_of_several_largest_scores(backend):
    """Keys 3, 40 and 41 are one and the best; some see the later only. A score that is not finite has no position."""
    query, key = torch.ones(1, 1, 50, 4), draw(1, 1, 50, 4, dtype=torch.float32).abs()
    key[:, :, [3, 40, 41]] = 9.0
    for options, wanted in (
        ({}, [3] * 50),
        ({"is_causal": True}, [3] * 47),
        ({"log_weight": torch.arange(50) > 3}, [40] * 50),
        ({"log_weight": torch.arange(50) == 41}, [41] * 50),
        ({"sink": 50.0}, [3] * 50),
        ({"log_weight": torch.zeros(50, dtype=torch.bool), "sink": 0.0}, [-1] * 50),
        ({"softcap": 2.0}, [3] * 50),
    ):
        for names in (None, ["max_position"]):
            found = ops.attention_moments(query, key, backend=backend, moments=names, **options).max_position
            assert found.dtype == torch.int64
            assert found[0, 0, -len(wanted) :].tolist() == wanted
    assert ops.attention_moments(query[:, :, :0], key, backend="reference").max_position.shape == (1, 1, 0)
    assert (ops.attention_moments(query, key[:, :, :0], backend="reference").max_position == -1).all()
    for number in (math.nan, math.inf):
        query[0, 0, 7] = number
        places = ops.attention_moments(query, key, backend=backend, moments=("max_position",)).max_position
        assert places is not None
        found = places[0, 0]
        assert found.tolist() == [3] * 7 + [-1] + [3] * 42


@one_in(2, {"backend": ["blocks", "reference"], "window": [(3, 2), (0, 0), (50, 5), (2, 110)]})
def test_positions_in_windows(window, backend, monkeypatch):
    """In chunks of queries, folded into the batch and not, with more queries than keys and fewer."""
    monkeypatch.setattr("massieu.ops.band.LEAST", 8)
    for length, keys in ((120, 120), (120, 100), (100, 120)):
        query, key, _ = inputs(length, keys)
        found = ops.attention_moments(query, key, window=window, backend=backend, moments=["max_position"])
        wanted = explicit.moments(query, key, key, window=window)["max_position"]
        assert torch.equal(found.max_position, wanted)


def test_positions_beyond_what_the_dtype_counts(monkeypatch):
    monkeypatch.setattr(moment_blocks, "COUNTED", 16)
    query, key, value = inputs()
    for options in ({}, {"log_weight": draw(53, seed=4)}):
        found = ops.attention_moments(query, key, backend="blocks", **options)
        assert torch.equal(found.max_position, explicit.moments(query, key, value, **options)["max_position"])


class Operations(TorchDispatchMode):
    """Counts the operations that make or change a tensor as large as the scores."""

    def __init__(self, pairs):
        super().__init__()
        self.pairs, self.large = pairs, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        tensors = [one for one in (found, *args) if isinstance(one, torch.Tensor)]
        views = func.__name__.split(".")[0] in ("view", "slice", "unflatten", "expand", "_unsafe_view", "detach", "t")
        self.large += not views and any(one.numel() >= self.pairs for one in tensors)
        return found


@every_row("weighted", [False, True])
@every_row("backend", ["blocks", "reference"])
def test_fewer_take_fewer_passes_over_the_scores(backend, weighted):
    query, key, _ = inputs(64, 64)
    options = {"backend": backend, "log_weight": draw(64) if weighted else None}

    def passes(*names):
        with Operations(2 * 4 * 64 * 64) as operations:
            ops.attention_moments(query, key, moments=names, **options)
        return operations.large

    chain = ("log_partition",), ("log_partition", "entropy"), ("log_partition", "entropy", "score_variance"), NAMES
    counts = [passes(*names) for names in chain]
    assert counts == sorted(set(counts)), counts
    assert passes("max_score") < counts[0] and passes("prior_score_variance") < counts[-1]
    if backend == "blocks" and not weighted:
        assert passes("prior_log_partition") == 1  # the buffer is made


@every_row("names", [*combinations(("entropy", "score_variance", "prior_mean_score", "max_position"), 2)])
def test_derivatives_of_some(names):
    """The sum of the gradients is that of all together; a position has none."""
    inputs_ = [tensor.requires_grad_() for tensor in inputs(6, 7)]
    found = ops.attention_moments(*inputs_, moments=names, sink=0.2)
    whole = ops.attention_moments(*inputs_, sink=0.2)
    numbers = [name for name in names if name != "max_position"]
    assert all(not getattr(found, name).requires_grad for name in set(names) - set(numbers))
    ours, theirs = (sum(getattr(one, name).sin().sum() for name in numbers) for one in (found, whole))
    torch.testing.assert_close(torch.autograd.grad(ours, inputs_[:2]), torch.autograd.grad(theirs, inputs_[:2]))

    def function(q):
        return ops.attention_moments(q, inputs_[1], moments=names)

    tangent = draw(2, 4, 6, 8, seed=9)
    forward = torch.func.jvp(lambda q: getattr(function(q), numbers[0]), (inputs_[0],), (tangent,))[1]
    _, backward = torch.autograd.functional.jvp(lambda q: getattr(function(q), numbers[0]), inputs_[0], tangent)
    torch.testing.assert_close(forward, backward)


@pytest.mark.needs("compiler")
@pytest.mark.slow
def test_some_inside_compiled_code():
    query, key, _ = (tensor.requires_grad_() for tensor in inputs(9, 9, torch.float32))

    def function(q, k):
        found = ops.attention_moments(q, k, moments=("entropy", "max_position"), window=3)
        assert found.entropy is not None
        return found.entropy.sum(), found.max_position

    loss, place = torch.compile(function, fullgraph=True)(query, key)
    wanted, wanted_place = function(query, key)
    assert torch.equal(place, wanted_place)
    for one, other in zip(
        torch.autograd.grad(loss, (query, key)), torch.autograd.grad(wanted, (query, key)), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_refused_names():
    query, key, _ = inputs(3, 3)
    with pytest.raises(ValueError, match="got 'mean'"):
        ops.moments_backend(query, key, moments=["mean"])
    for given in ("entropy", 3, True, [1], [None], torch.ones(2)):
        with pytest.raises(TypeError, match="moments must be a collection of names"):
            ops.attention_moments(query, key, moments=given)
    for given, word in ((["entropi"], "'entropi'"), ((), "none"), ({"output", "entropy"}, "'output'")):
        with pytest.raises(ValueError, match=f"log_partition, entropy, .*max_position; got {word}$"):
            ops.attention_moments(query, key, moments=given)


FAR_KEYS = 1e3
"""Scores of the last keys lie so far above the others' that theirs vanish beside them."""


@pytest.mark.parametrize("rise", [0.0, 5.0, FAR_KEYS, -FAR_KEYS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiles_of_keys_are_merged(monkeypatch, dtype, rise):
    """Keys in seven tiles, whose largest scores rise or fall; some queries see none of the first tile's keys."""
    use_small_tiles(monkeypatch, 32)
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 50, 4, generator=generator, dtype=torch.float64)
    query[..., 0], key[..., 0] = 1.0, torch.linspace(0, rise, 50)
    keep = torch.ones(50, 50, dtype=torch.bool).tril()
    keep[20:30, :12] = False
    keep[40] = False
    found = ops.attention_moments(*(part.to(dtype) for part in (query, key, value)), log_weight=keep, scale=1.0)
    expected = explicit.moments(query, key, value, log_weight=keep, scale=1.0)
    # A score of about 1,000 carries the rounding of its dtype; its square is a variance's.
    level = 10 * torch.finfo(dtype).eps * max(1.0, abs(rise))
    for name, numbers in expected.items():
        scale = max(1.0, abs(rise)) if "variance" in name else 1.0
        ours = getattr(found, name).to(numbers.dtype)
        torch.testing.assert_close(
            ours, numbers, rtol=level, atol=level * scale, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "length", "keys"),
    [(64, 12, 1, 1100), (300, 2, 2, 1100), (2, 2, 1, 300_000), (3, 1, 300, 2500)],
    ids=["one query of many heads", "two queries of many items", "more keys than a tile", "several tiles"],
)
def test_few_queries_of_many_keys(batch, heads, length, keys, masked):
    """As while a model writes: tiles of several items, of one query, and of all sizes between, as large as they are."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch, heads, length, 2, generator=generator)
    key, value = torch.randn(2, 1, 1, keys, 2, generator=generator).expand(2, batch, heads, keys, 2)
    mask = (torch.arange(keys) % 7 != 3) if masked else None
    found = ops.attention_moments(query, key, value, log_weight=mask, backend="blocks")
    few = slice(batch - 2, batch)
    scores = query[few].double() @ key[few].double().mT / math.sqrt(2)
    visible = torch.ones(keys, dtype=torch.bool) if mask is None else mask
    log_p = torch.log_softmax(scores.masked_fill(~visible, -torch.inf), -1)
    p = log_p.exp()
    # Sums of n terms are rounded by about √n·eps of their size.
    bound = 20 * math.sqrt(keys) * torch.finfo(torch.float32).eps
    torch.testing.assert_close(found.output[few].double(), p @ value[few].double(), rtol=bound, atol=bound)
    entropy = -torch.where(visible, p * log_p, 0.0).sum(-1)
    torch.testing.assert_close(found.entropy[few].double(), entropy, rtol=bound, atol=bound)
    variance = scores[..., visible].var(-1, correction=0)
    torch.testing.assert_close(found.prior_score_variance[few].double(), variance, rtol=bound, atol=bound)
