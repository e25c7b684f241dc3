"""Functions that `torch.compile` leaves as they are: they read files or talk to other processes."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def uncompiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """What `torch.compiler.disable` does, without its import of the compiler, which takes seconds, before it is used."""

    @functools.wraps(function)
    def call(*positional: Arguments.args, **named: Arguments.kwargs) -> Result:
        if "torch._dynamo" not in sys.modules:
            return function(*positional, **named)
        return torch.compiler.disable(function)(*positional, **named)  # pyright: ignore[reportCallIssue]

    return call
