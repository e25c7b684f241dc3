"""Modules that own parameters and build measures and energies of them in each forward pass.

- `Attention` takes the place of `torch.nn.MultiheadAttention`, returns log Z, and attends by any measure;
- `Hopfield`, `HopfieldPooling`, `HopfieldLayer` repeat attention until a stored pattern is retrieved;
- `ImplicitAttention` does so held by its query; `SparseAttention` and `NormalizedAttention` have other potentials;
- `SpinAttention` moves tokens as spins that attention couples;
- `Scalar`, `Spin`, `SphereProjection`, `SoftSphere`, `RMSNorm`, `LayerNorm` are contractions;
- `RestrictedBoltzmannMachine` has any units.
"""

from massieu.nn.attention import Attention
from massieu.nn.boltzmann import RestrictedBoltzmannMachine
from massieu.nn.contraction import Contraction, LayerNorm, RMSNorm, Scalar, SoftSphere, SphereProjection, Spin
from massieu.nn.hopfield import Hopfield, HopfieldLayer, HopfieldPooling
from massieu.nn.implicit import ImplicitAttention
from massieu.nn.normalized import NormalizedAttention
from massieu.nn.sparse import SparseAttention
from massieu.nn.spin import SpinAttention

__all__ = [
    "Attention",
    "Contraction",
    "Hopfield",
    "HopfieldLayer",
    "HopfieldPooling",
    "ImplicitAttention",
    "LayerNorm",
    "NormalizedAttention",
    "RMSNorm",
    "RestrictedBoltzmannMachine",
    "Scalar",
    "SoftSphere",
    "SparseAttention",
    "SphereProjection",
    "Spin",
    "SpinAttention",
]
