"""Gaussian: quadrature, kinds of covariance, degenerate ones, refusals."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from tests.support.memory import LargestTensor
from tests.support.rows import every_row

from massieu.measures import Gaussian, MissingFormError


def test_log_partition_by_quadrature():
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)
    weights = weights / math.sqrt(2 * math.pi)
    location = np.array([0.3, -1.2])
    factor = np.array([[0.8, 0.0], [-0.5, 0.6]])
    grid = np.stack(np.meshgrid(nodes, nodes, indexing="ij"), -1).reshape(-1, 2)
    points = location + grid @ factor.T
    mass = np.outer(weights, weights).ravel()
    measure = Gaussian.create(torch.from_numpy(location), factor=torch.from_numpy(factor))
    for eta in ([0.0, 0.0], [1.0, -2.0], [-3.0, 0.5]):
        tilt = mass * np.exp(points @ np.array(eta))
        point = torch.tensor(eta, dtype=torch.float64)
        assert measure.log_partition(point).item() == pytest.approx(math.log(tilt.sum()), abs=1e-10)
        np.testing.assert_allclose(measure.mean(point).numpy(), tilt @ points / tilt.sum(), atol=1e-10)


def test_the_number_of_dimensions_says_what_the_covariance_is():
    location = torch.randn(2, 3, dtype=torch.float64)
    eta = torch.randn(2, 4, 3, dtype=torch.float64)
    variance = torch.tensor([0.5, 2.0], dtype=torch.float64)
    isotropic = Gaussian.create(location, variance)
    diagonal = Gaussian.create(location, variance[:, None].expand(2, 3))
    full = Gaussian.create(location, torch.diag_embed(variance[:, None].expand(2, 3)))
    factored = Gaussian.create(location, factor=torch.diag_embed(variance.sqrt()[:, None].expand(2, 3)))
    for name in ("log_partition", "mean", "fisher", "entropy"):
        expected = getattr(full, name)(eta)
        for measure in (isotropic, diagonal, factored):
            torch.testing.assert_close(getattr(measure, name)(eta), expected)


def test_a_degenerate_covariance_is_allowed():
    direction = torch.tensor([[3.0], [4.0]], dtype=torch.float64)
    measure = Gaussian.create(torch.ones(2, dtype=torch.float64), factor=direction)
    across = torch.tensor([4.0, -3.0], dtype=torch.float64)
    assert measure.kl(torch.zeros_like(across), across).item() == pytest.approx(0, abs=1e-12)
    draws = measure.sample(torch.zeros(2, dtype=torch.float64), (1000,))
    torch.testing.assert_close(draws @ across, torch.ones(1000, dtype=torch.float64), atol=1e-6, rtol=0)
    point = Gaussian.create(torch.tensor([2.0]), torch.tensor(0.0))
    assert point.log_partition(torch.tensor([3.0])).item() == 6
    assert (point.sample(torch.zeros(1), (5,)) == 2).all()


def test_tilting_moves_the_mean():
    measure = Gaussian.create(torch.zeros(2), torch.tensor([1.0, 4.0]))
    tilted = measure.tilt(torch.tensor([1.0, 1.0]))
    assert isinstance(tilted, Gaussian)
    assert tilted.location.tolist() == [1.0, 4.0]


@every_row(
    ("arguments", "message"),
    [
        ({"covariance": torch.ones(4)}, r"covariance must have shape \(2,\) or \(2, 3\) or \(2, 3, 3\).*got \(4,\)"),
        ({"covariance": torch.ones(3)}, r"got \(3,\)"),
        ({}, "a covariance, a factor of it, or both"),
        ({"factor": torch.ones(3, 3)}, r"factor must have shape \(2, 3, r\).*got \(3, 3\)"),
        ({"covariance": -torch.ones(2)}, "variances must not be negative, got -1"),
        ({"covariance": torch.ones(2, 3).cumsum(0).log() - 0.1}, "negative"),
        ({"covariance": torch.tensor([1.0, math.nan])}, "finite"),
        ({"covariance": torch.ones(2, 3, 3).triu()}, "symmetric"),
        (
            {"covariance": torch.diag_embed(torch.tensor([[1.0, 1.0, -0.5]] * 2))},
            "semi-definite, got an eigenvalue of -0.5",
        ),
    ],
)
def test_bad_covariances_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Gaussian.create(torch.zeros(2, 3), **arguments)


def test_bad_locations_are_refused():
    with pytest.raises(TypeError, match="location must be real"):
        Gaussian.create(torch.zeros(2, dtype=torch.complex64), torch.tensor(1.0))
    with pytest.raises(ValueError, match="finite"):
        Gaussian.create(torch.tensor([math.inf]), torch.tensor(1.0))


def test_every_mean_of_a_full_rank_gaussian_has_a_natural_parameter():
    """Ill-conditioned covariances too; off the support of a degenerate one there is none (S9)."""
    generator = torch.Generator().manual_seed(0)
    for condition in (1e2, 1e4, 1e6, 1e8):
        axes = torch.linalg.qr(torch.randn(200, 3, 3, generator=generator, dtype=torch.float64))[0]
        spectrum = torch.tensor([1.0, condition**-0.5, 1 / condition], dtype=torch.float64)
        covariance = (axes * spectrum) @ axes.mT
        location, eta = torch.randn(2, 200, 3, generator=generator, dtype=torch.float64)
        measure = Gaussian.create(location, (covariance + covariance.mT) / 2)
        result = measure._natural(measure.mean(eta))
        torch.testing.assert_close(result, eta, atol=1e-13 * condition, rtol=0)
    across = torch.tensor([[1.0], [1.0]], dtype=torch.float64)
    line = Gaussian.create(torch.tensor([3.0, 1.0], dtype=torch.float64), factor=across)
    on, off = torch.tensor([[5.0, 3.0], [5.0, 3.001]], dtype=torch.float64)
    torch.testing.assert_close(line._natural(on), torch.tensor([1.0, 1.0], dtype=torch.float64))
    assert line._natural(off).isnan().all()


@every_row("kind", ["a number", "one a coordinate", "full", "of low rank and a number"])
def test_log_prob_is_that_of_scipy(kind):
    generator = torch.Generator().manual_seed(2)
    location, points = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((2, 6), (500, 2, 6))
    )
    root = torch.randn(2, 6, 6, generator=generator, dtype=torch.float64)
    options = {
        "a number": {"covariance": torch.tensor([0.5, 2.0], dtype=torch.float64)},
        "one a coordinate": {"covariance": root[0, :2].square()},
        "full": {"covariance": root @ root.mT},
        "of low rank and a number": {"covariance": 0.3, "factor": root[..., :2]},
    }[kind]
    law = Gaussian.create(location, **options)
    result = law.log_prob(torch.zeros(2, 6, dtype=torch.float64), points)
    covariance = law.fisher(torch.zeros(2, 6, dtype=torch.float64))
    for item in range(2):
        whole = multivariate_normal(location[item].numpy(), covariance[item].numpy())
        np.testing.assert_allclose(result[:, item].numpy(), whole.logpdf(points[:, item].numpy()), rtol=1e-9)


@pytest.mark.medium
def test_a_wide_diagonal_takes_memory_linear_in_coordinates():
    law = Gaussian.create(torch.zeros(600), torch.full((600,), 2.0))
    with LargestTensor() as largest:
        law.log_prob(torch.zeros(600), torch.ones(3, 600))
        law._support(torch.ones(3, 600))
    assert largest.numbers <= 4 * 600


def test_a_degenerate_law_has_no_density_in_any_order():
    """The covariance of a plane in five dimensions: half of the orders gave a density of rounding."""
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.float64):
        half = torch.randn(5, 2, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(20):
            order = torch.randperm(5, generator=generator)
            matrix = (half @ half.mT)[order][:, order]
            law = Gaussian.create(torch.zeros(5, dtype=dtype), matrix)
            with pytest.raises(MissingFormError, match="degenerate"):
                law.log_prob(torch.zeros(5, dtype=dtype), torch.zeros(5, dtype=dtype))
