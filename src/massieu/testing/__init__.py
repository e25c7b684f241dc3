"""The laws every measure obeys, as a check to run on one's own: `check_measure`.

It needs neither pytest nor SciPy. Laws are grouped by theme: `derivatives`, `divergence`, `distribution` (density, samples,
support), `inverse` (mean to natural parameter), `edges` (boundary, emptiness, no values), `batching` and `precision`.
"""

from massieu.testing.check import check_measure

__all__ = ["check_measure"]


def __dir__() -> list[str]:
    return __all__
