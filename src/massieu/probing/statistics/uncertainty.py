"""On how many tokens a head's output depends, and how it moves with the query (claims S10, S15, N26; sources N15, N25).

A query's output o = Σ p_j v_j is an average of values. A step δ of the query changes the weights: to first order the output
moves by β Cov_p(v, k) δ, and the weights' divergence is half of Var_p(β k·δ). Steps are those between the head's own
queries in the window, so that no number depends on how a head's scale is split between queries and keys.
"""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.probing.statistics.head_window import HeadSums, HeadWindow, WindowMeasure, mean_over_queries
from massieu.probing.statistics.registry import OWN, UNCERTAINTY, Register
from massieu.probing.statistics.windowed import HeadWindowGroup

_STEPS = 24
"""Power iterations for the largest singular value."""
REGISTER = Register[WindowMeasure](UNCERTAINTY)
_of_output = partial(
    REGISTER.statistic,
    paper=OWN,
    caveat="It describes the head at the queries of this text, not how the model uses the output.",
)


def _centred(part: Float[Tensor, "H N E"]) -> Float[Tensor, "H N E"]:
    return part - part.mean(1, keepdim=True)


def _parts(
    window: HeadWindow,
) -> tuple[Float[Tensor, "H S N"], Float[Tensor, "H N Dv"], Float[Tensor, "H N M"]]:
    """Weights of some queries, centred values, and changes of the scores.

    Column m of the changes is β k·δ_m/√M, with δ_m the deviation of sampled query m from the mean of all M: sums over m are
    means over the steps δ.
    """
    real = window.real
    weights = window.few().weights()[..., real].double()
    values = _centred(window.of_heads(window.call.value[:, :, real]).double())
    keys = _centred(window.of_heads(window.call.key[:, :, real]).double())
    steps = _centred(window.call.query[0, :, window.queries].double())
    along = window.call.scale * keys @ steps.mT / max(len(window.queries), 1) ** 0.5
    return weights, values, along


def _where_seen(weights: Float[Tensor, "H S N"], values: Float[Tensor, "H S"]) -> HeadSums:
    """Sums over the queries that see a key."""
    return mean_over_queries(torch.where(weights.sum(-1) > 0, values, torch.nan))


@_of_output(
    "Effective number of tokens in the output",
    formula="(Σ a)² / Σ a², a_j = ‖o − o without token j‖",
    claim="S15, N15, N25",
    unit="tokens",
)
def output_effective_tokens(window: HeadWindow) -> HeadSums:
    """On how many tokens does the head's output depend, measured by leaving out one at a time?"""
    weights, values, _ = _parts(window)
    output = weights @ values
    # The output without token j is (o − p_j v_j)/(1 − p_j), so that a_j = p_j ‖v_j − o‖/(1 − p_j).
    squared_distances = values.square().sum(-1)[:, None] - 2 * output @ values.mT + output.square().sum(-1)[..., None]
    weight_of_others = 1 - weights
    changes = weights * squared_distances.clamp_min(0).sqrt() / weight_of_others.clamp_min(1e-9)
    sum_of_squares = changes.square().sum(-1)
    # Only rounding remains of the others' weight next to 1, or of a value's distance from an output that is equal to it.
    on_one_token = (weight_of_others < 1e-9).any(-1)
    all_equal = sum_of_squares <= 1e-18 * values.square().sum(-1).mean(-1)[:, None]
    effective = changes.sum(-1).square() / sum_of_squares
    return _where_seen(weights, torch.where(on_one_token | all_equal, torch.nan, effective))


@_of_output("Fisher information along the queries", formula="E Var_p(β k·δ), δ = q' − q̄", claim="S10, N26", unit="nats")
def query_fisher_information(window: HeadWindow) -> HeadSums:
    """How much do the weights change when the query moves by as much as queries differ (twice a KL divergence)?"""
    weights, _, along = _parts(window)
    mean = weights @ along
    return _where_seen(weights, (weights @ along.square() - mean.square()).clamp_min(0).sum(-1))


@_of_output(
    "Local Lipschitz constant", formula="‖β Cov_p(v, k) Cov(q)^½‖₂ / (E‖v − v̄‖²)^½", claim="S10, N26", scale="positive"
)
def output_lipschitz(window: HeadWindow) -> HeadSums:
    """How far does the output move, relative to the values' spread, for one spread of the query in the worst direction?"""
    weights, values, along = _parts(window)
    start = torch.randn(along.shape[-1], generator=window.generator(), dtype=torch.float64).to(along)
    vector = start.expand(*weights.shape[:2], -1)
    singular_value = torch.zeros(weights.shape[:2]).to(along)
    for _ in range(_STEPS):
        # Power iteration on AᵀA, A the derivative of the output along the steps.
        vector = vector / vector.norm(dim=-1, keepdim=True).clamp_min(1e-300)
        output = _covariance_weights(weights, vector @ along.mT) @ values
        singular_value = output.norm(dim=-1)
        vector = _covariance_weights(weights, output @ values.mT) @ along
    return _where_seen(weights, singular_value / values.square().sum(-1).mean(-1).sqrt()[:, None])


def _covariance_weights(weights: Float[Tensor, "H S N"], numbers: Float[Tensor, "H S N"]) -> Float[Tensor, "H S N"]:
    """c_j such that Cov_p(numbers, y) = Σ_j c_j y_j for any numbers y of the keys."""
    return weights * (numbers - (weights * numbers).sum(-1, keepdim=True))


class UncertaintyGroup(HeadWindowGroup):
    """On how many tokens a head's output depends, and how it moves with the query."""

    name = UNCERTAINTY
    register = REGISTER
