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
    yield from _saddle(_drawn(normal, spins, components, scale), normal, draws)


def _drawn(normal: Normal, spins: int, components: int, scale: float) -> SphericalSpins:
    drawn = normal(spins, spins)
    coupling = (drawn + drawn.T) / math.sqrt(8 * spins) * (1 - torch.eye(spins, dtype=torch.float64))
    return SphericalSpins.create(normal(spins, components), coupling, scale=scale)


def _cosine(size: int, pull: float) -> tuple[Tensor, Tensor]:
    """The mean cosine with the axis of a spin tilted by e^{pull·cos}, and log Z, by quadrature."""
    points, log_weight = quadrature(-1.0, 1.0)
    log_p = (size - 3) / 2 * torch.log1p(-points.square()) + log_weight
    tilted = log_p + pull * points
    return (torch.softmax(tilted, 0) * points).sum(), torch.logsumexp(tilted, 0) - torch.logsumexp(log_p, 0)


def _gap(size: int, pull: float) -> float:
    """How far the saddle point's cosine may lie below a spin's, after Amos's upper bound of the Bessel functions' ratio.

    With ν = D/2 − 1, it is pull/(ν + 1 + √((ν + 1)² + pull²)), the ratio at most pull/(ν + ½ + √((ν + ½)² + pull²)).
    """
    bounds = [pull / (order + math.hypot(order, pull)) for order in (size / 2, size / 2 - 0.5)]
    return bounds[1] - bounds[0]


def _one_spin(size: int, scale: float, strength: float) -> Iterator[Check]:
    """One spin in the field strength·√D: errors O(1/D)."""
    field = torch.zeros(1, size, dtype=torch.float64)
    field[0, 0] = strength * math.sqrt(size)
    found = SphericalSpins.create(field, torch.zeros(1, 1, dtype=torch.float64), scale=scale).saddle_point()
    pull = scale * strength * size
    cosine, level = _cosine(size, pull)
    mean = found.mean[0, 0] / math.sqrt(size)
    compared = f"D = {size}: |½V⁻¹h − the mean of one spin|/√D"
    detail = f"{mean.item():.5f} against {cosine.item():.5f}"
    yield at_most(compared, (mean - cosine).abs(), _gap(size, pull), detail)
    published = scale * mean
    detail = f"{published.item():.5f} against {cosine.item():.5f}"
    published = (published - cosine).abs()
    yield as_published(at_most(f"D = {size}: |(β/2)V⁻¹h − it|/√D", published, _gap(size, pull), detail))
    # The integral over β of strength times the gap, which is at most β·strength/(D − 1).
    missed = (found.log_partition - level / size).abs()
    detail = f"{found.log_partition.item():.5f} against {(level / size).item():.5f}"
    yield at_most(f"D = {size}: |log Z/D by φ − of one spin|", missed, (scale * strength) ** 2 / 2 / (size - 1), detail)


def _two_spins(size: int, scale: float, coupling: float) -> Iterator[Check]:
    """Without fields the angle of two spins is that of one in the field of the other, 2Jσ."""
    matrix = torch.tensor([[0.0, coupling], [coupling, 0.0]], dtype=torch.float64)
    found = SphericalSpins.create(torch.zeros(2, size, dtype=torch.float64), matrix, scale=scale).saddle_point()
    pull = 2 * scale * coupling * size
    cosine, level = _cosine(size, pull)
    missed = (found.correlation[0, 1] - cosine).abs()
    yield at_most(f"D = {size}: |⟨σ₁·σ₂⟩/D − by quadrature over the angle|", missed, _gap(size, pull))
    missed = (found.log_partition - level / size).abs()
    yield at_most(
        f"D = {size}: |log Z/D of two spins − by quadrature|", missed, (2 * scale * coupling) ** 2 / 2 / (size - 1)
    )


def _two_spins_in_fields(scale: float, strength: float) -> Iterator[Check]:
    """Parallel fields: the second spin is integrated out within the integral over the first's cosine."""
    errors = []
    for size in (64, 256):
        root = math.sqrt(size)
        nodes, _ = quadrature(-1.0, 1.0, 40)
        pulls = scale * size * torch.sqrt(4 * strength**2 + strength**2 + 4 * strength**2 * nodes)

        def sphere(points: Tensor, size: int = size) -> Tensor:
            return (size - 3) / 2 * torch.log1p(-points.square())

        bare = log_integral(sphere, -1.0, 1.0, 40)
        inner = log_integral(lambda c, p=pulls, s=sphere: s(c) + p[:, None] * c, -1.0, 1.0, 40)
        outer = log_integral(lambda c, p=inner, s=sphere, z=size: s(c) + scale * z * strength * c + p, -1.0, 1.0, 40)
        field = torch.zeros(2, size, dtype=torch.float64)
        field[:, 0] = strength * root
        matrix = torch.tensor([[0.0, strength], [strength, 0.0]], dtype=torch.float64)
        found = SphericalSpins.create(field, matrix, scale=scale).saddle_point()
        errors.append((found.log_partition - (outer - 2 * bare) / size).abs())
    # The next order is another 1/D.
    yield close(
        "two spins in fields: error of log Z/D at D = 256 over that at 64, and ¼", errors[1] / errors[0], 0.25, 0.02
    )


def _saddle(model: SphericalSpins, normal: Normal, draws: int) -> Iterator[Check]:
    found = model.saddle_point()
    spins, size = model.field.shape
    lengths = found.correlation.diagonal()
    yield close("⟨‖σᵢ‖²⟩/D and 1", lengths, torch.ones_like(lengths))

    def potential(t: Tensor) -> Tensor:
        precision = torch.diag_embed(t) - model.coupling
        inverse = torch.linalg.inv(precision)
        quadratic = (model.field * (inverse @ model.field)).sum((-2, -1))
        level = model.scale * t.sum(-1) - torch.linalg.cholesky(precision).diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return level + model.scale / (4 * size) * quadratic

    constant = 0.5 * spins * (1 + math.log(2 * model.scale.item()))
    yield close("log Z/D and −N/2 − (N/2) log 2β + φ(t*)", found.log_partition, potential(found.multiplier) - constant)
    largest = torch.linalg.eigvalsh(model.coupling)[-1]
    others = largest + 0.1 + normal(draws, spins).abs()  # V ⪰ 0.1
    rise = potential(others) - potential(found.multiplier)
    yield at_least(f"φ(t) − φ(t*) at {draws} other t with V ≻ 0", rise, 0.0)
    curvature = torch.func.vmap(torch.func.hessian(potential))(others)
    yield at_least("least eigenvalue of ∇²φ there", torch.linalg.eigvalsh(curvature), 0.0)

    def level(field: Tensor) -> Tensor:
        given = SphericalSpins.create(field.reshape(*field.shape[:-1], spins, size), model.coupling, scale=model.scale)
        return size * given.saddle_point().log_partition

    slope = differences(level, model.field.flatten()) / model.scale
    yield close(
        "β⁻¹∂log Z/∂h by differences and the means", slope, found.mean.flatten(), size * GRADIENT_BY_DIFFERENCES
    )
    response = torch.func.hessian(level)(model.field.flatten()) / model.scale**2
    yield close("β⁻²∂²log Z/∂h² and the covariance", response, model.covariance(found).reshape(response.shape), 1e-8)


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
    off = 1 - torch.eye(spins, dtype=torch.float64)

    def coupling(field: Tensor) -> Tensor:
        """Symmetric attention between the fields."""
        scores = field @ field.mT / math.sqrt(components)
        attention = torch.softmax(scores - 1e3 * (1 - off), -1)
        return 0.5 * (attention + attention.mT) * off

    field = normal(spins, components)
    slopes = torch.func.jacrev(coupling)(field)

    def large(field: Tensor) -> Tensor:
        found = SphericalSpins.create(field, coupling(field), scale=scale).saddle_point()
        return components * found.log_partition / scale

    found = SphericalSpins.create(field, coupling(field), scale=scale).saddle_point()
    collective = torch.einsum("mn,mnia->ia", components * found.correlation, slopes)
    total = torch.func.grad(large)(field)
    yield close("many components: −dF/dh and ⟨σ⟩ + Σ⟨σ_m·σ_n⟩∂J_mn/∂h", total, found.mean + collective)
    numerical = differences(lambda flat: large(flat.reshape(field.shape)), field.flatten()).reshape(field.shape)
    yield close("many components: by differences", numerical, total, components * GRADIENT_BY_DIFFERENCES)
    yield at_least("share of the collective term", collective.norm() / total.norm(), CLOSED_FORM)

    # An Ising spin of field βh and couplings 2βJ: E counts every pair twice.
    ising = SpinModel.create(Spin.create(scale * field[:, 0]), 2 * scale * coupling(field)).exact()
    states = spin_states(spins)

    def log_weights(field: Tensor) -> Tensor:
        """Of Ising spins in the first components of the fields."""
        interaction = ((states @ coupling(field)) * states).sum(-1)
        return scale * (interaction + states @ field[:, 0])

    average = ising.mean[:, 0]
    pairs = ising.covariance[:, 0, :, 0] + average[:, None] * average
    drive = torch.zeros_like(field)
    drive[:, 0] = average
    wanted = drive + torch.einsum("mn,mnia->ia", pairs, slopes)

    def exact(flat: Tensor) -> Tensor:
        return torch.logsumexp(log_weights(flat.reshape(field.shape)), 0) / scale

    numerical = differences(exact, field.flatten()).reshape(field.shape)
    yield close(
        f"{spins} Ising spins enumerated: −dF/dh by differences and the two terms",
        numerical,
        wanted,
        GRADIENT_BY_DIFFERENCES,
    )
