"""Whoever is given a generator draws from it: it is passed on in every call that could take it.

A call that forgets it draws from PyTorch's own generator, and its numbers are as random as the right ones: tests of moments
do not notice.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import massieu

SOURCE = Path(massieu.__file__).parent
DRAWS = {"bernoulli", "bernoulli_", "exponential_", "multinomial", "normal_", "poisson", "rand", "rand_like", "randint",
         "randn", "randn_like", "random_", "randperm", "uniform_"}  # fmt: skip
"""PyTorch's own functions and methods that take a generator."""
OTHERS = {"__init__", "create", "gaussian", "reset_parameters"}
"""Names that stand for what takes one in some places and for what takes none in others."""


def functions_with_a_generator() -> Iterator[tuple[Path, ast.FunctionDef]]:
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "generator:" in text else ():
            if isinstance(node, ast.FunctionDef):
                names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                if "generator" in names:
                    yield path, node


def forgotten(function: ast.FunctionDef, takers: set[str]) -> Iterator[ast.Call]:
    """Calls of what takes a generator without one; a dictionary of options is trusted to hold it."""
    for call in ast.walk(function):
        if isinstance(call, ast.Call):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            trusted = any(keyword.arg is None for keyword in call.keywords)
            if name in takers and not trusted and "generator" not in ast.unparse(call).partition("(")[2]:
                yield call


@pytest.mark.medium
def test_a_generator_is_passed_on():
    functions = list(functions_with_a_generator())
    takers = (DRAWS | {function.name for _, function in functions}) - OTHERS
    result = [
        f"{path.relative_to(SOURCE)}:{call.lineno}: {ast.unparse(call)}"
        for path, function in functions
        for call in forgotten(function, takers)
    ]
    assert not result, "\n".join(result)
