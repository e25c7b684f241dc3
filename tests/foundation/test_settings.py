"""Settings of a module in words: which attributes, and how they read."""

import dataclasses
import enum
import functools
import types

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from massieu.foundation.settings import settings_of


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
    assert settings_of(Own().eval(), {}) == {
        "activation": "torch.nn.functional.silu",
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
        "size": "{'width': 8}",
    }


def test_a_configuration_that_two_modules_hold_is_put_into_words_once():
    one, other, known = Own(), Own(), {}
    other.size = one.size
    first = settings_of(one, known)
    one.size.width = 9
    assert settings_of(other, known) == first and settings_of(other, {})["size"] == "{'width': 9}"
