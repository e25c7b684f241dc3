"""Does a head that learns to denoise have the score matrix that is best for Gaussian tokens? (E23, X1)"""

import torch
from jaxtyping import Float64
from torch import Tensor

from massieu import ops
from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.training import minimise
from massieu.papers.theory import denoising_score

SIZE, NOISE = 4, 1.0
_LENGTH, _CONTEXTS, _QUERIES = 2048, 4, 64
_Batch = tuple[Tensor, Tensor, Tensor]


@experiment(
    "denoiser",
    question="Does a head that is trained to denoise Gaussian tokens learn the score matrix of the best denoiser?",
    claims="E23, X1",
    minutes=5,
    criteria=[
        Criterion("noisy_error", "‖M − M*‖/‖M*‖ with noisy contexts, M* = (Σ + τ²)⁻¹Σ(Σ + τ²)⁻¹", most=0.10),
        Criterion("clean_error", "‖M − M*‖/‖M*‖ with clean contexts, M* = (Σ + τ²)⁻¹", most=0.10),
        Criterion(
            "excess_risk", "relative excess of the risk over that of M*, the larger one", most=0.01, role="optimisation"
        ),
        Criterion(
            "exchanged_error", "noisy contexts: distance of M from the M* of clean ones", most=0.10, role="control"
        ),
        Criterion(
            "shuffled_error", "‖M − M*‖/‖M*‖ of a head trained on other queries' targets", most=0.10, role="control"
        ),
    ],
)
def denoiser(seed: int, quick: bool) -> Numbers:
    """Tokens are Gaussian in 4 dimensions, with a random covariance Σ. A query is a token plus noise of standard deviation τ =
    1, and the head predicts the token without noise. The keys and values are 2,048 other tokens, with noise of their own or
    without. The head's score matrix M (4×4) is trained from 0 on the squared error. The best denoiser is linear, and
    attention over infinitely many tokens equals it for one matrix M* (X1), which depends on whether the keys are noisy.
    """
    drawn = torch.Generator().manual_seed(seed)
    task = _Task(drawn, 256 if quick else _LENGTH)
    steps = 60 if quick else 1000
    noisy, clean, shuffled = (
        task.trained(steps, clean=clean, shuffled=shuffled)
        for clean, shuffled in ((False, False), (True, False), (False, True))
    )
    best = {clean: denoising_score(task.covariance, NOISE**2, clean_context=clean) for clean in (False, True)}
    excess = [task.excess(matrix, best[clean], clean) for matrix, clean in ((noisy, False), (clean, True))]
    return {
        "noisy_error": _distance(noisy, best[False]),
        "clean_error": _distance(clean, best[True]),
        "excess_risk": max(excess),
        "exchanged_error": _distance(noisy, best[True]),
        "shuffled_error": _distance(shuffled, best[False]),
    }


class _Task:
    """Tokens of one covariance, and what is trained on them."""

    def __init__(self, drawn: torch.Generator, length: int) -> None:
        self.drawn, self.length = drawn, length
        basis = torch.linalg.qr(self._normal(SIZE, SIZE)).Q
        self.root = basis * torch.logspace(-0.15, 0.15, SIZE, dtype=torch.float64)  # Σ = root rootᵀ
        self.covariance = self.root @ self.root.mT
        noisy = self.covariance + NOISE**2 * torch.eye(SIZE, dtype=torch.float64)
        self.best = torch.linalg.solve(noisy, self.covariance).mT  # Σ(Σ + τ²)⁻¹

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.drawn, dtype=torch.float64)

    def batch(self, contexts: int, *, clean: bool) -> _Batch:
        """The context, queries, and the tokens that the queries are of."""
        context = self._normal(contexts, 1, self.length, SIZE) @ self.root.mT
        tokens = self._normal(contexts, 1, _QUERIES, SIZE) @ self.root.mT
        context = context if clean else context + NOISE * self._normal(*context.shape)
        return context, tokens + NOISE * self._normal(*tokens.shape), tokens

    def trained(self, steps: int, *, clean: bool, shuffled: bool) -> Float64[Tensor, "d d"]:
        matrix = torch.zeros(SIZE, SIZE, dtype=torch.float64, requires_grad=True)

        def loss() -> Tensor:
            context, queries, tokens = self.batch(_CONTEXTS, clean=clean)
            targets = tokens.roll(1, 2) if shuffled else tokens
            return (_denoised(matrix, context, queries) - targets).square().sum(-1).mean()

        minimise(loss, [matrix], steps=steps, step_size=0.03, averaged=0.5)
        return matrix.detach()

    def excess(self, matrix: Float64[Tensor, "d d"], best: Float64[Tensor, "d d"], clean: bool) -> float:
        """Of the risk over that of another matrix, as a share of it, on the same contexts.

        A risk is the squared distance from the best denoiser's output, and the posterior variance, which no head is below.
        """
        variance = float((self.covariance - self.best @ self.covariance).trace())
        risks = torch.zeros(2, dtype=torch.float64)
        for _ in range(20):
            context, queries, _ = self.batch(_CONTEXTS, clean=clean)
            outputs = [_denoised(m, context, queries) for m in (matrix, best)]
            risks += torch.stack([(found - queries @ self.best.mT).square().sum(-1).mean() for found in outputs])
        found, wanted = (risks / 20 + variance).tolist()
        return found / wanted - 1


def _denoised(matrix: Tensor, context: Tensor, queries: Tensor) -> Tensor:
    return ops.attention(queries @ matrix, context, context, scale=1.0).output


def _distance(matrix: Tensor, wanted: Tensor) -> float:
    return float((matrix - wanted).norm() / wanted.norm())
