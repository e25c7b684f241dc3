"""S6, S8, S9, S10: between natural and mean parameters."""

from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.duality import conjugate, natural
from massieu.measures import Atoms, Gaussian, Spin
from massieu.papers.claims.claim import (
    CLOSED_FORM,
    GRADIENT_BY_DIFFERENCES,
    HESSIAN_BY_DIFFERENCES,
    QUADRATURE,
    SHIM,
    Check,
    all_raise,
    as_published,
    at_least,
    at_most,
    close,
)
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.oracles import differences
from massieu.papers.claims.registry import claim
from massieu.papers.claims.shim.catalogue import Member, library

_RESIDUAL = 1e-12
"""Largest distance of the inverse map's mean from the mean that it inverts (S9)."""


def _atoms(points: Tensor, log_weight: Tensor, eta: Tensor) -> Member:
    return Member("atoms", Atoms.create(points, log_weight), eta, points, log_weight)


def _round_trip(name: str, member: Member, expected: Tensor, *, num_zeros: int = 0) -> Check:
    """The inverse of the mean map at the mean of p_η is η, or the part of η that the mean determines.

    A residual r of the mean is at most r/λ in η. Here λ is the Fisher information's least eigenvalue, not counting the
    `num_zeros` that are 0.
    """
    eigenvalues = torch.linalg.eigvalsh(member.covariance(member.eta))
    least_eigenvalue = eigenvalues[..., num_zeros].min().item()
    tolerance = max(CLOSED_FORM, _RESIDUAL / least_eigenvalue)
    return close(name, natural(member.measure, member.mean(member.eta)), expected, tolerance)


# --- S6 --------------------------------------------------------------------------------------------------------------


@claim(
    "S6",
    title="From natural to mean parameter",
    statement="∇A maps the domain onto the relative interior of the convex hull of the support. ∇A(η) = ∇A(η′) if "
    "and only if η − η′ is orthogonal to all differences of support points. For N keys in R^d with N ≤ d there are "
    "such η ≠ η′.",
    source=f"{SHIM}, §3.1, before eq. (4)",
    status="quoted",
    published="The expected statistic is a one-to-one function of the natural parameter.",
    corrected="One-to-one only modulo the orthogonal complement of the centred keys' span; the inverse is the η of "
    "least norm.",
)
def mean_map_modulo_a_subspace(atoms: int = 6, dimensions: int = 8, draws: int = 20, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, atoms=atoms, dimensions=dimensions)
    normal = normal_draws(seed)
    # Where there are more keys than dimensions they lie in a hyperplane.
    rank = min(atoms, dimensions) - 1
    span = torch.linalg.qr(normal(dimensions, rank))[0]
    keys = normal(dimensions) + normal(atoms, rank) @ span.T
    eta = 0.5 * normal(draws, dimensions)
    direction = normal(draws, dimensions)
    along = direction @ span @ span.T
    across = direction - direction @ span @ span.T
    member = _atoms(keys, normal(atoms), eta)
    measure = member.measure
    mean = member.mean(eta)

    # Across the keys' span nothing changes: the map is not one-to-one.
    slope = (measure.mean(eta + across) - measure.mean(eta)).norm(dim=-1) / across.norm(dim=-1)
    yield as_published(at_least("‖∇A(η) − ∇A(η′)‖/‖η − η′‖, η ≠ η′", slope, 1e-6))
    # Theory's 1e-12, in units of the exponents' size.
    unit = 1 + ((eta + across) @ keys.T).abs().max().item()
    name = "∇A(η + n) and ∇A(η), n orthogonal to the key differences"
    yield close(name, measure.mean(eta + across), mean, 1e-12 * unit)

    # Along the span it is strictly monotone, and has an inverse on the hull.
    change = ((measure.mean(eta + along) - mean) * along).sum(-1)
    surplus = change - member.least_curvature(eta, eta + along)
    yield at_least("(∇A(η′) − ∇A(η))·(η′ − η) less its least value, along the span", surplus, -1e-12)
    in_span = eta @ span @ span.T
    yield _round_trip("inverse of ∇A(η) and the part of η in the span", member, in_span, num_zeros=dimensions - rank)
    inside = torch.softmax(normal(draws, atoms), -1) @ keys
    reached = measure.mean(natural(measure, inside))
    yield close("∇A of the inverse and ū, any ū inside the hull", reached, inside)


# --- S8 --------------------------------------------------------------------------------------------------------------


@claim(
    "S8",
    title="Conjugate, entropy, maximum entropy",
    statement="The conjugate is A*(ū) = E_p[log dp/dh] = −H(p) − E_p[log h], and A(η) + A*(ū) = η·ū if and only if "
    "ū = ∇A(η). Among all weights with mean ū, those of attention have the largest entropy relative to h.",
    source=f"{SHIM}, §3.2, eq. (6) and the text after it",
    status="quoted",
    corrected="A parenthesis is missing in the formula; the dual problem is maximum entropy relative to h.",
)
def conjugate_is_entropy(atoms: int = 12, dimensions: int = 3, draws: int = 10, seed: int = 0) -> Iterator[Check]:
    check_at_least(dimensions + 2, atoms=atoms)
    normal = normal_draws(seed)
    for member in library(normal, draws):
        log_share = member.log_share(member.eta)
        log_ratio = log_share - member.log_density - member.log_volume
        expected = (log_share.exp() * log_ratio).sum(-1)
        value = conjugate(member.measure, member.mean(member.eta))
        yield close(f"{member.name}: A*(ū) and E log dp/dh", value, expected, QUADRATURE)

    eta = 0.5 * normal(draws, dimensions)
    other_eta = normal(draws, dimensions)
    member = _atoms(normal(atoms, dimensions), normal(atoms), eta)
    yield from _fenchel_young(member, other_eta)
    yield from _least_relative_entropy(member, normal(draws, atoms))
    yield from _ends(member, other_eta)

    location = normal(dimensions)
    factor = normal(dimensions, dimensions)
    covariance = torch.eye(dimensions).double() + factor @ factor.T / dimensions
    mean = other_eta
    deviation = mean - location
    half_distance = 0.5 * (deviation * torch.linalg.solve(covariance, deviation.T).T).sum(-1)
    value = conjugate(Gaussian.create(location, covariance), mean)
    yield close("Gaussian: A*(ū) and ½(ū − μ)ᵀΣ⁻¹(ū − μ)", value, half_distance)


def _fenchel_young(member: Member, other_eta: Tensor) -> Iterator[Check]:
    """A(η′) + A*(ū) ≥ η′·ū, with equality at ū = ∇A(η′), and A* as minus an entropy."""
    measure = member.measure
    eta = member.eta
    mean = member.mean(eta)
    weights = member.log_share(eta).exp()
    value = conjugate(measure, mean)
    entropy = -(weights * weights.log()).sum(-1)
    yield close("A*(ū) and −H(p) − E log h", value, -entropy - weights @ member.log_density)
    yield close("A(η) + A*(ū) and η·ū, ū = ∇A(η)", measure.log_partition(eta) + value, (eta * mean).sum(-1))
    slack = measure.log_partition(other_eta) + value - (other_eta * mean).sum(-1)
    divergence = (weights * (weights.log() - member.log_share(other_eta))).sum(-1)
    yield close("A(η′) + A*(ū) − η′·ū and KL(p_η ‖ p_η′)", slack, divergence)
    yield close("A*(ū) and its supremum, found by L-BFGS", value, _legendre(member, mean))


def _legendre(member: Member, mean: Tensor) -> Tensor:
    """sup η·ū − A(η) by a search, with A as a sum over atoms: the error is of the order of the slope's square."""
    eta = torch.zeros_like(mean, requires_grad=True)
    search = torch.optim.LBFGS(
        [eta], max_iter=500, tolerance_grad=1e-10, tolerance_change=0.0, history_size=50, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        search.zero_grad()
        total = (member.log_partition(eta) - (eta * mean).sum(-1)).sum()
        total.backward()
        return total

    search.step(loss)
    return (eta * mean).sum(-1).detach() - member.log_partition(eta.detach())


def _least_relative_entropy(member: Member, direction: Tensor) -> Iterator[Check]:
    """Other weights of the same mean: their KL from h exceeds A* by their KL from attention's (Pythagoras)."""
    weights = member.log_share(member.eta).exp()
    # A change of the weights that keeps their mean and their sum.
    constraints = torch.cat([member.points, torch.ones_like(member.points[:, :1])], -1)
    change = direction - direction @ constraints @ torch.linalg.pinv(constraints)
    # Half of the way to where the first weight vanishes.
    step = 0.5 / (-change / weights).amax(-1, keepdim=True)
    other_weights = weights + step * change

    def relative_entropy(p: Tensor) -> Tensor:
        return (p * (p.log() - member.log_density)).sum(-1)

    other_mean = other_weights @ member.points
    yield close("other weights of the same mean: their mean and ū", other_mean, weights @ member.points)
    excess = relative_entropy(other_weights) - relative_entropy(weights)
    yield at_least("other weights of the same mean: Σ p log(p/w) less A*", excess, -1e-12)
    divergence = (other_weights * (other_weights.log() - weights.log())).sum(-1)
    yield close("other weights of the same mean: the excess and KL from p_η", excess, divergence)


def _ends(member: Member, direction: Tensor) -> Iterator[Check]:
    """At an extreme point only its own weight is left; beyond the hull there is no p."""
    index = (direction @ member.points.T).argmax(-1)
    extreme_point = member.points[index]
    value = conjugate(member.measure, extreme_point)
    # A* is a limit there, and the library's search comes only near to it.
    yield close("extreme point xₙ: A* and −log wₙ", value, -member.log_density[index], QUADRATURE)
    yield close("outside the hull: A* and ∞", conjugate(member.measure, extreme_point + direction), torch.inf)


# --- S9 --------------------------------------------------------------------------------------------------------------


@claim(
    "S9",
    title="Duality and the inverse map",
    statement="For a minimal family, ∇A* is the inverse of ∇A, and ∇²A*(ū) = (∇²A(η))⁻¹. At a boundary point of the "
    "hull, η is infinite.",
    source=f"{SHIM}, §3.2, eq. (6)",
    status="quoted",
)
def duality_and_inverse(atoms: int = 12, dimensions: int = 3, draws: int = 10, seed: int = 0) -> Iterator[Check]:
    check_at_least(dimensions + 2, atoms=atoms)
    normal = normal_draws(seed)
    for member in library(normal, draws):
        # Two families are not minimal: S6 says what holds for them.
        if member.name not in ("point mass", "categorical"):
            yield _round_trip(f"{member.name}: inverse of ∇A(η) and η", member, member.eta)
        mean = member.mean(member.eta)
        mean_of_inverse = member.measure.mean(natural(member.measure, mean))
        yield close(f"{member.name}: ∇A of the inverse and ū", mean_of_inverse, mean)

    # Near the origin the mean stays well inside the hull, where differences are possible.
    eta = 0.2 * normal(draws, dimensions)
    member = _atoms(normal(atoms, dimensions), 0.3 * normal(atoms), eta)
    measure = member.measure
    mean = member.mean(eta)
    inverse_fisher = torch.linalg.inv(member.covariance(eta))
    # The smaller the covariance, the faster the inverse map changes over the differences' step.
    tolerance = GRADIENT_BY_DIFFERENCES * (1 + inverse_fisher.abs().max().item())
    gradient = differences(lambda mu: conjugate(measure, mu), mean)
    yield close("differences of A* and η", gradient, eta, tolerance)
    jacobian = differences(lambda mu: natural(measure, mu), mean)
    yield close("differences of the inverse map and (∇²A)⁻¹", jacobian, inverse_fisher, tolerance)
    by_autograd = torch.func.vmap(torch.func.jacrev(lambda mu: natural(measure, mu)))(mean)
    yield close("derivative of the inverse map and (∇²A)⁻¹", by_autograd, inverse_fisher, QUADRATURE)
    yield from _boundary(member, normal)


def _boundary(member: Member, normal: Normal) -> Iterator[Check]:
    """On the boundary of the hull η is infinite; outside there is none."""
    direction = normal(5, member.points.shape[-1])
    extreme_point = member.points[(direction @ member.points.T).argmax(-1)]
    yield close("extreme point: |η| and ∞", natural(member.measure, extreme_point).abs(), torch.inf)
    signs = torch.sign(normal(4))
    eta = natural(Spin.create(torch.zeros(4).double()), signs)
    yield close("spins that are certain: η and ±∞", eta, signs * torch.inf)
    outside = extreme_point + direction
    yield all_raise("outside the hull: no η", ValueError, lambda: natural(member.measure, outside))


# --- S10 -------------------------------------------------------------------------------------------------------------


@claim(
    "S10",
    title="Fisher information is the centred covariance",
    statement="∇²A(η) is the centred covariance E[xxᵀ] − ūūᵀ of p_η, which is its Fisher information, and the third "
    "derivative is the third central moment. The affine approximation of ∇A is exact only for a Gaussian.",
    source=f"{SHIM}, §3.2, after eq. (6)",
    status="quoted",
    published="∇² log Z = E[uuᵀ].",
    corrected="The covariance is centred: the published form is off by ūūᵀ.",
)
def fisher_is_centred(atoms: int = 12, dimensions: int = 4, draws: int = 20, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, atoms=atoms)
    normal = normal_draws(seed)
    beta = dimensions**-0.5
    eta = normal(draws, dimensions)
    direction = normal(draws, dimensions)
    member = _atoms(normal(atoms, dimensions), normal(atoms), eta)
    yield from _second_derivative(member, direction)
    yield from _higher_derivatives(member, direction)
    yield from _derivatives_in_the_query(member, beta)
    yield from _affine_approximation(member, direction, normal)


def _second_derivative(member: Member, direction: Tensor) -> Iterator[Check]:
    measure = member.measure
    eta = member.eta
    mean = member.mean(eta)
    weights = member.log_share(eta).exp()
    hessian = differences(lambda point: differences(measure.log_partition, point, 1e-4), eta, 1e-4)
    second_moment = (weights.unsqueeze(-1) * member.points).mT @ member.points
    mean_square = mean.unsqueeze(-1) * mean.unsqueeze(-2)
    covariance = second_moment - mean_square
    yield close("second differences of A and E[xxᵀ] − ūūᵀ", hessian, covariance, HESSIAN_BY_DIFFERENCES)
    yield as_published(close("second differences of A and E[xxᵀ]", hessian, second_moment, HESSIAN_BY_DIFFERENCES))
    excess = second_moment - hessian
    yield close("E[xxᵀ] less second differences, and ūūᵀ", excess, mean_square, HESSIAN_BY_DIFFERENCES)
    # The library's Fisher information, against the covariance of centred points, which loses no digits.
    covariance = member.covariance(eta)
    yield close("∇²A and the centred covariance", measure.fisher(eta), covariance)
    product = (covariance @ direction.unsqueeze(-1)).squeeze(-1)
    yield close("∇²A·v and the centred covariance times v", measure.fisher_vp(eta, direction), product)


def _third_central_moment(member: Member) -> Tensor:
    """E[(x − ū)³], shape (draws, d, d, d)."""
    weights = member.log_share(member.eta).exp()
    deviation = member.points - member.mean(member.eta).unsqueeze(-2)
    return torch.einsum("qn,qni,qnj,qnk->qijk", weights, deviation, deviation, deviation)


def _higher_derivatives(member: Member, direction: Tensor) -> Iterator[Check]:
    measure = member.measure
    eta = member.eta
    mean = member.mean(eta)
    weights = member.log_share(eta).exp()
    third_derivative = differences(measure.fisher, eta)
    third_moment = _third_central_moment(member)
    yield close(
        "differences of the covariance and E[(x − ū)³]", third_derivative, third_moment, GRADIENT_BY_DIFFERENCES
    )
    along = ((member.points - mean.unsqueeze(-2)) @ direction.unsqueeze(-1)).squeeze(-1)
    second, third, fourth = ((weights * along**order).sum(-1) for order in (2, 3, 4))
    first_cumulant = (mean * direction).sum(-1)
    fourth_cumulant = fourth - 3 * second**2
    cumulants = torch.stack([first_cumulant, second, third, fourth_cumulant], -1)
    yield close("κ₁ … κ₄ along v and moments", measure.cumulants(eta, direction, 4), cumulants)


def _derivatives_in_the_query(member: Member, beta: float) -> Iterator[Check]:
    """A_β(q) = A(βq)/β: each derivative more is a factor β."""
    measure = member.measure
    query = member.eta / beta
    jacobian = differences(lambda q: measure.mean(beta * q), query)
    yield close("∇²A_β and β Cov_p", jacobian, beta * member.covariance(member.eta), GRADIENT_BY_DIFFERENCES)
    third_derivative = differences(lambda q: beta * measure.fisher(beta * q), query)
    expected = beta**2 * _third_central_moment(member)
    yield close("third derivative of A_β and β²κ₃", third_derivative, expected, GRADIENT_BY_DIFFERENCES)


def _affine_approximation(member: Member, step: Tensor, normal: Normal) -> Iterator[Check]:
    """|κ₃(a, b, b)| ≤ max|a·(x − ū)| Var(b·x) ≤ D·D²/4 for unit vectors, D the diameter of the points (Popoviciu)."""
    measure = member.measure
    eta = member.eta
    affine = member.mean(eta) + (member.covariance(eta) @ step.unsqueeze(-1)).squeeze(-1)
    remainder = (measure.mean(eta + step) - affine).norm(dim=-1)
    third_cumulant_bound = torch.cdist(member.points, member.points).max() ** 3 / 4
    ratio = remainder / (0.5 * third_cumulant_bound * step.square().sum(-1))
    yield at_most("affine approximation of ∇A: remainder/(½ sup‖κ₃‖ ‖δ‖²)", ratio, 1.0)
    yield at_least("affine approximation of ∇A, atoms: largest remainder", remainder.max(), 1e4 * CLOSED_FORM)
    root = normal(step.shape[-1], step.shape[-1])
    gaussian = Gaussian.create(root[0], root @ root.T)
    affine = gaussian.mean(eta) + step @ root @ root.T
    yield close("affine approximation of ∇A, Gaussian", gaussian.mean(eta + step), affine)
