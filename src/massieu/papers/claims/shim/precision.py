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
    readings = {
        "natural parameters N(Σ⁻¹μ, Σ⁻¹), M = Σ": (sigma, hidden.covariance),
        "means N(μ, Σ), M = Σ⁻¹": (precision, sigma),
    }
    for name, (score, covariance) in readings.items():
        found = precision_alignment(score, covariance, draws=_NULL_DRAWS, generator=_generator(seed))
        yield close(f"{name}: cosine of M and Cov(hidden)⁻¹", found.cosine, 1.0)
        wrong = precision_alignment(score, covariance, power=1, draws=1, generator=_generator(seed))
        yield at_most(f"{name}: cosine of M and Cov(hidden)", wrong.cosine, 1 - 1e-3)
    # Cov(h) = Σ: the equilibrium whose own Σ is this one's inverse, with keys Σ⁻¹h.
    own = equilibrium(normal(dimensions), precision)
    linear = key_law(own, precision)
    yield close("Σ = Cov(h): covariance of the keys Σ⁻¹h and Σ⁻¹", linear.covariance, precision)
    found = precision_alignment(precision, own.covariance, draws=1, generator=_generator(seed))
    yield close("Σ = Cov(h), M = Σ⁻¹: cosine of M and Cov(hidden)⁻¹", found.cosine, 1.0)
    mixed = precision_alignment(precision, hidden.covariance, draws=1, generator=_generator(seed))
    yield as_published(close("Σ of Theorem 1, M = Σ⁻¹: cosine of M and Cov(hidden)⁻¹", mixed.cosine, 1.0))

    yield from _of_low_rank(normal, precision, sigma, min(rank, dimensions))
    yield from _of_random_heads(normal, sigma, min(rank, dimensions), heads)
    yield from _of_a_sample(normal, sigma, hidden, tokens)


def _covariance(normal: Normal, dimensions: int) -> Tensor:
    """With eigenvalues from e^−1 to e."""
    vectors, _ = torch.linalg.qr(normal(dimensions, dimensions))
    return (vectors * torch.linspace(-1, 1, dimensions, dtype=torch.float64).exp()) @ vectors.T


def _generator(seed: int) -> torch.Generator:
    # Another stream than that of the covariance, whose eigenvectors would be among the null's frames.
    return torch.Generator().manual_seed(seed + 1_000_003)


def _of_low_rank(normal: Normal, precision: Tensor, sigma: Tensor, rank: int) -> Iterator[Check]:
    """A head that sees `rank` directions is the restriction of the precision to them."""
    frame, _ = torch.linalg.qr(normal(len(sigma), rank))
    planted = frame @ (frame.T @ precision @ frame) @ frame.T
    found = precision_alignment(planted, sigma, draws=1, generator=_generator(0))
    yield close("planted head: rank", found.rank, float(rank))
    yield close("planted head: cosine on its span", found.cosine, 1.0)
    whole = (planted * precision).sum() / (planted.norm() * precision.norm())
    restricted = (frame.T @ precision @ frame).norm() / precision.norm()
    yield close("planted head: cosine on the whole space and ‖restriction‖/‖C⁻¹‖", whole, restricted)
    odd = normal(len(sigma), len(sigma))
    with_odd = precision_alignment(planted + frame @ frame.T @ (odd - odd.T) @ frame @ frame.T, sigma, draws=1)
    yield close("planted head with an antisymmetric part: cosine", with_odd.cosine, found.cosine)


def _of_random_heads(normal: Normal, sigma: Tensor, rank: int, heads: int) -> Iterator[Check]:
    """W_Q, W_K of independent entries know nothing of C: their p-values are uniform on 1/(1 + draws), …, 1."""
    generator = _generator(1)
    shares = []
    for _ in range(heads):
        score = normal(rank, len(sigma)).T @ normal(rank, len(sigma))
        shares.append(precision_alignment(score, sigma, draws=_NULL_DRAWS, generator=generator).share)
    levels = _NULL_DRAWS + 1
    spread = ((levels**2 - 1) / 12 / levels**2 / heads) ** 0.5
    mean = torch.tensor(shares, dtype=torch.float64).mean()
    yield near_in_standard_errors("random heads: mean p-value", mean, (levels + 1) / (2 * levels), spread)


def _of_a_sample(normal: Normal, sigma: Tensor, hidden: Gaussian, tokens: int) -> Iterator[Check]:
    """C estimated from tokens: E Ĉ⁻¹ of `tokens` Gaussian ones is C⁻¹(1 + O(d/tokens)), with relative spread √(2d/tokens)."""
    root = torch.linalg.cholesky(hidden.covariance)
    drawn = normal(tokens, len(sigma)) @ root.T
    estimated = torch.cov(drawn.T, correction=0)
    found = precision_alignment(sigma, estimated, draws=1, generator=_generator(0))
    # The sine of the angle is at most the relative error ‖Ĉ⁻¹ − C⁻¹‖/‖C⁻¹‖ in Frobenius's norm.
    error = (torch.linalg.inv(estimated) - sigma).norm() / sigma.norm()
    yield at_most(
        f"{tokens} tokens: sine of the angle by the relative error of Ĉ⁻¹", (1 - found.cosine**2) ** 0.5 / error, 1.0
    )
