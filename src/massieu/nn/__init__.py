"""Modules that own parameters and build measures and energies of them in each forward pass.

- `Attention` takes the place of `torch.nn.MultiheadAttention`; what its heads do is a strategy:
  `SoftmaxHeads`, with log Z and moments; `CosineHeads`, of directions; `MeasureHeads`, of any measure; `EntmaxHeads`,
  `NormalizedHeads`, `SigmoidHeads`, of other potentials; `ReLUHeads`, of none; `DualLinkHeads`, of keys through a family's
  link; `RandomFeatureHeads`, of linear cost; `ConditionalMeanHeads`, the mean of a value given a key; `ImplicitHeads`, the
  fixed point of attention, pulled to its query; `TAPHeads`, tokens as spins that attention couples;
- `Hopfield`, `HopfieldPooling`, `HopfieldLayer` repeat attention until a stored pattern is retrieved;
- `EnergyTransformer` descends one energy of all tokens, `EnergyTransformerStack` several in sequence;
- `Equilibrium` makes any block an implicit layer, `MonotoneEquilibrium` is one that always converges;
- `SigmaReparametrization` bounds a weight's spectral norm;
- `SpinAttention` moves tokens as spins that attention couples;
- `Activation` trains one of `massieu.energy.activations`: a normalisation that is the gradient of a convex function;
- `RestrictedBoltzmannMachine` has any units, `StackedBoltzmannMachine` several of them on top of each other,
  `DeepBoltzmannMachine` several layers in one energy;
- `clip_logits` scales the queries and keys of heads whose largest logit is above a threshold.

Modules can be made on `meta`, and compute shapes there; iterations that stop by values take no step on `meta`.
`reset_parameters` brings a module back to its start.

Constructors raise a TypeError or ValueError for an argument of a wrong kind or out of its range; calls raise them for inputs
and masks that do not fit the module or each other. With `throw`, an iteration that does not converge raises a
ConvergenceError.
"""

from massieu.nn.activation import Activation
from massieu.nn.attention import Attention
from massieu.nn.boltzmann import RestrictedBoltzmannMachine
from massieu.nn.clip_logits import clip_logits
from massieu.nn.conditional_mean import ConditionalMeanHeads
from massieu.nn.cosine import CosineHeads
from massieu.nn.deep_boltzmann import DeepBoltzmannMachine
from massieu.nn.dual_link import DualLinkHeads
from massieu.nn.elementwise import ReLUHeads, SigmoidHeads
from massieu.nn.energy_transformer import EnergyTransformer, EnergyTransformerStack
from massieu.nn.equilibrium import Equilibrium, MonotoneEquilibrium
from massieu.nn.hopfield import Hopfield, HopfieldLayer, HopfieldPooling
from massieu.nn.implicit import ImplicitHeads
from massieu.nn.normalized import NormalizedHeads
from massieu.nn.random_features import RandomFeatureHeads
from massieu.nn.sigma import SigmaReparametrization
from massieu.nn.softmax import MeasureHeads, SoftmaxHeads
from massieu.nn.sparse import EntmaxHeads
from massieu.nn.spin import SpinAttention
from massieu.nn.stacked_boltzmann import StackedBoltzmannMachine
from massieu.nn.tap import TAPHeads

__all__ = [
    "Activation",
    "Attention",
    "ConditionalMeanHeads",
    "CosineHeads",
    "DeepBoltzmannMachine",
    "DualLinkHeads",
    "EnergyTransformer",
    "EnergyTransformerStack",
    "EntmaxHeads",
    "Equilibrium",
    "Hopfield",
    "HopfieldLayer",
    "HopfieldPooling",
    "ImplicitHeads",
    "MeasureHeads",
    "MonotoneEquilibrium",
    "NormalizedHeads",
    "RandomFeatureHeads",
    "ReLUHeads",
    "RestrictedBoltzmannMachine",
    "SigmaReparametrization",
    "SigmoidHeads",
    "SoftmaxHeads",
    "SpinAttention",
    "StackedBoltzmannMachine",
    "TAPHeads",
    "clip_logits",
]


def __dir__() -> list[str]:
    return __all__
