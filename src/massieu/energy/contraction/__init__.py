"""Contractions: maps that are gradients of convex functions, as LayerNorm is.

A normalisation after attention is the mean map ∇R of a *Lagrangian* R (Krotov and Hopfield, arXiv 2008.06996), and the
energy of attention followed by it is R* − A/scale (`HopfieldEnergy`). Every map here is a potential, whose ``log_partition``
is R and whose ``mean`` is ∇R, the map itself, with ``conjugate``, R*, beside them. Measures are references as well: `Sphere`,
`Gaussian`, `Bernoulli` and all others.

A map with a Lagrangian has a symmetric Jacobian. LayerNorm and RMSNorm have one with a single gain; with a gain for every
coordinate they have none, and are refused. Values are pytrees, like measures; ``x`` has shape (*batch, *query, d), where
*batch is the shape of the map's tensors without their own dimensions. Half precision is promoted to float32; single numbers
take the dtype and device of x.
"""

from massieu.energy.contraction.base import Contraction
from massieu.energy.contraction.linear import Identity, Scalar, Whitening
from massieu.energy.contraction.measured import SoftSphere, Spin
from massieu.energy.contraction.normalisation import LayerNorm, RMSNorm, SphereProjection

__all__ = [
    "Contraction",
    "Identity",
    "LayerNorm",
    "RMSNorm",
    "Scalar",
    "SoftSphere",
    "SphereProjection",
    "Spin",
    "Whitening",
]
