"""A model that runs with another attention: rules, the context in which they hold, and what they change."""

__all__: list[str] = []


def __dir__() -> list[str]:
    return __all__
