"""A Boltzmann machine of any units as a scikit-learn estimator."""

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from massieu.energy import sites
from massieu.foundation.arguments import number, whole_number
from massieu.measures import Measure
from massieu.nn import RestrictedBoltzmannMachine
from massieu.nn.missing_units import Completion, complete_by_gibbs, complete_exactly, is_enumerable
from massieu.nn.training_rows import TrainingRows
from massieu.sklearn.rows import check_spread, check_weights, number_or_auto, validate_data
from massieu.sklearn.units import Columns, Kinds, Table, hidden_layer, learning_rate

DTYPES = [np.float64, np.float32]
_GIBBS_SWEEPS = 1000
"""Sweeps over which missing cells are averaged, where the hidden units have too many states to sum over."""
_SPARSE_ROWS = 1000
"""Rows of a sparse table that are made dense at a time."""
_ANNEALED_CHAINS = 256
"""Chains of annealed importance sampling, where the normaliser cannot be enumerated."""
_ANNEALING_STEPS = 1000


class BoltzmannEstimator(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """A restricted Boltzmann machine of which both layers have units of any kind: p(v, h) ∝ exp(vᵀWh + a·v + b·h) (B1).

    It does what scikit-learn's `BernoulliRBM` does for bits, for counts, numbers and mixed tables too. Likelihoods are
    those of the table in its own units, in nats, normaliser included: they can be compared with those of other densities,
    and `GridSearchCV` compares them by itself.

    A cell may be missing (NaN) in every method that says so: the likelihood is then that of the cells that are there, and
    `impute` gives the mean of the others under the machine's conditional law. A sparse table is read a batch at a time, and
    must be complete.

    Columns that are "gaussian" are counted from their mean in units of their standard deviation: rescaling one changes
    nothing but the units of the density. Of positive, skewed columns and large counts take logarithms before.

    Args:
        n_components: How many hidden units.
        visible: "gaussian" (numbers), "bernoulli" (0 and 1), "spin" (±1), "poisson" (counts) or "categorical" (a few values,
            as of codes, each a state of one unit); one for all columns, a list with one for each, or a mapping from names of
            columns, or their numbers, to kinds, where those not named are "gaussian". Or a `massieu.measures.Measure` on rows.
        hidden: One of these; bits and spins make the same machines, of which spins learn faster. Or "categorical": one
            unit of so many states, with which the machine is a mixture model; `GaussianMixture`, by EM, fits such a one
            better. Or a measure, whose size takes the place of `n_components`. Unbounded visible units need bounded
            hidden ones, else there is no normaliser, or hardly one (B2). Two Gaussian layers are probabilistic PCA, which
            `PCA` solves exactly.
        residual_variance: Of "gaussian" columns, the share of their variance that the hidden units leave over.
        learning_rate: "auto" takes 1, for spins 0.3, for hidden "gaussian" units 0.1, for hidden "poisson" units and for
            measures 0.03; and less where a step would overshoot: where counts or residual variances are large, hidden units
            many, or columns alike. It falls to 0 in `fit`.
        batch_size, n_iter: Rows an update, and passes over the table.
        n_chains, n_sweeps: Chains of the model, kept from update to update, and their Gibbs sweeps an update.
        verbose: Show progress on the standard error.
        random_state: As everywhere in scikit-learn.

    Attributes:
        machine_: The `massieu.nn.RestrictedBoltzmannMachine`, of rows in the units of `location_` and `scale_`.
        components_: Wᵀ, (n_components, n_features); a "categorical" column has a column for each of its values.
        intercept_visible_: a, (n_features,), or as many.
        intercept_hidden_: b, (n_components,).
        categories_: The values of each "categorical" column, in ascending order; None for other columns.
        location_: Where each column is counted from; 0 for bits, spins and counts.
        scale_: The unit of each column: (row − location_)/scale_ are the machine's visible units.
        log_partition_: log Z of the machine, exact where one layer has at most 2^20 states; else it is annealed, once, when
            it is first asked for.
        log_partition_error_: Its standard error; 0 where it is exact.
        n_iter_: Passes over the table.
        n_features_in_: How many columns; their names are `feature_names_in_`.

    Example:
        >>> import numpy as np
        >>> from massieu.sklearn import BoltzmannEstimator
        >>> table = np.repeat([[0, 0], [1, 1]], 50, axis=0)  # two columns that agree
        >>> model = BoltzmannEstimator(1, visible="bernoulli", hidden="spin", random_state=0).fit(table)
        >>> bool(model.score([[1, 1]]) > -1.39 > model.score([[0, 1]]))  # of independent bits: −1.39 nats
        True
    """

    def __init__(
        self,
        n_components: int = 16,
        *,
        visible: Kinds = "gaussian",
        hidden: str | Measure = "spin",
        residual_variance: float = 0.5,
        learning_rate: float | str = "auto",
        batch_size: int = 50,
        n_iter: int = 100,
        n_chains: int = 50,
        n_sweeps: int = 1,
        verbose: bool = False,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.visible = visible
        self.hidden = hidden
        self.residual_variance = residual_variance
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.n_iter = n_iter
        self.n_chains = n_chains
        self.n_sweeps = n_sweeps
        self.verbose = verbose
        self.random_state = random_state

    # Training.

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Maximise the likelihood by persistent contrastive divergence with centred gradients.

        Missing cells (NaN) are marginalised: whenever a row is used, a Gibbs sweep draws its missing cells anew given the
        others. That is right where cells are missing at random, whatever the cells that are there.

        Args:
            X: Rows, dense or sparse; NaN in a dense table is a missing cell.
            y: Not used.
            sample_weight: How often each row counts, (n_samples,), not negative. Only ratios matter, and a row of weight 0
                is left out. Training draws rows at random, so that a row of weight 2 has the law of two rows and not their
                draws.

        Raises:
            ValueError: infinity in X, or NaN in a sparse one; a column that holds what its kind of unit does not, or
                nothing; parameters or weights out of their range; two layers without a normaliser; a learning rate that is
                too large.
        """
        table = self._validated(X)
        weight = check_weights(sample_weight, table)
        if weight is not None:
            table = table[weight > 0]
            weight = weight[weight > 0]
            weight = weight / weight.mean()
        self._begin(table, weight)
        epochs = whole_number("n_iter", self.n_iter, least=1)
        self._train(table, weight, epochs=epochs, batch_size=self.batch_size)
        self.n_iter_ = epochs
        return self

    def partial_fit(self, X: Any, y: Any = None) -> Self:
        """One update from a batch of rows, of which cells may be missing. The first batch decides where columns are counted
        from, their units, and which values a "categorical" column has.
        """
        first = not hasattr(self, "machine_")
        table = self._validated(X, reset=first)
        if first:
            self._begin(table, None)
            self.n_iter_ = 0
        self._train(table, None, epochs=1, batch_size=table.shape[0])
        self.n_iter_ += 1
        return self

    def _begin(self, table: Table, weight: np.ndarray | None) -> None:
        """A machine of independent columns that have the table's means."""
        variance = number("residual_variance", self.residual_variance, above=0)
        count = whole_number("n_components", self.n_components, least=1)
        check_spread("X", table)
        wide = table.astype(np.float64)
        columns = Columns.of(self.visible, wide, getattr(self, "feature_names_in_", None), variance, weight)
        hidden = hidden_layer(self.hidden, count)
        self.random_state_ = check_random_state(self.random_state)
        self._annealing_seed = self._seed()
        dtype = torch.float32 if table.dtype == np.float32 else torch.float64
        self.machine_ = RestrictedBoltzmannMachine(
            columns.layer.measure, hidden.measure, generator=self._generator(), dtype=dtype
        )
        with torch.no_grad():
            self.machine_.visible_bias.copy_(torch.from_numpy(columns.bias))
        self._columns = columns
        self.location_ = columns.location
        self.scale_ = columns.scale
        self.categories_ = list(columns.categories)
        self._rate = learning_rate(columns.layer, hidden)
        self._n_features_out = len(self.machine_.hidden_bias)

    def _train(self, table: Table, weight: np.ndarray | None, *, epochs: int, batch_size: int) -> None:
        rate = number_or_auto("learning_rate", self.learning_rate)
        self._log_partition: tuple[float, float] | None = None
        by_row = None if weight is None else torch.from_numpy(weight).to(self.machine_.weight.dtype)
        if isinstance(table, np.ndarray):
            units = self._units(table)
            is_missing = units.isnan()
            missing = is_missing if bool(is_missing.any()) else None
            rows = self.machine_._training_rows(units, missing, by_row)
        else:
            rows = _SparseRows(table, self._units, by_row)
        self.machine_._train(
            rows,
            self._rate if rate is None else rate,
            self._generator(),
            bool(self.verbose),
            epochs=epochs,
            batch_size=batch_size,
            chains=whole_number("n_chains", self.n_chains, least=1),
            sweeps=whole_number("n_sweeps", self.n_sweeps, least=1),
        )

    # Features.

    def transform(self, X: Any) -> np.ndarray:
        """The mean hidden units of each row, (n_samples, n_components): of "categorical" ones, probabilities of states.

        Of a row with missing cells it is the mean given the others, computed as in `impute`.
        """
        check_is_fitted(self)
        return self._by_rows(self.machine_.transform, lambda completion: completion.hidden, X)

    def impute(self, X: Any) -> np.ndarray:
        """The rows with each missing cell (NaN) filled in, (n_samples, n_features), in the units of the table.

        A cell is filled with its mean given the row's other cells, under the machine's law: of a bit that is its
        probability. In a "categorical" column it is the likeliest value. The mean is exact, by a sum over the states of the
        hidden units, where these have at most 2^16. Otherwise it is the average over 1,000 Gibbs sweeps of a chain for each
        row, after 100 that are not counted; their seed is `random_state`'s, and the same in each call.
        """
        table = self._validated(X, reset=False)
        if not isinstance(table, np.ndarray):
            raise ValueError("impute needs a dense table: missing cells are NaN, which a sparse one cannot hold")
        is_missing = np.isnan(table)
        if not is_missing.any():
            return table.copy()
        completed = self._columns.table(self._complete(self._units(table)).visible.double().numpy())
        return np.where(is_missing, completed, table).astype(table.dtype)

    def _complete(self, units: Tensor) -> Completion:
        """What the machine knows of rows in its units, of which some are NaN."""
        machine = self.machine_.machine()
        is_missing = units.isnan()
        data = units.masked_fill(is_missing, 0.0)
        if is_enumerable(machine):
            return complete_exactly(machine, data, is_missing)
        generator = torch.Generator().manual_seed(self._annealing_seed)
        return complete_by_gibbs(machine, data, is_missing, sweeps=_GIBBS_SWEEPS, generator=generator)

    def inverse_transform(self, X: Any) -> np.ndarray:
        """The mean row given hidden units, (n_samples, n_features), in the units of the table."""
        check_is_fitted(self)
        hidden = np.asarray(X)
        if hidden.ndim != 2 or hidden.shape[1] != self._n_features_out:
            raise ValueError(f"hidden units must have shape (n_samples, {self._n_features_out}), got {hidden.shape}")
        machine = self.machine_.machine()
        with torch.no_grad():
            return self._table(machine.visible.mean(machine.visible_field(torch.tensor(hidden).to(machine.weight))))

    # Density.

    def score_samples(self, X: Any) -> np.ndarray:
        """log p of each row, nats, of the table in its own units. −inf for a row that no unit of these kinds can be.

        Of bits and counts it is the logarithm of a probability, of numbers that of a density: compare it between models
        of columns of the same kinds. Of a row with missing cells it is that of the cells that are there, which needs hidden
        units of at most 2^16 states.

        Raises:
            ValueError: missing cells, and hidden units of more states.
        """
        table = self._validated(X, reset=False)

        def of_complete(rows: Tensor) -> Tensor:
            return self.machine_.score_samples(rows, self.log_partition_)

        def of_incomplete(completion: Completion) -> Tensor:
            if completion.log_density is None:
                raise ValueError(
                    "the likelihood of rows with missing cells needs hidden units of at most 2^16 states; "
                    "impute and transform have no such bound"
                )
            return completion.log_density - self.log_partition_

        log_density = self._by_rows(of_complete, of_incomplete, table)
        log_scale = np.log(self.scale_)
        if isinstance(table, np.ndarray) and np.isnan(table).any():
            return log_density - (~np.isnan(table)) @ log_scale
        return log_density - log_scale.sum()

    def score(self, X: Any, y: Any = None) -> float:
        """The mean of `score_samples`: by it `GridSearchCV` chooses."""
        return float(self.score_samples(X).mean())

    def free_energy(self, X: Any) -> np.ndarray:
        """−log p of each row but for the normaliser, nats, in the machine's units (B2)."""
        with torch.no_grad():
            check_is_fitted(self)
            return self._by_rows(self.machine_.energy, None, X)

    def pseudo_log_likelihood(self, X: Any) -> np.ndarray:
        """Σ_i log p(v_i | all other columns) of each row, nats: exact and without a normaliser, for bits and spins alone.

        `BernoulliRBM.score_samples` estimates it from one random column.
        """
        check_is_fitted(self)
        return self._by_rows(self.machine_.pseudo_log_likelihood, None, X)

    @property
    def log_partition_(self) -> float:
        return self._normaliser()[0]

    @property
    def log_partition_error_(self) -> float:
        return self._normaliser()[1]

    def _normaliser(self) -> tuple[float, float]:
        """log Z and its standard error, computed when first asked for."""
        check_is_fitted(self)
        if self._log_partition is None:
            self._log_partition = self._compute_normaliser()
        return self._log_partition

    @torch.no_grad()
    def _compute_normaliser(self) -> tuple[float, float]:
        machine = self.machine_.machine()
        if _is_enumerable(self.machine_.visible.value()) or _is_enumerable(self.machine_.hidden.value()):
            return machine.log_partition().item(), 0.0
        generator = torch.Generator().manual_seed(self._annealing_seed)
        estimate = machine.estimate_log_partition(_ANNEALED_CHAINS, schedule=_ANNEALING_STEPS, generator=generator)
        return estimate.log_partition.item(), estimate.standard_error.item()

    # Draws.

    def sample(self, n_samples: int = 1, *, n_sweeps: int = 1000) -> np.ndarray:
        """Rows that the machine draws, (n_samples, n_features), each by a chain of its own of so many Gibbs sweeps."""
        check_is_fitted(self)
        return self._table(self.machine_.sample(n_samples, sweeps=n_sweeps, generator=self._generator()))

    def gibbs(self, X: Any) -> np.ndarray:
        """One Gibbs sweep: draw the hidden units of each row, and a new row given them."""
        check_is_fitted(self)
        machine = self.machine_.machine()
        generator = self._generator()

        def swept(rows: Tensor) -> Tensor:
            return machine.sample_visible(machine.sample_hidden(rows, generator), generator)

        with torch.no_grad():
            return self._table(torch.from_numpy(self._by_rows(swept, None, X)))

    # The machine's parameters as arrays.

    @property
    def components_(self) -> np.ndarray:
        return self.machine_.weight.detach().numpy().T.copy()

    @property
    def intercept_visible_(self) -> np.ndarray:
        return self.machine_.visible_bias.detach().numpy().copy()

    @property
    def intercept_hidden_(self) -> np.ndarray:
        return self.machine_.hidden_bias.detach().numpy().copy()

    # Rows in the machine's units, and back.

    def _validated(self, X: Any, *, reset: bool = True) -> Table:
        """The table, in which NaN is a missing cell."""
        if not reset:
            check_is_fitted(self)
        table = validate_data(self, X, dtype=DTYPES, accept_sparse="csr", ensure_all_finite="allow-nan", reset=reset)
        if not isinstance(table, np.ndarray) and np.isnan(table.data).any():
            raise ValueError("Input X contains NaN: a sparse table must be complete, missing cells go with a dense one")
        return table

    def _by_rows(
        self, of_complete: Callable[[Tensor], Tensor], of_incomplete: Callable[[Completion], Tensor] | None, X: Any
    ) -> np.ndarray:
        """Numbers of rows by a function of the machine's units.

        Args:
            of_complete: For rows in which no cell is missing.
            of_incomplete: For the others, of what the machine knows of them; None: they are refused.
            X: Rows, or what `_validated` has made of them.
        """
        table = self._validated(X, reset=False)
        if not isinstance(table, np.ndarray):
            starts = range(0, table.shape[0], _SPARSE_ROWS)
            blocks = [of_complete(self._units(table[start : start + _SPARSE_ROWS].toarray())) for start in starts]
            return torch.cat(blocks).numpy()
        units = self._units(table)
        is_incomplete = units.isnan().any(-1)
        if not bool(is_incomplete.any()):
            return of_complete(units).numpy()
        if of_incomplete is None:
            row = int(is_incomplete.nonzero()[0])
            raise ValueError(f"Input X contains NaN in row {row}: fill missing cells first, by impute")
        incomplete = of_incomplete(self._complete(units[is_incomplete]))
        results = incomplete.new_empty((len(units), *incomplete.shape[1:]))
        results[is_incomplete] = incomplete
        if not bool(is_incomplete.all()):
            results[~is_incomplete] = of_complete(units[~is_incomplete])
        return results.numpy()

    def _units(self, table: np.ndarray) -> Tensor:
        return torch.from_numpy(self._columns.units(table)).to(self.machine_.weight.dtype)

    def _table(self, rows: Tensor) -> np.ndarray:
        return self._columns.table(rows.double().numpy()).astype(rows.numpy().dtype)

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed())

    def _seed(self) -> int:
        return int(self.random_state_.randint(2**31 - 1))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        tags.input_tags.sparse = True
        tags.input_tags.allow_nan = True
        return tags


class _SparseRows(TrainingRows):
    """Rows of a sparse table, of which a batch at a time is dense."""

    def __init__(self, table: Any, units: Callable[[np.ndarray], Tensor], weight: Tensor | None) -> None:
        self._table = table
        self._units = units
        self.is_missing = None
        self.weight = weight

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def __len__(self) -> int:
        return self._table.shape[0]

    def take(self, index: Tensor) -> Tensor:
        return self._units(self._table[index.numpy()].toarray())

    def mean(self) -> Tensor:
        total: Any = 0.0
        for rows in torch.arange(len(self)).split(_SPARSE_ROWS):
            weight = torch.ones(len(rows)) if self.weight is None else self.weight[rows]
            total = total + weight.double() @ self.take(rows).double()
        return (total / len(self)).to(self.take(torch.arange(1)))


def _is_enumerable(layer: Measure) -> bool:
    """Whether the states of a layer are few enough to sum over them."""
    count = sites.num_states(layer)
    return count is not None and count <= sites.MAX_STATES
