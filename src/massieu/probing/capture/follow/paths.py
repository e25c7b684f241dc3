"""The modules that are running, and which of them attends."""

from torch import nn

from massieu.nn.strategy import Heads

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
        if not isinstance(module, Heads) and next(module.parameters(), None) is not None:
            return module
    return None
