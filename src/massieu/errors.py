"""Errors and warnings of the package. The command line prints input errors as one sentence, without a traceback."""

import importlib
from types import ModuleType


class InputError(ValueError):
    """Bad input: the message names what was given and what is needed.

    Example:
        >>> import massieu
        >>> try:
        ...     massieu.probe(draws=1)
        ... except massieu.InputError as error:
        ...     print(error)
        draws must be a whole number, 2 or more, or 0 for no control, got 1
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
    """An iteration did not converge: the message holds the residual, the number of steps and what to try."""


class ConvergenceWarning(UserWarning):
    """A module used the result of an iteration that has not converged: warned once, and recorded item by item."""


class OverlapWarning(UserWarning):
    """The patterns of a memory overlap too much to be retrieved at its scale: the message says what would be enough."""


class ProcessLostError(RuntimeError):
    """One of several processes that share a text has ended: the message says where the others' results are stored."""


def require_extra(module: str, extra: str) -> ModuleType:
    """Import ``module``, which the optional dependencies named ``extra`` bring.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise MissingExtraError(
            f'{package} is not installed; install it with: pip install "massieu[{extra}]"'
        ) from error
