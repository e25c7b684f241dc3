"""Which differences of tokens rounding explains: where it does, effective rank is not that of rounding errors."""

import pytest
import torch
from tests.support.probing.plain import WIDTH, encoder
from tests.support.rows import every_row

import massieu
from massieu.probing.model.precision import is_one_point


@every_row("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@every_row("width", [16, 256, 1024])
def test_what_rounding_makes_of_one_token_is_one_point(dtype, width):
    """Products that are equal in exact arithmetic: factors are off by half a unit, and added up in another order each."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(width, 64, generator=generator).to(dtype)
    state = torch.randn(width, generator=generator, dtype=torch.float64)
    sums = torch.promote_types(dtype, torch.float32)
    tokens = []
    for _ in range(16):
        order = torch.randperm(width, generator=generator)
        off = torch.finfo(dtype).eps / 2 * (2 * torch.rand(width, generator=generator, dtype=torch.float64) - 1)
        factors = (state * (1 + off)).to(sums)
        tokens.append((factors[order, None] * weight[order].to(sums)).cumsum(0)[-1].to(dtype))
    points = torch.stack(tokens).double()
    assert float(points.var(0).sum()) > 0
    assert bool(is_one_point(points, dtype))
    size = float(points.square().mean().sqrt())
    rounding = max(torch.finfo(dtype).eps, points.shape[1] ** 0.5 * torch.finfo(sums).eps)
    apart = points + 4 * rounding * size * torch.randn(points.shape, generator=generator, dtype=torch.float64)
    assert not bool(is_one_point(apart, dtype))


def test_a_huge_coordinate_does_not_hide_how_the_others_vary():
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(32, 512, generator=generator)
    points[:, 7] = 3000.0
    assert not bool(is_one_point(points.bfloat16().double(), torch.bfloat16))


def test_tokens_that_are_not_finite_are_no_point():
    points = torch.zeros(3, 4, 5, dtype=torch.float64)
    points[1, 0, 0], points[2, 0, 0] = torch.nan, torch.inf
    assert is_one_point(points, torch.float32).tolist() == [True, False, False]


@pytest.mark.slow
def test_effective_ranks_of_the_probe_are_1_where_tokens_collapsed():
    """Two rows: in one the tokens are one vector but for 1e-7, in the other they differ."""
    generator = torch.Generator().manual_seed(0)
    apart = torch.randn(1, 24, WIDTH, generator=generator)
    alike = apart[:, :1] + 1e-7 * torch.randn(1, 24, WIDTH, generator=generator)
    statistics = ["effective_rank", "pairwise_distance", "stream_effective_rank"]
    for state, collapsed in ((alike, True), (apart, False)):
        result = massieu.probe(encoder(), [state], statistics=statistics)
        rows = result.layers.rows(named=True)
        for name in ("effective_rank/before", "effective_rank/after", "stream_effective_rank"):
            ranks = [row["value"] for row in rows if row["statistic"] == name]
            assert ranks
            assert all(rank == 1 if collapsed else rank > 3 for rank in ranks), ranks
        spreads = [r["value"] for r in rows if r["statistic"].startswith("pairwise_distance/")]
        assert spreads and all(each > 0 for each in spreads)


def test_tokens_that_differ_in_late_coordinates_alone_are_no_point():
    """Beside a cloud that differs in all of them, and one whose tokens are equal."""
    points = torch.ones(3, 12, 40, dtype=torch.float64)
    points[0] += 0.1 * torch.randn(12, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points[1, :, -1] += torch.arange(12)
    assert is_one_point(points, torch.float32).tolist() == [False, False, True]
