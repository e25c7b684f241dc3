"""Does a trained head learn the precision of its keys? (E23, X1, X2)"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float64
from torch import Tensor

from massieu import ops
from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.training import minimise, slope
from massieu.papers.theory import GaussianTokens

SIZE = 4
_LENGTH = 1024
_CONTEXTS = 8
_QUERIES = 64
_NOISE = 0.5


@experiment(
    "precision",
    question="Does a trained head learn that its score matrix is the inverse covariance of its keys?",
    claims="E23, X1, X2",
    minutes=5,
    criteria=[
        Criterion("relative_error", "‖M − Σ⁻¹‖/‖Σ⁻¹‖", most=0.10),
        Criterion("scaled_error", "‖M − s*Σ⁻¹‖/‖s*Σ⁻¹‖, s* the best scale at this length", most=0.02),
        Criterion("slope", "slope of log v_kᵀMv_k on log λ_k, in the eigenbasis of Σ", least=-1.02, most=-0.98),
        Criterion(
            "excess_risk", "relative excess of the risk over that of the best scale", most=0.01, role="optimisation"
        ),
        Criterion("shuffled_error", "‖M − Σ⁻¹‖/‖Σ⁻¹‖ of a head trained on shuffled values", most=0.10, role="control"),
    ],
)
def precision(seed: int, quick: bool) -> Numbers:
    """One softmax head attends to 1,024 jointly Gaussian tokens (k, v) with E[v|k] = Rk, R a rotation of Σ^−½. Its values are
    given, not projected: if W_V were trained, the loss would be the same and M not determined. Queries have whitened norm
    1. The head's score matrix M (4×4) is trained from 0 to predict the v that belongs to the query as key. The truth is Σ⁻¹
    for infinitely many tokens (X1), and the best multiple s*Σ⁻¹ at this length (X2).
    """
    generator = torch.Generator().manual_seed(seed)
    task = _Task(generator, 256 if quick else _LENGTH)
    steps = 100 if quick else 1500
    learned = task.train(steps)
    shuffled = task.train(steps, shuffled=True)
    exact = task.precision
    scale = task.best_scale()
    variances, axes = torch.linalg.eigh(task.covariance)
    learned_along_axes = ((axes.mT @ learned) * axes.mT).sum(1)  # v_kᵀMv_k
    risk, best_risk = task.risk(torch.stack([learned, scale * exact]))
    return {
        "relative_error": _relative_distance(learned, exact),
        "scaled_error": _relative_distance(learned, scale * exact),
        "slope": slope(variances.log(), learned_along_axes.clamp_min(1e-12).log()),
        "scale": scale,
        "excess_risk": float(risk / best_risk - 1),
        "shuffled_error": _relative_distance(shuffled, exact),
        "antisymmetric_share": float(((learned - learned.mT) / 2).norm() / learned.norm()),
    }


class _Batch(NamedTuple):
    keys: Float64[Tensor, "B 1 L d"]
    values: Float64[Tensor, "B 1 L d"]
    queries: Float64[Tensor, "B 1 Q d"]


class _Task:
    """Tokens of one covariance Σ, and a head's score matrix trained on them.

    Attributes:
        covariance, precision: Σ and Σ⁻¹.
        map: R, with E[v|k] = Rk.
        law: The joint law of keys and values.
    """

    def __init__(self, generator: torch.Generator, length: int) -> None:
        self.generator = generator
        self.length = length
        basis = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64)).Q
        self.root = basis * torch.logspace(-0.25, 0.25, SIZE, dtype=torch.float64)  # Σ = root rootᵀ
        self.covariance = self.root @ self.root.mT
        self.precision = torch.linalg.inv(self.covariance)
        # Values are whitened keys, rotated, and noise: then no direction is worth more than another, and the best matrix of
        # any length is a multiple of the precision. With another map, the directions that it shrinks are hardly learned.
        rotation = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64)).Q
        self.map = rotation @ torch.linalg.inv(self.root)
        zero = torch.zeros(SIZE, dtype=torch.float64)
        noise = _NOISE**2 * torch.eye(SIZE, dtype=torch.float64)
        cross_covariance = self.map @ self.covariance
        value_covariance = cross_covariance @ self.map.mT + noise
        self.law = GaussianTokens.create(zero, zero, self.covariance, cross_covariance, value_covariance)

    def best_scale(self) -> float:
        """The s in [0, 1] of least risk by X2; here it is the same for every query of whitened norm 1."""
        query = self.root[:, 0]
        return float(self.law.optimal_share(query, float(self.length)))

    def batch(self, contexts: int) -> _Batch:
        options = {"generator": self.generator, "dtype": torch.float64}
        keys = torch.randn(contexts, 1, self.length, SIZE, **options) @ self.root.mT
        values = keys @ self.map.mT + _NOISE * torch.randn(contexts, 1, self.length, SIZE, **options)
        directions = F.normalize(torch.randn(contexts, 1, _QUERIES, SIZE, **options), dim=-1)
        return _Batch(keys, values, queries=directions @ self.root.mT)

    def loss(self, matrix: Float64[Tensor, "d d"], batch: _Batch, shuffled: bool = False) -> Float64[Tensor, ""]:
        """Mean squared distance from the conditional mean. Noise in v adds a constant to it, and nothing to the minimum."""
        values = batch.values
        if shuffled:
            values = values[:, :, torch.randperm(self.length, generator=self.generator)]
        output = ops.attention(batch.queries @ matrix, batch.keys, values, scale=1.0).output
        return (output - batch.queries @ self.map.mT).square().sum(-1).mean()

    def train(self, steps: int, *, shuffled: bool = False) -> Float64[Tensor, "d d"]:
        """The score matrix that training finds."""
        matrix = torch.zeros(SIZE, SIZE, dtype=torch.float64, requires_grad=True)
        minimise(
            lambda: self.loss(matrix, self.batch(_CONTEXTS), shuffled),
            [matrix],
            steps=steps,
            step_size=0.05,
            averaged_share=0.25,
        )
        return matrix.detach()

    def risk(self, matrices: Float64[Tensor, "n d d"]) -> Float64[Tensor, " n"]:
        """The loss of each matrix, summed over 20 batches that are the same for all."""
        total = torch.zeros(len(matrices), dtype=torch.float64)
        for _ in range(20):
            batch = self.batch(_CONTEXTS)
            total += torch.stack([self.loss(matrix, batch) for matrix in matrices])
        return total


def _relative_distance(matrix: Tensor, reference: Tensor) -> float:
    return float((matrix - reference).norm() / reference.norm())
