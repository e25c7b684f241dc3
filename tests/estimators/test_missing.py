"""Missing cells, weights of rows, sparse tables and mixed columns: beside enumeration, quadrature, closed forms and copies."""

from itertools import product
from typing import Any

import numpy as np
import polars
import pytest
import torch
from scipy import optimize, sparse, stats
from scipy.special import logsumexp
from sklearn.base import RegressorMixin, clone
from sklearn.neighbors import KernelDensity
from sklearn.preprocessing import StandardScaler
from tests.support.rows import every_row

from massieu import measures, nn
from massieu.nn.boltzmann import _Training
from massieu.nn.training_rows import TrainingRows
from massieu.sklearn import (
    AttentionRegressor,
    BoltzmannEstimator,
    ConditionalMeanRegressor,
    HopfieldMemory,
    boltzmann,
)

RANDOM = np.random.default_rng(0)
BITS = (RANDOM.random((80, 6)) < 0.4).astype(float)
BITS[:, 3:] = BITS[:, :3]
NAN = np.nan


def fitted(table: Any, **settings: Any) -> BoltzmannEstimator:
    return BoltzmannEstimator(**{"n_components": 3, "n_iter": 20, "random_state": 0, **settings}).fit(table)


def with_holes(table: np.ndarray, share: float = 0.3) -> np.ndarray:
    holes = table.copy()
    holes[np.random.default_rng(1).random(table.shape) < share] = NAN
    return holes


def joint(model: BoltzmannEstimator, hidden_values: tuple[float, float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All states of a machine of bits, (visible, hidden), and their probabilities."""
    count, width = model.components_.shape
    states = np.array(list(product((0.0, 1.0), repeat=width)))
    hidden = np.array(list(product(hidden_values, repeat=count)))
    score = states @ model.components_.T @ hidden.T
    score = score + (states @ model.intercept_visible_)[:, None] + hidden @ model.intercept_hidden_
    return states, hidden, np.exp(score - logsumexp(score))


# --- filling in ------------------------------------------------------------------------------------------------------


def test_bits_are_filled_by_their_conditional_law_enumerated():
    model = fitted(BITS, visible="bernoulli", hidden="spin")
    states, hidden, probability = joint(model, (-1.0, 1.0))
    asked = with_holes(BITS[:20])
    asked[0] = NAN  # nothing is known
    asked[1] = BITS[1]  # everything is
    filled = model.impute(asked)
    features = model.transform(asked)
    scores = model.score_samples(asked)
    for row, cells in enumerate(asked):
        known = ~np.isnan(cells)
        law = probability[(states[:, known] == cells[known]).all(1)]
        agreeing = states[(states[:, known] == cells[known]).all(1)]
        wanted = np.where(known, cells, law.sum(1) @ agreeing / law.sum())
        assert np.allclose(filled[row], wanted, atol=1e-12)
        assert np.allclose(features[row], law.sum(0) @ hidden / law.sum(), atol=1e-12)
        assert np.isclose(scores[row], np.log(law.sum()), atol=1e-12)


def test_numbers_are_filled_by_a_mixture_of_gaussians_in_closed_form():
    table = RANDOM.normal([[0.0, 5.0, 100.0]] * 60, [[1.0, 0.5, 20.0]] * 60) + 3.0 * (RANDOM.random((60, 1)) < 0.5)
    model = fitted(table, hidden="categorical", residual_variance=0.3)
    spread = table.std(0)
    # Completing the square: the means and shares of the hidden states.
    eta = model.intercept_visible_ + model.components_
    share = model.intercept_hidden_ + 0.5 * 0.3 * np.square(eta).sum(1)
    share = np.exp(share - logsumexp(share))
    means = table.mean(0) + spread * 0.3 * eta
    asked = np.array([[1.0, NAN, NAN], [NAN, 5.0, 90.0]])
    filled = model.impute(asked)
    scores = model.score_samples(asked)
    for row, known in enumerate(~np.isnan(asked)):
        laws = stats.norm(means[:, known], np.sqrt(0.3) * spread[known])
        weight = share * laws.pdf(asked[row, known]).prod(1)
        assert np.allclose(filled[row, ~known], weight @ means[:, ~known] / weight.sum(), rtol=1e-10)
        assert np.isclose(scores[row], np.log(weight.sum()), rtol=1e-10)


def test_two_gaussian_layers_are_filled_as_one_gaussian():
    """Hidden numbers have no list of states: Gibbs sampling, beside the conditional mean of a Gaussian."""
    torch.manual_seed(0)
    layers = [measures.Gaussian.create(torch.zeros(size, dtype=torch.float64), 1.0) for size in (4, 2)]
    machine = nn.RestrictedBoltzmannMachine(*layers)
    with torch.no_grad():
        machine.weight.copy_(0.4 * torch.randn(4, 2))
        machine.visible_bias.copy_(torch.randn(4))
    weight = machine.weight.detach().numpy()
    precision = np.eye(4) - weight @ weight.T
    covariance = np.linalg.inv(precision)
    mean = covariance @ machine.visible_bias.detach().numpy()
    asked = np.array([0.5, NAN, -1.0, NAN])
    known = np.array([0, 2])
    missing = np.array([1, 3])
    gain = covariance[np.ix_(missing, known)] @ np.linalg.inv(covariance[np.ix_(known, known)])
    wanted = mean[missing] + gain @ (asked[known] - mean[known])
    rows = torch.from_numpy(np.tile(asked, (50, 1)))
    filled = machine.impute(rows, sweeps=400, generator=torch.Generator().manual_seed(0)).numpy()
    error = filled[:, missing].std(0, ddof=1) / 50**0.5
    assert (np.abs(filled[:, missing].mean(0) - wanted) < 5 * error).all()
    assert (error < 0.02).all()
    assert np.array_equal(filled[:, known], np.tile(asked[known], (50, 1)))


@pytest.mark.slow
def test_many_hidden_units_are_sampled_and_a_call_repeats_itself(monkeypatch: pytest.MonkeyPatch):
    model = fitted(BITS, visible="bernoulli", n_components=5)
    asked = with_holes(BITS[:8])
    exact = model.impute(asked)
    features = model.transform(asked)
    monkeypatch.setattr(boltzmann, "is_enumerable", lambda machine: False)
    sampled = model.impute(asked)
    assert np.array_equal(model.impute(asked), sampled)
    # Means over 1,000 sweeps of numbers within 1, whose chains forget within a few dozen sweeps.
    assert np.abs(sampled - exact).max() < 5 * np.sqrt(0.25 * 50 / 1000)
    assert np.abs(model.transform(asked) - features).max() < 5 * np.sqrt(50 / 1000)
    with pytest.raises(ValueError, match=r"hidden units of at most 2\^16 states"):
        model.score_samples(asked)


def test_what_is_filled_is_what_is_drawn():
    """The module's `impute` of any leading shape, beside enumeration through `BoltzmannMachine`."""
    torch.manual_seed(1)
    machine = nn.RestrictedBoltzmannMachine(
        measures.Spin.create(dim=3), measures.Bernoulli.create(torch.full((2,), 0.5))
    )
    torch.nn.init.normal_(machine.weight)
    states = torch.tensor(list(product((-1.0, 1.0), repeat=3)))
    probability = machine.score_samples(states).exp()
    filled = machine.impute(torch.tensor([[[1.0, NAN, -1.0]]]))
    agree = (states[:, 0] == 1) & (states[:, 2] == -1)
    wanted = (probability[agree] @ states[agree][:, 1]) / probability[agree].sum()
    assert filled.shape == (1, 1, 3)
    assert torch.allclose(filled[0, 0, 1], wanted, atol=1e-6)
    words = nn.RestrictedBoltzmannMachine(
        measures.Categorical.create(torch.full((3,), 1 / 3)), measures.Spin.create(dim=1)
    )
    with pytest.raises(ValueError, match="coordinates of visible unit 0 depend on each other"):
        words.impute(torch.tensor([[NAN, 0.0, 1.0]]))


# --- learning from incomplete rows -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_incomplete_rows_are_learned_to_the_optimum_of_their_likelihood():
    """Three bits that mostly agree; the second is often unseen where the first is 0: missing at random, and not by chance
    alone, so that rows without holes, or holes filled with 1, have another law."""
    random = np.random.default_rng(0)
    first = (random.random(400) < 0.6).astype(float)
    second = np.where(random.random(400) < 0.85, first, 1 - first)
    third = np.where(random.random(400) < 0.85, second, 1 - second)
    table = np.column_stack([first, second, third])
    table[(first == 0) & (random.random(400) < 0.7), 1] = NAN
    states = np.array(list(product((0.0, 1.0), repeat=3)))

    def loss(parameters: np.ndarray) -> float:
        weight, visible, hidden = parameters[:3], parameters[3:6], parameters[6]
        score = states @ visible + np.logaddexp(states @ weight + hidden, -(states @ weight) - hidden)
        score = score - logsumexp(score)
        total = 0.0
        for cells, count in zip(*np.unique(np.nan_to_num(table, nan=-1), axis=0, return_counts=True), strict=True):
            known = cells >= 0
            total += count * logsumexp(score[(states[:, known] == cells[known]).all(1)])
        return -total / len(table)

    best = min(optimize.minimize(loss, random.normal(size=7)).fun for _ in range(5))
    model = fitted(table, visible="bernoulli", hidden="spin", n_components=1, n_iter=150, batch_size=100, n_chains=200)
    assert np.isclose(
        model.score(table),
        -loss(np.concatenate([model.components_[0], model.intercept_visible_, model.intercept_hidden_])),
    )
    # What is left after 600 steps: complete rows leave as much.
    assert -best - 0.02 < model.score(table) <= -best + 1e-6
    filled = fitted(np.nan_to_num(table, nan=1.0), visible="bernoulli", hidden="spin", n_components=1, n_iter=150)
    assert filled.score(table) < model.score(table) - 0.05


def test_the_module_learns_from_a_mask():
    rows = torch.from_numpy(BITS).float()
    missing = torch.from_numpy(np.isnan(with_holes(BITS)))
    half = [measures.Bernoulli.create(torch.full((size,), 0.5)) for size in (6, 2)]
    models = []
    for junk in (float("nan"), 7.0):
        generator = torch.Generator().manual_seed(0)
        model = nn.RestrictedBoltzmannMachine(*half, generator=generator)
        data = rows.masked_fill(missing, junk)
        models.append(model.fit(data, missing=missing, epochs=3, generator=generator, progress=False))
    assert torch.equal(models[0].weight, models[1].weight)  # what stands in missing places is not read
    with pytest.raises(ValueError, match="data must have no NaN"):
        models[0].fit(rows.masked_fill(missing, float("nan")), progress=False)


# --- weights of rows -------------------------------------------------------------------------------------------------


def test_a_row_of_weight_two_is_two_rows():
    """One update of the whole table, from the same chains and by the same draws: by weights, and of copies."""
    counts = np.random.default_rng(2).integers(0, 4, 80)
    rows = torch.from_numpy(BITS)
    half = [measures.Bernoulli.create(torch.full((size,), 0.5, dtype=torch.float64)) for size in (6, 3)]
    models = []
    for data, weight in (
        (rows, 0.5 * torch.from_numpy(counts)),
        (rows[torch.from_numpy(np.arange(80).repeat(counts))], None),
    ):
        model = nn.RestrictedBoltzmannMachine(*half, generator=torch.Generator().manual_seed(0))
        model.chains = rows[:20].clone()
        training = _Training(model, model._training_rows(data, None, weight), 20, None)
        training.generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            training.update(torch.arange(len(data)), 0.5, 1)
        models.append(model)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_chains_start_at_rows_by_their_weights():
    weight = torch.tensor([0.0, 1.0, 3.0, 0.0], dtype=torch.float64)
    drawn = TrainingRows(torch.zeros(4, 1), None, weight).draw(4000, torch.Generator().manual_seed(0))
    share = drawn.bincount(minlength=4) / 4000
    assert share[0] == share[3] == 0
    assert abs(share[1] - 0.25) < 5 * (0.25 * 0.75 / 4000) ** 0.5


def test_rows_of_weight_nought_are_left_out():
    weight = (np.arange(80) % 3 > 0).astype(float)
    settings = {"visible": "bernoulli", "n_iter": 3, "random_state": 0}
    one = BoltzmannEstimator(2, **settings).fit(BITS, sample_weight=weight)
    other = BoltzmannEstimator(2, **settings).fit(BITS[weight > 0], sample_weight=np.ones(int(weight.sum())))
    assert np.array_equal(one.components_, other.components_)


# --- sparse tables ---------------------------------------------------------------------------------------------------


@every_row("kinds", ["bernoulli", "gaussian", ["poisson"] * 3 + ["bernoulli"] * 3, ["categorical"] + ["bernoulli"] * 5])
def test_a_sparse_table_is_the_dense_one(kinds: Any):
    dense = fitted(BITS, visible=kinds, n_iter=3)
    thin = fitted(sparse.csr_array(BITS), visible=kinds, n_iter=3)
    assert np.allclose(thin.components_, dense.components_, atol=1e-9)
    for method in ("transform", "score_samples", "free_energy"):
        assert np.allclose(getattr(thin, method)(sparse.csc_matrix(BITS)), getattr(dense, method)(BITS), atol=1e-9)


def test_a_wide_sparse_table_is_never_dense(monkeypatch: pytest.MonkeyPatch):
    cells: list[int] = []
    taken = boltzmann._SparseRows.take
    monkeypatch.setattr(
        boltzmann._SparseRows, "take", lambda rows, index: cells.append(len(index)) or taken(rows, index)
    )
    monkeypatch.setattr(boltzmann, "_SPARSE_ROWS", 50)
    fitted(
        sparse.random_array((300, 700), density=0.01, format="csr", random_state=0).ceil(),
        visible="bernoulli",
        n_iter=1,
    )
    assert max(cells) <= 50


# --- mixed columns ---------------------------------------------------------------------------------------------------


def test_kinds_by_name_are_kinds_in_a_list():
    table = np.column_stack([BITS[:, 0], RANDOM.poisson(2.0, 80), RANDOM.normal(size=80)])
    frame = polars.DataFrame({"smokes": table[:, 0], "count": table[:, 1], "size": table[:, 2]})
    by_place = fitted(table, visible={0: "bernoulli", 1: "poisson"}, n_iter=3)
    in_list = fitted(table, visible=["bernoulli", "poisson", "gaussian"], n_iter=3)
    assert np.array_equal(by_place.components_, in_list.components_)
    with pytest.raises(ValueError, match="the columns of X are 0 to 2"):
        fitted(table, visible={3: "bernoulli"})
    if not hasattr(StandardScaler().fit(frame), "feature_names_in_"):
        return  # scikit-learn 1.6 knows no names of polars' columns
    by_name = fitted(frame, visible={"smokes": "bernoulli", "count": "poisson"}, n_iter=3)
    assert np.array_equal(by_name.components_, in_list.components_)
    with pytest.raises(
        ValueError, match="visible names the column 'smoke', and the columns of X are 'smokes', 'count', 'size'"
    ):
        fitted(frame, visible={"smoke": "bernoulli"})


@pytest.mark.slow
def test_a_column_of_categories():
    """Values 10, 20 and 40: three states of one unit, beside a number that depends on them; the whole law by quadrature."""
    random = np.random.default_rng(3)
    values = np.array([10.0, 20.0, 40.0])
    place = random.integers(0, 3, 300)
    table = np.column_stack([values[place], random.normal(np.array([-3.0, 0.0, 3.0])[place], 1.0)])
    model = fitted(table, visible=["categorical", "gaussian"], n_components=2, n_iter=100, residual_variance=0.2)
    assert np.array_equal(model.categories_[0], values)
    assert model.components_.shape == (2, 4)
    grid = np.linspace(-25, 25, 20_001)
    width = grid[1] - grid[0]
    density = np.stack([np.exp(model.score_samples(np.column_stack([np.full_like(grid, v), grid]))) for v in values])
    assert np.isclose(width * density.sum(), 1, rtol=1e-6)
    shares = width * density.sum(1)
    # A missing category is filled by the likeliest, a missing number by its mean.
    asked = np.array([[NAN, -4.0], [NAN, 4.0], [10.0, NAN], [40.0, NAN]])
    filled = model.impute(asked)
    nearest = [np.abs(grid - number).argmin() for number in (-4.0, 4.0)]
    assert np.array_equal(filled[:2, 0], values[density[:, nearest].argmax(0)])
    wanted = width * (density @ grid) / shares
    assert np.allclose(filled[2:, 1], wanted[[0, 2]], rtol=1e-6)
    drawn = model.sample(2000, n_sweeps=50)
    seen = np.array([(drawn[:, 0] == v).mean() for v in values])
    assert np.isclose(seen.sum(), 1)
    assert (np.abs(seen - shares) < 5 * np.sqrt(shares * (1 - shares) / 2000)).all()
    assert model.score_samples([[30.0, 0.0]]) == -np.inf
    holes = with_holes(table)
    assert np.isfinite(fitted(holes, visible=["categorical", "gaussian"], n_iter=5).impute(holes)).all()


@every_row(
    "table, settings, said",
    [
        (np.array([[1.0, NAN], [0.0, NAN]]), {}, "column 1 must have a cell that is not missing"),
        (
            np.array([[1.0, NAN], [0.0, NAN]]),
            {"visible": "categorical"},
            "column 1 must have a cell that is not missing",
        ),
        (np.arange(1001.0)[:, None], {"visible": "categorical"}, "column 0 must have at most 1000 values"),
        (sparse.csr_array(np.array([[1.0, NAN], [0.0, 2.0]])), {}, "a sparse table must be complete"),
    ],
)
def test_what_cannot_be_learned_from_is_one_sentence(table: Any, settings: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        fitted(table, **settings)


def test_methods_that_need_complete_rows_say_so():
    model = fitted(BITS, visible="bernoulli")
    for method in ("gibbs", "free_energy", "pseudo_log_likelihood"):
        with pytest.raises(ValueError, match="Input X contains NaN in row 0: fill missing cells first, by impute"):
            getattr(model, method)(with_holes(BITS))
    with pytest.raises(ValueError, match="impute needs a dense table"):
        model.impute(sparse.csr_array(BITS))
    assert np.array_equal(model.impute(BITS), BITS)


# --- rows as tokens --------------------------------------------------------------------------------------------------

TABLE = RANDOM.normal([1.0, -2.0, 50.0], 1.0, size=(40, 3))
TARGET = np.sin(2 * TABLE[:, 0]) + 0.3 * TABLE[:, 1]
ASKED = RANDOM.normal([1.0, -2.0, 50.0], 1.5, size=(10, 3))
COUNTS = np.random.default_rng(4).integers(0, 4, 40)


@every_row(
    "model, method",
    [
        (ConditionalMeanRegressor(lengthscale=1.5, ridge=0.2), "predict"),
        (ConditionalMeanRegressor(kernel="linear", ridge=0.2), "predict"),
        (ConditionalMeanRegressor(kernel="exponential", lengthscale=3.0, ridge=0.2), "predict"),
        (AttentionRegressor(scale=1.3), "predict"),
        (AttentionRegressor(scale=1.3, scores="dot_product"), "predict"),
        (HopfieldMemory(scale=0.8), "score_samples"),
        (HopfieldMemory(scale=0.8), "transform"),
    ],
)
def test_a_row_of_weight_two_is_two_equal_rows(model: Any, method: str):
    weighted = getattr(clone(model).fit(TABLE, TARGET, sample_weight=COUNTS), method)(ASKED)
    copied = getattr(clone(model).fit(TABLE.repeat(COUNTS, 0), TARGET.repeat(COUNTS)), method)(ASKED)
    assert np.allclose(weighted, copied, rtol=1e-9, atol=1e-9)


def test_intervals_by_weights_are_those_of_equal_rows():
    model = ConditionalMeanRegressor(lengthscale=1.5, ridge=0.2)
    weighted = clone(model).fit(TABLE, TARGET, sample_weight=COUNTS).predict(ASKED, return_std=True)[1]
    copied = model.fit(TABLE.repeat(COUNTS, 0), TARGET.repeat(COUNTS)).predict(ASKED, return_std=True)[1]
    assert np.allclose(weighted, copied, rtol=1e-9)


@every_row("model", [ConditionalMeanRegressor(), AttentionRegressor(), HopfieldMemory()])
def test_equal_weights_are_none(model: Any):
    """Of those that choose by leaving rows out: the choice, too."""
    method = "predict" if isinstance(model, RegressorMixin) else "score_samples"
    equal = clone(model).fit(TABLE, TARGET, sample_weight=np.ones(40))
    none = clone(model).fit(TABLE, TARGET)
    assert np.allclose(getattr(equal, method)(ASKED), getattr(none, method)(ASKED), rtol=1e-8)


def test_a_threshold_by_weights_is_that_of_a_density_without_the_row():
    memory = HopfieldMemory(scale=0.8, false_alarm_rate=0.2).fit(TABLE, sample_weight=COUNTS)
    kept = np.flatnonzero(COUNTS)
    scores = []
    for row in kept:
        others = kept[kept != row]
        density = KernelDensity(bandwidth=0.8**-0.5).fit(TABLE[others], sample_weight=COUNTS[others])
        scores.append(density.score_samples(TABLE[[row]])[0])
    assert np.isclose(memory.leave_one_out_score_, np.average(scores, weights=COUNTS[kept]))
    scores = np.array(scores)
    below = COUNTS[kept][scores < memory.offset_ - 1e-9].sum() / COUNTS.sum()
    upto = COUNTS[kept][scores <= memory.offset_ + 1e-9].sum() / COUNTS.sum()
    assert below < 0.2 <= upto


def test_a_memory_fills_cells_by_a_mixture_of_gaussians():
    memory = HopfieldMemory(scale=0.8).fit(TABLE, sample_weight=COUNTS)
    asked = with_holes(ASKED)
    asked[0] = NAN
    filled = memory.impute(asked)
    for row, cells in enumerate(asked):
        known = ~np.isnan(cells)
        weight = COUNTS * np.exp(-0.4 * np.square(TABLE[:, known] - cells[known]).sum(1))
        assert np.allclose(filled[row], np.where(known, cells, weight @ TABLE / weight.sum()), rtol=1e-9)
    with pytest.raises(ValueError, match="at least two rows of positive weight, got 1"):
        memory.fit(TABLE, sample_weight=np.arange(40) == 3)
