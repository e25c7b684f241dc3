"""Does a head that learns to denoise have the score matrix that is best for Gaussian tokens? (E23, X1)"""

from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from massieu import ops
from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.training import minimise
from massieu.papers.theory import denoising_score

SIZE = 4
NOISE = 1.0
_LENGTH = 2048
_CONTEXTS = 4
_QUERIES = 64


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
    generator = torch.Generator().manual_seed(seed)
    task = _Task(generator, 256 if quick else _LENGTH)
    steps = 60 if quick else 1000
    noisy = task.train(steps, clean=False)
    clean = task.train(steps, clean=True)
    shuffled = task.train(steps, clean=False, shuffled=True)
    best_noisy = denoising_score(task.covariance, NOISE**2, clean_context=False)
    best_clean = denoising_score(task.covariance, NOISE**2, clean_context=True)
    noisy_excess = task.excess_risk(noisy, best_noisy, clean=False)
    clean_excess = task.excess_risk(clean, best_clean, clean=True)
    return {
        "noisy_error": _relative_distance(noisy, best_noisy),
        "clean_error": _relative_distance(clean, best_clean),
        "excess_risk": max(noisy_excess, clean_excess),
        "exchanged_error": _relative_distance(noisy, best_clean),
        "shuffled_error": _relative_distance(shuffled, best_noisy),
    }


class _Batch(NamedTuple):
    context: Float64[Tensor, "B 1 L d"]
    queries: Float64[Tensor, "B 1 Q d"]
    tokens: Float64[Tensor, "B 1 Q d"]
    """The tokens whose noisy copies the queries are."""


class _Task:
    """Tokens of one covariance, and a head's score matrix trained on them.

    Attributes:
        covariance: Σ.
        best: The matrix of the best denoiser, Σ(Σ + τ²)⁻¹.
    """

    def __init__(self, generator: torch.Generator, length: int) -> None:
        self.generator = generator
        self.length = length
        basis = torch.linalg.qr(self._normal(SIZE, SIZE)).Q
        self.root = basis * torch.logspace(-0.15, 0.15, SIZE, dtype=torch.float64)  # Σ = root rootᵀ
        self.covariance = self.root @ self.root.mT
        noisy_covariance = self.covariance + NOISE**2 * torch.eye(SIZE, dtype=torch.float64)
        self.best = torch.linalg.solve(noisy_covariance, self.covariance).mT

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def batch(self, contexts: int, *, clean: bool) -> _Batch:
        context = self._normal(contexts, 1, self.length, SIZE) @ self.root.mT
        tokens = self._normal(contexts, 1, _QUERIES, SIZE) @ self.root.mT
        if not clean:
            context = context + NOISE * self._normal(*context.shape)
        queries = tokens + NOISE * self._normal(*tokens.shape)
        return _Batch(context, queries, tokens)

    def train(self, steps: int, *, clean: bool, shuffled: bool = False) -> Float64[Tensor, "d d"]:
        """The score matrix that training finds."""
        matrix = torch.zeros(SIZE, SIZE, dtype=torch.float64, requires_grad=True)

        def loss() -> Tensor:
            batch = self.batch(_CONTEXTS, clean=clean)
            targets = batch.tokens.roll(1, 2) if shuffled else batch.tokens
            return (_denoise(matrix, batch) - targets).square().sum(-1).mean()

        minimise(loss, [matrix], steps=steps, step_size=0.03, averaged_share=0.5)
        return matrix.detach()

    def excess_risk(self, matrix: Float64[Tensor, "d d"], reference: Float64[Tensor, "d d"], clean: bool) -> float:
        """The matrix's risk above that of the reference, as a share of the latter, on the same contexts.

        A risk is the squared distance from the best denoiser's output, and the posterior variance, which no head is below.
        """
        posterior_variance = float((self.covariance - self.best @ self.covariance).trace())
        distances = torch.zeros(2, dtype=torch.float64)
        for _ in range(20):
            batch = self.batch(_CONTEXTS, clean=clean)
            best_output = batch.queries @ self.best.mT
            outputs = [_denoise(matrix, batch), _denoise(reference, batch)]
            distances += torch.stack([(output - best_output).square().sum(-1).mean() for output in outputs])
        risk, reference_risk = (distances / 20 + posterior_variance).tolist()
        return risk / reference_risk - 1


def _denoise(matrix: Tensor, batch: _Batch) -> Tensor:
    return ops.attention(batch.queries @ matrix, batch.context, batch.context, scale=1.0).output


def _relative_distance(matrix: Tensor, reference: Tensor) -> float:
    return float((matrix - reference).norm() / reference.norm())
