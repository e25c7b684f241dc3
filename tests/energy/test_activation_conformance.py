"""Every activation keeps the laws of activations, against its Lagrangian in NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.energy.cases import ACTIVATIONS, MEASURES, cloud, draw
from tests.support.suites import compiled, every_check, without_a_case

from massieu.energy import SparseAtoms
from massieu.energy.activations import Activation, LayerNorm, MeasureActivation, Whitening
from massieu.testing import ActivationCase, activation_checks

WIDTH = 4
BIAS = draw(WIDTH, seed=3).numpy()


def _whitening(x: np.ndarray) -> float:
    points = cloud(WIDTH).numpy()
    values, vectors = np.linalg.eigh(np.cov(points.T, bias=True))
    deviation = x - points.mean(0)
    return 0.5 * deviation @ (vectors / np.sqrt(values)) @ vectors.T @ deviation


LAGRANGIANS: dict[str, Callable[[np.ndarray], Any]] = {
    "identity": lambda x: 0.5 * x @ x,
    "scalar": lambda x: 0.3 * x @ x,
    "spin": lambda x: np.sum(np.logaddexp(x, -x) - np.log(2)),
    "sphere": lambda x: 1.5 * np.linalg.norm(x),
    "sphere, softened": lambda x: 1.5 * np.sqrt(x @ x + 0.3),
    "RMSNorm": lambda x: 0.8 * WIDTH * np.sqrt(np.mean(x**2) + 1e-6),
    "LayerNorm": lambda x: 0.8 * WIDTH * np.sqrt(np.var(x) + 1e-5) + BIAS @ x,
    "LayerNorm, eps 0": lambda x: 1.2 * WIDTH * np.sqrt(np.var(x)),
    "whitening": _whitening,
}
"""L from its formula."""

ATTAINED = ("identity", "scalar", "spin", "sphere, softened", "RMSNorm", "LayerNorm", "whitening")
"""At the origin."""


def _case(name: str) -> ActivationCase:
    steepest = torch.zeros(1, WIDTH) if name in ATTAINED else None

    def oracle(x: torch.Tensor) -> list[float]:
        return [LAGRANGIANS[name](row) for row in x.numpy()]

    return ActivationCase(ACTIVATIONS[name](WIDTH), draw(5, WIDTH, seed=1), oracle, steepest)


CASES = {name: _case(name) for name in ACTIVATIONS}
CASES |= {
    # The mean on a sphere is steepest at the origin.
    name: ActivationCase(
        MeasureActivation.of("measure", make(3)),
        draw(3, 3, seed=1),
        steepest=torch.zeros(1, 3) if name == "Sphere" else None,
    )
    for name, make in MEASURES.items()
}
CASES |= {
    "LayerNorm, batched": ActivationCase(
        LayerNorm.create(torch.tensor([0.5, 2.0]), draw(2, WIDTH).float()), draw(2, 3, 5, WIDTH, seed=1), batch=1
    ),
    "whitening, batched": ActivationCase(Whitening.of(draw(2, 20, WIDTH)), draw(2, 5, WIDTH, seed=1), batch=1),
    "sparse atoms": ActivationCase(
        MeasureActivation.of("potential", SparseAtoms.create(draw(6, WIDTH))),
        draw(5, WIDTH, seed=1),
        exempt={"conjugate": "the conjugate of a potential that is no measure is not known"},
    ),
}


COMPILED = [name for name in CASES if name not in MEASURES]
"""Measures are compiled in their own suite; the graphs of their conjugates take minutes."""


# Measures have their derivatives and their conjugates tried in their own room.
SLOW = ("Bernoulli", "Sphere", "Atoms")


@every_check(activation_checks, CASES, medium=("Spin",), slow=SLOW)
def test_conforms(check):
    check()


@pytest.mark.slow
@pytest.mark.parametrize("check", compiled(activation_checks, {name: CASES[name] for name in COMPILED}))
def test_compiled_is_eager(check):
    check()


@pytest.mark.medium
def test_every_activation_has_a_case():
    assert not without_a_case(Activation, [case.activation for case in CASES.values()])
