"""Every token's value predicted from all others, in closed form, and the ridge chosen by it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.foundation.arguments import check_range, check_values, doubles
from massieu.foundation.transforms import every, unwrapped
from massieu.regression.exact import features_factor, solve_lower
from massieu.regression.kernels import Kernel
from massieu.regression.tokens import KeyValuePairs, Ridge, check_tokens, need_positive

_SPECTRAL_ERROR = 1e-6
"""Relative, of leave-one-out errors from eigenvalues: their rounding, ε times the largest, in units of the ridge."""


class LeaveOneOutResult(NamedTuple):
    """What each token says of the others' prediction of it."""

    residual: Float[Tensor, "B H N E"]
    """value − its prediction from all other tokens; 0 for hidden ones."""
    mean_squared_error: Float[Tensor, "B H"]
    """The squared residuals' mean over tokens, by their weights, and over the value's coordinates."""


class RidgeChoiceResult(NamedTuple):
    """The ridge of the least leave-one-out error, head by head."""

    ridge: Float[Tensor, "B H"]
    mean_squared_error: Float[Tensor, "R B H"]
    """Of every ridge that was tried."""


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
        >>> key, value = torch.ones(1, 1, 3, 1), torch.tensor([[[[0.0], [1.0], [2.0]]]])
        >>> found = leave_one_out(key, value, kernel=LinearKernel.create(), ridge=1.0)
        >>> [round(r, 3) for r in found.residual.flatten().tolist()]  # value − (sum of the others)/3
        [-1.0, 0.333, 1.667]
    """
    _, tokens = check_tokens(key, key, value, kernel, ridge, operator_ridge, log_weight)
    features = tokens.features()
    if features is None:
        factor = tokens.gram_factor()
        # Not `torch.cholesky_inverse`, whose second derivatives are wrong in forward mode (torch 2.13).
        one = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
        inverse = torch.cholesky_solve(one.expand_as(factor), factor)
        misfit, kept = inverse @ tokens.target, inverse.diagonal(dim1=-2, dim2=-1)
        if tokens.logarithms is not None:
            # A⁻¹ is exp(−h)·inverse·exp(−h), and the target has exp(c − h) already.
            relative = tokens.logarithms.relative.exp()
            misfit = relative.unsqueeze(-1) * misfit
    else:
        misfit, kept = _by_features(features, tokens)
    residual = _residual(misfit, kept, tokens.root)
    return LeaveOneOutResult(residual.to(value.dtype), _mean_square(residual, tokens.root))


def _residual(
    misfit: Float[Tensor, "*lead N E"], kept: Float[Tensor, "*lead N"], root: Float[Tensor, "B H N"]
) -> Float[Tensor, "*lead N E"]:
    """From A⁻¹√w v, or ridge⁻¹ of it, and the diagonal of A⁻¹ in the same units."""
    visible = root > 0
    scale = torch.where(visible, root * kept, 1.0)
    return torch.where(visible.unsqueeze(-1), misfit / scale.unsqueeze(-1), 0.0)


def _mean_square(residual: Float[Tensor, "*lead N E"], root: Float[Tensor, "B H N"]) -> Float[Tensor, "*lead"]:
    weight = root.square()
    total = torch.where((root > 0).any(-1), weight.sum(-1), 1.0)
    return (weight * residual.square().mean(-1)).sum(-1) / total


def _by_features(features: Float[Tensor, "B H N F"], tokens: KeyValuePairs) -> tuple[Tensor, Tensor]:
    """(I − H)v and the diagonal of I − H, both of the weighted problem."""
    need_positive(tokens.ridge, "leave-one-out in features")
    factor = features_factor(features, tokens.ridge)
    half = solve_lower(factor, features.mT)
    kept = 1 - half.square().sum(-2)
    least = 4 * math.sqrt(features.shape[-1]) * torch.finfo(kept.dtype).eps
    if not every(kept > least):
        worst = unwrapped(kept).min().item()
        raise ValueError(
            f"a key alone determines its own prediction to rounding in {kept.dtype} (1 − Hₙₙ is {worst:.1e}): a "
            "larger ridge is needed, or float64"
        )
    return tokens.target - half.mT @ (half @ tokens.target), kept


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
        self._least_ridge = math.inf
        with torch.no_grad():
            _, tokens = check_tokens(key, key, value, kernel, 0.0, None, log_weight)
            # Second moments of few features are cheap, and the eigenvalues of float32 are too far off.
            if tokens.features() is None and tokens.root.dtype == torch.float64 and tokens.root.numel():
                self._decompose(tokens, kernel)

    def _decompose(self, tokens: KeyValuePairs, kernel: Kernel) -> None:
        self._root, target = tokens.root, tokens.target
        gram = self._root.unsqueeze(-1) * kernel(tokens.key, tokens.key) * self._root.unsqueeze(-2)
        if not every(gram.isfinite()):
            # An exponential kernel beyond the floating range: only its logarithms are known.
            return
        if tokens.logarithms is not None:
            target = tokens.logarithms.relative.exp().unsqueeze(-1) * target
        self._eigenvalues, self._vectors = torch.linalg.eigh(gram)
        self._coordinates = self._vectors.mT @ target
        rounding = torch.finfo(gram.dtype).eps * self._eigenvalues[..., -1].max().item()
        self._least_ridge = rounding / _SPECTRAL_ERROR

    @torch.no_grad()
    def at(self, ridges: Sequence[float]) -> Float[Tensor, "R B H"]:
        """The errors, without derivatives, of ridges that are not negative. Raises as `leave_one_out`."""
        spectral = [ridge for ridge in ridges if ridge > self._least_ridge]
        known = dict(zip(spectral, self._spectral(spectral), strict=True)) if spectral else {}
        return torch.stack([known[ridge] if ridge in known else self._exact(ridge) for ridge in ridges])

    def _spectral(self, ridges: list[float]) -> Float[Tensor, "R B H"]:
        grid = self._eigenvalues.new_tensor(ridges)[:, None, None, None]
        inverse = 1 / (self._eigenvalues + grid)
        kept = torch.einsum("bhni,rbhi->rbhn", self._vectors.square(), inverse)
        misfit = torch.einsum("bhni,rbhie->rbhne", self._vectors, inverse.unsqueeze(-1) * self._coordinates)
        return _mean_square(_residual(misfit, kept, self._root), self._root)

    def _exact(self, ridge: float) -> Float[Tensor, "B H"]:
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

    The choice has no gradient. Errors are those of `leave_one_out`, and ValueError for no ridge at all. By a Gram matrix in
    float64 one eigendecomposition serves all ridges, with relative errors of some 1e-6 at most beside `leave_one_out`.

    Example:
        >>> import torch
        >>> from massieu.regression import LinearKernel, choose_ridge
        >>> key = torch.tensor([[[[1.0], [2.0], [3.0]]]])
        >>> choose_ridge(key, 2 * key, [0.5, 1.0], kernel=LinearKernel.create()).ridge.tolist()  # no noise
        [[0.5]]
    """
    grid = doubles("ridges", ridges)
    check_values(ridges=grid)
    check_range("every ridge", grid, least=0)
    if grid.ndim != 1 or len(grid) == 0:
        raise ValueError(f"ridges must be a list of at least one number, got shape {tuple(grid.shape)}")
    errors = RidgeErrors(key, value, kernel=kernel, log_weight=log_weight).at(grid.tolist())
    return RidgeChoiceResult(grid.to(errors)[errors.argmin(0)], errors)
