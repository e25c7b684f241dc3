"""What is said of an error that nobody foresaw, where the reading goes on without the part that raised it."""

import torch


def unexpected(error: Exception) -> str:
    """One line for the page: that memory ran out, or that the error is worth a report, with what it said."""
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    line = " ".join(said.split())[:200]
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return f"memory ran out ({line})"
    return f"an error that was not foreseen and is worth a report: {line}"
