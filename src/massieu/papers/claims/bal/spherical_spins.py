"""B15, B21: spins of many components by their saddle point, and the response where couplings depend on the input."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.energy import SpinModel
from massieu.measures import Spin
from massieu.papers.claims.claim import (
    CLOSED_FORM,
    GRADIENT_BY_DIFFERENCES,
    Check,
    as_published,
    at_least,
    at_most,
    close,
)
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.oracles import differences, log_integral, quadrature, spin_states
from massieu.papers.claims.registry import claim
from massieu.papers.theory import SphericalSpins

# --- B15 -------------------------------------------------------------------------------------------------------------


@claim(
    "B15",
    title="Large-D saddle point",
    statement="N spins of squared length D with E = −Σ_ij J_ij σᵢ·σⱼ − Σ hᵢ·σᵢ have, for many components, the "
    "log-partition −N/2 − (N/2) log 2β + φ(t*) for each component. t* is the only minimum of the convex φ(t) = βΣtⱼ "
    "− ½ log det V + (β/4D) Tr hᵀV⁻¹h with V = diag(t) − J ≻ 0, which holds ⟨‖σᵢ‖²⟩ at D. The means are β⁻¹∂log "
    "Z/∂hᵢ = ½Σ_j V⁻¹ᵢⱼhⱼ.",
    source="reconstructed from Bal's post and code of 2021 (AFEM); bounds for one spin by Amos (1974), derived",
    status="reconstructed",
    published="⟨σᵢ⟩ = ∂log Z/∂hᵢ = (β/2)Σ_j V⁻¹ᵢⱼhⱼ.",
    standing="ambiguous",
    corrected="The derivative lacks its factor β⁻¹: the fields stand in E, so that exp(−βE) contains β times them.",
)
def large_dimension(
    spins: int = 6, components: int = 5, scale: float = 0.7, strength: float = 0.6, draws: int = 50, seed: int = 0
) -> Iterator[Check]:
    check_at_least(2, spins=spins, components=components)
    check_at_least(1e-2, scale=scale, strength=strength)
    normal = normal_draws(seed)
    for size in (8, 64, 512):
        yield from _one_spin(size, scale, strength)
        yield from _two_spins(size, scale, strength)
    yield from _two_spins_in_fields(scale, strength)
    yield from _saddle_point(_random_model(normal, spins, components, scale), normal, draws)


def _random_model(normal: Normal, spins: int, components: int, scale: float) -> SphericalSpins:
    square = normal(spins, spins)
    coupling = (square + square.T) / math.sqrt(8 * spins) * (1 - torch.eye(spins, dtype=torch.float64))
    return SphericalSpins.create(normal(spins, components), coupling, scale=scale)


def _cosine(size: int, pull: float) -> tuple[Tensor, Tensor]:
    """The mean cosine with the axis of a spin tilted by e^{pull·cos}, and log Z, by quadrature."""
    points, log_weight = quadrature(-1.0, 1.0)
    log_p = (size - 3) / 2 * torch.log1p(-points.square()) + log_weight
    tilted = log_p + pull * points
    cosine = (torch.softmax(tilted, 0) * points).sum()
    log_z = torch.logsumexp(tilted, 0) - torch.logsumexp(log_p, 0)
    return cosine, log_z


def _largest_gap(size: int, pull: float) -> float:
    """How far the saddle point's cosine may lie below a spin's, after Amos's upper bound of the Bessel functions' ratio.

    With ν = D/2 − 1, it is pull/(ν + 1 + √((ν + 1)² + pull²)), the ratio at most pull/(ν + ½ + √((ν + ½)² + pull²)).
    """

    def ratio(order: float) -> float:
        return pull / (order + math.hypot(order, pull))

    return ratio(size / 2 - 0.5) - ratio(size / 2)


def _one_spin(size: int, scale: float, strength: float) -> Iterator[Check]:
    """One spin in the field strength·√D: the errors of its mean, with and without β⁻¹, and of log Z are O(1/D)."""
    field = torch.zeros(1, size, dtype=torch.float64)
    field[0, 0] = strength * math.sqrt(size)
    no_coupling = torch.zeros(1, 1, dtype=torch.float64)
    saddle = SphericalSpins.create(field, no_coupling, scale=scale).saddle_point()
    pull = scale * strength * size
    cosine, log_z = _cosine(size, pull)
    largest_gap = _largest_gap(size, pull)

    mean = saddle.mean[0, 0] / math.sqrt(size)
    detail = f"{mean.item():.5f} against {cosine.item():.5f}"
    name = f"D = {size}: |½V⁻¹h − the mean of one spin|/√D"
    yield at_most(name, (mean - cosine).abs(), largest_gap, detail)
    published = scale * mean
    detail = f"{published.item():.5f} against {cosine.item():.5f}"
    name = f"D = {size}: |(β/2)V⁻¹h − it|/√D"
    yield as_published(at_most(name, (published - cosine).abs(), largest_gap, detail))

    # The integral over β of strength times the gap, which is at most β·strength/(D − 1).
    error = (saddle.log_partition - log_z / size).abs()
    detail = f"{saddle.log_partition.item():.5f} against {(log_z / size).item():.5f}"
    yield at_most(f"D = {size}: |log Z/D by φ − of one spin|", error, (scale * strength) ** 2 / 2 / (size - 1), detail)


def _two_spins(size: int, scale: float, coupling: float) -> Iterator[Check]:
    """Without fields the angle of two spins is that of one in the field of the other, 2Jσ."""
    matrix = torch.tensor([[0.0, coupling], [coupling, 0.0]], dtype=torch.float64)
    no_field = torch.zeros(2, size, dtype=torch.float64)
    saddle = SphericalSpins.create(no_field, matrix, scale=scale).saddle_point()
    pull = 2 * scale * coupling * size
    cosine, log_z = _cosine(size, pull)
    error = (saddle.correlation[0, 1] - cosine).abs()
    yield at_most(f"D = {size}: |⟨σ₁·σ₂⟩/D − by quadrature over the angle|", error, _largest_gap(size, pull))
    error = (saddle.log_partition - log_z / size).abs()
    bound = (2 * scale * coupling) ** 2 / 2 / (size - 1)
    yield at_most(f"D = {size}: |log Z/D of two spins − by quadrature|", error, bound)


def _two_spins_in_fields(scale: float, strength: float) -> Iterator[Check]:
    """Parallel fields: the second spin is integrated out within the integral over the first's cosine."""

    def error(size: int) -> Tensor:
        """Of log Z/D by the saddle point."""
        field = torch.zeros(2, size, dtype=torch.float64)
        field[:, 0] = strength * math.sqrt(size)
        matrix = torch.tensor([[0.0, strength], [strength, 0.0]], dtype=torch.float64)
        saddle = SphericalSpins.create(field, matrix, scale=scale).saddle_point()
        return (saddle.log_partition - _log_z_of_two(size, scale, strength) / size).abs()

    # The next order is another 1/D.
    yield close(
        "two spins in fields: error of log Z/D at D = 256 over that at 64, and ¼", error(256) / error(64), 0.25, 0.02
    )


def _log_z_of_two(size: int, scale: float, strength: float) -> Tensor:
    """log Z of two spins with J = strength in parallel fields strength·√D, relative to β = 0."""
    cosines, _ = quadrature(-1.0, 1.0, 40)
    # For each cosine of the first spin, what pulls the second: h + 2Jσ₁, of this length.
    pulls = scale * size * torch.sqrt(4 * strength**2 + strength**2 + 4 * strength**2 * cosines)

    def log_sphere(cosine: Tensor) -> Tensor:
        return (size - 3) / 2 * torch.log1p(-cosine.square())

    bare = log_integral(log_sphere, -1.0, 1.0, 40)
    inner = log_integral(lambda c: log_sphere(c) + pulls[:, None] * c, -1.0, 1.0, 40)
    # The outer integral has the nodes at which the inner one was computed.
    outer = log_integral(lambda c: log_sphere(c) + scale * size * strength * c + inner, -1.0, 1.0, 40)
    return outer - 2 * bare


def _saddle_point(model: SphericalSpins, normal: Normal, draws: int) -> Iterator[Check]:
    """t* is the only minimum of the convex φ, holds ⟨‖σᵢ‖²⟩ at D, and log Z/D, means and covariance follow from it."""
    saddle = model.saddle_point()
    spins, components = model.field.shape
    lengths = saddle.correlation.diagonal()
    yield close("⟨‖σᵢ‖²⟩/D and 1", lengths, torch.ones_like(lengths))

    def potential(t: Tensor) -> Tensor:
        precision = torch.diag_embed(t) - model.coupling
        inverse = torch.linalg.inv(precision)
        quadratic = (model.field * (inverse @ model.field)).sum((-2, -1))
        half_log_det = torch.linalg.cholesky(precision).diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return model.scale * t.sum(-1) - half_log_det + model.scale / (4 * components) * quadratic

    constant = 0.5 * spins * (1 + math.log(2 * model.scale.item()))
    yield close(
        "log Z/D and −N/2 − (N/2) log 2β + φ(t*)", saddle.log_partition, potential(saddle.multiplier) - constant
    )
    largest = torch.linalg.eigvalsh(model.coupling)[-1]
    others = largest + 0.1 + normal(draws, spins).abs()  # V ⪰ 0.1
    rise = potential(others) - potential(saddle.multiplier)
    yield at_least(f"φ(t) − φ(t*) at {draws} other t with V ≻ 0", rise, 0.0)
    curvature = torch.func.vmap(torch.func.hessian(potential))(others)
    yield at_least("least eigenvalue of ∇²φ there", torch.linalg.eigvalsh(curvature), 0.0)

    def log_z(flat_field: Tensor) -> Tensor:
        field = flat_field.reshape(*flat_field.shape[:-1], spins, components)
        in_field = SphericalSpins.create(field, model.coupling, scale=model.scale)
        return components * in_field.saddle_point().log_partition

    slope = differences(log_z, model.field.flatten()) / model.scale
    yield close(
        "β⁻¹∂log Z/∂h by differences and the means", slope, saddle.mean.flatten(), components * GRADIENT_BY_DIFFERENCES
    )
    response = torch.func.hessian(log_z)(model.field.flatten()) / model.scale**2
    yield close("β⁻²∂²log Z/∂h² and the covariance", response, model.covariance(saddle).reshape(response.shape), 1e-8)


# --- B21 -------------------------------------------------------------------------------------------------------------


@claim(
    "B21",
    title="Response of a driven system",
    statement="Where couplings depend on the fields, −dF/dhᵢ = ⟨σᵢ⟩ + Σ_mn ⟨σ_m·σ_n⟩ ∂J_mn/∂hᵢ, with F = −β⁻¹ log Z "
    "and E as in B15: a drive and a collective term. This is exact for Ising spins, and holds for spins of many "
    "components.",
    source="reconstructed from Bal's post of November 2021",
    status="reconstructed",
)
def driven_response(spins: int = 3, components: int = 4, scale: float = 0.8, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, spins=spins, components=components)
    check_at_least(1e-2, scale=scale)
    normal = normal_draws(seed)
    field = normal(spins, components)
    yield from _response_of_spherical_spins(field, scale)
    yield from _response_of_ising_spins(field, scale)


def _coupling(field: Tensor) -> Tensor:
    """Symmetric attention between the fields, without a diagonal."""
    spins, components = field.shape
    off_diagonal = 1 - torch.eye(spins, dtype=torch.float64)
    scores = field @ field.mT / math.sqrt(components)
    attention = torch.softmax(scores - 1e3 * (1 - off_diagonal), -1)
    return 0.5 * (attention + attention.mT) * off_diagonal


def _response_of_spherical_spins(field: Tensor, scale: float) -> Iterator[Check]:
    components = field.shape[-1]

    def minus_free_energy(field: Tensor) -> Tensor:
        saddle = SphericalSpins.create(field, _coupling(field), scale=scale).saddle_point()
        return components * saddle.log_partition / scale

    saddle = SphericalSpins.create(field, _coupling(field), scale=scale).saddle_point()
    coupling_slopes = torch.func.jacrev(_coupling)(field)
    collective = torch.einsum("mn,mnia->ia", components * saddle.correlation, coupling_slopes)
    total = torch.func.grad(minus_free_energy)(field)
    yield close("many components: −dF/dh and ⟨σ⟩ + Σ⟨σ_m·σ_n⟩∂J_mn/∂h", total, saddle.mean + collective)
    by_differences = differences(lambda flat: minus_free_energy(flat.reshape(field.shape)), field.flatten())
    yield close(
        "many components: by differences",
        by_differences.reshape(field.shape),
        total,
        components * GRADIENT_BY_DIFFERENCES,
    )
    yield at_least("share of the collective term", collective.norm() / total.norm(), CLOSED_FORM)


def _response_of_ising_spins(field: Tensor, scale: float) -> Iterator[Check]:
    """Ising spins in the first components of the fields: exact, by a sum over their states."""
    spins = len(field)
    # An Ising spin of field βh and couplings 2βJ: E counts every pair twice.
    moments = SpinModel.create(Spin.create(scale * field[:, 0]), 2 * scale * _coupling(field)).exact()
    mean = moments.mean[:, 0]
    pair_moments = moments.covariance[:, 0, :, 0] + mean[:, None] * mean
    drive = torch.zeros_like(field)
    drive[:, 0] = mean
    coupling_slopes = torch.func.jacrev(_coupling)(field)
    drive_and_collective = drive + torch.einsum("mn,mnia->ia", pair_moments, coupling_slopes)

    states = spin_states(spins)

    def minus_free_energy(flat_field: Tensor) -> Tensor:
        field_now = flat_field.reshape(field.shape)
        interaction = ((states @ _coupling(field_now)) * states).sum(-1)
        return torch.logsumexp(scale * (interaction + states @ field_now[:, 0]), 0) / scale

    by_differences = differences(minus_free_energy, field.flatten()).reshape(field.shape)
    yield close(
        f"{spins} Ising spins enumerated: −dF/dh by differences and the two terms",
        by_differences,
        drive_and_collective,
        GRADIENT_BY_DIFFERENCES,
    )
