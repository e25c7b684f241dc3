"""The suites but the measures': what is wrong is caught by the check of that name, and what is right passes all."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from massieu.energy import Energy
from massieu.energy.activations import Activation
from massieu.foundation.values import static_field
from massieu.measures import Gaussian
from massieu.population import Operator
from massieu.population.operator import AffineMap, ParticleMoments
from massieu.posteriors import Posterior
from massieu.posteriors.base import with_sink
from massieu.regression import Kernel
from massieu.testing import (
    ActivationCase,
    EnergyCase,
    KernelCase,
    MeasureCase,
    OperatorCase,
    PosteriorCase,
    activation_checks,
    energy_checks,
    kernel_checks,
    measure_checks,
    operator_checks,
    posterior_checks,
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


ONE = torch.ones((), dtype=torch.float64)
POINTS = draw(4, 3)
CALLS: list[int] = []


class Softened(Activation):
    """x ↦ x/√(1 + ‖x‖²/s²), with L = s²√(1 + ‖x‖²/s²), or a wrong one."""

    size: Tensor
    wrong: str = static_field(default="")

    @property
    def lipschitz(self) -> Tensor:
        return (0.5 if self.wrong == "lipschitz" else 2.0 if self.wrong == "attained" else 1.0) * torch.ones(())

    @property
    def quadratic(self) -> bool:
        return self.wrong == "quadratic"

    def _root(self, x: Tensor) -> Tensor:
        return (1 + x.square().sum(-1) / self.size**2).sqrt()

    def _activate(self, x: Tensor) -> Tensor:
        wrong = self.wrong
        root = self._root(x).unsqueeze(-1)
        CALLS.append(1)
        if wrong == "convex":
            return -x / root
        if wrong == "gradient":
            return x / root**2
        if wrong == "range":
            return x / root.square().add(1e6).sub(1e6).sqrt() * (x.abs().amax() < 1e3).to(x).reciprocal()
        if wrong == "structure":
            return x / root + len(CALLS)
        if wrong == "one by one":
            return x / root + x.mean()
        if wrong == "vmap" and bool(x.sum() > 1e9):
            return x
        if wrong == "derivatives":
            return x / root.detach()
        if wrong == "precision":
            return (x / root + 1e4) - 1e4
        if wrong == "half precision" and x.dtype == torch.float32:
            return (x / root).bfloat16()
        if wrong == "no query" and x.numel() == 0:
            return x[..., :1]
        if wrong == "meta":
            return x / root + torch.tensor(x.flatten()[0].item() * 0)
        if wrong == "not a number":
            return (x / root).nan_to_num()
        if wrong == "compiled" and torch.compiler.is_compiling():
            return x
        return x / root

    def _lagrangian(self, x: Tensor) -> Tensor:
        sign = -1 if self.wrong == "convex" else 1
        return sign * self.size**2 * self._root(x) + (self.wrong == "lagrangian")

    def _conjugate(self, y: Tensor, rounding: float) -> Tensor:
        gap = 1 - y.square().sum(-1) / self.size**2
        outside = torch.where(gap < 0, 0.0 if self.wrong == "conjugate" else torch.inf, 0.0)
        return torch.where(gap > 0, -(self.size**2) * torch.where(gap > 0, gap, 1.0).sqrt(), outside + 0 * gap)


ACTIVATION = ActivationCase(
    Softened(1.5 * ONE), POINTS, lambda x: 2.25 * (1 + x.square().sum(-1) / 2.25).sqrt(), torch.zeros(1, 3)
)


class Bowl(Energy):
    """E(x) = ‖x − c‖² + Σ cos x, whose step is that of gradient descent, or a wrong one."""

    centre: Tensor
    wrong: str = static_field(default="")

    def _energy(self, state: Tensor) -> Tensor:
        bowl, state = self._promoted(state)
        away = state - bowl.centre
        return away.square().sum(-1) + state.cos().sum(-1) + (self.wrong == "energy")

    def _step(self, state: Tensor) -> Tensor:
        bowl, state = self._promoted(state)
        slope = 2 * (state - bowl.centre) - state.sin()
        if self.wrong == "descent":
            return state + 0.1 * slope
        if self.wrong == "worst":  # a step too long where the energy is flat, which no state of the case is near
            near = slope.norm(dim=-1, keepdim=True) < 0.5
            return torch.where(near, state - 0.9 * slope, state - 0.25 * slope)
        if self.wrong == "fixed points":
            return torch.where(slope.abs() > 1.0, state - 0.25 * slope, state)
        return state - 0.25 * slope

    def _force(self, state: Tensor) -> Tensor:
        sign = -1 if self.wrong == "force" else 1
        bowl, state = self._promoted(state)
        return -2 * (state - bowl.centre) + sign * state.sin()


ENERGY = EnergyCase(
    Bowl(torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)),
    3 * POINTS,
    lambda x: (x - torch.tensor([0.5, -1.0, 2.0])).square().sum(-1) + x.cos().sum(-1),
)


class Pull(Operator):
    """x_i ← x_i + step·(mean − x_i), or a wrong one."""

    size: Tensor
    wrong: str = static_field(default="")

    @property
    def needs_all(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.wrong != "right"

    def check_shared(self) -> None:
        if self.wrong != "shared":
            super().check_shared()

    @property
    def _like(self) -> Tensor | None:
        return self.size

    @property
    def _width(self) -> int | None:
        return 3

    def _admitted(self, particles: Tensor) -> Tensor:
        return particles.double() if self.wrong == "refusals" else super()._admitted(particles)

    def _moved(self, particles: Tensor, group: Any) -> Tensor:
        mean = particles.mean(-2, keepdim=True)
        if self.wrong == "permutation":
            mean = particles[..., :1, :]
        if self.wrong == "copies":
            mean = particles.sum(-2, keepdim=True) / (particles.shape[-2] - 1)
        if self.wrong == "particles":
            mean = 2 * mean
        moved = particles + self.size * (mean - particles)
        return 0.5 * moved if self.wrong in ("kept", "many particles") else moved

    def affine(self, law: ParticleMoments) -> AffineMap:
        return AffineMap((1 - self.size) * torch.eye(3).to(law.mean), self.size * law.mean)

    def gaussian(self, law: Gaussian) -> Gaussian:
        found = super().gaussian(law)
        if self.wrong != "law":
            return found
        origin = torch.zeros_like(found.location)
        return Gaussian.create(found.mean(origin) + 0.01, found.fisher(origin))


OPERATOR = OperatorCase(
    Pull(0.3 * ONE),
    draw(2, 5, 3),
    lambda x: x + 0.3 * (x.mean(0) - x),
    Gaussian.create(torch.ones(3).double(), torch.eye(3).double()),
    kept=lambda x: x.mean(-2),
)


class Coin(Posterior):
    """Beta's law of a coin's bias, from tokens 0. and 1. in one dimension, or a wrong one."""

    heads: Tensor
    tails: Tensor
    wrong: str = static_field(default="")

    @property
    def mean(self) -> Tensor:
        return (self.heads / (self.heads + self.tails)).unsqueeze(-1) * (1.1 if self.wrong == "mean" else 1.0)

    def posterior(self, tokens: Tensor, mask: Tensor | None = None) -> "Coin":
        if self.wrong == "masked":
            tokens = tokens.nan_to_num()
            mask = None
        law, tokens, seen = self._admit(tokens, mask, (1,))
        ups = tokens.squeeze(-1) * seen
        if self.wrong == "order":
            ups = ups * torch.linspace(0.5, 1.5, ups.shape[-1], dtype=ups.dtype)
        heads = law.heads + ups.sum(-1)
        tails = law.tails + (seen.to(ups) - ups).sum(-1)

        def beta(a: Tensor, b: Tensor) -> Tensor:
            return a.lgamma() + b.lgamma() - (a + b).lgamma()

        gain = beta(heads, tails) - beta(law.heads, law.tails)
        before = 0 * law.log_evidence if self.wrong == "pieces" else law.log_evidence
        if self.wrong == "evidence":
            gain = gain + seen.sum(-1)
        if self.wrong == "no token":
            heads = heads + 1
        return Coin(heads, tails, self.wrong, log_evidence=before + gain)

    def log_predictive(self, token: Tensor) -> Tensor:
        law, token = self._admit_token(token, (1,))
        up = token.squeeze(-1)
        total = law.heads + law.tails + (self.wrong == "predictive")
        found = up * law.heads.log() + (1 - up) * law.tails.log() - total.log()
        return found * 2 if self.wrong == "chain" else found

    def as_attention(self, tokens: Tensor, mask: Tensor | None = None) -> Any:
        law, tokens, seen = self._admit(tokens, mask, (1,))
        strength = law.heads + law.tails
        sink = 0.5 + 0 * law.mean if self.wrong == "attention" else law.mean
        return with_sink(sink, strength, tokens, torch.where(seen, 0.0, -torch.inf).to(tokens))


POSTERIOR = PosteriorCase(
    Coin(1.5 * ONE, 0.5 * ONE, log_evidence=0 * ONE),
    torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]], dtype=torch.float64).unsqueeze(-1),
    log_evidence=lambda law, tokens: float(
        math.log(
            0.25 * (1.5 / 3) * (2.5 / 4) * (1.5 / 5) if tokens[0] == 0 else 0.75 * (2.5 / 3) * (3.5 / 4) * (0.5 / 5)
        )
    ),
    mean=lambda law, tokens: (1.5 + tokens.sum(0)) / 6,
    outcomes=(torch.tensor([[0.0], [1.0]]), torch.zeros(2)),
)


class Squared(Kernel):
    """κ(a, b) = (scale·a·b)², with features, or a wrong one."""

    scale: Tensor
    wrong: str = static_field(default="")

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        scale = self.scale.mean() if self.wrong == "heads" else self.scale
        found = (scale.to(left).reshape(-1, 1, 1) * left @ right.mT).square()
        if self.wrong == "symmetric":
            return found * left[..., :1].exp()
        if self.wrong == "positive":
            return -found
        return found + 1 if self.wrong == "pairs" else found

    def diagonal(self, points: Tensor) -> Tensor:
        norm = self.scale.to(points).reshape(-1, 1) * points.square().sum(-1)
        return norm if self.wrong == "diagonal" else norm.square()

    def features(self, points: Tensor) -> Tensor:
        pairs = (points.unsqueeze(-1) * points.unsqueeze(-2)).flatten(-2)
        return pairs * (
            2.0 if self.wrong in ("features", "conditional mean") else self.scale.to(points).reshape(-1, 1, 1)
        )

    def log(self, left: Tensor, right: Tensor) -> Tensor:
        return 2 * (self.scale.to(left).reshape(-1, 1, 1) * left @ right.mT).abs().log() + (self.wrong == "logarithms")

    def log_diagonal(self, points: Tensor) -> Tensor:
        return self.diagonal(points).log()


KERNEL = KernelCase(Squared(0.5 * ONE), draw(1, 2, 12, 3), lambda a, b: (0.5 * a @ b).square())

ANYWHERE = (
    "structure",
    "one by one",
    "vmap",
    "derivatives",
    "precision",
    "half precision",
    "no query",
    "meta",
    "not a number",
)
SUITES: dict[str, tuple[Any, Any, str, tuple[str, ...]]] = {
    "activation": (
        activation_checks,
        ACTIVATION,
        "activation",
        ("lagrangian", "gradient", "convex", "conjugate", "range", "lipschitz", "attained", "quadratic", *ANYWHERE),
    ),
    "energy": (energy_checks, ENERGY, "energy", ("energy", "force", "descent", "worst", "fixed points")),
    "operator": (
        operator_checks,
        OPERATOR,
        "operator",
        ("particles", "kept", "permutation", "copies", "law", "many particles", "shared", "refusals"),
    ),
    "posterior": (
        posterior_checks,
        POSTERIOR,
        "prior",
        ("evidence", "mean", "chain", "pieces", "order", "masked", "no token", "predictive", "attention"),
    ),
    "kernel": (
        kernel_checks,
        KERNEL,
        "kernel",
        ("pairs", "symmetric", "positive", "diagonal", "features", "logarithms", "heads", "conditional mean"),
    ),
}


def checks_of(name: str, wrong: str = "", **changes: Any) -> Any:
    suite, case, field, _ = SUITES[name]
    return suite(replace(case, **{field: replace(getattr(case, field), wrong=wrong)}, **changes))


@pytest.mark.parametrize("name", SUITES)
def test_what_is_right_passes_every_check(name: str):
    for _, check in checks_of(name):
        check()
    assert set(checks_of(name).left_out) == {"compiled"}


@pytest.mark.parametrize(("name", "wrong"), [(name, law) for name, suite in SUITES.items() for law in suite[3]])
def test_what_is_wrong_is_caught_by_the_check_of_its_name(name: str, wrong: str):
    with pytest.raises((AssertionError, RuntimeError), match=None if wrong in ("vmap", "meta") else f"^{wrong}"):
        checks_of(name, wrong)[wrong]()


@pytest.mark.slow
def test_a_graph_that_computes_something_else_is_caught():
    with pytest.raises(AssertionError, match=r"^compiled: the map"):
        checks_of("activation", "compiled", compile_backend="eager")["compiled"]()
    checks_of("activation", compile_backend="eager")["compiled"]()


@pytest.mark.parametrize("name", SUITES)
def test_what_is_left_out_says_why(name: str):
    exempt: Mapping[str, str] = {"vmap": "it is slow"}
    checks = checks_of(name, exempt=exempt)
    assert checks.left_out == {"vmap": "it is slow", "compiled": "no backend is given"}
    assert "vmap" not in checks
    with pytest.raises(ValueError, match="exempt names no law of this suite: speed"):
        checks_of(name, exempt={"speed": "none"})


@pytest.mark.parametrize(
    ("suite", "case"),
    [
        (activation_checks, ActivationCase),
        (energy_checks, EnergyCase),
        (kernel_checks, KernelCase),
        (measure_checks, lambda subject, points: MeasureCase(subject)),
        (operator_checks, OperatorCase),
        (posterior_checks, PosteriorCase),
    ],
)
def test_what_is_no_case_is_said_before_any_check(suite, case):
    with pytest.raises(TypeError, match=r"^case must be an? \w+Case, which holds what is checked, got Gaussian"):
        suite(Gaussian.create(torch.zeros(2), ONE))
    with pytest.raises(TypeError, match=r"^\w+ must be an? [A-Z]\w+, got 3$"):
        suite(case(3, POINTS))
