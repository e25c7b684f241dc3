"""Spin models against enumeration, closed forms, and the order at which approximations must fail (B13, B14)."""

import itertools
import math

import pytest
import torch
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row

from massieu.energy.spins import SpinModel
from massieu.errors import ConvergenceError
from massieu.measures import Bernoulli, Categorical, Gaussian, Poisson, Sphere, Spin


def couplings(number, strength=1.0, size=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (number, number) if size is None else (number, number, size, size)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    transposed = drawn.mT if size is None else drawn.permute(1, 0, 3, 2)
    coupling = strength * (drawn + transposed) / math.sqrt(8 * number)
    index = torch.arange(number)
    coupling[index, index] = 0
    return coupling


def fields(number, seed=1):
    return 0.4 * torch.randn(number, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ising(strength=1.0, number=8):
    return SpinModel.create(Spin.create(fields(number)), couplings(number, strength))


def by_hand(model, number=8):
    """Means, covariance and log Z of Ising spins, with plain loops over states."""
    total, first, second = 0.0, torch.zeros(number).double(), torch.zeros(number, number).double()
    prior = 1.0
    field = model.site.field.flatten()
    for b in field.tolist():
        prior *= 2 * math.cosh(b)
    coupling = model.coupling[:, :, 0, 0]
    for signs in itertools.product((-1.0, 1.0), repeat=number):
        s = torch.tensor(signs).double()
        weight = math.exp((0.5 * s @ coupling @ s + field @ s).item()) / prior
        total += weight
        first += weight * s
        second += weight * torch.outer(s, s)
    mean = first / total
    return mean, second / total - torch.outer(mean, mean), math.log(total)


def test_exact_results_of_spins():
    model = ising()
    mean, covariance, log_z = by_hand(model)
    magnetisation = model.exact()
    assert torch.allclose(magnetisation.mean.flatten(), mean)
    assert torch.allclose(magnetisation.covariance.reshape(8, 8), covariance)
    assert abs(magnetisation.log_partition.item() - log_z) < 1e-12


@pytest.mark.parametrize("kind", ["Bernoulli", "Categorical"])
def test_exact_results_of_other_sites(kind):
    """log Z generates the means: its gradient in the sites' fields is theirs."""
    size = 1 if kind == "Bernoulli" else 3
    coupling = couplings(5, size=size)

    def model(eta):
        if kind == "Bernoulli":
            return SpinModel.create(Bernoulli(eta), coupling)
        return SpinModel.create(Categorical(eta), coupling)

    eta = torch.randn(5, size, generator=torch.Generator().manual_seed(3)).double()
    site = model(eta).site
    magnetisation = model(eta).exact()
    # E[S] of the coupled law is ∇ of log Σ, the sites' own normalisers included.
    level = lambda point: model(point).exact().log_partition + _log_total(kind, point)  # noqa: E731
    mean = torch.func.grad(level)(eta)
    assert torch.allclose(magnetisation.mean, mean)
    assert magnetisation.mean.shape == site.mean(torch.zeros_like(eta)).shape


def _log_total(kind, eta):
    return torch.nn.functional.softplus(eta).sum() if kind == "Bernoulli" else torch.logsumexp(eta, -1).sum()


def errors(method, strength):
    model = ising(strength)
    exact = model.exact()
    magnetisation = getattr(model, method)()
    return (magnetisation.mean - exact.mean).abs().max().item(), abs(
        (magnetisation.log_partition - exact.log_partition).item()
    )


@pytest.mark.parametrize(("method", "order", "level_order"), [("mean_field", 2, 2), ("tap", 3, 3)])
def test_errors_scale_as_theory_says(method, order, level_order):
    strong, weak = errors(method, 0.4), errors(method, 0.1)
    for part, power in ((0, order), (1, level_order)):
        slope = math.log(strong[part] / weak[part]) / math.log(4)
        assert power - 0.3 < slope < power + 1.2, (method, part, slope)


def test_tap_is_the_textbook_equation():
    model = ising(0.8)
    m = model.tap().mean.flatten()
    coupling, field = model.coupling[:, :, 0, 0], model.site.field.flatten()
    wanted = torch.tanh(coupling @ m + field - m * (coupling.square() @ (1 - m.square())))
    assert torch.allclose(m, wanted, atol=1e-9)


def test_mean_field_bounds_log_z_from_below():
    for seed in range(5):
        model = SpinModel.create(Spin.create(fields(6, seed)), couplings(6, 1.0, seed=seed))
        assert model.mean_field().log_partition <= model.exact().log_partition + 1e-12


def test_linear_response_is_the_derivative_of_the_means():
    for method in ("mean_field", "tap"):
        covariance = getattr(ising(0.8), method)().covariance.reshape(8, 8)
        coupling = couplings(8, 0.8)

        def mean(field, method=method, coupling=coupling):
            return getattr(SpinModel.create(Spin.create(field), coupling), method)().mean.flatten()

        step, direction = 1e-5, fields(8, 1)
        difference = mean(fields(8) + step * direction) - mean(fields(8) - step * direction)
        assert torch.allclose(covariance @ direction, difference / (2 * step), atol=1e-7)


def test_tap_response_is_nearer_to_the_covariance():
    model = ising(1.0)
    exact = model.exact().covariance
    naive, second = ((getattr(model, name)().covariance - exact).abs().max() for name in ("mean_field", "tap"))
    assert second < 0.5 * naive


def gaussian(number=5, size=2):
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(number, size, size, generator=generator, dtype=torch.float64)
    covariance = factor @ factor.mT + 0.5 * torch.eye(size).double()
    location = torch.randn(number, size, generator=generator, dtype=torch.float64)
    return SpinModel.create(Gaussian.create(location, covariance), 0.1 * couplings(number, size=size))


def test_gaussian_sites_in_closed_form():
    model = gaussian()
    covariance, location = model.site.covariance, model.site.location
    joint = torch.block_diag(*torch.linalg.inv(covariance)) - model.coupling.transpose(1, 2).reshape(10, 10)
    pull = torch.linalg.solve(covariance, location.unsqueeze(-1)).flatten()
    exact = model.exact()
    assert torch.allclose(exact.mean.flatten(), torch.linalg.inv(joint) @ pull)
    assert torch.allclose(exact.covariance.reshape(10, 10), torch.linalg.inv(joint))
    draws = model.site.sample(torch.zeros(5, 2).double(), (200_000,), generator=torch.Generator().manual_seed(1))
    weight = model.interaction(draws).exp()
    error = weight.std() / weight.mean() / math.sqrt(200_000)
    assert abs(weight.mean().log() - exact.log_partition) < 5 * error


@pytest.mark.parametrize("method", ["mean_field", "tap"])
def test_gaussian_sites_have_exact_means_and_no_echo(method):
    """The Onsager term cannot change the mean of Gaussian spins (B14, trap 31)."""
    model = gaussian()
    exact = model.exact()
    magnetisation = getattr(model, method)()
    assert torch.allclose(magnetisation.mean, exact.mean, atol=1e-9)
    assert torch.allclose(magnetisation.covariance, exact.covariance, atol=1e-9)


def test_vector_spins_on_the_sphere():
    """Two sites on the sphere in three dimensions: log Z = log (sinh j / j), and no mean."""
    coupling = torch.tensor([[0.0, 0.5], [0.5, 0.0]]).double()
    site = Sphere.create(dim=3).tilt(torch.zeros(3))
    stacked = torch.utils._pytree.tree_map(lambda leaf: leaf.expand(2, *leaf.shape).double().clone(), site)
    model = SpinModel.create(stacked, coupling)
    magnetisation = model.tap()
    assert magnetisation.mean.abs().max() < 1e-9
    wanted = math.log(math.sinh(0.5) / 0.5)
    # Second order: ¼ Σ tr(J C J C) = j²/6, the series' first term; the next is j⁴/180.
    assert abs(magnetisation.log_partition.item() - 0.25 / 6) < 1e-9
    assert abs(magnetisation.log_partition.item() - wanted) < 2 * 0.5**4 / 180


def test_gradients_through_the_fixed_point():
    coupling = couplings(4, 0.6)

    def level(field):
        return SpinModel.create(Spin.create(field), coupling).mean_field().log_partition

    check_derivatives(level, [fields(4)], second=False, eps=1e-5)
    # The mean field's log Z is stationary in the means, so its gradient is the mean itself, the sites' own share apart.
    field = fields(4).requires_grad_()
    (slope,) = torch.autograd.grad(level(field), field)
    model = SpinModel.create(Spin.create(field.detach()), coupling)
    assert torch.allclose(slope, model.mean_field().mean.flatten() - torch.tanh(field.detach()), atol=1e-8)


def test_a_glassy_model_says_that_it_did_not_converge():
    model = SpinModel.create(Spin.create(0.01 * fields(40)), couplings(40, 40.0))
    magnetisation = model.tap(max_steps=30, throw=False)
    assert magnetisation.solution.status.item() != 0
    with pytest.raises(ConvergenceError, match="residual"):
        model.tap(max_steps=30)


@every_row(
    ("call", "error", "message"),
    [
        (lambda: SpinModel.create("spin", couplings(2)), TypeError, "got 'spin'"),
        (lambda: SpinModel.create(Spin.create(dim=3), couplings(2).float()), ValueError, r"\(3, 3\) .* got \(2, 2\)"),
        (lambda: SpinModel.create(Spin.create(dim=2), torch.ones(2, 2)), ValueError, "couple to itself"),
        (lambda: SpinModel.create(Spin.create(dim=2), torch.tensor([[0.0, 1.0], [0.5, 0.0]])), ValueError, "transpose"),
        (
            lambda: SpinModel.create(Spin.create(dim=2), torch.tensor([[0.0, math.nan], [0.5, 0.0]])),
            ValueError,
            "finite",
        ),
        (
            lambda: SpinModel.create(Poisson.create(torch.ones(3, 1)), couplings(3).float()).exact(),
            ValueError,
            "infinitely many",
        ),
        (
            lambda: SpinModel.create(Spin.create(torch.zeros(30)), couplings(30).float()).exact(),
            ValueError,
            "at most 2\\^20",
        ),
        (
            lambda: SpinModel.create(Gaussian.create(torch.zeros(3, 1), torch.ones(3)), couplings(3, 9.0).float()),
            ValueError,
            "smallest eigenvalue is -",
        ),
    ],
)
def test_bad_models(call, error, message):
    with pytest.raises(error, match=message):
        call()
