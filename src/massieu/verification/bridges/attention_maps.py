"""X3, X3b: which attention maps are gradients, and what the energy of attention without softmax is."""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from massieu.measures import Atoms
from massieu.verification.claim import CLOSED_FORM, GRADIENT_BY_DIFFERENCES, Check, at_least, at_most, close
from massieu.verification.inputs import Normal, need, normal_draws
from massieu.verification.oracles import differences
from massieu.verification.registry import claim

Scalar = Callable[[Tensor], Tensor]

_RATIOS: dict[str, Scalar] = {"softplus": F.softplus, "sigmoid": torch.sigmoid, "1 + z²": lambda z: 1 + z.square()}
"""Positive g other than exponentials, normalised to g(zₙ)/Σ g(zₘ)."""

_POTENTIALS: dict[str, tuple[Scalar, Scalar]] = {
    "sigmoid": (torch.sigmoid, F.softplus),
    "1 + z²": (lambda z: 1 + z.square(), lambda z: z + z**3 / 3),
}
"""Elementwise ρ and the F it is the derivative of."""

_CLEARLY_ASYMMETRIC = 1e4 * GRADIENT_BY_DIFFERENCES
"""Four orders beyond what differences make of a symmetric matrix."""

_ROUNDING = 1e-12


# --- X3 --------------------------------------------------------------------------------------------------------------


@claim(
    "X3",
    title="Which normalised attentions are conservative",
    statement="Among attentions with weights g(zₙ)/Σ g(zₘ), zₙ = kₙ·q and values kₙ, for positive differentiable g and "
    "d ≥ 2, exactly those with g = e^{cz + const} are gradients in q for all keys; unnormalised elementwise weights and "
    "weights ∇Ω*(Kq) always give gradients.",
    source="answer to Bal's question in §3.3; symmetry of the Jacobian off its diagonal",
    status="derived",
)
def conservative_attention(atoms: int = 12, dimensions: int = 4, draws: int = 20, seed: int = 0) -> Iterator[Check]:
    # On a line every function is a gradient, and one key is its own output.
    need(2, atoms=atoms, dimensions=dimensions)
    normal = normal_draws(seed)
    # Scores of size 1: saturated weights have next to no Jacobian.
    keys, query = normal(atoms, dimensions), normal(draws, dimensions) * dimensions**-0.5
    constant = torch.full((atoms,), 0.3).double()
    for name, rate in {"exp(z + 0.3)": 1.0, "exp(0.3 − z/2)": -0.5}.items():
        measure = Atoms.create(rate * keys, constant)
        slope = differences(lambda q, h=measure, c=rate: h.mean(q) / c, query)
        yield at_most(f"{name}: relative asymmetry of the Jacobian", _asymmetry(slope), GRADIENT_BY_DIFFERENCES)
    for name, ratio in _RATIOS.items():
        yield from _normalised(name, ratio, keys, query)
    for name, (weight, integral) in _POTENTIALS.items():
        potential = _gradient(lambda q, f=integral: f(q @ keys.T).sum(-1), query)
        yield close(f"unnormalised {name}: ∇ Σ F(zₙ) and Σ F′(zₙ) kₙ", potential, weight(query @ keys.T) @ keys)
    yield from _fenchel_young(keys, query)
    yield from _mean_shift(keys, query)


def _asymmetry(jacobian: Float[Tensor, "draws d d"]) -> Float[Tensor, "draws"]:
    """‖J − Jᵀ‖/‖J‖."""
    return torch.linalg.matrix_norm(jacobian - jacobian.mT) / torch.linalg.matrix_norm(jacobian)


def _gradient(function: Scalar, point: Tensor) -> Tensor:
    return torch.func.grad(lambda x: function(x).sum())(point)


def _normalised(name: str, g: Scalar, keys: Tensor, query: Tensor) -> Iterator[Check]:
    """J − Jᵀ = Kᵀ(Dρ − Dρᵀ)K, and (Dρ − Dρᵀ)ₙₘ = ρₙρₘ(ℓ′(zₙ) − ℓ′(zₘ)), ℓ = log g: zero for all z only if ℓ′ is constant."""

    def attend(query: Tensor) -> Tensor:
        weights = g(query @ keys.T)
        return weights @ keys / weights.sum(-1, keepdim=True)

    slope = differences(attend, query)
    scores = query @ keys.T
    weights = g(scores) / g(scores).sum(-1, keepdim=True)
    growth = _gradient(lambda z: g(z).log(), scores)
    apart = weights.unsqueeze(-1) * weights.unsqueeze(-2) * (growth.unsqueeze(-1) - growth.unsqueeze(-2))
    asymmetry = _asymmetry(slope)
    detail = f"{asymmetry.median().item():.3f} for the median query"
    yield close(f"{name}: J − Jᵀ and its closed form", slope - slope.mT, keys.T @ apart @ keys, GRADIENT_BY_DIFFERENCES)
    yield at_least(f"{name}: relative asymmetry of the Jacobian", asymmetry.max(), _CLEARLY_ASYMMETRIC, detail)


def _fenchel_young(keys: Tensor, query: Tensor) -> Iterator[Check]:
    """ρ = ∇Ω*: q⁺ = Kᵀρ(Kq) lowers ½‖q‖² − Ω*(Kq) by at least ½‖q⁺ − q‖²."""
    maps: dict[str, tuple[Scalar, Scalar]] = {
        "softmax": (lambda q: torch.softmax(q @ keys.T, -1) @ keys, Atoms.create(keys).log_partition),
        "sparsemax": (lambda q: _sparsemax(q @ keys.T) @ keys, lambda q: _sparsemax_conjugate(q @ keys.T)),
    }
    for name, (attend, conjugate) in maps.items():
        output = attend(query)
        yield close(f"{name}: ∇ Ω*(Kq) and Kᵀρ(Kq)", _gradient(conjugate, query), output)
        energy, later = (0.5 * q.square().sum(-1) - conjugate(q) for q in (query, output))
        drop = energy - later - 0.5 * (output - query).square().sum(-1)
        unit = 1 + energy.abs().max().item()
        yield at_least(f"{name}: E(q) − E(q⁺) − ½‖q⁺ − q‖², E = ½‖q‖² − Ω*", drop, -_ROUNDING * unit)


def _sparsemax(scores: Tensor) -> Tensor:
    """The point of the simplex that is nearest to the scores."""
    ordered = scores.sort(-1, descending=True).values
    count = torch.arange(1, scores.shape[-1] + 1, dtype=scores.dtype)
    excess = ordered.cumsum(-1) - 1
    kept = (count * ordered > excess).sum(-1, keepdim=True)
    return (scores - excess.gather(-1, kept - 1) / kept).clamp_min(0)


def _sparsemax_conjugate(scores: Tensor) -> Tensor:
    """max over the simplex of p·z − ½‖p‖²."""
    weights = _sparsemax(scores)
    return (weights * scores - 0.5 * weights.square()).sum(-1)


def _mean_shift(keys: Tensor, query: Tensor) -> Iterator[Check]:
    """f(q) − q for weights by a kernel of ‖q − k‖ is along ∇ log Σ of the kernel's shadow."""

    def distances(query: Tensor) -> Tensor:
        return (query.unsqueeze(-2) - keys).square().sum(-1)

    shift = Atoms.create(keys, -0.5 * keys.square().sum(-1)).mean(query) - query
    shadow = _gradient(lambda q: torch.logsumexp(-0.5 * distances(q), -1), query)
    yield close("Gaussian kernel: f(q) − q and ∇ log Σ of the same kernel", shift, shadow)

    # Half of the keys are inside the ball of every query.
    radius = distances(query).median(-1, keepdim=True).values * (1 + 1e-6)
    inside = (distances(query) < radius).double()
    shift = inside @ keys / inside.sum(-1, keepdim=True) - query
    shadow = _gradient(lambda q: F.relu(1 - distances(q) / radius).sum(-1), query)
    scale = 2 * inside.sum(-1, keepdim=True) / radius
    yield close("flat kernel: (2n/r²)(f(q) − q) and ∇ Σ of Epanechnikov's", scale * shift, shadow)


# --- X3b -------------------------------------------------------------------------------------------------------------


@claim(
    "X3b",
    title="Normalised attention, its energy",
    statement="Attention by normalised logits, Σₙ (g(zₙ − z̄)/σ + b) kₙ, is the gradient of gNσ(q) + bN z̄(q), σ the "
    "standard deviation of the logits; its weights sum to bN, and for b = 0 iterating it finds the keys' first "
    "principal axis.",
    source="Bal §3.1, where the method of Richter and Wattenhofer is cited; its energy is derived",
    status="derived",
)
def normalised_attention(
    atoms: int = 12, dimensions: int = 4, draws: int = 20, g: float = 0.7, b: float = 0.2, seed: int = 0
) -> Iterator[Check]:
    need(2, dimensions=dimensions)
    # Fewer keys have no covariance of full rank.
    need(dimensions + 1, atoms=atoms)
    normal = normal_draws(seed)
    keys, query = normal(atoms, dimensions), normal(draws, dimensions)
    measure = Atoms.create(keys)
    origin = torch.zeros_like(query)

    def potential(query: Tensor) -> Tensor:
        mean, variance = measure.cumulants(origin, query, 2).unbind(-1)
        # The measure's mass is the number of keys; its cumulants are those of the uniform law.
        return atoms * (g * variance.sqrt() + b * mean)

    output = _weights(keys, query, g, b) @ keys
    unit = 1 + abs(g) * atoms + abs(b) * atoms
    by_differences = differences(potential, query)
    yield close("differences of gNσ + bN z̄ and the output", by_differences, output, unit * GRADIENT_BY_DIFFERENCES)
    yield close("∇(gNσ + bN z̄) and the output", _gradient(potential, query), output)
    yield close("sum of the weights and bN", _weights(keys, query, g, b).sum(-1), b * atoms)

    covariance = (keys - keys.mean(0)).T @ (keys - keys.mean(0)) / atoms
    yield close("∇²A(0) and the keys' biased covariance Σ̂", measure.fisher(origin[0]), covariance)
    update = _update(measure, query)
    yield close("g = 1/N, b = 0: output and Σ̂q/√(qᵀΣ̂q)", _weights(keys, query, 1 / atoms, 0.0) @ keys, update)
    # zₙ − z̄ ≤ σ√(N − 1) (Samuelson), so weights that sum to one put the output outside the hull for gN > √(N − 1).
    scores = query @ keys.T
    affine = ((_weights(keys, query, 1.0, 1 / atoms) @ keys) * query).sum(-1)
    beyond = (affine - scores.amax(-1)) / scores.std(-1, correction=0)
    least = atoms - math.sqrt(atoms - 1)
    yield at_least("g = 1, b = 1/N: (output·q − max zₙ)/σ", beyond, least - _ROUNDING * atoms)
    yield from _principal_axes(normal, atoms, query)


def _weights(keys: Tensor, query: Tensor, g: float, b: float) -> Tensor:
    """g(zₙ − z̄)/σ + b."""
    scores = query @ keys.T
    centred = scores - scores.mean(-1, keepdim=True)
    return g * centred / centred.square().mean(-1, keepdim=True).sqrt() + b


def _update(measure: Atoms, query: Tensor) -> Tensor:
    product = measure.fisher_vp(torch.zeros_like(query), query)
    return product / (query * product).sum(-1, keepdim=True).sqrt()


def _principal_axes(normal: Normal, atoms: int, query: Tensor) -> Iterator[Check]:
    """For q ← cΣ̂q/√(qᵀΣ̂q), the first eigenvalue of Σ̂ four times the second or more."""
    dimensions, c = query.shape[-1], 1.5
    sample = normal(atoms, dimensions)
    white = torch.linalg.qr(sample - sample.mean(0))[0] * math.sqrt(atoms)
    axes = torch.linalg.qr(normal(dimensions, dimensions))[0]
    deviation = torch.cat([torch.ones(1), torch.linspace(0.5, 0.25, dimensions - 1)]).double()
    measure = Atoms.create(white * deviation @ axes.T)

    fixed = c * deviation.unsqueeze(-1) * axes.T
    yield close("principal axes of length c√λ are fixed points", c * _update(measure, fixed), fixed)
    state = query
    # Each step shrinks the other axes' share to a quarter: 4^−60 < 1e-36.
    for _ in range(60):
        state = c * _update(measure, state)
    sign = torch.sign(state @ axes[:, :1])
    yield close("iterated 60 times: q and ± the first axis of length c√λ₁", state, sign * fixed[0])

    def energy(query: Tensor) -> Tensor:
        variance = measure.cumulants(torch.zeros_like(query), query, 2)[..., 1]
        return 0.5 * query.square().sum(-1) - c * variance.sqrt()

    least = -0.5 * c**2 * deviation[0].square()
    yield close("½‖q‖² − cσ at the first axis and −½c²λ₁", energy(fixed[0]), least, CLOSED_FORM)
    yield at_least("½‖q‖² − cσ + ½c²λ₁ elsewhere", energy(query) - least, -_ROUNDING)
