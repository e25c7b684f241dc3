"""How many re-initialised models a probe draws where a test does not say."""

import inspect
from collections.abc import MutableMapping
from typing import Any

import pytest

from massieu.probing.compare.run import compare
from massieu.probing.run import probe


def draw_by_default(number: int, patch: pytest.MonkeyPatch) -> None:
    """So many, in place of the default in the signatures."""
    for function in (probe, compare):
        defaults: MutableMapping[str, Any] = inspect.unwrap(function).__kwdefaults__  # pyright: ignore[reportFunctionMemberAccess]
        patch.setitem(defaults, "draws", number)
