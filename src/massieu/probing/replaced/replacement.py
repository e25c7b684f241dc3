"""What is put in the place of a model's attention, and how its effect is measured."""

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor

from massieu.errors import InputError
from massieu.foundation.arguments import choice, described
from massieu.foundation.doors import check_fields, count
from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.replaced.rules import MEAN, made_of

Per = Literal["all", "site", "head"]
PER: tuple[Per, ...] = ("all", "site", "head")
WINDOWS = 16
"""Windows on which a replacement is measured, unless it is told otherwise."""


@dataclass(frozen=True)
class Replacement:
    """A rule in the place of attention, of which a probe measures what the model loses. A rule alone will do too.

    Args:
        rule: as for `massieu.replaced`, or ``"off(mean)"``, each head's mean output over the text.
        per: "all" replaces everything at once, "site" each attention site by itself, "head" each head: a forward pass a
            window for each.
        windows: on so many sampled windows.

    Raises:
        InputError: an unknown rule; another ``per``; fewer windows than one.

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
            made_of(self.rule)
        check_fields(self, per=lambda name, value: choice(name, value, *PER), windows=count)
        if self.windows < 1:
            raise InputError(f"windows of a replacement must be at least 1, got {self.windows}")

    @property
    def name(self) -> str:
        """What the rule is called in a result."""
        return self.rule if isinstance(self.rule, str) else getattr(self.rule, "__name__", type(self.rule).__name__)


def replacements(given: Any) -> tuple[Replacement, ...]:
    """What a caller gives as replacements: a rule or a `Replacement`, or several.

    Raises:
        InputError: it is none of these, or an unknown rule.
    """
    if given is None:
        return ()
    several: Any = [given] if isinstance(given, str | Replacement) or callable(given) else given
    if isinstance(several, Tensor | np.ndarray) or not isinstance(several, Iterable):
        raise InputError(f"replace must be a rule or a list of rules, got {described(given)}")
    return tuple(each if isinstance(each, Replacement) else Replacement(each) for each in several)


def with_heads(asked: tuple[Replacement, ...]) -> tuple[Replacement, ...]:
    """These, and every head at its mean: the statistics of the group "replacement"."""
    if any(each.rule == MEAN and each.per == "head" for each in asked):
        return asked
    windows = max((each.windows for each in asked), default=WINDOWS)
    return (*asked, Replacement(MEAN, per="head", windows=windows))
