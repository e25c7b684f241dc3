"""Laws of keys: linear maps in closed form, quadrature in one dimension, volumes by finite differences in two."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from tests.population.cases import draw
from tests.support.derivatives import check_derivatives
from torch import Tensor

from massieu.duality import natural
from massieu.measures import Atoms, Exponential, Gaussian, MissingFormError, Sphere, Spin
from massieu.population import Composition, PushForward

F64 = torch.float64
ERRORS = 5
"""Standard errors allowed: chance exceeds them once in two million numbers."""


def gaussian(mean: list[float], covariance: list[list[float]]) -> Gaussian:
    return Gaussian.create(torch.tensor(mean, dtype=F64), torch.tensor(covariance, dtype=F64))


QUERIES = gaussian([0.5, -1.0], [[1.0, 0.3], [0.3, 0.5]])
KEYS = gaussian([1.0, 2.0], [[2.0, -0.5], [-0.5, 1.0]])
LINE = gaussian([0.4], [[0.8]])
TRIANGLE = Atoms.create(torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.5, 1.5]], dtype=F64), torch.tensor([0.1, 0.0, -0.3]))


def density_of_queries(q: float) -> float:
    return float(stats.norm(0.4, math.sqrt(0.8)).pdf(q))


# A Gaussian measure is a linear map ----------------------------------------------------------------------------------


def linear_law():
    """N(μ + Σm, ΣCΣ)."""
    mean, matrix = np.array([1.0, 2.0]), np.array([[2.0, -0.5], [-0.5, 1.0]])
    covariance = np.array([[1.0, 0.3], [0.3, 0.5]])
    return stats.multivariate_normal(mean + matrix @ np.array([0.5, -1.0]), matrix @ covariance @ matrix)


def test_a_gaussian_law_through_a_gaussian_measure_is_that_of_a_linear_map():
    law, wanted = PushForward.create(KEYS).gaussian(QUERIES), linear_law()
    origin = torch.zeros(2, dtype=F64)
    np.testing.assert_allclose(law.mean(origin), wanted.mean, rtol=1e-13)
    np.testing.assert_allclose(law.fisher(origin), wanted.cov, rtol=1e-13)
    points = draw(5, 2) * 2 + 1
    np.testing.assert_allclose(PushForward.create(KEYS).log_prob(QUERIES, points), wanted.logpdf(points), rtol=1e-11)


def test_moments_of_draws_agree_with_the_linear_map():
    moments = PushForward.create(KEYS).pushed_moments(QUERIES, generator=torch.Generator().manual_seed(0))
    wanted = linear_law()
    assert bool(((moments.mean - torch.tensor(wanted.mean)).abs() < ERRORS * moments.mean_error).all())
    assert bool(((moments.covariance - torch.tensor(wanted.cov)).abs() < ERRORS * moments.covariance_error).all())
    # Of a Gaussian, Var of the products is C_ii C_jj + C_ij².
    diagonal = np.diag(wanted.cov)
    error = np.sqrt((np.outer(diagonal, diagonal) + wanted.cov**2) / 10_000)
    np.testing.assert_allclose(moments.covariance_error, error, rtol=0.1)
    np.testing.assert_allclose(moments.mean_error, np.sqrt(diagonal / 10_000), rtol=0.05)


# Other measures, in one dimension ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measure", "mean_map", "ends"),
    [
        (Spin.create(torch.tensor([0.3], dtype=F64)), lambda q: math.tanh(q + 0.3), (-1.0, 1.0)),
        (
            Atoms.create(torch.tensor([[-1.0], [0.0], [1.2]], dtype=F64)),
            lambda q: (1.2 * math.exp(1.2 * q) - math.exp(-q)) / (math.exp(1.2 * q) + math.exp(-q) + 1),
            (-1.0, 1.2),
        ),
    ],
    ids=["spin", "three keys"],
)
def test_density_and_moments_are_those_of_quadrature(measure, mean_map, ends):
    push = PushForward.create(measure)

    def expected(function) -> float:
        return integrate.quad(lambda q: function(mean_map(q)) * density_of_queries(q), -9, 9, epsabs=1e-11)[0]

    nodes, weights = np.polynomial.legendre.leggauss(300)
    keys = ends[0] + (ends[1] - ends[0]) * (nodes + 1) / 2
    density = push.log_prob(LINE, torch.tensor(keys).unsqueeze(-1)).exp().numpy() * (ends[1] - ends[0]) / 2

    def by_density(function) -> float:
        return float((weights * density * function(keys)).sum())

    assert by_density(np.ones_like) == pytest.approx(1, abs=1e-6)
    assert by_density(lambda k: k) == pytest.approx(expected(lambda k: k), abs=1e-6)
    moments = push.pushed_moments(LINE, generator=torch.Generator().manual_seed(1))
    mean = expected(lambda k: k)
    variance = expected(lambda k: (k - mean) ** 2)
    assert abs(float(moments.mean) - mean) < ERRORS * float(moments.mean_error)
    assert abs(float(moments.covariance) - variance) < ERRORS * float(moments.covariance_error)


def test_the_density_of_spins_in_closed_form():
    """log N(artanh k − f) − log(1 − k²)."""
    keys = torch.tensor([[-0.99], [0.0], [0.7]], dtype=F64)
    density = PushForward.create(Spin.create(torch.tensor([0.3], dtype=F64))).log_prob(LINE, keys)
    wanted = stats.norm(0.4, math.sqrt(0.8)).logpdf(np.arctanh(keys.numpy()) - 0.3) - np.log1p(-(keys.numpy() ** 2))
    np.testing.assert_allclose(density, wanted[:, 0], rtol=1e-10)


# Two dimensions ------------------------------------------------------------------------------------------------------


def test_volumes_are_those_of_finite_differences():
    key = torch.tensor([0.8, 0.5], dtype=F64)
    step = 1e-5
    columns = [
        (natural(TRIANGLE, key + step * unit) - natural(TRIANGLE, key - step * unit)) / (2 * step)
        for unit in torch.eye(2, dtype=F64)
    ]
    volume = abs(np.linalg.det(np.stack([column.numpy() for column in columns])))
    query = natural(TRIANGLE, key).numpy()
    wanted = stats.multivariate_normal([0.5, -1.0], [[1.0, 0.3], [0.3, 0.5]]).logpdf(query) + math.log(volume)
    density = PushForward.create(TRIANGLE).log_prob(QUERIES, key)
    assert float(density) == pytest.approx(wanted, rel=1e-7)


@pytest.mark.medium
def test_derivatives_in_keys_law_and_measure():
    def function(keys: Tensor, location: Tensor, points: Tensor) -> Tensor:
        law = Gaussian.create(location, torch.eye(2, dtype=F64))
        return PushForward.create(Atoms.create(points)).log_prob(law, keys)

    keys = torch.tensor([[0.8, 0.5], [1.0, 0.2]], dtype=F64)
    check_derivatives(function, (keys, draw(2), TRIANGLE.points))


def test_where_no_query_leads():
    push = PushForward.create(TRIANGLE)
    keys = torch.tensor([[5.0, 5.0], [0.0, 0.0], [math.nan, 0.0], [0.8, 0.5]], dtype=F64, requires_grad=True)
    location = torch.tensor([0.5, -1.0], dtype=F64, requires_grad=True)
    density = push.log_prob(Gaussian.create(location, torch.eye(2, dtype=F64)), keys)
    assert density[:2].tolist() == [-math.inf, -math.inf]
    assert bool(density[2].isnan())
    gradient, shared = torch.autograd.grad(density[3], [keys, location])
    assert bool(shared.isfinite().all())
    assert bool(gradient[3].isfinite().all())
    assert not bool(gradient[:2].any())


def test_it_composes_and_takes_other_laws():
    twice = Composition.repeat(PushForward.create(KEYS), 2).gaussian(QUERIES)
    matrix = np.array([[2.0, -0.5], [-0.5, 1.0]])
    once = linear_law()
    np.testing.assert_allclose(twice.fisher(torch.zeros(2, dtype=F64)), matrix @ once.cov @ matrix, rtol=1e-12)
    push = PushForward.create(Spin.create(torch.zeros(1)))
    law = Exponential.create(2.0)
    density = push.log_prob(law, torch.tensor([[0.5], [-0.5]]))
    wanted = math.log(2) - 2 * math.atanh(0.5) - math.log(0.75)
    assert density.tolist() == [pytest.approx(wanted, rel=1e-5), -math.inf]
    assert push.log_prob(law, torch.empty(0, 1)).shape == (0,)


def test_errors_say_what_is_needed():
    with pytest.raises(MissingFormError, match="is not affine"):
        PushForward.create(TRIANGLE).gaussian(QUERIES)
    with pytest.raises(TypeError, match="measure must be a"):
        PushForward.create(torch.ones(2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="measure must be one measure on vectors, got batch"):
        PushForward.create(Atoms.create(draw(2, 3, 2)))
    with pytest.raises(ValueError, match="law must be one law on vectors of 2 numbers"):
        PushForward.create(KEYS).log_prob(LINE, draw(3, 2))
    with pytest.raises(ValueError, match=r"keys must have shape \(\*items, 2\), got \(3, 3\)"):
        PushForward.create(KEYS).log_prob(QUERIES, draw(3, 3))
    flat = Atoms.create(torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    with pytest.raises(ValueError, match="Atoms: its support lies in a subspace, where keys have no density"):
        PushForward.create(flat).log_prob(QUERIES, torch.tensor([0.5, 0.5]))
    with pytest.raises(ValueError, match="draws must be a whole number, at least 2"):
        PushForward.create(KEYS).pushed_moments(QUERIES, draws=1)
    assert PushForward.create(Sphere.create(1.0, dim=3))(draw(4, 3)).shape == (4, 3)
