"""What is said of an error where the reading goes on without the part that raised it."""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

_LIBRARY_FOLDERS = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))
"""Folders of code that no user of a statistic has written."""


class OwnFunctionError(Exception):
    """A function of the user's own raised an error, or gave what is no statistic; the message says which."""


def unexpected(error: Exception) -> str:
    """One line for the page: that memory ran out, or that the error is worth a report, with what it said."""
    if isinstance(error, OwnFunctionError):
        return str(error)
    line = _in_a_line(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return f"memory ran out ({line})"
    return f"an error that was not foreseen and is worth a report: {line}"


@contextmanager
def calling_own(function: object = None, given: Sequence[Tensor | None] = ()) -> Iterator[None]:
    """What a function of the user's own raises inside is told with the line that raised it.

    Args:
        function: the line is one of its file, if any is.
        given: tensors that it must not change, since they are the model's, or other functions are given them too.

    Raises:
        OwnFunctionError: it raised anything but that memory ran out, or changed a tensor in place.
    """
    versions = _versions(given)
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, OwnFunctionError):
        raise
    except SystemExit as error:
        raise OwnFunctionError("it asks Python to end") from error
    except Exception as error:
        raise OwnFunctionError(f"it raised {_in_a_line(error)}{_place_of(error, function)}") from error
    if _versions(given) != versions:
        raise OwnFunctionError("it changed a tensor that it was given, in place; work on a copy")


def _place_of(error: Exception, function: object) -> str:
    """The line of the user's that raised an error, in brackets; nothing where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    users_frames = [frame for frame in frames if frame.filename == file]
    if not users_frames:
        users_frames = [frame for frame in frames if _is_users(frame.filename)]
    if not users_frames:
        return ""
    innermost = users_frames[-1]
    return f" ({Path(innermost.filename).name}, line {innermost.lineno})"


def _versions(tensors: Sequence[Tensor | None]) -> list[int]:
    """How often each was changed in place, as PyTorch counts; tensors of inference mode are not counted."""
    return [tensor._version for tensor in tensors if tensor is not None and not tensor.is_inference()]


def _is_users(file: str) -> bool:
    return not file.startswith((*_LIBRARY_FOLDERS, "<frozen")) and Path(file).name != "contextlib.py"


def _in_a_line(error: Exception) -> str:
    message = f"{type(error).__name__}: {error}".rstrip(": ")
    return " ".join(message.split())[:200]
