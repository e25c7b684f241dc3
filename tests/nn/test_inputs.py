"""What modules are given wrongly: one sentence of ours, never a message from a kernel far below."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.rows import every_row
from tests.support.sentences import works_or_says
from torch import Tensor, nn

from massieu import measures
from massieu import nn as modules
from massieu.energy import activations

SIZE = 8


def attention(heads: Any = None) -> nn.Module:
    return modules.Attention(SIZE, 2, batch_first=True, heads=heads)


def machine() -> nn.Module:
    bits = measures.Bernoulli.create(torch.full((SIZE,), 0.5))
    return modules.RestrictedBoltzmannMachine(bits, measures.Spin.create(torch.zeros(3)))


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "Attention": attention,
    "EntmaxHeads": lambda: attention(modules.EntmaxHeads()),
    "NormalizedHeads": lambda: attention(modules.NormalizedHeads()),
    "SigmoidHeads": lambda: attention(modules.SigmoidHeads()),
    "ReLUHeads": lambda: attention(modules.ReLUHeads()),
    "DualLinkHeads": lambda: attention(modules.DualLinkHeads()),
    "RandomFeatureHeads": lambda: attention(modules.RandomFeatureHeads()),
    "ConditionalMeanHeads": lambda: attention(modules.ConditionalMeanHeads()),
    "ImplicitHeads": lambda: attention(modules.ImplicitHeads()),
    "TAPHeads": lambda: attention(modules.TAPHeads()),
    "Hopfield": lambda: modules.Hopfield(SIZE, 2),
    "Hopfield, 3 steps": lambda: modules.Hopfield(SIZE, 2, steps=3),
    "Hopfield, to its end": lambda: modules.Hopfield(SIZE, 2, steps=None),
    "HopfieldPooling": lambda: modules.HopfieldPooling(SIZE, 2),
    "HopfieldLayer": lambda: modules.HopfieldLayer(SIZE, 2, quantity=3),
    "SpinAttention": lambda: modules.SpinAttention(SIZE, 2),
    "SpinAttention, solved": lambda: modules.SpinAttention(SIZE, 2, steps=None, order="second"),
    "EnergyTransformer": lambda: modules.EnergyTransformer(SIZE, 2, steps=2),
    "EnergyTransformerStack": lambda: modules.EnergyTransformerStack([modules.EnergyTransformer(SIZE, 2, steps=2)]),
    "LayerNorm": lambda: modules.Activation(activations.LayerNorm.create(1.0, torch.zeros(SIZE))),
    "RMSNorm": lambda: modules.Activation(activations.RMSNorm.create()),
    "SphereProjection": lambda: modules.Activation(activations.SphereProjection.create(eps=1e-6)),
    "Tanh": lambda: modules.Activation(activations.Tanh.create()),
    "Scalar": lambda: modules.Activation(activations.Scalar.create()),
    "Whitening": lambda: modules.Activation(activations.Whitening.create(torch.zeros(SIZE), torch.eye(SIZE))),
    "SigmaReparametrization": modules.SigmaReparametrization,
    "RestrictedBoltzmannMachine": machine,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return BUILDERS[name]()


NAMES = list(BUILDERS)
ATTENTION = NAMES[:6]
PROJECTING = NAMES[:13]
"""Those that have weights of the input's size, and so a dtype of their own."""


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape or (2, 5, SIZE), generator=torch.Generator().manual_seed(1)).to(dtype)


GIVEN: dict[str, Callable[[], object]] = {
    "float64": lambda: tokens(dtype=torch.float64),
    "bfloat16": lambda: tokens(dtype=torch.bfloat16),
    "float8": lambda: tokens().to(torch.float8_e4m3fn),
    "integers": lambda: tokens().long(),
    "booleans": lambda: tokens() > 0,
    "complex": lambda: tokens().to(torch.complex64),
    "NumPy": lambda: tokens().numpy(),
    "a list": lambda: [[1.0]],
    "nothing": lambda: None,
    "width": lambda: tokens(2, 5, SIZE + 1),
    "no width": lambda: tokens(2, 5, 0),
    "two dimensions": lambda: tokens(5, SIZE),
    "one dimension": lambda: tokens(SIZE),
    "a number": lambda: torch.tensor(1.0),
    "four dimensions": lambda: tokens(2, 3, 5, SIZE),
    "no item": lambda: tokens(0, 5, SIZE),
    "no token": lambda: tokens(2, 0, SIZE),
    "NaN": lambda: tokens() * torch.nan,
    "infinity": lambda: tokens() * torch.inf,
    "huge": lambda: tokens() * 1e30,
    "meta": lambda: tokens().to("meta"),
    "sparse": lambda: tokens().to_sparse(),
}


def call(name: str, module: nn.Module, given: object) -> object:
    return module(given, given, given) if name in ATTENTION else module(given)


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_any_input_works_or_is_one_sentence(name: str):
    module = build(name)
    for given, make in GIVEN.items():
        try:
            works_or_says(call, name, module, make())
        except Exception as error:
            error.add_note(given)
            raise


@pytest.mark.medium
@every_row("name", PROJECTING)
def test_under_autocast_half_precision_and_float32_are_one(name: str):
    module = build(name)
    assert "is bfloat16, the module's parameters float32" in works_or_says(
        call, name, module, tokens(dtype=torch.bfloat16)
    )
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            assert works_or_says(call, name, module, tokens(dtype=dtype)) == "works"
        assert "float64" in works_or_says(call, name, module, tokens(dtype=torch.float64))


@every_row("name", PROJECTING)
def test_another_device_is_named_with_the_modules_own(name: str):
    said = works_or_says(call, name, build(name), tokens().to("meta"))
    assert "on meta and the module's parameters on cpu" in said


def test_parts_that_do_not_fit_each_other():
    layer, pooling = modules.Hopfield(SIZE, 2), modules.HopfieldPooling(SIZE, 2)
    for attempt, message in (
        (lambda: layer((tokens(2, 5, 8), tokens(3, 4, 8), tokens(2, 5, 8))), r"one batch size.*\(3, 4, 8\)"),
        (
            lambda: layer((tokens(2, 5, 8), tokens(2, 4, 8), tokens(2, 6, 8))),
            r"stored and projections one length.*\(2, 6, 8\)",
        ),
        (
            lambda: layer((tokens(), tokens())),
            r"input must be .* or \(stored, states, projections\), got 2",
        ),
        (
            lambda: pooling((tokens(2, 5, 8), tokens(2, 6, 8))),
            r"one batch size, and stored and projections one length.*\(2, 6, 8\)",
        ),
        (
            lambda: modules.Attention(SIZE, 2, batch_first=True)(tokens(2, 5, 8), tokens(3, 5, 8)),
            r"one batch size, got \(2, 5, 8\)",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            attempt()
