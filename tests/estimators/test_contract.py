"""What scikit-learn expects of an estimator, by its own checks, and that a missing scikit-learn is one sentence."""

import importlib
import importlib.util
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import Binarizer, StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from tests.support.rows import every_row, some_slow

from massieu import measures, regression
from massieu.sklearn import AttentionRegressor, BoltzmannEstimator, ConditionalMeanRegressor, HopfieldMemory

QUICK = BoltzmannEstimator(3, n_iter=3, random_state=0)
DEFAULTS = [QUICK, ConditionalMeanRegressor(), AttentionRegressor(), HopfieldMemory()]
CHEAP = [QUICK, ConditionalMeanRegressor(lengthscale=2.0, ridge=0.1), HopfieldMemory()]
OTHERS = [
    ConditionalMeanRegressor(),
    AttentionRegressor(),
    clone(QUICK).set_params(hidden="categorical"),
    make_pipeline(Binarizer(), clone(QUICK).set_params(visible="bernoulli")),
    ConditionalMeanRegressor(kernel="linear"),
    ConditionalMeanRegressor(lengthscale=2.0, ridge=0.1, method=regression.LowRank(60)),
    AttentionRegressor(scores="dot_product"),
    HopfieldMemory(n_steps=None, scale=1.0),
]
OF_A_PIPELINE = {
    "check_dont_overwrite_parameters": "a Pipeline changes its `steps`: scikit-learn's own expected failure of it",
    "check_estimators_overwrite_params": "a Pipeline changes its `steps`: scikit-learn's own expected failure of it",
}
WEIGHTS_ON_DENSE_DATA = "check_sample_weight_equivalence_on_dense_data"
WEIGHTS_ON_SPARSE_DATA = "check_sample_weight_equivalence_on_sparse_data"


def expected_failures(estimator: Any) -> dict[str, str]:
    """What scikit-learn's checks may say of an estimator: copies of rows in the place of weights, where these differ."""
    if isinstance(estimator, Pipeline):
        return OF_A_PIPELINE
    if isinstance(estimator, BoltzmannEstimator):
        reason = "training draws rows: a row of weight 2 has the law of two rows, and other draws"
        return {WEIGHTS_ON_DENSE_DATA: reason, WEIGHTS_ON_SPARSE_DATA: reason}
    if "auto" in (estimator.get_params().get("ridge"), estimator.get_params().get("scale")):
        return {WEIGHTS_ON_DENSE_DATA: "a row is left out as a whole, and of copies one"}
    if isinstance(estimator, HopfieldMemory):
        return {WEIGHTS_ON_DENSE_DATA: "the threshold leaves a row out as a whole, and of copies one"}
    return {}


@pytest.mark.medium
@some_slow("estimator", CHEAP, 2, ids=lambda estimator: type(estimator).__name__)
def test_scikit_learn_s_checks(estimator: Any):
    """None but those on weights is expected to fail, not even the two of `BernoulliRBM`: likelihoods here are no draws."""
    check_estimator(estimator, expected_failed_checks=expected_failures(estimator), on_skip=None)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", OTHERS, ids=lambda estimator: repr(estimator).replace("\n", " "))
def test_scikit_learn_s_checks_of_other_settings(estimator: Any):
    check_estimator(estimator, expected_failed_checks=expected_failures(estimator), on_skip=None)


def test_tags_say_what_is_taken():
    takes = [
        (each.__sklearn_tags__().input_tags.allow_nan, each.__sklearn_tags__().input_tags.sparse) for each in DEFAULTS
    ]
    assert takes == [(True, True), (False, False), (False, False), (False, False)]


TABLE = np.random.default_rng(0).normal(size=(60, 3))
TARGET = np.sin(TABLE[:, 0]) + 0.1 * TABLE[:, 1]


@pytest.mark.medium
@every_row("estimator", DEFAULTS)
def test_pickled_cloned_and_in_float32(estimator: Any):
    model = clone(estimator).fit(TABLE, TARGET)
    method = "transform" if hasattr(model, "transform") else "predict"
    found = getattr(model, method)(TABLE)
    assert np.array_equal(getattr(pickle.loads(pickle.dumps(model)), method)(TABLE), found)
    again = clone(model)
    with pytest.raises(NotFittedError):
        getattr(again, method)(TABLE)
    half = again.fit(TABLE.astype(np.float32), TARGET.astype(np.float32))
    other = getattr(half, method)(TABLE.astype(np.float32))
    if method == "transform":
        assert other.dtype == np.float32
    # Draws of another dtype are other draws: a machine is not compared.
    if not isinstance(model, BoltzmannEstimator):
        assert np.allclose(other, found, atol=1e-4)


@every_row("estimator", DEFAULTS[1:])
def test_nan_and_sparse_tables_are_refused(estimator: Any):
    broken = TABLE.copy()
    broken[3, 1] = np.nan
    with pytest.raises(ValueError, match="Input X contains NaN"):
        clone(estimator).fit(broken, TARGET)
    with pytest.raises(TypeError, match="Sparse data was passed"):
        clone(estimator).fit(sparse.csr_array(TABLE), TARGET)


NUMBERS = [
    (ConditionalMeanRegressor, "lengthscale"),
    (ConditionalMeanRegressor, "ridge"),
    (AttentionRegressor, "scale"),
    (HopfieldMemory, "scale"),
    (BoltzmannEstimator, "learning_rate"),
]


@pytest.mark.parametrize("value", [np.ones(3), np.array(1.0), [1.0, 2.0], "half", None, True], ids=repr)
@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=[f"{kind.__name__}.{name}" for kind, name in NUMBERS])
def test_a_width_for_each_column_is_one_sentence(kind: Any, name: str, value: Any):
    with pytest.raises(TypeError, match=f"{name} must be 'auto' or one number for all columns, got "):
        kind(**{name: value}).fit(TABLE, TARGET)


def test_a_number_of_numpy_is_a_number():
    found = [AttentionRegressor(scale=scale).fit(TABLE, TARGET).predict(TABLE) for scale in (2.0, np.float64(2.0))]
    assert np.array_equal(*found)


@pytest.mark.medium
def test_names_of_features():
    transformer = clone(QUICK).set_output(transform="polars").fit(TABLE)
    assert transformer.transform(TABLE).columns == [f"boltzmannestimator{unit}" for unit in range(3)]
    import polars

    frame = polars.DataFrame({"age": TABLE[:, 0], "height": TABLE[:, 1], "weight": TABLE[:, 2]})
    if not hasattr(StandardScaler().fit(frame), "feature_names_in_"):
        return  # scikit-learn 1.6 knows no names of polars' columns
    memory = HopfieldMemory().set_output(transform="polars").fit(frame)
    assert list(memory.feature_names_in_) == memory.transform(frame).columns == ["age", "height", "weight"]
    with pytest.raises(ValueError, match="column 'height' must hold 0 and 1"):
        BoltzmannEstimator(visible=["gaussian", "bernoulli", "gaussian"]).fit(frame)


@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="`make bridges` has pandas")
@pytest.mark.medium
def test_tables_of_pandas_go_in_and_come_out():
    pandas = importlib.import_module("pandas")
    frame = pandas.DataFrame(
        TABLE, columns=["age", "height", "weight"], index=[f"row {row}" for row in range(len(TABLE))]
    )
    memory = HopfieldMemory().set_output(transform="pandas").fit(frame)
    recalled = memory.transform(frame)
    assert list(recalled.columns) == ["age", "height", "weight"] and list(recalled.index) == list(frame.index)
    hidden = clone(QUICK).set_output(transform="pandas").fit(frame).transform(frame)
    assert list(hidden.columns) == [f"boltzmannestimator{unit}" for unit in range(3)]
    assert AttentionRegressor().fit(frame, TARGET).predict(frame).shape == (len(TABLE),)
    with pytest.raises(ValueError, match="feature names should match"):
        memory.transform(frame[["height", "age", "weight"]])


@pytest.mark.medium
@some_slow(
    "estimator, grid",
    [
        (QUICK, {"hidden": ["bernoulli", "spin"]}),
        (ConditionalMeanRegressor(), {"kernel": ["gaussian", "linear", regression.GaussianKernel.create(2.0)]}),
        (AttentionRegressor(), {"scores": ["distance", "dot_product"]}),
        (HopfieldMemory(), {"scale": ["auto", 1e-3]}),
    ],
    2,
)
def test_chosen_in_a_pipeline(estimator: Any, grid: dict[str, list[Any]]):
    steps = Pipeline([("scale", StandardScaler()), ("last", clone(estimator))])
    search = GridSearchCV(steps, {f"last__{name}": values for name, values in grid.items()}, cv=2, error_score="raise")
    search.fit(TABLE, TARGET)
    scores = search.cv_results_["mean_test_score"]
    assert np.isfinite(scores).all()
    assert len(set(scores)) > 1
    assert search.best_score_ == scores.max()


def test_a_measure_is_a_parameter():
    model = BoltzmannEstimator(hidden=measures.Spin.create(dim=2), n_iter=2, random_state=0)
    assert clone(model).fit_transform(TABLE).shape == (60, 2)


@pytest.mark.medium
def test_without_scikit_learn_one_sentence_says_what_to_install():
    code = """
import sys
sys.modules["sklearn"] = None
import massieu
assert dir(massieu.sklearn)
try:
    from massieu.sklearn import HopfieldMemory
except massieu.MissingExtraError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == 'sklearn is not installed; install it with: pip install "massieu[sklearn]"\n'
    import massieu

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = massieu.sklearn.nothing
