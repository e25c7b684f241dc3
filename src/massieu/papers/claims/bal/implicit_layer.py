"""B12: attention iterated to its fixed point."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from massieu.errors import ConvergenceError
from massieu.papers.claims.claim import BAL, CLOSED_FORM, Check, all_raise, at_most, close
from massieu.papers.claims.inputs import check_at_least, normal_draws
from massieu.papers.claims.registry import claim
from massieu.solve import (
    Anderson,
    Auto,
    ConjugateGradients,
    Implicit,
    Method,
    Newton,
    Picard,
    fixed_point,
    spectral_radius,
)

_AUTO = Auto()

_ITERATIONS = 500
"""Of what is differentiated step by step."""
_EXACT = 1e-13
"""Tolerance of fixed points, relative and absolute."""


@dataclass(frozen=True)
class _Layer:
    """z ↦ (1 − α)q + αXᵀsoftmax(βXz); bare attention where α = 1."""

    alpha: float
    beta: float

    def __call__(self, z: Tensor, query: Tensor, keys: Tensor) -> Tensor:
        return (1 - self.alpha) * query + self.alpha * torch.softmax(self.beta * z @ keys.mT, -1) @ keys

    def energy(self, z: Tensor, query: Tensor, keys: Tensor) -> Tensor:
        """(1 − α)‖z − q‖²/2 + α(‖z‖²/2 − lse_β(Xz))."""
        hopfield = z.square().sum(-1) / 2 - (self.beta * z @ keys.mT).logsumexp(-1) / self.beta
        return (1 - self.alpha) * (z - query).square().sum(-1) / 2 + self.alpha * hopfield

    def iterate(self, query: Tensor, keys: Tensor) -> Tensor:
        """From the query, by plain steps that autograd sees."""
        z = query
        for _ in range(_ITERATIONS):
            z = self(z, query, keys)
        return z

    def solve(self, query: Tensor, keys: Tensor, method: Method = _AUTO) -> Tensor:
        """From the query, by the implicit function theorem."""
        return fixed_point(
            self,
            query.detach(),
            (query, keys),
            method=method,
            adjoint=Implicit(ConjugateGradients()),
            rtol=_EXACT,
            atol=_EXACT,
        ).value


@claim(
    "B12",
    title="Attention as an implicit layer",
    statement="Attention pulled to its query, F(z) = (1 − α)q + αXᵀsoftmax(βXz), has the critical points of (1 − "
    "α)‖z − q‖²/2 + αE(z) as fixed points and contracts if αβD²/4 < 1. Its derivatives are (I − J)⁻¹∂F with J = αβ "
    "Cov_p(X). Where the spectral radius of J is ≥ 1, the fixed point is a saddle. Without the pull, the fixed "
    "point does not depend on the query.",
    source=f"{BAL}, §3.3",
    status="quoted",
    corrected="The paper sees attention as a layer that solves for a fixed point, and proposes differentiable "
    "solvers for richer dynamics. The fixed point of the bare step does not change with the query from which the "
    "solver starts, so that no gradient reaches the query: it has to be injected.",
)
def implicit_layer(n: int = 12, d: int = 5, queries: int = 8, alpha: float = 0.7, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, n=n, queries=queries)
    check_at_least(1, d=d)
    normal = normal_draws(seed)
    keys = normal(n, d)
    query = normal(queries, d)
    diameter = torch.cdist(keys, keys).max().item()
    lipschitz = 0.9
    layer = _Layer(alpha, lipschitz * 4 / (alpha * diameter**2))
    yield from _fixed_points(layer, query, keys, lipschitz)
    yield from _derivatives(layer, query, keys)
    yield from _without_injection(_Layer(1.0, alpha * layer.beta), query, keys)
    yield from _saddles(normal(d))


def _fixed_points(layer: _Layer, query: Tensor, keys: Tensor, lipschitz: float) -> Iterator[Check]:
    """Fixed points are critical points of the energy, which every solver finds from every start where αβD²/4 < 1."""
    value = layer.solve(query, keys)
    slope = torch.func.grad(lambda z: layer.energy(z, query, keys).sum())(value)
    yield close("∇E_q at the fixed point", slope, torch.zeros_like(slope))
    methods: dict[str, Method] = {
        "plain iteration": Picard(),
        "damped by ½": Picard(damping=0.5),
        "Anderson's acceleration": Anderson(),
        "Newton's method": Newton(),
    }
    for name, method in methods.items():
        yield close(f"{name} and the fixed point", layer.solve(query, keys, method), value)
    from_far = fixed_point(layer, 100 * query, (query, keys), rtol=_EXACT, atol=_EXACT).value
    yield close("from another start, αβD²/4 < 1", from_far, value)

    # The energy falls where the map is no contraction, too.
    cold = _Layer(layer.alpha, 100 * layer.beta)
    points = [query]
    for _ in range(20):
        points.append(cold(points[-1], query, keys))
    energies = torch.stack([cold.energy(z, query, keys) for z in points])
    yield at_most("rise of E_q in a step, β a hundredfold", energies.diff(dim=0), CLOSED_FORM)

    # Banach's bound of the distance to the fixed point, from the last move.
    before = query
    distance_per_move = lipschitz / (1 - lipschitz)
    largest_ratio = torch.zeros(())
    for _ in range(10):
        after = layer(before, query, keys)
        bound = distance_per_move * (after - before).norm(dim=-1)
        ratio = (after - value).norm(dim=-1).div(bound).amax()
        largest_ratio = torch.maximum(largest_ratio, ratio)
        before = after
    yield at_most("‖z* − z_t‖ by L/(1 − L)·‖z_t − z_{t−1}‖, L = αβD²/4", largest_ratio, 1.0)


def _derivatives(layer: _Layer, query: Tensor, keys: Tensor) -> Iterator[Check]:
    """Derivatives are (I − J)⁻¹∂F with J = αβ Cov: the same as through many iterations."""

    def loss(solve: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda query, keys: solve(query, keys).sin().sum()

    query_slope, keys_slope = torch.func.grad(loss(layer.solve), (0, 1))(query, keys)
    unrolled_query, unrolled_keys = torch.func.grad(loss(layer.iterate), (0, 1))(query, keys)
    yield close(f"derivative in the query, and through {_ITERATIONS} iterations", query_slope, unrolled_query)
    yield close(f"derivative in the keys, and through {_ITERATIONS} iterations", keys_slope, unrolled_keys)

    value = layer.solve(query, keys)
    weights = torch.softmax(layer.beta * value @ keys.mT, -1)
    centred = keys - (weights @ keys).unsqueeze(-2)
    jacobian = layer.alpha * layer.beta * centred.mT @ (weights.unsqueeze(-1) * centred)
    eye = torch.eye(query.shape[-1], dtype=query.dtype)
    closed_form = (1 - layer.alpha) * torch.linalg.solve(eye - jacobian, value.cos().unsqueeze(-1)).squeeze(-1)
    yield close("derivative in the query, and (1 − α)(I − αβ Cov)⁻¹g", query_slope, closed_form)
    radius = spectral_radius(layer, value, (query, keys))
    # By differences of F, of relative error √eps.
    largest = torch.linalg.eigvalsh(jacobian)[..., -1]
    yield close("spectral radius of ∂F/∂z, and of αβ Cov", radius, largest, 1e-6)

    direction = torch.ones_like(query)

    def directional_slope(solve: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda q: (torch.func.grad(loss(solve))(q, keys) * direction).sum()

    implicit = torch.func.grad(directional_slope(layer.solve))(query)
    unrolled = torch.func.grad(directional_slope(layer.iterate))(query)
    yield close(f"second derivative, and through {_ITERATIONS} iterations", implicit, unrolled)


def _without_injection(bare: _Layer, query: Tensor, keys: Tensor) -> Iterator[Check]:
    """Without the pull the fixed point does not depend on the query: no gradient reaches it."""
    implicit = torch.func.grad(lambda q: bare.solve(q, keys).sin().sum())(query)
    unrolled = torch.func.grad(lambda q: bare.iterate(q, keys).sin().sum())(query)
    yield at_most("α = 1: implicit derivative in the query", implicit.abs(), 0.0)
    yield at_most(f"α = 1: the same through {_ITERATIONS} iterations", unrolled.abs(), CLOSED_FORM)


def _saddles(key: Tensor) -> Iterator[Check]:
    """A spectral radius ≥ 1 is a saddle. Midway between two keys ±x the covariance is xxᵀ, and the radius β‖x‖²."""
    keys = torch.stack([key, -key])
    middle = torch.zeros_like(key)
    for strength in (0.5, 2.0):
        bare = _Layer(1.0, strength / key.square().sum().item())
        radius = spectral_radius(bare, middle, (middle, keys))
        yield close(f"midway between two keys, β‖x‖² = {strength}: spectral radius", radius, strength, 1e-6)
    yield all_raise(
        "implicit derivatives at a saddle",
        ConvergenceError,
        lambda: bare.solve(middle, keys.clone().requires_grad_()),
        lambda: bare.solve(middle, keys, Newton()),
    )
