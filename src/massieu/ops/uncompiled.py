"""Functions that `torch.compile` leaves as they are: they read files, talk to other processes or draw random numbers."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def uncompiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """What `torch.compiler.disable` does, without its import of the compiler, which takes seconds, before it is used."""

    name = f"{function.__module__}.{function.__name__}"

    @functools.wraps(function)
    def call(*positional: Arguments.args, **named: Arguments.kwargs) -> Result:
        if "torch._dynamo" not in sys.modules:
            return function(*positional, **named)
        if torch.compiler.is_compiling():
            # Where a break of the graph is an error (fullgraph=True), this is what it says.
            torch._dynamo.graph_break(
                msg=f"{name} cannot be compiled: call it outside, or compile without fullgraph=True"
            )
        return torch.compiler.disable(function)(*positional, **named)  # pyright: ignore[reportCallIssue]

    return call
