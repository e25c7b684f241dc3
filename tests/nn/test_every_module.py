"""What every module of `massieu.nn` can do, whatever it computes: one table, and a class without a case fails."""

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pytest
import torch
from tests.support.rows import every_row, some_slow
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from massieu import measures
from massieu import nn as modules
from massieu.energy import activations
from massieu.testing.checks import no_values

SIZE = 8
HEADS = torch.tensor([0.5, 0.25])
"""A number for each of two heads."""
LAYER_NORM = activations.LayerNorm.create(0.8, torch.zeros(SIZE))
SPINS, FEW_SPINS = (measures.Spin.create(torch.zeros(size)) for size in (SIZE, 3))
BITS, FEW_BITS, TWO_BITS = (measures.Bernoulli.create(torch.full((size,), 0.5)) for size in (SIZE, 3, 2))


@dataclass
class Case:
    """How a module is made at a place (`device`, `dtype`) and with options, and what it says."""

    make: Callable[..., nn.Module]
    shown: str = ""
    """Settings that the `repr` must show, apart by blanks."""
    scaled: tuple[str, ...] = ()
    """Options that are inverse temperatures."""
    any_dtype: str = ""
    """Why input of another dtype is taken, where it is."""


def heads(strategy: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """`Attention` with that strategy, which gets the options."""

    def make(device: Any = None, dtype: Any = None, **options: Any) -> nn.Module:
        chosen: Any = strategy(**options)
        return modules.Attention(SIZE, 2, batch_first=True, device=device, dtype=dtype, heads=chosen)

    return make


def stack(device: Any = None, dtype: Any = None) -> nn.Module:
    block = modules.EnergyTransformer(SIZE, 2, steps=2, device=device, dtype=dtype)
    return modules.EnergyTransformerStack([block, block])


def machine(**place: Any) -> nn.Module:
    return modules.RestrictedBoltzmannMachine(BITS, FEW_SPINS, **place)


def machines(**place: Any) -> nn.Module:
    return modules.StackedBoltzmannMachine([BITS, FEW_BITS, TWO_BITS], **place)


def deep_machine(**place: Any) -> nn.Module:
    return modules.DeepBoltzmannMachine([BITS, FEW_BITS, TWO_BITS], **place)


def fitted(points: Tensor, log_weight: Tensor) -> measures.Measure:
    return measures.Gaussian.create(points.mean(-2), torch.diag_embed(points.square().mean(-2)))


class SmallLinear(nn.Linear):
    """Weights so small that a layer of them contracts."""

    def __init__(self, **place: Any) -> None:
        super().__init__(SIZE, SIZE, **place)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.weight.mul_(0.5)


class Contracting(nn.Module):
    """A block of the state and the input."""

    def __init__(self, **place: Any) -> None:
        super().__init__()
        self.linear = SmallLinear(**place)

    def forward(self, state: Tensor, inputs: Tensor) -> Tensor:
        return torch.tanh(self.linear(state) + inputs)


def hopfield(**options: Any) -> nn.Module:
    given = {"scale": HEADS, "steps": 3, "activation": activations.RMSNorm.create(0.9)}
    return modules.Hopfield(SIZE, 2, **given | options)


CASES = {
    "Activation": Case(
        lambda **place: modules.Activation(LAYER_NORM, **place),
        "LayerNorm log_gain=-0.223144 trained",
    ),
    "Activation, a measure": Case(lambda **place: modules.Activation(SPINS, **place), "Spin field=["),
    "Attention": Case(
        lambda **options: modules.Attention(SIZE, 2, batch_first=True, **options),
        "embed_dim=8 num_heads=2 SoftmaxHeads",
    ),
    "SoftmaxHeads": Case(
        heads(lambda **options: modules.SoftmaxHeads(**{"scale": HEADS, "sink": 0.3, "window": 3} | options)),
        "scale=[0.5, 0.25] sink=0.3 window=3",
        ("scale",),
    ),
    "CosineHeads": Case(heads(modules.CosineHeads), "CosineHeads log_scale=[2.30259, 2.30259] trained", ("scale",)),
    "CosineHeads, constant": Case(
        heads(lambda: modules.CosineHeads(scale=HEADS, sink=0.3, window=3)), "scale=[0.5, 0.25] sink=0.3 window=3"
    ),
    "MeasureHeads": Case(heads(lambda **options: modules.MeasureHeads(fitted, **options)), "MeasureHeads", ("scale",)),
    "EntmaxHeads": Case(
        heads(lambda **options: modules.EntmaxHeads(**{"alpha": 1.25, "scale": HEADS} | options)),
        "alpha=1.25 scale=[0.5, 0.25]",
        ("scale",),
    ),
    "NormalizedHeads": Case(heads(modules.NormalizedHeads), "NormalizedHeads"),
    "SigmoidHeads": Case(heads(lambda **options: modules.SigmoidHeads(**options)), "bias=[0, 0] trained", ("scale",)),
    "ReLUHeads": Case(heads(lambda **options: modules.ReLUHeads(**options)), "bias=[0, 0] trained", ("scale",)),
    "DualLinkHeads": Case(
        heads(lambda **options: modules.DualLinkHeads("poisson", **options)),
        "family=poisson divergence=True",
        ("scale",),
    ),
    "RandomFeatureHeads": Case(
        heads(lambda **options: modules.RandomFeatureHeads(features=4, **options)),
        "kind=positive features=4",
        ("scale",),
    ),
    "ConditionalMeanHeads": Case(
        heads(lambda: modules.ConditionalMeanHeads(ridge=0.1)), "kernel_name=gaussian log_ridge"
    ),
    "EntmaxHeads, learned": Case(heads(lambda: modules.EntmaxHeads(alpha=1.25, learn_alpha=True)), "logit"),
    "ImplicitHeads, learned": Case(heads(lambda: modules.ImplicitHeads(alpha=0.25, learn_alpha=True)), "logit"),
    "ImplicitHeads": Case(
        heads(lambda **options: modules.ImplicitHeads(alpha=0.25, **options)), "alpha=0.25", ("scale",)
    ),
    "TAPHeads": Case(heads(lambda **options: modules.TAPHeads(strength=0.25, **options)), "strength=0.25", ("scale",)),
    "Hopfield": Case(hopfield, "num_heads=2 scale=[0.5, 0.25] steps=3 RMSNorm", ("scale",)),
    "Hopfield, to its end": Case(lambda **options: hopfield(steps=None, sink=0.5, **options), "sink=0.5 steps=None"),
    "Hopfield, by distances": Case(
        lambda **options: modules.Hopfield(SIZE, 2, **{"euclidean": True, "steps": 2} | options),
        "steps=2 euclidean=True",
        ("scale",),
    ),
    "HopfieldPooling": Case(
        lambda **options: modules.HopfieldPooling(SIZE, 2, quantity=3, **options), "quantity=3 steps=1", ("scale",)
    ),
    "HopfieldLayer": Case(
        lambda **options: modules.HopfieldLayer(SIZE, 2, quantity=3, separate_targets=True, **options),
        "quantity=3 separate_targets=True",
        ("scale",),
    ),
    "EnergyTransformer": Case(
        lambda **options: modules.EnergyTransformer(SIZE, 2, steps=2, **options),
        "embed_dim=8 num_heads=2 hidden_size=4 num_memories=32 steps=2 step_size=0.1",
        ("scale",),
    ),
    "EnergyTransformerStack": Case(stack, "EnergyTransformer steps=2"),
    "Equilibrium": Case(lambda **options: modules.Equilibrium(Contracting(**options)), "injection=argument Linear"),
    "Equilibrium, by a sum": Case(
        lambda **place: modules.Equilibrium(nn.Sequential(SmallLinear(**place), nn.Tanh())),
        "injection=sum SmallLinear",
    ),
    "MonotoneEquilibrium": Case(
        lambda **options: modules.MonotoneEquilibrium(SIZE, 3, **options), "input_size=8 hidden_size=3 monotonicity=1"
    ),
    "SigmaReparametrization": Case(
        lambda **place: modules.SigmaReparametrization(2.0, **place),
        "gain=2 trained",
        any_dtype="one number has no dtype",
    ),
    "SpinAttention": Case(
        lambda **options: modules.SpinAttention(SIZE, 2, **{"steps": 2, "scale": HEADS} | options),
        "embed_dim=8 num_heads=2 order=first scale=[0.5, 0.25] steps=2",
        ("scale",),
    ),
    "SpinAttention, to its end": Case(
        lambda **options: modules.SpinAttention(SIZE, 2, steps=None, order="second", **options),
        "order=second steps=None",
    ),
    "RestrictedBoltzmannMachine": Case(
        machine, "visible=Bernoulli × 8 hidden=Spin × 3", any_dtype="data are cast, as bits are whole numbers"
    ),
    "DeepBoltzmannMachine": Case(
        deep_machine, "layers=8 – 3 – 2", any_dtype="data are cast, as bits are whole numbers"
    ),
    "StackedBoltzmannMachine": Case(
        machines, "hidden=Bernoulli × 2", any_dtype="data are cast, as bits are whole numbers"
    ),
}
NAMES = sorted(CASES, key=lambda name: "," in name)
CLASSES = [name for name in NAMES if "," not in name]
every_module = some_slow("name", NAMES, len(CLASSES))
"""Other settings of a class are slow tests."""


def made(name: str, **options: Any) -> nn.Module:
    """A module with numbers that do not change with the order of the tests."""
    torch.manual_seed(0)
    return CASES[name].make(**options)


def tokens(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.rand(2, 5, SIZE, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def output(module: nn.Module, given: Tensor | None = None) -> Tensor:
    """The first tensor that a module returns for one that is query, key and value at once."""
    given = tokens() if given is None else given
    found = module(given, given, given) if isinstance(module, modules.Attention) else module(given)
    return next(leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor))


def test_every_public_class_has_a_case():
    classes = {name for name in modules.__all__ if isinstance(getattr(modules, name), type)}
    assert set(CLASSES) == classes


@pytest.mark.medium
@every_module
def test_on_meta_a_module_is_made_and_computes_shapes(name: str) -> None:
    """Made there in both ways, forwards and backwards: the shapes of real tensors, and no value is asked for.

    So it does on a GPU, where no tensor of the CPU may take part.
    """
    wanted = output(made(name))
    with torch.device("meta"):
        inside = made(name)
    module = made(name, device="meta")
    for tensor in (*inside.state_dict().values(), *module.state_dict().values()):
        assert tensor.is_meta
    with no_values():
        given = tokens().to("meta").requires_grad_()
        found = output(module, given)
        found.sum().backward()
    assert (found.is_meta, found.shape, found.dtype) == (True, wanted.shape, wanted.dtype)
    assert given.grad is not None


@pytest.mark.medium
@every_module
def test_a_dtype_is_that_of_all_numbers(name: str):
    module = made(name, device="cpu", dtype=torch.float64)
    dtypes = {held.dtype for held in module.state_dict().values() if held.is_floating_point()}
    assert dtypes <= {torch.float64}
    other, given = made(name).double(), tokens(torch.float64)
    other.load_state_dict(module.state_dict())
    assert torch.equal(output(module, given), output(other, given))


@every_module
def test_from_meta_to_memory_to_the_start(name: str):
    """The same draws as at the construction, and the numbers that were given, not what was in memory or learned.

    A number, or a tensor that was made elsewhere, has its value where `torch.device("meta")` makes all tensors, too.
    """
    wanted = made(name)
    with torch.device("meta"):
        inside = made(name)
    for module in (made(name, device="meta"), inside):
        module.to_empty(device="cpu")
        for attempt in range(2):
            with torch.no_grad():
                for held in module.state_dict(keep_vars=True).values():
                    held.fill_(torch.nan if attempt else 7)
            torch.manual_seed(0)
            module.reset_parameters()  # pyright: ignore[reportCallIssue]
            found = module.state_dict()
            assert list(found) == list(wanted.state_dict())
            assert all(torch.equal(found[key], one) for key, one in wanted.state_dict().items())
        assert torch.equal(output(module), output(wanted))


@pytest.mark.medium
@every_module
def test_copies_and_checkpoints_compute_the_same(name: str):
    module = made(name)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
    loaded = made(name)
    loaded.load_state_dict(module.state_dict(), strict=True)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded]
    wanted = output(module)
    for other in copies:
        assert repr(other) == repr(module)
        assert torch.equal(output(other), wanted)


@every_row("name", NAMES)
def test_tensors_go_by_the_names_of_their_fields(name: str):
    assert not [key for key in made(name).state_dict() if re.search(r"leaf|(^|[._])_|[a-z]\d+$", key)]


@every_row("name", NAMES)
def test_the_repr_shows_the_settings(name: str):
    told = repr(made(name))
    assert not [part for part in re.split(r" (?=[A-Za-z])", CASES[name].shown) if part not in told], told


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore::massieu.errors.ConvergenceWarning")
@some_slow(("name", "dtype"), zip(NAMES, cycle([torch.bfloat16, torch.float16]), strict=False), len(CLASSES))
def test_half_precision_comes_back_as_it_was(name: str, dtype: torch.dtype):
    found = output(made(name, dtype=dtype), tokens(dtype))
    assert found.dtype == dtype
    wanted = output(made(name, dtype=dtype).double(), tokens(dtype).double())
    torch.testing.assert_close(found.double(), wanted, rtol=0.05, atol=0.05)


@every_row("name", [name for name, case in CASES.items() if not case.any_dtype])
def test_another_dtype_is_one_sentence_that_names_both(name: str):
    for own, given in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
        names = [str(dtype).removeprefix("torch.") for dtype in (given, own)]
        with pytest.raises(
            TypeError, match=f"is {names[0]}, the module's parameters {names[1]}: convert one, as by .to"
        ):
            output(made(name, dtype=own), tokens(given))
    with pytest.raises(TypeError, match=r"floating-point tensor, got a tensor of torch.int64"):
        output(made(name), tokens().long())


@every_row("name", [name for name, case in CASES.items() if case.scaled])
def test_inverse_temperatures_are_positive(name: str):
    for option in CASES[name].scaled:
        for wrong in (0.0, -1.0, torch.tensor(0.0), torch.tensor([0.5, -0.5]), nn.Parameter(torch.tensor(-1.0))):
            with pytest.raises(ValueError, match=f"{option} must be positive and finite, got -?[01]"):
                made(name, **{option: wrong})


def test_a_number_given_on_meta_cannot_be_restored():
    with torch.device("meta"):
        module = modules.Activation(activations.RMSNorm.create(torch.tensor(2.0)))
    with pytest.raises(ValueError, match=r"log_gain was given on meta, where it has no value: load a state dict"):
        module.to_empty(device="cpu").reset_parameters()


@every_row("name", NAMES)
def test_an_optimiser_can_move_every_parameter(name: str):
    """One that shares memory between its entries, as an expanded tensor does, is refused by the step."""
    module = made(name)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    if before:
        torch.optim.AdamW(module.parameters(), lr=1e-3).step()
    assert all(bool((old != new).all()) for old, new in zip(before, module.parameters(), strict=True))
