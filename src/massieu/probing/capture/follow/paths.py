"""The modules that are running, and which of them attends."""

import sys

from torch import nn

Path = tuple[nn.Module, ...]
"""The modules that are running, the outermost first."""


def common_path(*paths: Path) -> Path:
    """The modules around all of these places."""
    common = []
    for modules in zip(*paths, strict=False):
        if any(module is not modules[0] for module in modules):
            break
        common.append(modules[0])
    return tuple(common)


def owner_of(path: Path) -> nn.Module | None:
    """The innermost module that has parameters; heads belong to their module, whose projections make the scores."""
    for module in reversed(path):
        if not _is_heads(module) and next(module.parameters(), None) is not None:
            return module
    return None


def _is_heads(module: nn.Module) -> bool:
    """Whether it is a strategy of our `Attention`. Where nobody has imported these, no module is one."""
    strategies = sys.modules.get("massieu.nn.strategy")
    return strategies is not None and isinstance(module, strategies.Heads)
