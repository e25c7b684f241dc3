"""Is a head a conditional mean of its values given its keys? (claims Z4, Z7, Z8, experiment E19)

Tokens of one window are held out one at a time, and their value is predicted from their key and the other tokens: by ridge
regression, which is the exact conditional mean of a linear latent model (Z4); by kernel regression with a Gaussian kernel,
the form that softmax attention has (Z7); and by the head's own weights. A prediction is scored against the mean of the
others' values. How smooth each regression is to be is chosen on every second token and scored on the rest.
"""

from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from massieu.probing.statistics.head_window import HeadSums, HeadWindow, WindowMeasure, mean_over_queries, no_numbers
from massieu.probing.statistics.registry import CONDITIONAL_MEAN, ZHANG, Register
from massieu.probing.statistics.windowed import HeadWindowGroup

MOST = 256
"""Tokens of a window that are held out."""
RIDGES = torch.logspace(-8, 4, 13, dtype=torch.float64)
"""In units of the keys' mean square over coordinates, summed over tokens."""
PRECISIONS = 4.0 ** torch.arange(-2, 5, dtype=torch.float64)
"""In units of one over the median squared distance of every fourth key from the others."""
_FEWEST = 8
"""Tokens; of fewer no share is reported."""
_ROUNDING = 1e-20
"""Values whose variance is less than this share of their square are equal but for rounding."""
REGISTER = Register[WindowMeasure](CONDITIONAL_MEAN)
_of_head = partial(
    REGISTER.statistic,
    paper=ZHANG,
    control="shuffled_values",
    signed=True,
    caveat="It is about values given keys within a window, not about words given words.",
)


def _pairs(window: HeadWindow) -> tuple[Float[Tensor, "H T D"], Float[Tensor, "H T Dv"], Int[Tensor, " T"]]:
    """Keys and values of the tokens that are held out, and the places of these."""
    places = window.tokens(MOST)
    key = window.of_heads(window.call.key[:, :, places]).double()
    value = window.of_heads(window.call.value[:, :, places]).double()
    return key, value, places


def _explained_share(
    residuals: Float[Tensor, "H T"], totals: Float[Tensor, "H T"], value: Float[Tensor, "H T Dv"]
) -> HeadSums:
    """1 − Σ residuals / Σ totals of a window, weighted by its tokens; no number where its values are equal but for rounding.

    Args:
        residuals, totals: squares for each token, under the prediction and under the mean.
        value: the values that were predicted.
    """
    finite = residuals.isfinite() & totals.isfinite()
    tokens = finite.sum(1).double()
    total = torch.where(finite, totals, 0.0).sum(1)
    share = 1 - torch.where(finite, residuals, 0.0).sum(1) / total
    usable = (total > _ROUNDING * value.square().sum((1, 2))) & (tokens >= _FEWEST)
    return torch.where(usable, tokens * share, 0.0), torch.where(usable, tokens, 0.0)


def _squares_about_the_others(value: Float[Tensor, "H T Dv"]) -> Float[Tensor, "H T"]:
    """Squared distance of each value from the mean of the others."""
    # v_i less the mean of the others is n/(n − 1) times v_i less the mean of all.
    number = value.shape[1]
    return ((value - value.mean(1, keepdim=True)) * number / max(number - 1, 1)).square().sum(-1)


def _at_best_setting(errors: Float[Tensor, "G H T"]) -> Float[Tensor, "H T"]:
    """Errors of each half of the tokens at the setting with the least error on the other half."""
    selected = torch.empty_like(errors[0])
    heads = torch.arange(errors.shape[1], device=errors.device)
    for half in (0, 1):
        best = errors[:, :, 1 - half :: 2].sum(-1).argmin(0)
        selected[:, half::2] = errors[best, heads][:, half::2]
    return selected


def ridge_errors(key: Float[Tensor, "H T D"], value: Float[Tensor, "H T Dv"]) -> Float[Tensor, "G H T"]:
    """Squared errors of each held-out value under affine ridge regression on the others, by ridge.

    No token is really left out: its error is e_i / (1 − h_i), with e_i that of the fit to all and h_i its leverage.
    """
    centred_key = key - key.mean(1, keepdim=True)
    centred_value = value - value.mean(1, keepdim=True)
    left, sizes, _ = torch.linalg.svd(centred_key, full_matrices=False)
    number = key.shape[1]
    ridges = RIDGES.to(key)[:, None, None] * centred_key.square().sum((1, 2))[:, None] / key.shape[2]
    # The hat matrix is U s²/(s² + λ) Uᵀ, and 1/n for the mean.
    shrinkage = sizes.square() / (sizes.square() + ridges).clamp_min(1e-300)  # (ridges, H, D)
    leverage = torch.einsum("htd,ghd->ght", left.square(), shrinkage) + 1 / number
    coefficients = left.mT @ centred_value
    errors = []
    for ridge_shrinkage, ridge_leverage in zip(shrinkage, leverage, strict=True):
        fitted = left @ (ridge_shrinkage[..., None] * coefficients)
        residuals = (centred_value - fitted).square().sum(-1)
        errors.append(residuals / (1 - ridge_leverage).clamp_min(1e-12).square())
    return torch.stack(errors)


def kernel_errors(key: Float[Tensor, "H T D"], value: Float[Tensor, "H T Dv"]) -> Float[Tensor, "G H T"]:
    """Squared errors of each held-out value under kernel regression on the others, by precision of the kernel.

    Weights are in float32: they are the long part, and no sum of theirs cancels.
    """
    squares = torch.cdist(key, key).square()
    others = ~torch.eye(key.shape[1], dtype=torch.bool, device=key.device)
    median = squares[:, ::4][:, others[::4]].median(-1).values.clamp_min(1e-300)
    # Log-kernels at precision 1. The largest of a row is moved to 0 in float64, so that float32 keeps the differences.
    exponents = (-0.5 * squares / median[:, None, None]).masked_fill(~others, -torch.inf)
    exponents = (exponents - exponents.amax(-1, keepdim=True)).float()
    errors = []
    for precision in PRECISIONS.tolist():
        predicted = torch.softmax(precision * exponents, -1) @ value.float()
        errors.append((value - predicted).square().sum(-1))
    return torch.stack(errors)


@_of_head("Value from key by ridge regression", formula="R² of held-out values", claim="Z4, Z8, E19")
def value_by_ridge(window: HeadWindow) -> HeadSums:
    """How well does a linear function of a token's key predict its value?"""
    key, value, _ = _pairs(window)
    errors = _at_best_setting(ridge_errors(key, value))
    return _explained_share(errors, _squares_about_the_others(value), value)


@_of_head("Value from key by kernel regression", formula="R² of held-out values", claim="Z7, Z8, E19")
def value_by_kernel(window: HeadWindow) -> HeadSums:
    """How well do the tokens with nearby keys predict a token's value?"""
    key, value, _ = _pairs(window)
    errors = _at_best_setting(kernel_errors(key, value))
    return _explained_share(errors, _squares_about_the_others(value), value)


@_of_head(
    "Value by the head's own weights",
    formula="R² of v_i from Σ p_ij v_j, j ≠ i, beside their plain mean",
    claim="Z7, E19",
)
def value_by_attention(window: HeadWindow) -> HeadSums:
    """How well do the head's own weights predict a token's value from the other tokens?"""
    if not window.itself or window.call.query.shape[2] != window.call.key.shape[2]:
        return no_numbers(window)
    weights = window.weights().double()
    value = window.of_heads(window.call.value).double()
    others = window.real & (torch.arange(weights.shape[-1], device=weights.device) != window.queries[:, None])
    weights = torch.where(others, weights, 0.0)
    weight_of_others = weights.sum(-1, keepdim=True)
    visible_others = (window.call.at(window.queries).visible()[0] & others).double().expand_as(weights)
    query_value = value[:, window.queries]
    residuals = (query_value - (weights / weight_of_others) @ value).square().sum(-1)
    mean_of_others = (visible_others / visible_others.sum(-1, keepdim=True)) @ value
    totals = (query_value - mean_of_others).square().sum(-1)
    # A query that attends to hardly anything but itself predicts nothing from the others.
    residuals = torch.where(weight_of_others[..., 0] > 1e-6, residuals, torch.nan)
    return _explained_share(residuals, totals, query_value)


@_of_head(
    "Output along the conditional mean",
    formula="cos(o − v̄, B(q − k̄)), B by ridge regression on half of the tokens, o and v̄ of the others",
    claim="Z4, X1, E19",
)
def output_along_conditional_mean(window: HeadWindow) -> HeadSums:
    """Does the head's output point along the mean value of keys that are like its query?"""
    key, value, places = _pairs(window)
    query = window.call.query[0, :, window.queries].double()
    weights = window.weights()[..., places].double()
    cosines = []
    for half in (0, 1) if len(places) >= 2 * _FEWEST else ():
        mean_key, slope = _ridge_regression(key[:, half::2], value[:, half::2])
        # The output is formed of the other tokens, renormalised, so that it shares no value with the regression.
        scored_weights = weights[..., 1 - half :: 2]
        scored_value = value[:, 1 - half :: 2]
        mean = scored_value.mean(1, keepdim=True)
        output = (scored_weights / scored_weights.sum(-1, keepdim=True)) @ scored_value - mean
        cosine = torch.cosine_similarity(output, (query - mean_key) @ slope, dim=-1, eps=1e-30)
        differ = (scored_value - mean).square().sum((1, 2)) > _ROUNDING * scored_value.square().sum((1, 2))
        cosines.append(torch.where(differ[:, None], cosine, torch.nan))
    return mean_over_queries(torch.cat(cosines, 1) if cosines else query.new_zeros(len(query), 0))


def _ridge_regression(
    key: Float[Tensor, "H T D"], value: Float[Tensor, "H T Dv"]
) -> tuple[Float[Tensor, "H 1 D"], Float[Tensor, "H D Dv"]]:
    """Mean key, and the slope of ridge regression whose ridge does best on tokens that are left out one at a time."""
    mean_key = key.mean(1, keepdim=True)
    best = ridge_errors(key, value).sum(-1).argmin(0)
    left, sizes, right = torch.linalg.svd(key - mean_key, full_matrices=False)
    ridge = RIDGES.to(key)[best] * (key - mean_key).square().sum((1, 2)) / key.shape[2]
    scaled = sizes / (sizes.square() + ridge[:, None]).clamp_min(1e-300)
    return mean_key, right.mT @ (scaled[..., None] * (left.mT @ (value - value.mean(1, keepdim=True))))


class ConditionalMeanGroup(HeadWindowGroup):
    """How well keys predict values."""

    name = CONDITIONAL_MEAN
    register = REGISTER
