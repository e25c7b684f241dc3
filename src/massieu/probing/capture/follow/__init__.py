"""The second route to a model's attention calls: scores are followed to their softmax in any PyTorch code."""

__all__: list[str] = []


def __dir__() -> list[str]:
    return __all__
