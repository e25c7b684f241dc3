"""B19: which attention maps are gradients."""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from massieu.energy import HopfieldEnergy
from massieu.energy.fenchel_young import SparseAtoms
from massieu.energy.gradients import is_conservative, jacobian_asymmetry
from massieu.measures import Atoms
from massieu.papers.claims.claim import GRADIENT_BY_DIFFERENCES, Check, at_least, at_most, close
from massieu.papers.claims.inputs import check_at_least, normal_draws
from massieu.papers.claims.oracles import differences
from massieu.papers.claims.registry import claim
from massieu.papers.theory.rectified import LogSumReLU

_Map = Callable[[Tensor], Tensor]

_SCORE_FUNCTIONS: dict[str, _Map] = {
    "softplus": F.softplus,
    "sigmoid": torch.sigmoid,
    "1 + z²": lambda z: 1 + z.square(),
}
"""g of the weights g(zₙ)/Σ g(zₘ) that are no gradients."""
_ROUNDING = 1e-12
_CLEARLY_ASYMMETRIC = 1e4 * GRADIENT_BY_DIFFERENCES
"""Four orders beyond what differences make of a symmetric matrix."""
_NODES = 400
"""Of the trapezoidal rule on a circle, which converges geometrically for analytic maps."""


@claim(
    "B19",
    title="Which attention maps are gradients",
    statement="An attention Σ ρₙ(Kq)kₙ is a gradient in q for all keys if and only if Dρ is symmetric (d ≥ 2). That "
    "holds for elementwise ρ and for softmax, entmax and sparsemax, where each step lowers the energy ½‖q‖² − Ω* by "
    "at least ½‖q⁺ − q‖². Of weights g(zₙ)/Σ g(zₘ), only those with g = e^{cz + const} are gradients.",
    source="answer to Bal's question in §3.3; symmetry of the Jacobian off its diagonal",
    status="derived",
)
def gradient_maps(atoms: int = 12, dimensions: int = 4, draws: int = 20, seed: int = 0) -> Iterator[Check]:
    # On a line every function is a gradient, and one key is its own output.
    check_at_least(2, atoms=atoms, dimensions=dimensions)
    normal = normal_draws(seed)
    keys = normal(atoms, dimensions)
    query = normal(draws, dimensions) * dimensions**-0.5
    circle = _circle(query[0], torch.linalg.qr(normal(dimensions, 2))[0].T)
    yield from _gradients(keys, query, circle)
    for name, g in _SCORE_FUNCTIONS.items():
        yield from _ratio(name, g, keys, query, circle)
    yield from _descent(keys, 3 * query)
    yield from _shadow(keys, query)


def _gradients(keys: Tensor, query: Tensor, circle: tuple[Tensor, Tensor]) -> Iterator[Check]:
    """Where Dρ is symmetric, so is the Jacobian, and no work is done around a circle."""
    # exp(0.3 − z/2) weights are a softmax over the keys −k/2.
    scaled_keys = Atoms.create(-0.5 * keys, torch.full((len(keys),), 0.3, dtype=keys.dtype))
    maps: dict[str, _Map] = {
        "softmax": lambda q: torch.softmax(q @ keys.T, -1) @ keys,
        "exp(0.3 − z/2)": lambda q: scaled_keys.mean(q) / -0.5,
        "3/2-entmax": SparseAtoms.create(keys, 1.5).mean,
        "sparsemax": SparseAtoms.create(keys, 2).mean,
        "elementwise softplus": lambda q: F.softplus(q @ keys.T) @ keys,
        "elementwise 1 + z²": lambda q: (1 + (q @ keys.T).square()) @ keys,
    }
    for name, function in maps.items():
        yield at_most(f"{name}: ‖J − Jᵀ‖/‖J‖", jacobian_asymmetry(function, query), _ROUNDING)
        refuted = (~is_conservative(function, query)).sum()
        yield at_most(f"{name}: queries where the test of symmetry fails", refuted.double(), 0.0)
    weights = _sparsemax(query @ keys.T)
    yield close("sparsemax: the library's output and Kᵀρ(Kq) by sorting", maps["sparsemax"](query), weights @ keys)
    potential = torch.func.grad(lambda q: F.softplus(q @ keys.T).sum())(query)
    yield close("elementwise sigmoid: ∇ Σ F(zₙ) and Σ F′(zₙ) kₙ", potential, torch.sigmoid(query @ keys.T) @ keys)
    for name in ("softmax", "elementwise softplus"):
        work, total = _work(maps[name], circle)
        yield at_most(f"{name}: |∮ f·dq|/∮ |f·dq| on a circle", work.abs() / total, _ROUNDING)


def _sparsemax(scores: Tensor) -> Tensor:
    """The point of the simplex that is nearest to the scores."""
    ordered = scores.sort(-1, descending=True).values
    count = torch.arange(1, scores.shape[-1] + 1, dtype=scores.dtype)
    excess = ordered.cumsum(-1) - 1
    support = (count * ordered > excess).sum(-1, keepdim=True)
    return (scores - excess.gather(-1, support - 1) / support).clamp_min(0)


def _ratio(name: str, g: _Map, keys: Tensor, query: Tensor, circle: tuple[Tensor, Tensor]) -> Iterator[Check]:
    """Attention with the weights g(zₙ)/Σ g(zₘ) is no gradient, unless g is exponential."""

    def attend(query: Tensor) -> Tensor:
        weights = g(query @ keys.T)
        return weights @ keys / weights.sum(-1, keepdim=True)

    asymmetry = jacobian_asymmetry(attend, query)
    slope = differences(attend, query)
    expected = torch.linalg.matrix_norm(slope - slope.mT) / torch.linalg.matrix_norm(slope)
    yield close(f"{name}: ‖J − Jᵀ‖/‖J‖ and by differences", asymmetry, expected, GRADIENT_BY_DIFFERENCES)
    # J − Jᵀ = Kᵀ(Dρ − Dρᵀ)K, and (Dρ − Dρᵀ)ₙₘ = ρₙρₘ(ℓ′(zₙ) − ℓ′(zₘ)), ℓ = log g: zero for all z only if ℓ′ is constant.
    scores = query @ keys.T
    weights = g(scores) / g(scores).sum(-1, keepdim=True)
    growth = torch.func.grad(lambda z: g(z).log().sum())(scores)
    odd_part = weights.unsqueeze(-1) * weights.unsqueeze(-2) * (growth.unsqueeze(-1) - growth.unsqueeze(-2))
    closed_form = torch.linalg.matrix_norm(keys.T @ odd_part @ keys) / torch.linalg.matrix_norm(slope)
    yield close(f"{name}: ‖J − Jᵀ‖/‖J‖ and its closed form", asymmetry, closed_form, GRADIENT_BY_DIFFERENCES)
    detail = f"{asymmetry.median().item():.3f} for the median query"
    yield at_least(f"{name}: ‖J − Jᵀ‖/‖J‖", asymmetry.max(), _CLEARLY_ASYMMETRIC, detail)
    work, total = _work(attend, circle)
    yield at_least(f"{name}: |∮ f·dq|/∮ |f·dq| on a circle", work.abs() / total, 1e4 * _ROUNDING)


def _circle(centre: Tensor, plane: Tensor) -> tuple[Tensor, Tensor]:
    """Points of a unit circle about `centre`, and their velocities."""
    angle = torch.arange(_NODES, dtype=torch.float64) * (2 * math.pi / _NODES)
    place = torch.stack([angle.cos(), angle.sin()], -1)
    velocity = torch.stack([-angle.sin(), angle.cos()], -1)
    return centre + place @ plane, velocity @ plane


def _work(function: _Map, circle: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """∮ f·dq and ∮ |f·dq|, both over the length of the circle."""
    points, velocity = circle
    power = (function(points) * velocity).sum(-1)
    return power.mean(), power.abs().mean()


def _descent(keys: Tensor, query: Tensor) -> Iterator[Check]:
    """A step of softmax, entmax and sparsemax lowers ½‖q‖² − Ω* by at least ½‖q⁺ − q‖²."""
    for alpha in (1.0, 1.5, 2.0):
        hopfield = HopfieldEnergy.create(SparseAtoms.create(keys, alpha), scale=1.0)
        later = hopfield.step(query)
        drop = hopfield(query) - hopfield(later) - 0.5 * (later - query).square().sum(-1)
        energy_scale = 1 + hopfield(query).abs().max().item()
        yield at_least(f"α = {alpha:g}: E(q) − E(q⁺) − ½‖q⁺ − q‖²", drop, -_ROUNDING * energy_scale)


def _shadow(keys: Tensor, query: Tensor) -> Iterator[Check]:
    """Mean shift is along ∇ log Σ of the kernel's shadow: the Gaussian's own, Epanechnikov's for the flat kernel."""
    gaussian = Atoms.create(keys, -0.5 * keys.square().sum(-1)).mean(query) - query

    def log_density(q: Tensor) -> Tensor:
        return torch.logsumexp(-0.5 * (q.unsqueeze(-2) - keys).square().sum(-1), -1)

    slope = differences(log_density, query)
    yield close("Gaussian kernel: f(q) − q and ∇ log Σ of the same kernel", gaussian, slope, GRADIENT_BY_DIFFERENCES)
    squares = (query.unsqueeze(-2) - keys).square().sum(-1)
    # Half of the keys are inside the ball of every query.
    radius = squares.median(-1).values * (1 + 1e-6)
    energy = LogSumReLU.create(keys.expand(len(query), *keys.shape), scale=2 / radius)
    shift = energy.step(query) - query
    inside = energy.active(query).double().sum(-1, keepdim=True)
    total = torch.exp(-energy(query) * energy.scale).unsqueeze(-1)
    yield close(
        "flat kernel: n(f(q) − q)/Σ relu and −∇E of Epanechnikov's", inside * shift / total, energy.force(query)
    )
