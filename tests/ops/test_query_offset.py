"""Queries that stand behind the keys of a cache, against explicit masks; every number is that of the pairs that are seen."""

import pytest
import torch
import torch.nn.functional as F
from tests.support.derivatives import check_derivatives
from tests.support.memory import LargestTensor
from tests.support.ops import explicit
from tests.support.ops.explicit import draw
from tests.support.rows import every_row, one_in

from massieu import nn, ops

CASES = {
    "the last of a cache": (1, 10, 9, {"is_causal": True}),
    "a chunk at the end": (5, 12, 7, {"is_causal": True}),
    "a chunk in the middle": (5, 40, 7, {"is_causal": True}),
    "beyond the keys": (4, 6, 9, {"is_causal": True}),
    "more queries than keys": (9, 4, 2, {"is_causal": True}),
    "a causal window": (7, 30, 11, {"is_causal": True, "window": 4}),
    "a window on both sides": (7, 30, 11, {"window": (3, 2)}),
    "a window as wide as all that is before": (5, 30, 11, {"is_causal": True, "window": 20}),
    "a window that hides on its right alone": (5, 30, 11, {"window": (20, 3)}),
    "a window beyond the keys": (6, 5, 9, {"is_causal": True, "window": 2}),
    "chunks of a window": (140, 280, 130, {"is_causal": True, "window": 20}),
    "no position": (3, 5, 7, {}),
    "fewer keys, lower-right": (9, 5, -4, {"is_causal": True}),
    "no query sees a key": (3, 5, -7, {"is_causal": True}),
    "a causal window before the keys": (9, 12, -4, {"is_causal": True, "window": 2}),
    "a window on both sides before the keys": (9, 12, -4, {"window": (3, 2)}),
    "chunks of a window before the keys": (200, 140, -70, {"is_causal": True, "window": 20}),
    "no position, negative": (3, 5, -7, {}),
}


def _tensors(length, keys, dtype=torch.float64):
    return (
        draw(2, 4, length, 8, seed=1, dtype=dtype),
        draw(2, 2, keys, 8, seed=2, dtype=dtype),
        draw(2, 2, keys, 6, seed=3, dtype=dtype),
    )


EXTRAS = {
    "nothing": lambda length, keys: {},
    "keys": lambda length, keys: {"log_weight": draw(2, 1, 1, keys, seed=4)},
    "pairs": lambda length, keys: {"log_weight": draw(2, 4, length, keys, seed=5) < 0.5},
    "sink and cap": lambda length, keys: {"sink": draw(4, seed=6), "softcap": 3.0, "scale": draw(4, seed=7).exp()},
}


@one_in(3, {"case": CASES, "extra": EXTRAS, "backend": ["auto", "blocks", "reference"]})
def test_pairs_that_are_seen(case, extra, backend):
    length, keys, offset, options = CASES[case]
    tensors = _tensors(length, keys)
    options = {"query_offset": offset, **options, **EXTRAS[extra](length, keys)}
    expected, level = explicit.attention(*tensors, **options)
    output, log_z = ops.attention(*tensors, backend=backend, **options)
    torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-11)
    alone = ops.log_partition(*tensors[:2], backend=backend, **options)
    moments = ops.attention_moments(*tensors, backend=backend, **options)
    for found in (log_z, alone, moments.log_partition):
        torch.testing.assert_close(found, level, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", list(CASES), ids=str)
def test_gradients_and_covariances(case):
    length, keys, offset, options = CASES[case]
    tensors = [tensor.requires_grad_() for tensor in _tensors(length, keys)]
    weight = draw(2, 1, 1, keys, seed=4).requires_grad_()
    grad, grad_level = draw(2, 4, length, 6, seed=8), draw(2, 4, length, seed=9)
    results = [
        function(*tensors, query_offset=offset, log_weight=weight, **options)
        for function in (ops.attention, explicit.attention)
    ]
    found, expected = (
        torch.autograd.grad(
            (output * grad).sum() + (log_z.masked_fill(log_z == -torch.inf, 0.0) * grad_level).sum(), [*tensors, weight]
        )
        for output, log_z in results
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    query, key, vector = tensors[0], tensors[1], draw(2, 4, length, 8, seed=10)
    for backend in ("auto", "reference"):
        product = ops.fisher_vp(query, key, vector, query_offset=offset, backend=backend, **options)
        torch.testing.assert_close(
            product, explicit.fisher_vp(query, key, vector, query_offset=offset, **options), rtol=1e-10, atol=1e-10
        )


@every_row("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_word_by_word_is_all_at_once(dtype):
    query, key, value = (draw(2, 4, 21, 8, seed=seed, dtype=dtype) for seed in (1, 2, 3))
    whole = ops.attention(query, key, value, is_causal=True)
    # Two halves of half precision are rounded once more than the whole.
    room = 8 * torch.finfo(dtype).eps
    for first, last in ((0, 7), (7, 8), (8, 20), (20, 21)):
        seen = slice(0, last)
        part = ops.attention(
            query[:, :, first:last], key[:, :, seen], value[:, :, seen], is_causal=True, query_offset=first
        )
        torch.testing.assert_close(part.output, whole.output[:, :, first:last], rtol=room, atol=room)
        torch.testing.assert_close(part.log_partition, whole.log_partition[:, :, first:last], rtol=room, atol=room)


def test_second_derivatives_and_transforms():
    query, key, value = (tensor.requires_grad_() for tensor in _tensors(3, 9))

    def function(query, key, value):
        return tuple(ops.attention(query, key, value, is_causal=True, query_offset=4))

    query, key, value = (tensor[:1, :2, :, :3].detach().requires_grad_() for tensor in (query, key, value))
    check_derivatives(function, (query, key, value))
    stacked = torch.func.vmap(function)(*(torch.stack([t, t + 1]) for t in (query, key, value)))
    torch.testing.assert_close(stacked[0][1], function(query + 1, key + 1, value + 1)[0])
    tangent = torch.func.jvp(function, (query, key, value), (query, key, value))[1]
    step = 1e-6
    moved = function(*((1 + step) * t for t in (query, key, value)))
    torch.testing.assert_close(tangent[1], (moved[1] - function(query, key, value)[1]) / step, rtol=1e-4, atol=1e-4)


def test_nan_is_shown_to_those_who_see_it():
    query, key, value = _tensors(4, 9, torch.float32)
    key = key.clone()
    key[:, :, 6] = torch.nan
    output, log_z = ops.attention(query, key, value, is_causal=True, query_offset=4)
    assert log_z.isnan().any(0).any(0).tolist() == [False, False, True, True]
    assert output.isnan().any(-1).any(0).any(0).tolist() == [False, False, True, True]


def test_many_keys_need_no_mask(monkeypatch):
    """Nothing of queries × keys is made on the way."""
    query, key, value = (draw(1, 1, length, 4, dtype=torch.float32) for length in (300, 3000, 3000))

    with LargestTensor() as mode:
        query.requires_grad_()
        output, log_z = ops.attention(query, key, value, is_causal=True, query_offset=2700)
        (output.sum() + log_z.sum()).backward()
    assert mode.numbers <= 2 * 3000 * 4


@pytest.mark.slow
def test_compiled():
    query, key, value = _tensors(3, 9, torch.float32)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(query, key, value):
        return tuple(ops.attention(query, key, value, is_causal=True, query_offset=4))

    tensors = [tensor.requires_grad_() for tensor in (query, key, value)]
    found, expected = function(*tensors), ops.attention(*tensors, is_causal=True, query_offset=4)
    torch.testing.assert_close(found, tuple(expected))
    slopes = [torch.autograd.grad(output.sin().sum() + log_z.sum(), tensors) for output, log_z in (found, expected)]
    torch.testing.assert_close(*slopes)


def test_wrong_offsets():
    query, key, value = _tensors(3, 9)
    for offset, error in ((2.0, TypeError), (True, TypeError), (None, TypeError), ("3", TypeError)):
        with pytest.raises(error, match="query_offset must be a whole number"):
            ops.attention(query, key, value, is_causal=True, query_offset=offset)
    with pytest.raises(TypeError, match="query_offset must be a whole number"):
        nn.Attention(8, 2)(torch.zeros(3, 8), query_offset=1.5)


@every_row(
    "heads", [None, nn.SoftmaxHeads(window=4), nn.EntmaxHeads(), nn.NormalizedHeads()], ids=lambda h: type(h).__name__
)
def test_a_module_with_fewer_keys(heads):
    """The last query stands at the last key: lower-right alignment, as of a chunk whose first queries precede the keys."""
    torch.manual_seed(0)
    attention = nn.Attention(8, 2, batch_first=True, **({} if heads is None else {"heads": heads})).eval()
    queries, keys = torch.randn(2, 7, 8), torch.randn(2, 4, 8)
    whole = attention(queries, keys, is_causal=True, query_offset=-3)[0]
    # Query i of the last four sees keys 0 … i, and the first three see none.
    last = attention(queries[:, 3:], keys, is_causal=True)[0]
    torch.testing.assert_close(whole[:, 3:], last, rtol=1e-5, atol=1e-6)
    hidden = torch.zeros(3, 4, dtype=torch.bool)
    torch.testing.assert_close(whole[:, :3], attention(queries[:, :3], keys, attn_mask=~hidden)[0])


@every_row(
    "heads", [None, nn.SoftmaxHeads(window=4), nn.EntmaxHeads(), nn.NormalizedHeads()], ids=lambda h: type(h).__name__
)
def test_a_module_decodes(heads):
    torch.manual_seed(0)
    attention = nn.Attention(8, 2, batch_first=True, **({} if heads is None else {"heads": heads})).eval()
    tokens = torch.randn(2, 9, 8)
    for weights in (False, True):
        whole = attention(tokens, is_causal=True, need_weights=weights)
        for first, last in ((0, 4), (4, 5), (5, 9)):
            part = attention(
                tokens[:, first:last], tokens[:, :last], is_causal=True, query_offset=first, need_weights=weights
            )
            torch.testing.assert_close(part[0], whole[0][:, first:last], rtol=1e-5, atol=1e-6)
            if weights and whole[1] is not None:
                torch.testing.assert_close(part[1], whole[1][:, first:last, :last], rtol=1e-5, atol=1e-6)


# --- leading dimensions ----------------------------------------------------------------------------------------------


@every_row("batch", [(), (3,), (2, 3), (1, 1), (2, 1, 3)], ids=str)
def test_as_many_leading_dimensions_as_the_key_has(batch):
    count = torch.Size(batch).numel()
    query, key, value = draw(count, 4, 5, 8, seed=1), draw(count, 2, 7, 8, seed=2), draw(count, 2, 7, 3, seed=3)
    options = {
        "log_weight": draw(count, 1, 5, 7, seed=4),
        "scale": draw(count, 4, 1, 1, seed=5).exp(),
        "sink": draw(count, 4, 5, 1, seed=6),
        "sink_value": draw(count, 1, 1, 3, seed=7),
    }
    wide = {name: option.unflatten(0, batch) if batch else option.squeeze(0) for name, option in options.items()}
    split = (lambda tensor: tensor.unflatten(0, batch)) if batch else (lambda tensor: tensor.squeeze(0))
    for given in (split(query), split(query.unflatten(1, (2, 2)))):
        if given.ndim == len(batch) + 4:
            own = {
                name: option.unflatten(-3, (2, 2)) if option.shape[-3] == 4 else option.unsqueeze(-3)
                for name, option in wide.items()
            }
        else:
            own = wide
        output, log_z = ops.attention(given, split(key), split(value), **own)
        expected, level = ops.attention(query, key, value, **options)
        assert output.shape == (*given.shape[:-1], 3)
        assert log_z.shape == given.shape[:-1]
        torch.testing.assert_close(output.flatten(), expected.flatten())
        torch.testing.assert_close(log_z.flatten(), level.flatten())
        moments = ops.attention_moments(given, split(key), log_weight=own["log_weight"])
        assert moments.entropy.shape == given.shape[:-1]
        assert ops.fisher_vp(given, split(key), given).shape == given.shape


def test_as_pytorchs_attention_takes_three_dimensions():
    query, key, value = draw(4, 5, 8, seed=1), draw(4, 7, 8, seed=2), draw(4, 7, 8, seed=3)
    output, _ = ops.attention(query, key, value, log_weight=torch.arange(7) < 5)
    torch.testing.assert_close(
        output, F.scaled_dot_product_attention(query, key, value, attn_mask=(torch.arange(7) < 5).expand(4, 5, 7))
    )


def test_one_weight_for_every_item_of_one_batch_dimension():
    query, key = draw(2, 3, 4, 5, 8, seed=1), draw(2, 3, 4, 7, 8, seed=2)
    weight = draw(3, 1, 1, 7, seed=3)
    found = ops.log_partition(query, key, log_weight=weight)
    torch.testing.assert_close(found[1], ops.log_partition(query[1], key[1], log_weight=weight))


def test_wrong_leading_dimensions():
    query, key = torch.zeros(2, 3, 4, 5, 8), torch.zeros(2, 3, 4, 7, 8)
    with pytest.raises(ValueError, match=r"key must have shape \(\*batch, H, N, D\), got \(7, 8\)"):
        ops.log_partition(query, key[0, 0, 0])
    with pytest.raises(ValueError, match=r"got \(3, 4, 5, 8\) for key \(2, 3, 4, 7, 8\)"):
        ops.log_partition(query[0], key)
    with pytest.raises(ValueError, match=r"one batch, got \(1, 3\) in .* and \(2, 3\) in"):
        ops.log_partition(query[:1], key)
    with pytest.raises(ValueError, match=r"batch, heads and length \(2, 3, 4, 7\), got \(2, 1, 4, 7, 8\)"):
        ops.attention(query, key, key[:, :1])


def test_a_window_reads_no_keys_that_no_query_sees():
    """Keys outside may hold anything: NaN would reach the results by a product with a weight of 0."""
    query, key, value = _tensors(3, 400)
    expected, level = explicit.attention(query, key, value, window=(5, 2), query_offset=300)
    for tensor in (key, value):
        tensor[:, :, :295], tensor[:, :, 305:] = torch.nan, torch.nan
    for backend in ("auto", "blocks", "reference"):
        output, log_z = ops.attention(query, key, value, window=(5, 2), query_offset=300, backend=backend)
        torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(log_z, level, rtol=1e-11, atol=1e-11)
