"""What modules are given wrongly: one sentence of ours, never a message from a kernel far below."""

from collections.abc import Callable

import pytest
import torch
from tests.support.rows import every_row
from tests.support.sentences import works_or_says
from torch import Tensor, nn

from massieu import measures
from massieu import nn as modules
from massieu.energy import activations

SIZE = 8


def build() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    bits, signs = measures.Bernoulli.create(torch.full((SIZE,), 0.5)), measures.Spin.create(torch.zeros(3))
    return {
        "Attention": modules.Attention(SIZE, 2, batch_first=True),
        "EntmaxHeads": modules.Attention(SIZE, 2, batch_first=True, heads=modules.EntmaxHeads()),
        "NormalizedHeads": modules.Attention(SIZE, 2, batch_first=True, heads=modules.NormalizedHeads()),
        "SigmoidHeads": modules.Attention(SIZE, 2, batch_first=True, heads=modules.SigmoidHeads()),
        "ReLUHeads": modules.Attention(SIZE, 2, batch_first=True, heads=modules.ReLUHeads()),
        "DualLinkHeads": modules.Attention(SIZE, 2, batch_first=True, heads=modules.DualLinkHeads()),
        "RandomFeatureHeads": modules.Attention(SIZE, 2, batch_first=True, heads=modules.RandomFeatureHeads()),
        "ConditionalMeanHeads": modules.Attention(SIZE, 2, batch_first=True, heads=modules.ConditionalMeanHeads()),
        "ImplicitHeads": modules.Attention(SIZE, 2, batch_first=True, heads=modules.ImplicitHeads()),
        "TAPHeads": modules.Attention(SIZE, 2, batch_first=True, heads=modules.TAPHeads()),
        "Hopfield": modules.Hopfield(SIZE, 2),
        "Hopfield, 3 steps": modules.Hopfield(SIZE, 2, steps=3),
        "Hopfield, to its end": modules.Hopfield(SIZE, 2, steps=None),
        "HopfieldPooling": modules.HopfieldPooling(SIZE, 2),
        "HopfieldLayer": modules.HopfieldLayer(SIZE, 2, quantity=3),
        "SpinAttention": modules.SpinAttention(SIZE, 2),
        "SpinAttention, solved": modules.SpinAttention(SIZE, 2, steps=None, order="second"),
        "EnergyTransformer": modules.EnergyTransformer(SIZE, 2, steps=2),
        "EnergyTransformerStack": modules.EnergyTransformerStack([modules.EnergyTransformer(SIZE, 2, steps=2)]),
        "LayerNorm": modules.Activation(activations.LayerNorm.create(1.0, torch.zeros(SIZE))),
        "RMSNorm": modules.Activation(activations.RMSNorm.create()),
        "SphereProjection": modules.Activation(activations.SphereProjection.create(eps=1e-6)),
        "SoftSphere": modules.Activation(activations.SoftSphere.create()),
        "Tanh": modules.Activation(activations.Tanh.create()),
        "Scalar": modules.Activation(activations.Scalar.create()),
        "Whitening": modules.Activation(activations.Whitening.create(torch.zeros(SIZE), torch.eye(SIZE))),
        "SigmaReparametrization": modules.SigmaReparametrization(),
        "RestrictedBoltzmannMachine": modules.RestrictedBoltzmannMachine(bits, signs),
    }


NAMES = list(build())
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
@every_row("given", GIVEN)
@every_row("name", NAMES)
def test_any_input_works_or_is_one_sentence(name: str, given: str):
    works_or_says(call, name, build()[name], GIVEN[given]())


@every_row("name", PROJECTING)
def test_another_dtype_is_named_with_the_modules_own(name: str):
    for own, given in ((torch.float32, torch.float64), (torch.float64, torch.float32), (torch.float32, torch.bfloat16)):
        said = works_or_says(call, name, build()[name].to(own), tokens(dtype=given))
        names = [str(dtype).removeprefix("torch.") for dtype in (given, own)]
        assert f"is {names[0]}, the module's parameters {names[1]}: convert one, as by .to(torch.{names[1]})" in said


@pytest.mark.medium
@every_row("name", PROJECTING)
def test_under_autocast_half_precision_and_float32_are_one(name: str):
    module = build()[name]
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            assert works_or_says(call, name, module, tokens(dtype=dtype)) == "works"
        assert "float64" in works_or_says(call, name, module, tokens(dtype=torch.float64))


@every_row("name", PROJECTING)
def test_another_device_is_named_with_the_modules_own(name: str):
    said = works_or_says(call, name, build()[name], tokens().to("meta"))
    assert "on meta and the module's parameters on cpu" in said


@every_row("name", NAMES)
def test_shapes_without_values(name: str):
    """On the meta device a module computes the shape of its output, loops and solvers included."""
    module, given = build()[name], tokens()
    wanted = call(name, module, given > 0 if name == "RestrictedBoltzmannMachine" else given)
    found = call(name, module.to("meta"), given.to("meta"))
    leaves = ([leaf for leaf in torch.utils._pytree.tree_leaves(tree) if leaf is not None] for tree in (wanted, found))
    for one, other in zip(*leaves, strict=True):
        assert other.is_meta
        assert other.shape == one.shape
        assert other.dtype == one.dtype


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
