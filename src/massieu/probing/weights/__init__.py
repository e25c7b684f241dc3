"""The attention weights of a prompt or a batch, site by site, and what follows from them: rollout, distances, pictures."""

__all__: list[str] = []


def __dir__() -> list[str]:
    return __all__
