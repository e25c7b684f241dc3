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

from massieu.probing.statistics.head_window import HeadWindow, Sums, WindowMeasure, mean_over_queries, nothing
from massieu.probing.statistics.registry import CONDITIONAL_MEAN, ZHANG, Register
from massieu.probing.statistics.windowed import HeadWindowGroup

MOST = 256
"""Tokens of a window that are held out."""
RIDGES = torch.logspace(-8, 4, 13, dtype=torch.float64)
"""Times the mean square of the keys' coordinates, summed over tokens."""
PRECISIONS = 4.0 ** torch.arange(-2, 5, dtype=torch.float64)
"""Over the median squared distance of every fourth key from the others."""
_FEWEST = 8
_ROUNDING = 1e-20
REGISTER = Register[WindowMeasure](CONDITIONAL_MEAN)
_of_head = partial(
    REGISTER.statistic,
    paper=ZHANG,
    control="shuffled_values",
    signed=True,
    caveat="It is about values given keys within a window, not about words given words.",
)


def _pairs(window: HeadWindow) -> tuple[Float[Tensor, "H T D"], Float[Tensor, "H T Dv"], Int[Tensor, " T"]]:
    places = window.tokens(MOST)
    key, value = (window.of_heads(part[:, :, places]).double() for part in (window.call.key, window.call.value))
    return key, value, places


def _share(missed: Float[Tensor, "H T"], whole: Float[Tensor, "H T"], value: Float[Tensor, "H T Dv"]) -> Sums:
    """1 − Σ missed / Σ whole of a window, weighted by its tokens; nothing where its values are equal but for rounding."""
    known = missed.isfinite() & whole.isfinite()
    number = known.sum(1).double()
    of = torch.where(known, whole, 0.0).sum(1)
    share = 1 - torch.where(known, missed, 0.0).sum(1) / of
    usable = (of > _ROUNDING * value.square().sum((1, 2))) & (number >= _FEWEST)
    return torch.where(usable, number * share, 0.0), torch.where(usable, number, 0.0)


def _left_out_mean(value: Float[Tensor, "H T Dv"]) -> Float[Tensor, "H T"]:
    """Squared distance of each value from the mean of the others."""
    number = value.shape[1]
    return ((value - value.mean(1, keepdim=True)) * number / max(number - 1, 1)).square().sum(-1)


def _chosen(errors: Float[Tensor, "G H T"]) -> Float[Tensor, "H T"]:
    """Errors of each half of the tokens at the setting with the least error on the other half."""
    found = torch.empty_like(errors[0])
    heads = torch.arange(errors.shape[1], device=errors.device)
    for half in (0, 1):
        best = errors[:, :, 1 - half :: 2].sum(-1).argmin(0)
        found[:, half::2] = errors[best, heads][:, half::2]
    return found


def ridge_errors(key: Float[Tensor, "H T D"], value: Float[Tensor, "H T Dv"]) -> Float[Tensor, "G H T"]:
    """Squared errors of each held-out value under affine ridge regression on the others, by ridge.

    Leaving a token out changes the fit by its leverage: e_i / (1 − h_i).
    """
    centred, wanted = key - key.mean(1, keepdim=True), value - value.mean(1, keepdim=True)
    left, sizes, _ = torch.linalg.svd(centred, full_matrices=False)
    number = key.shape[1]
    ridges = RIDGES.to(key)[:, None, None] * centred.square().sum((1, 2))[:, None] / key.shape[2]
    kept = sizes.square() / (sizes.square() + ridges).clamp_min(1e-300)
    leverage = torch.einsum("htd,ghd->ght", left.square(), kept) + 1 / number
    coefficients = left.mT @ wanted
    errors = []
    for scaled, own in zip(kept, leverage, strict=True):
        fitted = left @ (scaled[..., None] * coefficients)
        errors.append((wanted - fitted).square().sum(-1) / (1 - own).clamp_min(1e-12).square())
    return torch.stack(errors)


def kernel_errors(key: Float[Tensor, "H T D"], value: Float[Tensor, "H T Dv"]) -> Float[Tensor, "G H T"]:
    """Squared errors of each held-out value under kernel regression on the others, by precision of the kernel.

    Weights are in float32: they are the long part, and no sum of theirs cancels.
    """
    squares = torch.cdist(key, key).square()
    apart = ~torch.eye(key.shape[1], dtype=torch.bool, device=key.device)
    middle = squares[:, ::4][:, apart[::4]].median(-1).values.clamp_min(1e-300)
    halves = (-0.5 * squares / middle[:, None, None]).masked_fill(~apart, -torch.inf)
    halves = (halves - halves.amax(-1, keepdim=True)).float()
    errors = []
    for precision in PRECISIONS.tolist():
        predicted = torch.softmax(precision * halves, -1) @ value.float()
        errors.append((value - predicted).square().sum(-1))
    return torch.stack(errors)


@_of_head("Value from key by ridge regression", formula="R² of held-out values", claim="Z4, Z8, E19")
def value_by_ridge(window: HeadWindow) -> Sums:
    """How well does a linear function of a token's key predict its value?"""
    key, value, _ = _pairs(window)
    return _share(_chosen(ridge_errors(key, value)), _left_out_mean(value), value)


@_of_head("Value from key by kernel regression", formula="R² of held-out values", claim="Z7, Z8, E19")
def value_by_kernel(window: HeadWindow) -> Sums:
    """How well do the tokens with nearby keys predict a token's value?"""
    key, value, _ = _pairs(window)
    return _share(_chosen(kernel_errors(key, value)), _left_out_mean(value), value)


@_of_head(
    "Value by the head's own weights",
    formula="R² of v_i from Σ p_ij v_j, j ≠ i, beside their plain mean",
    claim="Z7, E19",
)
def value_by_attention(window: HeadWindow) -> Sums:
    """How well do the head's own weights predict a token's value from the other tokens?"""
    if not window.itself or window.call.query.shape[2] != window.call.key.shape[2]:
        return nothing(window)
    weights, value = window.weights().double(), window.of_heads(window.call.value).double()
    others = window.real & (torch.arange(weights.shape[-1], device=weights.device) != window.queries[:, None])
    weights = torch.where(others, weights, 0.0)
    left = weights.sum(-1, keepdim=True)
    seen = (window.call.at(window.queries).visible()[0] & others).double().expand_as(weights)
    own = value[:, window.queries]
    missed = (own - (weights / left) @ value).square().sum(-1)
    whole = (own - (seen / seen.sum(-1, keepdim=True)) @ value).square().sum(-1)
    return _share(torch.where(left[..., 0] > 1e-6, missed, torch.nan), whole, own)


@_of_head(
    "Output along the conditional mean",
    formula="cos(o − v̄, B(q − k̄)), B by ridge regression on half of the tokens, o and v̄ of the others",
    claim="Z4, X1, E19",
)
def output_along_conditional_mean(window: HeadWindow) -> Sums:
    """Does the head's output point along the mean value of keys that are like its query?"""
    key, value, places = _pairs(window)
    query = window.call.query[0, :, window.queries].double()
    weights = window.weights()[..., places].double()
    cosines = []
    for half in (0, 1) if len(places) >= 2 * _FEWEST else ():
        origin, slope = _regression(key[:, half::2], value[:, half::2])
        others, held = weights[..., 1 - half :: 2], value[:, 1 - half :: 2]
        mean = held.mean(1, keepdim=True)
        output = (others / others.sum(-1, keepdim=True)) @ held - mean
        cosine = torch.cosine_similarity(output, (query - origin) @ slope, dim=-1, eps=1e-30)
        differ = (held - mean).square().sum((1, 2)) > _ROUNDING * held.square().sum((1, 2))
        cosines.append(torch.where(differ[:, None], cosine, torch.nan))
    return mean_over_queries(torch.cat(cosines, 1) if cosines else query.new_zeros(len(query), 0))


def _regression(
    key: Float[Tensor, "H T D"], value: Float[Tensor, "H T Dv"]
) -> tuple[Float[Tensor, "H 1 D"], Float[Tensor, "H D Dv"]]:
    """Mean key, and the slope of ridge regression whose ridge does best on tokens that are left out one at a time."""
    origin = key.mean(1, keepdim=True)
    best = ridge_errors(key, value).sum(-1).argmin(0)
    left, sizes, right = torch.linalg.svd(key - origin, full_matrices=False)
    ridge = RIDGES.to(key)[best] * (key - origin).square().sum((1, 2)) / key.shape[2]
    scaled = sizes / (sizes.square() + ridge[:, None]).clamp_min(1e-300)
    return origin, right.mT @ (scaled[..., None] * (left.mT @ (value - value.mean(1, keepdim=True))))


class ConditionalMeanGroup(HeadWindowGroup):
    """What of the values the keys tell."""

    name = CONDITIONAL_MEAN
    register = REGISTER
