"""N8: attention whose weights are doubly stochastic."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.energy import is_conservative
from massieu.ops import attention
from massieu.papers.claims.claim import QUADRATURE, Check, at_least, at_most, close
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.registry import claim
from massieu.population import DoublyStochasticLayer, doubly_stochastic_attention, sinkhorn

_TEMPERATURES = (0.02, 0.01, 0.005)


@claim(
    "N8",
    title="Doubly stochastic attention",
    statement="Doubly stochastic attention, P_ij = e^{βx_i·x_j + f_i + g_j} with row and column sums 1, keeps the "
    "mean of the tokens. With queries, keys and values tied it is half the gradient of −(Σf + Σg)/β in all tokens "
    "at once. For tokens of density ρ, β(Px − x) → ½∇log ρ as β → ∞, so that x ← x − (Px − x) is a step ½β⁻¹ of the "
    "heat equation. Softmax attention has none of these three properties.",
    source="Sander, Ablin, Blondel, Peyré, Sinkformers, arXiv 2110.11773; S19; constants are derived",
    status="quoted",
)
def doubly_stochastic(tokens: int = 40, dimensions: int = 3, nodes: int = 601, seed: int = 0) -> Iterator[Check]:
    check_at_least(4, tokens=tokens)
    check_at_least(2, dimensions=dimensions)
    check_at_least(401, nodes=nodes)
    normal = normal_draws(seed)
    yield from _mean_is_kept(normal, tokens, dimensions)
    yield from _joint_gradient(normal, dimensions)
    yield from _gaussian_population(nodes)
    yield from _heat_limit(nodes)


def _mean_is_kept(normal: Normal, tokens: int, dimensions: int) -> Iterator[Check]:
    """Rows and columns of P sum to one, so that Px keeps the mean of the tokens; softmax attention does not."""
    points = normal(tokens, dimensions) + 2
    query = normal(dimensions, dimensions)
    key = normal(dimensions, dimensions)
    scale = 0.3 / dimensions
    queries = (points @ query.T)[None, None]
    keys = (points @ key.T)[None, None]
    potentials = sinkhorn(queries, keys, scale=scale)
    scores = scale * queries @ keys.mT
    weights = (scores + potentials.query_potential.unsqueeze(-1) + potentials.key_potential.unsqueeze(-2)).exp()[0, 0]
    yield close("row sums of P and 1", weights.sum(-1), 1.0)
    yield close("column sums of P and 1", weights.sum(-2), 1.0)
    after = DoublyStochasticLayer.create(query_weight=query, key_weight=key, scale=scale)(points)
    yield close("P x by the layer and by its matrix", after, weights @ points)
    yield close("mean of P x and mean of x", after.mean(0), points.mean(0))
    softmax = attention(queries, keys, points[None, None], scale=scale).output[0, 0]
    drift = (softmax.mean(0) - points.mean(0)).norm()
    yield at_least("softmax attention: mean of the output less mean of x", drift, 1e-3)


def _joint_gradient(normal: Normal, dimensions: int, tokens: int = 6, scale: float = 1.5) -> Iterator[Check]:
    """Px is half the gradient of −(Σf + Σg)/β in all tokens at once.

    By the envelope theorem, as that is the largest Σ P_ij x_i·x_j + entropy/β over doubly stochastic P.
    """
    points = normal(tokens, dimensions)

    def objective(flat: Tensor) -> Tensor:
        heads = flat.reshape(1, 1, tokens, dimensions)
        potentials = sinkhorn(heads, heads, scale=scale)
        return -(potentials.query_potential.sum() + potentials.key_potential.sum()) / scale

    def attended(flat: Tensor) -> Tensor:
        heads = flat.reshape(1, 1, tokens, dimensions)
        return doubly_stochastic_attention(heads, heads, heads, scale=scale).output.flatten()

    def softmax(flat: Tensor) -> Tensor:
        heads = flat.reshape(1, 1, tokens, dimensions)
        return attention(heads, heads, heads, scale=scale).output.flatten()

    flat = points.flatten()
    slope = torch.autograd.grad(objective(flat.requires_grad_()), flat)[0]
    flat = flat.detach()
    yield close("½ ∂[−(Σf + Σg)/β]/∂x and P x", slope / 2, attended(flat), 1e-9)
    is_symmetric = is_conservative(attended, flat, tolerance=QUADRATURE)
    yield at_least("P x has a symmetric Jacobian", is_symmetric.double(), 1.0)
    softmax_is_symmetric = is_conservative(softmax, flat, tolerance=1e-2)
    yield at_most("softmax attention has one, to 1 in 100", softmax_is_symmetric.double(), 0.0)


def _attend_to_density(grid: Tensor, log_density: Tensor, scale: float) -> Tensor:
    """P x for a population of that density, by the trapezoidal rule."""
    heads = grid[None, None, :, None]
    return doubly_stochastic_attention(heads, heads, heads, log_weight=log_density, scale=scale).output[0, 0, :, 0]


def _gaussian_population(nodes: int, spread: float = 1.3) -> Iterator[Check]:
    """N(0, s²): the plan is Gaussian with covariance c, c² + c/β = s⁴; softmax attention moves x to βs²x."""
    grid = torch.linspace(-9, 9, nodes, dtype=torch.float64) * spread
    log_density = -grid.square() / (2 * spread**2)
    inner = grid.abs() < 3 * spread
    for scale in (0.5, 2.0):
        covariance = (math.sqrt(scale**-2 + 4 * spread**4) - 1 / scale) / 2
        output = _attend_to_density(grid, log_density, scale)[inner]
        expected = covariance / spread**2 * grid[inner]
        yield close(f"tokens N(0, s²), β = {scale}: P x and cx/s²", output, expected, QUADRATURE)
    heads = grid[None, None, :, None]
    softmax = attention(heads, heads, heads, log_weight=log_density, scale=0.5).output[0, 0, :, 0][inner]
    yield close("the same, β = 0.5: softmax attention and βs²x", softmax, 0.5 * spread**2 * grid[inner], QUADRATURE)


def _heat_limit(nodes: int) -> Iterator[Check]:
    """β(Px − x) → ½∇log ρ as β → ∞, for a mixture of two Gaussians of variance one.

    P is the semigroup of L = ½(Δ + ∇log ρ·∇) at time ε = 1/β, to second order in ε.
    """
    grid = torch.linspace(-7, 7, nodes, dtype=torch.float64)
    centres = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    shares = torch.tensor([0.4, 0.6], dtype=torch.float64)
    log_joint = shares.log() - (grid.unsqueeze(-1) - centres).square() / 2
    log_density = torch.logsumexp(log_joint, -1)
    # ∇log ρ and its two derivatives are moments of the centres given x.
    weights = torch.softmax(log_joint, -1)
    mean = weights @ centres
    deviation = centres - mean.unsqueeze(-1)
    score = mean - grid
    slope = (weights * deviation**2).sum(-1) - 1
    curvature = (weights * deviation**3).sum(-1)
    # ½L²x, where Lx is half the score.
    second_term = (curvature + score * slope) / 8
    inner = grid.abs() < 3
    first_errors = []
    second_errors = []
    for temperature in _TEMPERATURES:
        velocity = (_attend_to_density(grid, log_density, 1 / temperature) - grid) / temperature
        first_errors.append((velocity - score / 2)[inner].abs().max())
        second_errors.append((velocity - score / 2 - temperature * second_term)[inner].abs().max())
    # The next term's share of an error falls with β⁻¹. (For Gaussian ρ the third order is nought as well.)
    for coarse, fine, temperature in zip(first_errors, first_errors[1:], _TEMPERATURES, strict=False):
        name = f"β(Px − x) and ½∇log ρ, β = {2 / temperature:g}: order in β⁻¹"
        yield close(name, (coarse / fine).log2(), 1.0, 8 * temperature)
    for coarse, fine, temperature in zip(second_errors, second_errors[1:], _TEMPERATURES, strict=False):
        name = f"the same with the term ½β⁻¹L²x, β = {2 / temperature:g}: order in β⁻¹"
        yield at_least(name, (coarse / fine).log2(), 2.0 - 8 * temperature)
