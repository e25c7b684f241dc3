"""Fixed points z = f(z, θ), each item by itself, and their derivatives (B12).

`fixed_point` takes a function, a start and parameters; how iterates move, where derivatives come from and how linear
systems are solved are arguments of their own. Everything here knows functions only. Results, and methods without settings,
are in the submodules.
"""

from massieu.solve.attraction import spectral_radius
from massieu.solve.fixed_point import fixed_point
from massieu.solve.linear import GMRES, ConjugateGradients, LinearSolver
from massieu.solve.methods import Anderson, Auto, Method, Newton
from massieu.solve.status import Status

__all__ = [
    "GMRES",
    "Anderson",
    "Auto",
    "ConjugateGradients",
    "LinearSolver",
    "Method",
    "Newton",
    "Status",
    "fixed_point",
    "spectral_radius",
]


def __dir__() -> list[str]:
    return __all__
