"""Doors check arguments by their names, compiled code is not checked, and first guesses are told what is meant."""

import pytest
import torch
from tests.support.rows import every_row

from massieu import ops
from massieu.energy import BoltzmannMachine, HopfieldEnergy
from massieu.errors import InputError
from massieu.foundation.doors import MOST, count, door, input_door
from massieu.measures import Atoms, Gaussian
from massieu.nn import Attention, ReLUHeads
from massieu.regression import GaussianKernel
from massieu.solve import fixed_point


@door(width=count)
def example(width: int, *, throw: bool = False, generator: torch.Generator | None = None) -> int:
    return width + throw


@every_row(
    "call, message",
    [
        (lambda: example("x"), "width must be a whole number, got 'x'"),
        (lambda: example(width=True), "width must be a whole number, got True"),
        (lambda: example(10**30), "width must be a whole number, at most"),
        (lambda: example(1, throw=float("nan")), "throw must be True or False, got nan"),
        (lambda: example(1, generator="x"), r"generator must be a torch.Generator, got 'x'"),
    ],
)
def test_an_argument_of_a_wrong_kind_is_one_sentence(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_right_arguments_pass_and_defaults_may_be_none():
    assert example(MOST) == MOST
    assert example(2, throw=True, generator=None) == 3
    assert example(2, generator=torch.Generator()) == 2


def test_an_input_door_raises_input_errors():
    with pytest.raises(InputError, match="number must be a whole number, got 'x'"):
        input_door(number=count)(lambda number: number)("x")


def test_a_class_has_its_methods_checked():
    @door
    class Example:
        @classmethod
        def create(cls, dim: int) -> int:
            return dim

        def draw(self, generator: torch.Generator | None = None) -> None: ...

    for call in (lambda: Example.create(1.5), lambda: Example().draw(3)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"(dim|generator) must be"):
            call()


_POINTS = torch.zeros(3, 2)
_TWO = torch.zeros(2)
_PAIR = torch.zeros(1, 1, 2, 3)


@every_row(
    "call, message",
    [
        (lambda: Attention("64", 8), "embed_dim must be a whole number, got '64'"),
        (lambda: Attention(64, 1e30), "num_heads must be a whole number"),
        (lambda: Attention(64, 8, device=object()), "device must be a torch.device or the name of one"),
        (lambda: Attention(64, 8, dtype="x"), "dtype must be torch.float16, bfloat16, float32 or float64, got 'x'"),
        (lambda: Attention(64, 8, batch_first=object()), "batch_first must be True or False, got object"),
        (lambda: ReLUHeads(scale="x"), "scale must be a number, got 'x'"),
        (lambda: Atoms.create(_POINTS).sample(torch.zeros(2), generator="x"), r"generator must be a torch.Generator"),
        (lambda: Gaussian.create(0.0, 1.0, dim=2).cumulants(_TWO, _TWO, "x"), "order must be a whole number"),
        (lambda: GaussianKernel.create(1.0)(_PAIR, _PAIR.double()), "left and right must have one dtype"),
        (lambda: GaussianKernel.create(1.0)(None, _PAIR), "left must be a floating-point tensor, got None"),
        (lambda: fixed_point(torch.cos, torch.zeros(1), throw=2), "throw must be True or False, got 2"),
        (lambda: fixed_point(torch.cos, torch.zeros(1), max_steps=10**30), "max_steps must be a whole number"),
    ],
)
def test_what_ended_in_internal_text_is_one_sentence(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@every_row(
    "call, message",
    [
        (
            lambda: HopfieldEnergy(_POINTS),
            r"HopfieldEnergy is made by HopfieldEnergy.create\(memory, reference, scale\)",
        ),  # type: ignore[call-arg]
        (
            lambda: Gaussian(0.0, 1.0),
            r"Gaussian is made by Gaussian.create\(location, .*\), not by Gaussian\(0.0, 1.0\)",
        ),  # type: ignore[call-arg,arg-type]
        (
            lambda: BoltzmannMachine(64, 32),
            r"BoltzmannMachine is made by BoltzmannMachine.create\(visible, hidden, weight\)",
        ),  # type: ignore[call-arg,arg-type]
        (lambda: HopfieldEnergy.create(_POINTS, beta=8), "`beta` is `scale` here: the inverse temperature"),  # type: ignore[call-arg]
        (
            lambda: ops.attention(_PAIR, _PAIR, _PAIR, attn_mask=None),
            "`attn_mask` is `log_weight` here: numbers are added",
        ),  # type: ignore[call-arg]
    ],
)
def test_first_guesses_are_told_what_is_meant(call, message):
    with pytest.raises(TypeError, match=message):
        call()
