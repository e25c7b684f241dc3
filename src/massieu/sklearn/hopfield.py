"""A Hopfield memory of rows: a density, a denoiser, and a detector of what is foreign."""

import math
import warnings
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, OutlierMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from massieu import ops
from massieu.energy import HopfieldDensity, HopfieldEnergy
from massieu.energy.hopfield import by_distance, checked_scale
from massieu.errors import ConvergenceWarning
from massieu.foundation.arguments import number, whole_number
from massieu.measures import Atoms
from massieu.sklearn.rows import (
    as_heads,
    best,
    blocks,
    check_spread,
    check_weights,
    in_blocks,
    mean_of,
    number_or_auto,
    others,
    sample_of,
    tensor,
    total_variance,
    validate_data,
    without_weightless,
)
from massieu.solve import Status

_QUERIES = 1000
"""Rows at most that are left out, one by one, to choose a scale and a threshold."""
_POWERS = range(-4, 17)
"""Of 2: the scales that are tried, in units of the dimension over the total variance."""
_TOLERANCE = 1e-6
_MOST_STEPS = 1000


class HopfieldMemory(OneToOneFeatureMixin, OutlierMixin, TransformerMixin, BaseEstimator):
    """Rows stored in a Hopfield energy by distance, −log Σ exp(−scale·‖x − xₙ‖²/2)/scale: it is three things at once (B6).

    - A density: exp(−scale·energy) is a kernel density estimate, Gaussian, of bandwidth 1/√scale: `score_samples`.
    - A denoiser: a step of attention over the rows is the mean row given a noisy one; steps to the end find the stored
      row, or the mode, that a damaged row belongs to: `transform`.
    - A detector: rows of less density than nearly all stored ones had from the others are foreign: `predict` gives −1.

    Distances are between rows as given: scale the columns first, as by `StandardScaler`.

    Args:
        scale: The inverse temperature, 1/bandwidth². "auto" takes the power of 2, in units of dimension/total variance, of
            the largest leave-one-out likelihood over at most 1,000 rows.
        n_steps: Steps of attention in `transform`; None goes on until a row rests. Many steps at the scale of a density
            find few modes; to retrieve single rows takes a larger scale.
        false_alarm_rate: The share of rows like the stored ones that `predict` calls foreign.

    Attributes:
        scale_: The scale.
        leave_one_out_score_: The mean log-density of rows under the memory of all others, nats.
        offset_: The threshold of `score_samples`: so large a share of the rows is below, each by the memory of the others.
        energy_: The `massieu.energy.HopfieldEnergy`, of rows less `location_`, their mean.
        n_features_in_: How many columns; their names are `feature_names_in_`.

    Example:
        >>> from massieu.sklearn import HopfieldMemory
        >>> memory = HopfieldMemory(scale=4.0, n_steps=None).fit([[1.0, 2.0], [4.0, 5.0]])
        >>> memory.transform([[1.5, 1.6]]).round(2).tolist()
        [[1.0, 2.0]]
    """

    def __init__(self, *, scale: float | str = "auto", n_steps: int | None = 1, false_alarm_rate: float = 0.05) -> None:
        self.scale = scale
        self.n_steps = n_steps
        self.false_alarm_rate = false_alarm_rate

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Store the rows; choose scale and threshold by leaving out each row of a sample in turn.

        Args:
            X: Rows, without missing cells.
            y: Not used.
            sample_weight: Weights of the rows in the density, (n_samples,), of which only the ratios matter; by default 1. At
                one scale a row of weight 2 is two equal rows; to choose scale and threshold, a row is left out as a whole.

        Raises:
            ValueError: NaN or infinity in X, fewer than two rows, arguments out of their range.
        """
        table = validate_data(self, X, dtype=[np.float64, np.float32], ensure_min_samples=2)
        rate = number("false_alarm_rate", self.false_alarm_rate, above=0, below=1)
        if self.n_steps is not None:
            whole_number("n_steps", self.n_steps, least=1)
        check_spread("X", table)
        weight = check_weights(sample_weight, table)
        weight, (table,) = without_weightless(table, weight)
        if len(table) < 2:
            raise ValueError(f"a memory needs at least two rows of positive weight, got {len(table)}")
        rows = tensor(table)
        row_weight = None if weight is None else tensor(weight / weight.sum())
        log_weight = None if row_weight is None else row_weight.log()
        location = mean_of(rows, row_weight)
        self.location_ = location.numpy()
        rows = rows - location
        left_out = sample_of(len(rows), _QUERIES)
        scale = number_or_auto("scale", self.scale)
        scales = _scales(rows, row_weight) if scale is None else [scale]
        scores = [_leave_one_out_scores(rows, scale, left_out, log_weight) for scale in scales]
        of_sample = None if row_weight is None else row_weight[left_out]
        means = [mean_of(score.unsqueeze(1), of_sample).item() for score in scores]
        self.scale_, loss = best([-mean for mean in means], scales)
        self.leave_one_out_score_ = -loss
        # The threshold of outliers: so large a share of the rows lies below it.
        self.offset_ = _quantile(scores[scales.index(self.scale_)], rate, of_sample)
        # Not by `euclidean`, which warns of patterns that overlap: a density needs that they do.
        atoms = Atoms.create(rows, log_weight)
        memory = by_distance(atoms, checked_scale(atoms, self.scale_))
        self.energy_ = HopfieldEnergy.create(memory, scale=self.scale_)
        self._log_weight = log_weight
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Each row after `n_steps` of attention over the stored rows, or where it rests."""
        query, dtype = self._read(X)
        return (in_blocks(self._retrieve, query, self._count).numpy() + self.location_).astype(dtype)

    def _retrieve(self, query: Tensor) -> Tensor:
        if self.n_steps is not None:
            return self.energy_.retrieve(query, steps=self.n_steps).state
        result = self.energy_.retrieve(query, tol=_TOLERANCE, max_steps=_MOST_STEPS, throw=False)
        num_moving = int((result.status != Status.CONVERGED).sum())
        if num_moving:
            warnings.warn(
                f"{num_moving} of {len(query)} rows still moved after {_MOST_STEPS} steps; their last states are returned",
                ConvergenceWarning,
                stacklevel=4,
            )
        return result.state

    def impute(self, X: Any) -> np.ndarray:
        """The rows with each missing cell (NaN) filled by its mean given the row's other cells, under the density.

        That is a step of attention whose scores are distances in the other cells: exact, in closed form.
        """
        check_is_fitted(self)
        table = validate_data(self, X, dtype=[np.float64, np.float32], ensure_all_finite="allow-nan", reset=False)
        query = tensor(table) - torch.from_numpy(self.location_)
        filled = in_blocks(self._filled, query, self._count).numpy() + self.location_
        # Cells that are there stay as they are, to the last bit.
        return np.where(np.isnan(table), filled, table).astype(table.dtype)

    def _filled(self, query: Tensor) -> Tensor:
        rows = self.energy_.memory.points
        is_known = ~query.isnan()
        known = torch.where(is_known, query, 0.0)
        # −scale·Σ (x − xₙ)²/2 over the known cells, less x's own squares, which change no weight.
        score = self.scale_ * (known @ rows.mT - 0.5 * is_known.to(rows) @ rows.square().mT)
        if self._log_weight is not None:
            score = score + self._log_weight
        return torch.where(is_known, query, score.softmax(-1) @ rows)

    def score_samples(self, X: Any) -> np.ndarray:
        """The log-density of each row, nats: that of a Gaussian kernel density estimate."""
        query, _ = self._read(X)
        return in_blocks(HopfieldDensity.create(self.energy_).log_prob, query, self._count).numpy()

    def score(self, X: Any, y: Any = None) -> float:
        """The mean of `score_samples`: by it `GridSearchCV` chooses."""
        return float(self.score_samples(X).mean())

    def decision_function(self, X: Any) -> np.ndarray:
        """`score_samples` less `offset_`: negative for foreign rows."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: Any) -> np.ndarray:
        """1 for a row like those stored, −1 for a foreign one."""
        return np.where(self.decision_function(X) >= 0, 1, -1)

    @property
    def _count(self) -> int:
        return len(self.energy_.memory.points)

    def _read(self, X: Any) -> tuple[Tensor, np.dtype]:
        check_is_fitted(self)
        table = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        return tensor(table) - torch.from_numpy(self.location_), table.dtype

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def _scales(rows: Tensor, weight: Tensor | None) -> list[float]:
    unit = rows.shape[-1] / total_variance(rows, weight)
    return [2.0**power * unit for power in _POWERS]


def _quantile(scores: Tensor, rate: float, weight: Tensor | None) -> float:
    """The score below which a share of the rows lies; with weights, the first at which their share is reached."""
    if weight is None:
        return scores.quantile(rate).item()
    ordered, order = scores.sort()
    share = weight[order].cumsum(0) / weight.sum()
    return ordered[int(torch.searchsorted(share, rate).clamp_max(len(scores) - 1))].item()


def _leave_one_out_scores(rows: Tensor, scale: float, index: Tensor, log_weight: Tensor | None) -> Tensor:
    """log-densities of the rows of an index, each under the memory of all other rows.

    −scale·‖x − xₙ‖²/2 is scale·x·xₙ less a half of each square, so that the sum over the rows is a log-partition.

    Args:
        log_weight: Logarithms of the rows' shares; None: they are equal.
    """
    count, size = rows.shape
    half_square = 0.5 * scale * rows.square().sum(-1)
    of_rows = -half_square if log_weight is None else log_weight - half_square
    log_sums = []
    for block in blocks(len(index), count):
        left_out = index[block]
        seen = of_rows.expand(len(left_out), -1).masked_fill(~others(left_out, count), -torch.inf)
        query = as_heads(rows[left_out])
        log_partition = ops.log_partition(query, as_heads(rows), log_weight=seen, scale=scale)[0, 0]
        log_sums.append(log_partition - half_square[left_out])
    # The mean over the other rows of Gaussian densities of variance 1/scale.
    log_others = math.log(count - 1) if log_weight is None else torch.log1p(-log_weight[index].exp())
    return torch.cat(log_sums) - log_others + 0.5 * size * math.log(scale / (2 * math.pi))
