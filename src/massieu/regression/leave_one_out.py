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
        one = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
        inverse = torch.cholesky_solve(one.expand_as(factor), factor)
        misfit, kept = inverse @ tokens.target, inverse.diagonal(dim1=-2, dim2=-1)
        if tokens.logarithms is not None:
            # A⁻¹ is exp(−h)·inverse·exp(−h), and the target has exp(c − h) already.
            relative = tokens.logarithms.relative.exp()
            misfit = relative.unsqueeze(-1) * misfit
    else:
        misfit, kept = _by_features(features, tokens)
    visible = tokens.root > 0
    scale = torch.where(visible, tokens.root * kept, 1.0)
    residual = torch.where(visible.unsqueeze(-1), misfit / scale.unsqueeze(-1), 0.0)
    weight = tokens.root.square()
    total = torch.where(visible.any(-1), weight.sum(-1), 1.0)
    error = (weight * residual.square().mean(-1)).sum(-1) / total
    return LeaveOneOutResult(residual.to(value.dtype), error)


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


def choose_ridge(
    key: Float[Tensor, "B H N D"],
    value: Float[Tensor, "B H N E"],
    ridges: Sequence[float] | Float[Tensor, "R"],
    *,
    kernel: Kernel,
    log_weight: Float[Tensor, "..."] | Bool[Tensor, "..."] | None = None,
) -> RidgeChoiceResult:
    """Choose the ridge with the least leave-one-out mean squared error among `ridges`, for each head of each item.

    The choice has no gradient. Errors are those of `leave_one_out`, and ValueError for no ridge at all.

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
    with torch.no_grad():
        tried = [
            leave_one_out(key, value, kernel=kernel, ridge=ridge, log_weight=log_weight).mean_squared_error
            for ridge in grid.tolist()
        ]
    errors = torch.stack(tried)
    return RidgeChoiceResult(grid.to(errors)[errors.argmin(0)], errors)
