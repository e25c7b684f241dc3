"""The laws that every measure obeys, as checks of one's own: `measure_checks`.

It needs neither pytest nor SciPy. Laws are grouped by theme: `derivatives`, `divergence`, `distribution` (density, samples,
support), `inverse` (mean to natural parameter, the boundary), `edges` (emptiness, no values), `batching` and `precision`.
"""

from massieu.testing.measures import measure_checks
from massieu.testing.subject import MeasureCase

__all__ = ["MeasureCase", "measure_checks"]


def __dir__() -> list[str]:
    return __all__
