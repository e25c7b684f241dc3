"""A head as an associative memory whose patterns are its keys: what retrieving once more would do (claims B5, B6, B11).

One more step maps a state z to Σ p_n(z) k_n with scores β z·k_n. Its derivative is β Cov_p(K), whose largest eigenvalue says
whether nearby states come together (below 1) or move apart. All numbers are those of centred keys: one vector added to all
keys of a head changes none of them.
"""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.probing.statistics.head_window import HeadSums, HeadWindow, WindowMeasure, mean_over_queries
from massieu.probing.statistics.registry import BAL, MEMORY, Register
from massieu.probing.statistics.windowed import HeadWindowGroup

_STEPS = 24
"""Power iterations for the largest eigenvalue."""
_MOST = 0.9
"""Share of a query's weight that counts as most of it."""
REGISTER = Register[WindowMeasure](MEMORY)
_of_memory = partial(
    REGISTER.statistic,
    paper=BAL,
    control="mismatched_keys",
    caveat="Keys are held fixed, and the model takes one step, not many: no equilibrium is claimed.",
)


def _keys(window: HeadWindow) -> Float[Tensor, "H N D"]:
    """The keys that are not padding, centred."""
    keys = window.of_heads(window.call.key[:, :, window.real])
    return keys - keys.mean(1, keepdim=True)


def _weights(window: HeadWindow) -> Float[Tensor, "H S N"]:
    """Weights of a few queries on the keys that are not padding."""
    return window.few().weights()[..., window.real]


@_of_memory(
    "Keys that hold 90 % of the weight", formula="fewest n with p_(1) + … + p_(n) ≥ 0.9", claim="B5, E15", unit="keys"
)
def keys_in_use(window: HeadWindow) -> HeadSums:
    """How many keys hold most of the weight: does the head retrieve one pattern, a few, or an average of all?"""
    weights = _weights(window)
    held = weights.sort(-1, descending=True).values.cumsum(-1)
    number = (held < _MOST * held[..., -1:]).sum(-1) + 1.0
    return mean_over_queries(torch.where(held[..., -1] > 0, number, torch.nan))


@_of_memory(
    "Slope of one more retrieval",
    formula="largest eigenvalue of β Cov_p(K)",
    claim="B5, B12, E15",
    scale="positive",
)
def retrieval_slope(window: HeadWindow) -> HeadSums:
    """If the head took one more retrieval step from its output, would nearby states converge (below 1)?"""
    keys = _keys(window)
    weights = _weights(window)
    mean = weights @ keys
    start = torch.randn(keys.shape[-1], generator=window.generator()).to(keys)
    vector = start.expand(*weights.shape[:2], -1)
    eigenvalue = torch.zeros(weights.shape[:2]).to(keys)
    for _ in range(_STEPS):
        vector = vector / vector.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        # Cov_p(K) v = Σ p_n k_n (k_n·v) − m (m·v): no matrix is formed for each query.
        along = vector @ keys.mT
        product = (weights * along) @ keys - mean * (mean * vector).sum(-1, keepdim=True)
        eigenvalue = (product * vector).sum(-1)
        vector = product
    return mean_over_queries(torch.where(weights.sum(-1) > 0, window.call.scale * eigenvalue, torch.nan))


@_of_memory(
    "Bound on the slope of retrieval",
    formula="β D² / 4, D the largest distance of two keys",
    claim="B5, B12, E15",
    control="reinitialised",
    headline=False,
    scale="positive",
)
def retrieval_slope_bound(window: HeadWindow) -> HeadSums:
    """Could a retrieval step over these keys drive states apart at some query (only if above 1)?"""
    keys = _keys(window)
    if keys.shape[1]:
        widest = torch.stack([torch.cdist(head[None], head[None]).amax() for head in keys])
    else:
        widest = keys.sum((1, 2))  # no keys: 0
    return (window.call.scale * widest.square() / 4).double(), torch.ones(len(keys), dtype=torch.float64)


@_of_memory(
    "Evenness of the patterns' weights",
    formula="e^H(w) / N, w_μ ∝ e^{½β‖k_μ − k̄‖²}",
    claim="B6, E10",
    control="reinitialised",
)
def pattern_weight_evenness(window: HeadWindow) -> HeadSums:
    """Read as a mixture of Gaussians centred on its keys, does the head give all of them equal weight (1)?"""
    keys = _keys(window)
    shares = torch.softmax(0.5 * window.call.scale * keys.square().sum(-1), -1)
    evenness = torch.special.entr(shares).sum(-1).exp() / shares.shape[-1]
    return evenness.double(), torch.ones(len(keys), dtype=torch.float64)


class MemoryGroup(HeadWindowGroup):
    """What a head stores and retrieves."""

    name = MEMORY
    register = REGISTER
