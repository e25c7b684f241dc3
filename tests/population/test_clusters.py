"""Clusters by leaders, against SciPy's hierarchical clustering and by hand; levels of self-attention by enumeration."""

import math

import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist, squareform
from tests.support.rows import every_row

from massieu.population.clusters import cluster_count
from massieu.population.self_attention import self_attention_levels


def draws(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_separated_groups_are_found_exactly():
    centres = 10 * draws(6, 4)
    group = torch.randint(6, (80,), generator=torch.Generator().manual_seed(1))
    points = centres[group] + 0.1 * draws(80, 4, seed=2) / 4
    expected = fcluster(linkage(points.numpy(), "single"), 1.0, "distance")
    result = cluster_count(points, radius=1.0)
    assert result.clusters == len(set(expected.tolist()))
    assert result.covered == pytest.approx(1)
    assert result.largest == pytest.approx(group.bincount().max().item() / 80)


@every_row("radius", [0.3, 1.0, 2.5])
def test_leaders_are_a_largest_separated_set(radius):
    points = draws(60, 2, seed=3)
    distance = torch.from_numpy(squareform(pdist(points.numpy())))
    leaders: list[int] = []
    for index in range(60):
        if all(distance[index, leader] > radius for leader in leaders):
            leaders.append(index)
    assert cluster_count(points, radius=radius).clusters == len(leaders)


def test_the_default_radius_goes_with_the_length_of_the_tokens():
    angle = torch.tensor([0.0, 0.05, 0.09, 0.2, math.pi], dtype=torch.float64)
    circle = torch.stack([angle.cos(), angle.sin()], -1)
    for size in (1e-3, 1.0, 1e4):
        assert cluster_count(size * circle).clusters == 3
    assert cluster_count(torch.ones(5, 3) / 7).clusters == 1
    assert cluster_count(torch.zeros(5, 3)).clusters == 1


def test_batches_limits_and_broken_tokens():
    points = torch.stack([draws(30, 3), torch.ones(30, 3).double()])
    result = cluster_count(points, radius=0.0, limit=20)
    assert result.clusters.tolist() == [20, 1]
    torch.testing.assert_close(result.covered, torch.tensor([20 / 30, 1.0], dtype=torch.float64))
    alone = cluster_count(points[:1])
    for broken in (math.nan, math.inf):
        points[1, 4, 0] = broken
        for each, own in zip(cluster_count(points), alone, strict=True):
            assert each[0] == own[0]
            assert each[1].isnan()
    assert cluster_count(torch.ones(4, 2, dtype=torch.bfloat16)).clusters == 1


def test_bad_calls():
    with pytest.raises(ValueError, match="limit must be a whole number, at least 1"):
        cluster_count(draws(3, 2), limit=0)
    with pytest.raises(ValueError, match="radius must be finite and at least 0, got -1"):
        cluster_count(draws(3, 2), radius=-1.0)
    with pytest.raises(ValueError, match="scale must be positive"):
        self_attention_levels(draws(3, 2), scale=0.0)
    with pytest.raises(ValueError, match="n, d ≥ 1"):
        self_attention_levels(draws(0, 2))


@pytest.mark.parametrize("scale", [0.2, 3.0])
def test_levels_of_self_attention_by_enumeration(scale):
    points = draws(2, 11, 3) + 1
    result = self_attention_levels(points, scale=scale)
    for item in range(2):
        scores = scale * points[item] @ points[item].T
        p = torch.softmax(scores, -1)
        uniform = torch.full_like(p, 1 / 11)
        expected = (
            scores.exp().mean(-1).log().mean(),
            (uniform * (uniform / p).log()).sum(-1).mean(),
            torch.special.entr(p).sum(-1).mean(),
            (scores.exp().sum() / (2 * scale * 11**2)).log(),
        )
        for own, wanted in zip(result, expected, strict=True):
            torch.testing.assert_close(own[item], wanted, atol=1e-10, rtol=1e-10)


def test_the_interaction_energy_does_not_overflow():
    points = 40 * torch.eye(3)
    result = self_attention_levels(points, scale=10.0)
    assert result.log_interaction_energy.item() == pytest.approx(16_000 + math.log(3 / (2 * 10 * 9)), rel=1e-6)
    assert 0 <= result.entropy.item() < 1e-30
    far = self_attention_levels(1e12 * draws(9, 3))
    assert far.entropy.item() == pytest.approx(0, abs=1e-12)  # no difference of log Z and scores of 1e24


@every_row("size", [1e-30, 1e-22, 1.0, 1e22, 1e30])
@every_row("dtype", [torch.float32, torch.float64])
def test_clusters_know_no_scale(size, dtype):
    """Squares of these lengths overflow or vanish in float32."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[9.0, 0.0], [0.0, 9.0], [-9.0, -9.0]], dtype=torch.float64)
    members = torch.arange(12) % 3
    cloud = centres[members] + torch.rand(12, 2, generator=generator, dtype=torch.float64) / 4
    for radius in (1.0 * size, None):
        result = cluster_count((size * cloud).to(dtype), radius=radius)
        assert (result.clusters.item(), result.covered.item()) == (3, pytest.approx(1.0))
