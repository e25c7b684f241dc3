"""Public names that are loaded when they are first used. Needs no torch."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from massieu.errors import require_extra


def lazy_names(
    module: str, public: Sequence[str], sources: Mapping[str, str], *, extra: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions `__getattr__` and `__dir__` of a module that loads some of its names on first use (PEP 562).

    Args:
        module: the name of the module, its `__name__`.
        public: the names that `dir()` shows, its `__all__`.
        sources: where each name that is loaded on first use is defined, as ``"package.module:name"``; without a colon
            the name is the module itself.
        extra: A package that all of them need, and the extra of the same name that brings it.

    Returns:
        The two functions, to be assigned in the module. `__getattr__` raises AttributeError for any other name, and
        MissingExtraError where the extra's package is not installed.

    Example:
        >>> from massieu.foundation.lazy_names import lazy_names
        >>> __getattr__, __dir__ = lazy_names("house", ["fsum", "path"], {"fsum": "math:fsum", "path": "os.path"})
        >>> __getattr__("fsum")([0.5, 0.25])
        0.75
    """

    def get_attribute(name: str) -> Any:
        source = sources.get(name)
        if source is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if extra is not None:
            require_extra(extra, extra)
        module_name, _, attribute = source.partition(":")
        loaded = importlib.import_module(module_name)
        return getattr(loaded, attribute) if attribute else loaded

    def list_names() -> list[str]:
        return list(public)

    return get_attribute, list_names
