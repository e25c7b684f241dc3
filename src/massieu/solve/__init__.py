"""Fixed points z = f(z, θ), each item by itself, and their derivatives (B12).

`fixed_point` takes a function, a start and parameters; how iterates move, where derivatives come from and how linear
systems are solved are arguments of their own. Everything here knows functions only.
"""

from massieu.solve.attraction import spectral_radius
from massieu.solve.fixed_point import fixed_point
from massieu.solve.linear import GMRES, ConjugateGradients, Dense, LinearSolver, LinearSolveResult
from massieu.solve.methods import Anderson, Auto, Method, Newton, Picard
from massieu.solve.status import FixedPointResult, Status

__all__ = [
    "GMRES",
    "Anderson",
    "Auto",
    "ConjugateGradients",
    "Dense",
    "FixedPointResult",
    "LinearSolveResult",
    "LinearSolver",
    "Method",
    "Newton",
    "Picard",
    "Status",
    "fixed_point",
    "spectral_radius",
]
