"""Laws of the keys: densities against SciPy and quadrature, and keys that are drawn from each law."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from tests.support.probing.windows import check_batches_change_nothing, drawn, mean, window

from massieu.probing.statistics import key_density
from massieu.probing.statistics.head_window import HeadWindow
from massieu.probing.statistics.key_density import REGISTER as KEY_DENSITY_REGISTER
from massieu.probing.statistics.key_density import (
    VARIANCES,
    Halves,
    halves,
    kernel_density,
    key_kernel_gain,
    key_mixture_gain,
    key_sphere_gain,
    mixture_density,
    shrunk_covariance,
    sphere_density,
)
from massieu.probing.statistics.windowed import shuffled_coordinates

H, N, D = 2, 200, 3


def window_of(key: torch.Tensor, real: int | None = None) -> HeadWindow:
    return window(drawn(len(key), key.shape[1], key.shape[2]), key, drawn(len(key), key.shape[1], 5), real=real)


def split(head_window: HeadWindow) -> Halves:
    keys = halves(head_window)
    assert keys is not None
    return keys


def test_the_shrunk_covariance_is_the_published_one():
    centred = drawn(1, 12, D).double()
    centred = centred - centred.mean(1, keepdim=True)
    x = centred[0].numpy()
    sample = x.T @ x / len(x)
    trace, square = np.trace(sample), np.trace(sample @ sample)
    share = ((1 - 2 / D) * square + trace**2) / ((len(x) + 1 - 2 / D) * (square - trace**2 / D))
    expected = (1 - min(share, 1)) * sample + min(share, 1) * trace / D * np.eye(D)
    np.testing.assert_allclose(shrunk_covariance(centred)[0].numpy(), expected, rtol=1e-12)
    alike = shrunk_covariance(torch.zeros(1, 12, D).double())
    assert torch.equal(alike, torch.zeros_like(alike))


def test_the_gaussian_is_that_of_the_raw_keys():
    keys = split(window_of(drawn(H, N, D) @ drawn(H, D, D, 1) + 4))
    for head in range(H):
        fitted = keys.fitted[head].numpy()
        covariance = shrunk_covariance(keys.fitted - keys.fitted.mean(1, True))[head]
        law = scipy.stats.multivariate_normal(fitted.mean(0), covariance)
        density = keys.gaussian()[head] - keys.log_volume[head]
        np.testing.assert_allclose(density.numpy(), law.logpdf(keys.scored[head].numpy()), rtol=1e-9)


def test_the_kernels_density_is_an_average_whose_width_leaves_one_out():
    keys = split(window_of(torch.sinh(drawn(H, 24, D))))
    log_density = kernel_density(keys, window_of(drawn(H, N, D)))
    for head in range(H):
        white = keys.white_fitted[head].numpy()
        scored = keys.white_scored[head].numpy()

        def density(points: np.ndarray, about: np.ndarray, variance: float, left_out: bool = False) -> np.ndarray:
            logs = scipy.stats.norm.logpdf(points, about[:, None], np.sqrt(variance)).sum(-1)  # (centre, point)
            if left_out:
                logs = logs[~np.eye(len(about), dtype=bool)].reshape(len(about), -1).T  # of each point, all others
            return np.logaddexp.reduce(logs, axis=0) - np.log(len(logs))

        scores = [density(white, white, variance, left_out=True).sum() for variance in VARIANCES.tolist()]
        best = float(VARIANCES[int(np.argmax(scores))])
        np.testing.assert_allclose(log_density[head].numpy(), density(scored, white, best), rtol=1e-9)


def test_the_mixture_is_a_density_and_no_worse_than_where_it_began(monkeypatch):
    centres = torch.tensor([[-4.0, 0, 0], [4, 0, 0], [0, 4, 0], [0, -4, 0]])
    key = (centres[torch.arange(N) % 4] + 0.3 * drawn(1, N, D)[0])[None]
    head_window = window_of(key)
    keys = split(head_window)
    scored = mixture_density(keys, head_window)
    of_fitted = replace(keys, scored=keys.fitted, white_scored=keys.white_fitted)
    likelihoods = []
    for steps in (0, 1, 4, 16):
        monkeypatch.setattr(key_density, "_STEPS", steps)
        likelihoods.append(float(mixture_density(of_fitted, head_window).sum()))
    assert likelihoods == sorted(likelihoods)
    # Over a grid that holds nearly all of it, the density sums to 1.
    line = torch.linspace(-8, 8, 81).double()
    grid = torch.cartesian_prod(line, line, line)[None]
    density = mixture_density(replace(keys, scored=grid, white_scored=grid), head_window).exp().sum()
    assert float(density) * 0.2**3 == pytest.approx(1, abs=0.02)
    assert scored.isfinite().all()


def test_the_spheres_density_is_von_mises_fisher_times_log_normal():
    keys = split(window_of(drawn(H, N, D) + torch.tensor([3.0, 0, 0])))
    log_density = sphere_density(keys, window_of(drawn(H, N, D))) - keys.log_volume[:, None]
    for head in range(H):
        fitted = keys.fitted[head].numpy()
        scored = keys.scored[head].numpy()
        lengths = np.linalg.norm(fitted, axis=1)
        scored_lengths = np.linalg.norm(scored, axis=1)
        mean_direction = (fitted / lengths[:, None]).mean(0)
        resultant = np.linalg.norm(mean_direction)
        kappa = resultant * (D - resultant**2) / (1 - resultant**2)
        direction = scipy.stats.vonmises_fisher(mean_direction / resultant, kappa).logpdf(
            scored / scored_lengths[:, None]
        )
        logs = np.log(lengths)
        length = scipy.stats.lognorm(s=logs.std(ddof=1), scale=np.exp(logs.mean())).logpdf(scored_lengths)
        np.testing.assert_allclose(
            log_density[head].numpy(), direction + length - (D - 1) * np.log(scored_lengths), rtol=1e-8
        )


def test_each_law_gains_on_its_own_keys_and_not_on_gaussian_ones():
    wide = 8
    centres = 6 * drawn(1, 3, wide, 1)[0]
    clusters = centres[torch.arange(N) % 3] + drawn(1, N, wide, 2)[0]
    gaussian = drawn(1, N, wide, 3)[0] @ drawn(1, wide, wide, 4)[0]
    pairs = torch.sinh(2 * drawn(1, N // 2, wide, 5)[0]).repeat(2, 1) + 0.01 * drawn(1, N, wide, 6)[0]
    sphere = torch.nn.functional.normalize(drawn(1, N, wide, 7)[0], dim=1)
    head_window = window_of(torch.stack([clusters, gaussian, pairs, sphere]))
    mixture, kernel, ball = (
        mean(measure(head_window)) for measure in (key_mixture_gain, key_kernel_gain, key_sphere_gain)
    )
    assert mixture[0] > 0.05 and mixture[1] < 0.05
    assert kernel[2] > 0.05 and kernel[1] < 0.05
    assert ball[3] > 0.05 and ball[1] < 0
    shuffled = shuffled_coordinates(head_window)
    assert mean(key_mixture_gain(shuffled))[0] < mixture[0] - 0.05


def test_shuffled_coordinates_keep_mean_covariance_and_each_coordinates_law():
    key = drawn(H, N, D) ** 3 @ drawn(H, D, D, 1) + 2
    head_window = window_of(key, real=150)
    moved = shuffled_coordinates(head_window).call.key[0].double()
    assert torch.equal(moved[:, 150:].float(), key[:, 150:])
    for head in range(H):
        before, after = key[head, :150].double(), moved[head, :150]
        np.testing.assert_allclose(after.mean(0), before.mean(0), atol=1e-5)
        axes = torch.linalg.svd(before - before.mean(0)).Vh
        laws = [((part - before.mean(0)) @ axes.mT).sort(0).values for part in (before, after)]
        np.testing.assert_allclose(laws[1], laws[0], atol=1e-4)
        assert not torch.allclose(after, before, atol=0.1)
    again = shuffled_coordinates(head_window).call.key[0].double()
    assert torch.equal(again, moved)


def test_few_keys_equal_keys_and_numbers_that_are_not_finite_have_no_law():
    key = drawn(3, 40, D)
    key[0], key[1, 3] = 1.0, torch.nan
    for measure in KEY_DENSITY_REGISTER.functions.values():
        total, count = measure(window_of(key))
        assert count[:2].tolist() == [0.0, 0.0] and count[2] == 20 and total.isfinite().all()
        assert measure(window_of(key, real=15))[1].tolist() == [0.0] * 3


@pytest.mark.medium
def test_batches_change_nothing():
    names = list(KEY_DENSITY_REGISTER.functions)
    check_batches_change_nothing("bert", names, dict.fromkeys(names[:2], "shuffled_coordinates"))
