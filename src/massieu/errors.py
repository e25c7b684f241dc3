"""The errors a user can meet: one clear sentence each. Those of input the command line prints without a traceback."""

import importlib
from types import ModuleType


class InputError(ValueError):
    """Bad input: the message names what was given and what is needed.

    Example:
        >>> import massieu
        >>> try:
        ...     massieu.probe(max_length=2)
        ... except massieu.InputError as error:
        ...     print(error)
        max_length must be at least 4, got 2
    """


class MissingExtraError(InputError):
    """An optional dependency is not installed: the message holds the pip command that installs it.

    Example:
        >>> import massieu
        >>> from massieu.errors import require_extra
        >>> try:
        ...     require_extra("no_such_module", "probe")
        ... except massieu.MissingExtraError as error:
        ...     print(error)
        no_such_module is not installed; install it with: pip install "massieu[probe]"
    """


class ConvergenceError(RuntimeError):
    """An iteration did not come to an end: the message holds the residual, the steps and what to try."""


class ConvergenceWarning(UserWarning):
    """A module or a fixed number of steps went on with what has not come to an end: said once, and recorded item by item."""


class ProcessLostError(RuntimeError):
    """One of several processes that share a text has ended: the message says where what the others read is stored."""


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
