"""Resampling: expected counts, their spread, and the history that annealing keeps."""

import math

import pytest
import torch
from tests.support.rows import every_row

from massieu.inference import anneal, effective_sample_size, resample

WEIGHTS = torch.tensor([[0.5, 0.0, 0.23, 0.02, 0.25], [0.2, 0.2, 0.2, 0.2, 0.2]], dtype=torch.float64)


def counts(repeats, weights=WEIGHTS):
    """How often each particle is drawn, (repeats, groups, size)."""
    many = (7.0 * weights).log().expand(repeats, *weights.shape)
    drawn = resample(many, torch.Generator().manual_seed(0))
    assert drawn.shape == many.shape
    return torch.nn.functional.one_hot(drawn, weights.shape[-1]).sum(-2).double()


def test_particles_are_drawn_in_proportion_to_their_weights():
    found, wanted = counts(20_000), 5 * WEIGHTS
    error = found.std(0) / math.sqrt(20_000)
    assert ((found.mean(0) - wanted).abs() <= 5 * error + 1e-12).all()
    assert (found[:, 0, 1] == 0).all()
    assert (found.sum(-1) == 5).all()


def test_counts_are_rounded_up_or_down():
    found, wanted = counts(2000), 5 * WEIGHTS
    assert ((found >= (wanted - 1e-9).floor()) & (found <= (wanted + 1e-9).ceil())).all()
    assert (found[:, 1] == 1).all()  # equal weights: everybody once


def test_draws_of_many_particles_have_less_variance_than_independent_ones():
    place = torch.linspace(0, 1, 200, dtype=torch.float64)
    weights = (3 * place).exp()
    drawn = resample(weights.log().expand(500, -1), torch.Generator().manual_seed(1))
    share = weights / weights.sum()
    of_one_draw = (share * place.square()).sum() - (share * place).sum().square()
    assert place[drawn].mean(-1).var() < 0.05 * of_one_draw / 200


@every_row("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_only_what_has_weight_is_drawn(dtype):
    log_weight = torch.full((50, 1000), -math.inf, dtype=dtype)
    log_weight[:, 400:403] = 300.0
    drawn = resample(log_weight, torch.Generator().manual_seed(2))
    assert drawn.min() == 400 and drawn.max() == 402


@every_row(
    ("call", "message"),
    [
        (lambda: resample(torch.full((2, 3), -math.inf)), "all are −inf"),
        (lambda: resample(torch.tensor([0.0, math.nan])), "NaN"),
        (lambda: resample(torch.tensor([0.0, math.inf])), "inf"),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_effective_sample_size():
    assert torch.isclose(effective_sample_size(torch.zeros(7)), torch.tensor(7.0))
    assert torch.isclose(effective_sample_size(torch.tensor([-math.inf, 900.0, -math.inf])), torch.tensor(1.0))
    assert effective_sample_size(torch.full((3,), -math.inf)) == 0
    w = torch.tensor([0.1, 2.0, 0.4, 0.0])
    assert torch.isclose(effective_sample_size(w.log()), w.sum() ** 2 / w.square().sum())


# --- the history -----------------------------------------------------------------------------------------------------


def path(position, t):
    return -0.5 * (position[:, 0] - 4 * t).square()


def move(position, t, generator):
    noise = torch.randn(position.shape, generator=generator, dtype=position.dtype)
    return 4 * t + 0.6 * (position - 4 * t) + 0.8 * noise


def run(**keywords):
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(320, 1, generator=generator, dtype=torch.float64)
    return anneal(start, path, move, generator=generator, schedule=20, **keywords)


def test_importance_sampling_loses_particles_and_sequential_monte_carlo_keeps_them():
    alone, together = run(), run(groups=16)
    assert torch.allclose(alone.history.t, torch.arange(1, 21).double() / 20)
    assert (alone.history.resampled == 0).all()
    assert torch.isclose(alone.history.effective_sample_size[-1], alone.effective_sample_size)
    assert (together.history.resampled > 0).any()
    assert together.history.effective_sample_size[-1] > 2 * alone.effective_sample_size


def test_without_a_threshold_groups_change_nothing_but_the_error():
    alone, grouped = run(), run(groups=16, threshold=0.0)
    assert torch.isclose(alone.log_partition, grouped.log_partition, rtol=1e-12)
    assert torch.allclose(alone.log_weight, grouped.log_weight)
    assert not torch.isclose(alone.standard_error, grouped.standard_error)


def test_a_group_is_resampled_where_its_effective_size_falls_below_the_share():
    """Two groups of four: of the weights e^0 … and of e^x, x = 0, 3, 6, 9."""
    start = torch.tensor([0.0, 0, 0, 0, 0, 3, 6, 9], dtype=torch.float64)[:, None]
    level = lambda position, t: t * position[:, 0]  # noqa: E731
    stay = lambda position, t, generator: position  # noqa: E731
    weights = start[4:, 0].exp()
    size = weights.sum() ** 2 / weights.square().sum()
    for share, expected in ((size / 4 + 1e-9, 1), (size / 4 - 1e-9, 0)):
        found = anneal(start, level, stay, schedule=1, groups=2, threshold=share.item())
        assert found.history.resampled.tolist() == [expected]
        assert torch.isclose(found.log_partition, ((1 + weights.mean()) / 2).log())
        spread = found.log_weight[4:].max() - found.log_weight[4:].min()
        assert torch.isclose(spread, torch.tensor(0.0 if expected else 9.0, dtype=torch.float64), atol=1e-12)
        # However it is spread, the group's share of the whole weight is its estimate's.
        assert torch.isclose(found.log_weight[4:].exp().sum(), weights.sum() / (4 + weights.sum()))
