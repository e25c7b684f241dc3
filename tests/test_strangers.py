"""Objects as their authors write them, without this package's helpers: the suites notice the wrong ones and pass the right."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from massieu.energy import Energy
from massieu.energy.activations import Activation
from massieu.regression import Kernel
from massieu.testing import (
    ActivationCase,
    EnergyCase,
    KernelCase,
    activation_checks,
    energy_checks,
    kernel_checks,
)

POINTS = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
HEADS = torch.randn(1, 2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def log_cosh(x: Tensor) -> Tensor:
    return (x.abs() + torch.log1p((-2 * x.abs()).exp()) - math.log(2)).sum(-1)


def entropy_of_signs(y: Tensor) -> Tensor:
    return 0.5 * (torch.special.xlogy(1 + y, 1 + y) + torch.special.xlogy(1 - y, 1 - y)).sum(-1)


def within(y: Tensor, value: Any, rounding: float) -> Tensor:
    """A conjugate that is infinite outside the cube: at NaN too, as comparisons are."""
    return torch.where((y.detach().abs() <= 1 + rounding).all(-1), value, torch.inf)


ACTIVATION: dict[str, Any] = {
    "lipschitz": torch.tensor(1.0),
    "_activate": lambda self, x: torch.tanh(x),
    "_lagrangian": lambda self, x: log_cosh(x),
    "_conjugate": lambda self, y, rounding: within(y, entropy_of_signs(y.clamp(-1, 1)), rounding),
}
HARD: dict[str, Any] = ACTIVATION | {
    "_activate": lambda self, x: x.clamp(-1, 1),
    "_lagrangian": lambda self, x: (x.clamp(-1, 1) * x - 0.5 * x.clamp(-1, 1).square()).sum(-1),
    "_conjugate": lambda self, y, rounding: within(y, 0.5 * y.square().sum(-1), rounding),
}
DIRECTION: dict[str, Any] = {
    "lipschitz": torch.tensor(torch.inf),
    "_activate": lambda self, x: x / (x.square().sum(-1, keepdim=True) + 1e-300).sqrt(),
    "_lagrangian": lambda self, x: (x.square().sum(-1) + 1e-300).sqrt(),
    "_conjugate": lambda self, y, rounding: torch.where(y.detach().norm(dim=-1) > 1 + rounding, torch.inf, 0.0),
}


def made(base: type, hooks: dict[str, Any], *numbers: Tensor, **annotations: Any) -> Any:
    return type("Mine", (base,), {"__annotations__": annotations, "__module__": __name__, **hooks})(*numbers)


def run(checks: Any, *, but: tuple[str, ...] = ()) -> None:
    for name, check in checks:
        if name not in but:
            check()


# --- activations -----------------------------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize("hooks", [ACTIVATION, HARD, DIRECTION], ids=["tanh", "clamp", "direction"])
def test_a_right_activation_passes_though_its_conjugate_of_nan_is_a_number(hooks):
    run(activation_checks(ActivationCase(made(Activation, hooks), POINTS)))


WRONG_ACTIVATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "another Lagrangian": ({"_lagrangian": lambda self, x: log_cosh(x) + x.sum(-1)}, "gradient"),
    "a sign": ({"_activate": lambda self, x: -torch.tanh(x)}, "convex"),
    "half the constant": ({"lipschitz": torch.tensor(0.5)}, "lipschitz"),
    "the entropy itself": ({"_conjugate": lambda self, y, rounding: -entropy_of_signs(y)}, "conjugate"),
    "finite everywhere": (
        {"_conjugate": lambda self, y, rounding: entropy_of_signs(y.clamp(-1, 1))},
        "conjugate",
    ),
    "no gradient": ({"_activate": lambda self, x: torch.tanh(x.detach()) + 0 * x}, "derivatives"),
    "in float32": ({"_activate": lambda self, x: torch.tanh(x.float()).to(x.dtype)}, "derivatives"),
    "a float32 Lagrangian": ({"_lagrangian": lambda self, x: log_cosh(x).float()}, "gradient"),
    "a number for NaN": ({"_activate": lambda self, x: torch.tanh(x.nan_to_num())}, "not a number"),
    "batch mates": ({"_activate": lambda self, x: torch.tanh(x) + 0.1 * x.mean(0)}, "one by one"),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", WRONG_ACTIVATIONS)
def test_a_wrong_activation_is_noticed(name):
    hooks, law = WRONG_ACTIVATIONS[name]
    checks = activation_checks(ActivationCase(made(Activation, ACTIVATION | hooks), POINTS))
    with pytest.raises(AssertionError):
        checks[law]()


# --- kernels ---------------------------------------------------------------------------------------------------------


def squares(left: Tensor, right: Tensor) -> Tensor:
    return (left.unsqueeze(-2) - right.unsqueeze(-3)).square().sum(-1)


KERNEL: dict[str, Any] = {
    "__call__": lambda self, left, right: (-0.5 * squares(left, right) * self.width.reshape(-1, 1, 1)).exp(),
    "diagonal": lambda self, points: 0 * points.sum(-1) + 1,
}


def kernel(**hooks: Any) -> Any:
    return made(Kernel, KERNEL | hooks, torch.tensor(1.3), width=Tensor)


WRONG_KERNELS: dict[str, tuple[dict[str, Any], str]] = {
    "not symmetric": (
        {"__call__": lambda self, a, b: KERNEL["__call__"](self, a, b) * (1 + 0.1 * a.sum(-1, keepdim=True))},
        "symmetric",
    ),
    "indefinite": ({"__call__": lambda self, a, b: 1 - KERNEL["__call__"](self, a, b)}, "positive"),
    "another diagonal": ({"diagonal": lambda self, points: 0 * points.sum(-1) + 2}, "diagonal"),
    "no gradient": (
        {"__call__": lambda self, a, b: (-0.5 * squares(a, b) * self.width.detach().reshape(-1, 1, 1)).exp()},
        "derivatives",
    ),
    "other features": ({"features": lambda self, points: points}, "features"),
    "in float32": (
        {"__call__": lambda self, a, b: KERNEL["__call__"](self, a.float(), b.float()).to(a)},
        "derivatives",
    ),
    "batch mates": (
        {"__call__": lambda self, a, b: (-0.5 * squares(a, b) / b.var(-2, keepdim=True).mean(-1, keepdim=True)).exp()},
        "pair by pair",
    ),
}


@pytest.mark.medium
def test_a_right_kernel_passes():
    run(kernel_checks(KernelCase(kernel(), HEADS)))


@pytest.mark.medium
@pytest.mark.parametrize("name", WRONG_KERNELS)
def test_a_wrong_kernel_is_noticed(name):
    hooks, law = WRONG_KERNELS[name]
    with pytest.raises(AssertionError):
        kernel_checks(KernelCase(kernel(**hooks), HEADS))[law]()


# --- energies --------------------------------------------------------------------------------------------------------


def wide(state: Tensor) -> Tensor:
    return state.to(torch.promote_types(state.dtype, torch.float32))


ENERGY: dict[str, Any] = {
    "_energy": lambda self, state: self.weight * (wide(state) - 1).square().sum(-1) / 2,
    "_step": lambda self, state: 0.5 * (wide(state) + 1) + 0 * self.weight,
}


def energy(**hooks: Any) -> Any:
    return made(Energy, ENERGY | hooks, torch.tensor(1.3), weight=Tensor)


WRONG_ENERGIES: dict[str, tuple[dict[str, Any], str]] = {
    "uphill": ({"_step": lambda self, state: state + 0.5 * (state - 1) + 0 * self.weight}, "descent"),
    "another force": ({"_force": lambda self, state: state - 1 + 0 * self.weight}, "force"),
    "no gradient": (
        {"_energy": lambda self, state: self.weight.detach() * (state - 1).square().sum(-1) / 2},
        "derivatives",
    ),
    "batch mates": (
        {"_energy": lambda self, state: self.weight * (state - 1).square().sum(-1) / 2 + state.sum()},
        "one by one",
    ),
    "a number for NaN": (
        {"_energy": lambda self, state: self.weight * (state.nan_to_num() - 1).square().sum(-1) / 2},
        "not a number",
    ),
}


@pytest.mark.medium
def test_a_right_energy_passes():
    run(energy_checks(EnergyCase(energy(), POINTS)))


@pytest.mark.medium
@pytest.mark.parametrize("name", WRONG_ENERGIES)
def test_a_wrong_energy_is_noticed(name):
    hooks, law = WRONG_ENERGIES[name]
    with pytest.raises(AssertionError):
        energy_checks(EnergyCase(energy(**hooks), POINTS))[law]()
