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
"""How many couplings are tried, each half of the one before."""

_MODELS = 8
"""Binary models whose errors are measured together."""


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


def _single_spin(field_length: float, size: int, exact: bool = False) -> tuple[KineticSpins, Tensor]:
    """One spin of `size` components without couplings, β = 1, and its field, which lies along the first axis."""
    field = torch.zeros(1, size, dtype=torch.float64)
    field[0, 0] = field_length
    no_coupling = torch.zeros(1, 1, dtype=torch.float64)
    return KineticSpins.create(field, no_coupling, scale=1.0, exact=exact), field


def _cosine_moments(size: int, pull: float) -> tuple[Tensor, Tensor]:
    """Mean and variance of the cosine of a direction in R^D tilted by e^{pull·cos}, by quadrature."""
    points, log_weight = quadrature(-1.0, 1.0)
    # A uniform direction in R^D has a cosine of density ∝ (1 − c²)^((D − 3)/2).
    p = torch.softmax((size - 3) / 2 * torch.log1p(-points.square()) + pull * points + log_weight, 0)
    mean = (p * points).sum()
    return mean, (p * (points - mean).square()).sum()


def _normalisers() -> Iterator[Check]:
    """The mean of one spin: exactly R·A_D(βR‖θ‖), and βθ/(1 + γ) for many components."""
    for size in (8, 64, 512):
        radius = math.sqrt(size / 2 - 1)
        pull = 1.3 * radius**2
        cosine, _ = _cosine_moments(size, pull)
        exact_model, field = _single_spin(1.3 * radius, size, exact=True)
        exact_mean = exact_model.mean(field)[0, 0] / radius
        asymptotic_model, field = _single_spin(1.3 * radius, size)
        asymptotic_mean = asymptotic_model.mean(field)[0, 0] / radius
        yield close(f"D = {size}: exact mean/R and by quadrature", exact_mean, cosine)
        # Amos (1974): the ratio of the Bessel functions, of order ν = R², lies between these.
        order = size / 2 - 1
        low = pull / (order + 0.5 + math.hypot(order + 1.5, pull))
        high = pull / (order + math.hypot(order, pull))
        error = (asymptotic_mean - exact_mean).abs()
        detail = f"{asymptotic_mean.item():.4f} against {exact_mean.item():.4f}"
        yield at_most(f"D = {size}: |mean/R for many components − exact|", error, high - low, detail)


def _means(model: KineticSpins, state: Tensor) -> Iterator[Check]:
    """The inverse of φ, and dφ/dθ = β Cov, whose eigenvalues are at most β/2."""
    beta = model.scale
    radius = model.radius
    mean = model.mean(state)
    squared = mean.square().sum(-1, keepdim=True)
    yield close("inverse: 2R²m/(β(R² − ‖m‖²)) and θ", 2 * radius**2 * mean / (beta * (radius**2 - squared)), state)
    yield close("the same by the model", model.state(mean), state)
    gamma = (1 + beta**2 * state.square().sum(-1) / radius**2).sqrt()
    jacobian = torch.func.jacrev(model.mean)(state)
    # The mean of a spin depends on its own field alone: the diagonal blocks are all there is, (spins, D, D).
    blocks = torch.stack([jacobian[i, :, i] for i in range(len(state))])
    eigenvalues = torch.linalg.eigvalsh(blocks)
    along = (beta / (gamma * (1 + gamma))).unsqueeze(-1)
    across = (beta / (1 + gamma)).unsqueeze(-1).expand(-1, state.shape[-1] - 1)
    # γ ≥ 1: the eigenvalue along the field is the smallest, and comes first.
    formula = torch.cat([along, across], -1)
    yield close("eigenvalues of dm/dθ and β/(1 + γ), β/(γ(1 + γ))", eigenvalues, formula)
    yield close("dm/dθ and β Cov", blocks, beta * model.covariance(state))
    yield at_most("largest eigenvalue of dm/dθ over β/2", eigenvalues / (beta / 2), 1.0)


def _distance(first: Tensor, second: Tensor) -> Tensor:
    """The largest distance of a spin's fields."""
    return (first - second).norm(dim=-1).amax(-1)


def _contraction(normal: Normal, draws: int, spins: int, components: int) -> Iterator[Check]:
    """A step of first order changes the distance of two states by at most (β/2)maxᵢ Σ|Jᵢⱼ|."""
    scale = normal(draws).exp()
    coupling = normal(draws, spins, spins) / spins
    for exact in (True, False):
        model = KineticSpins.create(normal(draws, spins, components), coupling, scale=scale, exact=exact)
        first = normal(draws, spins, components)
        second = first + normal(draws, 1, 1).exp() * normal(draws, spins, components)
        distance_after = _distance(model.step(first), model.step(second))
        distance_before = _distance(first, second)
        bound = 0.5 * scale * coupling.abs().sum(-1).amax(-1)
        name = "exact" if exact else "many components"
        yield at_most(f"{name}: ‖Δθ′‖/‖Δθ‖ by (β/2)maxᵢ Σ|Jᵢⱼ|", distance_after / distance_before / bound, 1.0)
    # Many components attain it where all spins have the same small field: its slope is β/(1 + γ), and γ → 1.
    together = torch.full((spins, spins), 1 / spins, dtype=torch.float64)
    no_field = torch.zeros(spins, components, dtype=torch.float64)
    model = KineticSpins.create(no_field, together, scale=scale[0], exact=False)
    size = 1e-4 / scale[0]
    small = no_field + size
    change = _distance(model.step(small), model.step(-small)) / (2 * size * math.sqrt(components))
    name = "equal spins in small fields: ‖Δθ′‖/‖Δθ‖ by β/2, and 1"
    yield close(name, change / (0.5 * scale[0]), 1.0, 1e-4)
    # Rows of softmax couplings sum to one: the bound is β/2 < 1.
    attention = torch.softmax(normal(spins, spins), -1)
    model = KineticSpins.create(normal(spins, components), attention, scale=1.9)
    fixed_point = model.stationary().value
    yield close(
        "softmax couplings, β = 1.9: a step from the fixed point, and it", model.step(fixed_point), fixed_point, 1e-8
    )


def _second_order_sums(model: KineticSpins, state: Tensor, before: Tensor, as_printed: bool) -> Tensor:
    """The right side of the equation of second order for θ, term by term as on the page of theory.

    Args:
        state: θ at t, where ∂²m is taken.
        before: θ at t − 1, whose means and covariances the fields are made of.
        as_printed: With γᵢ inside the sum over j, in place of γⱼ.
    """
    beta = model.scale
    radius = model.radius

    def gamma(theta: Tensor) -> Tensor:
        return (1 + beta**2 * theta.square().sum(-1) / radius**2).sqrt()

    past = model.mean(before)
    field = model.drive + model.coupling @ model.mean(before)
    rows = []
    for i in range(len(state)):
        m = model.mean(state)[i]
        v = field[i] - state[i]
        g = gamma(state)[i]
        # C = vvᵀ + Σ J² Covⱼ enters as mᵀCm, as its trace and as Cm.
        quadratic_form = (m @ v).square()
        trace = v @ v
        product = (v @ m) * v
        for j, weight in enumerate(model.coupling[i].square()):
            g_j = gamma(before)[i if as_printed else j]
            overlap = m @ past[j]
            quadratic_form = quadratic_form + weight * (m @ m / (1 + g_j) - overlap.square() / (radius**2 * g_j))
            trace = trace + weight * (radius**2 - past[j] @ past[j])
            product = product + weight * (m / (1 + g_j) - overlap * past[j] / (radius**2 * g_j))
        # ∂²m, then ½(dm/dθ)⁻¹∂²m added to the mean field.
        change = beta**2 / radius**4 * (1 + 3 * g) / g**3 * quadratic_form * m
        change = change - beta**2 / radius**2 / (g**2 + g) * (trace * m + 2 * product)
        along = (m @ change) / (radius**2 * g / (1 + g) - m @ m)
        rows.append(field[i] + (1 + g) / (2 * beta) * (change + along * m))
    return torch.stack(rows)


def _second_order(model: KineticSpins, before: Tensor) -> Iterator[Check]:
    """θ of a step of second order solves its equation with γⱼ, not the printed one with γᵢ."""
    state = model.step(before, "second")
    corrected = _second_order_sums(model, state, before, as_printed=False)
    printed = _second_order_sums(model, state, before, as_printed=True)
    # The equation is solved to 1e-10 of θ.
    yield close("θ of second order and its sums with γⱼ", state, corrected, 1e-8)
    yield as_published(close("θ of second order and its sums with γᵢ", state, printed, 1e-8))


def _index() -> Iterator[Check]:
    """Which γ belongs into Cov_j·m_i: with γ_j = 4.1 the relative error is O(1/D), with γ_i = 1.1 it is not."""
    size = 200
    radius = math.sqrt(size / 2 - 1)
    length = radius * math.sqrt(4.1**2 - 1)
    model, field = _single_spin(length, size)
    cosine, variance = _cosine_moments(size, radius * length)
    # In the plane of m_j and m_i, at half a right angle; across the axis the variance is what is left.
    across = radius**2 * (1 - cosine.square() - variance) / (size - 1)
    exact = torch.stack([radius**2 * variance, across])
    mean = model.mean(field)[0].norm()

    def relative_error(gamma: float) -> Check:
        transverse = 1 / (1 + torch.tensor(gamma))
        axial = transverse - mean**2 / (radius**2 * gamma)
        error = (torch.stack([axial, transverse]) - exact).norm() / exact.norm()
        return at_most(f"D = {size}, γ = {gamma}: relative error of Cov_j·m_i", error, 1 / size)

    yield relative_error(4.1)
    yield as_published(relative_error(1.1))


def _binary(normal: Normal, spins: int) -> Iterator[Check]:
    """One step from independent spins against all their states, for couplings halved again and again."""
    states = spin_states(spins)
    # Of several models: in one the leading order may happen to be small beside the next.
    models = [(0.5 * normal(spins), normal(spins, spins) / math.sqrt(spins)) for _ in range(_MODELS)]
    first_errors = []
    second_errors = []
    for halvings in range(_HALVINGS):
        first_differences = []
        second_differences = []
        for drive, unit_coupling in models:
            coupling = 0.05 / 2**halvings * unit_coupling
            probability = (0.5 * (1 + states * torch.tanh(drive))).prod(-1)
            exact = probability @ torch.tanh(drive + states @ coupling.T)
            model = KineticIsing.create(drive, coupling)
            first_differences.append(model.mean(model.step(drive)) - exact)
            second_differences.append(model.mean(model.step(drive, "second")) - exact)
        first_errors.append(torch.cat(first_differences).norm())
        second_errors.append(torch.cat(second_differences).norm())
    yield from _orders("binary spins", torch.stack(first_errors), torch.stack(second_errors))


def _vectors(scale: float) -> Iterator[Check]:
    """One step of a vector in the field of another, parallel to its own, against an integral; exact means."""
    size = 6
    drive = 0.9
    before = 1.7
    radius = math.sqrt(size / 2 - 1)
    points, log_weight = quadrature(-1.0, 1.0, 40)
    p = torch.softmax((size - 3) / 2 * torch.log1p(-points.square()) + scale * radius * before * points + log_weight, 0)
    first_errors = []
    second_errors = []
    for halvings in range(_HALVINGS):
        strength = 0.05 / 2**halvings
        # The first spin's field for every direction of the second one: a spin of its own for each node.
        fields = torch.zeros(len(points), size, dtype=torch.float64)
        fields[:, 0] = drive + strength * radius * points
        fields[:, 1] = strength * radius * (1 - points.square()).sqrt()
        no_coupling = torch.zeros(len(points), len(points), dtype=torch.float64)
        exact = p @ KineticSpins.create(fields, no_coupling, scale=scale, exact=True).mean(fields)[:, 0]
        start = torch.zeros(2, size, dtype=torch.float64)
        start[0, 0] = drive
        start[1, 0] = before
        coupling = torch.tensor([[0.0, strength], [0.0, 0.0]], dtype=torch.float64)
        model = KineticSpins.create(start, coupling, scale=scale, exact=True)
        first_errors.append((model.mean(model.step(start))[0, 0] - exact).abs())
        second_errors.append((model.mean(model.step(start, "second"))[0, 0] - exact).abs())
    yield from _orders("vectors", torch.stack(first_errors), torch.stack(second_errors))


def _orders(name: str, first_errors: Tensor, second_errors: Tensor) -> Iterator[Check]:
    """The error of a step falls as J² at first order, and as J³ at second order; J is halved from error to error."""
    # The next order is half as large at half of the coupling: ±0.3 leaves room for it.
    slope = (first_errors[:-1] / first_errors[1:]).log2()
    detail = _listed(first_errors)
    yield at_least(f"{name}, first order: power of J in a step's error", slope.min(), 2 - 0.3, detail)
    yield at_most(f"{name}, first order: the same, at most", slope.max(), 2 + 0.3, detail)
    slope = (second_errors[:-1] / second_errors[1:]).log2()
    yield at_least(f"{name}, second order: power of J in a step's error", slope.min(), 3 - 0.3, _listed(second_errors))


def _listed(errors: Tensor) -> str:
    return "errors " + ", ".join(f"{error:.2g}" for error in errors.tolist())


def _entropy_production(model: KineticSpins, state: Tensor) -> Iterator[Check]:
    """A sum over pairs of squared asymmetries, which symmetric couplings leave at zero."""
    covariance = model.covariance(state)
    squared_asymmetry = (model.coupling - model.coupling.T).square()
    formula = 0.5 * model.scale**2 * torch.einsum("ij,iab,jba->", squared_asymmetry, covariance, covariance)
    production = model.entropy_production(state)
    yield close("entropy production and (β²/2)Σ(Jᵢⱼ − Jⱼᵢ)² Tr CovᵢCovⱼ", production, formula)
    # J less half of its asymmetry: what is produced is a quadratic form in Jᵢⱼ − Jⱼᵢ, so that a quarter is left.
    half = KineticSpins.create(model.drive, 0.75 * model.coupling + 0.25 * model.coupling.T, scale=model.scale)
    yield close("the same with half of the asymmetry, four times", 4 * half.entropy_production(state), production)
    symmetric = KineticSpins.create(model.drive, model.coupling + model.coupling.T, scale=model.scale)
    yield at_most("of symmetric couplings", symmetric.entropy_production(state).abs(), 0.0)
