"""Token-cloud observables against NumPy, SciPy and clouds whose numbers are known."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import pdist
from scipy.stats import entropy
from tests.support.rows import every_row

from massieu.population import covariance_spectrum, effective_rank, log_determinant, pairwise_distance

clouds = st.builds(
    lambda seed, n, d, scale, offset: (
        scale * np.random.default_rng(seed).standard_normal((n, d)) + offset * np.ones((n, d))
    ),
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(2, 40),
    d=st.integers(1, 30),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    offset=st.sampled_from([0.0, 1.0, -50.0]),
)


@given(clouds)
def test_agrees_with_explicit_numpy(cloud):
    points = torch.from_numpy(cloud)
    n, d = cloud.shape
    rank = min(n - 1, d)
    reference = np.sort(np.linalg.eigvalsh(np.cov(cloud, rowvar=False, bias=True).reshape(d, d)))[::-1][:rank]
    spectrum = covariance_spectrum(points)

    assert spectrum.shape == (rank,)
    np.testing.assert_allclose(spectrum.numpy(), reference, rtol=1e-9, atol=1e-10 * reference[0])
    np.testing.assert_allclose(pairwise_distance(points).item(), pdist(cloud).mean(), rtol=1e-9)
    floored = np.maximum(reference, 1e-12 * reference.mean())
    if reference[-1] > 1e-6 * reference[0]:
        np.testing.assert_allclose(log_determinant(spectrum).item(), np.log(floored).mean(), atol=1e-8)
    shares = np.clip(reference, 0, None) / reference.sum()
    np.testing.assert_allclose(effective_rank(spectrum).item(), math.exp(entropy(shares)), rtol=1e-9)


@every_row(("n", "d"), [(5, 9), (9, 9), (10, 9), (200, 9)])
def test_trace_and_length_on_either_route(n, d):
    points = torch.randn(3, n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    spectrum = covariance_spectrum(points)
    assert spectrum.shape == (3, min(n - 1, d))
    torch.testing.assert_close(spectrum.sum(-1), points.var(-2, correction=0).sum(-1))
    assert (spectrum.diff(dim=-1) <= 0).all()


def test_isotropic_gaussian():
    n = 40_000
    d = 8
    scale = 3.0
    points = scale * torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    spectrum = covariance_spectrum(points)
    # E log det of a Wishart matrix deviates from log σ² by O(d/n); its standard deviation per direction is √(2/(n d)).
    assert abs(log_determinant(spectrum).item() - math.log(scale**2)) < 5 * math.sqrt(2 / (n * d)) + d / n
    assert effective_rank(spectrum).item() == pytest.approx(d, rel=1e-3)
    # Distance of two independent draws: 2σ Γ((d + 1)/2)/Γ(d/2).
    expected = 2 * scale * math.gamma((d + 1) / 2) / math.gamma(d / 2)
    assert pairwise_distance(points[:2000]).item() == pytest.approx(expected, rel=0.02)


def test_rank_one_cloud():
    direction = torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64)
    points = torch.tensor([-1.0, 0.0, 1.0, 2.0], dtype=torch.float64)[:, None] * direction
    spectrum = covariance_spectrum(points)
    torch.testing.assert_close(spectrum, torch.tensor([25 * 1.25, 0, 0], dtype=torch.float64), atol=1e-13, rtol=1e-13)
    assert effective_rank(spectrum).item() == pytest.approx(1, abs=1e-12)
    # The two empty directions sit at the floor, relative to the mean eigenvalue.
    mean = 25 * 1.25 / 3
    expected = (math.log(25 * 1.25) + 2 * math.log(1e-12 * mean)) / 3
    assert log_determinant(spectrum).item() == pytest.approx(expected, abs=1e-9)
    assert pairwise_distance(points).item() == pytest.approx(5 * 10 / 6)


def test_orthonormal_simplex():
    n = 6
    d = 10
    points = torch.eye(d, dtype=torch.float32)[:n]
    spectrum = covariance_spectrum(points)
    torch.testing.assert_close(spectrum, torch.full((n - 1,), 1 / n, dtype=torch.float64))
    assert effective_rank(spectrum).item() == pytest.approx(n - 1)
    assert log_determinant(spectrum).item() == pytest.approx(-math.log(n))
    assert pairwise_distance(points).item() == pytest.approx(math.sqrt(2))


@every_row("n", [1, 2, 7])
@every_row("dtype", [torch.float32, torch.bfloat16])
def test_collapsed_cloud_has_defined_values(n, dtype):
    points = torch.tensor([0.1, -7.3, 1e4], dtype=dtype).expand(2, n, 3)
    spectrum = covariance_spectrum(points)
    assert (spectrum == 0).all()
    assert pairwise_distance(points).tolist() == [0, 0]
    assert effective_rank(spectrum).tolist() == [0, 0]
    assert log_determinant(spectrum).tolist() == [-math.inf, -math.inf]


@every_row("n", [1, 3, 12])
def test_a_broken_cloud_is_nan_and_leaves_its_neighbours_alone(n):
    points = torch.randn(3, n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = covariance_spectrum(points[[0, 2]])
    points[1, 0, 0] = math.inf
    spectrum = covariance_spectrum(points)
    torch.testing.assert_close(spectrum[[0, 2]], expected)
    distance = pairwise_distance(points)
    assert distance[[0, 2]].isfinite().all()
    assert distance[1].isnan()
    if n > 1:
        assert spectrum[1].isnan().all()
        assert effective_rank(spectrum)[1].isnan()
        assert log_determinant(spectrum)[1].isnan()


def test_a_large_common_offset_costs_no_accuracy():
    points = torch.randn(20, 30, generator=torch.Generator().manual_seed(4)).round(decimals=2)
    offset = torch.full((30,), 1024.0)
    moved = (points + offset).double()
    reference = np.linalg.eigvalsh(np.cov(moved.numpy(), rowvar=False, bias=True))[::-1][:19]
    np.testing.assert_allclose(covariance_spectrum(points + offset).numpy(), reference, rtol=1e-8, atol=1e-12)
    assert covariance_spectrum(points + offset).dtype == torch.float64


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"\(\*batch, n, d\).*\(3,\)"):
        pairwise_distance(torch.zeros(3))
    with pytest.raises(ValueError, match=r"\(2, 0, 3\)"):
        covariance_spectrum(torch.zeros(2, 0, 3))
    with pytest.raises(ValueError, match="scalar"):
        effective_rank(torch.tensor(1.0))


@pytest.mark.parametrize("tokens", [25, 26, 60])
def test_pairwise_distance_of_few_and_of_many_tokens(tokens):
    """Formed one by one or from inner products, far from the origin and with two tokens at one point; the same derivative."""
    cloud = np.random.default_rng(2).normal(size=(3, tokens, 7)) + 50.0
    cloud[:, 1] = cloud[:, 0]
    points = torch.tensor(cloud, requires_grad=True)
    distances = pairwise_distance(points)
    np.testing.assert_allclose(distances.detach(), [pdist(each).mean() for each in cloud], rtol=1e-9)
    (gradient,) = torch.autograd.grad(distances.sum(), points)
    differences = cloud[:, :, None] - cloud[:, None]
    norms = np.linalg.norm(differences, axis=-1, keepdims=True)
    directions = np.divide(differences, norms, out=np.zeros_like(differences), where=norms > 0)
    np.testing.assert_allclose(gradient, 2 * directions.sum(2) / (tokens * (tokens - 1)), atol=1e-12)


def test_pairwise_distance_of_many_tokens_that_are_not_finite_is_nan():
    points = torch.ones(2, 40, 3, dtype=torch.float64)
    points[1, 5, 0] = torch.inf
    assert pairwise_distance(points)[0] == 0
    assert pairwise_distance(points)[1].isnan()
