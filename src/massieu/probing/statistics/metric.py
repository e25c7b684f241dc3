"""Is a head's metric on tokens the precision of its keys? (claims S10, S11, X1, experiment E6)

Shim's hypothesis W_QᵀW_K ≈ Σ⁻¹ is read here in the head's own space, where its rank allows it to hold. There it says that a
token's query is its key times the precision of the keys. Then attention over Gaussian tokens is the conditional mean (X1).
Queries and keys are centred, and transformed so that keys have covariance 1 and no score changes. The hypothesis is then that
queries are proportional to keys. No number depends on how a head splits its map between queries and keys.
"""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.probing.statistics.head_window import HeadSums, HeadWindow, WindowMeasure, no_numbers
from massieu.probing.statistics.registry import METRIC, SHIM, Register
from massieu.probing.statistics.windowed import HeadWindowGroup

MOST = 1_024
"""Tokens of a window."""
_FEWEST = 2
"""Tokens for each dimension of a key. Of fewer, a covariance says little about small directions, which weigh most
in the precision. It is not shrunk: shrinkage depends on the axes, and so would the numbers on how a head splits its map."""
REGISTER = Register[WindowMeasure](METRIC)
_of_head = partial(
    REGISTER.statistic,
    paper=SHIM,
    control="mismatched_keys",
    caveat="Measured within a window, with the window's covariance, on queries and keys as they enter the scores "
    "(after rotary embedding).",
)


@dataclass(frozen=True, eq=False)
class _Whitened:
    """Queries and keys of some tokens, centred and whitened.

    With Σ = L Lᵀ the covariance of the keys, keys are multiplied by L⁻¹ and queries by Lᵀ, so that no score changes.

    Attributes:
        mean, factor: the keys' mean, and L; NaN where the covariance is singular.
    """

    query: Float[Tensor, "H T D"]
    key: Float[Tensor, "H T D"]
    mean: Float[Tensor, "H 1 D"]
    factor: Float[Tensor, "H D D"]

    @classmethod
    def of(cls, window: HeadWindow) -> "_Whitened | None":
        """Whitened queries and keys of a window; None if they are not of the same tokens, or too few."""
        call = window.call
        places = window.tokens(MOST)
        if not window.itself or call.query.shape[2] != call.key.shape[2] or len(places) < _FEWEST * call.key.shape[3]:
            return None
        key = window.of_heads(call.key[:, :, places]).double()
        query = call.query[0, :, places].double()
        mean = key.mean(1, keepdim=True)
        factor, failed = torch.linalg.cholesky_ex((key - mean).mT @ (key - mean) / len(places))
        factor = torch.where(failed[:, None, None] == 0, factor, torch.nan)
        white_query = (query - query.mean(1, keepdim=True)) @ factor
        return cls(white_query, _whiten(key, mean, factor), mean, factor)

    def all_keys(self, window: HeadWindow) -> Float[Tensor, "H N D"]:
        """All keys of the window that are not padding, whitened in the same way."""
        key = window.of_heads(window.call.key[:, :, window.real]).double()
        return _whiten(key, self.mean, self.factor)


def _whiten(key: Float[Tensor, "H N D"], mean: Tensor, factor: Tensor) -> Float[Tensor, "H N D"]:
    return torch.linalg.solve_triangular(factor, (key - mean).mT, upper=False).mT


def _one_per_window(values: Float[Tensor, " H"]) -> HeadSums:
    """Sums of one number for the window, where it is finite."""
    finite = values.isfinite()
    return torch.where(finite, values, 0.0), finite.double()


@_of_head(
    "Cosine of queries with keys times precision",
    formula="Σ q·k / (Σ qᵀΣq · Σ kᵀΣ⁻¹k)^½ over tokens, q and k about their means, Σ the keys' covariance",
    claim="S11, X1, E6",
    signed=True,
)
def precision_cosine(window: HeadWindow) -> HeadSums:
    """Does a token's query equal its own key times the precision of the keys (1), as for a conditional mean?"""
    white = _Whitened.of(window)
    if white is None:
        return no_numbers(window)
    lengths = (white.query.square().sum((1, 2)) * white.key.square().sum((1, 2))).sqrt()
    return _one_per_window((white.query * white.key).sum((1, 2)) / lengths)


@_of_head(
    "Antisymmetric share of the whitened score",
    formula="‖(B − Bᵀ)/2‖² / ‖B‖², B the regression of queries on keys, whitened",
    claim="S11, E6",
)
def precision_antisymmetric_share(window: HeadWindow) -> HeadSums:
    """Is the score of two tokens symmetric (0), or as antisymmetric as a random matrix (½)?"""
    white = _Whitened.of(window)
    if white is None:
        return no_numbers(window)
    slope = white.query.mT @ white.key  # over tokens; keys have covariance 1, so no inverse is needed
    return _one_per_window((slope - slope.mT).square().sum((1, 2)) / 4 / slope.square().sum((1, 2)))


@_of_head(
    "Evenness of the Fisher information",
    formula="(tr F)² / (D tr F²), F = E Cov_p(k), keys whitened",
    claim="S10, S11, E6",
)
def fisher_evenness(window: HeadWindow) -> HeadSums:
    """Is the head's Fisher information proportional to the covariance of its keys (1), as the hypothesis says?"""
    white = _Whitened.of(window)
    if white is None:
        return no_numbers(window)
    weights = window.few().weights()[..., window.real].double()
    keys = white.all_keys(window)
    seeing_queries = (weights.sum(-1, keepdim=True) > 0).double().sum(1, keepdim=True)
    # Σ_i Cov_i(k) = Σ_j (Σ_i p_ij) k_j k_jᵀ − Σ_i m_i m_iᵀ, m_i the mean key of query i.
    means = weights @ keys
    information = (keys.mT * (weights.sum(1, keepdim=True))) @ keys - means.mT @ means
    information = information / seeing_queries
    trace = information.diagonal(dim1=1, dim2=2).sum(-1)
    return _one_per_window(trace.square() / (keys.shape[-1] * information.square().sum((1, 2))))


@_of_head(
    "Distance between the laws of retrieved keys and of keys",
    formula="Bures–Wasserstein distance of the Gaussians of Σ p_j k_j and of k_j, whitened, over D^½",
    claim="S11, S13, E6",
    scale="positive",
)
def retrieved_law_distance(window: HeadWindow) -> HeadSums:
    """Are the keys that the head retrieves distributed as its keys are (0), or all one point (1)?"""
    white = _Whitened.of(window)
    if white is None:
        return no_numbers(window)
    weights = window.weights()[..., window.real].double()
    keys = white.all_keys(window)
    retrieved = weights @ keys
    finite = retrieved.isfinite().all(-1).all(-1)
    retrieved = torch.where(finite[:, None, None], retrieved, 0.0)  # singular values of NaN would raise
    mean = retrieved.mean(1)
    deviations = torch.linalg.svdvals(retrieved - mean[:, None]) / retrieved.shape[1] ** 0.5
    dimension = keys.shape[-1]
    # Keys have mean 0 and covariance 1: W² = ‖m‖² + tr C + D − 2 tr C^½, and C^½ has these deviations as eigenvalues.
    squared_distance = mean.square().sum(-1) + deviations.square().sum(-1) + dimension - 2 * deviations.sum(-1)
    return _one_per_window(torch.where(finite, (squared_distance.clamp_min(0) / dimension).sqrt(), torch.nan))


class MetricGroup(HeadWindowGroup):
    """The metric by which a head compares tokens, compared with the precision of its keys."""

    name = METRIC
    register = REGISTER
