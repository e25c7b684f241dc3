"""Is what a head compares tokens by the precision of its keys? (claims S10, S11, X1, experiment E6)

Shim's hypothesis W_QᵀW_K ≈ Σ⁻¹ is read here in the head's own space, where its rank allows it to hold. There it says that a
token's query is its key times the precision of the keys, and then attention over Gaussian tokens is the conditional mean (X1).
Queries and keys are taken about their means and so that keys have covariance 1 and no score changes; the hypothesis is then
that queries are proportional to keys. No number depends on how a head splits its map between queries and keys.
"""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.probing.statistics.head_window import HeadWindow, Sums, WindowMeasure, no_numbers
from massieu.probing.statistics.registry import METRIC, SHIM, Register
from massieu.probing.statistics.windowed import HeadWindowGroup

MOST = 1_024
"""Tokens of a window."""
_FEWEST = 2
"""Tokens for each dimension of a key: below, a sample covariance says little of small directions, which the precision weighs
most. It is not shrunk, since shrinking knows the axes, and the numbers would depend on how a head splits its map."""
REGISTER = Register[WindowMeasure](METRIC)
_of_head = partial(
    REGISTER.statistic,
    paper=SHIM,
    control="mismatched_keys",
    caveat="Measured within a window, with the window's covariance, on queries and keys as they enter the scores "
    "(after rotary embedding).",
)


def _whitened(window: HeadWindow) -> tuple[Float[Tensor, "H T D"], Float[Tensor, "H T D"], Tensor, Tensor] | None:
    """Queries and keys of some tokens, centred and whitened, with the keys' mean and factor; None where they are not of the
    same tokens, or too few."""
    call, places = window.call, window.tokens(MOST)
    if not window.itself or call.query.shape[2] != call.key.shape[2] or len(places) < _FEWEST * call.key.shape[3]:
        return None
    key, query = window.of_heads(call.key[:, :, places]).double(), call.query[0, :, places].double()
    mean = key.mean(1, keepdim=True)
    factor, failed = torch.linalg.cholesky_ex((key - mean).mT @ (key - mean) / len(places))
    factor = torch.where(failed[:, None, None] == 0, factor, torch.nan)
    return (query - query.mean(1, keepdim=True)) @ factor, _white(key, mean, factor), mean, factor


def _white(key: Float[Tensor, "H N D"], mean: Tensor, factor: Tensor) -> Float[Tensor, "H N D"]:
    return torch.linalg.solve_triangular(factor, (key - mean).mT, upper=False).mT


def _once(values: Float[Tensor, " H"]) -> Sums:
    """One number a window."""
    known = values.isfinite()
    return torch.where(known, values, 0.0), known.double()


@_of_head(
    "Cosine of queries with keys times precision",
    formula="Σ q·k / (Σ qᵀΣq · Σ kᵀΣ⁻¹k)^½ over tokens, q and k about their means, Σ the keys' covariance",
    claim="S11, X1, E6",
    signed=True,
)
def precision_cosine(window: HeadWindow) -> Sums:
    """Does a token's query equal its own key times the precision of the keys (1), as for a conditional mean?"""
    parts = _whitened(window)
    if parts is None:
        return no_numbers(window)
    query, key, *_ = parts
    return _once((query * key).sum((1, 2)) / (query.square().sum((1, 2)) * key.square().sum((1, 2))).sqrt())


@_of_head(
    "Antisymmetric share of the whitened score",
    formula="‖(B − Bᵀ)/2‖² / ‖B‖², B the regression of queries on keys, whitened",
    claim="S11, E6",
)
def precision_antisymmetric_share(window: HeadWindow) -> Sums:
    """Is the score of two tokens symmetric (0), or as antisymmetric as a random matrix (½)?"""
    parts = _whitened(window)
    if parts is None:
        return no_numbers(window)
    query, key, *_ = parts
    slope = query.mT @ key
    return _once((slope - slope.mT).square().sum((1, 2)) / 4 / slope.square().sum((1, 2)))


@_of_head(
    "Evenness of the Fisher information",
    formula="(tr F)² / (D tr F²), F = E Cov_p(k), keys whitened",
    claim="S10, S11, E6",
)
def fisher_evenness(window: HeadWindow) -> Sums:
    """Is the head's Fisher information proportional to the covariance of its keys (1), as the hypothesis says?"""
    parts = _whitened(window)
    if parts is None:
        return no_numbers(window)
    weights = window.few().weights()[..., window.real].double()
    keys = _white(window.of_heads(window.call.key[:, :, window.real]).double(), *parts[2:])
    seen = (weights.sum(-1, keepdim=True) > 0).double()
    number = seen.sum(1, keepdim=True)
    means = weights @ keys
    information = (keys.mT * (weights.sum(1, keepdim=True))) @ keys - means.mT @ means
    information = information / number
    trace = information.diagonal(dim1=1, dim2=2).sum(-1)
    return _once(trace.square() / (keys.shape[-1] * information.square().sum((1, 2))))


@_of_head(
    "Distance between the laws of retrieved keys and of keys",
    formula="Bures–Wasserstein distance of the Gaussians of Σ p_j k_j and of k_j, whitened, over D^½",
    claim="S11, S13, E6",
    scale="positive",
)
def retrieved_law_distance(window: HeadWindow) -> Sums:
    """Are the keys that the head retrieves distributed as its keys are (0), or all one point (1)?"""
    parts = _whitened(window)
    if parts is None:
        return no_numbers(window)
    weights = window.weights()[..., window.real].double()
    keys = _white(window.of_heads(window.call.key[:, :, window.real]).double(), *parts[2:])
    found = weights @ keys
    known = found.isfinite().all(-1).all(-1)
    found = torch.where(known[:, None, None], found, 0.0)
    mean = found.mean(1)
    sizes = torch.linalg.svdvals(found - mean[:, None]) / found.shape[1] ** 0.5
    size = keys.shape[-1]
    square = mean.square().sum(-1) + sizes.square().sum(-1) + size - 2 * sizes.sum(-1)
    return _once(torch.where(known, (square.clamp_min(0) / size).sqrt(), torch.nan))


class MetricGroup(HeadWindowGroup):
    """What a head compares tokens by."""

    name = METRIC
    register = REGISTER
