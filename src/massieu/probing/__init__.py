"""Reading a real model: capture, statistics, result."""

__all__: list[str] = []


def __dir__() -> list[str]:
    return __all__
