"""Wrong values of the library, for claims whose rows look at them."""

import torch

from massieu.energy import BinaryHopfieldEnergy, HopfieldEnergy, KineticSpins, SpinModel, bounds
from massieu.energy.fenchel_young import SparseAtoms
from massieu.energy.gradients import jacobian_asymmetry
from massieu.papers.claims.bal import gradient_maps, random_features
from massieu.papers.claims.shim import layers
from massieu.papers.claims.zhang import generalisation
from massieu.papers.theory import attention_lipschitz, damped_descent, generalisation_bound
from massieu.papers.theory.generalisation import AttentionLipschitzResult
from massieu.papers.theory.normalized import ScoreDeviation
from massieu.papers.theory.two_layer import TwoLayer
from massieu.population import FeedForward

_STEP = FeedForward._moved
_BASIN = bounds.basin
_RETRIEVAL_BOUND = bounds.retrieval_bound
_EXACT = SpinModel.exact
_ENERGY = BinaryHopfieldEnergy._energy
_PRODUCTION = KineticSpins.entropy_production
_WEIGHTS = ScoreDeviation._weights_of_scores
_LEVEL = TwoLayer._energy
_RETRIEVAL_STEP = HopfieldEnergy.step
_SPARSE = SparseAtoms._weights_of_scores
_FEATURES = random_features.random_feature_log_partition


def _half_the_radius(hopfield: HopfieldEnergy, radius: float) -> bounds.BasinResult:
    """What is certain of half the ball, promised of the whole."""
    basin = _BASIN(hopfield, radius / 2)
    return basin._replace(exists=basin.distance <= radius)


def _uncorrelated(self: SpinModel):
    moments = _EXACT(self)
    return moments._replace(covariance=torch.zeros_like(moments.covariance))


def _twice_the_error(*arguments, **options):
    result = _FEATURES(*arguments, **options)
    if result.standard_error is None:
        return result
    return result._replace(standard_error=2 * result.standard_error)


def _twice_the_value_constant(*arguments):
    constants = attention_lipschitz(*arguments)
    return AttentionLipschitzResult(2 * constants.value, constants.score)


def _half_the_distance(hopfield: HopfieldEnergy, state: torch.Tensor) -> bounds.RetrievalBoundResult:
    """M for 2M."""
    bound = _RETRIEVAL_BOUND(hopfield, state)
    return bound._replace(distance=0.5 * bound.distance)


def _without_the_norm(hopfield: HopfieldEnergy, state: torch.Tensor) -> bounds.RetrievalBoundResult:
    """2 for 2M."""
    bound = _RETRIEVAL_BOUND(hopfield, state)
    return bound._replace(distance=2 * bound.weight)


def _half_the_basin_distance(hopfield: HopfieldEnergy, radius: float) -> bounds.BasinResult:
    """M for 2M in a ball."""
    basin = _BASIN(hopfield, radius)
    return basin._replace(distance=0.5 * basin.distance)


WRONG = {
    "S22: a fall of a tenth more": (
        "S22",
        layers,
        "damped_descent",
        lambda force, damping: 1.1 * damped_descent(force, damping),
    ),
    "S21: a layer of half the step": (
        "S21",
        FeedForward,
        "_moved",
        lambda self, x, group: x + 0.5 * (_STEP(self, x, group) - x),
    ),
    "S21: half the asymmetry": ("S21", layers, "jacobian_asymmetry", lambda f, x: 0.5 * jacobian_asymmetry(f, x)),
    "B4: half of the energy of couplings": (
        "B4",
        BinaryHopfieldEnergy,
        "_energy",
        lambda self, v: 0.5 * _ENERGY(self, v),
    ),
    "B5: balls of twice the radius": ("B5", bounds, "basin", _half_the_radius),
    "B5: half the distance of a retrieval": ("B5", bounds, "retrieval_bound", _half_the_distance),
    "B5: a distance without the norm": ("B5", bounds, "retrieval_bound", _without_the_norm),
    "B5: half the distance in a ball": ("B5", bounds, "basin", _half_the_basin_distance),
    "B16: one and a half of the entropy production": (
        "B16",
        KineticSpins,
        "entropy_production",
        lambda self, x: 1.5 * _PRODUCTION(self, x),
    ),
    "B17: twice the standard error": ("B17", random_features, "random_feature_log_partition", _twice_the_error),
    "B18: half the weights": ("B18", ScoreDeviation, "_weights_of_scores", lambda self, z: 0.5 * _WEIGHTS(self, z)),
    "B19: half the asymmetry": (
        "B19",
        gradient_maps,
        "jacobian_asymmetry",
        lambda f, x: 0.5 * jacobian_asymmetry(f, x),
    ),
    "B19: a step of nearly twice the length": (
        "B19",
        HopfieldEnergy,
        "step",
        lambda self, state: state + 1.8 * (_RETRIEVAL_STEP(self, state) - state),
    ),
    "B19: another sparsemax": ("B19", SparseAtoms, "_weights_of_scores", lambda self, z: 1.01 * _SPARSE(self, z)),
    "B20: an energy that rises": ("B20", TwoLayer, "_energy", lambda self, x: -_LEVEL(self, x)),
    "B21: Ising spins that are independent": ("B21", SpinModel, "exact", _uncorrelated),
    "Z10: twice the value's constant": (
        "Z10",
        generalisation,
        "attention_lipschitz",
        _twice_the_value_constant,
    ),
    "Z10: a hundredth of the bound": (
        "Z10",
        generalisation,
        "generalisation_bound",
        lambda *arguments, **options: 0.01 * generalisation_bound(*arguments, **options),
    ),
}
