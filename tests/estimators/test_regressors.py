"""Regression over rows: beside scikit-learn's kernel ridge and Gaussian process, explicit softmax, and refitting."""

import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import Ridge
from tests.support.rows import every_row

from massieu import regression
from massieu.sklearn import AttentionRegressor, BoltzmannEstimator, ConditionalMeanRegressor, HopfieldMemory
from massieu.sklearn import conditional_mean as search
from massieu.sklearn import rows as rows_of

RANDOM = np.random.default_rng(0)
TABLE = RANDOM.normal([1.0, -2.0, 0.5], 1.0, size=(50, 3))
TARGET = 10 + np.sin(2 * TABLE[:, 0]) + 0.3 * TABLE[:, 1] + 0.1 * RANDOM.normal(size=50)
ASKED = RANDOM.normal([1.0, -2.0, 0.5], 1.5, size=(20, 3))
CENTRE, MEAN = TABLE.mean(0), TARGET.mean()


# --- the conditional mean ----------------------------------------------------------------------------------------------


def gram(kernel: str, lengthscale: float, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    if kernel == "gaussian":
        return np.exp(-0.5 * np.square(left[:, None] - right).sum(-1) / lengthscale**2)
    products = (left - CENTRE) @ (right - CENTRE).T
    return products if kernel == "linear" else np.exp(products / lengthscale**2)


@every_row("kernel", ["gaussian", "exponential", "linear"])
def test_predictions_are_kernel_ridge_s(kernel: str):
    model = ConditionalMeanRegressor(kernel=kernel, lengthscale=1.7, ridge=0.3).fit(TABLE, TARGET)
    other = KernelRidge(alpha=0.3, kernel="precomputed").fit(gram(kernel, 1.7, TABLE, TABLE), TARGET - MEAN)
    wanted = MEAN + other.predict(gram(kernel, 1.7, ASKED, TABLE))
    assert np.allclose(model.predict(ASKED), wanted, atol=1e-9)
    if kernel == "linear":
        assert np.isnan(model.lengthscale_)
        assert np.allclose(wanted, Ridge(alpha=0.3).fit(TABLE, TARGET).predict(ASKED), atol=1e-9)


def test_deviations_are_a_gaussian_process_s():
    model = ConditionalMeanRegressor(lengthscale=1.7, ridge=0.3).fit(TABLE, TARGET)
    matrix = gram("gaussian", 1.7, TABLE, TABLE) + 0.3 * np.eye(50)
    prior = (TARGET - MEAN) @ np.linalg.solve(matrix, TARGET - MEAN) / 50  # of most likelihood
    assert np.isclose(model.prior_variance_[0], prior)
    assert np.isclose(model.noise_variance_[0], 0.3 * prior)
    kernel = ConstantKernel(prior) * RBF(1.7)
    process = GaussianProcessRegressor(kernel, alpha=0.3 * prior, optimizer=None).fit(TABLE, TARGET - MEAN)
    wanted, latent = process.predict(ASKED, return_std=True)
    mean, deviation = model.predict(ASKED, return_std=True)
    assert np.allclose(mean, MEAN + wanted, atol=1e-9)
    assert np.allclose(deviation, np.sqrt(np.square(latent) + 0.3 * prior), atol=1e-9)


@pytest.mark.medium
@pytest.mark.parametrize("kernel", ["gaussian", "exponential", "linear"])
def test_the_choice_is_that_of_refitting_without_each_row(kernel: str):
    model = ConditionalMeanRegressor(kernel=kernel).fit(TABLE, TARGET)
    values = (TARGET - MEAN) / TARGET.std()

    def alone(lengthscale: float, ridge: float) -> float:
        errors = []
        for row in range(50):
            kept = np.arange(50) != row
            matrix = gram(kernel, lengthscale, TABLE, TABLE)
            coefficients = np.linalg.solve(matrix[np.ix_(kept, kept)] + ridge * np.eye(49), values[kept])
            errors.append(matrix[row, kept] @ coefficients - values[row])
        return float(np.square(errors).mean())

    best = alone(model.lengthscale_, model.ridge_)
    assert np.isclose(model.leave_one_out_error_, best, rtol=1e-6)
    for factor in (0.1, 0.5, 2.0, 10.0):
        assert alone(model.lengthscale_, factor * model.ridge_) > 0.999 * best
        if kernel != "linear":
            assert alone(factor * model.lengthscale_, model.ridge_) > 0.99 * best


def wave(random):
    """A lengthscale in the middle of those that are tried."""
    table = random.normal(size=(640, 3))
    return table, np.sin(table @ [1.0, 2.0, 0.5]) + 0.3 * random.normal(size=640)


def friedman(random):
    """Four lengthscales of which a quarter of the rows cannot tell the best."""
    table = random.uniform(size=(640, 5))
    smooth = np.sin(np.pi * table[:, 0] * table[:, 1]) + 2 * (table[:, 2] - 0.5) ** 2 + table[:, 3]
    return table, smooth + 0.1 * random.normal(size=640)


def lattice(random):
    """No noise: errors fall by powers of ten as rows are added."""
    axis = np.linspace(0, 6, 26)
    table = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    return table, np.sin(table[:, 0]) * np.cos(2 * table[:, 1])


@pytest.mark.medium
@pytest.mark.parametrize("draw", [wave, friedman, lattice])
def test_many_rows_choose_as_every_lengthscale_on_all_rows_does(draw, monkeypatch):
    table, target = draw(np.random.default_rng(3))
    model = ConditionalMeanRegressor().fit(table, target)
    monkeypatch.setattr(search, "_UNSCREENED", len(table))
    full = ConditionalMeanRegressor().fit(table, target)
    assert (model.lengthscale_, model.ridge_) == (full.lengthscale_, full.ridge_)
    assert model.leave_one_out_error_ == full.leave_one_out_error_


@pytest.mark.slow
def test_intervals_hold_what_they_say():
    """Of draws from a Gaussian process: 90 % intervals hold 90 % of new targets."""
    random, inside = np.random.default_rng(1), []
    for _ in range(12):
        points = random.uniform(-4, 4, (150, 1))
        truth = np.linalg.cholesky(gram("gaussian", 1.0, points, points) + 1e-9 * np.eye(150)) @ random.normal(size=150)
        values = truth + 0.3 * random.normal(size=150)
        model = ConditionalMeanRegressor().fit(points[:50], values[:50])
        mean, deviation = model.predict(points[50:], return_std=True)
        inside.append((np.abs(mean - values[50:]) < 1.6449 * deviation).mean())
    assert abs(np.mean(inside) - 0.9) < 5 * np.std(inside) / 12**0.5


def test_several_targets_and_a_target_of_one_value():
    both = np.column_stack([TARGET, 100 * TARGET - 3, np.full(50, 4.0)])
    model = ConditionalMeanRegressor(lengthscale=1.7, ridge=0.3).fit(TABLE, both)
    single = ConditionalMeanRegressor(lengthscale=1.7, ridge=0.3).fit(TABLE, TARGET)
    (mean, deviation), (first, spread) = (each.predict(ASKED, return_std=True) for each in (model, single))
    assert mean.shape == deviation.shape == (20, 3)
    assert np.allclose(mean, np.column_stack([first, 100 * first - 3, np.full(20, 4.0)]))
    assert np.allclose(deviation, np.column_stack([spread, 100 * spread, np.zeros(20)]))


def test_a_kernel_and_a_method_of_one_s_own():
    affine = regression.FeatureKernel.create(lambda x: x[..., :1])
    model = ConditionalMeanRegressor(kernel=affine, ridge=0.2).fit(TABLE, TARGET)
    wanted = Ridge(alpha=0.2).fit(TABLE[:, :1], TARGET).predict(ASKED[:, :1])
    assert np.allclose(model.predict(ASKED), wanted, atol=1e-9)
    exact = ConditionalMeanRegressor(lengthscale=4.0, ridge=0.1).fit(TABLE, TARGET)
    few = ConditionalMeanRegressor(lengthscale=4.0, ridge=0.1, method=regression.LowRank(30)).fit(TABLE, TARGET)
    assert 0 < np.abs(few.predict(ASKED) - exact.predict(ASKED)).max() < 0.05


@pytest.mark.medium
def test_blocks_change_nothing(monkeypatch):
    models = [ConditionalMeanRegressor(lengthscale=1.7, ridge=0.3), AttentionRegressor()]
    whole = [model.fit(TABLE, TARGET).predict(ASKED) for model in models]
    monkeypatch.setattr(rows_of, "PAIRS_PER_BLOCK", 150)
    parts = [model.fit(TABLE, TARGET).predict(ASKED) for model in models]
    assert np.allclose(whole, parts, atol=1e-12)


@every_row(
    "model, said",
    [
        (ConditionalMeanRegressor(kernel="word"), "kernel must be 'gaussian'"),
        (ConditionalMeanRegressor(ridge=0.0), "ridge must be positive"),
        (ConditionalMeanRegressor(lengthscale=-1.0), "lengthscale must be positive"),
        (AttentionRegressor(scores="word"), "scores must be 'distance' or 'dot_product'"),
        (AttentionRegressor(scale=0.0), "scale must be positive"),
    ],
)
def test_what_does_not_fit_is_one_sentence(model, said: str):
    with pytest.raises(ValueError, match=said):
        model.fit(TABLE, TARGET)


# --- attention ---------------------------------------------------------------------------------------------------------


def softmax(scores: str, scale: float, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    if scores == "distance":
        levels = -0.5 * scale * np.square(left[:, None] - right).sum(-1)
    else:
        levels = scale * (left - CENTRE) @ (right - CENTRE).T
    weights = np.exp(levels - levels.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


@every_row("scores", ["distance", "dot_product"])
def test_attention_is_the_softmax_mean(scores: str):
    model = AttentionRegressor(scores=scores, scale=1.3).fit(TABLE, TARGET)
    assert np.allclose(model.predict(ASKED), softmax(scores, 1.3, ASKED, TABLE) @ TARGET, atol=1e-10)
    both = AttentionRegressor(scores=scores, scale=1.3).fit(TABLE, np.column_stack([TARGET, -TARGET]))
    assert np.allclose(both.predict(ASKED)[:, 1], -model.predict(ASKED), atol=1e-10)


@every_row("scores", ["distance", "dot_product"])
def test_the_scale_is_that_of_the_least_error_without_each_row(scores: str):
    model = AttentionRegressor(scores=scores).fit(TABLE, TARGET)

    def alone(scale: float) -> float:
        errors = []
        for row in range(50):
            kept = np.arange(50) != row
            errors.append(softmax(scores, scale, TABLE[[row]], TABLE[kept]) @ TARGET[kept] - TARGET[row])
        return float(np.square(errors).mean()) / TARGET.var()

    assert np.isclose(model.leave_one_out_error_, alone(model.scale_))
    assert all(alone(factor * model.scale_) > model.leave_one_out_error_ for factor in (0.25, 0.5, 2.0, 4.0))


def test_a_row_with_no_other_is_kept():
    one = AttentionRegressor().fit(TABLE[:1], TARGET[:1])
    assert np.isnan(one.leave_one_out_error_)
    assert np.allclose(one.predict(ASKED), TARGET[0])


@pytest.mark.parametrize("size", [1e200, 1e308, 1e-200, 1e-308])
def test_numbers_whose_squares_are_lost_are_refused_with_their_column(size):
    table = np.random.default_rng(0).standard_normal((20, 3))
    wrong = table.copy()
    wrong[:, 1] *= size
    word = "large" if size > 1 else "small"
    said = rf"^{{}} must be in units in which float64 can hold squares: column {{}} has numbers as {word} as [\d.e+-]+; divide"
    for estimator in (AttentionRegressor(), ConditionalMeanRegressor()):
        with pytest.raises(ValueError, match=said.format("X", 1)):
            estimator.fit(wrong, table[:, 0])
        with pytest.raises(ValueError, match=said.format("y", 0)):
            estimator.fit(table, wrong[:, 1])
    for estimator in (HopfieldMemory(), BoltzmannEstimator(2)):
        with pytest.raises(ValueError, match=said.format("X", 1)):
            estimator.fit(wrong)


@pytest.mark.parametrize("size", [1e100, 1e-100])
def test_units_change_no_prediction(size):
    table = np.random.default_rng(0).standard_normal((40, 3))
    for estimator in (AttentionRegressor(), ConditionalMeanRegressor()):
        expected = estimator.fit(table, table[:, 0]).predict(table)
        found = estimator.fit(size * table, size * table[:, 0]).predict(size * table)
        np.testing.assert_allclose(found / size, expected, rtol=1e-6, atol=1e-9)
