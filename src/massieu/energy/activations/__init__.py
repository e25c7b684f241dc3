"""Activations: maps that are gradients of convex functions, such as LayerNorm or tanh.

A normalisation after attention is the gradient ∇L of a *Lagrangian* L (Krotov and Hopfield, arXiv 2008.06996), and the
energy of attention followed by it is L* − A/scale (`massieu.energy.HopfieldEnergy`). An activation is called as a function,
``activation(x)`` = ∇L(x); ``lagrangian(x)`` is L, ``conjugate(y)`` its conjugate L*, ``lipschitz`` a constant of the map.
Every measure is an activation too, by its mean map (`MeasureActivation`), and may stand wherever one is expected.

A map with a Lagrangian has a symmetric Jacobian. LayerNorm and RMSNorm have one with a single gain; with a gain for every
coordinate they have none, and are refused. Values are pytrees, like measures; ``x`` has shape (*batch, *query, d), where
*batch is the shape of the map's tensors without their own dimensions. Half precision is promoted to float32; single numbers
take the dtype and device of x.
"""

from massieu.energy.activations.base import Activation, MeasureActivation
from massieu.energy.activations.bounded import LayerNorm, RMSNorm, SphereProjection, Tanh
from massieu.energy.activations.linear import Identity, Scalar, Whitening

__all__ = [
    "Activation",
    "Identity",
    "LayerNorm",
    "MeasureActivation",
    "RMSNorm",
    "Scalar",
    "SphereProjection",
    "Tanh",
    "Whitening",
]


def __dir__() -> list[str]:
    return __all__
