"""Memories by distance beside mixtures of Gaussians written out, and how many patterns come back."""

import math

import pytest
import torch
from scipy import stats
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row
from torch import Tensor

from massieu.energy import HopfieldDensity, HopfieldEnergy, retrieval_curve


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_energy_is_the_mixtures_log_density():
    """Of equal weights and of given ones; at every point but for one constant, which HopfieldDensity knows."""
    points, state, beta = drawn(6, 3) * torch.arange(6).unsqueeze(-1), drawn(9, 3, seed=1), 0.7
    for log_weight in (torch.zeros(6).double(), torch.tensor([0.0, 1.0, -torch.inf, 2.0, 0.5, -1.0]).double()):
        memory = HopfieldEnergy.euclidean(points, log_weight, scale=beta)
        law = torch.distributions.MixtureSameFamily(
            torch.distributions.Categorical(logits=log_weight),
            torch.distributions.MultivariateNormal(points, torch.eye(3).double() / beta),
        )
        density = HopfieldDensity.create(memory)
        torch.testing.assert_close(density.log_prob(state), law.log_prob(state))
        distance = torch.cdist(state, points).square()
        wanted = torch.softmax(-0.5 * beta * distance + log_weight, -1) @ points
        torch.testing.assert_close(memory.step(state), wanted)
        torch.testing.assert_close(density.denoise(state), wanted)
        force = torch.autograd.functional.jacobian(lambda x, m=memory: m(x).sum(), state)
        torch.testing.assert_close(force, state - wanted)
    inputs = (points, torch.tensor(beta).double())
    check_derivatives(lambda p, b: HopfieldEnergy.euclidean(p, scale=b)(state).diff(), inputs, second=False)


def test_heads_have_their_own_scales():
    points, state, scale = drawn(2, 5, 3), drawn(2, 4, 3, seed=1), torch.tensor([0.3, 4.0]).double()
    moved = HopfieldEnergy.euclidean(points, scale=scale).step(state)
    for head in range(2):
        weights = torch.softmax(-0.5 * scale[head] * torch.cdist(state[head], points[head]).square(), -1)
        torch.testing.assert_close(moved[head], weights @ points[head])


def test_shares_of_a_pair_are_known():
    """Two points: a start beyond the middle goes to the other; so the share is Φ(distance/2σ), but for the retrieved's tail.

    At β·distance² far above 4 both are stable, and each start on a pattern's side of the middle ends there.
    """
    pair, sigma = torch.tensor([[-1.0], [1.0]], dtype=torch.float64), [0.5, 1.0, 4.0]
    generator = torch.Generator().manual_seed(3)
    curve = retrieval_curve(pair, [1, 2], sigma, scale=60.0, trials=400, generator=generator)
    assert curve.share[0].eq(1).all()  # a lone pattern always comes back
    for level, share in zip(sigma, curve.share[1], strict=True):
        wanted = stats.norm.cdf(1 / level)
        assert abs(share - wanted) < 5 * math.sqrt(wanted * (1 - wanted) / 400), (level, share)


def test_long_patterns_swallow_short_ones_by_products_alone():
    """Each pattern in the direction of the longest: by products the longest attracts all, by distances none."""
    points = torch.arange(1.0, 6.0).unsqueeze(-1) * torch.ones(2)
    options = {"scale": 40.0, "trials": 200}
    one, other = (
        retrieval_curve(points, [5], **options, euclidean=way, generator=torch.Generator().manual_seed(0))
        for way in (True, False)
    )
    assert one.share.item() == 1.0
    assert abs(other.share.item() - 0.2) < 5 * math.sqrt(0.16 / 200)


def test_intervals_are_wilsons():
    points = drawn(30, 2)
    curve = retrieval_curve(
        points, [3, 30], [0.0, 0.3], scale=60.0, trials=50, max_steps=20, generator=torch.Generator()
    )
    for share, low, high in zip(curve.share.flatten(), curve.lower.flatten(), curve.upper.flatten(), strict=True):
        wanted = stats.binomtest(round(share.item() * 50), 50).proportion_ci(method="wilson")
        assert math.isclose(low, wanted.low, abs_tol=1e-12) and math.isclose(high, wanted.high, abs_tol=1e-12)
    assert curve.counts.tolist() == [3, 30] and curve.trials == 50


def test_offsets_lengths_of_descents_and_copies():
    points = drawn(20, 3).float()
    options = {"scale": 50.0, "trials": 40}
    near, far = (
        retrieval_curve(p, [20], [0.1], **options, generator=torch.Generator().manual_seed(1))
        for p in (points, points + 4096.0)
    )
    assert abs(near.share - far.share) < 0.1
    short = retrieval_curve(points, [20], [0.1], scale=5.0, trials=40, max_steps=1, generator=torch.Generator())
    assert short.unfinished.item() > 0.9 and short.share.item() + short.unfinished.item() <= 1
    twice = retrieval_curve(points[:1].expand(4, 3), [1, 4], **options)
    assert twice.share.flatten().tolist() == [1.0, 0.0]  # which of the copies it was, nobody can tell


@pytest.mark.medium
def test_raw_digits_come_back_by_distance():
    """A hundred raw images: the dot product returns most of them as others, the distance none."""
    datasets = pytest.importorskip("sklearn.datasets")
    images = torch.tensor(datasets.load_digits().data)
    shares = [
        retrieval_curve(images, [100], scale=1.0, euclidean=way, generator=torch.Generator().manual_seed(0))
        for way in (True, False)
    ]
    assert shares[0].lower.item() > 0.95 and shares[1].upper.item() < 0.7


P = torch.ones(3, 2)


@every_row(
    "given, words, kind",
    [
        (([[1.0]], [1]), "patterns must be a floating-point tensor", TypeError),
        ((P[0], [1]), r"patterns must have shape \(N, d\)", ValueError),
        ((P[:0], [1]), r"patterns must have shape \(N, d\)", ValueError),
        ((P * torch.nan, [1]), "patterns", ValueError),
        ((P, 3), "counts must be a sequence of numbers", TypeError),
        ((P, []), "counts must be a sequence of at least one", ValueError),
        ((P, "12"), "counts must be a sequence of at least one", ValueError),
        ((P, [4]), "counts must be a whole number", ValueError),
        ((P, [1.5]), "counts must be a whole number", TypeError),
        ((P, [1], [-1.0]), "noise must be", ValueError),
        ((P, [1], [0.0], {"trials": 0}), "trials", ValueError),
        ((P, [1], [0.0], {"max_steps": 0}), "max_steps", ValueError),
        ((P, [1], [0.0], {"euclidean": "yes"}), "euclidean", TypeError),
        ((P, [1], [0.0], {"scale": -1.0}), "scale", ValueError),
        ((P, [1], [0.0], {"scale": torch.ones(200)}), "scale must be one number", ValueError),
        ((P, [1], [0.0], {"generator": 1}), "generator", TypeError),
    ],
)
def test_bad_calls(given, words, kind):
    options = given[-1] if isinstance(given[-1], dict) else {}
    with pytest.raises(kind, match=words):
        retrieval_curve(*given[: len(given) - bool(options)], **options)


@every_row(
    "given, words, kind",
    [
        (([[1.0]],), "patterns must be a floating-point tensor", TypeError),
        ((P, torch.zeros(2)), "log_weight", ValueError),
        ((P, torch.full((3,), torch.nan)), "log_weight", ValueError),
    ],
)
def test_bad_memories(given, words, kind):
    with pytest.raises(kind, match=words):
        HopfieldEnergy.euclidean(*given)
