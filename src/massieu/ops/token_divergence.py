"""The divergence of two language models at each token, over the whole vocabulary and without either's logits.

KL(p ‖ q) is the Bregman divergence of the log-partition between two points of it (X1): here the two models' logits. It is
summed as Σ_v p_v·φ(−c_v) with c = log p − log q and φ(x) = eˣ − 1 − x, whose terms are all ≥ 0: so models that hardly differ
keep the digits of their divergence, which a difference of means loses.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import check_one_device, number
from massieu.foundation.numerics import exp_
from massieu.foundation.transforms import (
    in_functorch,
    in_nested_forward_mode,
    may_be_differentiated,
    without_autocast,
)
from massieu.ops import reference, score_tiles
from massieu.ops.differentiable import BlockSum, recomputed
from massieu.ops.score_tiles import ScorePlan, multiplied, product
from massieu.ops.shapes import at_once, slices, working_dtype
from massieu.ops.vocabulary import check_heads, checked_softcap

NEAR = 0.1
"""|x| up to which φ(x) is a series; beyond, eˣ − 1 − x keeps all but a few units of its last digit."""

Results = tuple[Tensor, ...]


class TokenDivergenceResult(NamedTuple):
    """What `token_divergence` returns, a number for each token, in nats and at least 0."""

    divergence: Float[Tensor, "*lead"]
    """KL(p ‖ q) = Σ_v p_v·(log p_v − log q_v)."""
    reverse_divergence: Float[Tensor, "*lead"]
    """KL(q ‖ p)."""


def token_divergence(
    hidden: Float[Tensor, "*lead D"],
    weight: Float[Tensor, "V D"],
    other_hidden: Float[Tensor, "*lead E"],
    other_weight: Float[Tensor, "V E"],
    *,
    bias: Float[Tensor, "V"] | None = None,
    other_bias: Float[Tensor, "V"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    other_softcap: float | None = None,
) -> TokenDivergenceResult:
    """KL(p ‖ q) and KL(q ‖ p) of two models' next words at each token, exact over the vocabulary, without their logits.

    p is the softmax of (hidden·weight_v + bias_v)/temperature, with a soft cap c that of
    c·tanh((hidden·weight_v + bias_v)/c)/temperature; q is that of the other model. This is what policy optimisation
    estimates from the words that were drawn, and what distillation minimises: the Bregman divergence of log Z (X1).

    Args:
        hidden, other_hidden: (*lead, D) and (*lead, E), of one leading shape: packed rows are as good as a batch.
        weight, other_weight, bias, other_bias: over the same V words. A bias of −inf hides a word.
        temperature: above 0, of both.
        softcap, other_softcap: the bound of the logits, above 0, or None.

    Each term of either sum is at least 0, and 0 for equal logits: models that differ by little keep the digits that their
    logits have. A word that q alone hides makes KL(p ‖ q) infinite, its gradients not finite, and adds p's share to
    KL(q ‖ p), as the limit has it. Words that both hide count for nothing. A token of which a model hides every word, or with
    a NaN, gets NaN.

    Differentiable in all tensors any number of times, forwards too, under `torch.func` and `torch.compile`; gradients of
    first order by tiles of logits that are computed again, all others and compiled code by plain operations in blocks of
    tokens. No memory in tokens × words. Results are float64 for float64 and float32 for every other dtype.

    Raises:
        TypeError: not a tensor, not floating-point, dtypes of one model that differ, an option of another type.
        ValueError: shapes or devices that do not fit (both are named), an option out of range.

    Example:
        >>> import torch
        >>> from massieu import ops
        >>> uniform, certain = torch.zeros(4, 1), torch.tensor([[0.0], [-99.0], [-99.0], [-99.0]])
        >>> found = ops.token_divergence(torch.ones(1, 1), certain, torch.ones(1, 1), uniform)
        >>> round(found.divergence.exp().item(), 3)  # log 4
        4.0
    """
    check_heads(hidden, weight, bias)
    check_heads(other_hidden, other_weight, other_bias, "other_")
    check_one_device(hidden=hidden, other_hidden=other_hidden)
    lead = tuple(hidden.shape[:-1])
    if tuple(other_hidden.shape[:-1]) != lead:
        raise ValueError(
            f"hidden and other_hidden must have one leading shape, got {lead} and {tuple(other_hidden.shape[:-1])}"
        )
    if len(weight) != len(other_weight):
        raise ValueError(
            f"weight and other_weight must be of the same words, got {len(weight)} and {len(other_weight)} of them"
        )
    caps = checked_softcap(softcap, hidden), checked_softcap(other_softcap, other_hidden)
    warmth = float(number("temperature", temperature, above=0))
    dtype = torch.promote_types(working_dtype(hidden), working_dtype(other_hidden))
    row, other_row = (part.reshape(-1, part.shape[-1]) for part in (hidden, other_hidden))
    flat = row, weight, bias, other_row, other_weight, other_bias
    with without_autocast(hidden.device):
        found = _differentiable(*flat, options=_Options(dtype, warmth, *caps))
    return TokenDivergenceResult(*(part.reshape(lead) for part in found))


class _Options(NamedTuple):
    dtype: torch.dtype
    temperature: float
    softcap: float | None
    other_softcap: float | None

    def plans(self, *tensors: Tensor | None) -> tuple[ScorePlan, ScorePlan]:
        """Both models' logits, divided by the temperature."""
        return self._plan(self.softcap, *tensors[:3]), self._plan(self.other_softcap, *tensors[3:])

    def _plan(self, softcap: float | None, row: Tensor | None, column: Tensor | None, bias: Tensor | None) -> ScorePlan:
        assert row is not None and column is not None
        row, scale = multiplied(row, column), 1 / self.temperature
        row = row if row.dtype == column.dtype == torch.bfloat16 else row.to(self.dtype)
        return ScorePlan(
            row,
            column,
            None if bias is None else bias.to(self.dtype) * scale,
            torch.zeros(len(row), dtype=torch.long, device=row.device),
            bias_in_score=True,
            softcap=None if softcap is None else softcap * scale,
            scale=scale,
        )


def _differentiable(*tensors: Tensor | None, options: _Options) -> Results:
    plain = partial(_plain, options)
    if torch.compiler.is_compiling() or in_functorch() or in_nested_forward_mode():
        return plain(*tensors)
    with torch.no_grad():
        levels = _levels(options.plans(*tensors), options.dtype)
        known = _forward(options, levels, *tensors)
    if not may_be_differentiated(*(tensor for tensor in tensors if tensor is not None)):
        return known
    learned = [any(part is not None and part.requires_grad for part in model) for model in (tensors[:3], tensors[3:])]
    return BlockSum(plain, gradient=partial(_backward, options, levels, known, learned))(*tensors, known=known)


# --- by tiles --------------------------------------------------------------------------------------------------------


class _Tile(NamedTuple):
    """Logits less log Z of both models; where a word is hidden, −inf."""

    rows: slice
    columns: slice
    keys: tuple[Tensor, Tensor]
    logs: tuple[Tensor, Tensor]
    slopes: tuple[Tensor | None, Tensor | None]
    """Of the soft caps."""


def _tiles(plans: tuple[ScorePlan, ScorePlan], levels: Sequence[Tensor], slopes: bool) -> Iterator[_Tile]:
    for both in zip(*(plan.tiles() for plan in plans), strict=True):
        bent: list[Tensor | None] = []
        for plan, level, (columns, rows, _, scores) in zip(plans, levels, both, strict=True):
            if plan.bias is not None:
                scores += plan.bias[columns]
            plan.cap_(scores, columns)
            wanted = slopes and plan.softcap is not None
            bent.append((scores / plan.softcap).square_().neg_().add_(1).clamp_min_(0) if wanted else None)
            scores.sub_(level[rows].unsqueeze(1))
        (columns, rows, key, log_p), (_, _, other_key, log_q) = both
        yield _Tile(rows, columns, (key, other_key), (log_p, log_q), (bent[0], bent[1]))


def _levels(plans: Sequence[ScorePlan], dtype: torch.dtype) -> list[Tensor]:
    """log Z of both; NaN where every word is hidden, as no law is there."""
    levels = [score_tiles.forward(*plan)[1].to(dtype) for plan in plans]
    return [level.masked_fill(level == -torch.inf, torch.nan) for level in levels]


def _forward(options: _Options, levels: Sequence[Tensor], *tensors: Tensor | None) -> Results:
    plans = options.plans(*tensors)
    totals = torch.zeros_like(levels[0]), torch.zeros_like(levels[0])
    for tile in _tiles(plans, levels, slopes=False):
        for total, terms in zip(totals, _terms(*tile.logs), strict=True):
            total[tile.rows] += terms.sum(1)
    return totals


@torch.no_grad()
def _backward(
    options: _Options, levels: Sequence[Tensor], found: Results, learned: Sequence[bool], *arguments: Tensor | None
) -> Results:
    """Gradients from the cotangents g of KL(p ‖ q) and h of KL(q ‖ p).

    Of p's logits g·p·(c − KL(p ‖ q)) + h·(p − q), and of q's the same with both models' roles exchanged. A model that is
    not learned, such as a reference policy, gets zeros.
    """
    tensors, cotangents = arguments[:6], arguments[6:]
    plans = options.plans(*tensors)
    both = [torch.zeros_like(levels[0]) if one is None else one for one in cotangents]
    # An infinite divergence that nobody asks for has no part in the gradient.
    means = [mean.masked_fill(grad == 0, 0.0).unsqueeze(1) for mean, grad in zip(found, both, strict=True)]
    grads = [grad.unsqueeze(1) for grad in both]
    like = {"dtype": options.dtype, "device": levels[0].device}
    sums = [
        tuple(
            None if part is None else torch.zeros(part.shape if wanted else (1,) * part.ndim, **like).expand_as(part)
            for part in plan[:3]
        )
        for plan, wanted in zip(plans, learned, strict=True)
    ]
    for tile in _tiles(plans, levels, slopes=True):
        rows, columns = tile.rows, tile.columns
        log_ratio, (p, q) = _log_ratio(*tile.logs), (exp_(log.clone()) for log in tile.logs)
        difference = _difference(p, q, log_ratio)
        changes = (
            grads[0][rows] * p * (log_ratio - means[0][rows]) + grads[1][rows] * difference,
            grads[1][rows] * q * (-log_ratio - means[1][rows]) - grads[0][rows] * difference,
        )
        for plan, keys, slope, change, (row, column, bias), wanted in zip(
            plans, tile.keys, tile.slopes, changes, sums, learned, strict=True
        ):
            if not wanted:
                continue
            change = change if slope is None else change.mul_(slope)
            if bias is not None:
                bias[columns] += change.sum(0)
            change = change.mul_(plan.scale).to(plan.row.dtype)
            assert row is not None and column is not None
            row[rows] += product(change, keys)
            column[columns] += product(change.mT, plan.row[rows])
    gradients = []
    for (row, column, bias), plan in zip(sums, plans, strict=True):
        gradients += [row, column, None if bias is None else bias * plan.scale]
    return tuple(
        gradient.to(tensor.dtype)
        for gradient, tensor in zip(gradients, tensors, strict=True)
        if tensor is not None and gradient is not None
    )


def _log_ratio(log_p: Tensor, log_q: Tensor) -> Tensor:
    """log p − log q; 0 where either hides the word."""
    ratio = log_p - log_q
    return ratio.masked_fill_((log_p == -torch.inf) | (log_q == -torch.inf), 0.0)


def _difference(p: Tensor, q: Tensor, log_ratio: Tensor) -> Tensor:
    """p − q, with the digits that p and q do not have in common."""
    near = (log_ratio.abs() < 1) & (log_ratio != 0)
    return torch.where(near, -p * torch.expm1(-log_ratio.clamp(-1, 1)), p - q)


def _terms(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """The terms of both divergences."""
    hidden = log_p == -torch.inf, log_q == -torch.inf
    return _terms_of(_log_ratio(log_p, log_q), log_p.exp(), log_q.exp(), *hidden)


def _terms_of(c: Tensor, p: Tensor, q: Tensor, no_p: Tensor, no_q: Tensor) -> tuple[Tensor, Tensor]:
    """The same from c = log p − log q, 0 where either hides the word, and from which words each hides."""
    near, close = c.abs() < 1, c.clamp(-1, 1)
    forward = torch.where(near, p * _curvature(-close), p * c - p + q)
    backward = torch.where(near, q * _curvature(close), p - q - q * c)
    forward = torch.where(no_p, q, forward).masked_fill(no_q & ~no_p, torch.inf)
    return forward, torch.where(no_q, p, backward).masked_fill(no_p & ~no_q, torch.inf)


def _curvature(x: Tensor) -> Tensor:
    """φ(x) = eˣ − 1 − x, of |x| ≤ 1."""
    series = x / 9 + 1
    for order in range(8, 2, -1):
        series = series * x / order + 1
    return torch.where(x.abs() < NEAR, series * x * x / 2, torch.expm1(x) - x)


# --- in plain operations ---------------------------------------------------------------------------------------------


def _plain(options: _Options, *tensors: Tensor | None) -> Results:
    """The definition, in blocks of tokens."""
    row, column, _, other, *_ = tensors
    assert row is not None and column is not None and other is not None
    size = max(1, at_once(reference.BLOCK_PAIRS, row.device) // len(column))
    parts = [
        recomputed(partial(_plain_block, options), row[rows], *tensors[1:3], other[rows], *tensors[4:])
        for rows in list(slices(len(row), size)) or [slice(0, 0)]
    ]
    return tuple(torch.cat(results) for results in zip(*parts, strict=True))


def _plain_block(options: _Options, *tensors: Tensor | None) -> Results:
    logs, hidden = [], []
    for plan in options.plans(*tensors):
        scores = plan.row.to(options.dtype) @ plan.column.to(options.dtype).mT * plan.scale
        none = torch.zeros_like(scores, dtype=torch.bool)
        if plan.bias is not None:
            none = (plan.bias == -torch.inf).expand_as(scores)
            scores = scores + plan.bias.masked_fill(plan.bias == -torch.inf, 0.0)
        if plan.softcap is not None:
            scores = plan.softcap * torch.tanh(scores / plan.softcap)
        level = reference.softmax(scores, torch.where(none, -torch.inf, 0.0))[2]
        level = level.masked_fill(level == -torch.inf, torch.nan)
        logs.append(scores - level.unsqueeze(1))
        hidden.append(none)
    (log_p, log_q), (no_p, no_q) = logs, hidden
    c = torch.where(no_p | no_q, 0.0, log_p - log_q)
    p, q = (torch.where(none, 0.0, log.exp()) for log, none in zip(logs, hidden, strict=True))
    forward, backward = _terms_of(c, p, q, no_p, no_q)
    return forward.sum(1), backward.sum(1)
