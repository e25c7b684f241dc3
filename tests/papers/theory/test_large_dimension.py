"""Spherical spins against Bessel functions, quadrature and differences (B15)."""

import math

import pytest
import torch
from scipy.special import gammaln, ive
from tests.support.rows import every_row

from massieu.energy import SpinModel
from massieu.errors import ConvergenceError
from massieu.measures import Sphere
from massieu.papers.theory import SphericalSpins
from massieu.solve import Status


def spins(number=4, size=6, scale=0.8, seed=0, batch=()):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(*batch, number, number, generator=generator, dtype=torch.float64)
    coupling = (drawn + drawn.mT) / (4 * math.sqrt(number)) * (1 - torch.eye(number).double())
    field = torch.randn(*batch, number, size, generator=generator, dtype=torch.float64)
    return SphericalSpins.create(field, coupling, scale=scale)


def alone(size, scale, strength):
    """Mean length over √D and D⁻¹ log Z of one spin in the field strength·√D·e₁, by SciPy's Bessel functions."""
    kappa, order = scale * size * strength, size / 2 - 1
    mean = ive(order + 1, kappa) / ive(order, kappa)
    level = math.log(ive(order, kappa)) + kappa + order * math.log(2 / kappa) + gammaln(order + 1)
    return mean, level / size


@every_row(("size", "error"), [(8, 0.0075), (64, 0.0010), (512, 0.0001)])
def test_one_spin_is_bessels_ratio_to_order_one_over_d(size, error):
    scale, field = 0.7, torch.zeros(1, size).double()
    field[0, 0] = 0.6 * math.sqrt(size)
    result = SphericalSpins.create(field, torch.zeros(1, 1).double(), scale=scale).saddle_point()
    mean, level = alone(size, scale, 0.6)
    missed = result.mean[0, 0].item() / math.sqrt(size) - mean
    assert abs(abs(missed) - error) < 5e-5
    assert abs(result.log_partition.item() - level) < 1 / size
    assert abs(result.mean[0, 1:]).max() == 0


def test_the_numbers_of_theory():
    field = torch.zeros(1, 512).double()
    field[0, 0] = 0.6 * math.sqrt(512)
    mean, level = alone(512, 0.7, 0.6)
    result = SphericalSpins.create(field, torch.zeros(1, 1).double(), scale=0.7).saddle_point()
    length = result.mean[0, 0].item() / math.sqrt(512)
    assert (round(mean, 5), round(level, 5)) == (0.3644, 0.08183)
    assert (round(length, 5), round(result.log_partition.item(), 5)) == (0.36427, 0.08181)
    assert round(0.7 * length, 5) == 0.25499  # ∂log Z/∂h without 1/β, as it was published


@pytest.mark.parametrize(("size", "allowed"), [(16, 0.08), (256, 0.005)])
def test_two_spins_by_quadrature_over_their_angle(size, allowed):
    """Without fields Z = E e^{2βJD cos}: the density of the cosine is (1 − c²)^{(D−3)/2}."""
    scale, coupling = 0.9, 0.7
    matrix = torch.tensor([[0.0, coupling], [coupling, 0.0]]).double()
    result = SphericalSpins.create(torch.zeros(2, size).double(), matrix, scale=scale).saddle_point()
    cosine = torch.linspace(-1, 1, 200_001).double()[1:-1]
    log_p = (size - 3) / 2 * torch.log1p(-cosine.square())
    tilted = log_p + 2 * scale * coupling * size * cosine
    level = (torch.logsumexp(tilted, 0) - torch.logsumexp(log_p, 0)) / size
    angle = (torch.softmax(tilted, 0) * cosine).sum()
    assert abs(result.log_partition - level) < allowed
    assert abs(result.correlation[0, 1] - angle) < allowed
    # Of order 1/D, with the constant of one.
    assert abs(result.correlation[0, 1] - angle) * size < 2


def test_lengths_are_kept_and_phi_is_stationary():
    model = spins(6, 5, batch=(3,), scale=torch.tensor([0.05, 1.0, 30.0]).double())
    result = model.saddle_point()
    diagonal = result.correlation.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(diagonal, torch.ones_like(diagonal), rtol=0, atol=1e-10)
    assert bool((torch.linalg.eigvalsh(torch.diag_embed(result.multiplier) - model.coupling) > 0).all())
    for item in range(3):
        single = SphericalSpins.create(model.field[item], model.coupling[item], scale=model.scale[item])
        torch.testing.assert_close(single.saddle_point().mean, result.mean[item], rtol=1e-9, atol=1e-10)


@pytest.mark.medium
@every_row("number", [1, 2, 10, 40])
def test_newton_converges_at_all_temperatures(number):
    for scale in (1e-6, 1e-2, 1.0, 1e2, 1e6):
        for strength in (0.0, 100.0):
            model = spins(number, 8, scale)
            result = SphericalSpins.create(strength * model.field, model.coupling, scale=scale).saddle_point()
            assert int(result.solution.steps) < 60
            assert (result.correlation.diagonal() - 1).abs().max() < 1e-6


def test_the_mean_is_the_derivative_of_log_z():
    model = spins()

    def level(field, coupling=model.coupling):
        return SphericalSpins.create(field, coupling, scale=model.scale).saddle_point().log_partition

    result = model.saddle_point()
    slope = torch.func.grad(level)(model.field) * model.field.shape[-1]
    torch.testing.assert_close(slope / model.scale, result.mean, rtol=1e-9, atol=1e-10)
    # An entry of J stands for two in the derivative, of β⟨σ_i·σ_j⟩ each.
    by_coupling = torch.func.grad(lambda j: level(model.field, 0.5 * (j + j.mT)))(model.coupling)
    torch.testing.assert_close(by_coupling, model.scale * result.correlation, rtol=1e-9, atol=1e-10)
    second = torch.func.hessian(level)(model.field) * model.field.shape[-1] / model.scale**2
    torch.testing.assert_close(second, model.covariance(result), rtol=1e-8, atol=1e-9)


@pytest.mark.medium
def test_the_longitudinal_covariance_is_von_mises_and_fishers():
    size, scale = 1000, 0.7
    field = torch.zeros(1, size).double()
    field[0, 0] = math.sqrt(size)
    model = SphericalSpins.create(field, torch.zeros(1, 1).double(), scale=scale)
    result = model.covariance(model.saddle_point()).reshape(size, size)
    exact = Sphere.create(torch.tensor(math.sqrt(size)).double(), dim=size).fisher(scale * field[0])
    assert abs(result[0, 0] / exact[0, 0] - 1) < 2e-3
    assert abs(result[1, 1] / exact[1, 1] - 1) < 2e-3
    assert result[0, 0] < 0.9 * result[1, 1]


@pytest.mark.slow
def test_derivatives():
    model = spins(3, 4)

    def outputs(field, drawn, scale):
        coupling = (drawn + drawn.mT) * (1 - torch.eye(3).double())
        result = SphericalSpins.create(field, coupling, scale=scale).saddle_point()
        return result.log_partition, result.mean, result.transverse

    given = [part.clone().requires_grad_() for part in (model.field, 0.5 * model.coupling, model.scale)]
    assert torch.autograd.gradcheck(outputs, given, rtol=1e-4, atol=1e-6, fast_mode=True)
    assert torch.autograd.gradgradcheck(outputs, given, rtol=1e-3, atol=1e-5, fast_mode=True)


@pytest.mark.medium
def test_batches_by_vmap_and_float32():
    model = spins(3, 4, batch=(2,))

    def means(field, coupling):
        return SphericalSpins.create(field, coupling, scale=0.8).saddle_point().mean

    result = torch.func.vmap(means)(model.field, model.coupling)
    torch.testing.assert_close(result, model.saddle_point().mean, rtol=1e-9, atol=1e-10)

    def level(field, coupling):
        return SphericalSpins.create(field, coupling, scale=0.8).saddle_point().log_partition

    curvature = torch.func.vmap(torch.func.hessian(level))(model.field, model.coupling)
    one_by_one = [torch.func.hessian(level)(*item) for item in zip(model.field, model.coupling, strict=True)]
    torch.testing.assert_close(curvature, torch.stack(one_by_one), rtol=1e-9, atol=1e-10)
    single = means(model.field.float(), model.coupling.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), result, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_compiled():
    model = spins(4, 6)
    call = lambda field, coupling: SphericalSpins.create(field, coupling, scale=0.8).saddle_point().log_partition  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(model.field, model.coupling), call(model.field, model.coupling))
    field = model.field.clone().requires_grad_()
    got, want = (torch.autograd.grad(each(field, model.coupling), field)[0] for each in (compiled, call))
    torch.testing.assert_close(got, want)


def test_mean_field_of_the_spin_model_agrees_for_weak_couplings_and_many_components():
    """`SpinModel` counts each pair once: its couplings are twice ours times β."""
    size, number = 400, 4
    model = spins(number, size, scale=1.0)
    radius = torch.full((number,), math.sqrt(size)).double()
    weak = 0.02 * model.coupling
    result = SphericalSpins.create(model.field, weak).saddle_point()
    # The sites' measures cannot carry a field: it comes by one step of the mean-field equations.
    site = Sphere(radius, size)
    mean = site.mean(model.field)
    for _ in range(50):
        mean = site.mean(model.field + 2 * weak @ mean)
    torch.testing.assert_close(result.mean, mean, rtol=0, atol=5e-3)
    assert SpinModel.create(site, 2 * weak).interaction(mean) == pytest.approx(
        -(SphericalSpins.create(0 * model.field, weak).energy(mean)).item()
    )


def test_wrong_inputs():
    field, zero = torch.zeros(3, 4), torch.zeros(3, 3)
    ring = zero.clone()
    ring[0, 1] = 1.0
    for arguments, message in (
        ((field, ring), "symmetric, got a difference of 1"),
        ((field, torch.eye(3)), "must not couple to itself"),
        ((field, torch.full((3, 3), math.inf)), "finite"),
        ((field, torch.zeros(4, 4)), r"got \(3, 4\) and \(4, 4\)"),
        ((torch.zeros(3, 1), zero), "D at least 2"),
        ((field.long(), zero), "field must be a floating-point tensor"),
        ((field, "J"), "coupling must be a floating-point tensor, got 'J'"),
        ((field * math.nan, zero), "field must be finite"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            SphericalSpins.create(*arguments)
    for scale in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="positive and finite"):
            SphericalSpins.create(field, zero, scale=scale)
    with pytest.raises(ValueError, match=r"batch's shape \(\)"):
        SphericalSpins.create(field, zero, scale=torch.ones(2))


def test_too_few_steps_are_told():
    model = spins(10, 8, 100.0)
    with pytest.raises(ConvergenceError, match="ran out"):
        model.saddle_point(max_steps=1)
    assert int(model.saddle_point(max_steps=1, throw=False).solution.status) == Status.MAX_STEPS
