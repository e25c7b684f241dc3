"""S11: the score matrix and the precision of the hidden states."""

from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.measures import Gaussian
from massieu.papers.claims.claim import SHIM, Check, as_published, at_most, close, near_in_standard_errors
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.registry import claim
from massieu.papers.theory import equilibrium, key_law
from massieu.population import precision_alignment

_NULL_DRAWS = 99


@claim(
    "S11",
    title="The hypothesis W_QᵀW_K ≈ Σ⁻¹",
    statement="If hidden states are natural parameters, the score matrix is the covariance of the keys; if they are "
    "means, it is the inverse of their own covariance. At the Gaussian equilibrium both are M = Cov(hidden)⁻¹, a "
    "form that depends on no convention. A head of rank d_h can show it only on its own subspace.",
    source=f"{SHIM}, §3.2 and §6; the two readings and their common form are derived",
    status="quoted",
    published="W_qᵀW_k ≈ Σ⁻¹, the key of a hidden state h being Σ⁻¹h (§3.2, which does not define Σ). With Σ = Cov(h) that is "
    "true; with the Σ of Theorem 1, whose hidden states have the covariance Σ⁻¹, it is not.",
    standing="ambiguous",
    corrected="In both readings M = Cov(h)⁻¹ is right: under Theorem 1 the key is Σh, and M = Σ is the inverse of Σ⁻¹.",
)
def score_matrix_and_precision(
    dimensions: int = 8, rank: int = 3, heads: int = 60, tokens: int = 400, seed: int = 0
) -> Iterator[Check]:
    # In one dimension, and on one direction, all matrices are proportional.
    check_at_least(2, dimensions=dimensions, rank=rank, heads=heads)
    check_at_least(2 * dimensions, tokens=tokens)
    normal = normal_draws(seed)
    sigma = _covariance(normal, dimensions)
    precision = torch.linalg.inv(sigma)
    hidden = equilibrium(normal(dimensions), sigma)
    keys = key_law(hidden, sigma)
    yield close("natural parameters: M = Σ and the covariance of the keys' law", sigma, keys.covariance)
    # Two readings, each with its score matrix M and its Cov(hidden).
    readings = {
        "natural parameters N(Σ⁻¹μ, Σ⁻¹), M = Σ": (sigma, hidden.covariance),
        "means N(μ, Σ), M = Σ⁻¹": (precision, sigma),
    }
    for name, (score, covariance) in readings.items():
        alignment = precision_alignment(score, covariance, draws=_NULL_DRAWS, generator=_generator(seed))
        yield close(f"{name}: cosine of M and Cov(hidden)⁻¹", alignment.cosine, 1.0)
        # No rotation reaches a cosine of 1, and the p-value of a test with n draws is never below 1/(1 + n).
        least_share = 1 / (1 + _NULL_DRAWS)
        yield close(f"{name}: p-value and 1/{1 + _NULL_DRAWS}", alignment.share, least_share)
        alignment = precision_alignment(score, covariance, power=1, draws=1, generator=_generator(seed))
        yield at_most(f"{name}: cosine of M and Cov(hidden)", alignment.cosine, 1 - 1e-3)
    # The published M = Σ⁻¹ is right for Cov(h) = Σ: the equilibrium of Σ⁻¹ in place of Σ, with keys Σ⁻¹h.
    inverse_hidden = equilibrium(normal(dimensions), precision)
    inverse_keys = key_law(inverse_hidden, precision)
    yield close("Σ = Cov(h): covariance of the keys Σ⁻¹h and Σ⁻¹", inverse_keys.covariance, precision)
    alignment = precision_alignment(precision, inverse_hidden.covariance, draws=1, generator=_generator(seed))
    yield close("Σ = Cov(h), M = Σ⁻¹: cosine of M and Cov(hidden)⁻¹", alignment.cosine, 1.0)
    alignment = precision_alignment(precision, hidden.covariance, draws=1, generator=_generator(seed))
    yield as_published(close("Σ of Theorem 1, M = Σ⁻¹: cosine of M and Cov(hidden)⁻¹", alignment.cosine, 1.0))

    yield from _of_low_rank(normal, precision, sigma, min(rank, dimensions))
    yield from _of_random_heads(normal, sigma, min(rank, dimensions), heads)
    yield from _of_a_sample(normal, sigma, hidden, tokens)


def _covariance(normal: Normal, dimensions: int) -> Tensor:
    """A covariance with eigenvalues from e^−1 to e and random eigenvectors."""
    vectors, _ = torch.linalg.qr(normal(dimensions, dimensions))
    eigenvalues = torch.linspace(-1, 1, dimensions, dtype=torch.float64).exp()
    return (vectors * eigenvalues) @ vectors.T


def _generator(seed: int) -> torch.Generator:
    """The generator of the null's random frames."""
    # With the stream of the claim itself, the covariance's eigenvectors would be among the frames.
    return torch.Generator().manual_seed(seed + 1_000_003)


def _of_low_rank(normal: Normal, precision: Tensor, sigma: Tensor, rank: int) -> Iterator[Check]:
    """A head that sees `rank` directions is the restriction of the precision to them."""
    frame, _ = torch.linalg.qr(normal(len(sigma), rank))
    restriction = frame.T @ precision @ frame
    score = frame @ restriction @ frame.T
    alignment = precision_alignment(score, sigma, draws=1, generator=_generator(0))
    yield close("planted head: rank", alignment.rank, float(rank))
    yield close("planted head: cosine on its span", alignment.cosine, 1.0)
    cosine = (score * precision).sum() / (score.norm() * precision.norm())
    relative_norm = restriction.norm() / precision.norm()
    yield close("planted head: cosine on the whole space and ‖restriction‖/‖C⁻¹‖", cosine, relative_norm)
    matrix = normal(len(sigma), len(sigma))
    antisymmetric = frame @ frame.T @ (matrix - matrix.T) @ frame @ frame.T
    with_antisymmetric = precision_alignment(score + antisymmetric, sigma, draws=1)
    yield close("planted head with an antisymmetric part: cosine", with_antisymmetric.cosine, alignment.cosine)


def _of_random_heads(normal: Normal, sigma: Tensor, rank: int, heads: int) -> Iterator[Check]:
    """W_Q, W_K of independent entries do not depend on C: their p-values are uniform on 1/(1 + draws), …, 1."""
    generator = _generator(1)
    p_values = []
    for _ in range(heads):
        score = normal(rank, len(sigma)).T @ normal(rank, len(sigma))
        p_values.append(precision_alignment(score, sigma, draws=_NULL_DRAWS, generator=generator).share)
    levels = _NULL_DRAWS + 1
    # Mean and variance of a uniform law on that many levels.
    expected = (levels + 1) / (2 * levels)
    error = ((levels**2 - 1) / 12 / levels**2 / heads) ** 0.5
    mean = torch.tensor(p_values, dtype=torch.float64).mean()
    yield near_in_standard_errors("random heads: mean p-value", mean, expected, error)


def _of_a_sample(normal: Normal, sigma: Tensor, hidden: Gaussian, tokens: int) -> Iterator[Check]:
    """C estimated from tokens: E Ĉ⁻¹ of `tokens` Gaussian ones is C⁻¹(1 + O(d/tokens)), with relative spread √(2d/tokens)."""
    root = torch.linalg.cholesky(hidden.covariance)
    sample = normal(tokens, len(sigma)) @ root.T
    estimate = torch.cov(sample.T, correction=0)
    alignment = precision_alignment(sigma, estimate, draws=1, generator=_generator(0))
    # The sine of the angle is at most the relative error ‖Ĉ⁻¹ − C⁻¹‖/‖C⁻¹‖ in Frobenius's norm.
    sine = (1 - alignment.cosine**2) ** 0.5
    relative_error = (torch.linalg.inv(estimate) - sigma).norm() / sigma.norm()
    yield at_most(f"{tokens} tokens: sine of the angle by the relative error of Ĉ⁻¹", sine / relative_error, 1.0)
