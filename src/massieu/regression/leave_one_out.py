"""Every token's value predicted from all others, in closed form, and the ridge chosen by it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.foundation.arguments import check_range, check_values, doubles
from massieu.foundation.short_repr import fields_html, fields_repr
from massieu.foundation.transforms import all_true, unwrapped
from massieu.regression.exact import features_factor, solve_lower
from massieu.regression.kernels import Kernel
from massieu.regression.tokens import KeyValuePairs, Ridge, check_tokens, need_positive

_SPECTRAL_ERROR = 1e-6
"""Relative error allowed when eigenvalues are used: their rounding, ε times the largest, divided by the ridge."""

_COLUMN_BLOCKS = 4
"""Blocks of columns in which a triangular matrix is inverted: half of the operations of one block."""


class LeaveOneOutResult(NamedTuple):
    """The errors of predicting each token from all others."""

    residual: Float[Tensor, "B H N E"]
    """value − its prediction from all other tokens; 0 for hidden tokens."""
    mean_squared_error: Float[Tensor, "B H"]
    """Mean of the squared residuals over tokens, by their weights, and over the value's coordinates."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


class RidgeChoiceResult(NamedTuple):
    """The ridge of the least leave-one-out error, for each head."""

    ridge: Float[Tensor, "B H"]
    mean_squared_error: Float[Tensor, "R B H"]
    """The error at each of the ridges."""

    __repr__ = fields_repr
    _repr_html_ = fields_html


def leave_one_out(
    key: Float[Tensor, "B H N D"],
    value: Float[Tensor, "B H N E"],
    *,
    kernel: Kernel,
    ridge: Ridge | None = None,
    operator_ridge: Ridge | None = None,
    log_weight: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
) -> LeaveOneOutResult:
    """Leave-one-out residuals (v − Hv)ₙ/(1 − Hₙₙ), H = G(G + λI)⁻¹, without a second fit (Allen 1974, PRESS).

    λ stays what it is with all tokens, that of an operator ridge too. Arguments, derivatives and errors are those of
    `conditional_mean_attention` by `Cholesky`. In features the ridge must be positive, and so large that no key's
    1 − Hₙₙ is rounding: a residual has the relative rounding ε/(1 − Hₙₙ).

    Example:
        >>> import torch
        >>> from massieu.regression import LinearKernel, leave_one_out
        >>> key = torch.ones(1, 1, 3, 1)
        >>> value = torch.tensor([[[[0.0], [1.0], [2.0]]]])
        >>> result = leave_one_out(key, value, kernel=LinearKernel.create(), ridge=1.0)
        >>> [round(r, 3) for r in result.residual.flatten().tolist()]  # value − (sum of the others)/3
        [-1.0, 0.333, 1.667]
    """
    _, tokens = check_tokens(key, key, value, kernel, ridge, operator_ridge, log_weight)
    features = tokens.features()
    if features is None:
        factor = tokens.gram_factor()
        misfit = torch.cholesky_solve(tokens.target, factor)
        diagonal = _inverse_diagonal(factor)
        if tokens.logarithms is not None:
            # A⁻¹ is exp(−h)·inverse·exp(−h), and the target has exp(c − h) already.
            relative = tokens.logarithms.relative.exp()
            misfit = relative.unsqueeze(-1) * misfit
    else:
        misfit, diagonal = _misfit_by_features(features, tokens)
    residual = _residual(misfit, diagonal, tokens.root)
    return LeaveOneOutResult(residual.to(value.dtype), _mean_square(residual, tokens.root))


def _inverse_diagonal(factor: Float[Tensor, "*lead n n"]) -> Float[Tensor, "*lead n"]:
    """The diagonal of (LLᵀ)⁻¹ = L⁻ᵀL⁻¹: the squared norms of the columns of L⁻¹.

    `torch.cholesky_inverse` has wrong second derivatives in forward mode (torch 2.13).
    """
    size = factor.shape[-1]
    width = max(1, -(-size // _COLUMN_BLOCKS))
    norms = []
    for first in range(0, size, width):
        # A column of L⁻¹ is 0 above the diagonal, so that it depends on the rest of L alone.
        rest = factor[..., first:, first:]
        unit = torch.eye(size - first, min(width, size - first), dtype=factor.dtype, device=factor.device)
        norms.append(solve_lower(rest, unit.expand(*rest.shape[:-1], -1)).square().sum(-2))
    return torch.cat(norms, -1) if norms else factor.diagonal(dim1=-2, dim2=-1)


def _residual(
    misfit: Float[Tensor, "*lead N E"], diagonal: Float[Tensor, "*lead N"], root: Float[Tensor, "B H N"]
) -> Float[Tensor, "*lead N E"]:
    """The residuals from A⁻¹√w·v and the diagonal of A⁻¹, or from both times the ridge, which are (I − H)√w·v and 1 − Hₙₙ."""
    is_visible = root > 0
    scale = torch.where(is_visible, root * diagonal, 1.0)
    return torch.where(is_visible.unsqueeze(-1), misfit / scale.unsqueeze(-1), 0.0)


def _mean_square(residual: Float[Tensor, "*lead N E"], root: Float[Tensor, "B H N"]) -> Float[Tensor, "*lead"]:
    """The mean of squared residuals by weights; 0 without a visible token."""
    weight = root.square()
    total = torch.where((root > 0).any(-1), weight.sum(-1), 1.0)
    return (weight * residual.square().mean(-1)).sum(-1) / total


def _misfit_by_features(features: Float[Tensor, "B H N F"], tokens: KeyValuePairs) -> tuple[Tensor, Tensor]:
    """(I − H)v and the diagonal of I − H, both of the weighted problem."""
    need_positive(tokens.ridge, "leave-one-out in features")
    factor = features_factor(features, tokens.ridge)
    half = solve_lower(factor, features.mT)  # H = halfᵀ·half
    diagonal = 1 - half.square().sum(-2)
    rounding = 4 * math.sqrt(features.shape[-1]) * torch.finfo(diagonal.dtype).eps
    if not all_true(diagonal > rounding):
        worst = unwrapped(diagonal).min().item()
        raise ValueError(
            f"a key alone determines its own prediction to rounding in {diagonal.dtype} (1 − Hₙₙ is {worst:.1e}): a "
            "larger ridge is needed, or float64"
        )
    return tokens.target - half.mT @ (half @ tokens.target), diagonal


class RidgeErrors:
    """Leave-one-out mean squared errors at any number of ridges, from one eigendecomposition of the Gram matrix.

    At every ridge the system RGR + λI has the eigenvectors of RGR = QSQᵀ, R the roots of the weights. Its inverse
    Q(S + λ)⁻¹Qᵀ costs a product of matrices for all ridges together, where a Cholesky factor and its inverse take N³ for each.
    """

    def __init__(
        self,
        key: Float[Tensor, "B H N D"],
        value: Float[Tensor, "B H N E"],
        *,
        kernel: Kernel,
        log_weight: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
    ) -> None:
        """Arguments and errors are those of `leave_one_out`."""
        self._arguments = {"key": key, "value": value, "kernel": kernel, "log_weight": log_weight}
        # Above this ridge eigenvalues are exact enough; infinite without a decomposition.
        self._least_ridge = math.inf
        with torch.no_grad():
            _, tokens = check_tokens(key, key, value, kernel, 0.0, None, log_weight)
            # A system of few features is cheap to solve at each ridge, and eigenvalues in float32 are too inexact.
            if tokens.features() is None and tokens.root.dtype == torch.float64 and tokens.root.numel():
                self._decompose(tokens, kernel)

    def _decompose(self, tokens: KeyValuePairs, kernel: Kernel) -> None:
        """Store the eigendecomposition of the weighted Gram matrix; not if it overflows."""
        self._root = tokens.root
        target = tokens.target
        gram = self._root.unsqueeze(-1) * kernel(tokens.key, tokens.key) * self._root.unsqueeze(-2)
        if not all_true(gram.isfinite()):
            # An exponential kernel may overflow, although its logarithms do not.
            return
        if tokens.logarithms is not None:
            # The target has the factor exp(c − h), which this matrix is without.
            target = tokens.logarithms.relative.exp().unsqueeze(-1) * target
        self._eigenvalues, self._vectors = torch.linalg.eigh(gram)
        self._coordinates = self._vectors.mT @ target
        rounding = torch.finfo(gram.dtype).eps * self._eigenvalues[..., -1].max().item()
        self._least_ridge = rounding / _SPECTRAL_ERROR

    @torch.no_grad()
    def at(self, ridges: Sequence[float]) -> Float[Tensor, "R B H"]:
        """The errors at ridges that are not negative, without derivatives. Raises as `leave_one_out`."""
        spectral_ridges = [ridge for ridge in ridges if ridge > self._least_ridge]
        errors: dict[float, Tensor] = {}
        if spectral_ridges:
            errors = dict(zip(spectral_ridges, self._spectral_errors(spectral_ridges), strict=True))
        return torch.stack([errors[ridge] if ridge in errors else self._exact_error(ridge) for ridge in ridges])

    def _spectral_errors(self, ridges: list[float]) -> Float[Tensor, "R B H"]:
        """By A⁻¹ = Q(S + λ)⁻¹Qᵀ, of which the diagonal and the product with the target are needed."""
        grid = self._eigenvalues.new_tensor(ridges)[:, None, None, None]
        inverse_eigenvalues = 1 / (self._eigenvalues + grid)
        diagonal = torch.einsum("bhni,rbhi->rbhn", self._vectors.square(), inverse_eigenvalues)
        coordinates = inverse_eigenvalues.unsqueeze(-1) * self._coordinates
        misfit = torch.einsum("bhni,rbhie->rbhne", self._vectors, coordinates)
        return _mean_square(_residual(misfit, diagonal, self._root), self._root)

    def _exact_error(self, ridge: float) -> Float[Tensor, "B H"]:
        return leave_one_out(**self._arguments, ridge=ridge).mean_squared_error


def choose_ridge(
    key: Float[Tensor, "B H N D"],
    value: Float[Tensor, "B H N E"],
    ridges: Sequence[float] | Float[Tensor, "R"],
    *,
    kernel: Kernel,
    log_weight: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
) -> RidgeChoiceResult:
    """Choose the ridge with the least leave-one-out mean squared error among `ridges`, for each head of each item.

    Neither the choice nor the errors have a gradient. One eigendecomposition of the Gram matrix in float64 serves all ridges
    that are larger than its rounding: mean squared errors agree with `leave_one_out` to about 1e-6, relative.

    Raises:
        ValueError, TypeError: as `leave_one_out`; also `ridges` that is not a list of at least one number of 0 or more.

    Example:
        >>> import torch
        >>> from massieu.regression import LinearKernel, choose_ridge
        >>> key = torch.tensor([[[[1.0], [2.0], [3.0]]]])
        >>> choose_ridge(
        ...     key, 2 * key, [0.5, 1.0], kernel=LinearKernel.create()
        ... ).ridge.tolist()  # no noise: less is better
        [[0.5]]
    """
    grid = doubles("ridges", ridges)
    check_values(ridges=grid)
    check_range("every ridge", grid, least=0)
    if grid.ndim != 1 or len(grid) == 0:
        raise ValueError(f"ridges must be a list of at least one number, got shape {tuple(grid.shape)}")
    errors = RidgeErrors(key, value, kernel=kernel, log_weight=log_weight).at(grid.tolist())
    return RidgeChoiceResult(grid.to(errors)[errors.argmin(0)], errors)
