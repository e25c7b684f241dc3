"""Solve fixed points z = f(z, θ) and linear systems for each item of a batch, with their derivatives (B12).

`fixed_point` and `linear_solve` take a function, where to begin and parameters. How iterates move, where derivatives come from
and how linear systems are solved are objects. Everything here knows functions only. Results are in the submodules.
"""

from massieu.solve.adjoint import Implicit, OneStep, Unrolled
from massieu.solve.attraction import spectral_radius
from massieu.solve.fixed_point import fixed_point
from massieu.solve.linear import GMRES, ConjugateGradients, Dense, LinearSolver
from massieu.solve.methods import Anderson, Auto, Method, Newton, Picard
from massieu.solve.status import Status
from massieu.solve.system import linear_solve

__all__ = [
    "GMRES",
    "Anderson",
    "Auto",
    "ConjugateGradients",
    "Dense",
    "Implicit",
    "LinearSolver",
    "Method",
    "Newton",
    "OneStep",
    "Picard",
    "Status",
    "Unrolled",
    "fixed_point",
    "linear_solve",
    "spectral_radius",
]


def __dir__() -> list[str]:
    return __all__
