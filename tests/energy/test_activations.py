"""Activations: each is the gradient of its Lagrangian, and L* is its conjugate; against SciPy, NumPy and torch's norms."""

import pytest
import torch
import torch.nn.functional as F
from tests.energy.cases import ACTIVATIONS, F64, MEASURES, cloud, constant, draw
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row

from massieu import measures
from massieu.energy import SparseAtoms, activations
from massieu.energy.activations import MeasureActivation

WIDTH = 4


@every_row("name", ACTIVATIONS)
def test_outside_its_range_the_conjugate_is_infinite(name: str):
    map_ = ACTIVATIONS[name](WIDTH)
    far = 10 + draw(3, WIDTH, seed=1).abs()
    bounded = not map_.quadratic
    assert bool(map_.conjugate(far).isposinf().all()) == bounded
    if name.startswith("LayerNorm"):
        off = map_(draw(3, WIDTH)) + 1e-3
        assert map_.conjugate(off).isposinf().all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_finite_at_zero_and_far_away(name: str):
    map_ = ACTIVATIONS[name](WIDTH)
    points = torch.stack([torch.zeros(WIDTH), torch.ones(WIDTH), torch.full((WIDTH,), 1e4), 1e4 * torch.eye(WIDTH)[0]])
    for dtype in (torch.float32, F64):
        x = points.to(dtype).requires_grad_()
        value = map_.lagrangian(x)
        (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.square().sum(), x)
        for tensor in (value, slope, bend, map_(x), map_.conjugate(map_(x))):
            assert tensor.isfinite().all()
        torch.testing.assert_close(slope, map_(x), rtol=1e-4, atol=1e-5, check_dtype=False)


# --- against other libraries' maps -----------------------------------------------------------------------------------


def test_layer_norm_is_torchs():
    x, bias = draw(5, WIDTH, seed=1), draw(WIDTH, seed=2)
    ours = activations.LayerNorm.create(torch.tensor(1.7, dtype=F64), bias, eps=1e-3)
    torch.testing.assert_close(ours(x), F.layer_norm(x, (WIDTH,), torch.full((WIDTH,), 1.7, dtype=F64), bias, 1e-3))
    # A constant x is mapped to the bias.
    torch.testing.assert_close(ours(torch.full((WIDTH,), 3.0, dtype=F64)), bias)


def test_rms_norm_and_sphere_are_torchs():
    x = draw(5, WIDTH, seed=1)
    torch.testing.assert_close(activations.RMSNorm.create(1.0, eps=1e-3)(x), F.rms_norm(x, (WIDTH,), eps=1e-3))
    torch.testing.assert_close(activations.SphereProjection.create(2.0)(x), 2 * F.normalize(x, dim=-1))


def test_tanh_is_the_mean_of_signs():
    x = draw(5, WIDTH, seed=1)
    map_ = activations.Tanh.create()
    measure = measures.Spin(torch.zeros(WIDTH, dtype=F64))
    torch.testing.assert_close(map_(x), measure.mean(x))
    torch.testing.assert_close(map_.lagrangian(x), measure.log_partition(x))


def test_whitening_makes_a_cloud_white():
    points = cloud(WIDTH)
    white = activations.Whitening.of(points)(points)
    torch.testing.assert_close(white.mean(0), torch.zeros(WIDTH, dtype=F64), atol=1e-12, rtol=0)
    torch.testing.assert_close(white.T @ white / len(points), torch.eye(WIDTH, dtype=F64), atol=1e-11, rtol=0)


def test_whitening_differentiates_through_repeated_eigenvalues():
    location = torch.zeros(3, dtype=F64)
    covariance = torch.eye(3, dtype=F64).requires_grad_()
    x = draw(3, seed=1)

    def whitened(matrix):
        return activations.Whitening.create(location, 0.5 * (matrix + matrix.mT))(x)

    check_derivatives(whitened, [covariance])


# --- shapes, dtypes, input -------------------------------------------------------------------------------------------


@every_row("name", ACTIVATIONS)
def test_half_precision_is_promoted_and_vmap_is_the_batch(name: str):
    map_ = ACTIVATIONS[name](WIDTH)
    x = draw(6, WIDTH, seed=1)
    low = map_(x.bfloat16())
    torch.testing.assert_close(low.double(), map_(x.bfloat16().double()), rtol=1e-5, atol=1e-5)
    assert map_.conjugate(low.bfloat16()).isfinite().all()
    torch.testing.assert_close(torch.func.vmap(map_)(x), map_(x))
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(map_.lagrangian))(x), map_(x))


REFUSED = {
    "scalar": (lambda: activations.Scalar.create(0.0), ValueError, "positive"),
    "radius": (lambda: activations.SphereProjection.create(-1.0), ValueError, "positive"),
    "infinite radius": (lambda: activations.SphereProjection.create(float("inf")), ValueError, "finite"),
    "eps": (lambda: activations.RMSNorm.create(eps=-1.0), ValueError, "eps"),
    "a gain for each coordinate": (
        lambda: activations.LayerNorm.create(torch.ones(WIDTH), torch.zeros(WIDTH)),
        ValueError,
        "no gradient",
    ),
    "bias": (lambda: activations.LayerNorm.create(1.0, torch.full((WIDTH,), torch.nan)), ValueError, "finite"),
    "singular": (lambda: activations.Whitening.of(draw(3, WIDTH)), ValueError, "positive definite"),
    "covariance": (lambda: activations.Whitening.create(draw(3), draw(4, 4)), ValueError, r"\(3, 3\).*\(4, 4\)"),
    "width": (
        lambda: activations.LayerNorm.create(1.0, torch.zeros(WIDTH))(draw(2, 3)),
        ValueError,
        r"4.*\(2, 3\)",
    ),
    "batch": (lambda: activations.Scalar.create(torch.ones(2))(draw(3, 4)), ValueError, r"\(2,\).*\(3, 4\)"),
    "scalar x": (lambda: activations.Identity.create()(torch.tensor(1.0)), ValueError, "scalar"),
    "whole numbers": (lambda: activations.Identity.create()(torch.ones(3).long()), TypeError, "int64"),
}


@every_row("name", REFUSED)
def test_bad_input_is_one_clear_error(name: str):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()


# --- measures as activations -----------------------------------------------------------------------------------------


@every_row("name", MEASURES)
def test_a_measure_is_an_activation_by_its_mean(name: str):
    measure, x = MEASURES[name](WIDTH), draw(5, WIDTH, seed=1)
    activation = MeasureActivation.of("reference", measure)
    torch.testing.assert_close(activation(x), measure.mean(x))
    torch.testing.assert_close(activation.lagrangian(x), measure.log_partition(x))
    touching = activation.lagrangian(x) + activation.conjugate(activation(x)) - (x * activation(x)).sum(-1)
    torch.testing.assert_close(touching, torch.zeros(5, dtype=F64), atol=1e-7, rtol=0)
    assert activation.quadratic == (name == "Gaussian")
    assert MeasureActivation.of("reference", activation) is activation


def test_what_is_not_known_of_a_measure_is_said():
    variance = torch.tensor([0.5, 3.0, 1.0], dtype=F64)
    gaussian = MeasureActivation.of("reference", measures.Gaussian.create(torch.zeros(3, dtype=F64), variance))
    torch.testing.assert_close(gaussian.lipschitz, constant(3.0))
    assert MeasureActivation.of("reference", measures.Spin.create(dim=3)).lipschitz == 1
    sphere = measures.Sphere.create(2.0, dim=3)
    largest = torch.linalg.matrix_norm(sphere.fisher(torch.zeros(3)), ord=2)
    torch.testing.assert_close(MeasureActivation.of("reference", sphere).lipschitz, largest)
    with pytest.raises(measures.MissingFormError, match="mean of Bernoulli is not known"):
        _ = MeasureActivation.of("reference", measures.Bernoulli.create(torch.full((3,), 0.5))).lipschitz
    sparse = MeasureActivation.of("hidden", SparseAtoms.create(torch.eye(3)))
    with pytest.raises(measures.MissingFormError, match="conjugate of SparseAtoms"):
        sparse.conjugate(torch.ones(3) / 3)
    with pytest.raises(TypeError, match="hidden must be an activation or a measure, got 3"):
        MeasureActivation.of("hidden", 3)
