"""The errors a user's input can cause: one clear sentence each, printed by the command line without a traceback."""

import importlib
from types import ModuleType


class InputError(ValueError):
    """Bad input: the message names what was given and what is needed."""


class MissingExtraError(InputError):
    """An optional dependency is not installed: the message holds the pip command that installs it."""


def require_extra(module: str, extra: str) -> ModuleType:
    """Import ``module``, which the optional dependencies named ``extra`` bring.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        raise MissingExtraError(
            f'{module} is not installed; install it with: pip install "massieu[{extra}]"'
        ) from error
