"""Does a trained head learn the precision of its keys? (E23, X1, X2)"""

import torch
from jaxtyping import Float64
from torch import Tensor

from massieu import ops
from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.training import minimise, slope
from massieu.papers.theory import GaussianTokens

SIZE = 4
_LENGTH, _CONTEXTS, _QUERIES, _NOISE = 1024, 8, 64, 0.5


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
    drawn = torch.Generator().manual_seed(seed)
    task = _Task(drawn, 256 if quick else _LENGTH)
    steps = 100 if quick else 1500
    learned = task.trained(steps, shuffled=False)
    shuffled = task.trained(steps, shuffled=True)
    exact = task.precision
    scale = task.best_scale()
    along = torch.linalg.eigh(task.covariance)
    ours = ((along.eigenvectors.mT @ learned) * along.eigenvectors.mT).sum(1)
    fitted = slope(along.eigenvalues.log(), ours.clamp_min(1e-12).log())
    risks = task.risk(torch.stack([learned, scale * exact]))
    return {
        "relative_error": _distance(learned, exact),
        "scaled_error": _distance(learned, scale * exact),
        "slope": fitted,
        "scale": scale,
        "excess_risk": float(risks[0] / risks[1] - 1),
        "shuffled_error": _distance(shuffled, exact),
        "antisymmetric_share": float(((learned - learned.mT) / 2).norm() / learned.norm()),
    }


class _Task:
    """Tokens of one covariance, and what is trained on them."""

    def __init__(self, drawn: torch.Generator, length: int) -> None:
        self.drawn, self.length = drawn, length
        basis = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=drawn, dtype=torch.float64)).Q
        self.root = basis * torch.logspace(-0.25, 0.25, SIZE, dtype=torch.float64)  # Σ = root rootᵀ
        self.covariance = self.root @ self.root.mT
        self.precision = torch.linalg.inv(self.covariance)
        # Values are whitened keys, turned, and noise: then no direction is worth more than another, and the best matrix of
        # any length is a multiple of the precision. With another map, the directions that it shrinks are hardly learned.
        turn = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=drawn, dtype=torch.float64)).Q
        self.map = turn @ torch.linalg.inv(self.root)
        zero, noise = torch.zeros(SIZE, dtype=torch.float64), _NOISE**2 * torch.eye(SIZE, dtype=torch.float64)
        moved = self.map @ self.covariance
        self.law = GaussianTokens.create(zero, zero, self.covariance, moved, moved @ self.map.mT + noise)

    def best_scale(self) -> float:
        """The s in [0, 1] of least risk by X2; here it is the same for every query of whitened norm 1."""
        return float(self.law.optimal_share(self.root[:, 0], float(self.length)))

    def drawn_batch(self, contexts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and queries."""
        options = {"generator": self.drawn, "dtype": torch.float64}
        keys = torch.randn(contexts, 1, self.length, SIZE, **options) @ self.root.mT
        values = keys @ self.map.mT + _NOISE * torch.randn(contexts, 1, self.length, SIZE, **options)
        sphere = torch.nn.functional.normalize(torch.randn(contexts, 1, _QUERIES, SIZE, **options), dim=-1)
        return keys, values, sphere @ self.root.mT

    def missed(self, matrix: Float64[Tensor, "d d"], batch: tuple[Tensor, Tensor, Tensor], shuffled: bool) -> Tensor:
        """Mean squared distance from the conditional mean. Noise in v adds a constant to it, and nothing to the minimum."""
        keys, values, queries = batch
        if shuffled:
            values = values[:, :, torch.randperm(self.length, generator=self.drawn)]
        output = ops.attention(queries @ matrix, keys, values, scale=1.0).output
        return (output - queries @ self.map.mT).square().sum(-1).mean()

    def trained(self, steps: int, *, shuffled: bool) -> Float64[Tensor, "d d"]:
        matrix = torch.zeros(SIZE, SIZE, dtype=torch.float64, requires_grad=True)
        loss = lambda: self.missed(matrix, self.drawn_batch(_CONTEXTS), shuffled)  # noqa: E731
        minimise(loss, [matrix], steps=steps, step_size=0.05, averaged=0.25)
        return matrix.detach()

    def risk(self, matrices: Float64[Tensor, "n d d"]) -> Float64[Tensor, " n"]:
        """On the same contexts for each matrix."""
        total = torch.zeros(len(matrices), dtype=torch.float64)
        for _ in range(20):
            batch = self.drawn_batch(_CONTEXTS)
            total += torch.stack([self.missed(matrix, batch, False) for matrix in matrices])
        return total


def _distance(matrix: Tensor, wanted: Tensor) -> float:
    return float((matrix - wanted).norm() / wanted.norm())
