"""Regression in context and the probe of digits: exact laws and readings by another route, and what a model may see."""

import math
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from numpy.polynomial.legendre import leggauss
from sklearn.datasets import load_digits
from sklearn.linear_model import RidgeCV
from torch.distributions import Normal, kl_divergence

from massieu.papers.experiments import digits, in_context, input_size, regression, whole_model
from massieu.papers.experiments.transformer import VectorTransformer
from massieu.papers.theory import smoothing_floor


def test_the_exact_prediction_is_the_conditional_law_of_jointly_gaussian_targets():
    features, targets = regression.sample(3, 6, torch.Generator().manual_seed(0))
    means, variances = regression.exact((features, targets))
    for x, y, mean, variance in zip(features.double(), targets.double(), means, variances, strict=True):
        joint = (x @ x.mT).numpy() + regression.NOISE**2 * np.eye(6)
        for seen in range(6):
            across = scipy.linalg.solve(joint[:seen, :seen], joint[:seen, seen]) if seen else np.zeros(0)
            assert float(mean[seen]) == pytest.approx(across @ y[:seen].numpy(), abs=1e-9)
            assert float(variance[seen]) == pytest.approx(joint[seen, seen] - across @ joint[:seen, seen])


def test_targets_are_of_the_prior_and_their_noise():
    features, targets = regression.sample(20_000, 2, torch.Generator().manual_seed(1))
    mean, variance = regression.exact((features, targets))
    standard = ((targets - mean) / variance.sqrt()).flatten()
    assert float(standard.mean()) == pytest.approx(0, abs=5 / math.sqrt(len(standard)))
    assert float(standard.square().mean()) == pytest.approx(1, abs=5 * math.sqrt(2 / len(standard)))


def test_the_divergence_is_that_of_gaussian_laws_of_one_variance():
    pairs = regression.sample(40, 5, torch.Generator().manual_seed(2))
    nothing: Any = lambda tokens: torch.zeros(*tokens.shape[:2], 1)  # noqa: E731
    divergence = regression.divergence(nothing, pairs)
    mean, variance = regression.exact(pairs)
    expected = kl_divergence(Normal(mean, variance.sqrt()), Normal(torch.zeros_like(mean), variance.sqrt())).mean(0)
    torch.testing.assert_close(divergence, expected)
    assert float(divergence[0]) == 0 and float(divergence[4]) > 0.1  # without pairs the exact mean is 0
    exact: Any = lambda tokens: mean.unsqueeze(-1)  # noqa: E731
    assert float(regression.divergence(exact, pairs).abs().max()) == 0


def test_a_model_sees_the_pairs_before_and_not_their_order():
    torch.manual_seed(0)
    model = VectorTransformer(6, 1, depth=2)
    features, targets = regression.sample(2, 7, torch.Generator().manual_seed(3))
    with torch.no_grad():
        before = in_context.predict(model, (features, targets))
        later = targets.clone()
        later[:, 4:] += 1.0
        changed = in_context.predict(model, (features, later))
        torch.testing.assert_close(changed[:, :5], before[:, :5])
        assert (changed[:, 5:] - before[:, 5:]).abs().min() > 1e-6
    tokens = in_context.tokens_of((features, targets))
    assert tokens[0, 0].tolist() == [0, 0, 0, 0, *features[0, 0].tolist()]
    assert tokens[0, 3].tolist() == [*features[0, 2].tolist(), float(targets[0, 2]), 1, *features[0, 3].tolist()]


@pytest.mark.medium
def test_what_is_learned_is_the_mean_and_nothing_from_targets_of_others():
    drawn = torch.Generator().manual_seed(0)

    def sample() -> in_context.Pairs:
        """The target is 1 more than the one before."""
        features = torch.randn(64, 3, 1, generator=drawn)
        return features, 3 * torch.rand(64, 1, generator=drawn) + torch.arange(3)

    options = {"steps": 60, "depth": 1, "step_size": 5e-3}
    models = [in_context.train_in_context(sample, drawn, shuffled=shuffled, **options) for shuffled in (False, True)]
    features, targets = sample()
    with torch.no_grad():
        error, shuffled_error = (
            (in_context.predict(m, (features, targets)) - targets)[:, 1:].square().mean() for m in models
        )
    assert float(error) < 0.2 < 0.4 < float(shuffled_error)  # the variance of a target is 9/12


def test_the_exact_mean_on_the_sphere_is_that_of_another_quadrature():
    (keys, values), _ = whole_model.sample(3, 9, torch.Generator().manual_seed(4))
    heights, weights = leggauss(80)
    angles = 2 * np.pi * np.arange(160) / 160
    height, angle = (grid.flatten() for grid in np.meshgrid(heights, angles, indexing="ij"))
    across = np.sqrt(1 - height**2)
    poles = torch.tensor(np.stack([across * np.cos(angle), across * np.sin(angle), height]))
    log_weight = torch.tensor(np.log(np.repeat(weights, 160)))
    for key, value, mean in zip(keys.double(), values.double(), whole_model.exact((keys, values)), strict=True):
        cosine = key @ poles
        functions = cosine + (3 * cosine**2 - 1) / 2
        for seen in range(9):
            misfit = (value[:seen, None] - functions[:seen]).square().sum(0) / (2 * whole_model.NOISE**2)
            assert float(mean[seen]) == pytest.approx(
                float((log_weight - misfit).softmax(0) @ functions[seen]), abs=1e-4
            )


def test_functions_of_the_sphere_have_the_power_that_the_floor_takes_and_their_own_poles():
    sample = whole_model.sample(30_000, 2, torch.Generator().manual_seed(5))
    (keys, values), function = sample
    noise, squares = values - function, function[:, 0].double().square()
    assert float(noise.std()) == pytest.approx(whole_model.NOISE, rel=0.02)
    assert float(squares.mean()) == pytest.approx(
        float(input_size.POWER.sum()), abs=5 * float(squares.std()) / len(squares) ** 0.5
    )
    torch.testing.assert_close(keys.norm(dim=-1), torch.ones(30_000, 2))
    # At one key the function is another in each context: its mean is that over poles, 0.
    assert float(function[:, 0].mean()) == pytest.approx(0, abs=5 * float(function[:, 0].std()) / 30_000**0.5)
    nothing: Any = lambda tokens: torch.zeros(*tokens.shape[:2], 1)  # noqa: E731
    error = whole_model.error(nothing, sample)
    assert error == pytest.approx(float(function[:, -1].square().mean().sqrt()))
    assert error > float(smoothing_floor(input_size.POWER, 3, input_size.FIXED).error)


def test_ridge_regression_on_the_sphere_is_the_formula():
    pairs, _ = whole_model.sample(2, 8, torch.Generator().manual_seed(6))
    estimates = whole_model._ridge(pairs, 5)
    for key, value, estimate in zip(pairs[0].double().numpy(), pairs[1].double().numpy(), estimates, strict=True):
        gram = np.exp(key[:5] @ key[:5].T) + whole_model.NOISE**2 * np.eye(5)
        assert float(estimate) == pytest.approx(np.exp(key[5] @ key[:5].T) @ np.linalg.solve(gram, value[:5]))


def test_patches_are_of_the_images_and_hidden_ones_are_not_seen():
    images, labels = digits.load_digits()
    bunch = load_digits()
    by_hand = bunch.images[7].reshape(4, 2, 4, 2).transpose(0, 2, 1, 3).reshape(16, 4) / 16
    np.testing.assert_allclose(images[7].numpy(), by_hand)
    assert labels.tolist() == bunch.target.tolist()
    hidden = digits._draw_hidden(200, 75, torch.Generator().manual_seed(0))
    assert (hidden.sum(-1) == 12).all() and hidden.float().mean(0).std() < 0.1
    other = torch.where(hidden.unsqueeze(-1), torch.rand(200, 16, 4), images[:200])
    assert digits._hide_patches(other, hidden).equal(digits._hide_patches(images[:200], hidden))
    assert digits._hide_patches(images[:200], hidden)[..., 4].equal(hidden.float())
    rows = digits._draw_labelled(labels, 50, 3, torch.Generator().manual_seed(0))
    assert rows.shape == (3, 50) and (torch.stack([labels[row].bincount(minlength=10) for row in rows]) == 5).all()
    assert all(len(row.unique()) == 50 for row in rows)


def test_the_probe_is_scikit_learns_ridge_with_the_same_choice_of_the_ridge():
    images, labels = digits.load_digits()
    features = images.flatten(1)
    rows = digits._draw_labelled(labels[:1000], 50, 2, torch.Generator().manual_seed(1))
    accuracy = digits.accuracy(features[:1000], labels[:1000], rows, features[1000:], labels[1000:])
    training = features[:1000].double().numpy()
    scaled = (features.double().numpy() - training.mean(0)) / math.sqrt(training.var(0, ddof=1).sum())
    accuracies = []
    for row in rows.tolist():
        targets = np.eye(10)[labels[row]] - 0.1
        scores = RidgeCV(alphas=digits._RIDGES, fit_intercept=False).fit(scaled[row], targets).predict(scaled[1000:])
        accuracies.append((scores.argmax(1) == labels[1000:].numpy()).mean())
    assert accuracy == pytest.approx(np.mean(accuracies), abs=2e-3)
