"""The divergence of two language models at each token, over the whole vocabulary and without either's logits.

KL(p ‖ q) is the Bregman divergence of the log-partition between two points of it (X1): here the two models' logits. It is
summed as Σ_v p_v·φ(−c_v) with c = log p − log q and φ(x) = eˣ − 1 − x, whose terms are all ≥ 0: so models that hardly differ
keep the digits of their divergence, which a difference of means loses.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import forward_ad

from massieu.foundation.arguments import check_one_device, number, whole_number
from massieu.foundation.numerics import exp_
from massieu.foundation.transforms import (
    in_functorch,
    in_nested_forward_mode,
    may_be_differentiated,
    without_autocast,
)
from massieu.ops import reference
from massieu.ops.differentiable import BlockSum, recomputed
from massieu.ops.linear_scores import check_places, index_tensor, values_are_known
from massieu.ops.score_sums import LOWEST
from massieu.ops.score_tiles import ScorePlan, multiplied, product
from massieu.ops.shapes import at_once, slices, working_dtype
from massieu.ops.vocabulary import check_heads, checked_softcap

BLOCK_PAIRS = 13 << 20
"""Logits of a model that the forward pass holds at once on the CPU; `at_once` says how many on a device."""
PART_PAIRS = 1 << 17
"""Logits of a model that the passes over a block or a tile go through together on the CPU: 512 KiB in float32."""

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
    target: Int[Tensor, "*lead"] | None = None,
    ignore_index: int = -100,
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
        target: the hidden's leading shape, integers in 0 … V − 1, or `ignore_index`: which tokens count. The sums are over
            all words, so that which word a target names makes no difference.
        ignore_index: tokens with this target, such as a prompt's or padding, get zeros and no gradient.

    Each term of either sum is at least 0, and 0 for equal logits: models that differ by little keep the digits that their
    logits have. Logits that are rounded by δ and differ by c make a divergence near c²/2 that is off by 2δ/c of itself, and
    by δ² in all. A sum of p·(log p − log q) in the same precision is off by δ, at any c.

    A word that q alone hides makes KL(p ‖ q) infinite, its gradients not finite, and adds p's share to KL(q ‖ p), as the
    limit has it. Words that both hide count for nothing. A token of which a model hides every word, or with a NaN, gets NaN.

    Differentiable in all tensors any number of times, forwards too, under `torch.func` and `torch.compile`; gradients of
    first order by tiles of logits that are computed again, all others and compiled code by plain operations in blocks of
    tokens. Eight matrix products where all logits take six, and no memory in tokens × words. Results are float64 for
    float64 and float32 for every other dtype. On the CPU tokens that are ignored are not computed; elsewhere, and in
    compiled code and transforms, their hidden states count as 0.

    Raises:
        TypeError: not a tensor, not floating-point or not integers, dtypes of one model that differ, an option of another
            type.
        ValueError: shapes or devices that do not fit (both are named), an option out of range, an `ignore_index` without
            targets; on the CPU a target out of range (elsewhere, compiled, or in a transform it counts).

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
    whole_number("ignore_index", ignore_index, least=-(1 << 63))
    if target is None and ignore_index != -100:
        raise ValueError(f"ignore_index is for targets, got {ignore_index} and no target")
    words = None if target is None else index_tensor("target", target, lead, hidden=hidden).reshape(-1)
    caps = checked_softcap(softcap, hidden), checked_softcap(other_softcap, other_hidden)
    warmth = float(number("temperature", temperature, above=0))
    dtype = torch.promote_types(working_dtype(hidden), working_dtype(other_hidden))
    rows = hidden.reshape(-1, hidden.shape[-1])
    other_rows = other_hidden.reshape(-1, other_hidden.shape[-1])
    options = _Options(dtype, warmth, *caps)

    def divergences(rows: Tensor, other_rows: Tensor) -> Results:
        return _differentiable(rows, weight, bias, other_rows, other_weight, other_bias, options=options)

    with without_autocast(hidden.device):
        if words is None:
            numbers = divergences(rows, other_rows)
        elif values_are_known(words):
            counted = words != ignore_index
            check_places("target", words[counted], len(weight), f" or be ignore_index, {ignore_index}")
            chosen = counted.nonzero().squeeze(1)
            of_chosen = divergences(rows[chosen], other_rows[chosen])
            numbers = tuple(part.new_zeros(len(words)).index_copy(0, chosen, part) for part in of_chosen)
        else:
            # So that nothing of a token that does not count, NaN neither, meets what others share.
            ignored = words == ignore_index
            shown, other_shown = (part.masked_fill(ignored.unsqueeze(1), 0.0) for part in (rows, other_rows))
            numbers = tuple(part.masked_fill(ignored, 0.0) for part in divergences(shown, other_shown))
    return TokenDivergenceResult(*(part.reshape(lead) for part in numbers))


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
    # No derivative goes through the quick pass: `BlockSum` has them all.
    primals = [None if tensor is None else forward_ad.unpack_dual(tensor).primal for tensor in tensors]
    with torch.no_grad():
        normalisers, known = _forward(options, *primals)
    if not may_be_differentiated(*(tensor for tensor in tensors if tensor is not None)):
        return known
    learned = [any(part is not None and part.requires_grad for part in model) for model in (tensors[:3], tensors[3:])]
    return BlockSum(plain, gradient=partial(_backward, options, normalisers, known, learned))(*tensors, known=known)


# --- by blocks of tokens and by tiles of logits ----------------------------------------------------------------------


class _Normalisers(NamedTuple):
    """log Z of both models in two parts, as their sum may have lost the digits of the smaller one; a number for each token."""

    peak: Tensor
    """The largest logit; NaN where every word is hidden, as no law is there."""
    other_peak: Tensor
    surplus: Tensor
    """log Z less the largest logit."""
    other_surplus: Tensor


def _forward(options: _Options, *tensors: Tensor | None) -> tuple[_Normalisers, Results]:
    """Both divergences of every token, from one product with each head.

    A block holds the logits of some tokens over all words: it yields log Z, and the terms that need it.
    """
    plans = options.plans(*tensors)
    length, count = len(plans[0].row), len(plans[0].column)
    device = plans[0].row.device
    numbers = torch.zeros(6, length, dtype=options.dtype, device=device)
    # Blocks of about one height: a low one would read both heads for a few tokens.
    most = max(1, at_once(BLOCK_PAIRS, device) // count)
    height = math.ceil(length / max(1, math.ceil(length / most)))
    block = torch.empty(2, height, count, dtype=options.dtype, device=device)
    for rows in slices(length, max(1, height)):
        scores = block[:, : rows.stop - rows.start]
        for plan, model_scores in zip(plans, scores, strict=True):
            for columns, tile_rows, _, tile in plan._replace(row=plan.row[rows]).tiles():
                model_scores[tile_rows, columns] = _logits_(plan, tile, columns)
        for part in _parts(scores[0]):
            numbers[:, rows][:, part] = _divergences_(*scores[:, part])
    *normalisers, divergence, reverse_divergence = numbers
    hidden, other_hidden = (_hidden_words(plan) for plan in plans)
    divergence += _infinite_if(other_hidden & ~hidden, divergence)
    reverse_divergence += _infinite_if(hidden & ~other_hidden, divergence)
    return _Normalisers(*normalisers), (divergence, reverse_divergence)


def _parts(scores: Tensor) -> Iterator[slice]:
    """Rows whose numbers stay in the caches during the many passes over them."""
    return slices(len(scores), max(1, at_once(PART_PAIRS, scores.device) // scores.shape[1]))


def _logits_(plan: ScorePlan, scores: Tensor, columns: slice) -> Tensor:
    """In place, of a tile of products; `LOWEST` where a word is hidden, so that no difference of two is NaN."""
    if plan.bias is not None:
        scores += plan.bias[columns]
    plan.cap_(scores, columns)
    return scores.clamp_min_(LOWEST)


def _hidden_words(plan: ScorePlan) -> Tensor:
    if plan.bias is None:
        return torch.zeros(len(plan.column), dtype=torch.bool, device=plan.row.device)
    return plan.bias == -torch.inf


def _infinite_if(words: Tensor, like: Tensor) -> Tensor:
    """Infinity if there is such a word, else 0."""
    return torch.where(words.any(), like.new_full((), torch.inf), 0.0)


def _divergences_(scores: Tensor, other_scores: Tensor) -> Tensor:
    """`_Normalisers`, KL(p ‖ q) and KL(q ‖ p), from all logits of some tokens, which are overwritten.

    With c = log p − log q the terms are p·φ(−c) and q·φ(c). Where |c| ≤ 1 they are p·c²·u and p·c²·(1 − u·(1 + c)) with
    φ(−c) = c²·u, since q = p·(1 − c + c²·u); beyond, p·c − p + q and p − q − q·c lose no digits. Both are computed and
    multiplied by 1 or 0, as `torch.where` costs many times as much.
    """
    peak, other_peak = _peak(scores), _peak(other_scores)
    c = scores.sub_(peak.unsqueeze(1)) - other_scores.sub_(other_peak.unsqueeze(1))
    p, q = exp_(scores), exp_(other_scores)
    total, other_total = p.sum(1), q.sum(1)
    surplus, other_surplus = total.log(), other_total.log()
    p.div_(total.unsqueeze(1))
    q.div_(other_total.unsqueeze(1))
    c.sub_((surplus - other_surplus).unsqueeze(1))
    near_c = c.clamp(-1, 1)
    is_near = torch.eq(c, near_c, out=torch.empty_like(c))
    # p and q split into the words near to each other and the rest.
    near_p = p * is_near
    far_p = p.sub_(near_p)
    far_q = q.sub_(is_near.mul_(q))
    # (p·c²)·u, and (p·c²)·(1 − u·(1 + c)).
    square = near_p.mul_(near_c).mul_(near_c)
    forward = square * _halved_curvature(-near_c)
    backward = square.sub_(forward).sub_(near_c.mul_(forward))
    excess = far_p - far_q
    forward.add_(far_p.mul_(c)).sub_(excess)
    backward.add_(excess).sub_(far_q.mul_(c))
    return torch.stack([peak, other_peak, surplus, other_surplus, forward.sum(1), backward.sum(1)])


def _peak(scores: Tensor) -> Tensor:
    """The largest of each row; NaN where every word is hidden."""
    peak = scores.amax(1)
    return peak.masked_fill(peak <= LOWEST, torch.nan)


@torch.no_grad()
def _backward(
    options: _Options,
    normalisers: _Normalisers,
    divergences: Results,
    learned: Sequence[bool],
    *arguments: Tensor | None,
) -> Results:
    """Gradients from the cotangents g of KL(p ‖ q) and h of KL(q ‖ p).

    Of p's logits g·p·(c − KL(p ‖ q)) + h·(p − q), and of q's the same with both models' roles exchanged. A model that is
    not learned, such as a reference policy, gets zeros.
    """
    tensors, cotangents = arguments[:6], arguments[6:]
    plans = options.plans(*tensors)
    grads = [torch.zeros_like(normalisers.peak) if grad is None else grad for grad in cotangents]
    # An infinite divergence that nobody asks for has no part in the gradient.
    means = [mean.masked_fill(grad == 0, 0.0) for mean, grad in zip(divergences, grads, strict=True)]
    of_rows = torch.stack([*normalisers, *means, *grads]).unsqueeze(2)
    like = {"dtype": options.dtype, "device": normalisers.peak.device}
    sums = [
        tuple(
            None if part is None else torch.zeros(part.shape if wanted else (1,) * part.ndim, **like).expand_as(part)
            for part in plan[:3]
        )
        for plan, wanted in zip(plans, learned, strict=True)
    ]
    for both in zip(*(plan.tiles() for plan in plans), strict=True):
        (columns, rows, _, scores), (_, _, _, other_scores) = both
        for part in _parts(scores):
            _score_gradients_(plans, columns, scores[part], other_scores[part], of_rows[:, rows][:, part])
        for plan, (_, _, keys, change), (row, column, bias), wanted in zip(plans, both, sums, learned, strict=True):
            if not wanted:
                continue
            if bias is not None:
                bias[columns] += change.sum(0)
            change = change if plan.scale == 1 else change.mul_(plan.scale)
            change = change.to(plan.row.dtype)
            assert row is not None and column is not None
            _add_product_(row[rows], change, keys)
            _add_product_(column[columns], change.mT, plan.row[rows])
    gradients = []
    for (row, column, bias), plan in zip(sums, plans, strict=True):
        gradients += [row, column, None if bias is None else bias * plan.scale]
    return tuple(
        gradient.to(tensor.dtype)
        for gradient, tensor in zip(gradients, tensors, strict=True)
        if tensor is not None and gradient is not None
    )


def _score_gradients_(
    plans: tuple[ScorePlan, ScorePlan], columns: slice, scores: Tensor, other_scores: Tensor, of_rows: Tensor
) -> None:
    """Gradients of the logits before their soft cap, in place of a tile of both models' products.

    Args:
        of_rows: (8, rows, 1): `_Normalisers`, KL(p ‖ q) and KL(q ‖ p), and the cotangents of these.
    """
    peak, other_peak, surplus, other_surplus, mean, other_mean, grad, other_grad = of_rows
    _logits_(plans[0], scores, columns)
    _logits_(plans[1], other_scores, columns)
    slope, other_slope = _slope(plans[0], scores), _slope(plans[1], other_scores)
    c = (scores.sub_(peak) - other_scores.sub_(other_peak)).sub_(surplus - other_surplus)
    p, q = exp_(scores.sub_(surplus)), exp_(other_scores.sub_(other_surplus))
    # p − q with the digits that p and q do not have in common: the larger one times ±(1 − exp(−|c|)).
    difference = c.abs().neg_().expm1_().copysign_(c).mul_(torch.maximum(p, q))
    p.mul_((c - mean).mul_(grad)).add_(difference * other_grad)
    q.mul_(c.add_(other_mean).mul_(-other_grad)).sub_(difference.mul_(grad))
    if slope is not None:
        p.mul_(slope)
    if other_slope is not None:
        q.mul_(other_slope)


def _slope(plan: ScorePlan, scores: Tensor) -> Tensor | None:
    """Of the soft cap, from the scores that it has bent."""
    if plan.softcap is None:
        return None
    return (scores / plan.softcap).square_().neg_().add_(1).clamp_min_(0)


def _add_product_(total: Tensor, one: Tensor, other: Tensor) -> None:
    if one.dtype == total.dtype:
        total.addmm_(one, other)
    else:
        total += product(one, other)


# --- the terms -------------------------------------------------------------------------------------------------------


def _terms_of(c: Tensor, p: Tensor, q: Tensor, no_p: Tensor, no_q: Tensor) -> tuple[Tensor, Tensor]:
    """The same from c = log p − log q, 0 where either hides the word, and from which words each hides."""
    near, close = c.abs() < 1, c.clamp(-1, 1)
    forward = torch.where(near, p * _curvature(-close), p * c - p + q)
    backward = torch.where(near, q * _curvature(close), p - q - q * c)
    forward = torch.where(no_p, q, forward).masked_fill(no_q & ~no_p, torch.inf)
    return forward, torch.where(no_q, p, backward).masked_fill(no_p & ~no_q, torch.inf)


def _curvature(x: Tensor) -> Tensor:
    """φ(x) = eˣ − 1 − x, of |x| ≤ 1."""
    return x * x * _halved_curvature(x)


def _halved_curvature(x: Tensor) -> Tensor:
    """φ(x)/x² = 1/2·(1 + x/3·(1 + x/4·(1 + …))), of |x| ≤ 1, to the last digits of the dtype."""
    half = x.new_full((), 0.5)
    series, last = half, 18 if x.dtype == torch.float64 else 11
    for order in range(last, 2, -1):
        series = torch.addcmul(half, series, x, value=1 / order)
    return series


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
