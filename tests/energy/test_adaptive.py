"""Mean field, TAP and adaptive TAP of every kind of site, against enumeration, quadrature and SciPy (B13, B14)."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import root
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row, one_in, some_slow

from massieu.energy import SpinModel, sites
from massieu.errors import ConvergenceError
from massieu.measures import Atoms, Bernoulli, Categorical, Constant, Gaussian, Poisson, Sphere, Spin
from massieu.solve import Status

METHODS = ("mean_field", "tap", "adaptive_tap")
MEAN_ORDER = {"mean_field": 2, "tap": 3, "adaptive_tap": 3}
COVARIANCE_ORDER = {"mean_field": 2, "tap": 3, "adaptive_tap": 2}


def normal(*shape, seed=5):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def couplings(number, size=1, strength=1.0, seed=0):
    drawn = normal(number, number, size, size, seed=seed)
    coupling = strength * (drawn + drawn.permute(1, 0, 3, 2)) / math.sqrt(8 * number)
    index = torch.arange(number)
    coupling[index, index] = 0
    return coupling


SITES = {
    "spins": Spin(0.4 * normal(8, 1)),
    "spins of two components": Spin(0.4 * normal(5, 2)),
    "bits": Bernoulli(0.6 * normal(8, 1)),
    "Potts": Categorical.create(logits=0.8 * normal(5, 3)),
    "Potts with a category left out": Categorical.create(
        logits=torch.tensor([[0.1, 0.4, -math.inf]]).double().expand(5, 3)
    ),
    "atoms": Atoms.create(normal(4, 5, 2), normal(4, 5, seed=6)),
}


def model_of(kind, strength):
    site = SITES[kind]
    return SpinModel.create(site, couplings(site.batch_shape[0], site.event_shape[0], strength))


def solution(magnetisation):
    assert magnetisation.solution is not None
    return magnetisation.solution


def distance(magnetisation, exact):
    return [float((a - b).norm()) for a, b in zip(magnetisation[:3], exact[:3], strict=True)]


# Mean field and TAP take time, and of spins they are tested beside the spin model.
OTHER_METHODS = {kind: METHODS[:2] for kind in SITES if kind not in ("spins", "atoms")}


@pytest.mark.medium
@some_slow(
    ("kind", "methods"),
    [
        ("atoms", METHODS),
        *((kind, ("adaptive_tap",)) for kind in SITES if kind != "atoms"),
        *OTHER_METHODS.items(),
    ],
    3,
)
def test_errors_fall_as_theory_says_for_every_kind_of_site(kind, methods):
    models = [(model, model.exact()) for model in (model_of(kind, strength) for strength in (0.2, 0.05))]
    for method in methods:
        strong, weak = (distance(getattr(model, method)(), exact) for model, exact in models)
        orders = (MEAN_ORDER[method], COVARIANCE_ORDER[method], MEAN_ORDER[method])
        for large, small, order in zip(strong, weak, orders, strict=True):
            assert math.log(large / small) / math.log(4) > order - 0.3, (method, strong, weak)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [2, 3])
def test_errors_fall_as_theory_says_on_spheres(dim):
    """Two sites of radius 1 and 1.5 in fields: the outer integral by a rule of the test's own, the inner one closed."""
    radius, field, shape = torch.tensor([1.0, 1.5]).double(), 0.8 * normal(2, dim), normal(dim, dim, seed=7)
    second = Sphere.create(radius[1], dim=dim).tilt(field[1])
    angle = torch.arange(100).double() * (2 * math.pi / 100)
    points, weight = torch.stack([angle.cos(), angle.sin()], -1), torch.full((100,), 0.01).double()
    if dim == 3:
        height, share = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(40))
        ring = (1 - height.square()).sqrt()[:, None, None] * points
        points = torch.cat([ring, height[:, None, None].expand(40, 100, 1)], -1).reshape(-1, 3)
        weight = (share[:, None] / 2 * weight).flatten()
    # Of one site's law before coupling: mean e^{x·field}.
    alone = weight * (points @ field[0]).exp()
    alone = alone / alone.sum()

    def errors(method, strength):
        coupling = torch.zeros(2, 2, dim, dim).double()
        coupling[0, 1], coupling[1, 0] = strength * shape, strength * shape.T
        pull = points @ coupling[0, 1]
        joint = alone * second.log_partition(pull).exp()
        p = joint / joint.sum()
        mean = torch.stack([p @ points, p @ second.mean(pull)])
        magnetisation = getattr(SpinModel.create(Sphere.create(radius, dim=dim).tilt(field), coupling), method)()
        return (magnetisation.mean - mean).norm(), (magnetisation.log_partition - joint.sum().log()).abs()

    for method in METHODS:
        strong, weak = errors(method, 0.1), errors(method, 0.025)
        for large, small in zip(strong, weak, strict=True):
            assert math.log(large / small) / math.log(4) > MEAN_ORDER[method] - 0.3, (method, strong, weak)


@pytest.mark.parametrize("dim", [2, 3])
def test_the_rule_on_spheres_is_exact_up_to_its_limit(dim):
    """Against the measure's own Bessel functions, where the tilt is linear."""
    site, field = Sphere.create(torch.ones(4).double(), dim=dim), normal(4, dim)
    field = field / field.norm(dim=-1, keepdim=True) * torch.tensor([[0.1], [1.0], [10.0], [sites.MAX_SHARPNESS]])
    moments = sites.site_law(site, field).tilted(field, torch.zeros(4, dim, dim).double())
    wanted = (site.log_partition(field), site.mean(field), site.fisher(field))
    for got, want in zip(moments, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_textbook_equations_by_another_solver():
    """Opper and Winther's, for ±1: m_i = tanh(Σ J_ij m_j − V_i m_i + x_i), [(Λ − J)⁻¹]_ii = 1 − m_i², Λ_i = V_i + 1/χ_ii."""
    model = model_of("spins", 1.0)
    assert isinstance(model.site, Spin)
    coupling, field = model.coupling[:, :, 0, 0].numpy(), model.site.field.flatten().numpy()

    def residual(packed):
        mean, curvature = packed.reshape(2, 8)
        variance = 1 - mean**2
        response = np.linalg.inv(np.diag(curvature + 1 / variance) - coupling)
        return np.concatenate(
            [np.tanh(coupling @ mean - curvature * mean + field) - mean, np.diag(response) - variance]
        )

    wanted = root(residual, np.concatenate([np.tanh(field), (coupling**2).sum(1)]), tol=1e-13)
    assert wanted.success
    mean, curvature = wanted.x.reshape(2, 8)
    magnetisation = model.adaptive_tap(rtol=1e-13)
    np.testing.assert_allclose(magnetisation.mean.flatten(), mean, atol=1e-11)
    np.testing.assert_allclose(solution(magnetisation).value[:, 0, 1], curvature, atol=1e-11)
    response = np.linalg.inv(np.diag(curvature + 1 / (1 - mean**2)) - coupling)
    np.testing.assert_allclose(magnetisation.covariance.reshape(8, 8), response, atol=1e-11)


def test_the_covariance_is_nearer_and_agrees_with_the_sites():
    model = model_of("spins", 1.0)
    exact, adaptive, naive = (model.exact().covariance, model.adaptive_tap().covariance, model.mean_field().covariance)
    assert (adaptive - exact).abs().max() < 0.3 * (naive - exact).abs().max()
    mean = model.adaptive_tap().mean.flatten()
    torch.testing.assert_close(adaptive.reshape(8, 8).diagonal(), 1 - mean.square())


def gaussian(degenerate=False):
    factor = normal(5, 2, 1 if degenerate else 2, seed=8)
    covariance = factor @ factor.mT + (0 if degenerate else 0.5) * torch.eye(2).double()
    return SpinModel.create(Gaussian.create(normal(5, 2, seed=9), covariance), couplings(5, 2, 0.4))


@pytest.mark.parametrize("degenerate", [False, True])
def test_gaussian_sites_are_solved_exactly_and_the_onsager_term_changes_no_mean(degenerate):
    model = gaussian(degenerate)
    exact, site = model.exact(), model.site
    assert isinstance(site, Gaussian)
    covariance = torch.block_diag(*site.covariance)
    system = torch.eye(10).double() - covariance @ model.coupling.transpose(1, 2).reshape(10, 10)
    torch.testing.assert_close(exact.mean.flatten(), torch.linalg.inv(system) @ site.location.flatten())
    torch.testing.assert_close(exact.covariance.reshape(10, 10), torch.linalg.inv(system) @ covariance)
    for method in METHODS:
        magnetisation = getattr(model, method)(rtol=1e-13)
        torch.testing.assert_close(magnetisation.mean, exact.mean, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(magnetisation.covariance, exact.covariance, rtol=1e-12, atol=1e-12)
    magnetisation = model.adaptive_tap(damping=1.0)
    assert solution(magnetisation).steps <= 2
    torch.testing.assert_close(magnetisation.mean, exact.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(magnetisation.log_partition, exact.log_partition, rtol=1e-12, atol=1e-12)
    if not degenerate:
        own = exact.covariance.diagonal(dim1=0, dim2=2).movedim(-1, 0)
        wanted = torch.linalg.inv(site.covariance) - torch.linalg.inv(own)
        torch.testing.assert_close(solution(magnetisation).value[..., 1:], wanted, rtol=1e-10, atol=1e-10)


def test_log_z_of_degenerate_gaussian_sites_by_quadrature():
    """Two sites on lines, S = location + line·t with t standard normal."""
    location, line = normal(2, 2, seed=1), normal(2, 2, 1, seed=2)
    coupling = couplings(2, 2, 0.5)
    nodes, weight = np.polynomial.hermite_e.hermegauss(60)
    t = torch.cartesian_prod(torch.from_numpy(nodes), torch.from_numpy(nodes))
    state = location + t.unsqueeze(-1) * line.squeeze(-1)
    model = SpinModel.create(Gaussian.create(location, factor=line), coupling)
    mass = torch.from_numpy(np.outer(weight, weight).flatten() / (2 * math.pi))
    wanted = (mass * model.interaction(state).exp()).sum().log()
    torch.testing.assert_close(model.exact().log_partition, wanted, rtol=1e-10, atol=1e-10)


def test_sites_that_cannot_move():
    value = normal(3, 2)
    model = SpinModel.create(Constant.create(value), couplings(3, 2))
    wanted = 0.5 * torch.einsum("ia,ijab,jb->", value, model.coupling, value)
    for magnetisation in (model.exact(), model.adaptive_tap()):
        torch.testing.assert_close(magnetisation.mean, value)
        torch.testing.assert_close(magnetisation.log_partition, wanted)
    frozen = SpinModel.create(Spin.create(torch.tensor([400.0, -400.0, 0.2]).double()), couplings(3)[:, :, 0, 0])
    torch.testing.assert_close(frozen.adaptive_tap().mean, frozen.exact().mean, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["spins", "Potts", "atoms"])
def test_gradients_of_log_z_are_moments(kind):
    """Adaptive TAP's free energy is stationary: its gradient in J_ij is (Λ − J)⁻¹_ij + ⟨S_i⟩⟨S_j⟩ᵀ, for i ≠ j."""
    site = SITES[kind]
    coupling = couplings(site.batch_shape[0], site.event_shape[0], 0.8).requires_grad_()
    magnetisation = SpinModel.create(site, coupling).adaptive_tap(rtol=1e-13)
    (slope,) = torch.autograd.grad(magnetisation.log_partition, coupling)
    wanted = magnetisation.covariance.transpose(1, 2) + torch.einsum(
        "ia,jb->ijab", magnetisation.mean, magnetisation.mean
    )
    index = torch.arange(len(wanted))
    wanted[index, index] = slope[index, index] = 0
    torch.testing.assert_close(slope, 0.5 * wanted, rtol=1e-8, atol=1e-9)


@pytest.mark.medium
@some_slow("method", METHODS, 1)
def test_derivatives_in_couplings_and_fields(method):
    upper = couplings(3)[:, :, 0, 0].triu(1)

    def mean_and_log_partition(upper, field):
        result = getattr(SpinModel(Spin(field), (upper + upper.mT)[:, :, None, None]), method)(rtol=1e-13)
        return result.mean, result.log_partition

    check_derivatives(mean_and_log_partition, (upper, 0.4 * normal(3, 1)), second=False)


@pytest.mark.slow
def test_derivatives_of_potts_and_gaussian_sites():
    coupling = couplings(3, 2, 0.7)

    def potts(logits):
        magnetisation = SpinModel.create(Categorical.create(logits=logits), coupling).adaptive_tap(rtol=1e-13)
        return magnetisation.mean, magnetisation.log_partition

    def normals(location, factor):
        magnetisation = SpinModel.create(Gaussian.create(location, factor=factor), coupling).adaptive_tap(rtol=1e-13)
        return magnetisation.mean, magnetisation.log_partition

    check_derivatives(potts, [normal(3, 2)], second=False)
    check_derivatives(normals, (normal(3, 2), 0.6 * normal(3, 2, 1)), second=False)


@pytest.mark.medium
@one_in(2, {"method": ["exact", *METHODS], "dtypes": [(torch.float64, torch.float32), (torch.float32, torch.bfloat16)]})
def test_the_wider_dtype_is_used(method, dtypes):
    """Couplings that bfloat16 holds exactly."""
    coupling = torch.tensor([[0.0, 0.5, -0.25], [0.5, 0.0, 0.125], [-0.25, 0.125, 0.0]])
    for make in (lambda x: Spin(x), lambda x: Gaussian.create(x, torch.ones(3, dtype=x.dtype))):
        field = normal(3, 1).bfloat16()
        magnetisation = getattr(SpinModel.create(make(field.to(dtypes[0])), coupling.to(dtypes[1])), method)()
        wanted = getattr(SpinModel.create(make(field.double()), coupling.double()), method)()
        assert (
            magnetisation.mean.dtype
            == magnetisation.log_partition.dtype
            == max(dtypes, key=lambda dtype: dtype.itemsize)
        )
        for got, want in zip(magnetisation[:3], wanted[:3], strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.medium
def test_a_second_derivative_is_the_response():
    """∂²log Z/∂field² is the derivative of the means, by differences."""
    coupling, field = couplings(4, 1, 0.6), 0.4 * normal(4, 1)
    level = lambda field: SpinModel(Spin(field), coupling).adaptive_tap(rtol=1e-13).log_partition  # noqa: E731
    direction, step = normal(4, 1, seed=6), 1e-5
    along = lambda field: (torch.func.grad(level)(field) * direction).sum()  # noqa: E731
    second = torch.func.grad(along)(field)
    up, down = (
        SpinModel(Spin(field + move), coupling).adaptive_tap(rtol=1e-13).mean
        for move in (step * direction, -step * direction)
    )
    # The sites' own share, log cosh x, is not in log Z.
    wanted = (up - down) / (2 * step) - direction / field.cosh().square()
    torch.testing.assert_close(second, wanted, rtol=1e-6, atol=1e-7)


def test_strong_repulsion_needs_damping_or_adaptive_tap():
    """The couplings' least eigenvalue is −19/2: plain iteration expands, though the model is anything but glassy."""
    coupling = -0.5 * (torch.ones(20, 20) - torch.eye(20)).double()
    model = SpinModel.create(Spin.create(0.4 * normal(20)), coupling)
    for method in ("mean_field", "tap"):
        assert getattr(model, method)(damping=0.1).solution.converged
        assert not getattr(model, method)(damping=1.0, max_steps=50, throw=False).solution.converged
    assert solution(model.adaptive_tap(damping=1.0)).converged


def test_a_glass_says_so():
    model = SpinModel.create(Spin.create(0.01 * normal(40)), couplings(40, 1, 60.0)[:, :, 0, 0])
    assert solution(model.adaptive_tap(max_steps=30, throw=False)).status == Status.MAX_STEPS
    with pytest.raises(ConvergenceError, match="residual"):
        model.adaptive_tap(max_steps=30)


def test_a_response_that_is_no_covariance_is_refused():
    """Gaussian sites with Σ⁻¹ − J indefinite, made past `create`: m = 0, V = J². And strongly coupled spins."""
    coupling = torch.tensor([[0.0, 2.0], [2.0, 0.0]]).double()[:, :, None, None]
    unbounded = SpinModel(Gaussian.create(torch.zeros(2, 1).double(), torch.ones(2).double()), coupling)
    field = 0.3 * torch.randn(6, generator=torch.Generator().manual_seed(59), dtype=torch.float64)
    glass = SpinModel.create(Spin.create(field), couplings(6, 1, 8.0, seed=9)[:, :, 0, 0])
    for model, damping in ((unbounded, 0.5), (glass, 0.3)):
        magnetisation = model.adaptive_tap(damping=damping, throw=False)
        assert solution(magnetisation).status == Status.NOT_ATTRACTING
        assert magnetisation.log_partition.isnan()
        with pytest.raises(ConvergenceError, match="is no covariance"):
            model.adaptive_tap(damping=damping)


@every_row(
    ("site", "message"),
    [
        (Poisson.create(torch.ones(3, 1).double()), "needs sites of finitely many states .* got Poisson"),
        (Sphere.create(torch.ones(3).double(), dim=4), "got Sphere in 4 dimensions"),
        (Spin(torch.zeros(3, 19).double()), "at most 2\\^20 states"),
        (Sphere.create(torch.ones(3).double(), dim=2).tilt(torch.full((3, 2), 200.0).double()), "at most 100, got 2"),
    ],
)
def test_sites_without_quadratic_tilts(site, message):
    model = SpinModel.create(site, couplings(3, site.event_shape[0]))
    with pytest.raises(ValueError, match=message):
        model.adaptive_tap()
