"""What claims draw, and what they need of their settings."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.errors import InputError

Normal = Callable[..., Float[Tensor, "..."]]
"""``normal(*shape)``: standard normal float64 draws."""


def normal_draws(seed: int) -> Normal:
    """A source of draws with a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, dtype=torch.float64, generator=generator)


def check_at_least(least: float, **settings: float) -> None:
    """Raise unless each setting is at least `least`: fewer or less leaves nothing to check.

    Raises:
        InputError: one of them is smaller.
    """
    for name, value in settings.items():
        if value < least:
            raise InputError(f"{name} must be at least {least} here, got {value}")
