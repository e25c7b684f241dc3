"""Energies: functions of a state with an update that never raises them. Attention is the update of one.

- `HopfieldEnergy`: the energy of any memory under any reference; `activations`: the references that are normalisations;
- `bounds`: what is known of a memory in advance; `HopfieldDensity`: the memory as a mixture of Gaussians, its samples, its
  denoiser; `retrieval_curve`: how many of your patterns a memory gives back;
- `ood_score`, `boosting_energy`: how foreign a state is to a memory;
- `BinaryHopfieldEnergy`, `DenseHopfieldEnergy`: networks of two-valued units;
- `SparseAtoms`, `fenchel_young_loss`: a memory by sparse weights, and its loss; `jacobian_asymmetry`, `is_conservative`:
  whether a map is a gradient at all;
- `TransformerEnergy`: tokens that attend to each other, and memories; `least_entropy`: of attention whose scores are bounded;
- `BoltzmannMachine`, `SpinModel`: energies of two layers and of coupled sites, with all constants;
- `integrate_out`, `decimation_flow`, `decimation_fixed_point`: what spins that are summed out leave to the others;
- `KineticSpins`: synchronous dynamics of vector spins.
"""

from massieu.energy import activations, bounds
from massieu.energy.base import Energy
from massieu.energy.boltzmann import BoltzmannMachine
from massieu.energy.decimation import decimation_fixed_point, decimation_flow, integrate_out
from massieu.energy.density import HopfieldDensity
from massieu.energy.discrete import BinaryHopfieldEnergy, DenseHopfieldEnergy
from massieu.energy.entropy import least_entropy
from massieu.energy.fenchel_young import SparseAtoms, fenchel_young_loss
from massieu.energy.gradients import is_conservative, jacobian_asymmetry
from massieu.energy.hopfield import HopfieldEnergy
from massieu.energy.kinetic import KineticSpins
from massieu.energy.out_of_distribution import boosting_energy, ood_score
from massieu.energy.retrieval import retrieval_curve
from massieu.energy.spins import SpinModel
from massieu.energy.transformer import TransformerEnergy

__all__ = [
    "BinaryHopfieldEnergy",
    "BoltzmannMachine",
    "DenseHopfieldEnergy",
    "Energy",
    "HopfieldDensity",
    "HopfieldEnergy",
    "KineticSpins",
    "SparseAtoms",
    "SpinModel",
    "TransformerEnergy",
    "activations",
    "boosting_energy",
    "bounds",
    "decimation_fixed_point",
    "decimation_flow",
    "fenchel_young_loss",
    "integrate_out",
    "is_conservative",
    "jacobian_asymmetry",
    "least_entropy",
    "ood_score",
    "retrieval_curve",
]


def __dir__() -> list[str]:
    return __all__
