"""Settings of a module in words: which attributes, and how they read."""

import dataclasses
import enum
import functools
import math
import types

import numpy as np
import pytest
import torch
from tests.support.rows import every_row
from torch import nn
from torch.nn import functional

from massieu.foundation.settings import fingerprint, settings_of, tensor_bytes


@dataclasses.dataclass
class Size:
    width: int = 8


class Kind(enum.Enum):
    CAUSAL = 1


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.weight = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
        self.heads, self.scale, self.name, self.bias, self.causal = 2, 0.5, "own", None, True
        self.activation, self.dtype, self.kind = functional.silu, torch.float16, Kind.CAUSAL
        self.size, self.more = Size(), types.SimpleNamespace(windows=(1, [2]), names={"b", "a"})
        self.groups, self.angles = np.int64(3), np.array([1.0, 0.0], dtype=np.float16)
        self.gate = functools.partial(functional.gelu, approximate="tanh")
        self.last, self.logger = torch.ones(2), object()
        self.forward = functools.partial(print)


def test_the_words():
    result = settings_of(Own().eval(), {})
    assert result.pop("activation").startswith("torch.nn.functional.silu [[b'")
    assert result == {
        "angles": "float16 (2,) 003c0000",
        "bias": "None",
        "causal": "True",
        "dtype": "torch.float16",
        "gate": "[torch._C._nn.gelu, [], {'approximate': 'tanh'}]",
        "groups": "int64 () 0300000000000000",
        "heads": "2",
        "kind": "Kind.CAUSAL",
        "more": "{'names': ['a', 'b'], 'windows': [1, [2]]}",
        "name": "'own'",
        "scale": "0.5",
        "size": f"{__name__}.Size {{'width': 8}}",
    }


def test_a_configuration_that_two_modules_hold_is_put_into_words_once():
    one = Own()
    other = Own()
    visited = {}
    other.size = one.size
    first = settings_of(one, visited)
    one.size.width = 9
    assert settings_of(other, visited) == first and settings_of(other, {})["size"].endswith("{'width': 9}")


@dataclasses.dataclass(frozen=True)
class Constant:
    numbers: torch.Tensor


def scaled_by(number):
    return lambda x: x * number


def of(value):
    module = nn.Identity()
    module.value = value
    return module


@every_row(
    ("one", "other"),
    [
        (lambda x: x * 2, lambda x: x * 3),
        (scaled_by(2), scaled_by(3)),
        (scaled_by(np.float32(2)), scaled_by(np.float32(3))),
        (scaled_by({"one"}), scaled_by({"other"})),
        (scaled_by(torch.ones(2)), scaled_by(torch.zeros(2))),
        (Constant(torch.ones(2)), Constant(torch.zeros(2))),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (math, types),
        (int, float),
    ],
)
def test_values_are_told_apart_as_settings_and_by_their_fingerprint(one, other):
    said = [settings_of(of(value), {})["value"] for value in (one, one, other)]
    assert said[0] == said[1] != said[2]
    assert fingerprint(one) == fingerprint(one) != fingerprint(other)
    assert fingerprint(of(one)) == fingerprint(of(one)) != fingerprint(of(other))


def test_what_a_fingerprint_takes():
    """What holds itself, what is not there yet, what has no numbers, what lies strangely in memory."""

    def early():
        return later

    later = 1
    del later
    alone = torch.arange(12.0).view(3, 4)[:1, 1:2].squeeze(1)
    loop = nn.Linear(2, 2)
    loop.act = lambda x: loop.scale * x
    sparse = torch.eye(3).to_sparse()
    meta = torch.empty(3, device="meta")
    turned = torch.tensor([1 + 2j]).conj()
    assert fingerprint(turned) == fingerprint(torch.tensor([1 - 2j])) != fingerprint(turned.conj())
    for value in (early, loop, sparse, meta, alone, torch.empty(0), torch.ones(2, dtype=torch.bfloat16), object()):
        assert fingerprint(value) == fingerprint(value)
    assert fingerprint(sparse) == fingerprint(torch.eye(3)) != fingerprint(2 * sparse)
    assert fingerprint(alone) == fingerprint(torch.ones(1)) != fingerprint(torch.ones(()))


def test_generators_are_not_in_a_fingerprint():
    one = torch.Generator().manual_seed(0)
    other = torch.Generator().manual_seed(1)
    assert fingerprint(scaled_by(one)) == fingerprint(scaled_by(other))


def plane(numbers):
    return torch.arange(float(numbers)).view(3, -1)


TENSORS = {
    "contiguous": plane(12),
    "a transpose": plane(12).mT,
    "a part": plane(12)[1:],
    "every second column": plane(12)[:, ::2],
    "a scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "expanded": torch.ones(3).expand(2, 3),
    "odd strides where there is one entry": torch.arange(8.0).as_strided((1, 4), (3, 1)),
    "one number of odd strides": torch.ones(1, 1).as_strided((1, 1), (5, 7)),
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "an imaginary part": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "bfloat16": plane(12).bfloat16(),
    "booleans": torch.tensor([True, False]),
    "sparse": plane(12).to_sparse(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_bytes_are_those_of_the_numbers_in_row_major_order(name):
    tensor = TENSORS[name]
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    numbers = np.array(dense.tolist()) if dense.dtype != torch.bfloat16 else None
    if numbers is None:  # NumPy has no such type: the upper half of a float32
        expected = (np.array(dense.float().tolist(), np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        expected = numbers.astype(dense.resolve_conj().resolve_neg().numpy().dtype)
    assert bytes(tensor_bytes(tensor)) == expected.tobytes()


def test_bytes_of_a_contiguous_tensor_are_no_copy():
    """A vocabulary's table is the largest tensor of many models: a copy of it was the peak of a whole probe."""
    tensor = torch.zeros(4, 5)
    numbers = tensor_bytes(tensor)
    tensor[2, 3] = 1.0
    assert np.frombuffer(numbers, np.float32)[13] == 1.0
