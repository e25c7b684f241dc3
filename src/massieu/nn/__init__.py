"""Modules that own parameters and build measures and energies of them in each forward pass.

- `Attention` takes the place of `torch.nn.MultiheadAttention`, returns log Z, and attends by any measure;
- `Hopfield`, `HopfieldPooling`, `HopfieldLayer` repeat attention until a stored pattern is retrieved;
- `ImplicitAttention` does so held by its query; `SparseAttention` and `NormalizedAttention` have other potentials;
- `ConditionalMeanAttention` estimates the mean of a value given a key;
- `TAPAttention` couples tokens as spins, and solves for their means;
- `EnergyTransformer` walks down one energy of all tokens, `EnergyTransformerStack` down several;
- `SigmaReparametrization` bounds a weight's spectral norm;
- `SpinAttention` moves tokens as spins that attention couples;
- `Activation` trains one of `massieu.energy.activations`: a normalisation that is the gradient of a convex function;
- `RestrictedBoltzmannMachine` has any units.

Constructors raise a TypeError or ValueError for an argument of a wrong kind or out of its range, calls for inputs and masks
that do not fit the module or each other. With `throw`, a call whose iteration does not end raises a ConvergenceError.
"""

from massieu.nn.activation import Activation
from massieu.nn.attention import Attention
from massieu.nn.boltzmann import RestrictedBoltzmannMachine
from massieu.nn.conditional_mean import ConditionalMeanAttention
from massieu.nn.energy_transformer import EnergyTransformer, EnergyTransformerStack
from massieu.nn.hopfield import Hopfield, HopfieldLayer, HopfieldPooling
from massieu.nn.implicit import ImplicitAttention
from massieu.nn.normalized import NormalizedAttention
from massieu.nn.sigma import SigmaReparametrization
from massieu.nn.sparse import SparseAttention
from massieu.nn.spin import SpinAttention
from massieu.nn.tap import TAPAttention

__all__ = [
    "Activation",
    "Attention",
    "ConditionalMeanAttention",
    "EnergyTransformer",
    "EnergyTransformerStack",
    "Hopfield",
    "HopfieldLayer",
    "HopfieldPooling",
    "ImplicitAttention",
    "NormalizedAttention",
    "RestrictedBoltzmannMachine",
    "SigmaReparametrization",
    "SparseAttention",
    "SpinAttention",
    "TAPAttention",
]


def __dir__() -> list[str]:
    return __all__
