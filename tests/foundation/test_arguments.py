"""Every check accepts what it should, and says in one sentence what else it was given."""

import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from tests.support.rows import every_row
from torch.func import grad, vmap

from massieu.foundation import arguments as a

ONES = torch.ones(2, 3)
SPARSE = ONES.to_sparse()


@every_row(
    "value, words",
    [
        (3, "3"),
        (None, "None"),
        (True, "True"),
        ("word", "'word'"),
        ((1, 2.5), "(1, 2.5)"),
        ("x" * 100, "str"),
        ([1, 2], "list"),
        (ONES, "a tensor of torch.float32"),
        (SPARSE, "a sparse_coo tensor"),
        (object, "type"),
    ],
)
def test_described(value, words):
    assert a.described(value) == words


def test_a_nested_tensor_is_described():
    """Made in the test: the first one of a process takes seconds, which every collection of tests would pay."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert a.described(nested) == "a nested tensor"


@every_row(
    "call, error, message",
    [
        (lambda: a.floating("x", 3), TypeError, "x must be a floating-point tensor, got 3"),
        (
            lambda: a.floating("x", torch.arange(3)),
            TypeError,
            "x must be a floating-point tensor, got a tensor of torch.int64",
        ),
        (lambda: a.floating("x", SPARSE), TypeError, "x must be a floating-point tensor, got a sparse_coo tensor"),
        (
            lambda: a.floating("x", torch.arange(3), or_boolean=True),
            TypeError,
            "x must be a boolean or floating-point tensor, got a tensor of torch.int64",
        ),
        (lambda: a.boolean("mask", ONES), TypeError, "mask must be a boolean tensor, got a tensor of torch.float32"),
        (
            lambda: a.integers("n", ONES > 0),
            TypeError,
            "n must be a tensor of whole numbers, got a tensor of torch.bool",
        ),
        (lambda: a.real_tensor("x", ONES + 1j), TypeError, "x must be real, got a tensor of torch.complex64"),
        (lambda: a.real_tensor("x", 1j), TypeError, "x must be real, got a tensor of torch.complex64"),
        (lambda: a.real_tensor("x", SPARSE), TypeError, "x must be a dense tensor, got a sparse_coo tensor"),
        (
            lambda: a.real_tensor("x", None),
            TypeError,
            "x must be a floating-point tensor, or numbers to make one of, got None",
        ),
        (lambda: a.as_tensor("x", "no", ONES), TypeError, "x must be a number or a floating-point tensor, got 'no'"),
        (
            lambda: a.as_tensor("x", ONES.to("meta"), ONES),
            ValueError,
            "x is on meta, where tensors have no values: move it with .to",
        ),
        (lambda: a.check_dense("x", SPARSE), TypeError, "x must be a dense tensor, got a sparse_coo tensor"),
        (lambda: a.check_shape("x", ONES, (2, 4)), ValueError, "x must have shape (2, 4), got (2, 3)"),
        (lambda: a.check_shape("x", ONES, ("N",)), ValueError, "x must have shape (N,), got (2, 3)"),
        (
            lambda: a.check_one_device(x=ONES, y=ONES.to("meta")),
            ValueError,
            "tensors must be on one device, got x on cpu and y on meta: move one with .to",
        ),
        (
            lambda: a.check_broadcastable(x=ONES, y=torch.ones(2)),
            ValueError,
            "shapes must fit each other, got x (2, 3) and y (2,)",
        ),
        (lambda: a.check_values(x=ONES.to("meta")), ValueError, "x must have values, got a tensor on the meta device"),
        (lambda: a.check_finite(x=ONES / 0), ValueError, "x must be finite, got inf"),
        (lambda: a.check_range("x", -ONES, above=0), ValueError, "x must be positive and finite, got -1"),
        (lambda: a.check_range("x", -ONES, least=0), ValueError, "x must be finite and at least 0, got -1"),
        (
            lambda: a.check_range("x", 1.5, above=0, most=1),
            ValueError,
            "x must be finite, above 0 and at most 1, got 1.5",
        ),
        (lambda: a.check_log_probabilities(x=ONES / 0), ValueError, "x must be finite or -inf, got NaN or +inf"),
        (lambda: a.number("x", True), TypeError, "x must be a number, got True"),
        (lambda: a.number("x", ONES), TypeError, "x must be a number, got a tensor of torch.float32"),
        (lambda: a.number("x", math.nan), ValueError, "x must be finite, got nan"),
        (lambda: a.number("x", math.inf, least=0), ValueError, "x must be finite and at least 0, got inf"),
        (lambda: a.number("x", 1, below=1), ValueError, "x must be finite and below 1, got 1"),
        (lambda: a.positive("x", "1"), TypeError, "x must be a number or a floating-point tensor, got '1'"),
        (
            lambda: a.positive("x", torch.arange(2)),
            TypeError,
            "x must be a floating-point tensor, got a tensor of torch.int64",
        ),
        (lambda: a.positive("x", torch.tensor([1.0, 0.0])), ValueError, "x must be positive and finite, got 0"),
        (lambda: a.positive("x", math.inf), ValueError, "x must be positive and finite, got inf"),
        (
            lambda: a.expanded("x", torch.ones(3), (3, 2), "the memory's batch"),
            ValueError,
            "x of shape (3,) does not broadcast to the memory's batch (3, 2)",
        ),
        (lambda: a.expanded("x", ONES, (3,)), ValueError, "x of shape (2, 3) does not broadcast to the batch (3,)"),
        (lambda: a.whole_number("n", 1.0), TypeError, "n must be a whole number, got 1.0"),
        (lambda: a.whole_number("n", False), TypeError, "n must be a whole number, got False"),
        (lambda: a.whole_number("n", 0, least=1), ValueError, "n must be a whole number, at least 1, got 0"),
        (
            lambda: a.whole_number("n", 9, least=1, most=6),
            ValueError,
            "n must be a whole number, at least 1 and at most 6, got 9",
        ),
        (lambda: a.whole_number("n", 1 << 63), ValueError, f"n must be below 2⁶³, got {1 << 63}"),
        (lambda: a.flag("throw", 1), TypeError, "throw must be True or False, got 1"),
        (lambda: a.choice("m", "c", "a", "b", None), ValueError, "m must be 'a', 'b' or None, got 'c'"),
        (lambda: a.choice("m", 1, "a"), ValueError, "m must be 'a', got 1"),
        (lambda: a.choice("m", [], "a", "b"), ValueError, "m must be 'a' or 'b', got list"),
        (lambda: a.generator("generator", 7), TypeError, "generator must be a torch.Generator, got 7"),
        (
            lambda: a.check_fits("cap", 1e6, torch.float16),
            ValueError,
            "cap must be finite in torch.float16, got 1000000.0",
        ),
        (lambda: a.check_fits("cap", math.nan, torch.float16), ValueError, "cap must be finite, got nan"),
    ],
    ids=range(46),
)
def test_messages(call, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call()


def test_which_floating_point_tensors_are_taken():
    with pytest.raises(
        TypeError, match=r"^x must be a 16-, 32- or 64-bit floating-point tensor, got a tensor of .*float8"
    ):
        a.floating("x", ONES.to(torch.float8_e5m2))


def test_what_is_right_is_returned():
    assert a.floating("x", ONES) is ONES
    mask = ONES > 0
    assert a.floating("x", mask, or_boolean=True) is mask
    assert a.boolean("x", mask) is mask
    index = torch.arange(3)
    assert a.integers("x", index) is index
    assert a.number("x", 2) == 2
    assert a.number("x", np.float32(0.5)) == a.number("x", Fraction(1, 2)) == 0.5
    assert type(a.whole_number("x", np.int64(3), least=3, most=3)) is int
    assert a.flag("x", False) is False
    assert a.choice("x", None, "a", None) is None
    generator = torch.Generator()
    assert a.generator("x", generator) is generator
    a.check_shape("x", ONES, (2, "D"))
    a.check_broadcastable(x=ONES, y=torch.ones(3), z=2.0, w=torch.ones(2, 1))
    a.check_one_device(x=ONES, y=torch.tensor(1.0), z=3)
    a.check_one_device(x=ONES, y=torch.ones(2, device="cpu:0"))
    a.check_log_probabilities(x=-ONES / 0)
    a.check_finite(x=ONES.to("meta"), y=torch.arange(3), z=torch.ones(0))


def test_numbers_become_tensors():
    assert a.real_tensor("x", [1, 2]).dtype == torch.float32
    assert a.real_tensor("x", 1, ONES.double()).dtype == torch.float64
    assert a.real_tensor("x", torch.arange(2)).dtype == torch.float32
    assert a.real_tensor("x", np.ones(2), ONES).dtype == torch.float64
    assert a.as_tensor("x", 1, ONES.double()).dtype == torch.float64
    assert a.as_tensor("x", 1, ONES, torch.float64).dtype == torch.float64
    assert a.positive("x", 0.1).dtype == torch.float64
    assert a.positive("x", ONES) is ONES
    assert a.expanded("x", torch.ones(2, 1), (4, 2, 3)).shape == (4, 2, 3)
    assert a.as_tensor("x", ONES.to("meta"), ONES.to("meta")).is_meta


def test_values_are_checked_inside_transforms():
    bad = torch.tensor([[1.0, 2.0], [3.0, math.nan]])

    def checked(x):
        a.check_finite(x=x)
        return x.sum()

    for call in (vmap(checked), grad(checked), vmap(grad(checked))):
        call(torch.ones(2, 2))
        with pytest.raises(ValueError, match="x must be finite, got nan"):
            call(bad)


@pytest.mark.slow
def test_checks_are_compiled_whole():
    def checked(x, n, flag):
        a.check_one_device(x=a.floating("x", x), y=x + 1)
        a.check_range("x", x, above=0)
        a.check_log_probabilities(x=x)
        a.check_shape("x", x, (2, "D"))
        a.number("n", n, least=0)
        a.whole_number("k", 3, least=1)
        a.choice("m", "a", "a", "b")
        return a.as_tensor("n", n, x) * x if a.flag("flag", flag) else x

    torch.testing.assert_close(torch.compile(checked, backend="eager", fullgraph=True)(ONES, 2.0, True), 2 * ONES)


@pytest.mark.medium
def test_numbers_become_tensors_in_compiled_code():
    result = torch.compile(lambda like: a.real_tensor("x", 0.5, like), fullgraph=True, backend="eager")(torch.ones(2))
    assert result.dtype == torch.float32
    assert result == 0.5
