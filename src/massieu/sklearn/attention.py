"""Softmax attention over the rows as a regressor: the Nadaraya–Watson estimate."""

from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from massieu import ops
from massieu.foundation.arguments import choice
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
    variance_of,
    without_weightless,
)

_QUERIES = 1000
"""Most rows that are left out, one by one, to choose a scale."""
_POWERS = range(-4, 17)
"""Powers of 2: the scales that are tried, in units of 1/the total variance."""


class AttentionRegressor(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """ŷ(x) = Σ pₙyₙ with p = softmax of scores: attention whose keys and values are the rows, and nothing is trained.

    With scores −scale·‖x − xₙ‖²/2 it is the Nadaraya–Watson estimate, with a Gaussian kernel of bandwidth 1/√scale; with
    scale·x·xₙ it is a transformer's attention. Predictions are means of the values, so they never leave their range. At a
    fixed scale there is a bias that more rows do not remove (Z7); `ConditionalMeanRegressor` has none.

    Distances are between rows as given: scale the columns first, as by `StandardScaler`.

    Args:
        scores: "distance" or "dot_product", of rows about their mean.
        scale: The inverse temperature. "auto" takes the power of 2, in units of 1/the total variance, of the least
            leave-one-out error over at most 1,000 rows.

    Attributes:
        scale_: The scale.
        leave_one_out_error_: The mean squared error of rows predicted from all others, in units of the targets'
            variances; NaN of a single row.
        n_features_in_: How many columns; their names are `feature_names_in_`.

    Example:
        >>> from massieu.sklearn import AttentionRegressor
        >>> model = AttentionRegressor(scale=1e3).fit([[0.0], [1.0], [2.0]], [5.0, 7.0, 6.0])
        >>> model.predict([[0.9]]).round(3).tolist()  # the nearest row has all of the attention
        [7.0]
    """

    def __init__(self, *, scores: str = "distance", scale: float | str = "auto") -> None:
        self.scores = scores
        self.scale = scale

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Keep the rows, and choose the scale.

        Args:
            X: Rows.
            y: Targets, (n_samples,) or (n_samples, n_targets).
            sample_weight: Weights of the rows, (n_samples,), by which exp(score) is multiplied; by default 1. At one scale a
                row of weight 2 is two equal rows; to choose the scale, a row is left out as a whole.

        Raises:
            ValueError: NaN or infinity, arguments out of their range.
        """
        table, target = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        choice("scores", self.scores, "distance", "dot_product")
        check_spread("X", table)
        check_spread("y", target)
        weight = check_weights(sample_weight, table)
        weight, (table, target) = without_weightless(table, weight, target)
        rows = tensor(table)
        values = tensor(target)
        self._weight = None if weight is None else tensor(weight)
        self._has_one_target = values.ndim == 1
        self._values = values.reshape(len(values), -1)
        self._centre = mean_of(rows, self._weight)
        self._keys = rows - self._centre
        scales = self._scales()
        if len(rows) > 1:
            left_out = sample_of(len(rows), _QUERIES)
            errors = [self._leave_one_out_error(scale, left_out) for scale in scales]
        else:
            # A single row has no others.
            errors = [np.nan] * len(scales)
        self.scale_, self.leave_one_out_error_ = best(errors, scales)
        return self

    def _scales(self) -> list[float]:
        scale = number_or_auto("scale", self.scale)
        if scale is not None:
            return [scale]
        return [2.0**power / total_variance(self._keys, self._weight) for power in _POWERS]

    def _leave_one_out_error(self, scale: float, index: Tensor) -> float:
        """Mean squared error of the rows of an index, each predicted from all other rows, in the targets' variances."""
        variance = variance_of(self._values, self._weight)
        # The errors of a target that does not vary are 0 in any unit.
        variance = torch.where(variance > 0, variance, 1.0)
        count = len(self._keys)
        total = 0.0
        for block in blocks(len(index), count):
            left_out = index[block]
            mask = torch.zeros(len(left_out), count, dtype=torch.float64)
            mask.masked_fill_(~others(left_out, count), -torch.inf)
            predicted = self._attend(self._keys[left_out], scale, mask)
            errors = ((predicted - self._values[left_out]).square() / variance).mean(-1)
            total += (errors.sum() if self._weight is None else self._weight[left_out] @ errors).item()
        return total / (len(index) if self._weight is None else self._weight[index].sum().item())

    def _attend(self, query: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
        """The mean value under the attention of each query; `mask` has −∞ where a query does not see a row."""
        log_weight = mask
        if self._weight is not None:
            log_weight = self._weight.log() if mask is None else mask + self._weight.log()
        if self.scores == "distance":
            # −scale·‖x − xₙ‖²/2 is scale·x·xₙ less a half of each square; that of x changes no weight.
            of_rows = -0.5 * scale * self._keys.square().sum(-1)
            log_weight = of_rows if log_weight is None else log_weight + of_rows
        rows = as_heads(self._keys)
        values = as_heads(self._values)
        return ops.attention(as_heads(query), rows, values, scale=scale, log_weight=log_weight).output[0, 0]

    def predict(self, X: Any) -> np.ndarray:
        """The mean value under the attention of each row, (n_samples,) or (n_samples, n_targets)."""
        check_is_fitted(self)
        query = tensor(validate_data(self, X, dtype=np.float64, reset=False)) - self._centre
        means = in_blocks(lambda block: self._attend(block, self.scale_), query, len(self._keys))
        if self._has_one_target:
            means = means[:, 0]
        return means.numpy()
