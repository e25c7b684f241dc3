"""Every energy keeps the laws of energies, against its formula in NumPy or explicit matrices."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.energy.cases import F64, MEMORIES, REFERENCES, draw, hopfield_energy
from tests.energy.transformer_cases import explicit_energy, network, padding
from tests.support.suites import compiled, every_check, without_a_case
from torch import Tensor

from massieu.energy import (
    BinaryHopfieldEnergy,
    DenseHopfieldEnergy,
    Energy,
    HopfieldEnergy,
    SparseAtoms,
)
from massieu.energy.activations import LayerNorm, RMSNorm, Tanh
from massieu.papers.theory import ClusteringEnergy, LogSumReLU, ScoreDeviation, TwoLayer
from massieu.testing import EnergyCase, energy_checks

WIDTH = 3
PATTERNS, STATES = draw(6, WIDTH), draw(5, WIDTH, seed=1)
SIGNS, FIELD = draw(4, 6).sign(), draw(6, seed=2)
COUPLING = draw(3, 4)
NETWORK, PADDED = network(), network(keep=padding(3, 4))
TOKENS = draw(3, 4, 6, seed=7)
DISCRETE = dict.fromkeys(("force", "worst", "fixed points", "derivatives"), "states are discrete")


def _hopfield(reference: str) -> EnergyCase:
    normalisations = {"RMSNorm": RMSNorm.create(0.8, eps=0.3), "LayerNorm": LayerNorm.create(0.8, draw(3), eps=0.3)}
    made = normalisations.get(reference) or REFERENCES[reference](WIDTH)
    return EnergyCase(HopfieldEnergy.create(PATTERNS, reference=made, scale=1.7), STATES)


def _rectified(states: Tensor) -> list[float]:
    squares = np.square(states.numpy()[:, None] - PATTERNS.numpy()).sum(-1)
    with np.errstate(divide="ignore"):
        return -np.log(np.maximum(1 - 0.3 * squares / 2, 0).sum(-1)) / 0.3


def _two_layer(states: Tensor) -> Tensor:
    """½‖v‖² + h·softmax(h) − log Σ exp h − v·W softmax(h)."""
    visible, hidden = states.split((3, 4), -1)
    share = hidden.softmax(-1)
    own = 0.5 * visible.square().sum(-1) + (hidden * share).sum(-1) - hidden.logsumexp(-1)
    return own - (visible * (share @ COUPLING.mT)).sum(-1)


CASES = {
    "Hopfield": EnergyCase(
        HopfieldEnergy.create(PATTERNS, scale=1.7),
        STATES,
        lambda states: [hopfield_energy(PATTERNS.numpy(), one, 1.7) for one in states.numpy()],
    ),
    # The sphere is tried as a measure and as an activation, in suites of their own.
    **{f"Hopfield and {name}": _hopfield(name) for name in REFERENCES if name not in ("identity", "Sphere")},
    **{
        f"Hopfield of {name}, batched": EnergyCase(
            HopfieldEnergy.create(make((2,), WIDTH), scale=torch.tensor([0.7, 2.0], dtype=F64)),
            draw(2, 5, WIDTH, seed=1),
            batch=1,
        )
        for name, make in MEMORIES.items()
    },
    "Hopfield of sparse atoms": EnergyCase(HopfieldEnergy.create(SparseAtoms.create(PATTERNS)), STATES),
    "Hopfield of score deviation": EnergyCase(HopfieldEnergy.create(ScoreDeviation.create(PATTERNS)), STATES),
    "rectified": EnergyCase(LogSumReLU.create(PATTERNS, scale=0.3), STATES, _rectified),
    "binary": EnergyCase(
        BinaryHopfieldEnergy.of_patterns(SIGNS, FIELD),
        draw(5, 6, seed=1).sign(),
        lambda states: -states @ FIELD - 0.5 * (states @ SIGNS.mT).square().sum(-1),
        scales=(1.0,),
        exempt=DISCRETE,
    ),
    "dense": EnergyCase(
        DenseHopfieldEnergy.create(SIGNS, FIELD),
        draw(5, 6, seed=1).sign(),
        lambda states: -states @ FIELD - (states @ SIGNS.mT).exp().sum(-1),
        scales=(1.0,),
        exempt=DISCRETE,
    ),
    "two layers": EnergyCase(TwoLayer.create(COUPLING), draw(5, 7, seed=1), _two_layer),
    "two bounded layers": EnergyCase(
        TwoLayer.create(COUPLING, visible=Tanh.create(), hidden=Tanh.create()), draw(5, 7)
    ),
    "transformer": EnergyCase(
        NETWORK,
        NETWORK.normalise(TOKENS),
        lambda states: torch.stack([explicit_energy(NETWORK, one) for one in states]),
        scales=(1.0,),
    ),
    "transformer, padded": EnergyCase(PADDED, PADDED.normalise(TOKENS.unsqueeze(1).repeat(1, 2, 1, 1)), scales=(1.0,)),
    "clustering": EnergyCase(
        ClusteringEnergy.create(1.3),
        F.normalize(draw(3, 4, 3, seed=7), dim=-1),
        lambda clouds: -(1.3 * clouds @ clouds.mT).exp().mean((-2, -1)) / (2 * 1.3),
        scales=(0.5, 1.0),
    ),
    "clustering, batched": EnergyCase(
        ClusteringEnergy.create(torch.tensor([0.5, 2.0])), F.normalize(draw(2, 3, 4, 3), dim=-1), scales=(1.0,), batch=1
    ),
}
QUICK = ("Hopfield", "Hopfield and spin", "rectified", "binary", "dense", "two layers", "clustering")
MEDIUM = ("Hopfield of signs, batched", "transformer", "clustering, batched")
SLOW = [
    *[name for name in CASES if name not in QUICK + MEDIUM],
    *["transformer: fixed points", "Hopfield and spin: derivatives", "clustering, batched: derivatives"],
]


@every_check(
    energy_checks, CASES, medium=MEDIUM, slow=SLOW, representatives=("rectified", "binary", "clustering, batched")
)
def test_conforms(check):
    check()


@pytest.mark.slow
@pytest.mark.parametrize("check", compiled(energy_checks, {name: CASES[name] for name in QUICK + MEDIUM}))
def test_compiled_is_eager(check):
    check()


@pytest.mark.medium
def test_every_energy_has_a_case():
    assert not without_a_case(Energy, [case.energy for case in CASES.values()])
