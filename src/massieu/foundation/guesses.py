"""First guesses that are usual elsewhere: another library's word for an argument, a constructor in place of `create`.

Each ends in one sentence that says what is meant here.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from massieu.foundation.arguments import described

Target = TypeVar("Target", bound=Callable[..., Any])


def meant(**sentences: str) -> Callable[[Target], Target]:
    """Of a function: what to say to keywords that it does not have, as in ``@meant(beta="`scale`, the inverse temperature")``.

    Raises:
        TypeError: one of them was given, when the function is called.
    """

    def with_sentences(target: Target) -> Target:
        @functools.wraps(target)
        def call(*given: Any, **named: Any) -> Any:
            if named and not torch.compiler.is_compiling():
                for name in named:
                    if name in sentences:
                        raise TypeError(f"`{name}` is {sentences[name]}")
            return target(*given, **named)

        return call  # pyright: ignore[reportReturnType]

    return with_sentences


def explain_constructor(owner: type) -> None:
    """Have the constructor of a class that is made by `create` say so where arguments are missing."""
    constructor: Any = owner.__init__
    needed = sum(each.default is each.empty for each in inspect.signature(owner).parameters.values())

    @functools.wraps(constructor)
    def call(self: Any, *given: Any, **named: Any) -> None:
        if len(given) + len(named) < needed and not torch.compiler.is_compiling():
            values = ", ".join(
                [*map(described, given), *(f"{name}={described(value)}" for name, value in named.items())]
            )
            create: Any = owner.create  # type: ignore[attr-defined]
            names = ", ".join(each.name for each in inspect.signature(create).parameters.values())
            raise TypeError(
                f"{owner.__name__} is made by {owner.__name__}.create({names}), not by {owner.__name__}({values})"
            )
        constructor(self, *given, **named)

    owner.__init__ = call  # type: ignore[misc]
