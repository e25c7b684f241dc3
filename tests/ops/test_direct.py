"""Calls whose tensors the CPU kernel takes as they are: the same as by the long way, bit for bit, and only such calls."""

import itertools

import pytest
import torch
from tests.support.ops.explicit import draw
from tests.support.rows import every_row

from massieu import ops
from massieu.foundation.listening import listening
from massieu.ops import direct

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHAPES = {"small": (1, 4, 16, 16, 16), "one number": (2, 1, 1, 1, 1), "uneven": (2, 3, 5, 9, 7)}
OPTIONS = ({}, {"is_causal": True}, {"scale": 0.7, "is_causal": True})
CASES = list(itertools.product(SHAPES, DTYPES, range(len(OPTIONS))))
NONE = (None,) * 6


def tensors(shape, dtype, requires_grad=False):
    batch, heads, length, keys, size = SHAPES[shape]
    shapes = (batch, heads, length, size), (batch, heads, keys, size), (batch, heads, keys, size)
    return [draw(*each, seed=place).to(dtype).requires_grad_(requires_grad) for place, each in enumerate(shapes)]


def suits(query, key, value, scale=None, is_causal=False, query_offset=0, backend="auto", others=NONE):
    return direct.suits(query, key, value, scale, is_causal, query_offset, backend, others)


def assert_same(results, others):
    for result, other in zip(results, others, strict=True):
        assert result.dtype == other.dtype and result.squeeze().stride() == other.squeeze().stride()
        torch.testing.assert_close(result, other, rtol=0, atol=0, equal_nan=True)


@every_row("shape, dtype, option", CASES)
def test_the_same_as_by_the_long_way(shape, dtype, option):
    """The long way is taken by a call that names the backend."""
    query, key, value = tensors(shape, dtype)
    options = OPTIONS[option]
    assert suits(query, key, value, **options)
    assert_same(
        ops.attention(query, key, value, **options), ops.attention(query, key, value, backend="fused", **options)
    )
    level = ops.log_partition(query, key, **options)
    assert_same([level], [ops.log_partition(query, key, backend="fused", **options)])


@every_row("shape, dtype, option", CASES)
def test_gradients_are_the_same(shape, dtype, option):
    results = []
    for backend in ("auto", "fused"):
        inputs = tensors(shape, dtype, requires_grad=True)
        call = {"backend": backend, **OPTIONS[option]}
        output, level = ops.attention(*inputs, **call)
        alone = ops.log_partition(*inputs[:2], **call)
        total = output.float().sin().sum() + level.cos().sum() + alone.square().sum()
        results.append(torch.autograd.grad(total, inputs))
    assert_same(*results)


def test_keys_that_are_the_values():
    query, key, _ = tensors("small", torch.float64, requires_grad=True)
    results = []
    for backend in ("auto", "fused"):
        output, level = ops.attention(query, key, key, backend=backend)
        results.append(torch.autograd.grad(output.square().sum() + level.sum(), (query, key), create_graph=True))
    assert_same(*results)
    second = [torch.autograd.grad(gradient[1].square().sum(), key)[0] for gradient in results]
    torch.testing.assert_close(*second)


def test_extreme_numbers():
    query, key, value = tensors("uneven", torch.float32)
    query[0, 0, 0] = torch.nan
    query[0, 1] = 0
    query[1, 0] *= 1e30
    key[1, 0] *= 1e30
    value[0, 2, 3] = torch.inf
    assert suits(query, key, value)
    assert_same(ops.attention(query, key, value), ops.attention(query, key, value, backend="fused"))


def test_any_other_call_goes_the_long_way():
    query, key, value = tensors("uneven", torch.float32)
    weights = (key[..., :1], *NONE[1:])
    refused = {
        "no tensor": suits(query.tolist(), key, value),
        "a parameter": suits(torch.nn.Parameter(query), key, value),
        "another dtype": suits(query.double(), key, value),
        "whole numbers": suits(query.long(), key.long(), value.long()),
        "sparse": suits(query, key.to_sparse(), value),
        "nested": suits(torch.nested.nested_tensor([query[0], query[1]]), key, value),
        "meta": suits(query.to("meta"), key, value),
        "three dimensions": suits(query[0], key[0], value[0]),
        "grouped": suits(query.unsqueeze(2), key, value),
        "fewer key heads": suits(query, key[:, :1], value[:, :1]),
        "another batch": suits(query[:1], key, value),
        "another head size": suits(query[..., :3], key, value),
        "other sizes of values": suits(query, key, value[..., :3]),
        "no key": suits(query, key[:, :, :0], value[:, :, :0]),
        "no query": suits(query[:, :, :0], key, value),
        "log-weights": suits(query, key, value, others=weights),
        "a tensor as scale": suits(query, key, value, scale=torch.tensor(1.0)),
        "a scale of 0": suits(query, key, value, scale=0.0),
        "NaN as scale": suits(query, key, value, scale=torch.nan),
        "an infinite scale": suits(query, key, value, scale=torch.inf),
        "a whole number as flag": suits(query, key, value, is_causal=1),
        "a flag as offset": suits(query, key, value, query_offset=False),
        "an offset": suits(query, key, value, query_offset=1),
        "a backend": suits(query, key, value, backend="reference"),
    }
    assert [name for name, answer in refused.items() if answer is not False] == []


def test_the_context_of_a_call():
    query, key, value = tensors("uneven", torch.float32)

    class Ears:
        def listens(self):
            return True

    with listening(Ears()):
        assert not suits(query, key, value)
    with torch.autocast("cpu"):
        assert not suits(query, key, value)
        assert ops.attention(query, key, value).output.dtype == torch.bfloat16
    answers = []
    torch.vmap(lambda each: answers.append(suits(each, key, value)) or each)(query.unsqueeze(0))
    assert answers == [False]
    assert suits(query, key, value)


@pytest.mark.medium
def test_compiled_code_goes_the_long_way():
    query, key, value = tensors("uneven", torch.float32)
    compiled = torch.compile(lambda *given: tuple(ops.attention(*given)), backend="aot_eager", fullgraph=True)
    for result, other in zip(compiled(query, key, value), ops.attention(query, key, value), strict=True):
        torch.testing.assert_close(result, other)
