"""Convex duality: from natural to mean parameters of a measure and back, and the conjugate of log Z (S6, S8, S9).

∇A maps natural parameters onto the relative interior of the convex hull of the support, one-to-one up to directions that
A cannot see. `natural` inverts it, at the eta of least norm; `conjugate` is A*(mu) = sup eta·mu − A(eta), whose gradient
is `natural` and whose Hessian is the inverse of the Fisher information. For atoms, mu is attention's output: its weights
have the largest entropy relative to h among all with that output, and eta is the multiplier of that constraint.
"""

from massieu.duality.maps import conjugate, natural

__all__ = ["conjugate", "natural"]


def __dir__() -> list[str]:
    return __all__
