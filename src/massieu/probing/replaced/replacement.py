"""A rule that replaces a model's attention, and how its effect is measured."""

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor

from massieu.errors import InputError
from massieu.foundation.arguments import choice, described
from massieu.foundation.doors import check_fields, count
from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.replaced.rules import MEAN, rule_of

Per = Literal["all", "site", "head"]
PER: tuple[Per, ...] = ("all", "site", "head")
WINDOWS = 16
"""Windows on which a replacement is measured by default."""


@dataclass(frozen=True)
class Replacement:
    """A rule that replaces attention; a probe measures what the model loses. A rule alone stands for one with the defaults.

    Args:
        rule: as for `massieu.replaced`, or ``"off(mean)"``, each head's mean output over the text.
        per: "all" replaces all heads at once, "site" each attention site by itself, "head" each head by itself. Each costs
            a forward pass for every window.
        windows: number of sampled windows on which the loss is measured.

    Raises:
        InputError: an unknown rule; another ``per``; fewer than one window.

    Example:
        >>> import massieu
        >>> massieu.Replacement("top_k(8)", per="head").name
        'top_k(8)'
    """

    rule: str | Callable[[AttentionCall], Tensor]
    _: KW_ONLY
    per: Per = "all"
    windows: int = WINDOWS

    def __post_init__(self) -> None:
        if isinstance(self.rule, str):
            object.__setattr__(self, "rule", self.rule.strip())
        if not (isinstance(self.rule, str) and self.rule == MEAN):
            rule_of(self.rule)
        check_fields(self, per=lambda name, value: choice(name, value, *PER), windows=count)
        if self.windows < 1:
            raise InputError(f"windows of a replacement must be at least 1, got {self.windows}")

    @property
    def name(self) -> str:
        """The rule's name in a result."""
        if isinstance(self.rule, str):
            return self.rule
        return getattr(self.rule, "__name__", type(self.rule).__name__)


def replacements(value: Any) -> tuple[Replacement, ...]:
    """The user's argument ``replace`` as a tuple: a rule or a `Replacement`, several of them, or None.

    Raises:
        InputError: it is none of these, or an unknown rule.
    """
    if value is None:
        return ()
    rules: Any = [value] if isinstance(value, str | Replacement) or callable(value) else value
    if isinstance(rules, Tensor | np.ndarray) or not isinstance(rules, Iterable):
        raise InputError(f"replace must be a rule or a list of rules, got {described(value)}")
    return tuple(rule if isinstance(rule, Replacement) else Replacement(rule) for rule in rules)


def with_heads(requested: tuple[Replacement, ...]) -> tuple[Replacement, ...]:
    """The replacements with every head at its mean added: the statistics of the group "replacement"."""
    if any(replacement.rule == MEAN and replacement.per == "head" for replacement in requested):
        return requested
    windows = max((replacement.windows for replacement in requested), default=WINDOWS)
    return (*requested, Replacement(MEAN, per="head", windows=windows))
