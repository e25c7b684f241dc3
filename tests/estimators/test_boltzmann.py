"""The machine as an estimator: beside `BernoulliRBM` at equal weights, closed forms, enumeration and quadrature."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import log_expit, logsumexp
from sklearn.exceptions import NotFittedError
from sklearn.mixture import GaussianMixture
from sklearn.neural_network import BernoulliRBM
from tests.support.memory import LargestTensor
from tests.support.rows import every_row, some_slow

from massieu.energy import sites
from massieu.measures import Poisson
from massieu.sklearn import BoltzmannEstimator, boltzmann, units

RANDOM = np.random.default_rng(0)
BITS = (RANDOM.random((80, 6)) < 0.4).astype(float)
BITS[:, 3:] = BITS[:, :3]
STATES = np.array([[(code >> place) & 1 for place in range(6)] for code in range(64)], dtype=float)
NUMBERS = RANDOM.normal([[0.0, 5.0]] * 60, [[1.0, 0.5]] * 60) + 3.0 * (RANDOM.random((60, 1)) < 0.5)


def trained(table: np.ndarray, **settings: Any) -> BoltzmannEstimator:
    return BoltzmannEstimator(**{"n_components": 4, "n_iter": 20, "random_state": 0, **settings}).fit(table)


def theirs(ours: BoltzmannEstimator) -> BernoulliRBM:
    """scikit-learn's machine of the same weights."""
    machine = BernoulliRBM(len(ours.components_), random_state=0)
    machine.components_ = ours.components_
    machine.intercept_visible_, machine.intercept_hidden_ = ours.intercept_visible_, ours.intercept_hidden_
    return machine


def test_bits_as_scikit_learn_has_them():
    ours = trained(BITS, visible="bernoulli", hidden="bernoulli")
    other = theirs(ours)
    assert np.allclose(ours.transform(BITS), other.transform(BITS), atol=1e-12)
    free = other._free_energy(STATES)
    shift = ours.free_energy(STATES) - free
    assert np.allclose(shift, shift[0], atol=1e-12)  # constants
    assert np.allclose(ours.score_samples(STATES), -free - logsumexp(-free), atol=1e-12)
    assert ours.log_partition_error_ == 0
    flipped = [np.where(np.arange(6) == unit, 1 - STATES, STATES) for unit in range(6)]
    pseudo = sum(log_expit(other._free_energy(each) - free) for each in flipped)
    assert np.allclose(ours.pseudo_log_likelihood(STATES), pseudo, atol=1e-12)


@pytest.mark.medium
def test_bits_are_learned():
    """The second half repeats the first: three free bits."""
    model = trained(BITS, visible="bernoulli", hidden="spin", n_iter=200)
    share = BITS.mean(0)
    independent = (BITS * np.log(share) + (1 - BITS) * np.log(1 - share)).sum(1).mean()
    assert model.score(BITS) > 0.7 * independent
    assert np.abs(model.inverse_transform(model.transform(BITS)) - BITS).mean() < 0.2


def test_spins_and_bits_are_one_machine():
    bits, spins = trained(BITS, visible="bernoulli"), trained(2 * BITS - 1, visible="spin")
    for model, table in ((bits, STATES), (spins, 2 * STATES - 1)):
        assert np.isclose(np.exp(model.score_samples(table)).sum(), 1)
    start = BoltzmannEstimator(1, visible="spin", learning_rate=1e-9, n_iter=1, random_state=0).fit(2 * BITS - 1)
    assert np.allclose(np.tanh(start.intercept_visible_), (2 * BITS - 1).mean(0), atol=1e-6)


def test_one_hidden_unit_of_several_states_is_a_mixture_of_gaussians():
    model = trained(NUMBERS, hidden="categorical", n_components=3, residual_variance=0.3)
    spread = NUMBERS.std(0)
    variance = 0.3 * spread**2
    # Completing the square: the states' means, and their shares.
    eta = model.intercept_visible_ + model.components_
    logs = model.intercept_hidden_ + 0.5 * 0.3 * np.square(eta).sum(1)
    means = NUMBERS.mean(0) + spread * 0.3 * eta
    mixture = GaussianMixture(3, covariance_type="diag")
    mixture.means_, mixture.weights_ = means, np.exp(logs - logsumexp(logs))
    mixture.covariances_ = np.tile(variance, (3, 1))
    mixture.precisions_cholesky_ = mixture.covariances_**-0.5
    assert np.allclose(model.score_samples(NUMBERS), mixture.score_samples(NUMBERS), atol=1e-10)
    assert np.allclose(model.transform(NUMBERS), mixture.predict_proba(NUMBERS), atol=1e-10)
    assert np.allclose(model.inverse_transform(np.eye(3)), means, atol=1e-10)


@pytest.mark.medium
@every_row(
    "kind, table",
    [
        ("gaussian", NUMBERS[:, :1]),
        ("poisson", RANDOM.poisson(3.0, (60, 1)).astype(float)),
    ],
)
def test_densities_of_a_column_sum_to_one(kind: str, table: np.ndarray):
    """In the column's own units, whatever these are."""
    for unit in (1, 1000) if kind != "poisson" else (1,):
        model = trained(unit * table, visible=kind)
        if kind == "poisson":
            grid, width = np.arange(0.0, 200.0)[:, None], 1.0
        else:
            grid, width = np.linspace(unit * (table.min() - 10), unit * (table.max() + 10), 20_001, retstep=True)
            grid = grid[:, None]
        assert np.isclose(width * np.exp(model.score_samples(grid)).sum(), 1, rtol=1e-3)


@pytest.mark.medium
def test_a_table_of_several_kinds():
    counts = RANDOM.poisson(1 + 4 * BITS[:, :1]).astype(float)
    table = np.hstack([BITS[:, :2], counts])
    model = trained(table, visible=["bernoulli", "bernoulli", "poisson"], hidden="spin")
    grid = np.array([[a, b, count] for a in (0, 1) for b in (0, 1) for count in range(100)], dtype=float)
    density = np.exp(model.score_samples(grid))
    assert np.isclose(density.sum(), 1)
    drawn = model.sample(4000, n_sweeps=50)
    spread = np.sqrt(density @ np.square(grid) - np.square(density @ grid))
    assert (np.abs(drawn.mean(0) - density @ grid) < 5 * spread / 4000**0.5).all()
    moved = model.gibbs(drawn)  # the law stays
    assert (np.abs(moved.mean(0) - density @ grid) < 5 * spread / 4000**0.5).all()
    assert not np.array_equal(moved, drawn)
    assert model.score_samples([[0.5, 0, 1]]) == -np.inf


@every_row("table", [RANDOM.normal(size=(7, 40)), RANDOM.normal(size=(40, 7))])
def test_the_largest_variance_is_that_of_the_covariance(table: np.ndarray):
    """However many columns there are, no matrix is larger than the smaller side of the table."""
    wanted = np.linalg.eigvalsh(np.cov(table, rowvar=False, bias=True))[-1]
    assert np.isclose(units._largest_variance(table), wanted, rtol=1e-12)


@pytest.mark.medium
def test_wide_tables_take_memory_linear_in_columns():
    table = RANDOM.normal(size=(30, 600))
    with LargestTensor():
        trained(table[:, :2], n_iter=1)  # what is imported on first use is no memory of the table's
    tracemalloc.start()
    with LargestTensor() as largest:
        model = trained(table, n_iter=2, learning_rate=0.01)
        assert np.isfinite(model.free_energy(table)).all()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert largest.numbers <= 4 * 50 * 600 < 600 * 600
    assert peak < 8 * 600 * 600


@pytest.mark.medium
@some_slow(
    "table, kind, hidden",
    [
        (RANDOM.negative_binomial(1, 0.1, (200, 4)) + 20.0 * BITS[np.arange(200) % 80, :1], "poisson", "bernoulli"),
        (np.repeat(RANDOM.normal(size=(200, 1)), 20, 1), "gaussian", "spin"),
        (RANDOM.standard_t(3, (200, 4)) + 3.0 * BITS[np.arange(200) % 80, :1], "gaussian", "bernoulli"),
    ],
    1,
    ids=["large counts", "columns alike", "outliers"],
)
def test_learning_rates_suit_large_counts_columns_alike_and_outliers(table: np.ndarray, kind: str, hidden: str):
    """Training ends, and the machine is no worse than columns by themselves."""
    if kind == "poisson":
        alone = stats.poisson(table.mean(0)).logpmf(table).sum(1).mean()
    else:
        alone = stats.norm(table.mean(0), table.std(0)).logpdf(table).sum(1).mean()
    assert trained(table, visible=kind, hidden=hidden, n_components=8, n_iter=60).score(table) > alone


def test_units_of_a_column_change_the_density_alone():
    one = trained(NUMBERS)
    other = trained(NUMBERS * [10.0, 1.0] + [0.0, 1e6])
    shifted = NUMBERS * [10.0, 1.0] + [0.0, 1e6]
    assert np.allclose(one.transform(NUMBERS), other.transform(shifted), atol=1e-6)
    assert np.allclose(one.score_samples(NUMBERS) - np.log(10), other.score_samples(shifted), atol=1e-6)
    still = trained(np.hstack([NUMBERS, np.full((60, 1), 7.0)]))
    assert np.isfinite(still.score_samples(np.hstack([NUMBERS, np.full((60, 1), 7.0)]))).all()


def test_independent_columns_at_first():
    """A step of nothing leaves the table's means, and the law of single columns."""
    counts = RANDOM.poisson([1.0, 8.0], (70, 2)).astype(float)
    model = trained(counts, visible="poisson", n_iter=1, learning_rate=1e-12)
    # Weights start at a hundredth: so near is the mean of two counts.
    wanted = stats.poisson(counts.mean(0)).logpmf(counts).sum(1)
    with torch.no_grad():
        model.machine_.weight.zero_()
    assert np.allclose(model.score_samples(counts), wanted - model.log_partition_, atol=1e-6)
    never = trained(np.zeros((5, 2)), visible="bernoulli", n_iter=1)
    assert np.isfinite(never.intercept_visible_).all()


@pytest.mark.medium
def test_an_update_is_a_partial_fit():
    whole = trained(BITS, visible="bernoulli", n_iter=1, batch_size=len(BITS))
    part = BoltzmannEstimator(4, visible="bernoulli", random_state=0).partial_fit(BITS)
    assert np.allclose(whole.transform(BITS), part.transform(BITS), atol=1e-12)
    before = part.score(BITS)
    for _ in range(60):
        part.partial_fit(BITS[RANDOM.permutation(80)[:40]])
    assert part.n_iter_ == 61
    assert part.score(BITS) > before + 0.2


@pytest.mark.slow
def test_an_annealed_normaliser_is_the_exact_one(monkeypatch):
    exact, annealed = (trained(BITS, visible="bernoulli", hidden="spin") for _ in range(2))
    wanted = exact.log_partition_
    monkeypatch.setattr(sites, "MAX_STATES", 1)
    monkeypatch.setattr(boltzmann, "_ANNEALING_STEPS", 150)
    assert 0 < annealed.log_partition_error_ < 0.1
    assert abs(annealed.log_partition_ - wanted) < 5 * annealed.log_partition_error_
    assert annealed.log_partition_ == annealed.log_partition_  # annealed once
    assert trained(BITS, visible="bernoulli", hidden="spin").log_partition_ == annealed.log_partition_


@every_row(
    "settings, table, said",
    [
        ({"visible": "bernoulli"}, NUMBERS, "column 0 must hold 0 and 1 for visible='bernoulli', got"),
        ({"visible": ["gaussian", "poisson"]}, NUMBERS, "column 1 must hold counts 0, 1, 2, … for visible='poisson'"),
        ({"visible": "spin"}, BITS, "column 0 must hold −1 and 1"),
        ({"visible": ["gaussian"]}, NUMBERS, "one kind for each of 2 columns, got 1"),
        ({"visible": "word"}, NUMBERS, "visible must be 'bernoulli'"),
        ({"visible": Poisson.create(1.0, dim=5)}, NUMBERS, r"visible is a measure on \(5,\), and X has 2 columns"),
        ({"hidden": "word"}, NUMBERS, "hidden must be 'bernoulli'"),
        ({"hidden": "poisson"}, NUMBERS, "no normaliser"),
        ({"n_components": 0}, NUMBERS, "n_components must be a whole number"),
        ({"n_iter": 0}, NUMBERS, "n_iter must be a whole number"),
        ({"n_chains": 0}, NUMBERS, "n_chains must be a whole number"),
        ({"n_sweeps": 0}, NUMBERS, "n_sweeps must be a whole number"),
        ({"residual_variance": 0.0}, NUMBERS, "residual_variance must be positive"),
        ({"learning_rate": -1.0}, NUMBERS, "learning_rate must be positive"),
    ],
)
def test_what_does_not_fit_is_one_sentence(settings: dict[str, Any], table: np.ndarray, said: str):
    with pytest.raises(ValueError, match=said):
        trained(table, **settings)


def test_hidden_units_of_another_number_are_refused():
    with pytest.raises(ValueError, match=r"shape \(n_samples, 4\), got \(2, 3\)"):
        trained(BITS, visible="bernoulli").inverse_transform(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="Bernoulli or Spin visible units"):
        trained(NUMBERS).pseudo_log_likelihood(NUMBERS)


@every_row("method", ["transform", "impute", "score_samples", "free_energy", "pseudo_log_likelihood", "gibbs"])
def test_every_method_says_that_the_machine_is_not_fitted(method: str):
    with pytest.raises(NotFittedError):
        getattr(BoltzmannEstimator(), method)(np.zeros((2, 3)))
