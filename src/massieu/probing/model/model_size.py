"""A bound on what a model's configuration may ask for, while the model is made: more is an error, not an endless run."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from massieu.errors import InputError

MOST_NUMBERS = 10**13
"""Parameters of the largest model that can be read: several times more than any published one has."""
MOST_MODULES = 1_000_000
"""Modules of a model; one with 384 experts in each of 61 layers has 100,000."""
MOST_LAYERS = 10_000
_PER_BYTE = 1000
"""Parameters for each byte of the files: at one bit each there are eight, and some weights may be missing."""
_SMALL = 100_000_000
"""Parameters that any model may have, whatever its files hold."""


def check_depth(model: str, config: Any) -> None:
    """Raise an InputError where a configuration, or one inside it, has more layers than a model can be made of."""
    pending = [config.to_dict()]
    while pending:
        for name, value in pending.pop().items():
            if isinstance(value, dict):
                pending.append(value)
            elif isinstance(name, str) and "layer" in name and type(value) is int and value > MOST_LAYERS:
                raise InputError(
                    f"the configuration of {model} says {name} = {value:,}, and at most {MOST_LAYERS:,} layers can be read"
                )


@contextmanager
def bounded(model: str, files: Sequence[Path]) -> Iterator[None]:
    """A model that this thread makes inside may have no more parameters than its files can hold, nor countless modules.

    Raises:
        InputError: it has more; while it is made, not after.
    """
    stored = sum(file.stat().st_size for file in files)
    most = max(_SMALL, _PER_BYTE * stored) if files else MOST_NUMBERS
    thread = threading.get_ident()
    numbers = 0
    modules = 0

    def count_numbers(module: nn.Module, name: str, parameter: Tensor | None) -> None:
        nonlocal numbers
        if threading.get_ident() == thread and parameter is not None and not nn.parameter.is_lazy(parameter):
            numbers += parameter.numel()
            if numbers > most:
                raise InputError(_too_many(model, most, stored if files else None))

    def count_modules(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        nonlocal modules
        if threading.get_ident() == thread:
            modules += 1
            if modules > MOST_MODULES:
                raise InputError(f"the configuration of {model} asks for more than {MOST_MODULES:,} modules")

    hooks = (
        register_module_parameter_registration_hook(count_numbers),
        register_module_module_registration_hook(count_modules),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _too_many(model: str, most: int, stored: int | None) -> str:
    message = f"the configuration of {model} asks for more than {most:,} parameters"
    return message if stored is None else f"{message}, and its files of weights hold {stored:,} bytes"
