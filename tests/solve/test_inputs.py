"""What fixed points and linear solvers are given wrongly: it works, or it is one sentence of ours."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.sentences import works_or_says, wrongs

from massieu.solve import (
    GMRES,
    Anderson,
    Auto,
    ConjugateGradients,
    Dense,
    Implicit,
    Newton,
    Picard,
    fixed_point,
    linear_solve,
    spectral_radius,
)

START = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def twice(x: Any) -> Any:
    return 2 * x


CALLS: dict[str, Callable[[Any], object]] = {
    "start": lambda x: fixed_point(torch.cos, x),
    "function": lambda x: fixed_point(x, START),
    "its value": lambda x: fixed_point(lambda z: x, START),
    "parameters": lambda x: fixed_point(torch.cos, START, x),
    "rtol": lambda x: fixed_point(torch.cos, START, rtol=x, max_steps=3, throw=False),
    "damping": lambda x: Picard(damping=x),
    "memory": lambda x: Anderson(memory=x),
    "fast": lambda x: Auto(fast=x),
    "products": lambda x: Newton(products=x),
    "Newton's rtol": lambda x: Newton(rtol=x),
    "item_dims": lambda x: fixed_point(torch.cos, START, item_dims=x),
    "method": lambda x: fixed_point(torch.cos, START, method=x),
    "adjoint": lambda x: fixed_point(torch.cos, START, adjoint=x),
    "lost": lambda x: Implicit(lost=x),
    "check_attraction": lambda x: Implicit(check_attraction=x),
    "the adjoint's solver": lambda x: Implicit(x),
    "right": lambda x: linear_solve(twice, x),
    "product": lambda x: linear_solve(x, START),
    "the product's value": lambda x: linear_solve(lambda vector: x, START),
    "parameters of a product": lambda x: linear_solve(twice, START, x),
    "solver": lambda x: linear_solve(twice, START, solver=x),
    "spectral_radius": lambda x: spectral_radius(torch.cos, x),
    "GMRES": lambda x: linear_solve(twice, x, solver=GMRES()),
    "ConjugateGradients": lambda x: linear_solve(twice, x, solver=ConjugateGradients()),
    "Dense": lambda x: linear_solve(twice, x, solver=Dense()),
    "preconditioner": lambda x: linear_solve(twice, START, solver=ConjugateGradients(preconditioner=lambda v: x)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_any_argument_works_or_is_one_sentence(name: str):
    for label, given in wrongs(START).items():
        if name in ("function", "product") and not callable(given):
            assert f"{name} must be a function" in works_or_says(CALLS[name], given)
            continue
        try:
            works_or_says(CALLS[name], given)
        except Exception as error:
            error.add_note(label)
            raise


def test_items_without_numbers_and_shapes_without_values():
    empty = fixed_point(torch.cos, torch.zeros(3, 0), adjoint=Implicit(check_attraction=True))
    assert empty.converged.all()
    assert empty.value.shape == (3, 0)
    found = fixed_point(torch.cos, START.to("meta"))
    assert found.value.is_meta
    assert found.value.shape == START.shape
    assert found.status.shape == (6,)
