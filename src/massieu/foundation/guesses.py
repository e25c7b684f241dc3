"""Answers to usual first guesses: another library's word for an argument, or a constructor in place of `create`.

Each is an error of one sentence that names what this package calls it.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from massieu.foundation.arguments import described

Target = TypeVar("Target", bound=Callable[..., Any])


def meant(**sentences: str) -> Callable[[Target], Target]:
    """A decorator that explains keywords which a function does not have: ``@meant(beta="`scale`, the inverse temperature")``.

    Raises:
        TypeError: a call of the function has one of these keywords.
    """

    def decorate(target: Target) -> Target:
        @functools.wraps(target)
        def call(*positional: Any, **named: Any) -> Any:
            if named and not torch.compiler.is_compiling():
                for name in named:
                    if name in sentences:
                        raise TypeError(f"`{name}` is {sentences[name]}")
            return target(*positional, **named)

        return call  # pyright: ignore[reportReturnType]

    return decorate


def explain_constructor(owner: type) -> None:
    """Make the constructor of a class name `create` in its error if arguments are missing."""
    constructor: Any = owner.__init__
    parameters = inspect.signature(owner).parameters.values()
    num_required = sum(parameter.default is parameter.empty for parameter in parameters)

    @functools.wraps(constructor)
    def call(self: Any, *positional: Any, **named: Any) -> None:
        if len(positional) + len(named) < num_required and not torch.compiler.is_compiling():
            named_values = [f"{name}={described(value)}" for name, value in named.items()]
            values = ", ".join([*map(described, positional), *named_values])
            create: Any = owner.create  # type: ignore[attr-defined]
            names = ", ".join(inspect.signature(create).parameters)
            raise TypeError(
                f"{owner.__name__} is made by {owner.__name__}.create({names}), not by {owner.__name__}({values})"
            )
        constructor(self, *positional, **named)

    owner.__init__ = call  # type: ignore[misc]
