"""B16: vector spins that all move at once, to first and second order in their couplings."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.energy import KineticSpins
from massieu.papers.claims.claim import Check, as_published, at_least, at_most, close
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.oracles import quadrature, spin_states
from massieu.papers.claims.registry import claim
from massieu.papers.theory import KineticIsing

_HALVINGS = 3
_MODELS = 8


@claim(
    "B16",
    title="Kinetic vector spins",
    statement="Spins of radius R, R² = D/2 − 1, in the field θ have the mean βθ/(1 + γ), γ² = 1 + β²‖θ‖²/R², up to "
    "O(1/D), and slopes of at most β/2. The mean fields θᵢ = xᵢ + ΣJᵢⱼmⱼ therefore contract if (β/2)maxᵢ Σ|Jᵢⱼ| < "
    "1. The second order adds half of (φ′)⁻¹φ″[ΣJᵢⱼ²Covⱼ + vᵢvᵢᵀ], with γⱼ at t − 1 in the covariance of spin j; "
    "the error of a step then falls as J³.",
    source="reconstructed from Bal, Spin-Model Transformers (2023), and its code; bounds by Amos (1974), orders derived",
    status="reconstructed",
    published="The sum over j of the second order contains γᵢ of time t − 1.",
    standing="ambiguous",
    corrected="It contains γⱼ of time t − 1: the sum is of covariances of the spins j.",
)
def kinetic_spins(
    spins: int = 6, components: int = 8, scale: float = 1.3, draws: int = 200, seed: int = 0
) -> Iterator[Check]:
    check_at_least(3, spins=spins, components=components)
    check_at_least(1e-2, scale=scale)
    normal = normal_draws(seed)
    yield from _normalisers()
    model = KineticSpins.create(normal(spins, components), 0.3 * normal(spins, spins), scale=scale)
    yield from _means(model, 1.5 * normal(spins, components))
    yield from _contraction(normal, draws, spins, components)
    yield from _second_order(model, 1.5 * normal(spins, components))
    yield from _index()
    yield from _binary(normal, spins)
    yield from _vectors(scale)
    yield from _entropy_production(model, 1.5 * normal(spins, components))


def _alone(length: float, size: int, exact: bool = False, scale: float = 1.0) -> tuple[KineticSpins, Tensor]:
    """One spin, in a field of this length."""
    field = torch.zeros(1, size, dtype=torch.float64)
    field[0, 0] = length
    return KineticSpins.create(field, torch.zeros(1, 1, dtype=torch.float64), scale=scale, exact=exact), field


def _axis(size: int, pull: float) -> tuple[Tensor, Tensor]:
    """Mean and variance of the cosine of a direction in R^D tilted by e^{pull·cos}, by quadrature."""
    points, log_weight = quadrature(-1.0, 1.0)
    p = torch.softmax((size - 3) / 2 * torch.log1p(-points.square()) + pull * points + log_weight, 0)
    mean = (p * points).sum()
    return mean, (p * (points - mean).square()).sum()


def _normalisers() -> Iterator[Check]:
    for size in (8, 64, 512):
        radius = math.sqrt(size / 2 - 1)
        pull = 1.3 * radius**2
        cosine, _ = _axis(size, pull)
        found = []
        for exact in (True, False):
            model, field = _alone(1.3 * radius, size, exact)
            found.append(model.mean(field)[0, 0] / radius)
        yield close(f"D = {size}: exact mean/R and by quadrature", found[0], cosine)
        # Amos (1974): the ratio of the Bessel functions, of order ν = R², lies between these.
        order = size / 2 - 1
        low = pull / (order + 0.5 + math.hypot(order + 1.5, pull))
        high = pull / (order + math.hypot(order, pull))
        detail = f"{found[1].item():.4f} against {found[0].item():.4f}"
        yield at_most(
            f"D = {size}: |mean/R for many components − exact|", (found[1] - found[0]).abs(), high - low, detail
        )


def _means(model: KineticSpins, state: Tensor) -> Iterator[Check]:
    beta, radius = model.scale, model.radius
    mean = model.mean(state)
    squared = mean.square().sum(-1, keepdim=True)
    yield close("inverse: 2R²m/(β(R² − ‖m‖²)) and θ", 2 * radius**2 * mean / (beta * (radius**2 - squared)), state)
    yield close("the same by the model", model.state(mean), state)
    gamma = (1 + beta**2 * state.square().sum(-1) / radius**2).sqrt()
    jacobian = torch.func.jacrev(model.mean)(state)
    own = torch.stack([jacobian[i, :, i] for i in range(len(state))])
    eigenvalues = torch.linalg.eigvalsh(own)
    across = (beta / (1 + gamma)).unsqueeze(-1).expand(-1, state.shape[-1] - 1)
    wanted = torch.cat([(beta / (gamma * (1 + gamma))).unsqueeze(-1), across], -1)
    yield close("eigenvalues of dm/dθ and β/(1 + γ), β/(γ(1 + γ))", eigenvalues, wanted)
    yield close("dm/dθ and β Cov", own, beta * model.covariance(state))
    yield at_most("largest eigenvalue of dm/dθ over β/2", eigenvalues / (beta / 2), 1.0)


def _contraction(normal: Normal, draws: int, spins: int, components: int) -> Iterator[Check]:
    scale = normal(draws).exp()
    coupling = normal(draws, spins, spins) / spins
    for exact in (True, False):
        model = KineticSpins.create(normal(draws, spins, components), coupling, scale=scale, exact=exact)
        first = normal(draws, spins, components)
        second = first + normal(draws, 1, 1).exp() * normal(draws, spins, components)
        moved, given = (
            (a - b).norm(dim=-1).amax(-1) for a, b in ((model.step(first), model.step(second)), (first, second))
        )
        bound = 0.5 * scale * coupling.abs().sum(-1).amax(-1)
        name = "exact" if exact else "many components"
        yield at_most(f"{name}: ‖Δθ′‖/‖Δθ‖ by (β/2)maxᵢ Σ|Jᵢⱼ|", moved / given / bound, 1.0)
    attention = torch.softmax(normal(spins, spins), -1)
    model = KineticSpins.create(normal(spins, components), attention, scale=1.9)
    found = model.stationary()
    yield close(
        "softmax couplings, β = 1.9: a step from the fixed point, and it", model.step(found.value), found.value, 1e-8
    )


def _formula(model: KineticSpins, state: Tensor, before: Tensor, own_gamma: bool) -> Tensor:
    """θ by the sums of the second order as they are written; `own_gamma`: with γᵢ in the sum over j."""
    beta, radius = model.scale, model.radius

    def gamma(theta: Tensor) -> Tensor:
        return (1 + beta**2 * theta.square().sum(-1) / radius**2).sqrt()

    past, field = model.mean(before), model.drive + model.coupling @ model.mean(before)
    rows = []
    for i in range(len(state)):
        m, v, g = model.mean(state)[i], field[i] - state[i], gamma(state)[i]
        first, second, third = (m @ v).square(), v @ v, (v @ m) * v
        for j, weight in enumerate(model.coupling[i].square()):
            g_j = gamma(before)[i if own_gamma else j]
            inner = m @ past[j]
            first = first + weight * (m @ m / (1 + g_j) - inner.square() / (radius**2 * g_j))
            second = second + weight * (radius**2 - past[j] @ past[j])
            third = third + weight * (m / (1 + g_j) - inner * past[j] / (radius**2 * g_j))
        change = beta**2 / radius**4 * (1 + 3 * g) / g**3 * first * m
        change = change - beta**2 / radius**2 / (g**2 + g) * (second * m + 2 * third)
        along = (m @ change) / (radius**2 * g / (1 + g) - m @ m)
        rows.append(field[i] + (1 + g) / (2 * beta) * (change + along * m))
    return torch.stack(rows)


def _second_order(model: KineticSpins, before: Tensor) -> Iterator[Check]:
    state = model.step(before, "second")
    # The equation is solved to 1e-10 of θ.
    yield close("θ of second order and its sums with γⱼ", state, _formula(model, state, before, False), 1e-8)
    yield as_published(
        close("θ of second order and its sums with γᵢ", state, _formula(model, state, before, True), 1e-8)
    )


def _index() -> Iterator[Check]:
    """Cov_j·m_i for γ_j = 4.1 and γ_i = 1.1, of many components and exact: relative error O(1/D)."""
    size = 200
    radius = math.sqrt(size / 2 - 1)
    length = radius * math.sqrt(4.1**2 - 1)
    model, field = _alone(length, size)
    cosine, variance = _axis(size, radius * length)
    # In the plane of m_j and m_i, at half a right angle; across the axis the variance is what is left.
    across = radius**2 * (1 - cosine.square() - variance) / (size - 1)
    exact = torch.stack([radius**2 * variance, across])
    mean = model.mean(field)[0].norm()
    for gamma, published in ((4.1, False), (1.1, True)):
        found = torch.stack(
            [1 / (1 + torch.tensor(gamma)) - mean**2 / (radius**2 * gamma), 1 / (1 + torch.tensor(gamma))]
        )
        error = (found - exact).norm() / exact.norm()
        check = at_most(f"D = {size}, γ = {gamma}: relative error of Cov_j·m_i", error, 1 / size)
        yield as_published(check) if published else check


def _binary(normal: Normal, spins: int) -> Iterator[Check]:
    """One step from independent spins against all their states, for couplings halved again and again."""
    states = spin_states(spins)
    # Of several models: in one the leading order may happen to be small beside the next.
    models = [(0.5 * normal(spins), normal(spins, spins) / math.sqrt(spins)) for _ in range(_MODELS)]
    errors: dict[str, list[Tensor]] = {"first": [], "second": []}
    for halvings in range(_HALVINGS):
        apart: dict[str, list[Tensor]] = {"first": [], "second": []}
        for drive, drawn in models:
            weight = (0.5 * (1 + states * torch.tanh(drive))).prod(-1)
            coupling = 0.05 / 2**halvings * drawn
            wanted = weight @ torch.tanh(drive + states @ coupling.T)
            model = KineticIsing.create(drive, coupling)
            apart["first"].append(model.mean(model.step(drive)) - wanted)
            apart["second"].append(model.mean(model.step(drive, "second")) - wanted)
        for order, differences in apart.items():
            errors[order].append(torch.cat(differences).norm())
    yield from _orders("binary spins", errors)


def _vectors(scale: float) -> Iterator[Check]:
    """The same for a vector in the field of another, parallel to its own: one integral, exact means."""
    size, drive, before = 6, 0.9, 1.7
    radius = math.sqrt(size / 2 - 1)
    points, log_weight = quadrature(-1.0, 1.0, 40)
    p = torch.softmax((size - 3) / 2 * torch.log1p(-points.square()) + scale * radius * before * points + log_weight, 0)
    errors: dict[str, list[Tensor]] = {"first": [], "second": []}
    for halvings in range(_HALVINGS):
        strength = 0.05 / 2**halvings
        fields = torch.zeros(len(points), size, dtype=torch.float64)
        fields[:, 0] = drive + strength * radius * points
        fields[:, 1] = strength * radius * (1 - points.square()).sqrt()
        bare = torch.zeros(len(points), len(points), dtype=torch.float64)
        wanted = p @ KineticSpins.create(fields, bare, scale=scale, exact=True).mean(fields)[:, 0]
        start = torch.zeros(2, size, dtype=torch.float64)
        start[0, 0], start[1, 0] = drive, before
        coupling = torch.tensor([[0.0, strength], [0.0, 0.0]], dtype=torch.float64)
        model = KineticSpins.create(start, coupling, scale=scale, exact=True)
        errors["first"].append((model.mean(model.step(start))[0, 0] - wanted).abs())
        errors["second"].append((model.mean(model.step(start, "second"))[0, 0] - wanted).abs())
    yield from _orders("vectors", errors)


def _orders(name: str, errors: dict[str, list[Tensor]]) -> Iterator[Check]:
    for order, power in (("first", 2), ("second", 3)):
        found = torch.stack(errors[order])
        slope = (found[:-1] / found[1:]).log2()
        detail = "errors " + ", ".join(f"{error:.2g}" for error in found.tolist())
        # The next order is half as large at half of the coupling.
        yield at_least(f"{name}, {order} order: power of J in a step's error", slope.min(), power - 0.3, detail)
        if order == "first":
            yield at_most(f"{name}, first order: the same, at most", slope.max(), power + 0.3, detail)


def _entropy_production(model: KineticSpins, state: Tensor) -> Iterator[Check]:
    covariance = model.covariance(state)
    asymmetry = (model.coupling - model.coupling.T).square()
    wanted = 0.5 * model.scale**2 * torch.einsum("ij,iab,jba->", asymmetry, covariance, covariance)
    found = model.entropy_production(state)
    yield close("entropy production and (β²/2)Σ(Jᵢⱼ − Jⱼᵢ)² Tr CovᵢCovⱼ", found, wanted)
    # J less half of its asymmetry: what is produced is a quadratic form in Jᵢⱼ − Jⱼᵢ, so that a quarter is left.
    half = KineticSpins.create(model.drive, 0.75 * model.coupling + 0.25 * model.coupling.T, scale=model.scale)
    yield close("the same with half of the asymmetry, four times", 4 * half.entropy_production(state), found)
    even = KineticSpins.create(model.drive, model.coupling + model.coupling.T, scale=model.scale)
    yield at_most("of symmetric couplings", even.entropy_production(state).abs(), 0.0)
