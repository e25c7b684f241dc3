"""κ from features, masked tokens and labels: against the matrices over finite latents, and risks in closed form."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from massieu.regression import transfer_estimate
from massieu.regression.transfer import _orthonormal, _rank_beyond_noise  # pyright: ignore[reportPrivateUsage]

LENGTH = 12


class Latents(NamedTuple):
    """Finite latents: G and D, a latent a column, and Λ = DΠ(GΠ)⁺."""

    masked: np.ndarray
    labels: np.ndarray

    @property
    def probe(self) -> np.ndarray:
        tangent = np.eye(self.masked.shape[1]) - 1 / self.masked.shape[1]
        return self.labels @ tangent @ np.linalg.pinv(self.masked @ tangent)

    def sample(self, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Counts of the context's tokens, the posterior, and the masked token and the label as indicators."""
        drawn = np.random.default_rng(seed)
        kinds, classes = len(self.masked), len(self.labels)
        latent = drawn.integers(self.masked.shape[1], size=count)
        tokens = np.stack([drawn.choice(kinds, size=LENGTH + 1, p=self.masked[:, z]) for z in latent])
        label = np.array([drawn.choice(classes, p=self.labels[:, z]) for z in latent])
        counts = np.stack([(tokens[:, :LENGTH] == kind).sum(1) for kind in range(kinds)], 1)
        scores = counts @ np.log(self.masked)
        posterior = np.exp(scores - scores.max(1, keepdims=True))
        posterior /= posterior.sum(1, keepdims=True)
        arrays = (counts, posterior, np.eye(kinds)[tokens[:, LENGTH]], np.eye(classes)[label])
        counts, posterior, masked, labels = (torch.tensor(each, dtype=torch.float64) for each in arrays)
        return counts, posterior, masked, labels


LATENTS = Latents(
    np.array([[0.7, 0.1, 0.1], [0.1, 0.7, 0.1], [0.1, 0.1, 0.2], [0.1, 0.1, 0.6]]),
    np.array([[0.8, 0.3, 0.1], [0.2, 0.7, 0.9]]),
)


def exact_rows(latents: Latents, count: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Posteriors, tokens and labels with noise of both signs in pairs, so that the sample has the moments of the law."""
    drawn = np.random.default_rng(0)
    posterior = np.repeat(drawn.dirichlet(np.ones(latents.masked.shape[1]), count), 4, 0)
    signs = np.tile([[1, 1], [1, -1], [-1, 1], [-1, -1]], (count, 1))
    noise = np.repeat(drawn.normal(size=(count, len(latents.masked))), 4, 0)
    masked = posterior @ latents.masked.T + signs[:, :1] * noise
    labels = posterior @ latents.labels.T + signs[:, 1:] * np.repeat(
        drawn.normal(size=(count, len(latents.labels))), 4, 0
    )
    return torch.tensor(posterior), torch.tensor(masked), torch.tensor(labels)


@pytest.mark.parametrize("kind", ["posterior", "functions of the posterior"])
def test_with_the_moments_of_the_law_the_probe_is_that_of_the_matrices(kind):
    posterior, masked, labels = exact_rows(LATENTS)
    features = posterior
    if kind != "posterior":
        features = torch.cat([posterior @ torch.randn(3, 3, dtype=torch.float64), posterior.square()], 1)
    estimate = transfer_estimate(features, masked, labels, rank=2, resamples=2)
    assert estimate.probe.numpy() == pytest.approx(LATENTS.probe, abs=1e-12)
    assert estimate.condition_number == pytest.approx(np.linalg.norm(LATENTS.probe, 2), rel=1e-12)
    predicted = estimate.predict(posterior @ torch.tensor(LATENTS.masked).T)
    assert predicted.numpy() == pytest.approx((posterior @ torch.tensor(LATENTS.labels).T).numpy(), abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("features", ["posterior", "counts"])
def test_the_interval_covers_the_condition_number_of_the_matrices(features):
    """Were the intervals' level 0.8, fewer than 7 of 12 would cover with probability 0.02."""
    truth = np.linalg.norm(LATENTS.probe, 2)
    covered = 0
    ranks: list[int] = []
    for seed in range(12):
        counts, posterior, masked, labels = LATENTS.sample(1500, seed)
        given = posterior if features == "posterior" else counts
        estimate = transfer_estimate(given, masked, labels, rank=2, resamples=60)
        ranks.append(transfer_estimate(given, masked, labels, resamples=2).rank)
        covered += estimate.interval[0] <= truth <= estimate.interval[1]
        assert estimate.lost_share < 0.1
    assert covered >= 7
    assert ranks.count(2) >= 10  # a third direction is found at 1 %


def test_what_the_masked_token_does_not_carry_is_the_share_lost():
    """Two latents with one law of tokens and other labels; the features are the posterior itself, which knows them apart."""
    blind = Latents(LATENTS.masked[:, [0, 1, 1]], LATENTS.labels)
    posterior, masked, labels = exact_rows(blind, count=400)
    estimate = transfer_estimate(posterior, masked, labels, resamples=2)
    assert estimate.rank == 1
    means = (posterior @ torch.tensor(blind.labels).T).numpy()
    tokens = (posterior @ torch.tensor(blind.masked).T).numpy()
    centred, given = means - means.mean(0), tokens - tokens.mean(0)
    carried = given @ np.linalg.lstsq(given, centred, rcond=1e-10)[0]
    expected = 1 - (carried**2).sum() / (centred**2).sum()
    assert expected > 0.05
    # The noise that is taken off both has about this standard error, relative to what is predicted.
    assert estimate.lost_share == pytest.approx(expected, abs=0.1)


def test_an_error_in_the_worst_direction_attains_the_bound_and_others_stay_below():
    posterior, masked, labels = exact_rows(LATENTS)
    estimate = transfer_estimate(posterior, masked, labels, rank=2, resamples=2)
    reference = posterior @ torch.tensor(LATENTS.masked).T
    worst = torch.linalg.svd(torch.tensor(LATENTS.probe)).Vh[0]
    worse = estimate.risks(reference + 0.1 * worst, reference, masked, labels)
    assert worse.masked_excess == pytest.approx(0.01, rel=1e-10)
    assert worse.label_excess == pytest.approx(worse.bound, rel=1e-10)
    assert worse.bound == pytest.approx(0.01 * np.linalg.norm(LATENTS.probe, 2) ** 2, rel=1e-10)
    at_each = ((reference + 0.1 * worst - masked) ** 2).sum(1) - ((reference - masked) ** 2).sum(1)
    assert worse.masked_error == pytest.approx(float(at_each.std()) / len(at_each) ** 0.5)
    other = torch.randn(4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loose = estimate.risks(reference + 0.1 * other, reference, masked, labels)
    assert loose.label_excess < 0.9 * loose.bound


def test_rows_of_one_sequence_are_resampled_together():
    _, posterior, masked, labels = LATENTS.sample(200, 0)
    options = {"rank": 2, "resamples": 60}
    once = transfer_estimate(posterior, masked, labels, **options)
    copies = [torch.cat([each] * 4) for each in (posterior, masked, labels)]
    together = transfer_estimate(*copies, sequence=torch.arange(200).repeat(4) * 7, **options)
    assert together.interval == pytest.approx(once.interval, rel=1e-9)
    alone = transfer_estimate(*copies, **options)  # an interval of half the width
    assert alone.interval[1] - alone.interval[0] < 0.75 * (once.interval[1] - once.interval[0])


def two_stages(features: np.ndarray, masked: np.ndarray, labels: np.ndarray, rank: int) -> np.ndarray:
    """Λ by two regressions with a constant, the second on the first principal directions of the first one's fit."""
    columns = np.column_stack([np.ones(len(features)), features])
    tokens, targets = (columns @ np.linalg.lstsq(columns, each, rcond=None)[0] for each in (masked, labels))
    tokens, targets = tokens - tokens.mean(0), targets - targets.mean(0)
    axes = np.linalg.svd(tokens, full_matrices=False)[2][:rank]
    return (np.linalg.lstsq(tokens @ axes.T, targets, rcond=None)[0].T) @ axes


def test_the_interval_is_that_of_two_regressions_on_resampled_rows():
    counts, _, masked, labels = (each[:80] for each in LATENTS.sample(80, 3))
    counts = counts[:, :3]  # the last count follows from the others
    estimate = transfer_estimate(counts, masked, labels, rank=2, resamples=15, level=0.8)
    arrays = (counts.numpy(), masked.numpy(), labels.numpy())
    assert estimate.probe.numpy() == pytest.approx(two_stages(*arrays, rank=2), rel=1e-8, abs=1e-10)
    drawn = torch.Generator().manual_seed(0)
    norms = []
    for _ in range(15):
        rows = torch.randint(80, (80,), generator=drawn).numpy()
        norms.append(np.linalg.norm(two_stages(*(each[rows] for each in arrays), rank=2), 2))
    assert estimate.interval == pytest.approx(np.quantile(norms, [0.1, 0.9]), rel=1e-8)


def test_noise_is_taken_off_the_share_that_is_lost():
    """Twenty features of noise predict labels in the sample, which is no loss."""
    drawn = torch.Generator().manual_seed(0)
    _, posterior, masked, labels = LATENTS.sample(200, 1)
    features = torch.cat([posterior[:, :2], torch.randn(200, 20, generator=drawn, dtype=torch.float64)], 1)
    estimate = transfer_estimate(features, masked, labels, rank=1, resamples=2)
    columns = np.column_stack([np.ones(200), features.numpy()])
    tokens, targets = (columns @ np.linalg.lstsq(columns, each.numpy(), rcond=None)[0] for each in (masked, labels))
    noise = ((targets - labels.numpy()) ** 2).sum() / (200 - 22 - 1)
    carried = (((tokens - tokens.mean(0)) @ estimate.probe.numpy().T) ** 2).sum() - noise
    predicted = ((targets - targets.mean(0)) ** 2).sum() - 22 * noise
    assert 0.01 < 1 - carried / predicted < 0.99
    assert estimate.lost_share == pytest.approx(1 - carried / predicted, rel=1e-8)


def bartlett_rank(features: np.ndarray, masked: np.ndarray) -> int:
    """Canonical correlations by the covariances, and Bartlett's χ² for those that are left."""
    size = features.shape[1]
    covariance = np.cov(np.column_stack([features, masked]), rowvar=False)
    own, cross, other = covariance[:size, :size], covariance[:size, size:], covariance[size:, size:]
    squares = np.linalg.eigvals(np.linalg.solve(own, cross) @ np.linalg.solve(other, cross.T)).real
    squares = np.sort(squares)[::-1][: min(size, masked.shape[1])]
    for rank in range(len(squares)):
        statistic = -(len(features) - 1 - (size + masked.shape[1] + 1) / 2) * np.log1p(-squares[rank:]).sum()
        if stats.chi2.sf(statistic, (size - rank) * (masked.shape[1] - rank)) > 0.01:
            return rank
    return len(squares)


def test_the_rank_is_that_of_bartletts_test():
    drawn = torch.Generator().manual_seed(0)
    ranks = set()
    for _ in range(60):
        features, noise = (torch.randn(60, 3, generator=drawn, dtype=torch.float64) for _ in range(2))
        masked = features * torch.tensor([2.0, 0.45, 0.0]).double() + noise  # the second one is found now and then
        rank = _rank_beyond_noise(_orthonormal(features), masked)
        assert rank == bartlett_rank(features.numpy(), masked.numpy())
        ranks.add(rank)
    assert {1, 2} <= ranks


def test_directions_of_noise_are_found_as_often_as_the_level_says():
    drawn = torch.Generator().manual_seed(0)
    found = 0
    for _ in range(400):
        features, masked = (torch.randn(60, size, generator=drawn, dtype=torch.float64) for size in (3, 4))
        found += _rank_beyond_noise(_orthonormal(features), masked) > 0
    assert found <= 12  # of 400 at 1 %: more with probability 4e-4
    features = torch.randn(60, 3, generator=drawn, dtype=torch.float64)
    signal = torch.cat([features[:, :2], torch.randn(60, 2, generator=drawn, dtype=torch.float64)], 1)
    assert _rank_beyond_noise(_orthonormal(features), signal) == 2


def test_units_scale_the_condition_number():
    posterior, masked, labels = exact_rows(LATENTS)
    one = transfer_estimate(posterior, masked, labels, rank=2, resamples=2).condition_number
    for size in (1e-100, 1e100):
        scaled = transfer_estimate(size * posterior, size * masked, labels, rank=2, resamples=2)
        assert scaled.condition_number == pytest.approx(one / size, rel=1e-10)
    half = [each.half() for each in (posterior, masked, labels)]
    assert transfer_estimate(*half, rank=2, resamples=2).condition_number == pytest.approx(one, rel=0.05)


MATRIX = torch.randn(30, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
NOISE = torch.randn(30, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((MATRIX, MATRIX[:4], MATRIX), {}, "as many rows, got 30, 4 and 30"),
        ((MATRIX[:7], MATRIX[:7], MATRIX[:7]), {}, "at least 8 rows for 3 features, got 7"),
        ((MATRIX, MATRIX, MATRIX[:, 0]), {}, r"labels must have shape \(rows, columns\)"),
        ((MATRIX, MATRIX, MATRIX * torch.nan), {}, "labels must be finite"),
        ((MATRIX, NOISE, MATRIX), {}, "predict the masked tokens beyond noise"),
        ((MATRIX, torch.ones(30, 2), MATRIX), {}, "predict the masked tokens beyond noise"),
        ((torch.ones(30, 2), MATRIX, MATRIX), {}, "predict the masked tokens beyond noise"),
        ((MATRIX, MATRIX, MATRIX), {"rank": 4}, "rank must be at most 3"),
        ((MATRIX, MATRIX, MATRIX), {"level": 1.0}, "level"),
        ((MATRIX, MATRIX, MATRIX), {"sequence": torch.zeros(30, dtype=torch.long)}, "at least 2 sequences"),
        ((MATRIX, MATRIX, MATRIX), {"sequence": torch.arange(4)}, r"sequence must have shape \(30,\)"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        transfer_estimate(*arguments, **options)


def test_risks_of_other_shapes_are_refused():
    estimate = transfer_estimate(MATRIX, MATRIX, MATRIX[:, :1], resamples=2)
    with pytest.raises(ValueError, match=r"one shape \(n, 3\)"):
        estimate.risks(MATRIX, MATRIX, MATRIX[:, :2], MATRIX[:, :1])
