"""A Boltzmann machine of any units as a scikit-learn estimator."""

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
from massieu.sklearn.rows import check_spread, number_or_auto, validate_data
from massieu.sklearn.units import Columns, Kinds, hidden_layer, learning_rate

DTYPES = [np.float64, np.float32]
_ANNEALED_CHAINS = 256
"""Chains of annealed importance sampling, where the normaliser cannot be enumerated."""
_ANNEALING_STEPS = 1000


class BoltzmannEstimator(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """A restricted Boltzmann machine of which both layers have units of any kind: p(v, h) ∝ exp(vᵀWh + a·v + b·h) (B1).

    It does what scikit-learn's `BernoulliRBM` does for bits, for counts, numbers and mixed tables too. Likelihoods are
    those of the table in its own units, in nats, normaliser included: they can be compared with those of other densities,
    and `GridSearchCV` compares them by itself.

    Columns that are "gaussian" are counted from their mean in units of their standard deviation: rescaling one changes
    nothing but the units of the density. Of positive, skewed columns and large counts take logarithms before.

    Args:
        n_components: How many hidden units.
        visible: "gaussian" (numbers), "bernoulli" (0 and 1), "spin" (±1) or "poisson" (counts); one for all columns, or
            a list with one for each. Or a `massieu.measures.Measure` on rows.
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
        components_: Wᵀ, (n_components, n_features).
        intercept_visible_: a, (n_features,).
        intercept_hidden_: b, (n_components,).
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

    def fit(self, X: Any, y: Any = None) -> Self:
        """Maximise the likelihood by persistent contrastive divergence with centred gradients.

        Raises:
            ValueError: NaN or infinity in X; a column that holds what its kind of unit does not; parameters out of their
                range; two layers without a normaliser; a learning rate that is too large.
        """
        table = validate_data(self, X, dtype=DTYPES)
        self._begin(table)
        epochs = whole_number("n_iter", self.n_iter, least=1)
        self._train(table, epochs=epochs, batch_size=self.batch_size)
        self.n_iter_ = epochs
        return self

    def partial_fit(self, X: Any, y: Any = None) -> Self:
        """One update from a batch of rows. The first batch decides where columns are counted from, and their units."""
        first = not hasattr(self, "machine_")
        table = validate_data(self, X, dtype=DTYPES, reset=first)
        if first:
            self._begin(table)
            self.n_iter_ = 0
        self._train(table, epochs=1, batch_size=len(table))
        self.n_iter_ += 1
        return self

    def _begin(self, table: np.ndarray) -> None:
        """A machine of independent columns that have the table's means."""
        variance = number("residual_variance", self.residual_variance, above=0)
        count = whole_number("n_components", self.n_components, least=1)
        check_spread("X", table)
        wide = table.astype(np.float64)
        columns = Columns.of(self.visible, wide, getattr(self, "feature_names_in_", None), variance)
        hidden = hidden_layer(self.hidden, count)
        self.random_state_ = check_random_state(self.random_state)
        self._annealing_seed = self._seed()
        dtype = torch.float32 if table.dtype == np.float32 else torch.float64
        self.machine_ = RestrictedBoltzmannMachine(
            columns.layer.measure, hidden.measure, generator=self._generator(), dtype=dtype
        )
        with torch.no_grad():
            self.machine_.visible_bias.copy_(torch.from_numpy(columns.bias))
        self.location_ = columns.location
        self.scale_ = columns.scale
        self._rate = learning_rate(columns.layer, hidden)
        self._n_features_out = len(self.machine_.hidden_bias)

    def _train(self, table: np.ndarray, *, epochs: int, batch_size: int) -> None:
        rate = number_or_auto("learning_rate", self.learning_rate)
        self._log_partition: tuple[float, float] | None = None
        self.machine_.fit(
            self._units(table),
            epochs=epochs,
            batch_size=batch_size,
            chains=whole_number("n_chains", self.n_chains, least=1),
            sweeps=whole_number("n_sweeps", self.n_sweeps, least=1),
            learning_rate=self._rate if rate is None else rate,
            generator=self._generator(),
            progress=bool(self.verbose),
        )

    # Features.

    def transform(self, X: Any) -> np.ndarray:
        """The mean hidden units of each row, (n_samples, n_components): of "categorical" ones, probabilities of states."""
        rows = self._read(X)
        return self.machine_.transform(rows).numpy()

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
        of columns of the same kinds.
        """
        rows = self._read(X)
        return self.machine_.score_samples(rows, self.log_partition_).numpy() - np.log(self.scale_).sum()

    def score(self, X: Any, y: Any = None) -> float:
        """The mean of `score_samples`: by it `GridSearchCV` chooses."""
        return float(self.score_samples(X).mean())

    def free_energy(self, X: Any) -> np.ndarray:
        """−log p of each row but for the normaliser, nats, in the machine's units (B2)."""
        rows = self._read(X)
        with torch.no_grad():
            return self.machine_.energy(rows).numpy()

    def pseudo_log_likelihood(self, X: Any) -> np.ndarray:
        """Σ_i log p(v_i | all other columns) of each row, nats: exact and without a normaliser, for bits and spins alone.

        `BernoulliRBM.score_samples` estimates it from one random column.
        """
        rows = self._read(X)
        return self.machine_.pseudo_log_likelihood(rows).numpy()

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
        rows = self._read(X)
        machine, generator = self.machine_.machine(), self._generator()
        with torch.no_grad():
            return self._table(machine.sample_visible(machine.sample_hidden(rows, generator), generator))

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

    def _read(self, X: Any) -> Tensor:
        check_is_fitted(self)
        return self._units(validate_data(self, X, dtype=DTYPES, reset=False))

    def _units(self, table: np.ndarray) -> Tensor:
        return torch.from_numpy((table - self.location_) / self.scale_).to(self.machine_.weight.dtype)

    def _table(self, rows: Tensor) -> np.ndarray:
        return (rows.double().numpy() * self.scale_ + self.location_).astype(rows.numpy().dtype)

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed())

    def _seed(self) -> int:
        return int(self.random_state_.randint(2**31 - 1))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def _is_enumerable(layer: Measure) -> bool:
    """Whether the states of a layer are few enough to sum over them."""
    count = sites.num_states(layer)
    return count is not None and count <= sites.MAX_STATES
