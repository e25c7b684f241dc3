"""The conditional mean over the rows as a regressor: kernel ridge regression with what chooses and judges it."""

from typing import Any, NamedTuple, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from massieu.foundation.arguments import choice
from massieu.regression import (
    Cholesky,
    ExponentialKernel,
    GaussianKernel,
    Kernel,
    LinearKernel,
    LowRank,
    conditional_mean_attention,
    leave_one_out,
)
from massieu.regression.leave_one_out import RidgeErrors
from massieu.sklearn.rows import (
    as_heads,
    best,
    blocks,
    check_spread,
    check_weights,
    mean_of,
    number_or_auto,
    sample_of,
    tensor,
    total_variance,
    validate_data,
    variance_of,
    without_weightless,
)
from massieu.solve import ConjugateGradients

_ROWS = 1000
"""Most rows by which kernel and ridge are chosen."""
_LENGTHSCALES = {"gaussian": range(-3, 4), "exponential": range(-1, 4)}
"""Powers of 2: the lengthscales that are tried, in units of the total standard deviation."""
_RIDGES = range(-5, 5)
"""Powers of 10: the ridges that are tried, in units of the kernel's size."""
_FINER = (-0.75, -0.5, -0.25, 0.25, 0.5, 0.75)
"""Powers of 10 around the best of them."""
_UNSCREENED = 600
"""Most rows for which every lengthscale is tried on all rows; of more, a quarter of the rows rules some out."""
_HOPELESS = 2.0
"""Times the least error on the quarter: a lengthscale whose error is larger there is ruled out."""
_EQUAL = 1.05
"""Times the least error on the quarter: the quarter cannot tell two lengthscales apart that are closer."""
_WORSE = 1.15
"""Times the least error on all rows: a lengthscale whose error is larger, at the quarter's ridge, is ruled out."""
_TINY = 1e-2
"""Of the targets' variance: errors below it do not rule out, as more rows may lower them by powers of ten."""
_LARGEST = 600.0
"""Logarithm of a kernel's value that is still well inside the floating range."""


class _Choice(NamedTuple):
    """A kernel and a ridge, and their leave-one-out error."""

    error: float
    lengthscale: float
    ridge: float
    kernel: Kernel


class _Tokens(NamedTuple):
    """Rows about their mean, targets in units of their deviation, and the rows' weights."""

    keys: Tensor
    values: Tensor
    weight: Tensor | None

    @property
    def log_weight(self) -> Tensor | None:
        return None if self.weight is None else self.weight.log()

    def rows(self, index: Tensor) -> "_Tokens":
        """Some of the rows."""
        return _Tokens(self.keys[index], self.values[index], None if self.weight is None else self.weight[index])


class ConditionalMeanRegressor(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """ŷ(x) = Vᵀ(G + λI)⁻¹κ(X, x): the mean of y given x by kernel ridge regression over the rows, its tokens (Z4, Z5).

    It is `KernelRidge` and the mean of `GaussianProcessRegressor`, for columns and targets about their means; lengthscale
    and ridge are chosen by the leave-one-out error, which has a closed form. Distances are between rows as given: scale
    the columns first, as by `StandardScaler`.

    Nothing is trained: the rows are kept, and each call of `predict` solves the system of equations again.

    Args:
        kernel: "gaussian", exp(−‖a − b‖²/(2·lengthscale²)); "exponential", exp(a·b/lengthscale²), softmax attention's;
            "linear", a·b, which makes it ridge regression. Or a `massieu.regression.Kernel`.
        lengthscale: "auto" tries powers of 2 of the total standard deviation. The linear kernel, or your own, has none. Of
            more than 600 rows, a quarter rules out lengthscales that are clearly worse, before all rows are used.
        ridge: λ. "auto" tries powers of 10, then four steps in each.
        method: How the system is solved: None, or one of `massieu.regression`'s `Cholesky` and `LowRank`, or
            `massieu.solve.ConjugateGradients`; see `conditional_mean_attention`.

    Attributes:
        lengthscale_: What was given or chosen; NaN for a kernel that has none.
        ridge_: What was given or chosen.
        kernel_: The `massieu.regression.Kernel`.
        leave_one_out_error_: The mean squared error of rows predicted from all others, in units of the targets'
            variances, over at most 1,000 rows, by which kernel and ridge are chosen.
        noise_variance_: Of the targets about the mean: that of most likelihood at this kernel and ridge, over the same
            rows; one for each target.
        prior_variance_: Of the mean, where nothing is known: noise_variance_/ridge_.
        n_features_in_: How many columns; their names are `feature_names_in_`.

    Example:
        >>> import numpy as np
        >>> from massieu.sklearn import ConditionalMeanRegressor
        >>> x = np.linspace(0, 6, 40)[:, None]
        >>> mean, deviation = (
        ...     ConditionalMeanRegressor().fit(x, np.sin(x[:, 0])).predict([[1.5], [9.0]], return_std=True)
        ... )
        >>> round(float(mean[0]), 2), bool(deviation[1] > 10 * deviation[0])  # far from all rows nothing is known
        (1.0, True)
    """

    def __init__(
        self,
        *,
        kernel: str | Kernel = "gaussian",
        lengthscale: float | str = "auto",
        ridge: float | str = "auto",
        method: Cholesky | ConjugateGradients | LowRank | None = None,
    ) -> None:
        self.kernel = kernel
        self.lengthscale = lengthscale
        self.ridge = ridge
        self.method = method

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Keep the rows, and choose lengthscale and ridge.

        Args:
            X: Rows.
            y: Targets, (n_samples,) or (n_samples, n_targets).
            sample_weight: The precision of each row's target, (n_samples,), by default 1: its ridge is λ divided by it. At one
                kernel and ridge a row of weight 2 is two equal rows; to choose them, a row is left out as a whole.

        Raises:
            ValueError: NaN or infinity, arguments out of their range, a ridge at which the system is singular.
        """
        table, target = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        weight = check_weights(sample_weight, table)
        check_spread("X", table)
        check_spread("y", target)
        weight, (table, target) = without_weightless(table, weight, target)
        rows = tensor(table)
        values = tensor(target)
        self._weight = None if weight is None else tensor(weight)
        self._has_one_target = values.ndim == 1
        values = values.reshape(len(values), -1)
        self._centre = mean_of(rows, self._weight)
        self._mean = mean_of(values, self._weight)
        deviation = variance_of(values, self._weight).sqrt()
        self._deviation = torch.where(deviation > 0, deviation, 1.0)
        self._keys = rows - self._centre
        self._values = (values - self._mean) / self._deviation
        tokens = _Tokens(self._keys, self._values, self._weight).rows(sample_of(len(rows), _ROWS))
        chosen = self._choose(tokens)
        self.leave_one_out_error_ = chosen.error
        self.lengthscale_ = chosen.lengthscale
        self.ridge_ = chosen.ridge
        self.kernel_ = chosen.kernel
        self._estimate_variances(tokens)
        return self

    def _choose(self, tokens: _Tokens) -> _Choice:
        """The kernel and the ridge with the least leave-one-out error."""
        lengthscales = self._lengthscales(tokens)
        if len(tokens.keys) > _UNSCREENED and len(lengthscales) > 1:
            return self._choose_by_screening(tokens, lengthscales)
        choices = [self._with_best_ridge(tokens, lengthscale) for lengthscale in lengthscales]
        return best([each.error for each in choices], choices)[0]

    def _choose_by_screening(self, tokens: _Tokens, lengthscales: list[float]) -> _Choice:
        """The same choice, but all ridges are tried on all rows only at lengthscales that may be the best.

        A quarter of the rows, which takes a 64th of the time, rules out most. Of each other lengthscale one error of all rows
        is computed, at the ridge that is best for the quarter.
        """
        quarter = tokens.rows(sample_of(len(tokens.keys), len(tokens.keys) // 4))
        screened = [self._with_best_ridge(quarter, lengthscale) for lengthscale in lengthscales]
        least = min(each.error for each in screened)
        hopeful = [each for each in screened if each.error <= _HOPELESS * least + _TINY]
        on_all_rows = [_error(tokens, each.kernel, each.ridge) for each in hopeful]
        rivals = sorted(zip(on_all_rows, hopeful, strict=True), key=lambda rival: rival[0])
        chosen = self._with_best_ridge(tokens, rivals[0][1].lengthscale)
        for error, rival in rivals[1:]:
            if error <= _WORSE * chosen.error or rival.error <= _EQUAL * least:
                chosen = min(chosen, self._with_best_ridge(tokens, rival.lengthscale), key=lambda each: each.error)
        return chosen

    def _lengthscales(self, tokens: _Tokens) -> list[float]:
        """The lengthscales to try; NaN for a kernel that has none."""
        if isinstance(self.kernel, Kernel) or choice("kernel", self.kernel, *_KERNELS) == "linear":
            return [np.nan]
        lengthscale = number_or_auto("lengthscale", self.lengthscale)
        if lengthscale is not None:
            return [lengthscale]
        spread = total_variance(tokens.keys, tokens.weight) ** 0.5
        return [2.0**power * spread for power in _LENGTHSCALES[self.kernel]]

    def _with_best_ridge(self, tokens: _Tokens, lengthscale: float) -> _Choice:
        """The ridge with the least leave-one-out error at one lengthscale, unless the ridge is given."""
        kernel = self.kernel if isinstance(self.kernel, Kernel) else _KERNELS[self.kernel](lengthscale)
        key = as_heads(tokens.keys)
        value = as_heads(tokens.values)
        ridge = number_or_auto("ridge", self.ridge)
        if ridge is not None:
            return _Choice(_error(tokens, kernel, ridge), lengthscale, ridge, kernel)
        errors = RidgeErrors(key, value, kernel=kernel, log_weight=tokens.log_weight)

        def best_of(ridges: list[float]) -> tuple[float, float]:
            ridge, error = best(errors.at(ridges).flatten().tolist(), ridges)
            return error, ridge

        unit = _ridge_unit(kernel, key)
        error, ridge = best_of([unit * 10.0**power for power in _RIDGES])
        error, ridge = min((error, ridge), best_of([ridge * 10.0**power for power in _FINER]))
        return _Choice(error, lengthscale, ridge, kernel)

    def _estimate_variances(self, tokens: _Tokens) -> None:
        """The most likely prior variance is vᵀ(G + λI)⁻¹v/N, and that of the noise λ times as large."""
        key = as_heads(tokens.keys)
        value = as_heads(tokens.values)
        fitted = conditional_mean_attention(
            key, key, value, kernel=self.kernel_, ridge=self.ridge_, log_weight=tokens.log_weight
        ).output[0, 0]
        # v − fitted = λW⁻¹(G + λW⁻¹)⁻¹v, with W the weights.
        noise = mean_of(tokens.values * (tokens.values - fitted), tokens.weight) * self._deviation.square()
        self.noise_variance_ = noise.numpy()
        self.prior_variance_ = self.noise_variance_ / self.ridge_

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The conditional mean of each row, (n_samples,) or (n_samples, n_targets).

        Args:
            X: Rows.
            return_std: Return the standard deviation of a new target at each row too, its noise included.
        """
        check_is_fitted(self)
        query = tensor(validate_data(self, X, dtype=np.float64, reset=False)) - self._centre
        answers = [self._answer(query[block], return_std) for block in blocks(len(query), len(self._keys))]
        mean = torch.cat([means for means, _ in answers]) * self._deviation + self._mean
        if self._has_one_target:
            mean = mean[:, 0]
        if not return_std:
            return mean.numpy()
        share = torch.cat([shares for _, shares in answers]).numpy()[:, None]
        deviation = np.sqrt(self.noise_variance_ + self.prior_variance_ * share)
        if self._has_one_target:
            deviation = deviation[:, 0]
        return mean.numpy(), deviation

    def _answer(self, query: Tensor, need_variance: bool) -> tuple[Tensor, Tensor]:
        """Means of the targets in units of their deviation, and the posterior's share of the prior variance, if needed."""
        result = conditional_mean_attention(
            as_heads(query),
            as_heads(self._keys),
            as_heads(self._values),
            kernel=self.kernel_,
            ridge=self.ridge_,
            log_weight=None if self._weight is None else self._weight.log(),
            need_variance=need_variance,
            method=self.method,
        )
        share = query.new_empty(0) if result.variance is None else result.variance[0, 0]
        return result.output[0, 0], share


def _error(tokens: _Tokens, kernel: Kernel, ridge: float) -> float:
    """The leave-one-out error at one kernel and ridge."""
    result = leave_one_out(
        as_heads(tokens.keys), as_heads(tokens.values), kernel=kernel, ridge=ridge, log_weight=tokens.log_weight
    )
    return result.mean_squared_error.item()


def _ridge_unit(kernel: Kernel, keys: Tensor) -> float:
    """The size of the kernel's values, in units of which ridges are tried."""
    if isinstance(kernel, ExponentialKernel):
        # Its values are most uneven: the smallest ridge must count beside the largest of them.
        return 1e-5 * kernel.log_diagonal(keys).max().clamp(max=_LARGEST).exp().item()
    return kernel.diagonal(keys).mean().item() or 1.0


_KERNELS = {
    "gaussian": GaussianKernel.create,
    "exponential": lambda width: ExponentialKernel.create(width**-2),
    "linear": lambda _: LinearKernel.create(),
}
